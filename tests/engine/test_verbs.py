"""The engine's verbs end to end on a tiny random model: what they write, and that it hangs together."""

import io
import json
from contextlib import redirect_stdout
from types import SimpleNamespace

import numpy as np
import pytest

from specdial.engine import timed
from specdial.engine.trace.reader import read_costs, read_trace
from specdial.engine.verbs import calibrate, record, run, validate
from specdial.engine.verbs.validate_groups import Group
from specdial.policies.errors import UserError
from specdial.policies.fields import to_plain
from specdial.policies.file import load_policy, policy_digest
from specdial.policies.schema import policy_from_mapping

KV = {"budget": 40, "sink": 2, "recent": 8, "window": 8}
PLAIN = {"name": "plain", "drafter": {"kind": "none"}, "controller": {"kind": "none"}}
FIXED = {"name": "four", "controller": {"kind": "fixed", "k": 4}, "draft_kv": KV}
RATE = {"name": "rate", "controller": {"kind": "rate", "k_max": 6, "gamma": 0.2}, "draft_kv": KV}
TIMES = ("draft_us", "verify_us", "select_us", "host_us")


pytestmark = pytest.mark.usefixtures("one_thread")


def rows(table, *, without=()):
    return table.drop_columns([name for name in without if name in table.column_names]).to_pylist()


def test_record_writes_one_round_after_another(shared, tmp_path, capsys):
    found = record.run({**shared, "policy": FIXED, "out": str(tmp_path / "t")})
    trace = read_trace(tmp_path / "t")
    assert found["documents"] == 3
    assert (found["tokens"], found["rounds"]) == (60, trace.rounds.num_rows)
    assert trace.meta["policy_digest"] == policy_digest(policy_from_mapping(FIXED))
    assert (trace.meta["dense"], trace.meta["model"]["random"]) == (False, False)
    for doc in range(3):
        mine = [row for row in rows(trace.rounds) if row["doc"] == doc]
        ends = np.cumsum([row["emitted"] for row in mine]) + 96
        assert [row["context_tokens"] for row in mine] == [96, *ends[:-1]]
        assert ends[-1] == 116
        assert all(row["emitted"] == row["accepted"] + 1 and row["accepted"] <= row["k"] <= 4 for row in mine)
        assert all(row["verify_us"] > 0 and row["mode"] == "full" for row in mine)
    drafted = sum(row["k"] for row in rows(trace.rounds))
    assert trace.drafts.num_rows == drafted
    assert sum(row["match"] for row in rows(trace.drafts)) == sum(row["accepted"] for row in rows(trace.rounds))
    assert "recorded" in capsys.readouterr().out


def test_recordings_of_lossless_policies_hold_the_same_output(shared, tmp_path):
    outputs = []
    for name, changes in {
        "plain": {"policy": PLAIN},
        "fixed": {"policy": FIXED},
        "rate": {"policy": RATE},
        "batch": {"policy": RATE, "batch": 2},
        "dense": {"policy": PLAIN, "dense": True, "budgets": [96, 104], "k_max": 3},
    }.items():
        record.run({**shared, **changes, "out": str(tmp_path / name)})
        outputs.append(rows(read_trace(tmp_path / name).outputs))
    assert all(output == outputs[0] for output in outputs)


def test_a_split_named_twice_is_recorded_once(shared, tmp_path):
    both = record.run({**shared, "policy": PLAIN, "split": "train+train+test", "out": str(tmp_path / "a")})
    docs = {row["doc"] for row in rows(read_trace(tmp_path / "a").rounds)}
    assert both["documents"] == len(docs) == 2


def test_a_finished_recording_is_not_done_again(shared, tmp_path):
    settings = {**shared, "policy": FIXED, "out": str(tmp_path / "t")}
    record.run(settings)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "t").iterdir()}
    found = record.run(settings)
    assert (found["documents"], found["resumed_documents"]) == (0, 3)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "t").iterdir()} == before


@pytest.mark.parametrize("name", ["outputs", "drafts", "rounds"])
def test_a_part_that_was_deleted_is_missed_and_recorded_again(shared, tmp_path, name):
    """Of documents 0, 1 | 2 the second is done again with the first of its batch, and counted so."""
    settings = {**shared, "policy": FIXED, "batch": 2, "out": str(tmp_path / "t")}
    record.run(settings)
    before = read_trace(tmp_path / "t")
    (tmp_path / "t" / f"{name}-00001.parquet").unlink()
    if name != "rounds":
        with pytest.raises(UserError, match=f"{name}-00001.parquet is missing"):
            read_trace(tmp_path / "t")
    found = record.run(settings)
    assert (found["documents"], found["resumed_documents"]) == (2, 1)
    again = read_trace(tmp_path / "t")
    assert rows(again.outputs) == rows(before.outputs)
    assert len(rows(again.drafts)) == len(rows(before.drafts))


def test_a_recording_with_other_settings_is_refused(shared, tmp_path):
    record.run({**shared, "policy": FIXED, "out": str(tmp_path / "t")})
    for changes in ({"policy": RATE}, {"policy": FIXED, "sampling": {"temperature": 0.5}}):
        with pytest.raises(UserError, match="holds another run"):
            record.run({**shared, **changes, "out": str(tmp_path / "t")})


def test_a_recording_of_weights_that_have_changed_since_is_refused(shared, tmp_path, tiny_checkpoint):
    """The same settings, but the model behind the path is another one now."""
    link = tmp_path / "model"
    link.symlink_to(tiny_checkpoint("llama"))
    settings = {**shared, "model": {"source": str(link), "device": "cpu"}, "policy": PLAIN, "out": str(tmp_path / "t")}
    record.run(settings)
    link.unlink()
    link.symlink_to(tiny_checkpoint("llama", seed=5))
    with pytest.raises(UserError, match="holds a trace of another recording"):
        record.run(settings)


def test_a_damaged_meta_stops_a_resumed_recording(shared, tmp_path):
    settings = {**shared, "policy": PLAIN, "out": str(tmp_path / "t")}
    record.run(settings)
    (tmp_path / "t" / "meta.json").write_text("{")
    with pytest.raises(UserError, match=r"meta\.json is not readable JSON"):
        record.run(settings)


def test_calibrate_times_every_operation(shared, tmp_path):
    sizes = {"contexts": [64, 96], "ks": [0, 1, 3], "budgets": [40, 48], "batches": [1, 2], "repeats": 3}
    found = calibrate.run({**shared, **sizes, "draft_kv": KV, "out": str(tmp_path / "c")})
    table = read_costs(tmp_path / "c")
    costs = rows(table.rows)
    assert found["rows"] == len(costs)
    places = {(c, b) for c in (64, 96) for b in (1, 2)}
    for op, ks, budgets in (("plain", {0}, {0}), ("verify", {0, 1, 3}, {0}), ("draft", {0}, {40, 48})):
        mine = [row for row in costs if row["op"] == op]
        assert {(row["context_tokens"], row["batch"]) for row in mine} == places
        assert {row["k"] for row in mine} == ks
        assert {row["budget"] for row in mine} == budgets
        assert all(0 < row["p10_us"] <= row["median_us"] <= row["p90_us"] for row in mine)
    assert table.meta["model"]["digest"] == read_meta_digest(shared)


def read_meta_digest(shared):
    from specdial.engine.weights import load_model

    return load_model(shared["model"]["source"], device="cpu").digest


def decoded(shared, **changes):
    text = io.StringIO()
    settings = {"model": shared["model"], "policy": PLAIN, "prompt": "Once upon a time " * 6, "new_tokens": 24}
    with redirect_stdout(text):
        metrics = run.run({**settings, "ignore_eos": True, **changes})
    return text.getvalue(), metrics


def test_run_streams_the_same_text_under_every_lossless_policy(shared, tmp_path, capsys):
    plain, metrics = decoded(shared)
    assert (metrics["rounds"], metrics["new_tokens"], metrics["alpha"]) == (24, 24, None)
    assert len(plain) > 1
    for policy in (FIXED, RATE):
        text, metrics = decoded(shared, policy=policy, out=str(tmp_path / "metrics.json"))
        assert text == plain
        assert (metrics["new_tokens"], metrics["lossless"]) == (24, True)
        assert metrics["rounds"] <= 24
        written = json.loads((tmp_path / "metrics.json").read_text())
        assert written["text"] + "\n" == text
        assert {name: written[name] for name in metrics} == metrics
    assert "tokens/s" in capsys.readouterr().err


def test_run_reads_a_prompt_from_a_file_and_samples_by_seed(shared, tmp_path):
    (tmp_path / "essay.txt").write_text("An essay on the sea. " * 5)
    changes = {"prompt": f"@{tmp_path / 'essay.txt'}", "policy": FIXED}
    hot = {"temperature": 1.0, "seed": 3}
    first, again = (decoded(shared, **changes, sampling=hot)[0] for _ in range(2))
    assert first == again
    assert decoded(shared, **changes, sampling={**hot, "seed": 4})[0] != first


def test_random_weights_are_called_random_everywhere(shared, tmp_path, monkeypatch, capsys):
    from specdial.engine.models import shapes

    small = read_config_of(shared)
    monkeypatch.setitem(shapes.SHAPES, "tiny", small)
    job = {**shared, "model": {"source": "shape:tiny", "device": "cpu"}}
    assert decoded(job)[1]["random_weights"] is True
    record.run({**job, "policy": PLAIN, "out": str(tmp_path / "t")})
    validate.run({**job, "policies": [FIXED], "repeats": 1, "bootstrap": 10, "out": str(tmp_path / "v")})
    assert read_trace(tmp_path / "t").meta["model"]["random"] is True
    assert json.loads((tmp_path / "v" / "validation.json").read_text())["model"]["random"] is True
    captured = capsys.readouterr()
    assert captured.out.count("(random") >= 2
    assert "(random weights)" in captured.err


def read_config_of(shared):
    from pathlib import Path

    from specdial.engine.weights.hf import read_config

    return read_config(Path(shared["model"]["source"]), "tiny")


def test_validate_compares_with_plain_and_with_what_was_predicted(shared, tmp_path, capsys):
    expected = {"speedup": 1.25, "low": 1.1, "high": 1.4, "level": "exact", "tokens_per_round": 2.0}
    expected["baseline_us_per_token"] = 1e9
    policies = [PLAIN, {**FIXED, "expected": expected}, {**RATE, "expected": {**expected, "speedup": 0.75}}]
    settings = {**shared, "policies": policies, "split": "all", "repeats": 2, "bootstrap": 50}
    found = validate.run({**settings, "out": str(tmp_path / "v")})
    written = json.loads((tmp_path / "v" / "validation.json").read_text())
    assert written["schema"] == "specdial/validation/1"
    assert written["policies"] == found["policies"]
    plain, fixed, rate = written["policies"]
    assert plain["measured"]["speedup"] == 1.0
    assert plain["measured"]["tokens_per_round"] == 1.0
    assert (plain["k_max"], plain["budget"], plain["predicted"]) == (0, None, {})
    for row, policy in zip((fixed, rate), policies[1:]):
        m = row["measured"]
        assert row["policy_digest"] == policy_digest(policy_from_mapping(policy))
        assert row["predicted"] == policy["expected"]
        assert row["error_frac"] == pytest.approx(policy["expected"]["speedup"] / m["speedup"] - 1.0)
        assert m["documents_differing_from_plain"] == 0
        assert row["lossless"] is True
        assert m["tokens"] == 60
        assert 0 < m["low"] <= m["high"]
        assert m["tokens_per_round"] >= 1.0
        assert 0.0 <= m["alpha"] <= 1.0
        assert 0.0 < m["k"] <= row["k_max"]
    assert written["rank_correlation"] in (-1.0, 1.0, pytest.approx(1.0), pytest.approx(-1.0))
    assert 0.0 <= written["regret"] < 1.0
    errors = [abs(row["error_frac"]) for row in (fixed, rate)]  # plain decoding has nothing to predict
    assert (written["median_error_frac"], written["worst_error_frac"]) == (sum(errors) / 2, max(errors))
    tokens = [r["predicted"]["tokens_per_round"] / r["measured"]["tokens_per_round"] for r in (fixed, rate)]
    costs = [(1.0 + r["error_frac"]) / t for r, t in zip((fixed, rate), tokens)]
    assert written["tokens_error_frac"] == pytest.approx(sum(abs(t - 1.0) for t in tokens) / 2)
    assert written["cost_error_frac"] == pytest.approx(sum(abs(c - 1.0) for c in costs) / 2)
    predicted_us = fixed["predicted"]["baseline_us_per_token"]
    assert written["plain_error_frac"] == pytest.approx(predicted_us / written["plain_us_per_token"] - 1.0)
    assert "calibrate again" in " ".join(capsys.readouterr().out.split())
    for row in (plain, fixed, rate):
        measured = load_policy(tmp_path / "v" / "policies" / f"{row['name']}.yaml").measured
        assert measured["speedup"] == row["measured"]["speedup"]
        assert measured["split"] == "all"


@pytest.mark.parametrize("captures", [False, True])
def test_validate_warms_up_before_it_times_and_times_no_run_that_captured(shared, tmp_path, monkeypatch, captures):
    """Batches of 2, 2 and 1: new sequences warm up, then every policy runs once a repeat, unless a graph was new."""
    runs, decoding = [], timed.Decoding

    def noted(sequences, policy, *rest, **more):
        runs.append((sequences.batch, policy.k_max))
        if captures and len(runs) == 12:  # timed
            sequences.graphs.capturing_us += 1.0
        return decoding(sequences, policy, *rest, **more)

    monkeypatch.setattr(timed, "Decoding", noted)
    workload = {**shared["workload"], "documents": 5}
    longer = FIXED["controller"]["k"] + 1
    two = [FIXED, {**FIXED, "name": "longer", "controller": {"kind": "fixed", "k": longer}}]
    settings = {"policies": two, "split": "all", "batch": 2, "repeats": 2, "bootstrap": 10}
    found = validate.run({**shared, "workload": workload, **settings, "out": str(tmp_path / "v")})
    k = FIXED["controller"]["k"]
    cold, first, second = [0, k, longer], [k, 0, longer, 0], [longer, 0, k, 0]  # plain runs twice, the order rotates
    again = [k] if captures else []
    assert runs == [(2, n) for n in [*cold, *first, *second, *first[:1], *again, *first[1:], *second]] + [
        (1, n) for n in [*cold, *first, *second]
    ]
    assert found["policies"][0]["measured"]["tokens"] == 5 * workload["new_tokens"]


def test_validate_tells_full_batches_from_whole_runs(shared, tmp_path, monkeypatch, capsys):
    """Batches of 3, 3 and 1: of whole ones' rounds of three and of two, their shares, restated from the rounds."""
    runs, decode = {}, timed.decode

    def noted(sequences, policy, sampling, numbers, **more):
        rounds = decode(sequences, policy, sampling, numbers, **more)
        runs.setdefault(policy.k_max, {}).setdefault(numbers[0], []).append(rounds)
        return rounds

    monkeypatch.setattr(timed, "decode", noted)
    settings = {"workload": {**shared["workload"], "documents": 7}, "split": "all", "batch": 3}
    expected = {"speedup": 2.0, "full_batch": {"speedup": 3.0, "tokens_per_round": 2.0, "us_per_token": 7.0}}
    settings["policies"] = [{**FIXED, "expected": expected}, {**RATE, "expected": {**expected, "speedup": 1.5}}]
    found = validate.run({**shared, **settings, "repeats": 1, "bootstrap": 10, "out": str(tmp_path / "v")})
    us_per_token = {}
    for k_max, groups in runs.items():
        time_us = tokens = lanes = 0
        for number, group in groups.items():
            warm = group[1:] if number in (0, 6) else group  # new sequences run once before they are timed
            full = [[r for r in rounds if r.active.sum() > 1] for rounds in warm]
            for r in [r for rounds in full for r in rounds]:
                spent_us = r.draft_us + r.verify_us + r.select_us + r.host_us
                time_us += spent_us * int(r.active.sum()) / 3 / len(full)
            tokens += sum(len(e) for r in full[-1] for e in r.emitted)
            lanes += sum(int(r.active.sum()) for r in full[-1])
        us_per_token[k_max] = time_us / tokens
        for row in found["policies"]:
            if row["k_max"] == k_max:
                m = row["measured"]["full_batch"]
                assert (m["tokens"], m["tokens_per_round"]) == (tokens, pytest.approx(tokens / lanes))
                assert m["us_per_token"] == pytest.approx(us_per_token[k_max])
                rounds = [r for n, group in groups.items() for run in group[n in (0, 6) :] for r in run]
                longest = max(rounds, key=lambda r: r.draft_us + r.verify_us + r.select_us + r.host_us)
                parts = ("draft_us", "verify_us", "select_us", "host_us")
                assert row["measured"]["longest_round"] == {part: getattr(longest, part) for part in parts}
    written = json.loads((tmp_path / "v" / "validation.json").read_text())
    assert "7 documents: the last batch is of 1, not 3" in " ".join(capsys.readouterr().out.split())
    assert written["plain_error_frac"] == pytest.approx(21.0 / us_per_token[0] - 1.0)
    tokens = [2.0 / row["measured"]["full_batch"]["tokens_per_round"] for row in written["policies"]]
    assert written["tokens_error_frac"] == pytest.approx(np.median(np.abs(np.array(tokens) - 1.0)))
    costs = [3.0 / row["measured"]["full_batch"]["speedup"] / t for row, t in zip(written["policies"], tokens)]
    assert written["cost_error_frac"] == pytest.approx(np.median(np.abs(np.array(costs) - 1.0)))
    errors = []
    for row in written["policies"]:
        m = row["measured"]["full_batch"]
        assert m["speedup"] == pytest.approx(us_per_token[0] / us_per_token[row["k_max"]])
        assert m["tokens"] < row["measured"]["tokens"]
        errors.append(abs(3.0 / m["speedup"] - 1.0))
    assert written["full_batch_ranking"]["worst_error_frac"] == pytest.approx(max(errors))
    assert written["worst_error_frac"] != written["full_batch_ranking"]["worst_error_frac"]


def test_validate_compares_no_prediction_for_another_batch_and_no_full_batch_that_there_was_not(
    shared, tmp_path, capsys
):
    """Three documents at batch 4; of those predicted, seven, a last batch of three."""
    full = {"speedup": 3.0, "tokens_per_round": 2.0, "us_per_token": 7.0}
    expected = {"speedup": 2.0, "full_batch": full, "batch": 4, "documents": list(range(7))}
    policies = [{**FIXED, "expected": expected}, {**RATE, "expected": {**expected, "batch": 2}}]
    settings = {**shared, "policies": policies, "split": "all", "batch": 4, "repeats": 1, "bootstrap": 10}
    found = validate.run({**settings, "out": str(tmp_path / "v")})
    fixed, rate = found["policies"]
    assert fixed["error_frac"] == pytest.approx(2.0 / fixed["measured"]["speedup"] - 1.0)
    assert (rate["error_frac"], rate["predicted"]) == (None, {"batch": 2, "documents": 7})
    assert "full_batch" not in fixed["measured"]
    said = " ".join(capsys.readouterr().out.split())
    assert "3 documents are less than a batch of 4" in said
    assert "was predicted for batch 2, not 4: not compared" in said
    assert "predicted from 7 documents: the last batch is of 3, not 4" in said


def test_the_interval_is_of_the_speedup_where_outputs_differ_in_length():
    policy = policy_from_mapping(FIXED)
    plain = validate.Measured(policy, 1, (), [Group([8.0], tokens=8), Group([4.0], tokens=4)])
    result = validate.Measured(policy, 1, (), [Group([2.0], tokens=4), Group([1.0], tokens=2)])
    settings = SimpleNamespace(seed=0, bootstrap=50)
    assert validate._interval(result, plain, settings) == (2.0, 2.0)
    uneven = validate.Measured(policy, 1, (), [Group([2.0], tokens=4), Group([2.0], tokens=2)])
    assert validate._interval(uneven, plain, settings) == (1.0, 2.0)


def test_validate_sees_an_output_that_is_not_the_plain_one(shared, tmp_path, monkeypatch):
    """An acceptance rule that accepts every draft is caught by the comparison with plain decoding."""
    from specdial.engine import loop

    def gullible(drafts, choices, k, room, *, accepted, judged, **rest):
        accepted.copy_(k)
        settle(drafts, choices, k, room, accepted=accepted, judged=True, **rest)

    settle = loop.settle
    monkeypatch.setattr(loop, "settle", gullible)
    found = validate.run(
        {**shared, "policies": [FIXED], "split": "all", "repeats": 1, "bootstrap": 10, "out": str(tmp_path / "v")}
    )
    assert found["policies"][0]["measured"]["documents_differing_from_plain"] > 0


def test_policies_of_one_name_keep_a_file_each(shared, tmp_path):
    policies = [{**FIXED, "name": "p"}, {**RATE, "name": "p"}]
    validate.run({**shared, "policies": policies, "repeats": 1, "bootstrap": 10, "out": str(tmp_path / "v")})
    found = [load_policy(path) for path in sorted((tmp_path / "v" / "policies").iterdir())]
    assert [to_plain(p.controller)["kind"] for p in found] == ["fixed", "rate"]


def test_costs_are_measured_once(shared, tmp_path, capsys, tiny_checkpoint):
    link = tmp_path / "model"
    link.symlink_to(tiny_checkpoint("llama"))
    sizes = {"contexts": [64], "ks": [0, 1], "budgets": [40], "repeats": 3, "draft_kv": KV, "out": str(tmp_path / "c")}
    settings = {**shared, "model": {"source": str(link), "device": "cpu"}, **sizes}
    calibrate.run(settings)
    first = (tmp_path / "c" / "costs.parquet").read_bytes()
    assert calibrate.run(settings)["rows"] == read_costs(tmp_path / "c").rows.num_rows
    assert (tmp_path / "c" / "costs.parquet").read_bytes() == first
    assert "was measured before; delete it to measure again" in capsys.readouterr().out
    link.unlink()
    link.symlink_to(tiny_checkpoint("llama", seed=5))
    with pytest.raises(UserError, match="holds costs of another model"):
        calibrate.run(settings)


def test_costs_of_another_machine_are_measured_again(shared, tmp_path, monkeypatch):
    sizes = {"contexts": [64], "ks": [0, 1], "budgets": [40], "repeats": 3, "draft_kv": KV, "out": str(tmp_path / "c")}
    monkeypatch.setattr(calibrate, "hardware", lambda device: {"device": "cpu", "name": "another"})
    calibrate.run({**shared, **sizes})
    monkeypatch.undo()
    calibrate.run({**shared, **sizes})
    assert read_costs(tmp_path / "c").meta["hardware"]["name"] != "another"
