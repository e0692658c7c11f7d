"""What every kind of workload promises: exact lengths, no shared text, determinism, honest splits."""

import json
import string
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import specdial.conf
from specdial.engine.workloads import KINDS, WorkloadSpec, build, of_split
from specdial.engine.workloads.sources import BOOK_PATH, paragraphs
from specdial.policies.errors import UserError

quick = settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=["stdlib", "book", "needle", "summary", "txt", "jsonl"])
def spec(request, tmp_path):
    """A small workload of each kind."""
    kind, path = request.param, None
    text = BOOK_PATH.read_text(encoding="utf-8")
    if kind in ("txt", "jsonl"):
        path = tmp_path / f"mine.{kind}"
        lines = [json.dumps({"text": text[i * 9000 : (i + 1) * 9000]}) for i in range(12)]
        path.write_text(text[:90_000] if kind == "txt" else "\n".join(lines), encoding="utf-8")
        kind = "file"
    return WorkloadSpec(kind, 700, documents=6, new_tokens=30, path=path and str(path))


def test_every_prompt_has_the_length_asked_for(spec, tokenizer):
    documents = build(spec, tokenizer)
    assert [len(d.prompt_ids) for d in documents] == [700] * 6
    assert [d.index for d in documents] == list(range(6))
    assert {d.new_tokens for d in documents} == {30}
    assert len({d.name for d in documents}) == 6


def test_no_two_documents_claim_the_same_characters(spec, tokenizer):
    claimed = Counter()
    for d in build(spec, tokenizer):
        for name, start, end in d.meta["source"]:
            claimed.update((name, at) for at in range(start, end))
    assert set(claimed.values()) == {1}


def test_same_seed_same_documents_other_seed_other_documents(spec, tokenizer):
    first, again = build(spec, tokenizer), build(spec, tokenizer)
    assert first == again
    other = build(WorkloadSpec.from_mapping({**_plain(spec), "seed": 1}), tokenizer)
    assert [d.prompt_ids for d in other] != [d.prompt_ids for d in first]


def test_more_documents_keep_the_first_ones(spec, tokenizer):
    few = build(WorkloadSpec.from_mapping({**_plain(spec), "documents": 3}), tokenizer)
    assert [d.prompt_ids for d in few] == [d.prompt_ids for d in build(spec, tokenizer)[:3]]


def test_meta_is_plain_json(spec, tokenizer):
    for d in build(spec, tokenizer):
        assert json.loads(json.dumps(d.meta)) == d.meta


def test_prompt_and_continuation_come_from_the_claimed_text(byte_tokenizer):
    text = BOOK_PATH.read_text(encoding="utf-8")
    for d in build(WorkloadSpec("book", 900, documents=5, new_tokens=40), byte_tokenizer):
        [[_, start, end]] = d.meta["source"]
        prompt = byte_tokenizer.decode(d.prompt_ids)
        assert text[start:end].startswith(prompt)
        assert end - start >= len(prompt) + 40


def test_stdlib_prompt_starts_with_its_file_name(byte_tokenizer):
    for d in build(WorkloadSpec("stdlib", 3000, documents=4), byte_tokenizer):
        path = d.meta["source"][0][0]
        assert byte_tokenizer.decode(d.prompt_ids).startswith(f"# {path}\n")
        assert path.endswith(".py")
        assert not {"test", "idlelib", "site-packages"} & set(path.split("/"))


@quick
@given(
    context=st.integers(1, 4000),
    documents=st.integers(1, 12),
    new_tokens=st.integers(1, 200),
    seed=st.integers(0, 2**31),
)
def test_book_of_any_shape(byte_tokenizer, context, documents, new_tokens, seed):
    built = build(WorkloadSpec("book", context, documents, new_tokens, seed), byte_tokenizer)
    assert all(len(d.prompt_ids) == context for d in built)
    ranges = sorted((start, end) for d in built for _, start, end in d.meta["source"])
    assert all(a_end <= b_start for (_, a_end), (b_start, _) in pairwise(ranges))


@quick
@given(
    documents=st.integers(1, 60),
    seed=st.integers(0, 1000),
    parts=st.tuples(*[st.integers(0, 100)] * 3).filter(lambda p: sum(p) > 0),
)
def test_splits_follow_the_shares(byte_tokenizer, documents, seed, parts):
    shares = [p / sum(parts) for p in parts]
    spec = WorkloadSpec("book", 20, documents, 1, seed, True, *shares)
    counts = Counter(d.split for d in build(spec, byte_tokenizer))
    assert sum(counts.values()) == documents
    for name, share in zip(("train", "validation", "test"), shares, strict=True):
        assert abs(counts[name] - share * documents) < 3
        if share == 0:
            assert counts[name] == 0
        elif documents >= 3:
            assert counts[name] >= 1


def test_default_split_of_two_documents_is_one_to_tune_on_and_one_to_test_on(byte_tokenizer):
    splits = {d.split for d in build(WorkloadSpec("book", 50, documents=2), byte_tokenizer)}
    assert splits == {"train", "test"}


@quick
@given(st.text(alphabet=string.ascii_letters + " \n\t.", max_size=300))
def test_paragraphs_keep_their_place(text):
    for p in paragraphs("t", text):
        assert text[p.start_char : p.end_char] == p.text
        assert p.text.strip()
    assert "".join(p.text for p in paragraphs("t", text)).split() == text.split()


def test_of_split(byte_tokenizer):
    documents = build(WorkloadSpec("book", 50, documents=8), byte_tokenizer)
    assert of_split(documents, "all") == documents
    parts = [of_split(documents, name) for name in ("train", "validation", "test")]
    assert [len(p) for p in parts] == [4, 2, 2]
    with pytest.raises(UserError, match="unknown split 'tests'"):
        of_split(documents, "tests")
    with pytest.raises(UserError, match="no document of 4 is in split test"):
        of_split(of_split(documents, "train"), "test")


def test_kinds_need_no_torch():
    code = "import sys, specdial.engine.workloads; sys.exit('torch' in sys.modules or 'triton' in sys.modules)"
    assert set(KINDS) == {"stdlib", "book", "file", "needle", "summary"}
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_shipped_settings_make_a_spec(kind):
    path = Path(specdial.conf.__file__).parent / "workload" / f"{kind}.yaml"
    plain = yaml.safe_load(path.read_text("utf-8"))
    assert plain["context_tokens"] == "${context}"
    assert WorkloadSpec.from_mapping({**plain, "context_tokens": 4096}).kind == kind


def _plain(spec):
    return {name: getattr(spec, name) for name in spec.__slots__}
