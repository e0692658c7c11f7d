"""What lowering is predicted to lose, where predictions can tell, and options that a target does not use."""

import typing
from types import SimpleNamespace

import pytest

from specdial.policies import export
from specdial.policies.errors import UserError
from specdial.policies.exporters import EXPORTERS, Options
from specdial.policies.exporters.loss import predicted_loss
from specdial.policies.exporters.options import ENGINES, USES
from specdial.policies.exporters.rows import Row
from specdial.policies.schema import policy_from_mapping

LOOKUP = {"name": "l", "drafter": {"kind": "lookup"}, "controller": {"kind": "fixed", "k": 6}}
MODEL = {"name": "m", "drafter": {"kind": "model", "model": "owner/small"}, "controller": {"kind": "fixed", "k": 5}}
SPARSE = {"name": "s", "controller": {"kind": "fixed", "k": 8}}
RATE = {**MODEL, "name": "r", "controller": {"kind": "rate", "k_max": 8}}
# No speculation below batch 4.
LATE = {**MODEL, "cells": [{"to_batch": 4, "overrides": {"controller": {"kind": "none"}}}]}


class TestLoss:
    SAME = {
        "trace_digest": "a" * 64,
        "hardware": {"name": "x"},
        "batch": 1,
        "split": "validation",
        "costs": "cost table",
    }

    def loss(self, policy, *others, target="vllm", **options):
        policy = policy_from_mapping(policy)
        lowered = EXPORTERS[target](policy, Options(**options), "mine")
        return predicted_loss(policy, lowered, [policy_from_mapping(p) for p in others])

    def predicted(self, base, speedup, **changed):
        return {**base, "expected": {**self.SAME, "speedup": speedup, **changed}}

    def test_nothing_dropped_is_nothing_lost(self):
        loss = self.loss(self.predicted(MODEL, 1.5))
        assert (loss.policy, loss.lowered, loss.lost) == (1.5, 1.5, 0.0)

    def test_an_alternative_on_the_same_trace_tells(self):
        tuned = self.predicted(RATE, 2.0, k=5.1)
        loss = self.loss(tuned, self.predicted(MODEL, 1.75))
        assert (loss.policy, loss.lowered, loss.lost) == (2.0, 1.75, 0.25)

    @pytest.mark.parametrize("changed", [{"batch": 16}, {"trace_digest": "b"}, {"hardware": None}, {"speedup": None}])
    def test_another_record_tells_nothing(self, changed):
        tuned, other = self.predicted(RATE, 2.0, k=5.1), self.predicted(MODEL, 1.75)
        other["expected"] |= changed
        loss = self.loss(tuned, other)
        assert (loss.policy, loss.lowered, loss.lost) == (2.0, None, None)
        assert "no alternative" in loss.reason

    def test_stand_ins_and_lookups_are_unknown(self):
        for loss in (
            self.loss(self.predicted(SPARSE, 1.7), stand_in="eagle3", stand_in_model="h"),
            self.loss(self.predicted(LOOKUP, 1.7)),
        ):
            assert (loss.policy, loss.lost) == (1.7, None)
            assert loss.reason

    def test_no_prediction_no_loss(self):
        for expected in (None, {}, {"speedup": "2"}, {"speedup": True}, {"speedup": -1.0}):
            loss = self.loss({**MODEL, "expected": expected})
            assert (loss.lost, loss.reason) == (None, "the policy has no predicted speedup")

    def test_where_only_plain_decoding_is_left_all_of_it_is_lost(self):
        loss = self.loss(self.predicted(LATE, 1.4), target="tensorrt_llm")
        assert (loss.policy, loss.lowered) == (1.4, 1.0)
        assert loss.lost == pytest.approx(0.4)


class TestOptions:
    def test_the_registry_is_what_the_verb_takes(self):
        assert set(EXPORTERS) == set(typing.get_args(export.Target))
        assert set(EXPORTERS) - set(ENGINES) == {"specdial", "profile"}

    @pytest.mark.parametrize(
        ("options", "target", "says"),
        [
            ({"stand_in": "lookup"}, "specdial", "stand_in is 'lookup', which target specdial does not use"),
            ({"trace": "t"}, "vllm", "trace is 't', which target vllm does not use; it is for profile"),
            ({"vllm_context_ranges": True}, "sglang", "vllm_context_ranges is True"),
            ({"trtllm_schedule": "from"}, "vllm", "trtllm_schedule is 'from'"),
            ({"batch": 4}, "vllm", "batch is 4"),
            ({"stand_in": "eagle"}, "vllm", "stand_in is eagle without a model; add stand_in_model=ID"),
            ({"stand_in_model": "x"}, "vllm", "stand_in_model is given, and no stand-in uses it"),
            ({"stand_in": "lookup", "stand_in_model": "x"}, "vllm", "stand_in_model is given"),
        ],
    )
    def test_what_a_target_does_not_use_is_refused(self, options, target, says):
        with pytest.raises(UserError) as caught:
            Options(**options).check(target)
        assert says in str(caught.value)

    def test_a_stand_in_that_the_target_lacks(self):
        with pytest.raises(UserError, match="this target has no eagle drafter; use stand_in=lookup or model or eagle3"):
            EXPORTERS["llama_cpp"](policy_from_mapping(SPARSE), Options(stand_in="eagle", stand_in_model="h"), "mine")

    def test_every_listed_option_exists(self):
        assert set(USES) <= set(Options.__slots__)


def test_selections_matter_where_they_are_read():
    """A lookup drafter reads none, so its policies act alike whatever it is, unless they verify over one."""
    rows = (Row("all", "controller", "approximated", "k"),)

    def lowered_speedup(one, other):
        """What the first is predicted to do when lowered to the second."""
        policy = policy_from_mapping({**one, "expected": {**TestLoss.SAME, "speedup": 1.5}})
        lowered = SimpleNamespace(rows=rows, effective=policy_from_mapping(other))
        return predicted_loss(policy, lowered, []).lowered

    partial = {"mode": "partial", "full_period": 4}
    lossy, less = {**LOOKUP, "verify_kv": partial}, {**LOOKUP, "verify_kv": {**partial, "full_period": 8}}
    assert lowered_speedup(lossy, lossy) == 1.5
    assert lowered_speedup(lossy, less) is None
    assert lowered_speedup(LOOKUP, {**LOOKUP, "name": "other"}) == 1.5
    assert lowered_speedup(SPARSE, SPARSE) == 1.5
    assert lowered_speedup(SPARSE, {**SPARSE, "draft_kv": {"budget": 96}}) is None
