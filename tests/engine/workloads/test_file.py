"""The file kind: which field a line gives, where a long one is cut, what a short one becomes."""

import json

import pytest

from specdial.engine.workloads import WorkloadSpec, build, check_answer


def _build(tmp_path, tokenizer, rows, **settings):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    spec = WorkloadSpec("file", 10, documents=settings.pop("documents", len(rows)), path=str(path), **settings)
    return build(spec, tokenizer)


@pytest.mark.parametrize(
    ("row", "ids", "cut"),
    [
        ({"text": "abcdefghijklmno"}, [256, *b"abcdefghi"], "tail"),
        ({"prompt": "abcdefghijklmno"}, [256, *b"abcd", *b"klmno"], "middle"),
        ({"messages": [{"role": "user", "content": "abcdefghijklmno"}]}, [256, 257, *b"abc", *b"lmno", 258], "middle"),
        ({"text": "abcdefghi"}, [256, *b"abcdefghi"], "none"),
        ({"text": "no", "prompt": "abcdefghi"}, [256, *b"abcdefghi"], "none"),
    ],
)
def test_a_line_becomes_a_prompt(tmp_path, byte_tokenizer, row, ids, cut):
    [d] = _build(tmp_path, byte_tokenizer, [row])
    assert d.prompt_ids == ids
    assert d.meta["cut"] == cut


def test_short_lines_are_passed_over_or_kept(tmp_path, byte_tokenizer):
    rows = [{"text": "short"}, {"text": "a long enough line"}, {"text": "another long line"}]
    long = _build(tmp_path, byte_tokenizer, rows, documents=2)
    assert [len(d.prompt_ids) for d in long] == [10, 10]
    kept = _build(tmp_path, byte_tokenizer, rows, keep_short=True)
    assert sorted(len(d.prompt_ids) for d in kept) == [6, 10, 10]


def test_answers_are_carried(tmp_path, byte_tokenizer):
    [d] = _build(tmp_path, byte_tokenizer, [{"prompt": "the capital of France?", "answer": "Paris"}])
    assert check_answer(d, "It is paris.")
    assert not check_answer(d, "It is Parisian.")


def test_line_separators_inside_json_strings_are_text(tmp_path, byte_tokenizer):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "one\u2028two and more"}\n', encoding="utf-8")
    [d] = build(WorkloadSpec("file", 10, documents=1, path=str(path)), byte_tokenizer)
    assert d.prompt_ids == [256, *"one\u2028two".encode()]


def test_one_short_text_file_is_kept_whole(tmp_path, byte_tokenizer):
    path = tmp_path / "essay.txt"
    path.write_text("brief")
    [d] = build(WorkloadSpec("file", 10, documents=1, path=str(path), keep_short=True), byte_tokenizer)
    assert d.prompt_ids == [256, *b"brief"]
