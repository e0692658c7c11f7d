"""From predicted and measured lossy policies to records: errors of speedup, of top-1 agreement and of KL.

An agreement's error is in points (hundredths), a KL's in nats; positive is predicted too high. A measured agreement of
few tokens is itself uncertain: `inside_frac` counts predictions within its 95 % interval over documents.
"""

import numpy as np
from _bench import record
from prediction_cell import hardware_of
from prediction_records import command_of, compared
from scipy.stats import spearmanr

BARS = {"median_pct": 3.0, "worst_pct": 8.0}


def row_of(cell, batch, parts):
    """One record of a cell and batch. parts: of each drafter (validation.json, held-out, in-sample predictions)."""
    rows = [r for content, _, _ in parts for r in content["policies"] if not r["lossless"]]
    held_out = {k: v for _, found, _ in parts for k, v in found.items()}
    in_sample = {k: v for _, _, found in parts for k, v in found.items()}
    said, own = errors(rows, held_out), errors(rows, in_sample)
    a = cell.a
    name = f"{cell.name}-B{batch}" + ("-with-head" if a.head else "")
    case = f"{cell.name}, batch {batch}, {len(rows)} lossy policies: predicted from the train documents"
    row = record(
        f"{a.id}-{name}", case, said["median_pct"], "%",
        model=cell.job.name, **said, in_sample=own,
        documents={"train": len(cell.of("train")), "test": len(cell.measured(batch)), "probed": a.probed},
        tokens=min(r["measured"]["tokens"] for r in rows), repeats=parts[0][0]["repeats"],
        repeat_spread_pct=round(max(100 * r["measured"]["repeat_spread_frac"] for r in rows), 2),
        bar={bar: {"at_most": most, "met": said[bar] <= most} for bar, most in BARS.items()},
        texts=cell.about, columns=COLUMNS, policies=[_line(r, held_out, in_sample) for r in rows],
    )  # fmt: skip
    return {**row, "hardware": hardware_of(parts[0][0]["hardware"]), "command": command_of("prediction_lossy.py")}


def errors(rows, predicted):
    """Errors of one state. rows: validate's, of lossy policies; predicted: replay's outcomes by policy digest."""
    known = [(predicted[r["policy_digest"]]["fidelity"], r["measured"]["fidelity"]) for r in rows]
    return {
        **compared(rows, predicted),
        "agreement_points": _fidelity(known, "top1_agreement", 100.0),
        "kl_nats": _fidelity(known, "kl_nats", 1.0),
    }


def _fidelity(known, name, unit):
    guessed = np.array([guess[name]["value"] for guess, _ in known]) * unit
    measured = np.array([found[name] for _, found in known]) * unit
    off = guessed - measured
    inside = [
        low * unit <= value <= high * unit
        for value, (low, high) in zip(guessed, (found[f"{name}_interval"] for _, found in known))
    ]
    moves = np.ptp(guessed) > 0 and np.ptp(measured) > 0
    return {
        "median": round(float(np.median(np.abs(off))), 4),
        "worst": round(float(np.abs(off).max()), 4),
        "bias": round(float(np.median(off)), 4),
        "rank_correlation": round(float(spearmanr(guessed, measured).statistic), 4) if moves else None,
        "inside_frac": round(float(np.mean(inside)), 3),
    }


COLUMNS = ["policy", *(f"{what} {when}" for what in ("speedup", "tokens/round", "top-1", "KL")
                       for when in ("predicted", "in-sample", "measured"))]  # fmt: skip


def _line(row, held_out, in_sample):
    """A policy in a line, as COLUMNS say."""
    guesses, m = [found[row["policy_digest"]] for found in (held_out, in_sample)], row["measured"]
    line = [row["name"]]
    for name in ("speedup", "tokens_per_round"):
        line += [round(v, 4) for v in (*(g[name] for g in guesses), m[name])]
    for name in ("top1_agreement", "kl_nats"):
        line += [round(v, 5) for v in (*(g["fidelity"][name]["value"] for g in guesses), m["fidelity"][name])]
    return line


def show(row):
    """A record's policies as a table, and its errors, for a terminal."""
    print(f"\n{row['id']}\n{'policy: predicted/measured':<44}{'speedup':>13}{'tok/round':>12}{'top-1':>14}{'KL':>17}")
    for name, s, _, S, t, _, T, p, _, P, kl, _, KL in row["policies"]:
        print(
            f"{name:<44}{f'{s:.2f}/{S:.2f}':>13}{f'{t:.2f}/{T:.2f}':>12}{f'{p:.3f}/{P:.3f}':>14}{f'{kl:.3g}/{KL:.3g}':>17}"
        )
    for state, found in (("held-out", row), ("in-sample", row["in_sample"])):
        tokens, cost = found["tokens_per_round_error"], found["cost_error"]
        print(
            f"{state}: speedup error median {found['median_pct']:.2f} % worst {found['worst_pct']:.2f} % bias "
            f"{found['bias_pct']:+.2f} % (tokens/round {tokens['median_pct']:.2f}/{tokens['worst_pct']:.2f} %, cost "
            f"{cost['median_pct']:.2f}/{cost['worst_pct']:.2f} %), rank {found['rank_correlation']}, regret "
            f"{found['regret_pct']:.2f} %"
        )
        for name in ("agreement_points", "kl_nats"):
            print(f"  {name}: " + ", ".join(f"{key} {value}" for key, value in found[name].items()), flush=True)
