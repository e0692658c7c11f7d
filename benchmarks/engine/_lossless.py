"""Do two greedy outputs agree, and where they part, could rounding alone have done it?

Plain decoding computes one row at a time, verification a block of rows: other kernels, other rounding, and keys written
by either. So both are run over the same tokens (the plain output), and the noise is how far the block pass moves the
margin between the two logits that plain decoding ranked first. An output that leaves the plain one where the margin is
larger than any noise seen is a fault, not rounding.
"""

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class Margins:
    """Plain decoding's two likeliest tokens at every new position: ids and logits [B, n, 2]; mismatches: positions
    where the likeliest is not what plain decoding had emitted."""

    ids: torch.Tensor
    logits: torch.Tensor
    mismatches: int

    def at(self, b, position):
        """Top-2 logit margin of sequence b at a new position."""
        return float(self.logits[b, position, 0] - self.logits[b, position, 1])


@torch.inference_mode()
def forced(s, outputs, block_tokens, rows):
    """Teacher-forced passes over new tokens: yields (first position, logits [B, T, V]); whole blocks only."""
    s.rewind()
    start = s.prompt_tokens - 1
    pending = [t[p - 1] for t, p in zip(s.tokens, s.prompt_tokens)]
    inputs = torch.tensor([[first, *o[:-1]] for first, o in zip(pending, outputs)], device=s.decoder.device)  # [B, n]
    for at in range(0, inputs.shape[1] - block_tokens + 1, block_tokens):
        s.cache.set_lengths(start + at)
        yield at, s.forward_block(inputs[:, at : at + block_tokens], padded=rows, rows=rows).logits
    s.rewind()


def plain_margins(batches, outputs):
    """Margins of one-row passes over the plain outputs of batches."""
    ids, values = [], []
    for s, part in _shared_out(batches):
        found = [logits[:, 0].float().topk(2) for _, logits in forced(s, outputs[part], 1, rows=False)]
        ids.append(torch.stack([f.indices for f in found], dim=1))  # [B, n, 2]
        values.append(torch.stack([f.values for f in found], dim=1))  # [B, n, 2]
    likeliest = torch.cat(ids)[..., 0]
    mismatches = int((likeliest != torch.tensor(outputs, device=likeliest.device)).sum())
    return Margins(torch.cat(ids), torch.cat(values), mismatches)


def noise(batches, outputs, margins, block_tokens):
    """What a block pass changes in plain decoding's two first logits, and in the margin between them."""
    logit, margin = [], []
    for s, part in _shared_out(batches):
        for at, logits in forced(s, outputs[part], block_tokens, rows=True):
            span = slice(at, at + block_tokens)
            change = logits.float().gather(2, margins.ids[part, span]) - margins.logits[part, span]  # [B, T, 2]
            logit.append(change.abs().flatten().cpu())
            margin.append((change[..., 0] - change[..., 1]).abs().flatten().cpu())
    return {name: _extent(torch.cat(values).numpy()) for name, values in (("logit", logit), ("margin", margin))}


def _shared_out(batches):
    """Each batch with the slice of all sequences that is its own."""
    first = 0
    for s in batches:
        yield s, slice(first, first + s.batch)
        first += s.batch


def _extent(values):
    return {"max": round(float(values.max()), 6), "p99": round(float(np.quantile(values, 0.99)), 6)}


def differences(outputs, plain, margins, noise_max):
    """Counts of sequences that leave the plain output, and the first differences with the largest margins."""
    found = []
    for b, (ours, theirs) in enumerate(zip(outputs, plain)):
        at = next((i for i, (x, y) in enumerate(zip(ours, theirs)) if x != y), None)
        if at is None and len(ours) != len(theirs):
            at = min(len(ours), len(theirs)) - 1
        if at is not None:
            found.append((margins.at(b, at), b, at))
    found.sort(reverse=True)
    return {
        "differing": len(found),
        "differing_beyond_noise": sum(margin > noise_max for margin, _, _ in found),
        "largest_margins": [{"margin": round(m, 4), "sequence": b, "position": at} for m, b, at in found[:3]],
    }
