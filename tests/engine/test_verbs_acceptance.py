"""Synthetic acceptance: the asked rates by depth, by seed, and a mark on everything that such a run leaves."""

import io
import json
from contextlib import redirect_stdout

import numpy as np
import pytest

from specdial.engine.acceptance import Acceptance, probability_of_mean
from specdial.engine.history import HistorySpec
from specdial.engine.loop import Decoding
from specdial.engine.sampling import Sampling
from specdial.engine.sequences import Sequences
from specdial.engine.trace.reader import read_costs, read_trace
from specdial.engine.verbs import calibrate, record, run, validate
from specdial.policies.errors import UserError
from specdial.policies.file import load_policy
from specdial.policies.schema import plain_policy, policy_from_mapping

KV = {"budget": 40, "sink": 2, "recent": 8, "window": 8}
FOUR = {"name": "four", "controller": {"kind": "fixed", "k": 4}, "draft_kv": KV}
RATE = {"name": "rate", "controller": {"kind": "rate", "k_max": 6, "gamma": 0.2}, "draft_kv": KV}
PLAIN = {"name": "plain", "drafter": {"kind": "none"}, "controller": {"kind": "none"}}
MARK = "(synthetic acceptance)"
LANES = 48


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def lanes(tiny_model):
    """Many sequences with one prompt."""
    one = Sequences(tiny_model("llama").decoder, 110, 1, history=HistorySpec(8, 1), backend="reference")
    prompt = np.random.default_rng(0).integers(0, 256, 40).tolist()
    one.prefill([prompt], [60])
    return one.repeated(LANES)


def played(lanes, synthetic, sampling):
    """k and accepted of every round of every sequence, [N] each."""
    lanes.hold(lanes.tokens[0][:40], limit=60)
    decoding = Decoding(lanes, policy_from_mapping(FOUR), sampling, list(range(LANES)), synthetic=synthetic)
    rounds = list(decoding.rounds())
    active = np.array([r.active for r in rounds])
    return np.array([r.k for r in rounds])[active], np.array([r.accepted for r in rounds])[active]


@pytest.mark.parametrize("sampling", [Sampling(seed=3), Sampling(temperature=1.0, seed=3)])
def test_every_depth_is_accepted_at_its_rate(lanes, sampling):
    """The last probability goes on for deeper drafts."""
    k, accepted = played(lanes, (0.9, 0.8, 0.5), sampling)
    for depth, rate in enumerate((0.9, 0.8, 0.5, 0.5)):
        judged = accepted[(k > depth) & (accepted >= depth)]
        assert len(judged) > 100
        assert abs((judged > depth).mean() - rate) < 4 * np.sqrt(rate * (1 - rate) / len(judged))


@pytest.mark.parametrize("mean", [0.5, 2.5, 3.4])
def test_the_asked_mean_is_accepted(lanes, mean):
    synthetic = Acceptance(mean=mean).of(policy_from_mapping(FOUR))
    k, accepted = played(lanes, synthetic, Sampling())
    whole = accepted[k == 4]
    assert abs(whole.mean() - mean) < 4 * whole.std() / np.sqrt(len(whole))


def test_certain_drafts_and_hopeless_ones(lanes):
    k, accepted = played(lanes, (1.0,), Sampling())
    assert (accepted == k).all()
    k, accepted = played(lanes, (0.0,), Sampling())
    assert (accepted == 0).all()


@pytest.mark.parametrize(("mean", "k"), [(0.01, 1), (0.5, 1), (3.4, 4), (3.999, 4), (0.7, 8), (7.9, 8), (30.0, 64)])
def test_the_probability_of_a_mean(mean, k):
    p = probability_of_mean(mean, k)
    assert 0 < p < 1
    assert p * (1 - p**k) / (1 - p) == pytest.approx(mean, rel=1e-6)


def test_what_cannot_be_is_refused(shared, tmp_path):
    for mean in (0.0, -1.0, 4.0, 9.0):
        with pytest.raises(UserError, match=r"acceptance\.mean is .* policy four drafts up to 4 tokens"):
            Acceptance(mean=mean).of(policy_from_mapping(FOUR))
    assert Acceptance(mean=3.0).of(plain_policy()) == ()
    job = {**shared, "policy": FOUR, "out": str(tmp_path / "t")}
    for acceptance, words in (
        ({"synthetic": [0.5], "mean": 1.0}, "both given"),
        ({"synthetic": [1.5]}, r"acceptance\.synthetic is 1\.5"),
        ({"mean": 4.0}, r"acceptance\.mean is 4"),
        ({"rate": 0.5}, r"unknown field acceptance\.rate"),
    ):
        with pytest.raises(UserError, match=words):
            record.run({**job, "acceptance": acceptance})
    with pytest.raises(UserError, match="drafts nothing"):
        record.run({**job, "policy": PLAIN, "acceptance": {"mean": 1.0}})
    with pytest.raises(UserError, match="dense=true records what drafts are worth"):
        record.run({**job, "dense": True, "budgets": [48], "acceptance": {"mean": 1.0}})
    with pytest.raises(UserError, match=r"acceptance\.mean is 2"):
        calibrate.run({**shared, "ks": [2, 4], "draft_kv": KV, "out": str(tmp_path / "c"), "acceptance": {"mean": 2.0}})
    assert not (tmp_path / "t").exists()
    assert not (tmp_path / "c").exists()


def unwrapped(text):
    """A title runs over several lines where it is longer than its table."""
    return " ".join(text.split())


def recorded(shared, out, **changes):
    record.run({**shared, "policy": FOUR, "acceptance": {"synthetic": [0.9, 0.5]}, "out": str(out), **changes})
    return read_trace(out)


def test_a_recording_is_marked_and_repeats_by_seed(shared, tmp_path, capsys):
    first = recorded(shared, tmp_path / "a")
    assert MARK in unwrapped(capsys.readouterr().out)
    assert first.meta["synthetic_acceptance"] == [0.9, 0.5]
    again, other = recorded(shared, tmp_path / "b"), recorded(shared, tmp_path / "c", sampling={"seed": 1})
    assert again.outputs.equals(first.outputs)
    assert again.rounds["accepted"].equals(first.rounds["accepted"])
    assert not other.rounds["accepted"].equals(first.rounds["accepted"])
    mean = recorded(shared, tmp_path / "d", acceptance={"mean": 3.0}, policy=RATE).meta["synthetic_acceptance"]
    assert mean == [pytest.approx(probability_of_mean(3.0, 6))]
    judged = recorded(shared, tmp_path / "e", acceptance={"synthetic": [], "mean": None})
    assert "synthetic_acceptance" not in judged.meta
    assert "acceptance" not in judged.meta["config"], "what was recorded before there was a choice can be resumed"


def test_sampled_drafts_are_recorded_with_the_probability_they_had(shared, tmp_path):
    trace = recorded(shared, tmp_path / "a", sampling={"temperature": 0.8})
    for depth, wanted in ((1, 0.9), (2, 0.5), (3, 0.5)):
        found = [row["accept_prob"] for row in trace.drafts.to_pylist() if row["depth"] == depth]
        assert found
        assert found == [pytest.approx(wanted)] * len(found)


def test_a_run_is_marked(shared, tmp_path, capsys):
    settings = {"model": shared["model"], "prompt": "Once upon a time " * 6, "new_tokens": 24, "ignore_eos": True}
    settings |= {"acceptance": {"mean": 3.4}, "out": str(tmp_path / "metrics.json")}
    with redirect_stdout(io.StringIO()):
        metrics = run.run({**settings, "policy": FOUR})
    assert metrics["synthetic_acceptance"] == [pytest.approx(probability_of_mean(3.4, 4))]
    assert (
        json.loads((tmp_path / "metrics.json").read_text())["synthetic_acceptance"] == metrics["synthetic_acceptance"]
    )
    assert MARK in capsys.readouterr().err
    with pytest.raises(UserError, match="drafts nothing"):
        run.run({**settings, "policy": PLAIN})


def test_a_validation_is_marked_and_compares_no_text(shared, tmp_path, capsys):
    settings = {**shared, "policies": [PLAIN, FOUR, RATE], "split": "all", "repeats": 1, "bootstrap": 10}
    found = validate.run({**settings, "acceptance": {"mean": 2.0}, "out": str(tmp_path / "v")})
    out = unwrapped(capsys.readouterr().out)
    assert out.count(MARK) == 1
    assert out.count("synthetic") == 3, "the title, and the column of each policy that drafts"
    written = json.loads((tmp_path / "v" / "validation.json").read_text())
    assert written["acceptance"] == {"synthetic": [], "mean": 2.0}
    plain, *drafting = (row["measured"] for row in found["policies"])
    assert plain["documents_differing_from_plain"] == 0
    assert "synthetic_acceptance" not in plain
    for measured, k_max in zip(drafting, (4, 6)):
        assert measured["documents_differing_from_plain"] is None
        assert measured["synthetic_acceptance"] == [pytest.approx(probability_of_mean(2.0, k_max))]
        assert measured["tokens_per_round"] > 1.5
    assert load_policy(tmp_path / "v" / "policies" / "four.yaml").measured["synthetic_acceptance"]
    assert "synthetic_acceptance" not in load_policy(tmp_path / "v" / "policies" / "plain.yaml").measured


def test_costs_are_marked(shared, tmp_path, capsys):
    sizes = {"contexts": [64], "ks": [0, 3], "budgets": [40], "repeats": 3, "draft_kv": KV}
    calibrate.run({**shared, **sizes, "acceptance": {"mean": 2.0}, "out": str(tmp_path / "c")})
    assert f"{MARK}, median [p10, p90] in ms" in unwrapped(capsys.readouterr().out)
    assert read_costs(tmp_path / "c").meta["acceptance"] == {"synthetic": [], "mean": 2.0}
