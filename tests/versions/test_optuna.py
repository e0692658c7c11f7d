"""Optuna 4.9 and 5 are both served: what only one of them has is kept to one place, and bounds reach the sampler.

`matrix.py` beside this file runs the real versions; here the newer one plays the older.
"""

import re
from pathlib import Path

import optuna
import pytest

from specdial.simulator.objectives import Goal
from specdial.simulator.samplers import Draws

SIMULATOR = Path(__file__).resolve().parents[2] / "simulator"
# The difference of the two public interfaces, as far as this project could meet it: two came with 5, two went with 4.
ONE_SIDED = re.compile(r"\.(set_constraint|set_system_attr)\(|\b(mutation|categorical_distance_func)=")


def test_what_one_version_lacks_is_used_in_one_place():
    found = [(p.name, hit.group()) for p in SIMULATOR.rglob("*.py") for hit in ONE_SIDED.finditer(p.read_text("utf-8"))]
    assert found == [("samplers.py", ".set_constraint(")]


@pytest.mark.filterwarnings("ignore:.*constraints_func.*:FutureWarning")
@pytest.mark.parametrize("sampler", ["gp", "nsga2", "nsga3", "tpe"])
@pytest.mark.parametrize("version", ["installed", "4.9"])
@pytest.mark.parametrize("bounds", [{}, {"kv_bytes_per_token": 100.0, "arr": 0.5}])
def test_bounds_reach_the_sampler(monkeypatch, sampler, version, bounds):
    """Also where a search has none, and where a trial's metric is not known: every trial has a number for each."""
    if version == "4.9":
        for kind in (optuna.trial.BaseTrial, optuna.Trial):
            monkeypatch.delattr(kind, "set_constraint", raising=False)
    draws = Draws(sampler, 0, Goal.of(["speedup"], bounds), {})
    for number, arr in enumerate([0.75, None]):
        trial = draws.ask(number)
        trial.suggest_float("budget_frac", 0.0, 1.0)
        draws.tell(trial, number, [1.5], {"speedup": 1.5, "kv_bytes_per_token": 130.0, "arr": arr})
        kept = [value for key, value in draws.made(trial).system_attrs.items() if key.startswith("constraints")]
        flat = [float(number) for value in kept for number in (value if isinstance(value, (list, tuple)) else [value])]
        assert flat == ([30.0, -0.25 if arr else 1.0] if bounds else [])
