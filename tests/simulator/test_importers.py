"""Importers on files written by hand after each format's documentation: what is read, and what is refused by line."""

import csv
import json
import random
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdial.engine.trace.reader import read_costs, read_trace
from specdial.policies.errors import UserError
from specdial.policies.schema import Drafter, policy_from_mapping
from specdial.simulator.importers import IMPORTERS
from specdial.simulator.importers.lines import Line
from specdial.simulator.importers.requests import Request, Requests, unordered_steps
from specdial.simulator.importers.traces import About, write_requests
from specdial.simulator.lanes import read_record
from specdial.simulator.replay import replay, replay_rounds
from specdial.simulator.verbs import drift, import_logs, tune
from specdial.simulator.verbs import replay as replay_verb

DRAFTER = {"kind": "model", "model": "draft"}


def fixed(k):
    return policy_from_mapping({"name": f"k{k}", "drafter": DRAFTER, "controller": {"kind": "fixed", "k": k}})


def served(random_, k, *, prompt=900, steps=40, accept=0.7, plain=0.0):
    """(accepted, drafted, completion tokens) of one request, its last step cut by the token limit, and plain steps."""
    accepted, drafted, tokens = [], [], 1
    for _ in range(steps):
        if random_.random() < plain:
            tokens += 1
            continue
        run = next((i for i in range(k) if random_.random() >= accept), k)
        accepted.append(run)
        drafted.append(k)
        tokens += run + 1
    return accepted, drafted, tokens - (1 if accepted[-1] and not plain else 0)


def response(accepted, drafted, tokens, k, *, prompt=900, level="detailed", ms=None):
    """What vLLM answers, less the text."""
    steps, total = len(accepted), sum(accepted)
    counts = {
        "mean_acceptance_length": 1 + total / max(steps, 1),
        "draft_acceptance_rate": total / max(sum(drafted), 1),
        "acceptance_histogram": [accepted.count(j) for j in range(k + 1)],
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": total,
        "num_draft_tokens": sum(drafted),
        "num_spec_tokens": k,
    }
    if level == "detailed":
        counts |= {"per_step_accepted": accepted, "per_step_drafted": drafted}
    metrics = {"speculative_decoding": counts} | ({} if ms is None else {"generation_time_ms": ms})
    usage = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
    return {"id": "cmpl-1", "object": "text_completion", "choices": [{"text": "…"}], "usage": usage, "metrics": metrics}


def write_lines(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


@pytest.fixture
def logged(tmp_path):
    """logged(k, level=..., plain=...) -> (requests, path): a vLLM log of eight requests."""

    def make(k=4, *, level="detailed", plain=0.0, requests=8, accept=0.7):
        random_ = random.Random(k)
        found = [served(random_, k, plain=plain, accept=accept) for _ in range(requests)]
        rows = [response(*one, k, prompt=900 + 9 * i, level=level) for i, one in enumerate(found)]
        return found, write_lines(tmp_path / "log.jsonl", [*rows, {"usage": {}, "metrics": None}])

    return make


def times(path, *, k_us=450.0):
    """Step times of a made-up machine: a speculative step of k drafts costs a plain step and k_us a draft."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["op", "context_tokens", "batch", "k", "us"])
        for context in (512, 1024, 2048):
            for k in (0, 1, 2, 4):
                for noise in (0.98, 1.0, 1.02):
                    writer.writerow(["round", context, 1, k, noise * (1000.0 + 0.1 * context + k * k_us)])
    return str(path)


def test_detailed_logs_replay_to_the_very_rounds_that_ran(logged, tmp_path):
    found, path = logged()
    told = import_logs.run({"format": "vllm", "source": path, "model_name": "m", "out": str(tmp_path / "t")})
    trace = read_trace(tmp_path / "t")
    assert (told["requests"], told["skipped"], told["exact"], told["k"]) == (8, 1, True, 4)
    assert told["tokens"] == sum(tokens - 1 for _, _, tokens in found)
    [log] = replay_rounds(trace, [fixed(4)])
    for name in ("doc", "round", "context_tokens", "k", "accepted", "emitted"):
        assert np.array_equal(getattr(log, name), trace.rounds[name].to_numpy())
    for doc, (accepted, _, tokens) in enumerate(found):
        mine = log.doc == doc
        assert log.accepted[mine].tolist()[:-1] == accepted[:-1]
        assert log.context_tokens[mine][0] == 900 + 9 * doc + 1
        assert log.emitted[mine].sum() == tokens - 1
    [same, shorter] = replay(trace, None, [fixed(4), fixed(2)], bootstrap=0)
    assert (same.level, shorter.level) == ("exact", "modelled")


@pytest.mark.parametrize(("level", "plain"), [("summary", 0.0), ("detailed", 0.3)])
def test_where_rounds_are_not_known_even_the_logged_k_is_modelled(logged, tmp_path, level, plain):
    found, path = logged(level=level, plain=plain)
    told = import_logs.run({"format": "vllm", "source": path, "out": str(tmp_path / "t")})
    accepted, drafted = (sum(sum(one[i]) for one in found) for i in (0, 1))
    assert told["exact"] is False
    assert told["alpha"] == pytest.approx(accepted / drafted, abs=0.02)  # last steps are cut at the last token
    assert told["tokens"] == sum(tokens - 1 for _, _, tokens in found)
    [outcome] = replay(read_trace(tmp_path / "t"), None, [fixed(4)], bootstrap=0)
    assert outcome.level == "modelled"


def test_k_is_tuned_from_logs_and_step_times_alone(logged, tmp_path, capsys):
    _, path = logged(accept=0.6, requests=16)
    shared = {"model_name": "m", "drafter": {"kind": None, "model": "small", "ngram": None}}
    import_logs.run({"format": "vllm", "source": path, "out": str(tmp_path / "t"), **shared})
    source = times(tmp_path / "times.csv")
    told = import_logs.run({"format": "step_times", "source": source, "out": str(tmp_path / "c"), **shared})
    assert (told["measurements"], told["drafter"]) == (36, "model/small")
    rows = read_costs(tmp_path / "c").rows.to_pylist()
    [verify] = [r for r in rows if (r["op"], r["context_tokens"], r["k"]) == ("verify", 1024, 2)]
    assert (verify["median_us"], verify["n"]) == (pytest.approx(2002.4), 3)
    given = {"trace": str(tmp_path / "t"), "costs": str(tmp_path / "c")}
    policies = [
        {"name": f"k{k}", "drafter": {**DRAFTER, "model": "small"}, "controller": {"kind": "fixed", "k": k}}
        for k in (1, 2, 4)
    ]
    found = replay_verb.run({**given, "policies": policies, "bootstrap": 0})["outcomes"]
    for outcome, k in zip(found, (1, 2, 4)):
        emitted = sum(0.6**i for i in range(k + 1))
        assert outcome["tokens_per_round"] == pytest.approx(emitted, rel=0.15)
        assert outcome["speedup"] == pytest.approx(outcome["tokens_per_round"] * 1100 / (1100 + 450 * k), rel=0.05)
    best = tune.run({**given, "out": str(tmp_path / "tuned"), "trials": 5, "search": {"controllers": ["fixed"]}})
    assert round(best["k"]) == 1  # a second draft is accepted too rarely for what it costs
    assert best["level"] == "modelled"
    capsys.readouterr()
    live = {
        "policy": str(tmp_path / "tuned" / "policies" / "best.yaml"),
        "reference": given["trace"],
        "costs": given["costs"],
    }
    assert drift.run({**live, "trace": given["trace"]})["acceptance"]["alarm"] is False


def test_drafts_behind_the_last_token_alone_are_no_speculation(tmp_path):
    source = write_lines(tmp_path / "log.jsonl", [response([0], [4], 2, 4)])
    with pytest.raises(UserError, match="holds no speculative step"):
        import_logs.run({"format": "vllm", "source": source, "out": str(tmp_path / "t")})
    assert not (tmp_path / "t" / "meta.json").exists()


def test_aiperf_records(tmp_path):
    counts = {
        "engine": "sglang",
        "acceptance_histogram": {"0": 3, "2": 5},
        "num_draft_tokens": 16,
        "num_spec_tokens": 2,
    }
    counts |= {
        "num_spec_steps": 8,
        "num_accepted_draft_tokens": 10,
        "per_step_accepted": None,
        "completion_tokens": None,
    }
    tokens = {
        "input_sequence_length": {"value": 550, "unit": "tokens"},
        "output_sequence_length": {"value": 19, "unit": "tokens"},
    }
    timed = {"request_latency": {"value": 260.0, "unit": "ms"}, "time_to_first_token": {"value": 100.0, "unit": "ms"}}
    good = {"metadata": {}, "metrics": tokens | timed, "spec_decode_acceptance": counts, "error": None}
    failed = {"metadata": {}, "metrics": None, "error": {"code": 499}}
    source = write_lines(tmp_path / "profile_export.jsonl", [good, failed])
    found = IMPORTERS["aiperf"][1](Path(source))
    [request] = found.found
    assert (request.prompt_tokens, request.new_tokens, request.k, request.ordered, found.skipped) == (
        550,
        19,
        2,
        False,
        1,
    )
    assert sorted(request.accepted) == [0] * 3 + [2] * 5
    assert set(request.drafted) == {2}
    assert request.decode_us == 160_000.0
    import_logs.run({"format": "aiperf", "source": source, "out": str(tmp_path / "t")})
    rounds = read_trace(tmp_path / "t").rounds
    assert rounds["verify_us"].to_numpy().sum() == pytest.approx(160_000.0)
    assert rounds["emitted"].to_numpy().sum() == 18


def scrape(steps, per_position, done=4, labels='engine="0",model_name="m"'):
    lines = ["# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.", "# TYPE x counter"]
    for name, value in {
        "spec_decode_num_drafts_total": steps,
        "spec_decode_num_draft_tokens_total": steps * len(per_position),
        "prompt_tokens_total": 1000 * done,
    }.items():
        lines.append(f"vllm:{name}{{{labels}}} {float(value)}")
    lines += [f'vllm:request_success_total{{{labels},finished_reason="{r}"}} {done / 2}' for r in ("stop", "length")]
    for i, value in enumerate(per_position):
        lines.append(f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="{i}"}} {float(value)}')
    return "\n".join([*lines, "vllm:kv_cache_usage_perc{} 0.5", "python_gc_objects_collected_total 1.0", ""])


def test_counters_become_requests_of_mean_length(tmp_path):
    folder = tmp_path / "scrapes"
    folder.mkdir()
    (folder / "0.prom").write_text(scrape(100, [60, 30, 10]))
    (folder / "1.prom").write_text(scrape(500, [360, 230, 110], done=24))
    told = import_logs.run({"format": "vllm_metrics", "source": str(folder), "out": str(tmp_path / "t")})
    assert (told["requests"], told["k"], told["exact"], told["rounds"]) == (20, 3, False, 400)
    record = read_record(read_trace(tmp_path / "t"))
    judged = [((record.depths > d) & (record.run >= d)).sum() for d in range(3)]
    accepted = [(record.run > d).sum() for d in range(3)]
    assert np.allclose(np.array(accepted) / judged, [300 / 400, 200 / 300, 100 / 200], atol=0.03)
    (folder / "2.prom").write_text(scrape(10, [1, 1, 1]))
    with pytest.raises(UserError, match=r"2\.prom line 1: its counters are lower than those of the scrape before"):
        IMPORTERS["vllm_metrics"][1](folder)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=9), st.data())
def test_steps_of_a_histogram_add_up_to_its_counts(histogram, data):
    k = len(histogram) - 1
    accepted = sum(j * n for j, n in enumerate(histogram))
    drafts = data.draw(st.integers(accepted, k * sum(histogram)))
    taken, drafted = unordered_steps(Line(Path("log"), 1, {}), histogram, drafts, k)
    assert [taken.count(j) for j in range(k + 1)] == histogram
    assert sum(drafted) == drafts
    assert all(a <= d <= k for a, d in zip(taken, drafted))


DETAILED = response([1, 0], [2, 2], 4, 2)


def spoilt(**changes):
    row = json.loads(json.dumps(DETAILED))
    row["metrics"]["speculative_decoding"] |= changes
    return row


@pytest.mark.parametrize(
    ("name", "lines", "says"),
    [
        ("vllm", [DETAILED, "{"], "line 2 is not JSON"),
        ("vllm", [DETAILED, 7], "line 2 is no object"),
        ("vllm", [{**DETAILED, "usage": {}}], "line 1: usage.prompt_tokens is missing"),
        ("vllm", [spoilt(per_step_accepted=[3, 0])], "line 1: step 1 accepted 3 of 2 drafts, at most 2"),
        ("vllm", [spoilt(per_step_accepted=[1])], "line 1: 1 steps accepted drafts and 2 made them"),
        ("vllm", [spoilt(per_step_drafted=[2, True])], "holds True, not a whole number from 0 to 64"),
        (
            "vllm",
            [spoilt(per_step_accepted=None, num_draft_tokens=9)],
            "9 drafts do not fit 2 steps of 2 with 1 accepted",
        ),
        (
            "vllm",
            [{**DETAILED, "usage": {"prompt_tokens": 5, "completion_tokens": 2}}],
            "log:1: its steps emitted 4 tokens",
        ),
        ("vllm", [{"metrics": None}], "log holds no speculative step (1 records have no counts)"),
        ("aiperf", [{"spec_decode_acceptance": {"acceptance_histogram": {"a": 1}}}], "counts steps by something else"),
        ("vllm_metrics", ["vllm:spec_decode_num_drafts_total{} x"], "line 1: value is 'x', not a number"),
        ("vllm_metrics", ["vllm:num_requests_running{} 1.0"], "log has no vllm:spec_decode_num_drafts_total"),
        (
            "mooncake",
            [{"input_length": 4, "output_length": 2}, {"input_length": 4}],
            "line 2: output_tokens is missing",
        ),
        ("mooncake", [{"input_length": 1.5, "output_length": 2}], "line 1: input_length is 1.5, not a whole number"),
        ("azure", ["TIMESTAMP,ContextTokens", "a,1"], "line 1: the header lacks GeneratedTokens"),
        ("azure", ["ContextTokens,GeneratedTokens", "4,2", "4"], "line 3: 1 values under 2 columns"),
        ("azure", ["ContextTokens,GeneratedTokens", "4,nan"], "line 2: GeneratedTokens is 'nan', not a number"),
        ("azure", ["x" * 200_000, "4,2"], "line 1: field larger than field limit"),
        ("step_times", ["op,context_tokens,batch,k,us", "plain,9,1,0,0"], "line 2: us is '0', not a number from 0.001"),
        ("step_times", ["op,context_tokens,batch,k,us", "round,9,1,0,5", "round,9,1,2,0"], "line 3: us is '0', not"),
        ("step_times", ["op,context_tokens,batch,k,us", "plain,9,1,0,5", "verify,9,1,2,0"], "line 3: us is '0', not"),
        ("step_times", ["op,context_tokens,batch,k,us", "round,9,1,0,5", "magic,9,1,1,5"], "line 3: op is 'magic'"),
        ("step_times", ["op,context_tokens,batch,k,us", "round,9,1,2,5"], "log times no plain step"),
        (
            "step_times",
            ["op,context_tokens,batch,k,us", "plain,9,1,0,5", "verify,9,1,1,5", "round,9,1,1,5"],
            "keep one",
        ),
        ("sharegpt", [{"conversations": [{"from": "robot", "value": "x"}]}], "line 1: a turn is not {from: human"),
        ("sharegpt", ['[{"conversations": []},', "{x}]"], "line 2 is not JSON"),
        ("longbench", [{"context": "a", "answers": "b"}], "line 1: answers is not a list of texts"),
        ("pg19", [{"text": " "}], "line 1: text is ' ', not text"),
        ("warc", [], "format is 'warc'; use one of vllm, vllm_metrics, aiperf"),
    ],
)
def test_bad_lines_are_named(tmp_path, name, lines, says):
    (tmp_path / "log").write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    with pytest.raises(UserError) as caught:
        import_logs.run({"format": name, "source": str(tmp_path / "log"), "out": str(tmp_path / "o")})
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_damage_to_one_character_is_read_or_refused_by_line(data):
    text = json.dumps(DETAILED)
    at = data.draw(st.integers(0, len(text) - 1))
    spoilt_text = text[:at] + data.draw(st.characters(codec="utf-8", exclude_characters="\n")) + text[at + 1 :]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        path.write_text(f"{text}\n{spoilt_text}\n", encoding="utf-8")
        said = ""
        try:
            found = IMPORTERS["vllm"][1](path)
        except UserError as error:
            said = str(error)
    assert "log line 2" in said or 1 <= len(found.found) == 2 - found.skipped


def test_steps_that_drafted_nothing_are_laid_at_even_distances(tmp_path):
    """As if each were put in by itself, and in time that grows with their number alone."""
    about = About("vllm", "log", "m", Drafter("model", model="draft"), 1, 0.0, "h")
    for plain, accepted in ((1, [2]), (3, [2, 0, 1, 2]), (7, [1, 0]), (5, [0] * 12)):
        want = [(2, a) for a in accepted]
        for i in range(plain):
            want.insert(round((i + 1) * len(accepted) / (plain + 1)) + i, (0, 0))
        new = 1 + sum(a + 1 for _, a in want)
        request = Request("r", 9, new, (2,) * len(accepted), tuple(accepted), 2, ordered=True)
        write_requests(tmp_path / f"t{plain}", Requests((request,)), about, 1)
        rounds = read_trace(tmp_path / f"t{plain}").rounds.to_pydict()
        assert rounds["accepted"] == [a for _, a in want]
        assert [k == 0 for k in rounds["k"][:-1]] == [k == 0 for k, _ in want[:-1]]


def test_files_that_are_not_text_are_named(tmp_path):
    (tmp_path / "log").write_bytes(b'{"a": 1}\n\xff\n')
    with pytest.raises(UserError, match="log line 2 is not UTF-8"):
        IMPORTERS["vllm"][1](tmp_path / "log")
    with pytest.raises(UserError, match=r"cannot read .*nowhere: No such file"):
        IMPORTERS["azure"][1](tmp_path / "nowhere")
