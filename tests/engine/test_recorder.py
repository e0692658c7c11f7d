"""The recorder's tables against the plain way to make them: row by row, round by round."""

from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from specdial.engine.recorder import Recorder
from specdial.engine.round import Round
from specdial.engine.trace.reader import read_table
from specdial.engine.trace.schema import DRAFTS, FULL, OUTPUTS, PLAIN, ROUNDS
from specdial.engine.trace.writer import write_table
from specdial.policies.controllers import Signals

SCHEMAS = {"rounds": ROUNDS, "drafts": DRAFTS, "outputs": OUTPUTS}


def documents(batch):
    return [SimpleNamespace(index=3 * b + 2, prompt_ids=list(range(5 + b))) for b in range(batch)]


def random_rounds(generator, batch, count, *, sampled, plain=False):
    """Ragged: sequences finish at different rounds, drafts differ in number, widths of the arrays differ by round."""
    lengths, finish = np.array([5 + b for b in range(batch)]), generator.integers(0, count + 1, batch)
    for number in range(count):
        active = finish > number
        k = np.where(active, generator.integers(0, 1 if plain else 9, batch), 0)
        k[~active] = generator.integers(0, 2)  # what the others hold must not matter
        width = int(k.max()) + int(generator.integers(0, 3))
        accepted = np.minimum(generator.integers(0, 9, batch), k)
        cut = (finish == number + 1) & (accepted > 0) & (generator.random(batch) < 0.5)  # a stop among them
        emitted = [list(range(int(n) + 1 - c)) if a else [] for n, a, c in zip(accepted, active, cut)]
        signals = Signals(*generator.random((3, batch, max(width, 1)), dtype=np.float32).astype(np.float64))
        probability = generator.random((batch, width), dtype=np.float32) if sampled else None
        drafts = np.zeros((batch, width), dtype=np.int64)
        times = generator.random(4).tolist()
        yield Round(
            active, lengths.copy(), k, accepted, emitted, plain, *times, drafts=drafts, signals=signals,
            accept_prob=probability,
        )  # fmt: skip
        lengths += [len(e) for e in emitted]


def row_by_row(given, rounds):
    """rounds and drafts of every document, the slow way."""
    tables = [{name: {c: [] for c in SCHEMAS[name].names} for name in ("rounds", "drafts")} for _ in given]
    for r in rounds:
        for b in np.flatnonzero(r.active):
            number = len(tables[b]["rounds"]["doc"])
            head = {"doc": given[b].index, "round": number}
            row = {
                **head, "context_tokens": r.context_tokens[b], "batch": len(given), "k": r.k[b],
                "accepted": r.accepted[b], "emitted": len(r.emitted[b]), "mode": PLAIN if r.plain else FULL,
                "rounds_since_full": 0, "draft_us": r.draft_us, "verify_us": r.verify_us, "select_us": r.select_us,
                "host_us": r.host_us, "recomputed": 0, "transfer_us": None, "exposed_us": None,
            }  # fmt: skip
            for name, value in row.items():
                tables[b]["rounds"][name].append(value)
            for i in range(r.k[b]):
                row = {
                    **head, "position": r.context_tokens[b], "arm": 0, "depth": i + 1,
                    "entropy_nats": r.signals.entropy_nats[b, i], "top1_prob": r.signals.top1_prob[b, i],
                    "margin": r.signals.margin[b, i], "match": i < r.accepted[b],
                    "accept_prob": None if r.accept_prob is None else float(r.accept_prob[b, i]),
                    "reached": i < r.accepted[b] or (i == r.accepted[b] and len(r.emitted[b]) > i),
                }  # fmt: skip
                for name, value in row.items():
                    tables[b]["drafts"][name].append(value)
    return tables


def as_table(columns, schema):
    assert set(columns) == set(schema.names)
    return pa.table([pa.array(columns[f.name], type=f.type, from_pandas=False) for f in schema], schema=schema)


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize(("batch", "count", "seed"), [(1, 1, 0), (1, 9, 1), (3, 12, 2), (8, 30, 3), (5, 0, 4)])
def test_tables_equal_row_by_row(batch, count, seed, sampled, tmp_path):
    given = documents(batch)
    rounds = list(random_rounds(np.random.default_rng(seed), batch, count, sampled=sampled))
    recorder = Recorder(given)
    for round_ in rounds:
        recorder.add(round_)
    expected = row_by_row(given, rounds)
    for b, document in enumerate(given):
        tables = recorder.tables(b, [*document.prompt_ids, 7, 8, 9])
        for name in ("rounds", "drafts"):
            assert as_table(tables[name], SCHEMAS[name]).equals(as_table(expected[b][name], SCHEMAS[name])), name
        assert as_table(recorder.rounds[b], ROUNDS).equals(as_table(expected[b]["rounds"], ROUNDS))
        outputs = as_table(tables["outputs"], OUTPUTS).to_pydict()
        assert outputs["token_id"] == [7, 8, 9]
        assert set(outputs["doc"]) == {document.index}
        assert outputs["position"] == [len(document.prompt_ids) + i for i in range(3)]
        for name, schema in SCHEMAS.items():
            write_table(tmp_path / name, tables[name], schema)
            assert read_table(tmp_path / name, schema).equals(as_table(tables[name], schema))


def test_plain_rounds_have_no_drafts():
    given = documents(3)
    rounds = list(random_rounds(np.random.default_rng(5), 3, 8, sampled=False, plain=True))
    recorder = Recorder(given)
    for round_ in rounds:
        recorder.add(round_)
    tables = [recorder.tables(b, d.prompt_ids) for b, d in enumerate(given)]
    assert {mode for t in tables for mode in t["rounds"]["mode"].tolist()} == {PLAIN}
    assert not any(len(t["drafts"]["doc"]) or len(t["outputs"]["doc"]) for t in tables)


def test_rounds_added_after_reading_are_seen():
    given = documents(2)
    rounds = list(random_rounds(np.random.default_rng(6), 2, 10, sampled=True))
    recorder = Recorder(given)
    for number, round_ in enumerate(rounds):
        recorder.add(round_)
        expected = row_by_row(given, rounds[: number + 1])
        assert [t["round"].tolist() for t in recorder.rounds] == [t["rounds"]["round"] for t in expected]


def test_infinite_and_missing_values_stay_apart():
    """Not a number in a signal is a value; no acceptance probability is none."""
    given = documents(1)
    (round_,) = random_rounds(np.random.default_rng(0), 1, 1, sampled=False)
    signals = Signals(*np.full((3, 1, 9), np.nan))
    changed = Round(
        np.array([True]), round_.context_tokens, np.array([2]), np.array([1]), [[1, 2]], False, 1.0, 1.0, 1.0, 1.0,
        drafts=np.zeros((1, 2), dtype=np.int64), signals=signals, accept_prob=None,
    )  # fmt: skip
    recorder = Recorder(given)
    recorder.add(changed)
    drafts = as_table(recorder.tables(0, given[0].prompt_ids)["drafts"], DRAFTS)
    assert drafts["accept_prob"].null_count == 2
    assert drafts["margin"].null_count == 0
    assert np.isnan(drafts["margin"].to_numpy()).all()
