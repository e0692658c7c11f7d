"""What the engine benchmarks share: the correctness gate, batches that share one prefill, timed decodes, short output.

Leaves out what is measured (the scripts) and whether outputs agree (_lossless.py).
"""

import contextlib
import dataclasses
import io
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))
from _bench import finish, gate, relative_error

from specdial.engine.garbage import uncollected
from specdial.engine.history import History
from specdial.engine.job import backend_for
from specdial.engine.loop import Decoding
from specdial.engine.models import Decoder
from specdial.engine.round import PARTS, Round
from specdial.engine.sampling import Sampling
from specdial.engine.sequences import ROW_MULTIPLE, Sequences
from specdial.engine.weights.random_weights import RandomWeights
from specdial.policies.errors import UserError

BANDWIDTH = 4.3e12  # bytes a second, the floor's


def random_sequences(model, context, batch, history=None, slack=700):
    """Sequences of random keys and scores, `context` tokens each, with room for slack - 100 new ones."""
    s = Sequences(model.decoder, context + slack, batch, history=history, backend=backend_for(model.decoder.device))
    s.cache.k.normal_()
    s.cache.v.normal_()
    if s.history is not None:
        s.history.ring.uniform_()
        s.history._scores.uniform_()
    s.hold([1] * context, limit=slack - 100)
    return s


@torch.inference_mode()
def check(config, device="cuda", dtype=torch.bfloat16):
    """Logits of captured blocks against the plain decoder with naive attention, 300 keys of random cache.

    On four layers of the shape: through all of them, bfloat16 rounding alone reaches 5 %.
    """
    shallow = dataclasses.replace(config, layers=min(config.layers, 4))
    weights = RandomWeights(shallow, 0, torch.device(device), dtype)
    decoder = Decoder.from_weights(shallow, weights, device=device, dtype=dtype)
    s = random_sequences(SimpleNamespace(decoder=decoder), 300, 2)
    tokens = torch.randint(0, min(1000, config.vocab), (2, 3), device=device)
    keys, values = s.cache.k.clone(), s.cache.v.clone()
    found = {
        padded: s.graphs.run(
            ("check", padded), lambda block, p=padded: s.forward_block(block, padded=p, rows=False).logits, tokens
        )
        for padded in (False, True)  # as decoded plainly and as verified
    }

    def attend(layer, q, k, v):
        k = torch.cat([keys[layer][:, :, :299], k.transpose(1, 2)], 2)
        v = torch.cat([values[layer][:, :, :299], v.transpose(1, 2)], 2)
        mask = torch.ones(3, k.shape[2], dtype=torch.bool, device=device).tril(299)
        return F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)

    want = decoder.logits(decoder.forward(tokens, torch.arange(299, 302, device=device).expand(2, 3), attend))
    for padded, got in found.items():
        gate(f"{config.name} logits{' of a verification' * padded}", relative_error(got, want), 2e-2)


def part_of(s, batch, first=0):
    """Some sequences of a prefilled batch without history, from `first` on, keys copied: no second prefill."""
    if batch == s.batch:
        return s
    part = slice(first, first + batch)
    few = Sequences(s.decoder, s.cache.capacity_tokens - ROW_MULTIPLE, batch, history=None, backend=s.backend)
    few.cache.k.copy_(s.cache.k[:, part])
    few.cache.v.copy_(s.cache.v[:, part])
    few.prompt_tokens, few.limits = s.prompt_tokens[part].copy(), s.limits[part].copy()
    few.tokens = [list(t) for t in s.tokens[part]]
    few.rewind()
    return few


def with_history(s, spec):
    """Sequences over the same cache, with a history of their own: the prompts' last rows are computed again for it.

    Only one of the sequences that share a cache decodes at a time, from `rewind` on.
    """
    other = Sequences(s.decoder, 1, s.batch, history=None, backend=s.backend)
    other.cache = s.cache
    other.prompt_tokens, other.limits = s.prompt_tokens.copy(), s.limits.copy()
    other.tokens = [t[:p] for t, p in zip(s.tokens, s.prompt_tokens)]
    config, keys = s.decoder.config, s.cache.capacity_tokens
    other.history = History(config, s.batch, keys, spec, device=s.decoder.device, backend=s.backend)
    one = Sequences(s.decoder, 1, 1, history=None, backend=s.backend)  # rows of a whole batch may not fit in memory
    one.history = other.history
    for b, tokens in enumerate(other.tokens):
        one.cache.k, one.cache.v = s.cache.k[:, b : b + 1], s.cache.v[:, b : b + 1]
        last = tokens[-1 - spec.window : -1]
        one.cache.set_lengths(np.array([len(tokens) - 1 - len(last)]))
        block = one.forward_block(torch.tensor([last], device=s.decoder.device), padded=True, rows=True)
        committed = torch.full((1,), len(last), dtype=torch.int64, device=s.decoder.device)
        other.history.push(block.rows, one.cache.lengths, committed, only=b)
    other.history.save()
    other.rewind()
    return other


@dataclass(frozen=True, slots=True)
class Run:
    """One timed decode of one or more batches: wall seconds, rounds, and each sequence's new tokens."""

    wall_s: float
    rounds: list[Round]
    outputs: list[list[int]]

    @property
    def tokens_per_s(self) -> float:
        """All new tokens over all the time, the tail in which some sequences are done included."""
        return sum(map(len, self.outputs)) / self.wall_s

    @property
    def full_tokens_per_s(self) -> float:
        """While every sequence decodes."""
        full = [r for r in self.rounds if r.active.all()]
        return sum(len(e) for r in full for e in r.emitted) / sum(r.spent_us for r in full) * 1e6


def synchronize(device):
    """Wait for the device."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def decode(batches, policy):
    """Decode prefilled batches one after another under a policy, each timed from its first round to its last."""
    wall_s, rounds, outputs = 0.0, [], []
    for s in batches:
        s.rewind()
        decoding = Decoding(s, policy, Sampling(), list(range(s.batch)))
        with uncollected():
            synchronize(s.decoder.device)
            started_s = time.perf_counter()
            rounds += decoding.rounds()
            synchronize(s.decoder.device)
            wall_s += time.perf_counter() - started_s
        outputs += s.outputs
    return Run(wall_s, rounds, outputs)


def accounts(rounds):
    """Means over sequences and rounds (k, accepted, tokens a round) and the median of each part of a round."""
    lanes = sum(int(r.active.sum()) for r in rounds)
    return {
        "mean_k": round(sum(int(r.k[r.active].sum()) for r in rounds) / lanes, 3),
        "mean_accepted": round(sum(int(r.accepted[r.active].sum()) for r in rounds) / lanes, 3),
        "tokens_per_round": round(sum(len(e) for r in rounds for e in r.emitted) / lanes, 3),
        "parts_us": {p: round(statistics.median(getattr(r, f"{p}_us") for r in rounds), 1) for p in PARTS},
    }


def plain_bytes(s):
    """Bytes that one plain step reads: weights once and every sequence's keys and values."""
    c, decoder = s.decoder.config, s.decoder
    per_token = 2 * c.layers * c.kv_heads * c.head_dim * decoder.dtype.itemsize
    return decoder.weight_bytes + per_token * int(np.sum(s.prompt_tokens))


def complete(parser, a, defaults, *, toy=None):
    """Fill in what the command line left out. toy: what a run is called whose numbers mean nothing: none is written."""
    for name, value in defaults.items():
        if getattr(a, name, None) is None:
            setattr(a, name, value)
    if toy and a.out:
        parser.error(f"a {toy} run's numbers cannot be written: leave out --out")


def script(main):
    """Run a script's main; user errors are one line."""
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")


def save(records, path):
    """Merge records into the results file without printing them all."""
    with contextlib.redirect_stdout(io.StringIO()):
        finish(records, path)


def close(records):
    """The last line: one JSON document, short enough for a terminal that keeps little."""
    print(json.dumps({row["id"]: [row["value"], row.get("speedup")] for row in records}))
