"""Ten thousand rounds on one process: batches and policies change all the time, memory stays flat, outputs stay right.

Documents are prefilled into the same sequences again and again, in batches of every size; every policy takes its turn,
greedy and sampled. A greedy output of a lossless policy must be the plain one. Memory is looked at when the sequences
and their graphs are let go: what the process holds resident, on a GPU what the allocator has given out too. Its median
over the last third of the rounds may be no more than GROWTH_FRAC above that of the second third; the first third warms
up. The last line on standard output is one JSON document.

    python tests/soak/soak.py --rounds 10000 --device cuda
"""

import argparse
import gc
import json
import random
import resource
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from _tiny import tiny_job, tiny_model, tiny_workload

from specdial.engine.batches import Batches
from specdial.engine.job import Job
from specdial.engine.loop import Decoding
from specdial.engine.sampling import Sampling
from specdial.policies.schema import Policy, plain_policy, policy_from_mapping

GROWTH_FRAC = 0.02
SAME_SIZE = 4  # batches in a row: another size means new sequences, and on a GPU new graphs
KV = {"budget": 48, "sink": 2, "recent": 16, "page": 16}
CHOICES: list[dict[str, Any]] = [
    {"controller": {"kind": "fixed", "k": 4}, "draft_kv": KV},
    {"controller": {"kind": "rate", "k_max": 6, "gamma": 0.2}, "draft_kv": KV},
    {"controller": {"kind": "entropy", "threshold": 0.1}, "draft_kv": KV},
    {"controller": {"kind": "fixed", "k": 3}, "draft_kv": {**KV, "refresh_rounds": 3}},
    {"drafter": {"kind": "lookup"}, "controller": {"kind": "fixed", "k": 3}},
    {"drafter": {"kind": "quest"}, "controller": {"kind": "confidence", "threshold": 0.1}, "draft_kv": KV},
    {
        "controller": {"kind": "fixed", "k": 2},
        "draft_kv": KV,
        "verify_kv": {"mode": "partial", "full_period": 3, "budget": 48, "sink": 2, "recent": 16, "page": 16},
    },
]


class Soak:
    """One job whose documents are decoded over and over."""

    def __init__(self, job: Job, seed: int) -> None:
        self.job, self.chance = job, random.Random(seed)
        named = [policy_from_mapping({"name": f"p{i}", **choice}) for i, choice in enumerate(CHOICES)]
        self.policies: list[Policy] = [plain_policy(), *named]
        self.plain: dict[int, list[int]] = {}  # greedy output by document
        self.batches = Batches(job, self.policies)
        self.played, self.size = 0, 1
        self.rounds, self.wrong = 0, 0

    def once(self) -> None:
        """A batch by chance, now and then of another size, then plain decoding and two policies by chance on it."""
        if self.played % SAME_SIZE == 0:
            self.size = self.chance.randint(1, 4)
        self.played += 1
        documents = self.chance.sample(self.job.documents, self.size)
        numbers = [d.index for d in documents]
        sequences = self.batches.prefilled(documents)
        for policy in [self.policies[0], *self.chance.sample(self.policies, 2)]:
            sampled = policy is not self.policies[0] and self.chance.random() < 0.3
            sampling = Sampling(temperature=0.8, seed=self.chance.randrange(100)) if sampled else Sampling()
            sequences.rewind()
            self.rounds += sum(1 for _ in Decoding(sequences, policy, sampling, numbers).rounds())
            for number, tokens in zip(numbers, sequences.tokens):
                if policy is self.policies[0]:
                    self.wrong += self.plain.setdefault(number, list(tokens)) != tokens
                elif policy.lossless and not sampled:
                    self.wrong += tokens != self.plain[number]

    def let_go(self) -> None:
        """Drop the sequences: those of a larger batch are larger."""
        self.batches = Batches(self.job, self.policies)


def memory_bytes(device: str) -> dict[str, int]:
    """What is held now, once what nobody uses is let go."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    held = {"resident": pages * resource.getpagesize()}
    return held | ({"allocated": torch.cuda.memory_allocated()} if device == "cuda" else {})


def soak(rounds: int, device: str, seed: int, folder: Path) -> dict[str, Any]:
    """Play so many rounds; returns what was seen. growth_frac: by kind of memory."""
    workload = tiny_workload(folder, context_tokens=120, documents=12, new_tokens=24)
    played = Soak(tiny_job(tiny_model(device, head_dim=64), workload), seed)
    seen: list[dict[str, int]] = []
    while played.rounds < rounds:
        played.once()
        if played.rounds * 60 >= rounds * (len(seen) + 1):
            played.let_go()
            seen.append(memory_bytes(device))
            print(f"{played.rounds} rounds, {seen[-1]}", file=sys.stderr, flush=True)
    third = len(seen) // 3
    middle, last = seen[third : 2 * third] or seen, seen[2 * third :]
    growth = {
        kind: statistics.median(s[kind] for s in last) / statistics.median(s[kind] for s in middle) - 1.0
        for kind in seen[0]
    }
    return {"id": "soak", "rounds": played.rounds, "device": device, "growth_frac": growth, "wrong": played.wrong}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        result = soak(options.rounds, options.device, options.seed, Path(folder))
    print(json.dumps(result))
    sys.exit(int(result["wrong"] > 0 or max(result["growth_frac"].values()) > GROWTH_FRAC))


if __name__ == "__main__":
    main()
