"""An EAGLE head through the verbs: recorded with its digest, timed, sized before it is loaded into memory."""

import random
from dataclasses import replace

import pyarrow.compute as pc
import pytest
import torch

from specdial.engine import job
from specdial.engine.eagle_training import new_head
from specdial.engine.memory import predict
from specdial.engine.trace.reader import read_costs, read_trace
from specdial.engine.verbs import calibrate, record
from specdial.engine.weights import load_model
from specdial.engine.weights.eagle import load_head, save_head
from specdial.policies.errors import UserError
from specdial.policies.schema import policy_from_mapping
from specdial.simulator.costs import CostModel
from specdial.simulator.replay import replay, replay_rounds

FIXED = {"kind": "fixed", "k": 3}


@pytest.fixture(scope="module")
def tiny(tiny_checkpoint, tmp_path_factory):
    """Settings of a tiny model, of two documents of random letters, and of a policy with a head for it."""
    letters = random.Random(1)
    place = tmp_path_factory.mktemp("eagle")
    text = "\n\n".join("".join(letters.choices("abcdefgh ,.\n", k=90)) for _ in range(40))
    (place / "text.txt").write_text(text)
    source = str(tiny_checkpoint("llama", head_dim=64))
    decoder = load_model(source, device="cpu", dtype="float32").decoder
    save_head(place / "head", new_head(decoder, torch.arange(260), seed=0))
    workload = {"kind": "file", "path": str(place / "text.txt"), "context_tokens": 200, "documents": 2}
    policy = {"drafter": {"kind": "eagle", "model": str(place / "head")}, "controller": FIXED}
    model = {"source": source, "device": "cpu"}
    return {"model": model, "workload": {**workload, "new_tokens": 30}, "policy": policy}


@pytest.mark.parametrize(("batch", "tree"), [(1, None), (2, None), (2, {"width": 3, "nodes": 8})])
def test_recordings_hold_the_plain_output_and_name_the_head(tiny, tmp_path, batch, tree):
    """And replay to their own rounds, of trees those only: what another shape would accept, they do not show."""
    drafter = {**tiny["policy"]["drafter"], "tree": tree}
    tiny = {**tiny, "policy": {**tiny["policy"], "drafter": drafter}}
    record.run({**tiny, "policy": {"drafter": {"kind": "none"}}, "out": str(tmp_path / "plain")})
    record.run({**tiny, "batch": batch, "out": str(tmp_path / "t")})
    trace = read_trace(tmp_path / "t")
    assert trace.outputs["token_id"].to_pylist() == read_trace(tmp_path / "plain").outputs["token_id"].to_pylist()
    name = tiny["policy"]["drafter"]["model"]
    head = load_head(name, load_model(tiny["model"]["source"], device="cpu").decoder)
    assert trace.meta["draft_models"] == {name: head.digest}
    (replayed,) = replay_rounds(trace, [policy_from_mapping(tiny["policy"])])
    assert replayed.accepted.tolist() == trace.rounds["accepted"].to_pylist()
    other = {**tiny["policy"], "drafter": {**drafter, "tree": {"width": 4, "nodes": 8}}}
    with pytest.raises(UserError, match="it drafts trees, and the trace shows no other"):
        replay_rounds(trace, [policy_from_mapping(other)])


def test_probes_are_drafted_by_the_head(tiny, tmp_path):
    kv = {"mode": "partial", "source": "page_bound", "page": 16, "refresh": "full", "full_period": 3, "budget": 96}
    probe = {"sources": ["page_bound", "recent"], "budgets": [80, 128], "rounds": 2, "places": 2, "k": 3}
    settings = {**tiny, "policy": {**tiny["policy"], "verify_kv": kv}, "probes": True, "probe": probe}
    record.run({**settings, "out": str(tmp_path / "t")})
    trace = read_trace(tmp_path / "t")
    assert {(a["verify_kv"]["source"], a["verify_kv"]["refresh"]) for a in trace.meta["probe_arms"]} == {
        ("page_bound", "full"), ("recent", "round"),
    }  # fmt: skip
    rows = trace.probes.to_pylist()
    assert len(rows) == 2 * 4 * 2 * 2 * 4, "documents, arms, places, rounds, rows"
    for name in ("draft_match", "full_match"):
        assert sum(row[name] is not None for row in rows) >= 2 * 4 * 2 * 2, "the first of a round always has a draft"


def test_dense_recordings_refuse_a_head(tiny, tmp_path):
    with pytest.raises(UserError, match="dense=true drafts with the target and its own weights"):
        record.run({**tiny, "dense": True, "out": str(tmp_path / "t")})


def test_calibration_times_its_drafts_at_several_contexts_and_batches(tiny, tmp_path):
    settings = {name: tiny[name] for name in ("model", "workload")}
    sizes = {"contexts": [128, 64], "batches": [1, 2], "ks": [0, 2], "budgets": [32], "repeats": 3}
    kv = {"budget": 32, "sink": 2, "recent": 8}
    out = str(tmp_path / "costs")
    calibrate.run({**settings, **sizes, "draft_kv": kv, "drafters": [tiny["policy"]["drafter"]], "out": out})
    rows = [row for row in read_costs(tmp_path / "costs").rows.to_pylist() if row["op"] == "draft"]
    assert {(row["context_tokens"], row["batch"]) for row in rows} == {(c, b) for c in (64, 128) for b in (1, 2)}
    assert all(row["median_us"] > 0 for row in rows)


def test_memory_is_predicted_with_the_heads_keys(tiny, monkeypatch):
    """A byte less than target and head take is refused."""
    target, policy = load_model(tiny["model"]["source"], device="cpu"), policy_from_mapping(tiny["policy"])
    heads = {}
    job.load_heads(target, [policy], heads)
    (head,) = heads.values()
    demand = job.memory_demand(target, 200, 2, [policy])
    needed = sum(predict(replace(demand, config=c)).to_allocate for c in (target.config, head.config.layer))
    monkeypatch.setattr(job, "free_bytes", lambda device: needed)
    s = job.empty_sequences(target, 200, 2, [policy], heads=heads)
    assert s.heads[policy.drafter.model].cache.capacity_tokens == s.cache.capacity_tokens
    monkeypatch.setattr(job, "free_bytes", lambda device: needed - 1)
    with pytest.raises(UserError, match="are free"):
        job.empty_sequences(target, 200, 2, [policy], heads=heads)


def test_trees_are_timed_and_priced(tiny, tmp_path):
    """Under a label of their own, so that a cost table of chains prices none."""
    tree = {**tiny["policy"]["drafter"], "tree": {"width": 3, "nodes": 8}}
    settings = {name: tiny[name] for name in ("model", "workload")}
    sizes = {"contexts": [128, 256], "batches": [1], "ks": [0, 1, 3], "budgets": [32], "repeats": 3}
    calibrate.run({**settings, **sizes, "drafters": [tree], "out": str(tmp_path / "costs")})
    record.run({**tiny, "policy": {**tiny["policy"], "drafter": tree}, "out": str(tmp_path / "t")})
    trace, policy = read_trace(tmp_path / "t"), policy_from_mapping({**tiny["policy"], "drafter": tree})
    table = read_costs(tmp_path / "costs")
    (priced,) = replay(trace, CostModel.from_table(table), [policy], bootstrap=0)
    assert (priced.level, priced.reason) == ("exact", None)
    assert priced.speedup > 0
    place = table.rows.schema.get_field_index("drafter")
    chains = pc.replace_substring(table.rows["drafter"], "/w3-n8", "")
    table = replace(table, rows=table.rows.set_column(place, table.rows.schema.field(place), chains))
    (refused,) = replay(trace, CostModel.from_table(table), [policy], bootstrap=0)
    assert refused.level == "refused"
    assert "w3-n8" in refused.reason
