"""The lowering report, for people and for programs."""

from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text

from specdial.policies.console import table_console
from specdial.policies.exporters.loss import Loss
from specdial.policies.exporters.rows import Lowered
from specdial.policies.file import policy_digest
from specdial.policies.schema import Policy

SCHEMA = "specdial/lowering/1"


def report(policy: Policy, target: str, lowered: Lowered, loss: Loss) -> dict[str, Any]:
    """Plain data; what is unknown is null, with the reason beside it. Rounded nowhere, dated nowhere."""
    return {
        "schema": SCHEMA,
        "policy": policy.name,
        "policy_digest": policy_digest(policy),
        "lossless": policy.lossless,
        "target": target,
        "axes": [asdict(row) for row in lowered.rows],
        "predicted_loss": asdict(loss),
        "usage": lowered.usage,
        "notes": list(lowered.notes),
    }


def print_report(policy: Policy, target: str, lowered: Lowered, loss: Loss) -> None:
    """One row an axis, then the loss, the notes and how the engine takes the file."""
    lossless = "lossless" if policy.lossless else "lossy"
    # Text, since brackets in a plain string would be read as markup.
    table = Table(title=Text(f"{policy.name} ({lossless}) for {target}"), title_justify="left")
    for name in ("cell", "axis", "fate", "what"):
        table.add_column(name, overflow="fold")
    for row in lowered.rows:
        table.add_row(*map(Text, (row.cell, row.axis, row.fate, row.note)))
    console = table_console()
    console.print(table)
    for line in (loss_text(loss), *lowered.notes, f"use: {lowered.usage}"):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def loss_text(loss: Loss) -> str:
    """One line: predicted speedups and their difference, or why it is unknown."""
    if loss.lost is None:
        return f"predicted speedup lost: unknown, {loss.reason}"
    return f"predicted speedup lost: {loss.lost:.3f} ({loss.policy:.3f}x to {loss.lowered:.3f}x in this engine)"
