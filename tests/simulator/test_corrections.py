"""Corrections: factors are found again from rounds that took so much longer, and what cannot be told apart stays."""

import dataclasses
import json

import pytest

from specdial.policies.errors import UserError
from specdial.policies.file import save_policy
from specdial.simulator.corrections import corrected, fit_corrections, read_corrections
from specdial.simulator.replay import replay

TRUE = {("sparse_self", "draft"): 1.6, ("sparse_self", "verify"): 0.8, ("none", "plain"): 1.1}


def measured_policies(trace, costs, policies):
    """Policies with what `costs` predict, and what they would measure if the true factors held."""
    expected = replay(trace, costs, policies, bootstrap=0)
    took = replay(trace, corrected(costs, TRUE), policies, bootstrap=0)
    names = ("speedup", "breakdown", "tokens_per_round", "k", "baseline_us_per_token")
    found = [
        dataclasses.replace(
            policy,
            expected={name: getattr(e, name) for name in names},
            measured={name: getattr(t, name) for name in ("us_per_token", "tokens_per_round", "k", "speedup")},
        )
        for policy, e, t in zip(policies, expected, took, strict=True)
    ]
    return found, took


def test_factors_are_found_again_and_correct_the_prediction(trace, costs, policy):
    policies = [policy("fixed", controller={"k": k}, budget=b) for k in (1, 2, 4, 8) for b in (128, 256)]
    known, took = measured_policies(trace, costs, policies)
    factors = fit_corrections(known, took[0].baseline_us_per_token)
    assert factors["none", "plain"] == pytest.approx(1.1)
    assert factors["sparse_self", "draft"] == pytest.approx(1.6, rel=0.03)
    assert factors["sparse_self", "verify"] == pytest.approx(0.8, rel=0.03)
    assert factors["sparse_self", "host"] == pytest.approx(1.0, abs=0.1)
    again = replay(trace, corrected(costs, factors), policies, bootstrap=0)
    for predicted, true in zip(again, took, strict=True):
        assert predicted.speedup == pytest.approx(true.speedup, rel=0.01)


def test_one_measurement_moves_all_terms_together_and_nothing_moves_without_need(trace, costs, policy):
    known, took = measured_policies(trace, costs, [policy("fixed")])
    for plain_us, share in ((took[0].baseline_us_per_token, 0.02), (known[0].expected["baseline_us_per_token"], 0.02)):
        factors = fit_corrections(known, plain_us)
        terms = {term: us for term, us in known[0].expected["breakdown"].items() if us > 0.0}
        sum_us = sum(us * factors["sparse_self", term] for term, us in terms.items())
        assert sum_us == pytest.approx(known[0].measured["us_per_token"], rel=share)
    assert factors["none", "plain"] == pytest.approx(1.0)


def test_what_is_no_validation_is_refused(tmp_path, policy):
    with pytest.raises(UserError, match="holds no validation; give the out= of specdial validate"):
        read_corrections(str(tmp_path))
    (tmp_path / "validation.json").write_text(json.dumps({"plain_us_per_token": 10.0}))
    save_policy(policy("fixed"), tmp_path / "policies" / "one.yaml")
    with pytest.raises(UserError, match="no policy with a predicted time was measured"):
        read_corrections(str(tmp_path))
