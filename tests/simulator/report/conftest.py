"""A directory with one output of every verb that the report reads: synthetic, small, lossless and lossy."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specdial.engine.trace.attention import ATTENTION_SCHEMA, HEADS
from specdial.simulator.report.inputs import read_inputs
from specdial.simulator.report.page import build_page
from specdial.simulator.synthetic import MODEL, Shape, write_synthetic_costs, write_trace
from specdial.simulator.verbs import replay, tune

MODEL_PART = {name: MODEL[name] for name in ("name", "digest", "random")}


def write_validation(folder):
    """Two lossless policies and a lossy one; nothing else in the repository makes lossy rows without a model."""

    def row(name, lossless, predicted, measured):
        spread = {"low": measured - 0.1, "high": measured + 0.1}
        fidelity, expected = {}, {}
        if not lossless:
            found = {"top1_agreement": 0.97, "top1_agreement_interval": [0.96, 0.98], "kl_nats": 0.02}
            ages = [(0, 1.0, 0.0, 1.0), (1, 0.95, 0.03, 0.9876)]
            names = ("rounds_since_full", "top1_agreement", "kl_nats", "hidden_cosine")
            drift = [{**dict(zip(names, age)), "tokens": 40} for age in ages]
            fidelity = {"fidelity": {**found, "token_agreement": 0.9, "drift": drift}}
            top1 = {"value": 0.98, "low": 0.95, "high": 0.99}
            expected = {"fidelity": {"top1_agreement": top1, "kl_nats": None}}
        return {
            "name": name,
            "policy_digest": name,
            "lossless": lossless,
            "controller": "fixed",
            "k_max": 4,
            "budget": 256,
            "predicted": {"speedup": predicted, "low": predicted - 0.05, "high": predicted + 0.05, **expected},
            "measured": {
                "speedup": measured,
                **spread,
                "tokens_per_round": 3.1,
                "alpha": 0.6,
                "k": 4.0,
                "documents_differing_from_plain": 0,
                **fidelity,
            },
            "error_frac": predicted / measured - 1.0,
        }

    content = {
        "schema": "specdial/validation/1",
        "model": MODEL_PART,
        "documents": [{}, {}],
        "split": "test",
        "batch": 1,
        "hardware": {"device": "cpu", "name": "a CPU <b>", "cores": 2},
        "policies": [row("fixed-4", True, 1.2, 1.15), row("<i>odd", True, 1.1, 1.12), row("part", False, 1.4, 1.3)],
        "median_error_frac": 0.04,
        "worst_error_frac": 0.07,
        "regret": 0.0,
        "provenance": {"made_at": "2026-01-02T03:04:05+00:00", "versions": {"specdial": "0.1.0"}},
    }
    folder.mkdir()
    (folder / "validation.json").write_text(json.dumps(content))


def write_heads(folder):
    folder.mkdir()
    places = [(layer, head) for layer in range(4) for head in range(3)]
    ranked = sorted(places, key=lambda place: -place[0] * 3 - place[1])
    rows = [
        {"source": "target", "layer": a, "head": b, "needle_mass": (a * 3 + b) / 12, "copy_frac": 0.5}
        | {"rank_in_layer": 3 - b, "rank": 1 + ranked.index((a, b))}
        for a, b in places
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema=HEADS), folder / "heads.parquet")
    (folder / "meta.json").write_text(json.dumps({"schema": ATTENTION_SCHEMA, "model": MODEL_PART}))


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    shape = Shape(documents=6, new_tokens=40, difficulty_nats=1.2)
    write_trace(folder / "trace", shape)
    write_synthetic_costs(folder / "costs", (256, 512, 1024), (1, 2, 4), shape)
    given = {"trace": str(folder / "trace"), "costs": str(folder / "costs")}
    policies = [{"name": f"fixed-{k}", "controller": {"kind": "fixed", "k": k}} for k in (2, 4)]
    kv = {"draft_kv": {"budget": 256, "sink": 4, "recent": 16}}
    made = {"policies": [policy | kv for policy in policies], "out": str(folder / "replay")}
    replay.run({**given, **made, "inversion": True, "bootstrap": 0})
    tune.run({**given, "out": str(folder / "tune"), "trials": 24, "bootstrap": 10})
    write_validation(folder / "validation")
    write_heads(folder / "heads")
    chosen = {"choice": {"target": [[3, 2]], "draft": [], "arr": 0.8}, "model": MODEL_PART}
    (folder / "tuned-heads").mkdir()
    (folder / "tuned-heads" / "heads.json").write_text(json.dumps({"schema": "specdial/heads/1", **chosen}))
    return folder


@pytest.fixture(scope="session")
def page(runs):
    """The text of the page of everything."""
    pytest.importorskip("plotly")
    return build_page(read_inputs({}, str(runs)))[0]
