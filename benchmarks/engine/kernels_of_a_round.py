"""Where a round's time on the GPU goes: what every kernel adds to it, by kernel and launch grid.

A kernel that is launched early waits for the one before it, so how long it is resident says little, and its start says
when the last but one was done. What it adds is from the end of all before it to its own; that adds up to the round.
Text decides nothing here but the number of rounds. For finding out, not for records: nothing is written.

    python3 benchmarks/engine/kernels_of_a_round.py --model FILE.gguf --prompts prompts.npz --policy POLICY.yaml
"""

import argparse
import itertools
import json
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))
from _engine_bench import decode, script
from prompts import given

from specdial.engine.job import empty_sequences
from specdial.engine.weights import load_model
from specdial.policies.file import load_policy
from specdial.policies.schema import plain_policy

ROUNDS = 24  # new tokens of a sequence, so that many rounds at most


def kernels(s, policy):
    """(rounds, [(name, grid, start us, end us)]) of one decode, in the order of their ends; graphs are captured."""
    decode([s], policy)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        rounds = len(decode([s], policy).rounds)
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(str(Path(folder) / "trace.json"))
        events = json.loads((Path(folder) / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    found = [
        (e["name"], tuple(e["args"]["grid"]), float(e["ts"]), float(e["ts"]) + float(e["dur"]))
        for e in events
        if e.get("cat") == "kernel"
    ]
    return rounds, sorted(found, key=lambda kernel: kernel[3])


def show(name, rounds, found, rows):
    """A table of the kernels that take most of a round."""
    spent = defaultdict(list)  # us from end to end
    resident = defaultdict(list)  # us from start to end
    for (_, _, _, before), (kernel, grid, start, end) in itertools.pairwise(found):
        spent[kernel, grid].append(end - before)
        resident[kernel, grid].append(end - start)
    whole = sum(map(sum, spent.values()))
    print(f"\n{name}: {rounds} rounds, {whole / rounds:.0f} us a round, {len(found) / rounds:.0f} kernels a round")
    print(f"{'us a round':>10} {'a round':>8} {'us each':>8} {'resident':>9}  kernel, grid")
    for key, times in sorted(spent.items(), key=lambda item: -sum(item[1]))[:rows]:
        each, alone = sum(times) / len(times), sum(resident[key]) / len(times)
        print(
            f"{sum(times) / rounds:10.1f} {len(times) / rounds:8.1f} {each:8.2f} {alone:9.2f}  {key[0][:60]} {key[1]}"
        )


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", required=True, help="a .gguf file or a Hugging Face folder")
    p.add_argument("--prompts", type=Path, required=True, help="what prompts.py wrote")
    p.add_argument("--policy", nargs="*", default=[], help="policy files, profiled beside plain decoding")
    p.add_argument("--workload", default="code")
    p.add_argument("--context", type=int, default=31000)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--rows", type=int, default=24, help="of a table")
    a = p.parse_args(argv)
    model = load_model(a.model, device="cuda")
    ids, _ = given(a.prompts, model.tokenizer, a.workload, a.context, count=a.batch, new_tokens=ROUNDS)
    policies = {"plain": plain_policy(), **{Path(name).stem: load_policy(name) for name in a.policy}}
    s = empty_sequences(model, a.context + ROUNDS, a.batch, list(policies.values()))
    s.prefill(ids[: a.batch].tolist(), [ROUNDS] * a.batch)
    torch.cuda.synchronize()
    for name, policy in policies.items():
        show(name, *kernels(s, policy), a.rows)


if __name__ == "__main__":
    script(main)
