"""Lossy policies as a table of their own, with what their tokens are worth, and how far those curves can be trusted."""

from collections.abc import Sequence

from rich.table import Table

from specdial.policies.console import table_console
from specdial.simulator.fidelity import Bounded, Model
from specdial.simulator.outcome import Outcome
from specdial.simulator.tables import full_batch_text, has_full_batch, interval, number, print_odd_batches


def print_lossy(outcomes: Sequence[Outcome], title: str) -> None:
    """One row a lossy policy, predicted fidelity beside its speed; refused ones say why below."""
    batched = has_full_batch(outcomes)
    table = Table(title=title, title_justify="left")
    table.add_column("policy", overflow="fold", min_width=26)
    for name in ("lossless", "level"):
        table.add_column(name)
    full = ("full batch",) if batched else ()
    for name in ("speedup", "95 %", *full, "tok/round", "us/token", "KL nats", "top-1", "attention", "partial"):
        table.add_column(name, justify="right")
    for o in outcomes:
        found = o.fidelity
        table.add_row(
            o.policy.name,
            "NO",
            o.level + ("*" if o.extrapolated_frac else ""),
            number(o.speedup, 3),
            interval(o.low, o.high),
            *((full_batch_text(o),) if batched else ()),
            number(o.tokens_per_round, 2),
            number(o.us_per_token, 0),
            *(("-",) * 4 if found is None else (
                _range(found.kl_nats, ".2g"), _range(found.top1_agreement, ".0%"), _range(found.arr, ".0%"),
                f"{found.partial_frac:.0%}",
            )),
        )  # fmt: skip
    console = table_console()
    console.print(table)
    print_odd_batches(outcomes)
    for o in outcomes:
        notes = [f"{o.level}: {o.reason}"] if o.reason else []
        notes += [f"* {o.extrapolated_frac:.0%} of its time is extrapolated"] if o.extrapolated_frac else []
        if o.fidelity is not None and o.fidelity.extrapolated_frac:
            notes.append(f"{o.fidelity.extrapolated_frac:.0%} of its tokens are of rounds older than any probed")
        if notes:
            console.print(f"{o.policy.name}: {'; '.join(notes)}", highlight=False)


def print_fidelity(model: Model) -> None:
    """The error of every curve on documents that its fit had not seen, a line a selection."""
    for selection in model.selections.values():
        parts = []
        for name, curve in selection.curves.items():
            if curve.held_out is None or curve.mean_alone is None or name == "full_draft":
                continue
            flat = f", flat in {' and '.join(curve.flat)}" if curve.flat else ""
            parts.append(f"{name} {curve.held_out:.3g} (the mean alone {curve.mean_alone:.3g}{flat})")
        text = "; ".join(parts) if parts else "one document only"
        table_console().print(
            f"fidelity from {selection.label}, fitted on {model.fitted_on}, {selection.probes} probes; mean error by "
            f"held-out document: {text}",
            highlight=False,
        )


def _range(found: Bounded | None, form: str) -> str:
    if found is None:
        return "-"
    interval = "" if found.low is None or found.high is None else f" \\[{found.low:{form}}-{found.high:{form}}]"
    return f"{found.value:{form}}{interval}"
