"""Tables for people. Lossless and lossy policies carry their label in every table."""

from collections.abc import Sequence
from dataclasses import replace

from rich.table import Table

from specdial.policies.console import odd_batch, table_console
from specdial.policies.file import policy_digest
from specdial.simulator.check import AcceptanceCheck
from specdial.simulator.choice import Choice
from specdial.simulator.costs import CostModel
from specdial.simulator.crossover import Corner
from specdial.simulator.fidelity import Fidelity
from specdial.simulator.inversion import Inversion
from specdial.simulator.outcome import Outcome


def print_outcomes(outcomes: Sequence[Outcome], title: str) -> None:
    """One row a policy; refused ones say why below. Of batches, also the speedup as if they were kept full."""
    batched = has_full_batch(outcomes)
    table = Table(title=title, title_justify="left")
    table.add_column("policy", overflow="fold", min_width=26)
    for name in ("lossless", "level"):
        table.add_column(name)
    table.add_column("speedup", justify="right")
    table.add_column("95 %", justify="right", min_width=9)
    full = ("full batch",) if batched else ()
    for name in (*full, "tok/round", "alpha", "gamma", "k", "budget", "us/token", "KV MB/token"):
        table.add_column(name, justify="right")
    for o in outcomes:
        bytes_text = number(None if o.kv_bytes_per_token is None else o.kv_bytes_per_token / 1e6, 1)
        table.add_row(
            o.policy.name,
            "yes" if o.lossless else "NO",
            o.level + ("*" if o.extrapolated_frac else ""),
            number(o.speedup, 3),
            interval(o.low, o.high),
            *((full_batch_text(o),) if batched else ()),
            number(o.tokens_per_round, 2),
            number(o.alpha, 3),
            number(o.gamma, 3),
            number(o.k, 2),
            str(o.budget) if o.budget else "-",
            number(o.us_per_token, 0),
            bytes_text,
        )
    console = table_console()
    console.print(table)
    print_odd_batches(outcomes)
    for o in outcomes:
        notes = [breakdown_text(o)] if o.breakdown and len(outcomes) <= 8 else []
        notes += [f"{o.level}: {o.reason}"] if o.reason else []
        notes += [f"* {o.extrapolated_frac:.0%} of its time is extrapolated"] if o.extrapolated_frac else []
        notes += [fidelity_text(o.fidelity)] if o.fidelity is not None else []
        if notes:
            console.print(f"{o.policy.name}: {'; '.join(notes)}", highlight=False)


def print_odd_batches(outcomes: Sequence[Outcome]) -> None:
    """A line where documents do not make whole batches."""
    odd = {odd_batch(len(o.documents), o.batch) for o in outcomes if o.documents} - {""}
    for said in sorted(odd):
        table_console().print(said)


def print_inversion(rows: Sequence[Inversion]) -> None:
    """Speedup and acceptance against fixed k, one block an arm."""
    table = Table(title="efficiency inversion: fixed k per arm", title_justify="left")
    table.add_column("drafter")
    for name in (
        "budget",
        "k",
        "speedup",
        "95 %",
        "level",
        "accepted",
        "alpha",
        "tail",
        "gamma",
        "breaks even at alpha",
        "or gamma",
        "",
    ):
        table.add_column(name, justify="right")
    for i, r in enumerate(rows):
        marks = ["best"] if r.best else []
        marks += ["inverted"] if r.inverted else []
        table.add_row(
            r.drafter,
            str(r.budget),
            str(r.k),
            number(r.speedup, 3),
            interval(r.low, r.high),
            r.level,
            number(r.accepted, 2),
            number(r.alpha, 3),
            number(r.tail, 3),
            number(r.gamma, 3),
            number(r.crossover_alpha, 3),
            number(r.crossover_gamma, 3),
            ", ".join(marks),
            end_section=i + 1 < len(rows) and rows[i + 1].arm != r.arm,
        )
    table_console().print(table)


def print_surface(corners: Sequence[Corner]) -> None:
    """Best fixed k and its speedup by context and batch; 0 is plain decoding."""
    if not corners:
        return
    batches = sorted({corner.batch for corner in corners})
    table_console().print("best fixed k (its speedup, 95 %) by context and batch, acceptance as recorded")
    table = Table()
    table.add_column("context", justify="right")
    for batch in batches:
        table.add_column(f"batch {batch}", justify="right")
    found = {(corner.context_tokens, corner.batch): corner for corner in corners}
    for context in sorted({corner.context_tokens for corner in corners}):
        cells = [found.get((context, batch)) for batch in batches]
        table.add_row(
            str(context),
            *(corner_text(corner) for corner in cells),
        )
    table_console().print(table)


def corner_text(corner: Corner | None) -> str:
    """k (speedup, its interval), starred where extrapolated, a dash where the costs are unknown."""
    if corner is None:
        return "-"
    inner = f"{corner.speedup:.2f}" + ("" if corner.low is None else f", {interval(corner.low, corner.high)}")
    return f"{corner.k} ({inner}){'*' if corner.extrapolated else ''}"


def print_costs(costs: CostModel) -> None:
    """What the baseline is worth, and the cost model's leave-one-out error: a line each."""
    if costs.plain_gbps:
        text = f"baseline: plain decoding moves {costs.plain_gbps:.1f} GB/s of weights, keys and values"
        table_console().print(text, highlight=False)
    parts = [
        f"{op} {error['median_frac']:.1%} (worst {error['worst_frac']:.1%})"
        for op, error in costs.leave_one_out().items()
        if "median_frac" in error
    ]
    text = ", ".join(parts) if parts else "too few measurements to say"
    table_console().print(f"cost model, error of each measurement predicted from the others: {text}", highlight=False)


def print_acceptance(check: AcceptanceCheck) -> None:
    """How well acceptance is modelled on held-out documents and left-out budgets."""
    console = table_console()
    if check.hazard is not None:
        h = check.hazard
        console.print(
            f"acceptance model, fitted on {check.fitted_on}, on {check.scored_on} documents: log-loss {h.log_loss:.3f} "
            f"(the mean alone {h.base_log_loss:.3f}), calibration error {h.expected_calibration_error:.3f}",
            highlight=False,
        )
    for left in check.left_out:
        console.print(
            f"budget {left.budget} modelled from its neighbours: {left.modelled:.2f} accepted, "
            f"recorded {left.recorded:.2f}"
            + (f" ({left.modelled / left.recorded - 1.0:+.1%})" if left.recorded else ""),
            highlight=False,
        )


def has_full_batch(outcomes: Sequence[Outcome]) -> bool:
    """Does a table of these have a column of speedups as if batches were kept full?"""
    return any(o.full_batch is not None for o in outcomes)


def full_batch_text(outcome: Outcome) -> str:
    """The speedup as if batches were kept full, or a dash."""
    return number(None if outcome.full_batch is None else outcome.full_batch.speedup, 3)


def fidelity_text(found: Fidelity) -> str:
    """A lossy policy's predicted fidelity in a line, for tables that hold lossless ones too."""
    known = (("KL", found.kl_nats, ".2g"), ("top-1", found.top1_agreement, ".0%"), ("attention", found.arr, ".0%"))
    return "predicted " + ", ".join(f"{name} {value.value:{form}}" for name, value, form in known if value is not None)


def breakdown_text(outcome: Outcome) -> str:
    """Shares of the time by term, the larger first."""
    if not outcome.breakdown or not outcome.us_per_token:
        return "-"
    parts = sorted(outcome.breakdown.items(), key=lambda part: -part[1])
    return " ".join(f"{term} {us / outcome.us_per_token:.0%}" for term, us in parts if us > 0.0)


def interval(low: float | None, high: float | None) -> str:
    """A 95 % interval, or a dash where there is none."""
    return "-" if low is None or high is None else f"{low:.2f}-{high:.2f}"


def number(value: float | None, digits: int) -> str:
    """A number, or a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def print_choice(choice: Choice, title: str) -> None:
    """Plain, best fixed k, the tuned policy and the Pareto front; then the verdict."""
    named = [("plain", choice.plain), ("best fixed", choice.best_fixed), ("tuned", choice.best)]
    shown = [relabel(name, outcome) for name, outcome in named]
    seen = [policy_digest(outcome.policy) for _, outcome in named]
    front = []
    for outcome in choice.front:
        if policy_digest(outcome.policy) not in seen:
            seen.append(policy_digest(outcome.policy))
            front.append(outcome)
    print_outcomes([*shown, *front], title)
    console = table_console()
    if choice.pays:
        console.print(f"best: {choice.best.policy.name}", highlight=False)
    else:
        console.print("speculation does not pay here: the best policy is k = 0 (plain decoding)", highlight=False)
    if choice.crossover is not None:
        c = choice.crossover
        console.print(
            f"fastest drafting policy {c.policy}: speedup {c.speedup:.3f} ({number(c.low, 2)}-{number(c.high, 2)}); "
            f"it breaks even with plain decoding at alpha {c.alpha_needed:.3f} (it has {c.alpha:.3f}) "
            f"or gamma {c.gamma_needed:.3f} (it has {c.gamma:.3f}), k {c.k:.2f}",
            highlight=False,
        )


def relabel(name: str, outcome: Outcome) -> Outcome:
    """The outcome under a name that says its part in the table."""
    label = name if outcome.policy.name == name else f"{name}: {outcome.policy.name}"
    return replace(outcome, policy=replace(outcome.policy, name=label))
