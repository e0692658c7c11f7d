"""Dense recording: at every position of a finished greedy output, the drafts each arm would have proposed there.

Drafts from different positions are independent given the committed keys, so a chunk of positions is drafted as one
batch: an arm costs k_max batched steps a chunk, not k_max steps a position. The keys and attention rows are recomputed
by the same row-padded pass that verification uses, so a replay sees what the engine would have seen.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdial.engine.drafters.sparse_self import CompactDraft, choose_keys
from specdial.engine.loop import signal_values
from specdial.engine.sequences import Sequences
from specdial.policies.schema import DraftKV

CHUNK_POSITIONS = 16


@torch.inference_mode()
def record_dense(s: Sequences, b: int, arms: list[DraftKV], k_max: int) -> dict[str, np.ndarray]:
    """Draft columns (schema.DRAFTS without doc and round) for sequence b, which must be finished and greedy.

    `s` holds that one sequence; it is used as scratch and left rewound to the prompt.
    """
    if s.batch != 1 or s.ring is None:
        raise ValueError("dense recording takes sequences one at a time, with history")
    tokens, prompt = list(s.tokens[b]), int(s.prompt_tokens[b])
    s.rewind()
    columns: list[dict[str, np.ndarray]] = []
    for start in range(prompt, len(tokens), CHUNK_POSITIONS):
        stop = min(start + CHUNK_POSITIONS, len(tokens))
        selections = _advance(s, tokens, start, stop, arms)
        for arm, (indices, counts) in enumerate(selections):
            columns.append(_draft_chunk(s, tokens, start, arm, (indices, counts), k_max))
    s.rewind()
    merged = {name: np.concatenate([c[name] for c in columns]) for name in columns[0]}
    order = np.lexsort((merged["depth"], merged["arm"], merged["position"]))
    return {name: values[order] for name, values in merged.items()}


def _advance(
    s: Sequences, tokens: list[int], start: int, stop: int, arms: list[DraftKV]
) -> list[tuple[Tensor, Tensor]]:
    """Selections for rounds that start at committed lengths start..stop-1, and the cache moved on to `stop`.

    Returns per arm indices [L, N, Hk, C] and counts [N], N = stop - start.
    """
    chosen: list[list[tuple[Tensor, Tensor]]] = [[] for _ in arms]
    block = torch.tensor([tokens[start - 1 : stop - 1]], device=s.decoder.device)  # rows at start-1 .. stop-2
    result = s.forward_block(block, padded=True, mass=True)
    one = np.ones(1, dtype=np.int64)
    for row in range(stop - start):
        for arm, draft_kv in enumerate(arms):
            chosen[arm].append(choose_keys(_ring(s), s.cache.lengths, draft_kv, backend=s.backend))
        s.push_history([mass[:, :, row : row + 1] for mass in result.masses or []], one)
        s.cache.commit(one)
    return [(torch.cat([i for i, _ in c], dim=1), torch.cat([n for _, n in c])) for c in chosen]


def _draft_chunk(
    s: Sequences, tokens: list[int], start: int, arm: int, selection: tuple[Tensor, Tensor], k_max: int
) -> dict[str, np.ndarray]:
    """Greedy chains of k_max drafts from each position of a chunk, as columns."""
    indices, counts = selection
    lanes = counts.shape[0]
    positions = torch.arange(start - 1, start - 1 + lanes, device=s.decoder.device)  # where the first input stands
    drafter = CompactDraft(s, indices, counts, positions, steps=k_max)
    token = torch.tensor(tokens[start - 1 : start - 1 + lanes], device=s.decoder.device)
    alive = np.ones(lanes, dtype=np.bool_)  # every earlier draft of the chain matched
    rows: list[dict[str, np.ndarray]] = []
    for depth in range(1, k_max + 1):
        logits = drafter.step(token)
        token = logits.argmax(dim=-1)
        entropy, top1, margin = (value.cpu().numpy() for value in signal_values(logits))
        truth = np.array(
            [tokens[i] if i < len(tokens) else -1 for i in range(start + depth - 1, start + depth - 1 + lanes)]
        )
        match = alive & (token.cpu().numpy() == truth)
        rows.append(
            {
                "position": np.arange(start, start + lanes),
                "arm": np.full(lanes, arm),
                "depth": np.full(lanes, depth),
                "entropy_nats": entropy,
                "top1_prob": top1,
                "margin": margin,
                "match": match,
                "reached": alive.copy(),
            }
        )
        alive = match
    return {name: np.concatenate([r[name] for r in rows]) for name in rows[0]}


def dense_table(doc: int, columns: dict[str, np.ndarray]) -> dict[str, Any]:
    """The trace's `drafts` table of one document, from `record_dense`."""
    n = len(columns["position"])
    return {**columns, "doc": np.full(n, doc), "round": np.full(n, -1), "accept_prob": [None] * n}


def _ring(s: Sequences) -> Tensor:
    if s.ring is None:
        raise ValueError("dense recording needs history")
    return s.ring
