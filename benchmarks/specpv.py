"""SpecPV on real text: an EAGLE head's drafts verified in full, and the same drafts verified over a selection.

For each workload, context and batch the prompts are prefilled, group by group, and plain decoding, full verification
and partial verification for every budget and full period decode them in turn, in an order that rotates from repeat to
repeat, after one untimed run each (which captures its graphs). Partial verification chooses whole pages by Quest's
bound or SpecPV's (--bound, --rows), sink and recent as in the paper, and keeps a selection until the next full round
(--refresh round: chooses anew). --tree: trees of drafts.

P1 is speed: tokens a second, over plain decoding and over full verification, over the whole run and while every
sequence still decodes. P2 is what partial verification costs in text, measured apart: top-1 agreement and KL against
full attention over the same text, and how far the text is plain decoding's. P4 is whether it still finds a needle.
Prompts come from engine/prompts.py, needles from the shipped texts.
--cpu: a tiny run for testing this script; its numbers mean nothing and cannot be written.

    python3 benchmarks/specpv.py --model FILE.gguf --head FOLDER --prompts prompts.npz --out results.json
"""

import argparse
import itertools
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "kernels"))
sys.path.insert(0, str(Path(__file__).resolve().parent / "engine"))
from _bench import record
from _engine_bench import Run, accounts, check, close, complete, decode, save, script
from prompts import given

from specdial.engine.fidelity import measure_fidelity, plain_output, summary
from specdial.engine.job import empty_sequences
from specdial.engine.weights import load_model
from specdial.engine.workloads import WorkloadSpec, build, check_answer
from specdial.policies.errors import UserError
from specdial.policies.schema import plain_policy, policy_from_mapping

FULL = {"contexts": [31000], "batches": [1, 16], "budgets": [512, 2048, 4096], "periods": [4, 16]}
FULL |= {"new_tokens": 256, "repeats": 3, "k": 5, "sink": 32, "recent": 128, "page": 16, "needles": 8}
CPU = {"contexts": [300], "batches": [1, 2], "budgets": [128], "periods": [2, 3]}
CPU |= {"new_tokens": 12, "repeats": 1, "k": 3, "sink": 16, "recent": 32, "page": 16, "needles": 2}


@dataclass(frozen=True, slots=True)
class Cell:
    """What is measured together. prompts: token ids, of `batch` sequences at a time."""

    workload: str
    context: int
    batch: int
    prompts: list[list[int]]

    @property
    def suffix(self):
        return f"{self.workload}-{self.context // 1000}k-B{self.batch}"

    @property
    def groups(self):
        return [self.prompts[i : i + self.batch] for i in range(0, len(self.prompts), self.batch)]


def entries(a):
    """{name: policy}: plain, full verification, and partial for every budget and full period."""
    tree = {"tree": dict(zip(("width", "nodes"), a.tree))} if a.tree else {}
    eagle = {"drafter": {"kind": "eagle", "model": a.head, **tree}, "controller": {"kind": "fixed", "k": a.k}}
    found = {"plain": plain_policy(), "full": policy_from_mapping(eagle)}
    for budget, period in itertools.product(a.budgets, a.periods):
        kv = {"mode": "partial", "source": "page_bound", "budget": budget, "full_period": period}
        kv |= {
            "sink": a.sink,
            "recent": a.recent,
            "page": a.page,
            "refresh": a.refresh,
            "bound": a.bound,
            "rows": a.rows,
        }
        found[f"c{budget}-p{period}"] = policy_from_mapping({**eagle, "verify_kv": kv})
    return found


def sequences_for(model, cell, policies, a, loaded):
    """Room for a cell's prompts. loaded: the heads or draft models that were loaded already, as `empty_sequences`
    takes them."""
    longest = max(map(len, cell.prompts)) + a.new_tokens
    return empty_sequences(model, longest, cell.batch, list(policies.values()), **loaded)


def timed(s, cell, policies, a):
    """{name: one Run a repeat} over all groups of a cell, every policy over the same prefilled prompts."""
    runs = {name: [[] for _ in range(a.repeats)] for name in policies}
    names = list(policies)
    for number, group in enumerate(cell.groups):
        s.prefill(group, [a.new_tokens] * len(group))
        if not number:
            for policy in policies.values():
                decode([s], policy)
        for repeat in range(a.repeats):
            turn = repeat * len(names) // a.repeats
            for name in names[turn:] + names[:turn]:
                runs[name][repeat].append(decode([s], policies[name]))
    return {name: [joined(parts) for parts in repeats] for name, repeats in runs.items()}


def joined(runs):
    return Run(sum(r.wall_s for r in runs), [x for r in runs for x in r.rounds], [o for r in runs for o in r.outputs])


def fidelities(s, cell, policies, a):
    """{name: what full attention says of its text} of every policy that drafts."""
    found = {name: [] for name in policies if name != "plain"}
    for group in cell.groups:
        s.prefill(group, [a.new_tokens] * len(group))
        numbers = list(range(len(group)))
        plain = plain_output(s, numbers)
        for name in found:
            found[name] += measure_fidelity(s, policies[name], numbers, plain)
    return {name: summary(parts) for name, parts in found.items()}


def found_needles(s, documents, policies, tokenizer):
    """{name: share of needles named}, as many documents at a time as there are sequences."""
    right = dict.fromkeys(policies, 0)
    for start in range(0, len(documents), s.batch):
        group = documents[start : start + s.batch]
        s.prefill([d.prompt_ids for d in group], [d.new_tokens for d in group])
        for name, policy in policies.items():
            outputs = decode([s], policy).outputs
            right[name] += sum(check_answer(d, tokenizer.decode(o)) for d, o in zip(group, outputs))
    return {name: count / len(documents) for name, count in right.items()}


def records_of(cell, policies, runs, fidelity, facts):
    """P1 and P2 of every policy of a cell."""
    speed = {name: statistics.median(r.tokens_per_s for r in repeats) for name, repeats in runs.items()}
    full = {name: statistics.median(r.full_tokens_per_s for r in repeats) for name, repeats in runs.items()}
    made = []
    for name, repeats in runs.items():
        case = f"{name}, {facts['model']}, {cell.workload}, B {cell.batch}, context {cell.context}"
        one_by_one = [r.tokens_per_s for r in repeats]
        more = {"lossless": policies[name].lossless, "sequences": len(cell.prompts), "about": facts["about"]}
        made.append(
            record(
                f"{facts['prefix']}P1-{cell.suffix}-{name}", case, speed[name], "tok/s",
                spread=[round(min(one_by_one), 1), round(max(one_by_one), 1)],
                speedup=round(speed[name] / speed["plain"], 3),
                over_full=round(speed[name] / speed["full"], 3),
                while_all_decode={
                    "tokens_per_s": round(full[name], 1),
                    "speedup": round(full[name] / full["plain"], 3),
                    "over_full": round(full[name] / full["full"], 3),
                },
                **accounts([x for r in repeats for x in r.rounds]),
                **more,
            )
        )  # fmt: skip
        if name in fidelity:
            said = rounded(fidelity[name])
            agreement = said.pop("top1_agreement")
            made.append(record(f"{facts['prefix']}P2-{cell.suffix}-{name}", case, agreement, "top-1", **said, **more))
    return made


def rounded(said):
    """What `summary` says, to five places, drift by rounds since full included."""
    if isinstance(said, dict):
        return {key: rounded(value) for key, value in said.items()}
    if isinstance(said, list):
        return [rounded(value) for value in said]
    return round(said, 5) if isinstance(said, float) else said


def show(cell, runs, records):
    """The cell's table."""
    by_id = {r["id"].split("P", 1)[1]: r for r in records}
    print(f"\n{cell.suffix}\n{'':<12}{'tok/s':>9}{'x plain':>9}{'x full':>8}{'all':>7}{'accepted':>10}", end="")
    print(f"{'top-1':>8}{'KL':>9}{'prefix':>8}{'same':>7}   draft/verify/select/host us")
    for name in runs:
        p1, p2 = by_id[f"1-{cell.suffix}-{name}"], by_id.get(f"2-{cell.suffix}-{name}")
        line = f"{name:<12}{p1['value']:>9.1f}{p1['speedup']:>9.2f}{p1['over_full']:>8.2f}"
        line += f"{p1['while_all_decode']['over_full']:>7.2f}{p1['mean_accepted']:>10.2f}"
        if p2:
            line += f"{p2['value']:>8.3f}{p2['kl_nats'] or 0:>9.4f}"
            line += f"{p2['prefix_frac']:>8.3f}{p2['token_agreement']:>7.3f}"
        print(f"{line:<77}", "/".join(f"{us:.0f}" for us in p1["parts_us"].values()), flush=True)


def needle_records(model, context, policies, a, loaded, facts, item="P4"):
    """The share of needles that every policy names at one context."""
    shares = {"train_frac": 0.0, "validation_frac": 0.0, "test_frac": 1.0}
    spec = WorkloadSpec("needle", context, a.needles, 16, **shares)
    documents = build(spec, model.tokenizer)
    batch = next(n for n in range(min(a.needles, 8), 0, -1) if a.needles % n == 0)
    cell = Cell("needle", context, batch, [d.prompt_ids for d in documents])
    s = sequences_for(model, cell, policies, a, loaded)
    found = found_needles(s, documents, policies, model.tokenizer)
    shown = ", ".join(f"{name} {share:.2f}" for name, share in found.items())
    print(f"\nneedles named at {context}: {shown}", flush=True)
    about = {**facts["about"], "needles": a.needles}
    return [
        record(
            f"{facts['prefix']}{item}-needle-{context // 1000}k-{name}",
            f"{name}, {facts['model']}, needle, context {context}", share, "found", about=about,
        )
        for name, share in found.items()
    ]  # fmt: skip


def arguments(argv):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", required=True, help="a .gguf file or a Hugging Face folder")
    p.add_argument("--head", required=True, help="the folder of an EAGLE-3 head for it")
    p.add_argument("--prompts", type=Path, help="what engine/prompts.py wrote")
    p.add_argument("--out", type=Path)
    p.add_argument("--workloads", nargs="+", default=["code", "novel", "summary"])
    for name in ("contexts", "batches", "budgets", "periods"):
        p.add_argument(f"--{name}", nargs="*", type=int, help=f"default {FULL[name]}")
    for name in ("new-tokens", "repeats", "k", "sink", "recent", "page", "needles"):
        p.add_argument(f"--{name}", type=int, help=f"default {FULL[name.replace('-', '_')]}")
    p.add_argument("--refresh", choices=["full", "round"], default="full", help="when pages are chosen anew")
    p.add_argument("--bound", choices=["quest", "specpv"], default="quest", help="what a page can score")
    p.add_argument("--rows", choices=["mean", "max", "last"], default="mean", help="of a round's rows")
    p.add_argument("--tree", nargs=2, type=int, metavar=("WIDTH", "NODES"), help="draft trees k deep, not chains")
    p.add_argument("--singles", type=int, default=4, help="sequences that batch 1 is measured over")
    p.add_argument("--cpu", action="store_true", help="tiny, on the CPU, unrecorded")
    a = p.parse_args(argv)
    complete(p, a, CPU if a.cpu else FULL, toy="CPU" if a.cpu else None)
    if not a.cpu and not a.prompts:
        p.error("--prompts is missing: write them with benchmarks/engine/prompts.py")
    return a


def prefix_of(a):
    """What tells ids of one run from those of other scores and shapes."""
    parts = ["cpu"] if a.cpu else [f"k{a.k}"] if a.k != FULL["k"] else []
    parts += [f"w{a.tree[0]}n{a.tree[1]}"] if a.tree else []
    parts += [f"{a.bound}-{a.rows}"] if (a.bound, a.rows) != ("quest", "mean") else []
    return "".join(f"{part}-" for part in parts)


def main(argv=None):
    a = arguments(argv)
    policies = entries(a)
    model = load_model(a.model, device="cpu" if a.cpu else "cuda")
    check(model.config, model.decoder.device, model.decoder.dtype)
    loaded, records = {"heads": {}}, []
    for workload, context in itertools.product(a.workloads, a.contexts):
        count = max(a.singles if batch == 1 else batch for batch in a.batches)
        ids, about = given(a.prompts, model.tokenizer, workload, context, count=count, new_tokens=a.new_tokens)
        if len(ids) < count:
            raise UserError(f"{a.prompts} has {len(ids)} prompts of {workload}, {count} are wanted", "lower --batches")
        facts = {"model": model.config.name, "prefix": prefix_of(a)}
        facts["about"] = {**about, "k": a.k, "new_tokens": a.new_tokens, "refresh": a.refresh, "page": a.page}
        facts["about"] |= {"sink": a.sink, "recent": a.recent, "dtype": str(model.decoder.dtype).split(".")[1]}
        facts["about"] |= {"bound": a.bound, "rows": a.rows, "tree": a.tree}
        for batch in a.batches:
            cell = Cell(workload, context, batch, ids[: a.singles if batch == 1 else batch].tolist())
            s = sequences_for(model, cell, policies, a, loaded)
            runs = timed(s, cell, policies, a)
            records += (fresh := records_of(cell, policies, runs, fidelities(s, cell, policies, a), facts))
            show(cell, runs, fresh)
            del s
            if a.out:
                save(records, a.out)
    for context in a.contexts if a.needles else ():
        records += needle_records(model, context, policies, a, loaded, facts)
    if a.out:
        save(records, a.out)
    close(records)
    return records


if __name__ == "__main__":
    script(main)
