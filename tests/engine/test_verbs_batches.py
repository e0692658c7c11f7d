"""Batch after batch in one set of sequences: rounds are those of fresh ones; a smaller batch comes after the larger."""

import gc
import json
import weakref

import numpy as np
import pytest

from specdial.engine import batches
from specdial.engine.batches import Batches
from specdial.engine.dense import record_dense
from specdial.engine.job import ModelSettings, load_job
from specdial.engine.loop import Decoding
from specdial.engine.sampling import Sampling
from specdial.engine.trace.reader import read_trace
from specdial.engine.verbs import record
from specdial.policies.schema import plain_policy, policy_from_mapping

KV = {"budget": 40, "sink": 2, "recent": 8}
POLICIES = [
    plain_policy(),
    policy_from_mapping({"name": "four", "controller": {"kind": "fixed", "k": 4}, "draft_kv": KV}),
    policy_from_mapping({"name": "rate", "controller": {"kind": "rate", "k_max": 6, "gamma": 0.2}, "draft_kv": KV}),
    policy_from_mapping(
        {"name": "kept", "controller": {"kind": "fixed", "k": 3}, "draft_kv": {**KV, "refresh_rounds": 2}}
    ),
]
SAMPLINGS = [Sampling(), Sampling(temperature=0.8, seed=5)]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def settings(tiny_checkpoint, tmp_path):
    """Five documents of different lengths, up to 150 tokens, and 24 new ones."""
    parts = [f"The {i}th paragraph, on {i * i} things that happened." for i in range(300)]
    lengths = (150, 90, 120, 40, 149)
    lines = [json.dumps({"text": " ".join(parts[20 * i :])[:length]}) for i, length in enumerate(lengths)]
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(lines))
    workload = {"kind": "file", "path": str(path), "context_tokens": 150, "documents": 5, "new_tokens": 24}
    workload |= {"keep_short": True, "ignore_eos": True}
    return {"model": {"source": str(tiny_checkpoint("llama")), "device": "cpu"}, "workload": workload}


def told(sequences, policy, sampling, numbers):
    sequences.rewind()
    rounds = list(Decoding(sequences, policy, sampling, numbers).rounds())
    lines = []
    for r in rounds:
        counted = np.arange(r.drafts.shape[1]) < r.k[:, None]  # the rest is what earlier rounds left
        drafts, entropy = (np.where(counted, x, 0).tolist() for x in (r.drafts, r.signals.entropy_nats))
        lines.append((r.k.tolist(), r.accepted.tolist(), r.emitted, drafts, entropy))
    return lines, [list(t) for t in sequences.tokens]


@pytest.mark.parametrize("batch", [1, 2])
def test_rounds_are_those_of_fresh_sequences(settings, batch):
    job = load_job(ModelSettings(**settings["model"]), settings["workload"])
    assert len({len(d.prompt_ids) for d in job.documents}) > 2
    groups = [job.documents[i : i + batch] for i in range(0, 3 if batch == 1 else 5, batch)]
    longest = max(len(d.prompt_ids) + d.new_tokens for d in job.documents)
    reused = Batches(job, POLICIES)
    made = set()
    for group in groups:
        sequences, numbers = reused.prefilled(group), [d.index for d in group]
        made.add(weakref.ref(sequences))  # an id may come again
        fresh = job.sequences(group, POLICIES, room_tokens=longest)
        assert fresh is not sequences
        assert sequences.cache.capacity_tokens == fresh.cache.capacity_tokens
        for policy in POLICIES:
            for sampling in SAMPLINGS if policy.name in ("plain", "rate") else SAMPLINGS[:1]:
                assert told(sequences, policy, sampling, numbers) == told(fresh, policy, sampling, numbers)
        if batch == 1:
            arms = [POLICIES[1].draft_kv]
            ours, theirs = (record_dense(s, 0, arms, 3) for s in (sequences, fresh))
            assert all((ours[name] == theirs[name]).all() for name in theirs)
        del sequences
    assert len(made) == (1 if batch == 1 else 2)


def test_what_drafters_keep_is_that_of_fresh_sequences(settings, tiny_checkpoint):
    """Page summaries and a draft model's keys are of the document that is there now."""
    target, draft = (str(tiny_checkpoint("llama", head_dim=64, seed=seed)) for seed in (0, 1))
    fixed = {"kind": "fixed", "k": 3}
    pages = {"budget": 48, "sink": 2, "recent": 16, "page": 16}
    policies = [
        policy_from_mapping({"name": "quest", "drafter": {"kind": "quest"}, "controller": fixed, "draft_kv": pages}),
        policy_from_mapping({"name": "small", "drafter": {"kind": "model", "model": draft}, "controller": fixed}),
        policy_from_mapping({"name": "lookup", "drafter": {"kind": "lookup"}, "controller": fixed}),
    ]
    job = load_job(ModelSettings(**{**settings["model"], "source": target}), settings["workload"])
    longest = max(len(d.prompt_ids) + d.new_tokens for d in job.documents)
    reused = Batches(job, policies)
    for group in (job.documents[:2], job.documents[2:4]):
        fresh = job.sequences(group, policies, room_tokens=longest)
        for policy in policies:
            numbers = [d.index for d in group]
            ours, theirs = (told(s, policy, Sampling(), numbers) for s in (reused.prefilled(group), fresh))
            assert ours == theirs


def test_a_recording_is_that_of_fresh_sequences(settings, tmp_path, monkeypatch):
    job = {**settings, "batch": 2, "policy": {"controller": {"kind": "rate", "gamma": 0.2}, "draft_kv": KV}}
    record.run({**job, "out": str(tmp_path / "reused")})

    class Fresh(Batches):
        def prefilled(self, documents):
            self._held = None
            return super().prefilled(documents)

    monkeypatch.setattr(record, "Batches", Fresh)
    record.run({**job, "out": str(tmp_path / "fresh")})
    ours, theirs = read_trace(tmp_path / "reused"), read_trace(tmp_path / "fresh")
    times = [name for name in ours.rounds.column_names if name.endswith("_us")]
    assert ours.rounds.drop_columns(times).equals(theirs.rounds.drop_columns(times))
    assert ours.drafts.equals(theirs.drafts)
    assert ours.outputs.equals(theirs.outputs)


def test_the_larger_batch_is_gone_before_the_smaller_one_is_made(settings, monkeypatch):
    job = load_job(ModelSettings(**settings["model"]), settings["workload"])
    reused = Batches(job, POLICIES)
    larger = weakref.ref(reused.prefilled(job.documents[:4]))
    assert reused.prefilled(job.documents[1:]) is larger()
    seen = []
    build = batches.Job.sequences

    def sequences(self, *arguments, **options):
        gc.collect()
        seen.append(larger())
        return build(self, *arguments, **options)

    monkeypatch.setattr(batches.Job, "sequences", sequences)
    assert reused.prefilled(job.documents[4:]).batch == 1
    assert seen == [None]
