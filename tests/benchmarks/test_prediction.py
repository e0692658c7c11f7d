"""The prediction benchmark: a dry run on tiny weights, its documents, and its arithmetic on made-up numbers."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from specdial.engine.job import Job
from specdial.engine.trace.reader import read_costs, read_trace
from specdial.engine.verbs import calibrate, record
from specdial.policies.errors import UserError
from specdial.policies.file import policy_digest
from specdial.simulator.lanes import read_record
from specdial.simulator.synthetic import Shape, write_trace


def test_dry_run_of_a_batch_with_float8_and_traces(script, tiny_checkpoint, tmp_path, capsys):
    model = str(tiny_checkpoint("qwen2", vocab_size=288))
    sizes = ["--train", "4", "--new-tokens", "32", "--batches", "2"]
    command = ["--dry", "--model", model, "--workloads", "novel", "--fp8", "--traces", str(tmp_path), *sizes]
    rows = {row["id"]: row for row in script("prediction").main(command)}
    assert set(rows) == {"dry-novel-300-B2", "dry-novel-300-B2-in-sample"}
    for row in rows.values():
        assert row["value"] == pytest.approx(row["median_pct"], abs=1e-4)
        assert row["median_pct"] <= row["worst_pct"]
        assert set(row["by_controller"]) == {"fixed", "entropy", "confidence", "rate", "fp8-fixed"}
        assert row["documents"] == {"train": 4, "test": 2}
        assert row["tokens"] == {"train": 128, "test": 64}
        assert row["outputs_differing_from_plain"] == 0
        assert 0 <= row["median_repeat_spread_pct"] <= row["repeat_spread_pct"]
        assert -1 <= row["rank_correlation"] <= 1
        for name, bar in row["bar"].items():
            assert bar["met"] == (row[name] <= bar["at_most"])
        full = row["full_batch"]
        assert full["bar"]["median_pct"]["met"] == (full["median_pct"] <= full["bar"]["median_pct"]["at_most"])
        assert "/" not in row["command"].removeprefix("python3 benchmarks/prediction.py")
    table = rows["dry-novel-300-B2-in-sample"]["policies"]
    dense = [line for line in table if not line[0].startswith("fp8")]
    assert len(dense) == 25
    assert len(table) == 31
    assert len({line[0] for line in table}) == 31
    assert table[0][0] == "plain"
    assert {line[1] for line in dense} == {"exact"}
    for *_, own_tokens, measured_tokens, _, _, own_full, measured_full in dense:
        assert own_tokens == measured_tokens  # dense replay is exact on a CPU: what is left is cost
        assert own_full == measured_full
    left = read_trace(tmp_path / f"{Path(model).stem}-novel-300")
    assert [d["split"] for d in left.meta["documents"]] == ["train"] * 3
    assert model not in json.dumps(left.meta)
    assert set(json.loads(capsys.readouterr().out.splitlines()[-1])) == set(rows)
    with pytest.raises(UserError, match="exists"):
        script("prediction").main(command)


def test_a_dry_run_cannot_be_written(script, tmp_path):
    with pytest.raises(SystemExit):
        script("prediction").main(["--dry", "--out", str(tmp_path / "x.json")])


def test_too_few_documents_for_a_batch_are_refused_before_anything_runs(script, tiny_checkpoint):
    with pytest.raises(UserError, match="batch 3"):
        script("prediction").main(["--dry", "--model", str(tiny_checkpoint("qwen2")), "--batches", "1", "3"])


def test_verbs_take_the_documents_of_a_ready_job(script, tiny_model, tmp_path):
    """record writes those documents; calibrate cuts the first one, and refuses one that is too short to time."""
    model, module = tiny_model("qwen2"), script("prediction_documents")
    spec = module.spec_of("novel", 200, 1, 1, 6)
    job = Job(model, "tiny", spec, module.built(spec, model.tokenizer)[1:])
    kv = {"budget": 40, "sink": 2, "recent": 8}
    settings = {"model": {"source": "of the job"}, "workload": {}}
    record.run({**settings, "policy": {}, "out": str(tmp_path / "trace")}, job)
    assert [d["doc"] for d in read_trace(tmp_path / "trace").meta["documents"]] == [1]
    ranges = {"ks": [0, 2], "budgets": [40], "draft_kv": kv, "repeats": 3}
    calibrate.run({**settings, **ranges, "contexts": [120, 200], "out": str(tmp_path / "costs")}, job)
    rows = read_costs(tmp_path / "costs").rows
    assert set(rows["context_tokens"].to_pylist()) == {120, 200}
    with pytest.raises(UserError, match="has 200 tokens, contexts go up to 201"):
        calibrate.run({**settings, **ranges, "contexts": [201], "out": str(tmp_path / "more")}, job)


def test_prompts_that_share_text_with_train_documents_are_not_tested_on(script):
    text = np.random.default_rng(0).integers(0, 1000, 6000)
    module = script("prediction_documents")
    near = np.stack([text[i * 200 : i * 200 + 600] for i in range(12)])  # and these 400, more than a run
    found = module.from_prompts(near, 4, 7, 8)
    assert sorted(d.name for d in found if d.split == "test") == [f"prompt-{i:03d}" for i in range(5, 12)]
    with pytest.raises(UserError, match="7 share no text with the first 4; 8 are needed"):
        module.from_prompts(near, 4, 8, 8)


def test_prompts_that_share_no_text_take_turns(script):
    text = np.random.default_rng(0).integers(0, 1000, 6000)
    ids = np.stack([text[i * 400 : i * 400 + 600] for i in range(12)])  # neighbours share 200 tokens, less than a run
    ids = np.insert(ids, 2, ids[1], axis=0)  # one that is there twice is left out
    documents = script("prediction_documents").from_prompts(ids, 6, 3, 8)
    of = {split: {d.name for d in documents if d.split == split} for split in ("train", "test")}
    assert of["train"] == {f"prompt-{i:03d}" for i in (0, 1, 4, 5, 7, 8)}
    assert of["test"] == {f"prompt-{i:03d}" for i in (3, 6, 9)}
    assert [d.split for d in documents] == ["train"] * 6 + ["test"] * 3
    assert [d.index for d in documents] == list(range(9))


def test_documents_in_a_row_come_from_all_over_the_text(script):
    """A batch, a part of a validation, the first few at batch 1: none of them is a chapter."""
    ids = np.arange(96 * 300).reshape(96, 300)  # no two share a token
    documents = script("prediction_documents").from_prompts(ids, 48, 48, 8)
    for split, count in itertools.product(("train", "test"), (4, 8, 16, 24)):
        places = np.array([int(d.name.removeprefix("prompt-")) for d in documents if d.split == split])
        for first in range(48 - count + 1):
            quarters = np.bincount(places[first : first + count] // 24, minlength=4)
            assert np.abs(quarters - count / 4).max() <= 1.5


def test_built_documents_share_no_text(script, tiny_model):
    module = script("prediction_documents")
    spec = module.spec_of("novel", 300, 5, 2, 8)
    documents = module.built(spec, tiny_model("qwen2").tokenizer)
    assert [d.split for d in documents] == ["train"] * 5 + ["test"] * 2
    claims = [(name, start, end, d.split) for d in documents for name, start, end in d.meta["source"]]
    for name, start, end, split in claims:
        assert not any(
            name == other and split != theirs and start < stop and begin < end for other, begin, stop, theirs in claims
        )


def test_the_grid_has_two_dozen_lossless_policies_all_different(script, tmp_path):
    module = script("prediction_policies")
    write_trace(tmp_path / "trace", Shape())
    drafts = read_record(read_trace(tmp_path / "trace"))
    policies = [*module.fixed(drafts), *module.adaptive(drafts, [0.21, 0.35])]
    assert len({policy_digest(p) for p in policies}) == len({p.name for p in policies}) == 24
    assert all(p.lossless and p.k_max <= module.K_MAX for p in policies)
    gammas = {p.draft_kv.budget: p.controller.gamma for p in policies if p.controller.kind == "rate"}
    assert gammas == {128: 0.21, 256: 0.35}


def made_up(name, k_max, speedup, tokens):
    measured = {"speedup": speedup, "low": speedup - 0.01, "high": speedup + 0.01, "tokens_per_round": tokens}
    return {"name": name, "policy_digest": name, "controller": "fixed", "k_max": k_max, "measured": measured}


def guess(speedup, tokens):
    return {"speedup": speedup, "tokens_per_round": tokens, "low": None, "high": None}


def test_errors_split_into_tokens_and_cost(script):
    rows = [made_up("plain", 0, 1.0, 1.0), made_up("a", 4, 2.0, 3.0), made_up("b", 4, 1.6, 2.0)]
    guesses = {"plain": guess(1.0, 1.0), "a": guess(1.5, 3.3), "b": guess(1.84, 2.0)}
    found = script("prediction_records").compared(rows, guesses)
    assert found["worst_pct"] == 25.0
    assert found["median_pct"] == 20.0
    assert found["tokens_per_round_error"] == {"median_pct": 5.0, "worst_pct": 10.0, "bias_pct": 5.0}
    worst_cost = 100 * (1 - 0.75 / 1.1)  # 1.5 / 2 = (1 + tokens error) (1 + cost error)
    assert found["cost_error"]["worst_pct"] == pytest.approx(worst_cost, abs=1e-3)
    assert found["regret_pct"] == pytest.approx(20.0)  # b was chosen, a is faster
    assert (found["chosen"], found["fastest"]) == ("b", "a")
    assert found["rank_correlation"] == 0.5
    assert found["intervals_overlap_frac"] == 0.0


def part(tokens, plain_us, us, rounds):
    """validate's rows of plain decoding and one policy, on one document."""
    rows = []
    for name, k_max, time_us, n in (("plain", 0, plain_us, tokens), ("a", 4, us, rounds)):
        row = made_up(name, k_max, plain_us / time_us, tokens / n)
        row["measured"] |= {"us_per_token": time_us / tokens, "tokens": tokens, "repeat_spread_frac": 0.0}
        row["measured"] |= {"documents_differing_from_plain": 0}
        rows.append(row)
    return {"policies": rows}


def test_parts_add_up_to_one_validation(script):
    """Ratios of sums, whatever order the parts' policies came in."""
    parts = [part(24, 240.0, 120.0, 6), part(24, 260.0, 330.0, 12)]
    parts[1]["policies"].reverse()
    plain, row = script("prediction_records").merged(parts)
    assert plain["measured"]["speedup"] == plain["measured"]["tokens_per_round"] == 1.0
    m = row["measured"]
    assert m["speedup"] == pytest.approx(500 / 450)
    assert (m["low"], m["high"]) == (pytest.approx(260 / 330), pytest.approx(2.0))
    assert (m["tokens"], m["tokens_per_round"]) == (48, pytest.approx(48 / 18))
    assert m["us_per_token"] == pytest.approx(450 / 48)
    assert script("prediction_records").merged(parts[:1]) == parts[0]["policies"]


def test_full_batches_are_compared_by_their_own_speedups(script):
    module = script("prediction_records")
    parts = [part(24, 240.0, 120.0, 6), part(24, 260.0, 330.0, 12)]
    for rows, tokens in ((p["policies"], n) for p, n in zip(parts, (16, 20))):
        for row, us, rounds in zip(rows, (10.0, 4.0), (tokens, 5)):
            full = {"speedup": 10.0 / us, "us_per_token": us, "tokens": tokens, "tokens_per_round": tokens / rounds}
            row["measured"]["full_batch"] = full
    rows = module.merged(parts)
    full = rows[1]["measured"]["full_batch"]
    assert (full["speedup"], full["us_per_token"]) == (pytest.approx(2.5), pytest.approx(4.0))
    assert (full["tokens"], full["tokens_per_round"]) == (36, pytest.approx(3.6))
    guesses = {
        "plain": {**guess(1.0, 1.0), "level": "exact", "full_batch": guess(1.0, 1.0)},
        "a": {**guess(9.0, 9.0), "level": "exact", "full_batch": guess(2.0, 3.6)},
    }
    found = module.compared_kept_full(rows, guesses)["full_batch"]
    assert (found["worst_pct"], found["tokens_per_round_error"]["worst_pct"]) == (20.0, 0.0)
    assert found["bar"]["worst_pct"] == {"at_most": 8.0, "met": False}
    assert module.policy_rows(rows, guesses)[1][6:] == [9.0, pytest.approx(48 / 18, abs=1e-4), 2.0, 2.5, 3.6, 3.6]
    del rows[0]["measured"]["full_batch"]
    assert module.compared_kept_full(rows, guesses) == {}
    assert len(module.policy_rows(rows, guesses)[0]) == 8


def test_a_perfect_prediction_has_no_error(script):
    rows = [made_up("plain", 0, 1.0, 1.0), made_up("a", 4, 2.0, 3.0), made_up("b", 4, 1.6, 2.0)]
    found = script("prediction_records").compared(
        rows, {r["name"]: guess(r["measured"]["speedup"], r["measured"]["tokens_per_round"]) for r in rows}
    )
    assert found["worst_pct"] == found["cost_error"]["worst_pct"] == found["regret_pct"] == 0.0
    assert found["rank_correlation"] == found["intervals_overlap_frac"] == 1.0
