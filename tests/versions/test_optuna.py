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
def test_bounds_reach_the_sampler(monkeypatch, sampler, version):
    if version == "4.9":
        for kind in (optuna.trial.BaseTrial, optuna.Trial):
            monkeypatch.delattr(kind, "set_constraint", raising=False)
    draws = Draws(sampler, 0, Goal.of(["speedup"], {"kv_bytes_per_token": 100.0}), {})
    trial = draws.ask(0)
    trial.suggest_float("budget_frac", 0.0, 1.0)
    draws.tell(trial, 0, [1.5], {"speedup": 1.5, "kv_bytes_per_token": 130.0})
    kept = [value for key, value in draws.made(trial).system_attrs.items() if key.startswith("constraints")]
    assert kept in ([30.0], [[30.0]], [(30.0,)])  # 5 keeps one number a bound, 4.9 all in one
