"""The needle kind: exact positions, known answers, any length, honesty about repeated filler."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdial.engine.workloads import Document, WorkloadSpec, build, check_answer
from specdial.engine.workloads.needle import NAMES
from specdial.engine.workloads.sources import BOOK_PATH
from specdial.policies.errors import UserError


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    context=st.integers(400, 6000),
    documents=st.integers(1, 5),
    needles=st.integers(1, 4),
    depth=st.none() | st.floats(0, 1),
    seed=st.integers(0, 1000),
)
def test_spans_hold_the_needles(byte_tokenizer, context, documents, needles, depth, seed):
    spec = WorkloadSpec("needle", context, documents, seed=seed, needles=needles, depth_frac=depth)
    for d in build(spec, byte_tokenizer):
        assert len(d.prompt_ids) == context
        assert len(d.meta["needles"]) == needles
        for n in d.meta["needles"]:
            span = byte_tokenizer.decode(d.prompt_ids[n["start_token"] : n["end_token"]])
            assert span == f"The secret number of {n['name']} is {n['number']}.\n\n"
        assert d.meta["needles"][0]["number"] == d.answer
        assert byte_tokenizer.decode(d.prompt_ids).endswith(f"secret number of {d.meta['needles'][0]['name']} is")


@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_needle_lies_at_its_depth(byte_tokenizer, depth):
    for d in build(WorkloadSpec("needle", 20_000, 3, depth_frac=depth), byte_tokenizer):
        # The nearest paragraph boundary is at most half of the longest paragraph (4,806 characters) away.
        assert abs(d.meta["needles"][0]["start_token"] / 20_000 - depth) < 0.13


def test_depths_spread_over_documents(byte_tokenizer):
    depths = sorted(d.meta["depth_frac"] for d in build(WorkloadSpec("needle", 400, 10), byte_tokenizer))
    assert all(abs(depth - (i + 0.5) / 10) < 0.1 for i, depth in enumerate(depths))


def test_filler_is_shared_only_when_the_book_is_too_short_and_says_so(byte_tokenizer):
    fits = build(WorkloadSpec("needle", 20_000, 4), byte_tokenizer)
    assert not any(d.meta["filler_shared"] for d in fits)
    [longer_than_the_book] = build(WorkloadSpec("needle", 600_000, 1), byte_tokenizer)
    assert longer_than_the_book.meta["filler_shared"]
    assert len(longer_than_the_book.prompt_ids) == 600_000


def test_stdlib_filler(byte_tokenizer):
    [d] = build(WorkloadSpec("needle", 5_000, 1, filler="stdlib"), byte_tokenizer)
    assert d.meta["source"][0][0].endswith(".py")


def test_needle_names_are_not_in_the_book():
    text = BOOK_PATH.read_text(encoding="utf-8")
    assert [name for name in NAMES if name in text] == []
    assert len(set(NAMES)) == len(NAMES)


@pytest.mark.parametrize(
    ("text", "right"),
    [(" 48213.", True), ("It is 48213", True), ("148213", False), ("482139", False), ("", False), ("4821", False)],
)
def test_check_answer(text, right):
    assert check_answer(Document(0, "d", "train", [1], 4, answer="48213"), text) is right


def test_check_answer_wants_an_answer():
    with pytest.raises(UserError, match="no known answer"):
        check_answer(Document(0, "d", "train", [1], 4), "48213")
