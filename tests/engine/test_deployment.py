"""`run` with many prompts: policies exchanged in between, rounds kept as traces that replay, bad files refused."""

import io
import json
from contextlib import redirect_stdout

import numpy as np
import pytest

from specdial.engine.deployment import Deployment
from specdial.engine.requests import read_requests
from specdial.engine.trace.reader import read_trace
from specdial.engine.verbs import run
from specdial.policies.errors import UserError
from specdial.policies.file import policy_digest, save_policy
from specdial.policies.schema import policy_from_mapping
from specdial.simulator.replay import replay_rounds

KV = {"budget": 40, "sink": 2, "recent": 8, "window": 8}
PLAIN = {"name": "plain", "drafter": {"kind": "none"}}
FIXED = {"name": "four", "controller": {"kind": "fixed", "k": 4}, "draft_kv": KV}
RATE = {"name": "rate", "controller": {"kind": "rate", "k_max": 6, "gamma": 0.2}, "draft_kv": KV}
LOST = {"name": "lost", "drafter": {"kind": "model", "model": "nowhere.gguf"}, "controller": {"kind": "fixed", "k": 2}}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def answered(shared, tmp_path, monkeypatch):
    """answered(policies by request) -> (texts, metrics): exchanges the file after each request; None leaves it."""
    lines = [{"text": f"Once upon a time {i} " * 5} for i in range(4)]
    lines[1]["new_tokens"] = 5
    (tmp_path / "day.jsonl").write_text("\n".join(map(json.dumps, lines)))

    def answer(first, *later, **changes):
        file, waiting = tmp_path / "policy.yaml", list(later)
        save_policy(policy_from_mapping(first), file)
        keep = Deployment.keep

        def exchanged(self, *arguments):
            keep(self, *arguments)
            following = waiting.pop(0) if waiting else None
            if isinstance(following, dict):
                save_policy(policy_from_mapping(following), file)
            elif following is not None:
                file.write_text(following)

        monkeypatch.setattr(Deployment, "keep", exchanged)
        settings = {"model": shared["model"], "policy": first, "policy_file": str(file), "new_tokens": 8}
        settings |= {"prompts": str(tmp_path / "day.jsonl"), "ignore_eos": True, **changes}
        with redirect_stdout(io.StringIO()):
            found = run.run(settings)
        monkeypatch.setattr(Deployment, "keep", keep)
        return [m["text"] for m in found["requests"]], found

    return answer


def test_a_policy_file_is_exchanged_between_prompts_and_a_bad_one_is_told_of(answered, tmp_path, capsys):
    plain, _ = answered(PLAIN)
    out = {"trace": str(tmp_path / "live"), "out": str(tmp_path / "m.json")}
    texts, found = answered(FIXED, RATE, "schema: specdial/policy/9\n", LOST, **out)
    assert texts == plain
    assert [m["policy"] for m in found["requests"]] == ["four", "rate", "rate", "rate"]
    assert [m["new_tokens"] for m in found["requests"]] == [8, 5, 8, 8]
    assert json.loads((tmp_path / "m.json").read_text())["policies"] == ["four", "rate"]
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("specdial: ")]
    assert told[0].endswith("policy rate (lossless) took over from four at day.jsonl:2")
    assert "policy.yaml: policy schema is 'specdial/policy/9' at line 1" in told[1]
    assert told[1].endswith("policy rate stays")
    assert "policy lost cannot be used: no model file nowhere.gguf" in told[2]
    assert len(told) == 3
    for mapping, docs in ((FIXED, [0]), (RATE, [1, 2, 3])):
        policy = policy_from_mapping(mapping)
        trace = read_trace(tmp_path / "live" / policy_digest(policy)[:12])
        assert trace.meta["policy_digest"] == policy_digest(policy)
        assert sorted(set(trace.rounds["doc"].to_pylist())) == docs
        [log] = replay_rounds(trace, [policy])
        order = np.lexsort((trace.rounds["round"].to_numpy(), trace.rounds["doc"].to_numpy()))
        for name in ("doc", "context_tokens", "k", "accepted", "emitted"):
            assert np.array_equal(getattr(log, name), trace.rounds[name].to_numpy()[order])


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ('{"text": "a"}\n{"text": ', "day.jsonl line 2 is not JSON"),
        ('{"text": "a"}\n\n{"txt": "b"}', "line 3 has no messages, prompt or text"),
        ('{"text": " "}', "line 1: text is not text that is not empty"),
        ('{"messages": [{"role": "user"}]}', "line 1: messages is not a list of {role, content}"),
        ('{"text": "a", "new_tokens": 0}', "line 1: new_tokens is 0; give a whole number"),
        ("\n", "day.jsonl holds no prompt"),
    ],
)
def test_a_file_of_prompts_is_refused_by_line(tmp_path, lines, says):
    path = tmp_path / "day.jsonl"
    path.write_text(lines)
    with pytest.raises(UserError) as caught:
        read_requests(None, str(path))
    assert says in str(caught.value)


def test_one_of_prompt_and_prompts_is_needed():
    with pytest.raises(UserError, match="prompt is missing; give prompt=TEXT"):
        read_requests(None, None)
    with pytest.raises(UserError, match="prompt and prompts are both given"):
        read_requests("a", "b")
