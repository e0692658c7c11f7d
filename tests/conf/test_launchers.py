"""Sweeps through launchers other than Hydra's own: every job is run and leaves what it found."""

import json

import pytest


def test_joblib_launches_a_sweep_of_searches(cli, synthetic, tmp_path):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="hydra-joblib-launcher is not installed")
    given = [f"trace={synthetic}/runs/book", f"costs={synthetic}/costs", "search=fixed", "search.k_max=2", "trials=4"]
    launcher = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=1", "+returns=[speedup,gamma]"]
    result = cli("tune", "-m", *given, "seed=1,2", "out=tuned/${seed}", *launcher)
    assert result.code == 0
    studies = [json.loads((tmp_path / "tuned" / seed / "study.json").read_text()) for seed in ("1", "2")]
    assert [study["settings"]["seed"] for study in studies] == [1, 2]
    assert all(study["trials"] == 4 for study in studies)
