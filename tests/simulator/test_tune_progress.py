"""While tune works it says how many trials are done and the best so far."""

import json

from specdial.policies import progress as module
from specdial.simulator.synthetic import Shape, write_synthetic_costs, write_trace
from specdial.simulator.verbs import tune


def test_the_best_so_far_is_the_best_in_the_study(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(module, "LINE_INTERVAL_S", -1.0)
    shape = Shape(documents=3, new_tokens=20)
    write_trace(tmp_path / "trace", shape)
    write_synthetic_costs(tmp_path / "costs", (256, 512, 1024), (1,), shape)
    given = {"trace": str(tmp_path / "trace"), "costs": str(tmp_path / "costs"), "out": str(tmp_path / "tune")}
    tune.run({**given, "trials": 60, "sampler": "random", "bootstrap": 1})
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("tune ")]
    tried = json.loads((tmp_path / "tune" / "study.json").read_text())["tried"]
    best = max(entry["values"]["train"]["speedup"] or 0.0 for entry in tried)
    assert len(lines) > 1
    assert lines[-1] == f"tune 60/60 best speedup {best:.4g}"
