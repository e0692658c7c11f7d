"""Packing by hand: what is cut where, what a run claims, how many documents a split gets."""

from dataclasses import replace

import pytest

from specdial.engine.workloads.packing import Frame, bare, claims, enough, pack, place, shuffled, split_labels
from specdial.engine.workloads.sources import Passage
from specdial.engine.workloads.spec import Draft, WorkloadSpec
from specdial.policies.errors import UserError


def passages(*lengths, source="a"):
    """One after another in one source, of so many letters each."""
    found, at = [], 0
    for i, length in enumerate(lengths):
        found.append(Passage(text=chr(97 + i) * length, source=source, start_char=at, end_char=at + length))
        at += length
    return found


def test_a_bare_prompt_is_the_begin_mark_and_text_and_claims_its_continuation(byte_tokenizer):
    spec = WorkloadSpec("book", 8, documents=2, new_tokens=3)
    frame = bare(byte_tokenizer, spec)
    assert (frame.before, frame.after, frame.beyond_tokens, frame.body_tokens(spec)) == ([256], [], 3, 7)
    given = passages(6, 4, 9, 5, 5)  # 10 of text are needed: 6 + 4 just do, 9 do not
    first, second = pack(given, byte_tokenizer, spec, frame)
    assert bytes(first.prompt_ids[1:]) == b"aaaaaab"
    assert (first.name, first.meta) == ("a", {"source": [["a", 0, 10]]})
    assert bytes(second.prompt_ids[1:]) == b"ccccccc"
    assert (second.name, second.meta) == ("a@10", {"source": [["a", 10, 24]]})
    framed = Frame([1, 2], [3], 0).draft(given[:1], list(b"abcdef"), WorkloadSpec("book", 8))
    assert framed.prompt_ids == [1, 2, *b"abcde", 3]


def test_text_that_encodes_shorter_together_is_encoded_anew(byte_tokenizer):
    class Merging:
        """Two bytes an id, so that odd passages cost more apart."""

        def encode(self, text, *, add_special=False):
            return list(range(-(-len(text) // 2)))

    spec = WorkloadSpec("book", 4, new_tokens=1)
    (draft,) = pack(passages(3, 3, 3, 3), Merging(), spec, Frame([], [], 1))  # 5: 2 + 2 + 2 apart are 5 together
    assert draft.meta == {"source": [["a", 0, 9]]}


def test_neighbours_are_claimed_as_one_and_others_apart():
    a, b, c = passages(3, 4, 5)
    other = passages(3, source="b")
    assert claims([a, b]) == [["a", 0, 7]]
    assert claims([a, c]) == [["a", 0, 3], ["a", 7, 12]]
    assert claims([a, *other]) == [["a", 0, 3], ["b", 0, 3]]


@pytest.mark.parametrize(
    ("documents", "shares", "counts"),
    [
        (8, (0.5, 0.25, 0.25), (4, 2, 2)),
        (2, (0.5, 0.25, 0.25), (1, 0, 1)),
        (3, (0.9, 0.05, 0.05), (1, 1, 1)),
        (3, (1.0, 0.0, 0.0), (3, 0, 0)),
        (4, (0.0, 0.5, 0.5), (0, 2, 2)),
        (7, (0.5, 0.25, 0.25), (3, 2, 2)),
        (1, (0.5, 0.25, 0.25), (1, 0, 0)),
    ],
)
def test_splits_by_largest_remainder(documents, shares, counts):
    train, validation, test = shares
    spec = WorkloadSpec("book", 8, documents=documents, train_frac=train, validation_frac=validation, test_frac=test)
    labels = split_labels(spec)
    assert tuple(labels.count(name) for name in ("train", "validation", "test")) == counts
    assert labels == split_labels(spec)


def test_too_few_and_overlapping_documents_are_named():
    def draft(name, start, end, **meta):
        return Draft(name, [1], meta={"source": [["a", start, end]], **meta})

    spec = WorkloadSpec("book", 8, documents=2)
    three = [draft("x", 0, 5), draft("y", 5, 9), draft("z", 9, 12)]
    assert enough(three, spec, "it") == three[:2]
    assert enough(three[:2], spec, "it") == three[:2]
    with pytest.raises(UserError, match="it holds 1 documents of 8"):
        enough(three[:1], spec, "it")
    assert sorted(d.name for d in shuffled(three, spec)) == ["x", "y", "z"]
    assert [d.index for d in place(three[:2], spec)] == [0, 1]
    with pytest.raises(ValueError, match="longer"):
        place(three[:1], spec)
    with pytest.raises(UserError, match=r"documents 0 \(x\) and 1 \(w\) share source text"):
        place([draft("x", 0, 5), draft("w", 4, 9)], spec)
    assert len(place([draft("x", 0, 5, filler_shared=True), draft("w", 4, 9)], spec)) == 2


def test_a_long_claim_is_remembered_behind_a_shorter_one_of_its_split():
    """Two documents of one split, the second within the first; a third of another split meets the first alone."""
    drafts = [Draft(name, [1], meta={"source": [["a", *ends]]}) for name, ends in zip("xyz", ((0, 9), (2, 4), (6, 12)))]
    specs = (WorkloadSpec("book", 8, documents=3, stride_tokens=1, seed=seed) for seed in range(99))
    shares = {"train_frac": 0.6, "validation_frac": 0.0, "test_frac": 0.4}
    spec = next(s for s in (replace(s, **shares) for s in specs) if split_labels(s) == ["train", "train", "test"])
    with pytest.raises(UserError, match=r"documents 0 \(x\) and 2 \(z\) share source text"):
        place(drafts, spec)
    drafts[2].meta["source"][0][1] = 9
    assert [d.split for d in place(drafts, spec)] == ["train", "train", "test"]
