"""Made-up traces and costs with known acceptance, for tests and benchmarks; meta.json says they are synthetic.

Every position has a difficulty; a draft's entropy rises and its chance to match falls with difficulty, depth and a
smaller budget. No text and no model stand behind them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specdial.engine.trace.schema import PLAIN
from specdial.engine.trace.writer import TraceWriter, write_costs
from specdial.policies.fields import to_plain
from specdial.policies.file import policy_digest
from specdial.policies.schema import DraftKV, Policy

SPLITS = ("train", "validation", "test")
MODEL = {
    "name": "synthetic",
    "digest": "0" * 64,
    "origin": "synthetic",
    "random": True,
    "weight_bytes": 270_000_000,
    "kv_bytes_per_token": 46_080,
    "max_context_tokens": 8192,
    "dtype": "float32",
}


@dataclass(frozen=True, slots=True)
class Shape:
    """How much to make up. difficulty_nats: mean entropy of a draft; more of it means fewer accepted drafts."""

    documents: int = 6
    prompt_tokens: int = 400
    new_tokens: int = 60
    budgets: tuple[int, ...] = (128, 256)
    k_max: int = 8
    difficulty_nats: float = 0.6
    temperature: float = 0.0
    seed: int = 0


def draft_kv(budget: int) -> DraftKV:
    """The selection that synthetic arms use at a budget."""
    return DraftKV(budget=budget, sink=4, recent=16)


def write_trace(out: Path, shape: Shape) -> None:
    """Write a dense synthetic trace whose rounds are plain decoding."""
    writer = TraceWriter(out, synthetic_meta(shape))
    for entry in synthetic_meta(shape)["documents"]:
        doc, start, new = entry["doc"], entry["prompt_tokens"], entry["new_tokens"]
        writer.write(
            doc,
            {
                "drafts": dense_drafts(shape, doc, start, new),
                "outputs": outputs(doc, start, new, shape.seed),
                "rounds": plain_rounds(doc, start, new),
            },
        )


def synthetic_meta(shape: Shape) -> dict[str, Any]:
    """meta.json of a synthetic trace; documents differ a little in length and go round the splits."""
    policy = Policy(name="plain")
    return {
        "model": MODEL,
        "tokenizer_digest": "0" * 64,
        "workload": {"kind": "synthetic"},
        "documents": [
            {
                "doc": d,
                "name": f"synthetic-{d}",
                "split": SPLITS[d % 3],
                "prompt_tokens": shape.prompt_tokens + 7 * d,
                "new_tokens": shape.new_tokens,
            }
            for d in range(shape.documents)
        ],
        "policy": policy.decisions(),
        "policy_digest": policy_digest(policy),
        "arms": [
            {"arm": i, "drafter": {"kind": "sparse_self"}, "draft_kv": to_plain(draft_kv(budget))}
            for i, budget in enumerate(shape.budgets)
        ],
        "k_max": shape.k_max,
        "dense": True,
        "sampling": {"temperature": shape.temperature, "top_p": 1.0, "top_k": 0, "seed": shape.seed},
        "batch": 1,
        "hardware": {"device": "none", "name": "synthetic", "threads": 1},
        "provenance": {},
        "config": {},
    }


def dense_drafts(shape: Shape, doc: int, start: int, new_tokens: int) -> dict[str, npt.NDArray[Any]]:
    """Columns of `drafts`: a chain of k_max drafts at every output position and arm, no further than its end."""
    generator = np.random.default_rng((shape.seed, doc))
    arms, depth = len(shape.budgets), shape.k_max
    difficulty = generator.gamma(0.8, shape.difficulty_nats / 0.8, size=new_tokens + depth)
    token = np.arange(new_tokens)[:, None] + np.arange(depth)  # [positions, depth]
    noise = generator.normal(0.0, 0.15, size=(new_tokens, depth))
    luck = generator.random((new_tokens, depth))
    shortage = np.array([0.25 * np.log2(max(shape.budgets) / budget) for budget in shape.budgets])
    base = difficulty[token] + noise + 0.03 * np.arange(depth)
    entropy = np.maximum(base[:, None, :] + 0.2 * shortage[None, :, None], 0.001)  # [positions, arms, depth]
    chance = 1.0 / (1.0 + np.exp(-(3.2 - 1.6 * entropy - shortage[None, :, None])))
    hit = luck[:, None, :] < chance
    match = np.cumprod(hit, axis=2).astype(np.bool_)
    reached = np.concatenate([np.ones((new_tokens, arms, 1), np.bool_), match[:, :, :-1]], axis=2)
    index = np.stack(np.meshgrid(range(new_tokens), range(arms), range(depth), indexing="ij"), axis=-1)
    keep = (index[..., 0] + index[..., 2] < new_tokens - 1).reshape(-1)  # the last token needs no draft
    flat = index.reshape(-1, 3)[keep]
    return {
        "doc": np.full(len(flat), doc),
        "round": np.full(len(flat), -1),
        "position": start + flat[:, 0],
        "arm": flat[:, 1],
        "depth": flat[:, 2] + 1,
        "entropy_nats": entropy.reshape(-1)[keep].astype(np.float32),
        "top1_prob": np.exp(-entropy).reshape(-1)[keep].astype(np.float32),
        "margin": (4.0 * np.exp(-entropy)).reshape(-1)[keep].astype(np.float32),
        "match": match.reshape(-1)[keep],
        "accept_prob": _accept_prob(chance.reshape(-1)[keep], shape.temperature),
        "reached": reached.reshape(-1)[keep],
    }


def outputs(doc: int, start: int, new_tokens: int, seed: int) -> dict[str, npt.NDArray[Any]]:
    """Columns of `outputs`: random token ids."""
    tokens = np.random.default_rng((seed, doc, 1)).integers(0, 49_152, size=new_tokens)
    return {"doc": np.full(new_tokens, doc), "position": start + np.arange(new_tokens), "token_id": tokens}


def plain_rounds(doc: int, start: int, new_tokens: int) -> dict[str, Any]:
    """Columns of `rounds`: plain decoding, one token a round."""
    zero = np.zeros(new_tokens)
    return {
        "doc": np.full(new_tokens, doc),
        "round": np.arange(new_tokens),
        "context_tokens": start + np.arange(new_tokens),
        "batch": np.ones(new_tokens, np.int32),
        "k": np.zeros(new_tokens, np.int32),
        "accepted": np.zeros(new_tokens, np.int32),
        "emitted": np.ones(new_tokens, np.int32),
        "mode": [PLAIN] * new_tokens,
        "rounds_since_full": np.zeros(new_tokens, np.int32),
        "draft_us": zero,
        "verify_us": 900.0 + 0.2 * (start + np.arange(new_tokens)),
        "select_us": zero,
        "host_us": zero + 20.0,
    }


def cost_us(op: str, context_tokens: int, batch: int, k: int, budget: int) -> float:
    """The made-up machine: weights once, keys by the byte, rows by the row."""
    if op == "plain":
        return 700.0 + 0.2 * batch * context_tokens + 10.0 * batch
    if op == "verify":
        return 700.0 + 0.2 * batch * context_tokens + 10.0 * batch * (k + 1)
    if op == "draft":
        return 150.0 + 0.2 * batch * budget + 10.0 * batch
    if op == "select":
        return 20.0 + 0.005 * batch * context_tokens
    return 30.0


def write_synthetic_costs(out: Path, contexts: tuple[int, ...], batches: tuple[int, ...], shape: Shape) -> None:
    """Write a cost table of `cost_us` over contexts x batches x (k of 0, 1, 2, 4 ... k_max, or the budgets)."""
    ks = sorted({0, shape.k_max, *(2**i for i in range(7) if 2**i < shape.k_max)})
    axes = {"plain": [(0, 0)], "verify": [(k, 0) for k in ks], "host": [(0, 0)]}
    axes |= {op: [(0, budget) for budget in shape.budgets] for op in ("draft", "select")}
    rows = []
    for op, pairs in axes.items():
        for context in contexts:
            for batch in batches:
                for k, budget in pairs:
                    value = cost_us(op, context, batch, k, budget)
                    spread = {"median_us": value, "p10_us": value, "p90_us": value, "n": 1, "bytes": 0}
                    place = {"context_tokens": context, "batch": batch, "k": k, "budget": budget}
                    rows.append({"op": op, "drafter": "none" if op == "plain" else "sparse_self", **place, **spread})
    write_costs(out, {"model": MODEL, "hardware": {"device": "none", "name": "synthetic", "threads": 1}}, rows)


def _accept_prob(chance: npt.NDArray[Any], temperature: float) -> npt.NDArray[Any]:
    if temperature > 0.0:
        return np.asarray(chance, np.float32)
    return np.array([None] * len(chance), dtype=object)
