"""The choice among what was tried: plain decoding stands in where nothing lossless has a price, and each batch has its
own candidates."""

from dataclasses import replace

import pytest

from specdial.policies.errors import UserError
from specdial.policies.fields import parse
from specdial.policies.file import policy_digest
from specdial.simulator.axes import Search
from specdial.simulator.choice import BEST, candidates, choose
from specdial.simulator.lanes import read_record
from specdial.simulator.objectives import Goal
from specdial.simulator.outcome import Outcome
from specdial.simulator.search import Found, Tried
from specdial.simulator.space import Space

PARTIAL = {"controllers": ["fixed"], "k_max": 2, "verify_kv": {"mode": ["partial"]}}
GOAL = Goal(("speedup",))


@pytest.fixture(scope="module")
def space(trace):
    return Space.of(parse(Search, PARTIAL), read_record(trace), gamma=0.3)


def tried(space, point, speedup, batch=1):
    return Tried(point, policy_digest(space.policy(point)), batch, 1, "modelled", None, {"speedup": speedup})


def found(space):
    return Found("brute", 4, tuple(tried(space, point, 2.0) for point in space.grid_points()))


def evaluate(policies, batch, *, refused=lambda policy: False):
    """A speedup of 1 + k / 2, or a refusal."""
    known = [Outcome(p, "exact", None, p.lossless, (), batch, 0, speedup=1.0 + p.k_max / 2.0) for p in policies]
    no = {"level": "refused", "reason": "nobody timed it", "speedup": None}
    return [replace(o, **no) if o.policy.k_max and refused(o.policy) else o for o in known]


def test_fixed_ks_are_lossless_where_the_search_is_not(space):
    choice = choose(space, found(space), evaluate, GOAL, 1)
    assert [o.policy.lossless for o in choice.finalists].count(True) == 5, "plain, and two drafts on two arms"
    assert choice.best_fixed.lossless
    assert choice.best_lossless.speedup == choice.best_fixed.speedup == 2.0


def test_plain_stands_in_where_nothing_lossless_has_a_price(space):
    def lossy_alone(policies, batch):
        return evaluate(policies, batch, refused=lambda policy: policy.lossless)

    choice = choose(space, found(space), lossy_alone, GOAL, 1)
    assert (choice.best.lossless, choice.best.speedup, choice.pays) == (False, 2.0, True)
    assert choice.best_fixed is choice.best_lossless is choice.plain


@pytest.mark.parametrize(
    ("goal", "says"), [(GOAL, "nobody timed it"), (Goal(("full_batch_speedup",)), "not know its full_batch_speedup")]
)
def test_no_price_at_all_is_a_mistake_that_is_named(space, goal, says):
    def none(policies, batch):
        return evaluate(policies, batch, refused=lambda policy: goal is GOAL)

    with pytest.raises(UserError, match=f"no drafting policy has a price at batch 4: .*{says}"):
        choose(space, found(space), none, goal, 4)


def test_each_batch_has_candidates_of_its_own(space):
    point = next(space.grid_points())
    slow = [tried(space, point, 1.0 + i / 100.0, batch=4) for i in range(BEST)]
    fast = [tried(space, point, 2.0 + i / 100.0) for i in range(BEST)]
    ahead, best = candidates(Found("random", 2 * BEST, (*slow, *fast)), GOAL, 4)
    assert {t.batch for t in (*ahead, *best)} == {4}
    assert len(best) == BEST
