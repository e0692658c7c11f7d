"""P3: decoding with the keys in host memory, at the longest context that fits there with 15 % of what is free left.

Random weights and keys, and synthetic acceptance (marked in every record: two of four drafts, every round), so these
are costs, not speedups on text. An EAGLE-3 head drafts; partial rounds read sink, retrieval and window of SpecPV's
sizes, chosen after full rounds by page bounds, or by scoring heads. A record a full period: tokens a second over whole
periods, how long a full round's layers took to move, and which share of that was hidden behind the round's own work.
Gate first: on four layers, verifications with keys in host memory agree with those on the device.

    python3 benchmarks/offload.py --out benchmarks/results/specpv.json
"""

import argparse
import dataclasses
import gc
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent / "kernels"))
from _bench import finish, gate, record, relative_error

from specdial.engine.eagle_training import new_config
from specdial.engine.free_memory import free_host_bytes
from specdial.engine.garbage import uncollected
from specdial.engine.job import backend_for, gathered_keys, most_recomputed, summary_bytes
from specdial.engine.loop import Decoding
from specdial.engine.memory import Demand, predict
from specdial.engine.models import Decoder
from specdial.engine.models.eagle import EagleHead, HeadWeights, head_shapes
from specdial.engine.models.shapes import SHAPES
from specdial.engine.sampling import Sampling
from specdial.engine.sequences import Sequences
from specdial.engine.verification import Plan, verifications
from specdial.engine.weights import load_model
from specdial.engine.weights.random_weights import RandomWeights
from specdial.policies.schema import plain_policy, policy_from_mapping

USED_FRAC = 0.85  # of free host memory
SLACK_TOKENS = 2048  # behind the context
ACCEPTED = (1.0, 1.0, 0.0)  # probability of acceptance by depth
K = 4
FULL_ROUNDS = {1: 4, 8: 2, 32: 2, 64: 2}  # measured at a full period


def policy(full_period, source, layers, heads):
    """SpecPV's partial cache: 2 blocks of sink, 256 retrieved, 8 of window, 16 tokens each; single keys by heads."""
    kv = {"mode": "partial", "full_period": full_period, "refresh": "full", "sink": 32, "recent": 128}
    by = {"source": "page_bound", "page": 16} if source == "page_bound" else {"scope": "model"}
    parts = {"verify_kv": {**kv, **by, "budget": 32 + 4096 + 128}}
    if source == "heads":
        parts["scoring_heads"] = {"target": [[layers // 2, h] for h in range(0, heads, max(heads // 4, 1))]}
    return policy_from_mapping({
        "name": f"specpv-p{full_period}", "kv": {"where": "host"}, "controller": {"kind": "fixed", "k": K},
        "drafter": {"kind": "eagle", "model": "head"}, **parts,
    })  # fmt: skip


def random_head(decoder):
    """An EAGLE-3 head over 32,000 tokens, on the device."""
    c = decoder.config
    config = new_config(c, min(32000, c.vocab))
    weights = {
        name: torch.ones(shape, device=decoder.device) if name.endswith("norm")
        else torch.randn(shape, device=decoder.device) * shape[-1] ** -0.5
        for name, shape in head_shapes(config).items()
    }  # fmt: skip
    weights = HeadWeights(**weights).to(decoder.device, decoder.dtype)
    return EagleHead(config, weights, torch.arange(config.draft_vocab), decoder.embedding)


def filled(decoder, context, where, head=None, batch=1):
    """Sequences of `context` tokens over random keys, made on the device and copied out layer by layer; seconds."""
    started_s = time.perf_counter()
    s = Sequences(
        decoder, context + SLACK_TOKENS, batch, history=None, backend=backend_for(decoder.device), kv_where=where,
        heads={} if head is None else {"head": head},
    )  # fmt: skip
    made_s = time.perf_counter()
    generator = torch.Generator(decoder.device).manual_seed(0)
    for layer in range(decoder.config.layers):
        for x in (s.cache.k, s.cache.v):
            keys = torch.randn(x.shape[1:], generator=generator, device=decoder.device, dtype=decoder.dtype)
            home = x if where == "device" else s.cache._home[0 if x is s.cache.k else 1]
            home[layer].copy_(keys)
    for reader in s.heads.values():
        reader.cache.k.normal_()
        reader.cache.v.normal_()
    s.hold([1] * context, limit=SLACK_TOKENS - 200)
    return s, (made_s - started_s, time.perf_counter() - made_s)


@torch.inference_mode()
def check(config, source, device, dtype):
    """Logits of a choosing and a keeping partial block, and of a correcting full one, against keys on the device."""
    shallow = dataclasses.replace(config, layers=min(config.layers, 4))
    decoder = Decoder.from_weights(
        shallow, RandomWeights(shallow, 0, torch.device(device), dtype), device=device, dtype=dtype
    )
    one = policy(4, source, shallow.layers, shallow.heads)
    tokens = torch.arange(3 * (K + 1), device=device).view(3, K + 1) + 7
    found = []
    for where in ("device", "host"):
        s, _ = filled(decoder, 6000, where, batch=3)
        queries, (verification,) = verifications(s, one, [None])
        if queries is not None:
            queries.start()
        outputs, counts = [], torch.tensor([5, 2, 1], device=device)
        for plan in (
            Plan(partial=True, since_full=1),
            Plan(partial=True, since_full=2, chooses=False),
            Plan(recomputed=16),
        ):
            s.turn += 1
            verification.prepare(plan)
            block = verification.block(tokens, plan, k=torch.full_like(counts, K), padded=True, rows=True)
            outputs.append(block.logits.clone())
            verification.settled(block, counts)
            s.advance(block, counts)
            s.commit([row[:n].tolist() for row, n in zip(tokens, counts.tolist())], counts.cpu().numpy())
        found.append(outputs)
    for name, wanted, got in zip(("chosen", "kept", "full"), *found):
        gate(f"{config.name}, host memory, {name}", relative_error(got, wanted), 2e-3)


def longest_context(config, dtype):
    """Tokens whose keys and values take USED_FRAC of free host memory, in thousands."""
    per_token = 2 * config.layers * config.kv_heads * config.head_dim * dtype.itemsize
    return int(free_host_bytes(Path("/")) * USED_FRAC / per_token - SLACK_TOKENS) // 1000 * 1000


def timed(s, one, full_rounds):
    """Rounds over whole periods, after one for practice, and (moved, waited) microseconds of each full one."""
    synthetic = ACCEPTED if one.k_max else ()
    running = Decoding(s, one, Sampling(), list(range(s.batch)), synthetic=synthetic).rounds()
    rounds, transfers, seen = [], [], 0
    with uncollected():
        for played in running:
            rounds.append(played)
            if played.mode == "full":
                seen += 1
                transfers.append((played.transfer_us, played.exposed_us))
                if seen == 1:
                    rounds, transfers = [], []  # of practice
                if seen == 1 + full_rounds:
                    break
    running.close()
    return rounds, transfers


def measured(s, one, id, about, full_rounds):
    cuda = s.decoder.device.type == "cuda"
    s.hold(s.tokens[0][: int(s.prompt_tokens[0])], limit=SLACK_TOKENS - 200)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    rounds, transfers = timed(s, one, full_rounds)
    spent_ms, tokens = sum(r.spent_us for r in rounds) / 1e3, sum(len(e) for r in rounds for e in r.emitted)
    full = [r for r in rounds if r.mode == "full"]
    chosen, kept = (
        [r.spent_us / 1e3 for r in rounds if r.mode == "partial" and (r.rounds_since_full == 1) is first]
        for first in (True, False)
    )
    moved, waited = (statistics.median(column) for column in zip(*transfers))
    size = s.cache.k[:, :, :, 0].nbytes * 2 * len(s.tokens[0])
    return record(
        id, about, tokens / spent_ms * 1e3, "tokens/s",
        synthetic_acceptance=list(ACCEPTED) if one.k_max else None, full_period=one.verify_kv.full_period,
        rounds=len(rounds), tokens_per_round=round(tokens / len(rounds), 3), bytes=size,
        full_round_ms=round(statistics.median(r.spent_us for r in full) / 1e3, 2),
        choosing_round_ms=round(statistics.median(chosen), 2) if chosen else None,
        partial_round_ms=round(statistics.median(kept), 3) if kept else None,
        transfer_ms=round(moved / 1e3, 2), exposed_ms=round(waited / 1e3, 2), hidden_frac=round(1 - waited / moved, 4),
        link_gbps=round(size / moved / 1e3, 2),
        device_peak_bytes=torch.cuda.max_memory_allocated() if cuda else None,
    )  # fmt: skip


def predicted_bytes(s, policies):
    """What the engine expects of the device for these policies, weights and the head with its keys included."""
    longest = s.cache.capacity_tokens
    demand = Demand(
        config=s.decoder.config, dtype=s.decoder.dtype, backend=s.backend, batch=s.batch, longest_tokens=longest,
        k_max=K, history=None, selected=0, recomputed=most_recomputed(policies), kv_where="host",
        gathered=gathered_keys(policies, longest),
    )  # fmt: skip
    heads = [reader.cache.device_bytes for reader in s.heads.values()]
    weights = [
        getattr(reader.head.weights, f.name) for reader in s.heads.values() for f in dataclasses.fields(HeadWeights)
    ]
    return (
        predict(demand).total + summary_bytes(demand, s.batch, policies) + sum(heads) + sum(t.nbytes for t in weights)
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--shape", default="llama-3.1-8b", choices=sorted(SHAPES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--context", type=int, default=0, help="tokens; 0: what fills free host memory but 15 %%")
    parser.add_argument("--source", default="page_bound", choices=("page_bound", "heads"))
    parser.add_argument("--periods", type=int, nargs="+", default=sorted(FULL_ROUNDS))
    arguments = parser.parse_args()
    dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
    check(SHAPES[arguments.shape], arguments.source, arguments.device, dtype)
    gc.collect()  # what the check made refers to itself: it is no part of a peak
    model = load_model(f"shape:{arguments.shape}", device=arguments.device, dtype=str(dtype).removeprefix("torch."))
    c = model.config
    context = arguments.context or longest_context(c, dtype)
    s, (made_s, filled_s) = filled(model.decoder, context, "host", random_head(model.decoder))
    host_bytes = s.cache.k.nbytes + s.cache.v.nbytes
    print(
        f"{context} tokens, {host_bytes / 1e9:.1f} GB in host memory: {made_s:.1f} s to lock, {filled_s:.1f} s to fill"
    )
    policies = [policy(period, arguments.source, c.layers, c.heads) for period in arguments.periods]
    about = f"{c.name} shape, random weights and keys, B 1, context {context}, keys in host memory"
    records = [measured(s, plain_policy(), "P3-plain", f"{about}, plain decoding", 3)]
    for one, period in zip(policies, arguments.periods):
        what = f"{about}, EAGLE-3 k {K}, full period {period}, 4,256 keys by {arguments.source}, synthetic acceptance"
        records.append(measured(s, one, f"P3-{period}", what, FULL_ROUNDS.get(period, 2)))
        print(records[-1]["id"], records[-1]["value"], flush=True)
    for row in records:
        row |= {
            "host_bytes": host_bytes,
            "lock_s": round(made_s, 1),
            "predicted_device_bytes": predicted_bytes(s, policies),
        }
        row["speedup_over_plain"] = round(row["value"] / records[0]["value"], 2)
    finish(records, arguments.out)


if __name__ == "__main__":
    main()
