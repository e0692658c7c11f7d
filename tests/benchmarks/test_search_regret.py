"""The regret benchmark: a dry run on tiny weights, its grid, and its arithmetic on made-up times."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from specdial.engine.trace.reader import read_trace
from specdial.policies.file import policy_digest
from specdial.policies.schema import plain_policy, policy_from_mapping
from specdial.simulator.lanes import read_record
from specdial.simulator.synthetic import Shape, write_trace


def test_dry_run_measures_what_was_found_among_the_fastest_points(script, tiny_checkpoint, tmp_path, capsys):
    model = str(tiny_checkpoint("qwen2", vocab_size=288))
    command = ["--dry", "--model", model, "--workload", "novel", "--budgets", "128", "--train", "1", "--trials", "10"]
    command += ["--keep", str(tmp_path / "kept")]
    rows = {row["id"]: row for row in script("search_regret").main(command)}
    assert set(rows) == {"Q1-regret-novel-300-B1", "Q1-regret-novel-300-B1-in-sample"}
    kept = json.loads((tmp_path / "kept" / "times.json").read_text())
    for row in rows.values():
        assert row["points"] == 13
        assert not row["bar"]["met"]  # 13 points prove nothing
        assert "fewer than 500" in row["case"]
        assert row["outputs_differing_from_plain"] == 0
        assert row["documents"] == {"train": 1, "grid": 2, "finalists": 2}
        found, best = row["found"]["speedup"], row["best_of_grid"]["speedup"]
        assert row["value"] == pytest.approx(100 * (1 - found / best), abs=0.05)
        assert row["spread"][0] <= row["spread"][1]
    assert len(kept["grid"]) == 13
    assert all(np.isfinite(line[-2:]).all() for line in kept["grid"])
    assert {len(repeats) for us in kept["finalists"].values() for repeats in us} == {2}
    assert model not in json.dumps(read_trace(tmp_path / "kept" / "trace").meta)
    assert set(json.loads(capsys.readouterr().out.splitlines()[-1])) == set(rows)


def test_the_grid_has_five_hundred_lossless_points_all_different(script, tmp_path):
    write_trace(tmp_path / "trace", Shape(budgets=(256, 512, 1024)))
    points = script("search_grid").grid(read_record(read_trace(tmp_path / "trace")), 0.3)
    assert len({policy_digest(p) for p in points}) == len(points) > script("search_regret").LEAST_POINTS
    assert all(p.lossless and 1 <= p.k_max <= 8 for p in points)
    assert {p.draft_kv.budget for p in points} == {256, 512, 1024}
    assert {p.controller.kind for p in points} == {"fixed", "entropy", "confidence", "rate"}


def test_regret_is_what_the_best_of_the_grid_would_have_saved(script):
    """Medians of repeats, added over documents: 100 of plain, 50 of the grid's best, 60 of what was found."""
    best, own = (policy_from_mapping({"controller": {"kind": "fixed", "k": k}}) for k in (4, 2))
    policies = [plain_policy(), best, own]
    times = [
        [[60, 60, 60], [40, 40, 40]],
        [[20, 20, 26], [30, 30, 30]],
        [[30, 30, 30], [30, 30, 93]],
    ]  # [docs][repeats]
    digests = [policy_digest(p) for p in policies]
    again = {digest: np.array(us, dtype=float) for digest, us in zip(digests, times)}
    a = SimpleNamespace(trials=1000, batch=1, workload="code", context=31000)
    cell = SimpleNamespace(a=a, job=SimpleNamespace(name="tiny"))
    row_of = script("search_regret").row_of
    row = row_of(cell, "held-out", own, dict(zip(digests, policies)), again, digests[:2], {"points": 520})
    assert row["value"] == pytest.approx(100 * (1 - 50 / 60), abs=1e-4)
    assert (row["found"]["speedup"], row["best_of_grid"]["speedup"]) == (1.6667, 2.0)
    assert row["spread"] == pytest.approx([100 * (1 - 50 / 60), 100 * (1 - 56 / 123)], abs=1e-3)
    assert row["repeat_spread_pct"] == pytest.approx(100 * 63 / 60, abs=1e-3)
    assert not row["bar"]["met"]
    best_found = row_of(cell, "held-out", best, dict(zip(digests, policies)), again, digests[:2], {"points": 520})
    assert best_found["value"] == 0.0
    assert best_found["bar"]["met"]
