"""Sums over batches of documents, and that they do not depend on when rounds are binned."""

import dataclasses

import numpy as np
import pytest

from specdial.engine.trace.reader import read_trace
from specdial.simulator import tally as tallies
from specdial.simulator.lanes import read_record
from specdial.simulator.synthetic import Shape, write_trace
from specdial.simulator.tally import Units, tally

KNOTS = np.array([0.0, 2048.0])


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    out = tmp_path_factory.mktemp("five")
    write_trace(out, Shape(documents=5, new_tokens=24))
    return read_record(read_trace(out))


def test_units_are_consecutive_documents():
    units = Units.of(5, 2)
    assert (units.first.tolist(), units.sizes.tolist()) == ([0, 2, 4], [2, 2, 1])
    values = np.array([[3, 1, 4, 1, 5], [2, 7, 1, 8, 2]])
    assert units.largest(values).tolist() == [[3, 4, 5], [7, 8, 2]]
    assert units.mean(values).tolist() == [[2.0, 2.5, 5.0], [4.5, 4.5, 2.0]]


@pytest.mark.parametrize("batch", [1, 2])
def test_sums_and_bins_are_those_of_the_logged_rounds(record, policy, monkeypatch, batch):
    """Binned at once or after every round. Policies of one variant and of two, and as long as their drafts."""
    cell = {"to_context_tokens": 420, "overrides": {"controller": {"kind": "fixed", "k": 6}}}
    given = [policy("fixed", controller={"k": 3}), policy("fixed", controller={"k": 2}, cells=[cell])]
    units = Units.of(5, batch)
    arms = [[1], [1, 1]]
    flushes = []
    flush = tallies._flush
    monkeypatch.setattr(tallies, "_flush", lambda held, bins: (flushes.append(len(held)), flush(held, bins)))
    found = []
    for rounds_held in (1 << 18, 1, 30):
        monkeypatch.setattr(tallies, "FLUSH_ROUNDS", rounds_held)
        found.append(tally(record, record.documents, given, arms, units=units, knots=KNOTS, logged=(0, 1)))
        most = max(rounds_held // (2 * len(units.first)), 1)  # of two policies, every unit's
        assert max(flushes) == min(most, sum(flushes))
        flushes.clear()
    once, *often = found
    assert all(np.array_equal(once.bins.counts, other.bins.counts) for other in often)
    for place in (0, 1):
        log = once.logs[place]
        assert once.rounds[place] == len(log.k)
        assert once.drafted[place] == log.k.sum()
        assert once.accepted[place] == log.accepted.sum()
        assert once.emitted[place] == log.emitted.sum() == 5 * 24
        assert not once.missing[place]
        assert np.lexsort((log.round, log.doc)).tolist() == list(range(len(log.k)))
        counts = once.counts_of(place)  # [units, settings, k, knots]
        assert counts.shape == (len(units.first), 2, 7, 2)
        for unit, first in enumerate(units.first):
            mine = np.isin(log.doc, record.documents.doc[first : first + batch])
            numbers, where = np.unique(log.round[mine], return_inverse=True)
            k = np.zeros(len(numbers), np.int64)
            np.maximum.at(k, where, log.k[mine])
            variant = np.ones_like(k) if place else np.zeros_like(k)
            longest = np.zeros(len(numbers))
            np.maximum.at(longest, where, log.context_tokens[mine])
            variant[longest < 420] = 0
            for setting in (0, 1):
                expected = np.bincount(k[variant == setting], minlength=7)
                assert counts[unit, setting].sum(-1) == pytest.approx(expected)
    assert (once.refreshes_of(0), once.setting_of(3, partial=False)) == (None, 3)


def test_a_lossy_policy_counts_corrections_in_multiples_and_tokens_by_age(record, policy):
    lossy = policy("fixed", controller={"k": 2}, verify_kv={"mode": "partial", "full_period": 3, "budget": 64})
    given = [policy("fixed", controller={"k": 2}), lossy]
    rows = np.array([0.0, 8.0, 16.0])
    found = tally(
        record, record.documents, given, [[1], [1]], units=Units.of(5, 1), knots=KNOTS, logged=(1,), rows=rows,
        multiple=4,
    )  # fmt: skip
    assert found.setting_of(1, partial=True) == 3
    log = found.logs[1]
    age = np.zeros(len(log.k), np.int64)
    expected = np.zeros(3)
    waiting = 0
    for i, number in enumerate(log.round):
        if number == 0:
            waiting = 0
        age[i] = 0 if number % 3 == 2 else number % 3 + 1
        if age[i] == 0:
            up = -(-waiting // 4) * 4
            share = up / 8 - up // 8
            expected[up // 8] += 1.0 - share
            expected[min(up // 8 + 1, 2)] += share
            waiting = 0
        else:
            waiting += log.emitted[i]
    assert found.refreshes_of(1).sum(axis=(0, 1, 3)) == pytest.approx(expected)
    assert found.refreshes_of(0).sum() == 0
    assert found.lossy.emitted[1, 0, :3].tolist() == [log.emitted[age == a].sum() for a in range(3)]
    assert found.lossy.emitted[0].sum() == found.lossy.emitted[0, 0, 0] == 5 * 24
    counts = found.counts_of(1).sum(axis=(0, 2, 3))
    assert counts.tolist() == pytest.approx([(age == 0).sum(), (age > 0).sum()])


def test_a_lossy_policys_rounds_can_be_logged_alone(record, policy):
    """Without bins of rows nothing is divided by nothing."""
    lossy = policy("fixed", controller={"k": 2}, verify_kv={"mode": "partial", "full_period": 3, "budget": 64})
    with np.errstate(divide="raise", invalid="raise"):
        found = tally(record, record.documents, [lossy], [[1]], units=Units.of(5, 1), knots=np.zeros(1), logged=(0,))
    assert found.logs[0].emitted.sum() == found.emitted[0] == 5 * 24


def test_what_a_sparse_record_lacks_is_remembered_by_policy(record, policy, monkeypatch):
    """The second of two policies misses a draft in one round; of a complete record nobody asks."""
    steps = tallies.rounds

    def missing(*given, **named):
        for number, step in enumerate(steps(*given, **named)):
            yield dataclasses.replace(step, missing=(np.arange(len(step.k)) == 7) & (number == 1))

    monkeypatch.setattr(tallies, "rounds", missing)
    given, arms = [policy("fixed", controller={"k": k}) for k in (2, 3)], [[1], [1]]
    for complete in (False, True):
        asked = dataclasses.replace(record, complete=np.full(len(record.arms), complete))
        found = tally(asked, record.documents, given, arms, units=Units.of(5, 1), knots=KNOTS)
        assert found.missing.tolist() == [False, not complete]


def test_tokens_count_by_every_age_there_can_be(tmp_path, policy):
    """Nothing is ever accepted nor verified in full: the last of 12 tokens is 12 rounds old."""
    with np.errstate(over="ignore"):  # of chances that are 0
        write_trace(tmp_path, Shape(documents=1, new_tokens=12, difficulty_nats=150.0))
    hard = read_record(read_trace(tmp_path))
    lossy = policy("fixed", controller={"k": 1}, verify_kv={"mode": "partial", "full_period": 0, "budget": 64})
    found = tally(hard, hard.documents, [lossy] * 2, [[1]] * 2, units=Units.of(1, 1), knots=KNOTS)
    assert found.lossy.emitted.tolist() == [[[0.0, *[1.0] * 12]]] * 2
