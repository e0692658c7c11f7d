"""Replay against the engine itself: one dense greedy recording, then the engine's real rounds under other policies."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from specdial.engine.dense import dense_table, record_dense
from specdial.engine.loop import Decoding
from specdial.engine.models import ModelConfig
from specdial.engine.models.tensors import tensor_shapes
from specdial.engine.recorder import Recorder
from specdial.engine.sampling import Sampling
from specdial.engine.sequences import Sequences
from specdial.engine.tokenizer import Tokenizer
from specdial.engine.trace.reader import read_trace
from specdial.engine.trace.writer import TraceWriter
from specdial.engine.weights import load_model
from specdial.engine.workloads import Document
from specdial.policies.fields import to_plain
from specdial.policies.file import policy_digest
from specdial.policies.schema import DraftKV, policy_from_mapping
from specdial.simulator.replay import replay, replay_rounds

KV = {"budget": 40, "sink": 2, "recent": 8, "window": 8}
BUDGETS = (24, 40, 80)
K_MAX = 8
NEW_TOKENS = 36
PLAIN = policy_from_mapping({"drafter": {"kind": "none"}, "controller": {"kind": "none"}, "draft_kv": KV})
COLUMNS = ("doc", "round", "context_tokens", "k", "accepted", "emitted")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny random Llama, float32 on the CPU."""
    folder = tmp_path_factory.mktemp("tiny")
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "vocab_size": 288,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": 257,
    }
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in tensor_shapes(ModelConfig.from_hf(raw, name="tiny")):
        noise = torch.randn(shape, generator=generator)
        weights[name] = 1 + 0.2 * noise if name.endswith("norm.weight") else noise * shape[-1] ** -0.5
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(raw))
    Tokenizer.of_bytes()._backend.save(str(folder / "tokenizer.json"))
    return load_model(str(folder), device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def documents():
    generator = np.random.default_rng(0)
    splits = ("train", "train", "validation")
    return [
        Document(
            index=i,
            name=f"d{i}",
            split=split,
            prompt_ids=generator.integers(0, 256, 120 + 9 * i).tolist(),
            new_tokens=NEW_TOKENS - 5 * i,
        )
        for i, split in enumerate(splits)
    ]


@pytest.fixture(scope="module")
def prefilled(model, documents):
    """prefilled(batch) -> one Sequences per group of documents."""

    def make(batch):
        made = []
        for first in range(0, len(documents), batch):
            group = documents[first : first + batch]
            s = Sequences(model.decoder, 240, len(group), window=KV["window"], backend="reference")
            s.prefill([d.prompt_ids for d in group], [d.new_tokens for d in group], frozenset())
            made.append((group, s))
        return made

    cache = {}
    return lambda batch: cache.setdefault(batch, make(batch))


def decode(groups, policy, temperature=0.0):
    """The engine's own rows under a policy: trace tables by document."""
    tables = {}
    for group, s in groups:
        s.rewind()
        recorder = Recorder(group)
        for round_ in Decoding(s, policy, Sampling(temperature=temperature), [d.index for d in group]).rounds():
            recorder.add(round_)
        for b, document in enumerate(group):
            tables[document.index] = recorder.tables(b, s.tokens[b])
    return tables


def meta_for(documents, policy, arms, *, dense, batch, temperature=0.0):
    return {
        "model": {"name": "tiny", "digest": "0", "kv_bytes_per_token": 512},
        "documents": [
            {
                "doc": d.index,
                "name": d.name,
                "split": d.split,
                "prompt_tokens": len(d.prompt_ids),
                "new_tokens": d.new_tokens,
            }
            for d in documents
        ],
        "policy": policy.decisions(),
        "policy_digest": policy_digest(policy),
        "arms": [{"arm": i, "drafter": {"kind": "sparse_self"}, "draft_kv": to_plain(a)} for i, a in enumerate(arms)],
        "k_max": K_MAX if dense else policy.k_max,
        "dense": dense,
        "sampling": {"temperature": temperature},
        "batch": batch,
    }


@pytest.fixture(scope="module")
def dense(prefilled, documents, tmp_path_factory):
    """One dense trace of plain greedy decoding under three budgets."""
    out = tmp_path_factory.mktemp("dense")
    arms = [DraftKV(**{**KV, "budget": budget}) for budget in BUDGETS]
    writer = TraceWriter(out, meta_for(documents, PLAIN, arms, dense=True, batch=1))
    for group, s in prefilled(1):
        ((number, tables),) = decode([(group, s)], PLAIN).items()
        writer.write(number, {**tables, "drafts": dense_table(number, record_dense(s, 0, arms, K_MAX))})
    return read_trace(out)


def random_policy(generator):
    kind = generator.choice(["fixed", "entropy", "confidence", "rate"])
    k = int(generator.integers(1, K_MAX + 1))
    settings = {
        "fixed": {"k": k},
        "entropy": {"k_max": k, "coefficient": 0.2, "threshold": float(generator.uniform(-0.4, 0.4))},
        "confidence": {"k_max": k, "threshold": float(generator.uniform(0.0, 0.5))},
        "rate": {
            "k_max": k,
            "form": str(generator.choice(["paper", "calibrated"])),
            "gamma": float(generator.uniform(0.0, 0.3)),
            "k_set": [allowed for allowed in [[], [1, 3, 6]][int(generator.integers(2))] if allowed <= k],
        },
    }
    controller = {"kind": str(kind), **settings[kind]}
    policy = {"controller": controller, "draft_kv": {**KV, "budget": int(generator.choice(BUDGETS))}}
    if generator.random() < 0.3:
        start = int(generator.integers(125, 150))
        override = {"controller": {"kind": "none"}} if generator.random() < 0.5 else {"draft_kv": {"budget": 24}}
        policy["cells"] = [{"from_context_tokens": start, "to_context_tokens": start + 15, "overrides": override}]
    return policy_from_mapping(policy)


def engine_rows(tables):
    return [row for number in sorted(tables) for row in zip(*(tables[number]["rounds"][c] for c in COLUMNS))]


def replayed_rows(log):
    return list(zip(*(getattr(log, name).tolist() for name in COLUMNS)))


@pytest.mark.parametrize("batch", [1, 2])
def test_fifty_random_policies_replay_to_the_rounds_the_engine_really_does(dense, prefilled, batch):
    generator = np.random.default_rng(batch)
    policies = [random_policy(generator) for _ in range(25)]
    logs = replay_rounds(dense, policies, batch=batch)
    lengths = set()
    for policy, log in zip(policies, logs):
        rows = engine_rows(decode(prefilled(batch), policy))
        assert replayed_rows(log) == rows
        lengths |= {row[3] for row in rows}
    assert len(lengths) >= 7  # the policies were as different as they should be


@pytest.mark.parametrize(("batch", "temperature"), [(1, 0.0), (2, 0.0), (3, 0.0), (1, 1.0), (2, 1.0)])
def test_a_recording_replays_to_its_own_rounds_and_time(prefilled, documents, tmp_path, batch, temperature):
    generator = np.random.default_rng(7)
    for i in range(4):
        policy = random_policy(generator)
        out = tmp_path / str(i)
        writer = TraceWriter(
            out, meta_for(documents, policy, [policy.draft_kv], dense=False, batch=batch, temperature=temperature)
        )
        tables = decode(prefilled(batch), policy, temperature)
        for number, own in tables.items():
            writer.write(number, own)
        (outcome,) = replay(read_trace(out), None, [policy], batch=batch, keep_rounds=True)
        assert outcome.level == "exact"
        assert replayed_rows(outcome.round_log) == engine_rows(tables)
        total = 0.0
        for first in range(0, len(documents), batch):
            group = [tables[d.index]["rounds"] for d in documents[first : first + batch]]
            longest = max(group, key=lambda rounds: len(rounds["doc"]))
            total += sum(sum(longest[c]) for c in ("draft_us", "verify_us", "select_us", "host_us"))
        assert outcome.us_per_token * outcome.tokens == pytest.approx(total, rel=1e-9)
