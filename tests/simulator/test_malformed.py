"""Damaged or foreign traces: each gives one clear error, through the real reader."""

import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specdial.engine.trace.reader import read_costs, read_trace
from specdial.engine.trace.schema import LATER_COLUMNS
from specdial.policies.errors import UserError
from specdial.policies.schema import plain_policy
from specdial.simulator import synthetic
from specdial.simulator.costs import CostModel
from specdial.simulator.lanes import read_record
from specdial.simulator.load import load_costs
from specdial.simulator.replay import replay
from specdial.simulator.synthetic import MODEL, Shape, write_synthetic_costs, write_trace


@pytest.fixture
def damaged(trace, tmp_path):
    """A copy of the trace to damage."""
    shutil.copytree(trace.path, tmp_path / "trace")
    return tmp_path / "trace"


def edit(path, change):
    """Rewrite one Parquet part through `change`."""
    pq.write_table(change(pq.read_table(path)), path)


def with_column(name, values):
    def change(table):
        field = table.schema.field(name)
        column = pa.array(values(table[name].to_numpy(zero_copy_only=False).copy()), type=field.type)
        return table.set_column(table.schema.get_field_index(name), field, column)

    return change


def first_is(value):
    def change(values):
        values[0] = value
        return values

    return change


def edit_meta(path, **parts):
    meta = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps({**meta, **parts}))


def cast_k(table):
    return table.set_column(table.schema.get_field_index("k"), "k", table["k"].cast(pa.float64()))


def repeat_first(table):
    return pa.concat_tables([table, table.slice(0, 1)])


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("rounds", lambda t: t.drop_columns(["verify_us"]), "lacks the column verify_us"),
        ("rounds", cast_k, "column k is double, not int32"),
        ("rounds", with_column("verify_us", first_is(np.nan)), "rounds.verify_us holds NaN"),
        ("rounds", with_column("host_us", first_is(-1.0)), "rounds.host_us holds a negative value"),
        ("rounds", repeat_first, "rounds repeats a row of"),
        ("rounds", with_column("doc", first_is(99)), "unknown documents"),
        ("drafts", with_column("entropy_nats", first_is(np.nan)), "drafts.entropy_nats holds NaN"),
        ("drafts", with_column("doc", first_is(99)), "unknown documents"),
        ("drafts", with_column("arm", first_is(7)), "an arm that meta.json does not name"),
        ("drafts", with_column("depth", first_is(20)), "outside depth 1..8"),
        ("drafts", with_column("position", first_is(3)), "outside its documents' outputs"),
        ("drafts", repeat_first, "drafts repeats a row of"),
        ("outputs", lambda t: t.slice(0, 20).take([i for i in range(20) if i != 7]), "lacks output tokens"),
    ],
)
def test_a_damaged_part_is_named(damaged, part, change, message):
    edit(damaged / f"{part}-00000.parquet", change)
    with pytest.raises(UserError, match=message):
        read_record(read_trace(damaged))


def test_a_truncated_part_is_named(damaged):
    path = damaged / "drafts-00001.parquet"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(UserError, match=r"drafts-00001.parquet is damaged"):
        read_trace(damaged)


def test_a_schema_from_the_future_is_refused(damaged):
    edit_meta(damaged, schema="specdial/trace/9")
    with pytest.raises(UserError, match="has schema 'specdial/trace/9'"):
        read_trace(damaged)


def test_a_part_of_another_model_is_named(damaged, tmp_path, monkeypatch):
    """Of the same documents, so that nothing else tells it."""
    monkeypatch.setattr(synthetic, "MODEL", {**MODEL, "digest": "1" * 64})
    write_trace(tmp_path / "other", Shape())
    shutil.copy(tmp_path / "other" / "drafts-00001.parquet", damaged)
    with pytest.raises(UserError, match=r"drafts-00001.parquet was recorded with another model"):
        read_trace(damaged)


def without_later_columns(table):
    return table.drop_columns([name for name in table.column_names if name in LATER_COLUMNS])


def test_what_was_written_before_columns_and_settings_were_added_still_reads_the_same(trace, damaged, tmp_path):
    write_synthetic_costs(tmp_path / "costs", (256,), (1,), Shape())
    before = read_record(read_trace(damaged)), read_costs(tmp_path / "costs")
    for part in (*damaged.glob("*.parquet"), tmp_path / "costs" / "costs.parquet"):
        edit(part, without_later_columns)
    assert "recomputed" not in pq.read_schema(damaged / "rounds-00000.parquet").names
    meta = json.loads((damaged / "meta.json").read_text())
    arms = [
        {"arm": a["arm"], "draft_kv": {n: a["draft_kv"][n] for n in ("budget", "sink", "recent")}} for a in meta["arms"]
    ]
    edit_meta(damaged, arms=arms)
    after = read_record(read_trace(damaged)), read_costs(tmp_path / "costs")
    assert after[0].arms == before[0].arms
    assert (after[0].run == before[0].run).all()
    assert after[0].trace.rounds.equals(before[0].trace.rounds)
    costs = [CostModel.from_table(table) for _, table in (before, after)]
    one, other = (replay(r, c, [plain_policy()], bootstrap=0) for (r, _), c in zip((before, after), costs))
    assert one[0].plain() == other[0].plain()
    assert costs[0].measured.keys() == costs[1].measured.keys()


def test_no_trace_at_all(tmp_path):
    with pytest.raises(UserError, match=r"no meta.json"):
        read_trace(tmp_path)


def test_costs_of_another_model_are_refused(trace, tmp_path):
    write_synthetic_costs(tmp_path, (256,), (1,), Shape())
    assert load_costs(str(tmp_path), trace).source.startswith("cost table")
    edit_meta(tmp_path, model={**MODEL, "name": "other", "digest": "1" * 64})
    with pytest.raises(UserError, match="costs of another model"):
        load_costs(str(tmp_path), trace)


def test_a_damaged_cost_table_is_named(tmp_path):
    write_synthetic_costs(tmp_path, (256,), (1,), Shape())
    edit(tmp_path / "costs.parquet", with_column("median_us", first_is(np.nan)))
    with pytest.raises(UserError, match="median_us holds NaN"):
        read_costs(tmp_path)


@pytest.mark.parametrize("number", [-1, 2**60, 1.0, True])
@pytest.mark.parametrize("part", ["doc", "prompt_tokens", "arm", "k_max"])
def test_numbers_that_readers_make_room_for_are_held_to_what_can_be(damaged, part, number):
    meta = json.loads((damaged / "meta.json").read_text())
    owner = meta["arms"][0] if part == "arm" else meta if part == "k_max" else meta["documents"][-1]
    owner[part] = number
    edit_meta(damaged, **meta)
    with pytest.raises(UserError, match=rf"meta\.json lacks a usable .*{part}"):
        read_record(read_trace(damaged))


def test_text_that_is_not_utf8_is_damage(tmp_path):
    write_synthetic_costs(tmp_path, (256,), (1,), Shape())
    raw = (tmp_path / "costs.parquet").read_bytes()
    for name in (b"drafter", b"median_us"):  # of a column
        (tmp_path / "costs.parquet").write_bytes(raw.replace(name, b"\xda" + name[1:]))
        with pytest.raises(UserError, match="is damaged"):
            read_costs(tmp_path)
