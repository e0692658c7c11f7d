"""specdial heads end to end on tiny models, and the attention trace's files: what is kept, and what is refused."""

import json
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from specdial.engine.attention_rows import attention_rows, read_queries
from specdial.engine.sequences import Sequences
from specdial.engine.trace.attention import ALL_HEADS, DRAFT, TARGET
from specdial.engine.trace.attention_file import read_attention
from specdial.engine.verbs import heads
from specdial.engine.weights import load_model
from specdial.policies.errors import UserError

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def settings(tiny_checkpoint, tmp_path):
    """Two documents of 200 tokens and 12 new ones, a target of three layers and a draft model of two."""
    return small_settings(tiny_checkpoint, tmp_path / "h")


def small_settings(tiny_checkpoint, out):
    workload = {"kind": "book", "context_tokens": 200, "documents": 2, "new_tokens": 12}
    return {
        "model": {"source": str(tiny_checkpoint("llama")), "device": "cpu"},
        "draft": str(tiny_checkpoint("llama", num_hidden_layers=2, seed=3)),
        "workload": workload,
        "out": str(out),
        "rows": 20,
        "heads_per_layer": 2,
        "ranking": {"documents": 1},
    }


def test_what_is_recorded_is_the_models_attention(settings, capsys):
    found = heads.run(settings)
    trace = read_attention(settings["out"])
    assert (found["documents"], found["rows"]) == (2, 40)
    said = capsys.readouterr()
    assert "needle mass" in said.out
    lines = said.err.splitlines()
    assert lines[0] == "heads 0/6 ranking heads of the target"
    assert lines[1].startswith("heads 1/6 ranking heads of the draft, about ")
    assert lines[2].startswith("heads 2/6 recording rows, about ")
    assert len(trace.heads) == (3 + 2) * 4
    assert [d.run.doc for d in trace.documents] == [0, 1]
    document = trace.documents[1]
    assert (document.run.first_position, document.run.keys) == (192, 212)
    assert (document.layers(TARGET), document.layers(DRAFT)) == ([0, 1, 2], [0, 1])
    tokens = decoded(settings, 1)
    for source, model in ((TARGET, settings["model"]["source"]), (DRAFT, settings["draft"])):
        rows = rows_of(model, tokens, 192)
        for layer in range(len(rows)):
            for head in trace.best_heads(source, layer, 2):
                np.testing.assert_allclose(document.rows(source, layer, head), rows[layer, :, head], atol=1e-3)
        if source == TARGET:
            np.testing.assert_allclose(document.recalled(), rows.mean((0, 2)), atol=1e-3)
    assert document.recalled().sum(-1) == pytest.approx(1.0, abs=1e-5)


def decoded(settings, doc):
    """Prompt and greedy output of a document, by the naive way: the whole text again for every token."""
    from specdial.engine.workloads import WorkloadSpec, build

    model = load_model(settings["model"]["source"], device="cpu", dtype="float32")
    tokens = list(build(WorkloadSpec.from_mapping(settings["workload"]), model.tokenizer)[doc].prompt_ids)
    for _ in range(12):
        s = Sequences(model.decoder, 256, 1, history=None, backend="reference")
        s.prefill([tokens], [1])
        block = s.forward_block(torch.tensor([tokens[-1:]]), padded=False, rows=False)
        tokens.append(int(block.logits[0, -1].argmax()))
    return tokens


def rows_of(source, tokens, start):
    decoder = load_model(source, device="cpu", dtype="float32").decoder
    s = Sequences(decoder, 256, 1, history=None, backend="reference")
    s.prefill([tokens[: start + 1]], [0])
    queries = read_queries(s, tokens, start)
    keys = [s.cache.view(layer, len(tokens))[0][0] for layer in range(len(queries))]
    return torch.stack([attention_rows(q, k, start) for q, k in zip(queries, keys)]).numpy()  # [L, R, H, S]


def test_rows_are_cut_to_their_largest_entries(settings):
    heads.run({**settings, "draft": None, "candidate_keys": 16, "recalled_keys": 64})
    trace = read_attention(settings["out"])
    assert trace.meta.draft is None
    assert {h.source for h in trace.heads} == {TARGET}
    for (_, _, head), kept in trace.documents[0].kept.items():
        most = 64 if head == ALL_HEADS else 16
        assert (np.diff(kept.offsets) == most).all()
        assert (kept.mass < 1).all()
        assert kept.dense(212).sum(-1) == pytest.approx(kept.mass, abs=1e-6)


def test_a_second_run_writes_the_same_rows(settings, tmp_path):
    heads.run(settings)
    before = {path.name: path.read_bytes() for path in (tmp_path / "h").glob("*.parquet")}
    heads.run(settings)
    assert {path.name: path.read_bytes() for path in (tmp_path / "h").glob("*.parquet")} == before
    with pytest.raises(UserError, match="holds another run"):
        heads.run({**settings, "rows": 24})


def test_needles_must_fit_the_context(settings):
    with pytest.raises(UserError, match="cannot hold the question"):
        heads.run({**settings, "workload": {**settings["workload"], "context_tokens": 100}})


@pytest.fixture(scope="module")
def recorded(tiny_checkpoint, tmp_path_factory):
    """A record of the target alone."""
    out = tmp_path_factory.mktemp("recorded") / "h"
    heads.run({**small_settings(tiny_checkpoint, out), "draft": None})
    return out


def break_meta(out):
    meta = json.loads((out / "meta.json").read_text())
    (out / "meta.json").write_text(json.dumps({**meta, "schema": "specdial/attention/0"}))


def break_run(out):
    meta = json.loads((out / "meta.json").read_text())
    meta["documents"][0]["first_position"] += 1
    (out / "meta.json").write_text(json.dumps(meta))


def break_type(out):
    meta = json.loads((out / "meta.json").read_text())
    (out / "meta.json").write_text(json.dumps({**meta, "heads_per_layer": "four"}))


def break_order(out):
    table = pq.read_table(out / "rows-00000.parquet")
    pq.write_table(table.take([1, 0, *range(2, table.num_rows)]), out / "rows-00000.parquet")


def break_head(out):
    table = pq.read_table(out / "rows-00000.parquet")
    twice = table.take([*range(20), *range(20), *range(40, table.num_rows)])
    pq.write_table(twice, out / "rows-00000.parquet")


def break_bytes(out):
    content = bytearray((out / "rows-00000.parquet").read_bytes())
    content[len(content) // 2] ^= 0xFF
    (out / "rows-00000.parquet").write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda out: (out / "meta.json").unlink(), "it has no meta.json"),
        (lambda out: (out / "meta.json").write_text("{"), "not readable JSON"),
        (break_meta, "schema 'specdial/attention/0'"),
        (break_type, "heads_per_layer must be a whole number"),
        (break_run, "does not hold the rows that meta.json tells of"),
        (break_order, "does not hold the rows that meta.json tells of"),
        (break_head, "mixes or repeats the rows of a head"),
        (break_bytes, "rows-00000.parquet"),
        (lambda out: (out / "heads.parquet").unlink(), "heads.parquet is missing"),
    ],
)
def test_damage_is_refused(recorded, tmp_path, harm, says):
    out = shutil.copytree(recorded, tmp_path / "h")
    harm(out)
    with pytest.raises(UserError, match=says):
        read_attention(out)


def test_a_draft_model_with_other_tokens_is_refused(settings, tiny_model, write_gguf, tmp_path):
    """A GGUF of the same sizes carries one token more than the folder's tokenizer."""
    from specdial.engine.models.tensors import tensor_shapes

    config = tiny_model("qwen2").config
    weights = {name: torch.zeros(shape) for name, shape in tensor_shapes(config)}
    write_gguf(tmp_path / "other.gguf", config, weights)
    with pytest.raises(UserError, match="number their tokens differently"):
        heads.run({**settings, "draft": str(tmp_path / "other.gguf")})
