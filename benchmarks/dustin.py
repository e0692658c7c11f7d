"""Dustin on one GPU: a small model drafts, verification reads a selection made by a few scoring heads.

D1: the attention of one sparse verification, estimation and selection included, against full attention over all keys,
of a 72B shape. Estimation and selection happen once for all layers, so a layer carries its share of them.
D3: real weights and text. Plain decoding, the same drafts verified in full, and partial verification for every budget,
share of it that lookahead chooses (m), full period and k, in turn; then top-1 agreement and KL against full attention
over the same text, and needles found.
D4: a round of an 8B shape with a 1B shape drafting, acceptance forced to `--accepted` tokens a verify: cost, not text.
Scoring heads of D3 come from a policy file that `specdial tune_heads` wrote; those of D1 and D4 are any, and said so.
--cpu: D3 as a tiny run for testing this script; its numbers mean nothing and cannot be written.

    python3 benchmarks/dustin.py --cases D1 D4 --out benchmarks/results/dustin.json
    python3 benchmarks/dustin.py --cases D3 --model TARGET.gguf --draft DRAFT.gguf --policy policy.yaml \
        --prompts prompts.npz --out benchmarks/results/dustin.json
"""

import argparse
import itertools
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent / "kernels"))
sys.path.insert(0, str(Path(__file__).resolve().parent / "engine"))
from _bench import finish, gate, record, relative_error, time_graph
from _engine_bench import accounts, check, close, complete, save, script
from _real_records import is_1_5b, peers
from prompts import given
from specpv import Cell, fidelities, needle_records, rounded, sequences_for, timed

from specdial.engine.acceptance import Acceptance
from specdial.engine.garbage import uncollected
from specdial.engine.job import backend_for
from specdial.engine.loop import Decoding
from specdial.engine.sampling import Sampling
from specdial.engine.sequences import Sequences
from specdial.engine.weights import load_model
from specdial.kernels.full_attention import full_attention
from specdial.kernels.head_scores import head_scores
from specdial.kernels.selection import select
from specdial.kernels.sparse_attention import sparse_attention, workspace_for
from specdial.kernels.sparse_attention.reference import sparse_attention_reference
from specdial.policies.file import load_policy
from specdial.policies.schema import plain_policy, policy_from_mapping

D1 = {"B": 16, "H": 64, "Hk": 8, "layers": 80, "S": 32768, "T": 5, "D": 128, "budget": 512, "heads": (8, 10, 13, 15)}
D1_BAR, D4_BAR = 27.85, 1900.0
D4 = {"target": "llama-3.1-8b", "draft": "llama-3.2-1b", "batch": 16, "context": 32768, "budget": 512, "k": 4}
PEERS_D4 = {"vllm-0.23 plain (measured elsewhere)": 767.0}  # tokens/s on this shape
FULL = {"context": 31000, "batches": [16, 64], "budgets": [512, 2048], "periods": [0, 8], "k": [4], "new_tokens": 256}
FULL |= {"repeats": 2, "needles": 16, "workloads": ["code"], "windows": [0, 1024]}
CPU = {"context": 300, "batches": [2], "budgets": [64], "periods": [0, 2], "k": [3], "new_tokens": 12, "repeats": 1}
CPU |= {"needles": 2, "workloads": ["code"], "windows": [0]}


def attention_case():
    """D1: one layer's sparse verification and its share of estimation and selection, against full attention."""
    B, H, Hk, S, T, D, budget = (D1[name] for name in ("B", "H", "Hk", "S", "T", "D", "budget"))
    bf16 = {"device": "cuda", "dtype": torch.bfloat16}
    q = torch.randn(B, T, H, D, **bf16)
    caches = [tuple(torch.randn(B, Hk, S + 64, D, **bf16) for _ in range(2)) for _ in range(3)]
    lengths = torch.full((B,), S, device="cuda", dtype=torch.int64)
    weights = torch.zeros(B, T, device="cuda")
    weights[:, -2] = 1.0  # the last committed row

    def estimate(keys):
        return head_scores(q, keys, lengths, D1["heads"], backend="triton", row_weights=weights)

    def choose(scores):
        options = {"budget": budget, "sink": 4, "recent": 16, "backend": "triton", "scope": "model"}
        return select(scores[None, :, None], lengths, **options)

    indices, counts = choose(estimate(caches[0][0]))  # [1, B, 1, C]
    chosen = indices[0].expand(-1, Hk, -1)
    room = workspace_for(q.shape, caches[0][0], chosen)

    def verify(cache):
        where = {"tail_start": lengths, "lengths": lengths, "workspace": room, "backend": "triton"}
        return sparse_attention(q, *cache, chosen, counts, **where)

    one = slice(0, 1)
    first = [x[one] for x in (q, *caches[0])]
    want = sparse_attention_reference(
        *(x.double() for x in first), chosen[one], counts[one], tail_start=lengths[one], lengths=lengths[one]
    )
    gate("D1 sparse verification", relative_error(verify(caches[0])[one], want), 6e-3)
    scores = estimate(caches[0][0])
    times = {
        "sparse attention, a layer": time_graph([lambda c=c: verify(c) for c in caches], calls_per_replay=24),
        "estimation, a verification": time_graph([lambda c=c: estimate(c[0]) for c in caches], calls_per_replay=6),
        "selection, a verification": time_graph([lambda: choose(scores)], calls_per_replay=6),
    }
    full = time_graph([lambda c=c: full_attention(q, *c, lengths, backend="triton") for c in caches])
    layers = D1["layers"]
    sparse_us = times["sparse attention, a layer"].median_us
    shared_us = sum(t.median_us for name, t in times.items() if name.endswith("verification"))
    where = f"72B shape, B {B}, context {S}, T {T}, budget {budget}, {layers} layers"
    parts = {"full attention (ours), a layer": round(full.median_us, 2)}
    parts |= {name: round(t.median_us, 2) for name, t in times.items()}
    share = times["estimation, a verification"].median_us / (full.median_us * layers)
    return [
        record("D1", f"full over sparse verification, {where}", full.median_us / (sparse_us + shared_us / layers), "x",
               bar=D1_BAR, peers=parts),
        record("D2", f"estimation over full attention of all layers, {where}", share, "frac", bar=0.01, peers=parts),
    ]  # fmt: skip


def forced_case(accepted, windows, rounds=48):
    """D4: tokens a second of rounds whose acceptance is forced, for every window of the draft model; keys and weights
    are random."""
    target, draft = (load_model(f"shape:{D4[name]}", device="cuda", dtype="bfloat16") for name in ("target", "draft"))
    for model in (target, draft):
        check(model.config)
    B, context, k = D4["batch"], D4["context"], D4["k"]
    c = target.config
    mapping = {
        "controller": {"kind": "fixed", "k": k},
        "verify_kv": {"mode": "partial", "source": "hybrid", "budget": D4["budget"], "sink": 4, "recent": 16,
                      "full_period": 0, "scope": "model", "lookahead_tokens": 64},
        "scoring_heads": {"target": [[c.layers // 2, h] for h in range(4)],
                          "draft": [[layer, h] for layer in (4, 8, 12) for h in range(4)]},
    }  # fmt: skip
    drafters = {w: {"drafter": {"kind": "model", "model": "drafter", "window": w}} for w in windows}
    policies = {f"w{w}" if w else "dustin": policy_from_mapping({**d, **mapping}) for w, d in drafters.items()}
    policies = {"plain": plain_policy()} | policies
    s = Sequences(target.decoder, context + 700, B, history=None, backend=backend_for("cuda"),
                  companions={"drafter": draft.decoder})  # fmt: skip
    for sequences in (s, s.companions["drafter"]):
        sequences.cache.k.normal_()
        sequences.cache.v.normal_()
    forced = Acceptance(mean=accepted - 1)  # the bonus token aside
    made, speed = [], {}
    for name, policy in policies.items():
        s.hold([1] * context, limit=600)
        running = Decoding(s, policy, Sampling(), list(range(B)), synthetic=forced.of(policy)).rounds()
        with uncollected():
            for _ in range(6):
                next(running)
            done = [next(running) for _ in range(rounds)]
        running.close()
        spent_us = sum(r.spent_us for r in done)
        speed[name] = sum(len(e) for r in done for e in r.emitted) / spent_us * 1e6
        case = f"{name}, {D4['target']} + {D4['draft']} shapes, random weights, B {B}, context {context}"
        case += f", acceptance forced (synthetic acceptance, {accepted} tokens a verify asked)" if policy.k_max else ""
        bar = {"bar": D4_BAR, "speedup": round(speed[name] / speed["plain"], 2)} if policy.k_max else {}
        made.append(record(f"D4-{name}", case, speed[name], "tok/s", **accounts(done), **bar, peers=PEERS_D4))
    return made


def entries(a):
    """{name: policy}: plain, and for every k and window of the draft model full verification and partial ones.

    lookahead: shares of what is neither sink nor recent; None takes the policy file's tokens.
    """
    tuned = load_policy(a.policy) if a.policy else None
    heads = (
        {name: [list(head) for head in getattr(tuned.scoring_heads, name)] for name in ("target", "draft")}
        if tuned
        else a.heads
    )
    lookahead_tokens = tuned.verify_kv.lookahead_tokens if tuned else 16
    found = {"plain": plain_policy()}
    for k, window in itertools.product(a.k, a.windows):
        drafter = {"kind": "model", "model": a.draft, "window": window}
        common = {"drafter": drafter, "controller": {"kind": "fixed", "k": k}}
        end = f"k{k}-w{window}" if window else f"k{k}"
        found[f"full-{end}"] = policy_from_mapping(common)
        for budget, share, period in itertools.product(a.budgets, a.lookahead or [None], a.periods):
            kv = {"source": "hybrid", "scope": "model", "sink": 4, "recent": 16, "mode": "partial"}
            m = lookahead_tokens if share is None else round(share * (budget - 20))
            kv |= {"budget": budget, "full_period": period, "lookahead_tokens": m}
            name = f"c{budget}-p{period}" if share is None else f"c{budget}-m{m}-p{period}"
            found[f"{name}-{end}"] = policy_from_mapping({**common, "verify_kv": kv, "scoring_heads": heads})
    return found


def text_case(a):
    """D3 of every workload and batch; fidelity of the smallest batch, needles once."""
    model = load_model(a.model, device="cpu" if a.cpu else "cuda")
    check(model.config, model.decoder.device, model.decoder.dtype)
    policies, loaded, made = entries(a), {"draft_models": {}}, []
    facts = {"model": model.config.name, "prefix": "cpu-" if a.cpu else "", "is_1_5b": is_1_5b(model.config)}
    for workload in a.workloads:
        count = max(a.batches)
        ids, facts["about"] = given(
            a.prompts, model.tokenizer, workload, a.context, count=count, new_tokens=a.new_tokens
        )
        for batch in sorted(a.batches):
            cell = Cell(workload, a.context, batch, ids[:batch].tolist())
            s = sequences_for(model, cell, policies, a, loaded)
            runs = timed(s, cell, policies, a)
            judged = fidelities(s, cell, policies, a) if batch == min(a.batches) else {}
            rows = text_records(cell, policies, runs, judged, facts)
            made += rows
            for r in rows:
                print(f"{r['id']:<36}{r['value']:>9.1f} x{r['speedup']:.2f} acc {r['mean_accepted']:.2f} "
                      f"top1 {r.get('top1_agreement')} {r['parts_us']}", flush=True)  # fmt: skip
            del s
            if a.out:
                save(made, a.out)
    if a.needles:
        made += needle_records(model, a.context, policies, a, loaded, facts, "D3")
    return made


def text_records(cell, policies, runs, judged, facts):
    """One record a policy. Speed is while every sequence decodes, as vLLM's was measured, and over the whole run."""
    full = {name: statistics.median(r.full_tokens_per_s for r in repeats) for name, repeats in runs.items()}
    others = peers(cell, facts)
    best = max([full["plain"], *others.values()])
    made = []
    for name, repeats in runs.items():
        case = f"{name}, {facts['model']}, {cell.workload}, B {cell.batch}, context {cell.context}"
        whole = [r.tokens_per_s for r in repeats]
        said = rounded(judged.get(name, {}))
        made.append(
            record(
                f"{facts['prefix']}D3-{cell.suffix}-{name}", case, full[name], "tok/s",
                spread=sorted(round(r.full_tokens_per_s, 1) for r in repeats), speedup=round(full[name] / best, 3),
                whole_tokens_per_s=round(statistics.median(whole), 1), lossless=policies[name].lossless,
                **accounts([x for r in repeats for x in r.rounds]), **said, peers=others, about=facts["about"],
            )
        )  # fmt: skip
    return made


def arguments(argv):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--cases", nargs="+", choices=["D1", "D3", "D4"], default=["D1", "D3", "D4"])
    p.add_argument("--out", type=Path)
    p.add_argument("--accepted", type=float, default=2.8, help="tokens a verify of D4, the bonus one included")
    for name, kind in (("model", str), ("draft", str), ("policy", Path), ("prompts", Path)):
        p.add_argument(f"--{name}", type=kind, help="of D3")
    p.add_argument("--workloads", nargs="+")
    for name in ("batches", "budgets", "periods", "k", "windows"):
        p.add_argument(f"--{name}", nargs="+", type=int, help=f"default {FULL[name]}")
    p.add_argument("--lookahead", nargs="+", type=float, help="m of D3, shares of a budget; default: the policy file's")
    for name in ("context", "new-tokens", "repeats", "needles"):
        p.add_argument(f"--{name}", type=int, help=f"default {FULL[name.replace('-', '_')]}")
    p.add_argument("--cpu", action="store_true", help="D3, tiny, on the CPU, unrecorded")
    a = p.parse_args(argv)
    a.heads = {"target": [[0, 0]], "draft": [[0, 0]]}  # of a --cpu run without a policy file
    complete(p, a, CPU if a.cpu else FULL, toy="CPU" if a.cpu else None)
    if "D3" in a.cases and not (a.model and a.draft and (a.cpu or (a.policy and a.prompts))):
        p.error("D3 needs --model, --draft, --policy and --prompts")
    return a


def main(argv=None):
    a = arguments(argv)
    records = []
    if "D1" in a.cases:
        records += attention_case()
    if "D4" in a.cases:
        records += forced_case(a.accepted, a.windows)
    if records:
        finish(records, a.out)
    if "D3" in a.cases:
        records += text_case(a)
    if a.out:
        save(records, a.out)
    close(records)
    return records


if __name__ == "__main__":
    script(main)
