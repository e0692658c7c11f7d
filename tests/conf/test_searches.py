"""The command line of searches: sweeps through launchers other than Hydra's own, bounds on metrics by name."""

import json
from pathlib import Path

import pytest
import yaml

from specdial.simulator.objectives import METRICS
from specdial.simulator.verbs import tune


def test_joblib_launches_a_sweep_of_searches(cli, synthetic, tmp_path):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="hydra-joblib-launcher is not installed")
    given = [f"trace={synthetic}/runs/book", f"costs={synthetic}/costs", "search=fixed", "search.k_max=2", "trials=4"]
    launcher = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=1", "+returns=[speedup,gamma]"]
    given.append("constraints={tail_us_per_token: 1e6}")
    result = cli("tune", "-m", *given, "seed=1,2", "out=tuned/${seed}", *launcher)
    assert result.code == 0
    studies = [json.loads((tmp_path / "tuned" / seed / "study.json").read_text()) for seed in ("1", "2")]
    assert [study["settings"]["seed"] for study in studies] == [1, 2]
    assert all(study["trials"] == 4 for study in studies)
    assert all(study["constraints"] == {"tail_us_per_token": 1e6} for study in studies)


def test_every_metric_can_be_bounded_by_its_name():
    for verb, where in (("tune", ()), ("refine", ("tune",))):
        settings = yaml.safe_load((Path(tune.__file__).parents[2] / "conf" / f"{verb}.yaml").read_text())
        for part in where:
            settings = settings[part]
        assert settings["constraints"] == dict.fromkeys(METRICS)
