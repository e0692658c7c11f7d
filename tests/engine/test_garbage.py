"""Python's garbage stays out of what is timed: no round is launched or read while a collection may come."""

import gc
import weakref

import pytest

from specdial.engine.garbage import uncollected
from specdial.engine.loop import Decoding
from specdial.engine.verbs import calibrate, validate
from specdial.policies.fields import to_plain
from specdial.policies.schema import plain_policy, policy_from_mapping


class Itself:
    """Refers to itself: only a collection finds it."""

    def __init__(self) -> None:
        self.me = self


def test_garbage_waits_and_is_found_afterwards() -> None:
    with uncollected():
        left = weakref.ref(Itself())
        many = [[] for _ in range(2 * gc.get_threshold()[0])]  # enough for a collection
        with uncollected():
            pass
        assert not gc.isenabled()  # the inner one ends nothing
        assert left() is not None
    assert gc.isenabled()
    gc.collect()
    assert left() is None
    assert many


def test_an_error_ends_the_wait() -> None:
    with pytest.raises(ValueError, match="within"), uncollected():
        raise ValueError("within")
    assert gc.isenabled()


@pytest.fixture
def rounds(monkeypatch):
    """Whether a collection could have come, at every launch and at every end of a round."""
    seen: list[bool] = []
    for name in ("_launch", "_finish"):
        done = getattr(Decoding, name)
        monkeypatch.setattr(Decoding, name, lambda *a, done=done: (seen.append(gc.isenabled()), done(*a))[1])
    return seen


@pytest.fixture
def settings(tiny_checkpoint):
    workload = {"kind": "book", "context_tokens": 90, "documents": 2, "new_tokens": 6, "train_frac": 0.5}
    workload |= {"validation_frac": 0.0, "test_frac": 0.5}
    return {"model": {"source": str(tiny_checkpoint("llama")), "device": "cpu"}, "workload": workload}


def test_verbs_that_time_rounds(settings, rounds, tmp_path) -> None:
    fixed = policy_from_mapping({"controller": {"kind": "fixed", "k": 2}, "draft_kv": {"budget": 40, "recent": 8}})
    policies = [to_plain(policy) for policy in (plain_policy(), fixed)]
    validate.run({**settings, "policies": policies, "repeats": 1, "out": str(tmp_path / "validation")})
    assert set(rounds) == {False}
    rounds.clear()
    grid = {"contexts": [80], "batches": [1], "ks": [0, 2], "budgets": [40], "repeats": 3}
    calibrate.run({**settings, **grid, "draft_kv": to_plain(fixed.draft_kv), "out": str(tmp_path / "costs")})
    assert set(rounds) == {False}
