"""From predicted and measured policies to the prediction benchmark's records. Leaves out how either came about.

The error of a speedup splits into two factors: S = tokens per round x (plain step / round), so
predicted / measured speedup = (1 + tokens error) x (1 + cost error).

A batch has two speedups: of its whole run, which ends with its slowest sequence, and as if it was kept full, which is
what a server sees that refills it. Both are compared, by the same bars.
"""

import sys
from pathlib import Path

import numpy as np
from _bench import record
from scipy.stats import spearmanr

BARS = {"median_pct": 3.0, "worst_pct": 8.0, "regret_pct": 2.0}
STATES = {
    "held-out": "predicted from the train documents, measured on the test documents",
    "in-sample": "predicted from a dense trace of the very documents that were measured: what is left is cost error",
}


def compared(rows, predicted):
    """Predictions against validate's rows. predicted: by policy digest, replay's outcomes; both hold plain decoding.

    Errors are of drafting policies only, since plain's speedup is 1 by definition; regret and rank include it.
    """
    drafting = [r for r in rows if r["k_max"] > 0]
    kinds = sorted({_kind(r) for r in drafting})
    errors = np.array([_errors(r, predicted[r["policy_digest"]]) for r in drafting])  # [policies, 3]
    guessed = np.array([predicted[r["policy_digest"]]["speedup"] for r in rows])
    measured = np.array([r["measured"]["speedup"] for r in rows])
    regret = 1.0 - measured[guessed.argmax()] / measured.max()
    return {
        **size(errors[:, 0]),
        "tokens_per_round_error": size(errors[:, 1]),
        "cost_error": size(errors[:, 2]),
        "by_controller": {kind: size(errors[[_kind(r) == kind for r in drafting], 0]) for kind in kinds},
        "rank_correlation": round(float(spearmanr(guessed, measured).statistic), 4),
        "regret_pct": _pct(regret),
        "chosen": rows[int(guessed.argmax())]["name"],
        "fastest": rows[int(measured.argmax())]["name"],
        "intervals_overlap_frac": round(
            float(np.mean([_overlap(r, predicted[r["policy_digest"]]) for r in drafting])), 3
        ),
    }


def compared_kept_full(rows, predicted):
    """The same of batches as if they were kept full; {} where there are none."""
    if not all("full_batch" in r["measured"] for r in rows):
        return {}
    ours = [{**r, "measured": {**r["measured"], **r["measured"]["full_batch"]}} for r in rows]
    found = compared(ours, {digest: {**guess, **(guess["full_batch"] or {})} for digest, guess in predicted.items()})
    del found["intervals_overlap_frac"]  # there are none
    return {"full_batch": {**found, "bar": bars(found)}}


def bars(found):
    """What a record says of the bars."""
    return {name: {"at_most": bar, "met": found[name] <= bar} for name, bar in BARS.items()}


def merged(parts):
    """validate's rows of several validations of other documents, as if they had been one.

    Speedups stay ratios of sums. Their intervals resample the parts; of a single part they are validate's own.
    """
    if len(parts) == 1:
        return parts[0]["policies"]
    by_part = [{r["policy_digest"]: r for r in part["policies"]} for part in parts]
    plain = [next(r for r in part["policies"] if r["k_max"] == 0)["measured"] for part in parts]
    draws = np.random.default_rng(0).integers(0, len(parts), (1000, len(parts)))
    base_us = _drawn_us(plain, draws)
    rows = []
    for digest, row in by_part[0].items():
        found = [part[digest]["measured"] for part in by_part]
        low, high = np.percentile(base_us / _drawn_us(found, draws), [2.5, 97.5])
        total = {
            **summed(found, plain),
            "low": float(low),
            "high": float(high),
            "repeat_spread_frac": float(max(m["repeat_spread_frac"] for m in found)),
            "documents_differing_from_plain": sum(m["documents_differing_from_plain"] for m in found),
        }
        if all("full_batch" in m for m in found):
            total["full_batch"] = summed(*([m["full_batch"] for m in measured] for measured in (found, plain)))
        rows.append({**row, "measured": total})
    return rows


def _drawn_us(found, draws):
    """us a token of what was measured in several parts, for draws [resamples, parts] of them."""
    tokens = np.array([m["tokens"] for m in found])
    time_us = np.array([m["us_per_token"] for m in found]) * tokens
    return time_us[draws].sum(axis=1) / tokens[draws].sum(axis=1)


def summed(found, plain):
    """What was measured in several parts, as if in one; plain: what plain decoding measured in the same."""
    tokens = np.array([m["tokens"] for m in found])  # [parts]
    rounds = tokens / np.array([m["tokens_per_round"] for m in found])
    us_per_token, base_us_per_token = (
        sum(m["us_per_token"] * m["tokens"] for m in measured) / sum(m["tokens"] for m in measured)
        for measured in (found, plain)
    )
    return {
        "speedup": float(base_us_per_token / us_per_token),
        "us_per_token": float(us_per_token),
        "tokens": int(tokens.sum()),
        "tokens_per_round": float(tokens.sum() / rounds.sum()),
    }


def row_of(id, state, found, about):
    """One record of a cell. found: of `compared`; about: what it was measured on."""
    case = f"{about['cell']}: {STATES[state]}"
    row = record(id, case, found["median_pct"], "%", **about, **found, bar=bars(found))
    return {**row, "hardware": about["hardware"], "command": command_of("prediction.py")}


def command_of(script):
    """What a record says was run, files by their names alone."""
    shown = [Path(argument).name if "/" in argument else argument for argument in sys.argv[1:]]
    return " ".join([f"python3 benchmarks/{script}", *shown])


def policy_rows(rows, predicted):
    """A line a policy: [name, level, speedup predicted, measured, low, high, tokens a round predicted, measured].

    Of batches also, as if they were kept full: [..., speedup predicted, measured, tokens a round predicted, measured].
    """
    table = []
    for r in rows:
        guess, m = predicted[r["policy_digest"]], r["measured"]
        speedups = [guess["speedup"], m["speedup"], m["low"], m["high"]]
        tokens = [guess["tokens_per_round"], m["tokens_per_round"]]
        full = [both["full_batch"] for both in (guess, m) if both.get("full_batch")]
        tokens += [both[name] for name in ("speedup", "tokens_per_round") for both in full if len(full) == 2]
        table.append([r["name"], guess["level"], *(round(v, 4) for v in speedups + tokens)])
    return table


def show(row):
    """A line of a record for a terminal."""
    tokens, cost = row["tokens_per_round_error"], row["cost_error"]
    print(
        f"{row['id']}: speedup error median {row['median_pct']:.2f} % worst {row['worst_pct']:.2f} %, "
        f"tokens/round {tokens['median_pct']:.2f}/{tokens['worst_pct']:.2f} %, "
        f"cost {cost['median_pct']:.2f}/{cost['worst_pct']:.2f} %, rank {row['rank_correlation']}, "
        f"regret {row['regret_pct']:.2f} % (chose {row['chosen']}, fastest {row['fastest']})",
        flush=True,
    )
    if full := row.get("full_batch"):
        print(
            f"  full batches: median {full['median_pct']:.2f} % worst {full['worst_pct']:.2f} %, "
            f"tokens/round {full['tokens_per_round_error']['median_pct']:.2f} %, "
            f"cost {full['cost_error']['median_pct']:.2f} %, regret {full['regret_pct']:.2f} %",
            flush=True,
        )


def _kind(row):
    return f"fp8-{row['controller']}" if row["name"].startswith("fp8") else row["controller"]


def _errors(row, guess):
    """Relative errors of speedup, of tokens a round, and of speedup had tokens a round been known."""
    m = row["measured"]
    speedup = guess["speedup"] / m["speedup"]
    tokens = guess["tokens_per_round"] / m["tokens_per_round"]
    return speedup - 1.0, tokens - 1.0, speedup / tokens - 1.0


def _overlap(row, guess):
    """Do the two 95 % intervals meet? One of a single document is a point."""
    m = row["measured"]
    low, high = guess["low"] or guess["speedup"], guess["high"] or guess["speedup"]
    return low <= m["high"] and m["low"] <= high


def size(errors):
    """bias_pct: the median with its sign; positive is predicted too fast."""
    return {
        "median_pct": _pct(np.median(np.abs(errors))),
        "worst_pct": _pct(np.abs(errors).max()),
        "bias_pct": _pct(np.median(errors)),
    }


def _pct(frac):
    return round(100.0 * float(frac), 3)
