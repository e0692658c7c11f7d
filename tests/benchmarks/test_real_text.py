"""The benchmark on real text, run dry on tiny weights: ids, bookkeeping, and the check of outputs."""

import gc
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from specdial.engine.history import HistorySpec
from specdial.engine.loop import Decoding
from specdial.engine.sequences import Sequences
from specdial.policies.errors import UserError
from specdial.policies.schema import plain_policy

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def prefilled(tiny_model):
    decoder = tiny_model("qwen2").decoder

    def make(history=None, batch=3):
        s = Sequences(decoder, 140, batch, history=history, backend="reference")
        s.prefill([[(7 * i + 3 * b) % 256 for i in range(96 + b)] for b in range(batch)], [10] * batch)
        return s

    return make


def test_dry_run(script, tiny_checkpoint, tmp_path, capsys):
    prompts, policy = tmp_path / "prompts.npz", ROOT / "policies" / "builtin" / "sparse_self_entropy.yaml"
    model = str(tiny_checkpoint("qwen2"))
    sizes = ["--contexts", "400", "--new-tokens", "12"]
    script("prompts").main(["--model", model, "--out", str(prompts), "--count", "2", *sizes])
    command = ["--model", model, "--dry", "--prompts", str(prompts), "--streaming", "64", "--policy", str(policy)]
    records = script("real_text").main([*command, "--workloads", "novel", "summary", *sizes])
    by_id = {r["id"]: r for r in records}
    names = ("k3-c64-p1", "k3-c64-p16", "sparse_self_entropy")
    wanted = {
        *(f"dry-E3-{w}-0k-B{b}" for w in ("novel", "summary") for b in (1, 2)),
        *(f"dry-E7-{w}-0k-B{b}-stream-k3-c64" for w in ("novel", "summary") for b in (1, 2)),
        *(f"dry-E6-{w}-0k-B1-{n}" for w in ("novel", "summary") for n in names),
        *(f"dry-E4-{w}-0k-B2-{n}" for w in ("novel", "summary") for n in names),
    }
    assert set(by_id) == wanted
    for id, r in by_id.items():
        if "E3-" in id:
            assert r["sequences"] == 2
            assert r["one_row_mismatches"] == r["repeats_differing"] == 0
            assert (r["mean_accepted"], r["tokens_per_round"]) == (0, 1)
        else:
            assert r["lossless"]
            assert r["differing"] == r["differing_beyond_noise"] == 0
            assert r["noise"]["margin"]["max"] < 1e-3
            assert r["tokens_per_round"] <= r["mean_accepted"] + 1
            assert r["about"]["novels"] == ["shipped excerpt"]
    assert set(json.loads(capsys.readouterr().out.splitlines()[-1])) == wanted


def test_a_dry_run_cannot_be_written(script, tmp_path):
    with pytest.raises(SystemExit):
        script("real_text").main(["--model", "x", "--dry", "--out", str(tmp_path / "x.json")])


@pytest.mark.parametrize("spec", [HistorySpec(16, 1), HistorySpec(8, 16)])
def test_a_history_made_later_is_the_one_prefill_makes(script, prefilled, spec):
    got = script("_engine_bench").with_history(prefilled(), spec)
    want = prefilled(spec)
    torch.testing.assert_close(got.history.ring, want.history.ring, atol=1e-5, rtol=1e-4)
    assert got.tokens == want.tokens
    assert got.remaining.tolist() == want.remaining.tolist()


def test_parts_of_a_batch_decode_as_they_do_in_it(script, prefilled):
    bench, plain = script("_engine_bench"), script("real_text").plain_policy()
    s = prefilled()
    whole = bench.decode([s], plain)
    few = bench.decode([bench.part_of(s, 2)], plain)
    assert few.outputs == whole.outputs[:2]
    singles = [bench.part_of(s, 1, first) for first in range(3)]
    assert bench.decode(singles, plain).outputs == whole.outputs
    assert script("_lossless").plain_margins(singles, whole.outputs).mismatches == 0
    assert [len(o) for o in whole.outputs] == [10] * 3


def test_a_changed_output_is_told_from_rounding(script, prefilled):
    bench, lossless = script("_engine_bench"), script("_lossless")
    s = prefilled()
    plain = bench.decode([s], script("real_text").plain_policy()).outputs
    margins = lossless.plain_margins([s], plain)
    assert margins.mismatches == 0
    changed = [list(o) for o in plain]
    changed[1][4] = (changed[1][4] + 1) % 256
    margin = margins.at(1, 4)
    for limit, beyond in ((margin / 2, 1), (margin * 2, 0)):
        found = lossless.differences(changed, plain, margins, limit)
        assert (found["differing"], found["differing_beyond_noise"]) == (1, beyond)
        assert (found["largest_margins"][0]["sequence"], found["largest_margins"][0]["position"]) == (1, 4)
    shorter = [o[:-1] for o in plain]
    assert lossless.differences(shorter, plain, margins, 0.0)["differing"] == 3


def test_noise_sees_other_keys(script, prefilled):
    """The block pass is measured, not assumed: keys disturbed after the plain pass show up as noise."""
    bench, lossless = script("_engine_bench"), script("_lossless")
    s = bench.with_history(prefilled(), HistorySpec(16, 1))
    plain = bench.decode([s], script("real_text").plain_policy()).outputs
    margins = lossless.plain_margins([s], plain)
    assert lossless.noise([s], plain, margins, 4)["margin"]["max"] < 1e-3
    s.cache.k[:, :, :, :90] += 0.3
    assert lossless.noise([s], plain, margins, 4)["logit"]["max"] > 1e-3


def test_prompts_of_another_tokenizer_are_refused(script, tiny_checkpoint, tmp_path):
    prompts = script("prompts")
    path = tmp_path / "prompts.npz"
    tokenizer = prompts.tokenizer_of(str(tiny_checkpoint("qwen2")))
    sources = prompts.Sources(stride_tokens=200)
    ids = prompts.prompts_of("novel", tokenizer, sources, 300, 5, 8)
    assert ids.shape == (5, 300)
    prompts.write(path, tokenizer, {("novel", 300): ids}, {"stride_tokens": 200})
    back, about = prompts.read(path, tokenizer, "novel", 300)
    assert np.array_equal(back, ids)
    assert about["stride_tokens"] == 200
    with pytest.raises(UserError, match="has no prompts code-300"):
        prompts.read(path, tokenizer, "code", 300)
    tokenizer.digest = "other"
    with pytest.raises(UserError, match="another tokenizer"):
        prompts.read(path, tokenizer, "novel", 300)


def test_prompts_take_turns_between_novels(script, tiny_checkpoint, tmp_path):
    prompts = script("prompts")
    tokenizer = prompts.tokenizer_of(str(tiny_checkpoint("qwen2")))
    paths = [tmp_path / f"{word}.txt" for word in ("rain", "snow")]
    for path in paths:
        path.write_text("\n\n".join(f"{path.stem} fell on day {i}." for i in range(200)))
    sources = prompts.Sources(tuple(map(str, paths)), stride_tokens=100)
    texts = [tokenizer.decode(row.tolist()) for row in prompts.prompts_of("novel", tokenizer, sources, 300, 8, 8, 3)]
    assert ["rain" in text for text in texts] == [True, False, True, False, True, True, False, True]

    def days(chosen):
        return {line for text in chosen for line in re.findall("(?:rain|snow) fell on day [0-9]+[.]", text)}

    assert len(days(texts[:5])) < sum(len(days([text])) for text in texts[:5]), "they overlap"
    assert days(texts[:5]).isdisjoint(days(texts[5:]))


def test_a_longer_novel_gives_more_prompts(script, tiny_checkpoint, tmp_path):
    """As many more as it has places for one to start at, and both spread over all prompts."""
    prompts = script("prompts")
    tokenizer = prompts.tokenizer_of(str(tiny_checkpoint("qwen2")))
    for word, days in (("rain", 200), ("snow", 500)):
        (tmp_path / f"{word}.txt").write_text("\n\n".join(f"{word} fell on day {i}." for i in range(days)))
    paths = tuple(str(tmp_path / f"{word}.txt") for word in ("rain", "snow"))
    rain, snow = (len(tokenizer.encode(Path(path).read_text())) - 2 * 300 for path in paths)
    ids = prompts.prompts_of("novel", tokenizer, prompts.Sources(paths, stride_tokens=50), 300, 16, 8, held_out=6)
    rainy = ["rain" in tokenizer.decode(row.tolist()) for row in ids]
    assert abs(sum(rainy[:10]) - 10 * rain / (rain + snow)) < 1
    assert abs(sum(rainy[10:]) - 6 * rain / (rain + snow)) < 1
    assert any(rainy[:5])
    assert any(rainy[5:10])
    assert prompts._shares(7, [1, 1]) == [4, 3]
    assert prompts._shares(2, [0, 5, 0]) == [0, 2, 0]
    assert prompts._shares(5, [0, 0]) == [3, 2]  # for the workload to say what is too short


def test_the_gate_passes_on_the_references(script, tiny_model, capsys):
    script("_engine_bench").check(tiny_model("qwen3").config, "cpu", torch.float32)
    assert "logits" in capsys.readouterr().out


@pytest.mark.parametrize("padded", [False, True])
def test_the_gate_stops_where_decoding_or_verification_is_wrong(script, tiny_model, monkeypatch, padded):
    """Every token is taken for its neighbour."""
    forward = Sequences.forward_block

    def wrong(s, tokens, **given):
        block = forward(s, tokens, **given)
        return replace(block, logits=block.logits.roll(1, dims=-1)) if given["padded"] is padded else block

    monkeypatch.setattr(Sequences, "forward_block", wrong)
    with pytest.raises(SystemExit, match="relative error"):
        script("_engine_bench").check(tiny_model("qwen3").config, "cpu", torch.float32)


def test_no_garbage_is_collected_while_it_decodes(script, prefilled, monkeypatch):
    seen, finish = [], Decoding._finish
    monkeypatch.setattr(Decoding, "_finish", lambda *a: (seen.append(gc.isenabled()), finish(*a))[1])
    run = script("_engine_bench").decode([prefilled()], plain_policy())
    assert [len(output) for output in run.outputs] == [10, 10, 10]
    assert set(seen) == {False}
