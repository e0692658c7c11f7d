"""Bad settings and bad files: one line each, saying what is wrong and what to change."""

import json

import pytest

from specdial.engine.workloads import WorkloadSpec, build
from specdial.policies.errors import UserError


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"kind": "poem"}, "unknown workload kind 'poem'; use one of: stdlib, book, file, needle"),
        ({"context_tokens": 0}, "workload.context_tokens is 0; give a whole number of at least 1"),
        ({"documents": -1}, "workload.documents is -1"),
        ({"documents": True}, "workload.documents is True"),
        ({"new_tokens": 1.5}, "workload.new_tokens is 1.5"),
        ({"seed": -3}, "workload.seed is -3"),
        ({"ignore_eos": "no"}, "workload.ignore_eos is 'no'"),
        ({"train_frac": float("nan")}, "workload.train_frac is nan; give a number from 0 to 1"),
        ({"test_frac": 0.5}, "add up to 1.25"),
        ({"depth_frac": 1.5}, "workload.depth_frac is 1.5"),
        ({"dept_frac": 0.5}, "unknown setting workload.dept_frac"),
        ({"kind": "needle", "needles": 99}, "workload.needles is 99; give at most 39"),
        ({"kind": "needle", "filler": "news"}, "workload.filler is 'news'; use book or stdlib"),
        ({"kind": "needle", "context_tokens": 20}, "a context of 20 tokens cannot hold"),
        ({"kind": "needle", "stride_tokens": 5}, "workload=needle has no workload.stride_tokens"),
        ({"stride_tokens": 0}, "workload.stride_tokens is 0; give a whole number of at least 1"),
        ({"kind": "summary", "context_tokens": 100}, "a context of 100 tokens cannot hold the request for a summary"),
        ({"kind": "summary", "path": "/no/such.txt"}, "cannot read /no/such.txt: No such file"),
        ({"kind": "stdlib", "path": "/no/such"}, "/no/such is not a folder with Python source"),
        (
            {"documents": 9, "context_tokens": 60_000},
            "lower the context, or let documents of a split overlap with workload.stride_tokens",
        ),
        (
            {"documents": 64, "context_tokens": 60_000, "stride_tokens": 20_000},
            "documents of 60000 + 64 tokens for split train, one every 20000 tokens, 32 asked for",
        ),
        ({"kind": "file"}, "set workload.path to a .txt or .jsonl file"),
        ({"kind": "file", "path": "/no/such.txt"}, "cannot read /no/such.txt: No such file"),
        (
            {"documents": 99, "context_tokens": 60_000},
            "holds 4 documents of 60000 + 64 tokens without overlap, 99 asked for",
        ),
        ({"context_tokens": 10**9}, "holds 0 documents"),
    ],
)
def test_bad_settings(byte_tokenizer, settings, says):
    with pytest.raises(UserError) as e:
        build(WorkloadSpec.from_mapping({"kind": "book", "context_tokens": 500, **settings}), byte_tokenizer)
    assert says in str(e.value)
    assert "\n" not in str(e.value)


def test_missing_setting():
    with pytest.raises(UserError, match=r"workload\.context_tokens is missing"):
        WorkloadSpec.from_mapping({"kind": "book"})


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.txt", b"  \n", "is empty"),
        ("a.txt", b"abc \xff", "is not UTF-8 at byte 4"),
        ("a.txt", b"short text", "holds 0 documents of 20 + 64 tokens without overlap"),
        ("a.jsonl", b'{"text": "x"}\n{"text": ', "line 2 is not JSON"),
        ("a.jsonl", b'\n{"txt": "x"}', "line 2 has no text, prompt or messages"),
        ("a.jsonl", b"[1]", "line 1 has no text"),
        ("a.jsonl", b'{"prompt": " "}', "line 1: prompt is not text that is not empty"),
        ("a.jsonl", b'{"messages": []}', "line 1: messages is not a list of {role, content}"),
        ("a.jsonl", b'{"messages": [{"role": "user"}]}', "line 1: messages is not a list"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "x"}', "lines 1 and 2 hold the same text; remove one of them"),
        ("a.jsonl", b'{"text": "x"}', "0 lines of {path} reach 20 tokens (the longest has 2), 1 documents asked for"),
    ],
)
def test_bad_files(byte_tokenizer, tmp_path, name, content, says):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError) as e:
        build(WorkloadSpec("file", 20, documents=1, path=str(path)), byte_tokenizer)
    assert says.replace("{path}", str(path)) in str(e.value)
    assert "\n" not in str(e.value)


def test_too_few_lines(byte_tokenizer, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "x" * 50}))
    with pytest.raises(UserError, match=r"holds 1 lines, 2 documents asked for; set workload\.documents to at most 1"):
        build(WorkloadSpec("file", 20, documents=2, path=str(path)), byte_tokenizer)
