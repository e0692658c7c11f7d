"""Corrections: factors are found again from rounds that took so much longer, and what cannot be told apart stays."""

import dataclasses
import json

import numpy as np
import pytest

from specdial.policies.errors import UserError
from specdial.policies.file import save_policy
from specdial.simulator.corrections import corrected, fit_corrections, read_corrections
from specdial.simulator.lanes import read_record
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


def test_a_smaller_last_batch_is_not_blamed_on_costs(trace, costs, policy):
    """Predicted of batches of 4 and 2, measured of 4 alone, by the same costs."""
    policies = [policy("fixed", controller={"k": k}) for k in (1, 2, 4, 8)]
    record = read_record(trace)
    whole = dataclasses.replace(record, documents=record.documents.take(np.arange(4)))
    expected, took = (replay(r, costs, policies, batch=4, bootstrap=0, full_batch=True) for r in (record, whole))
    known = [
        dataclasses.replace(p, expected=e.plain(), measured={**t.plain(), "k": e.k})
        for p, e, t in zip(policies, expected, took, strict=True)
    ]
    factors = fit_corrections(known, took[0].baseline_us_per_token)
    assert expected[0].baseline_us_per_token > 1.1 * took[0].baseline_us_per_token
    assert factors["none", "plain"] == pytest.approx(1.0, abs=0.01)
    assert factors["sparse_self", "verify"] == pytest.approx(1.0, abs=0.05)


def test_predictions_for_another_batch_correct_nothing(trace, costs, policy, tmp_path):
    known, _ = measured_policies(trace, costs, [policy("fixed")])
    told = dataclasses.replace(known[0], expected={**known[0].expected, "batch": 4})
    (tmp_path / "validation.json").write_text(json.dumps({"plain_us_per_token": 10.0, "batch": 1}))
    save_policy(told, tmp_path / "policies" / "one.yaml")
    with pytest.raises(UserError, match="no policy with a predicted time was measured"):
        read_corrections(str(tmp_path))


def test_what_is_no_validation_is_refused(tmp_path, policy):
    with pytest.raises(UserError, match="holds no validation; give the out= of specdial validate"):
        read_corrections(str(tmp_path))
    (tmp_path / "validation.json").write_text(json.dumps({"plain_us_per_token": 10.0}))
    save_policy(policy("fixed"), tmp_path / "policies" / "one.yaml")
    with pytest.raises(UserError, match="no policy with a predicted time was measured"):
        read_corrections(str(tmp_path))
