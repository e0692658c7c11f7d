"""Overlapping documents: as many as asked for, a stride apart, and never across splits."""

from itertools import combinations, pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdial.engine.workloads import WorkloadSpec, build
from specdial.engine.workloads.packing import place
from specdial.engine.workloads.spec import Draft
from specdial.policies.errors import UserError

SHARES = ((0.5, 0.25, 0.25), (1.0, 0.0, 0.0), (0.0, 0.5, 0.5))


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(["book", "summary"]),
    documents=st.integers(1, 20),
    stride=st.integers(1, 3000),
    seed=st.integers(0, 100),
    shares=st.sampled_from(SHARES),
)
def test_splits_never_share_text(byte_tokenizer, kind, documents, stride, seed, shares):
    train, validation, test = shares
    spec = WorkloadSpec(
        kind,
        9_000,
        documents,
        seed=seed,
        stride_tokens=stride,
        train_frac=train,
        validation_frac=validation,
        test_frac=test,
    )
    built = build(spec, byte_tokenizer)
    assert [len(d.prompt_ids) for d in built] == [9_000] * documents
    assert len({d.name for d in built}) == documents
    ranges = [(d.split, *d.meta["source"][0][1:]) for d in built]
    for (split_a, start_a, end_a), (split_b, start_b, end_b) in combinations(ranges, 2):
        assert split_a == split_b or end_a <= start_b or end_b <= start_a
    for split in {r[0] for r in ranges}:
        starts = sorted(start for s, start, _ in ranges if s == split)
        assert all(b - a >= stride for a, b in pairwise(starts))


def test_a_text_too_short_apart_is_long_enough_with_overlap(byte_tokenizer):
    spec = {"kind": "book", "context_tokens": 60_000, "documents": 16}
    with pytest.raises(UserError, match=r"holds 4 documents .* without overlap, 16 asked for"):
        build(WorkloadSpec.from_mapping(spec), byte_tokenizer)
    assert len(build(WorkloadSpec.from_mapping({**spec, "stride_tokens": 2500}), byte_tokenizer)) == 16


def test_source_files_may_overlap_too(byte_tokenizer):
    first, second = build(WorkloadSpec("stdlib", 200_000, documents=2, stride_tokens=20_000), byte_tokenizer)
    assert len(first.prompt_ids) == len(second.prompt_ids) == 200_000
    assert not {s[0] for s in first.meta["source"]} & {s[0] for s in second.meta["source"]}  # one train, one test


def test_another_folder_of_source(byte_tokenizer, tmp_path):
    (tmp_path / "tests").mkdir()
    for name in ("one.py", "two.py", "tests/three.py"):
        (tmp_path / name).write_text("x = 1\n" * 60)
    built = build(WorkloadSpec("stdlib", 200, documents=2, path=str(tmp_path)), byte_tokenizer)
    assert sorted(d.meta["source"][0][0] for d in built) == ["one.py", "two.py"]


def test_a_claim_inside_another_split_is_refused_even_when_not_next_to_it():
    claims = [[0, 100], [10, 20], [30, 40], [50, 60]]
    drafts = [Draft(f"d{i}", [1], meta={"source": [["t", *claim]]}) for i, claim in enumerate(claims)]
    with pytest.raises(UserError, match="share source text"):
        place(drafts, WorkloadSpec("book", 1, documents=4, stride_tokens=1))
    one_split = WorkloadSpec("book", 1, 4, stride_tokens=1, train_frac=1.0, validation_frac=0.0, test_frac=0.0)
    assert len(place(drafts, one_split)) == 4


def test_your_own_novel(byte_tokenizer, tmp_path):
    path = tmp_path / "novel.txt"
    path.write_text("\n\n".join(f"Chapter {i}. It rained." for i in range(500)))
    for kind in ("book", "summary"):
        [d] = build(WorkloadSpec(kind, 1000, documents=1, path=str(path)), byte_tokenizer)
        assert d.meta["source"][0][0] == "novel.txt"
        assert "It rained." in byte_tokenizer.decode(d.prompt_ids)
