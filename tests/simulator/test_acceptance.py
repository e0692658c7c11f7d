"""The acceptance model against data whose hazard is known, and on documents it has not seen."""

import dataclasses

import numpy as np
import pyarrow as pa
import pytest

from specdial.engine.trace.reader import read_trace
from specdial.simulator import acceptance
from specdial.simulator.acceptance import (
    FEATURES,
    Judged,
    calibration,
    fit_hazard,
    fit_rate,
    judged_drafts,
)
from specdial.simulator.check import check_acceptance
from specdial.simulator.inversion import tail_acceptance
from specdial.simulator.lanes import read_record
from specdial.simulator.mixing import upper_share, with_budgets
from specdial.simulator.synthetic import Shape, write_trace


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    out = tmp_path_factory.mktemp("large")
    write_trace(out, Shape(documents=12, new_tokens=200, budgets=(64, 128, 256)))
    return read_record(read_trace(out))


def test_only_judged_drafts_count(record):
    """A chain contributes its accepted drafts and its first rejection, nothing after."""
    drafts = judged_drafts(record, arms=[0])
    run, depths = record.run[0::3], record.depths[0::3]
    assert len(drafts.label) == int(np.minimum(run + 1, depths).sum())
    assert drafts.label.sum() == run.sum()


def test_a_known_hazard_is_recovered():
    generator = np.random.default_rng(0)
    features = generator.normal(size=(20_000, len(FEATURES)))
    logit = 0.5 - 1.5 * features[:, 1] + 0.3 * features[:, 4]
    label = (generator.random(20_000) < 1.0 / (1.0 + np.exp(-logit))).astype(float)
    found = fit_hazard(Judged(features, label))
    assert found.weights / found.scale == pytest.approx([0.0, -1.5, 0.0, 0.0, 0.3, 0.0], abs=0.08)


def test_held_out_documents_are_predicted_better_than_by_the_mean(record):
    hazard = fit_hazard(judged_drafts(record, "train"))
    held_out = judged_drafts(record, "test")
    score = calibration(hazard.probability(held_out.features), held_out.label)
    assert score.log_loss < score.base_log_loss - 0.02
    assert score.expected_calibration_error < 0.05
    assert sum(count for _, _, count in score.reliability) == score.n == len(held_out.label)


def test_calibration_of_the_truth_is_small_and_of_overconfidence_large():
    generator = np.random.default_rng(0)
    truth = generator.random(50_000)
    label = (generator.random(50_000) < truth).astype(float)
    assert calibration(truth, label).expected_calibration_error < 0.01
    assert calibration(np.where(truth > 0.5, 0.99, 0.01), label).expected_calibration_error > 0.2


def test_rate_starts_from_what_the_record_shows(record):
    fit = fit_rate(record, 2, "train")
    assert fit.slope == pytest.approx(1.6, abs=0.5)
    assert fit.bias == pytest.approx(3.2, abs=0.6)
    assert fit.accepted_nats < fit.rejected_nats
    assert 0.0 < fit.acceptance < 1.0


def test_centres_of_the_rate_are_means_of_accepted_and_of_rejected_drafts(record):
    drafts, fit = judged_drafts(record, "train", [1]), fit_rate(record, 1, "train")
    entropy, accepted = drafts.features[:, FEATURES.index("entropy_nats")], drafts.label == 1.0
    assert 0 < accepted.sum() < len(accepted)
    found = (fit.accepted_nats, fit.rejected_nats, fit.acceptance)
    assert found == pytest.approx((entropy[accepted].mean(), entropy[~accepted].mean(), accepted.mean()))


def test_a_left_out_budget_is_predicted_from_its_neighbours(record):
    mixed = with_budgets(record, [(0, 2, 128)], seed=0)
    assert upper_share(64, 256, 128) == pytest.approx(0.5)
    real, modelled = record.run[1::3].mean(), mixed.run[3::4].mean()
    assert modelled == pytest.approx(real, rel=0.05)
    assert [arm["draft_kv"]["budget"] for arm in mixed.arms] == [64, 128, 256, 128]
    with pytest.raises(ValueError, match="does not lie between"):
        upper_share(64, 256, 512)


def test_the_check_scores_what_was_not_fitted(record):
    check = check_acceptance(record, "train", "validation")
    assert check.hazard.log_loss < check.hazard.base_log_loss
    assert [left.budget for left in check.left_out] == [128]
    assert check.left_out[0].modelled == pytest.approx(check.left_out[0].recorded, rel=0.05)
    assert check_acceptance(record, "train", "train").hazard is None


def test_scores_kept_over_rounds_have_an_age(tmp_path):
    """Kept for three rounds; and not made anew by partial rounds, of which a full one is the third."""
    write_trace(tmp_path, Shape(documents=1))
    trace = read_trace(tmp_path)
    trace.meta["dense"] = False
    rounds = trace.rounds.num_rows
    assert read_record(trace).age is None
    trace.meta["policy"]["draft_kv"]["refresh_rounds"] = 3
    assert read_record(trace).age.tolist() == [i % 3 for i in range(rounds)]
    trace.meta["policy"]["draft_kv"]["refresh_rounds"] = 1
    since = pa.array([(i + 1) % 3 for i in range(rounds)], pa.int32())  # 1 2 0 1 2 0
    at = trace.rounds.column_names.index("rounds_since_full")
    partial = dataclasses.replace(trace, rounds=trace.rounds.set_column(at, trace.rounds.schema.field(at), since))
    record = read_record(partial)
    assert record.age.tolist() == [i % 3 for i in range(rounds)]
    ages = judged_drafts(record, arms=[0]).features[:, FEATURES.index("log_age")]
    assert set(np.round(np.exp(ages) - 1.0)) == {0.0, 1.0, 2.0}


@pytest.mark.parametrize("ridge", [1e-4, 1.0])
def test_the_fit_is_where_likelihood_and_ridge_balance(monkeypatch, ridge):
    """d/dw of mean log loss + ridge |w|^2 / 2 is 0, the bias is free."""
    if ridge != 1e-4:  # what it is
        monkeypatch.setattr(acceptance, "RIDGE", ridge)
    random = np.random.default_rng(0)
    x = random.normal(size=(200, 2))
    label = (random.random(200) < 1.0 / (1.0 + np.exp(-(1.0 + x @ [2.0, -1.0])))).astype(float)
    found = acceptance._logistic(x, label)
    error = 1.0 / (1.0 + np.exp(-(found[0] + x @ found[1:]))) - label
    assert error.mean() == pytest.approx(0.0, abs=1e-4)
    assert x.T @ error / 200 + ridge * found[1:] == pytest.approx([0.0, 0.0], abs=1e-4)
    assert found[1] > 0.1


def test_calibration_by_hand():
    """Bins of a tenth; a probability of 1 belongs to the last."""
    p, label = np.array([0.05, 0.05, 0.5, 1.0]), np.array([0.0, 1.0, 1.0, 1.0])
    found = acceptance.calibration(p, label)
    predicted, seen, count = zip(*found.reliability, strict=True)
    assert predicted == pytest.approx((0.05, 0.5, 1.0))
    assert (seen, count, found.n) == ((0.5, 1.0, 1.0), (2, 1, 1), 4)
    assert found.expected_calibration_error == pytest.approx((2 * 0.45 + 0.5) / 4)
    assert found.log_loss == pytest.approx(-(np.log(0.95) + np.log(0.05) + np.log(0.5)) / 4)
    assert found.base_log_loss == pytest.approx(-(0.75 * np.log(0.75) + 0.25 * np.log(0.25)))
    for certain in (np.zeros(2), np.ones(2)):
        found = acceptance.calibration(certain, certain)
        assert 0.0 < found.log_loss < 1.1e-9
        assert 0.0 < found.base_log_loss < 1e-7


@pytest.mark.parametrize(
    ("label", "accepted_nats", "rejected_nats", "acceptance_rate"),
    [([1.0, 1.0, 0.0, 0.0], 0.5, 2.5, 0.5), ([1.0] * 4, 1.5, 3.0, 1.0), ([0.0] * 4, 0.0, 1.5, 0.0),
     ([1.0, 0.5, 0.5, 0.0], 0.75, 2.25, 0.5)],
)  # fmt: skip
def test_the_rate_starts_at_weighted_means(monkeypatch, label, accepted_nats, rejected_nats, acceptance_rate):
    """Entropies 0 to 3. Where nothing was rejected, rejected drafts are taken to be as unsure as the least sure one."""
    features = np.zeros((4, len(FEATURES)))
    features[:, FEATURES.index("entropy_nats")] = np.arange(4.0)
    features[:, 0] = 77.0
    monkeypatch.setattr(acceptance, "judged_drafts", lambda *asked: Judged(features, np.array(label)))
    found = fit_rate(None, 0)
    assert (found.accepted_nats, found.rejected_nats) == pytest.approx((accepted_nats, rejected_nats))
    assert found.acceptance == acceptance_rate
    assert found.slope >= 0.0  # of entropies that say the opposite too
    assert -50.0 <= found.bias <= 50.0
    monkeypatch.setattr(acceptance, "judged_drafts", lambda *asked: Judged(features[:0], np.zeros(0)))
    assert fit_rate(None, 0) is None
    with pytest.raises(ValueError, match="no judged drafts"):
        fit_hazard(Judged(features[:0], np.zeros(0)))


def test_judged_drafts_are_those_of_the_split_with_what_was_known_of_them(record):
    arm, split = 1, "validation"
    found = judged_drafts(record, split, [arm])
    documents, rows = record.documents, []
    position = 0
    for doc in range(len(documents)):
        for _ in range(int(documents.end[doc] - documents.start[doc])):
            cell = position * len(record.arms) + arm
            position += 1
            for depth in range(int(record.depths[cell])) if documents.split[doc] == split else ():
                if depth <= record.run[cell]:
                    known = [record.signals[name][depth, cell] for name in ("entropy_nats", "top1_prob", "margin")]
                    rows.append([np.log(depth + 1), *known, np.log(128), 0.0, float(depth < record.run[cell])])
    order = np.lexsort(np.array(rows).T)
    mine = np.column_stack([found.features, found.label])
    assert len(mine) == len(rows) > 100
    assert mine[np.lexsort(mine.T)] == pytest.approx(np.array(rows)[order])


@pytest.mark.parametrize(
    ("fitted", "bias", "slope"),
    [((77.0, 1.0), 50.0, 0.0), ((-77.0, -99.0), -50.0, 50.0), ((2.0, -0.25), 2.0, 0.25)],
)
def test_the_rate_starts_within_what_a_policy_may_say(record, monkeypatch, fitted, bias, slope):
    monkeypatch.setattr(acceptance, "_logistic", lambda x, label: np.array(fitted))
    found = fit_rate(record, 0)
    assert (found.bias, found.slope) == (bias, slope)


def test_judged_drafts_of_some_documents_are_theirs_and_of_repeated_ones_counted_once(record):
    width, last = len(record.arms), len(record.documents) - 1

    def of(*places):
        some = dataclasses.replace(record, documents=record.documents.take(np.array(places)))
        return judged_drafts(some, arms=[1]), tail_acceptance(some, 1)

    found, tail = of(last)
    start = int(record.documents.offset[last])
    cells = np.arange(start, start + int(record.documents.end[last] - record.documents.start[last])) * width + 1
    depth = np.arange(record.k_max)[:, None]
    reached = (depth <= record.run[cells]) & (depth < record.depths[cells])
    assert found.features[:, 1].tolist() == record.signals["entropy_nats"][:, cells][reached].tolist()
    assert tail[0] == (record.run[cells] >= 1).sum() / (record.depths[cells] >= 1).sum()
    both, twice = of(0, last), of(last, 0, last)
    assert len(both[0].label) == len(found.label) + len(of(0)[0].label)
    assert both[0].features.tolist() == twice[0].features.tolist()
    assert both[1].tolist() == twice[1].tolist()
