"""Dense recording: at every position of a finished greedy output, the drafts each arm would have proposed there.

Drafts from different positions are independent given the committed keys, so a chunk of positions is drafted as one
batch: an arm costs k_max batched steps a chunk, not k_max steps a position, and on a GPU these are one pass. The keys
and attention rows are recomputed by the same row-padded pass that verification uses, so a replay sees what the engine
would have seen.
"""

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdial.engine.drafters.selection import Selection, choose_keys, joined
from specdial.engine.drafters.sparse_self import CompactDraft
from specdial.engine.history import History
from specdial.engine.sequences import Sequences
from specdial.policies.schema import DraftKV

CHUNK_POSITIONS = 16


@torch.inference_mode()
def record_dense(s: Sequences, b: int, arms: list[DraftKV], k_max: int) -> dict[str, np.ndarray]:
    """Draft columns (schema.DRAFTS without doc and round) for sequence b, which must be finished and greedy.

    arms: selections of drafter sparse_self; a budget that is a fraction is one of this prompt, as when decoding.
    `s` holds that one sequence; it is used as scratch and left rewound to the prompt.
    """
    if s.batch != 1 or s.history is None:
        raise ValueError("dense recording takes sequences one at a time, with history")
    tokens, prompt = list(s.tokens[b]), int(s.prompt_tokens[b])
    s.rewind()
    arms = [arm.resolved(prompt) for arm in arms]
    once = {a: choose_keys(_history(s), s.cache.lengths, kv) for a, kv in enumerate(arms) if kv.refresh_rounds == 0}
    columns: list[dict[str, np.ndarray]] = []
    for start in range(prompt, len(tokens), CHUNK_POSITIONS):
        stop = min(start + CHUNK_POSITIONS, len(tokens))
        selections = _advance(s, tokens, start, stop, arms, once)
        for arm, selection in enumerate(selections):
            columns.append(_draft_chunk(s, tokens, start, arm, selection, k_max))
    s.rewind()
    merged = {name: np.concatenate([c[name] for c in columns]) for name in columns[0]}
    order = np.lexsort((merged["depth"], merged["arm"], merged["position"]))
    return {name: values[order] for name, values in merged.items()}


def _advance(
    s: Sequences, tokens: list[int], start: int, stop: int, arms: list[DraftKV], once: dict[int, Selection]
) -> list[Selection]:
    """Selections of rounds that start at committed lengths start..stop-1, one per arm; moves the cache on to `stop`.

    once: the arms whose selection was made at the prompt's end.
    """
    chosen: list[list[Selection]] = [[] for _ in arms]
    device = s.decoder.device
    block = torch.tensor([tokens[start - 1 : stop - 1]], device=device)  # rows at start-1 .. stop-2
    result = s.forward_block(block, padded=True, rows=True)
    history, rows, lengths = _history(s), result.rows, s.cache.lengths.clone()
    if rows is None:
        raise ValueError("dense recording needs history")
    before = history.scores().clone() if history.decayed else None
    for row in range(stop - start):
        for arm, draft_kv in enumerate(arms):
            chosen[arm].append(once[arm] if arm in once else choose_keys(history, s.cache.lengths, draft_kv))
        # Pushing the first row + 1 rows again leaves the same ring: each row has its slot. A decayed sum starts over.
        if before is not None:
            history.scores().copy_(before)
        history.push(rows, lengths, torch.tensor([row + 1], device=device))
        s.cache.commit(np.ones(1, dtype=np.int64))
    return [joined(selections) for selections in chosen]


def _draft_chunk(
    s: Sequences, tokens: list[int], start: int, arm: int, selection: Selection, k_max: int
) -> dict[str, np.ndarray]:
    """Greedy chains of k_max drafts from each position of a chunk, as columns."""
    lanes = selection.counts.shape[0]
    cached = torch.arange(start - 1, start - 1 + lanes, device=s.decoder.device)
    drafter = CompactDraft(s, selection, cached, steps=k_max, lasting=True)
    token = torch.tensor(tokens[start - 1 : start - 1 + lanes], device=s.decoder.device)
    pass_of = ("dense", tuple(drafter.k.shape), k_max)
    drafted, said = s.graphs.run(pass_of, partial(_chain, drafter, k_max), drafter.counts, drafter.positions, token)
    drafts, signals = drafted.cpu().numpy(), said.cpu().numpy()  # [k_max, N], [k_max, 3, N]
    alive = np.ones(lanes, dtype=np.bool_)  # every earlier draft of the chain matched
    rows: list[dict[str, np.ndarray]] = []
    for depth in range(1, k_max + 1):
        entropy, top1, margin = signals[depth - 1]
        truth = np.array(
            [tokens[i] if i < len(tokens) else -1 for i in range(start + depth - 1, start + depth - 1 + lanes)]
        )
        match = alive & (drafts[depth - 1] == truth)
        rows.append(
            {
                "position": np.arange(start, start + lanes),
                "arm": np.full(lanes, arm),
                "depth": np.full(lanes, depth),
                "entropy_nats": entropy,
                "top1_prob": top1,
                "margin": margin,
                "match": match,
                "reached": alive & (truth >= 0),  # past the output's end nothing judges them
            }
        )
        alive = match
    return {name: np.concatenate([r[name] for r in rows]) for name in rows[0]}


def _chain(
    drafter: CompactDraft, k_max: int, counts: Tensor, positions: Tensor, token: Tensor
) -> tuple[Tensor, Tensor]:
    """Tokens [k_max, N] and signals [k_max, 3, N] that a drafter proposes after `token` [N]: a pass.

    counts, positions: the drafter's, where a captured graph goes on reading them.
    """
    drafter.counts, drafter.positions = counts, positions
    tokens, signals = [], []
    for depth in range(k_max):
        proposal = drafter.step(depth, token)
        token = proposal.token
        tokens.append(token)
        signals.append(proposal.signals)
    return torch.stack(tokens), torch.stack(signals)


def dense_table(doc: int, columns: dict[str, np.ndarray]) -> dict[str, Any]:
    """The trace's `drafts` table of one document, from `record_dense`."""
    n = len(columns["position"])
    return {**columns, "doc": np.full(n, doc), "round": np.full(n, -1), "accept_prob": [None] * n}


def _history(s: Sequences) -> History:
    if s.history is None:
        raise ValueError("dense recording needs history")
    return s.history
