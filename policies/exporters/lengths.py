"""The report's rows on draft lengths and on the axes of the cells: what the engine will do where each cell speaks."""

from specdial.policies.exporters.lowering import Plan
from specdial.policies.exporters.rows import Fate, Length, Row, cell_name, span


def length_rows(plan: Plan, *, context: bool, batch: bool, most: int | None = None) -> tuple[Row, ...]:
    """Rows for the draft length of every cell, then for the two axes of the cells.

    context, batch: whether the engine's settings carry that axis. most: the longest draft they allow.
    """
    rows = []
    for i, length in enumerate(plan.lengths):
        used = {
            plan.k[c if context else plan.at_context][b if batch else plan.at_batch]
            for c in range(len(plan.contexts))
            for b in range(len(plan.batches))
            if plan.cell[c][b] == i
        }
        if length is not None:
            rows += _length_row(cell_name(plan.policy, i), length, {k if most is None else min(k, most) for k in used})
    for axis, varies, kept, chosen in (
        ("context", plan.varies_by_context, context, plan.contexts[plan.at_context]),
        ("batch", plan.varies_by_batch, batch, plan.batches[plan.at_batch]),
    ):
        if varies and kept:
            rows.append(Row("all", axis, "kept", f"k varies by {axis}"))
        elif varies:
            rows.append(Row("all", axis, "dropped", f"k cannot vary by {axis}: that of {axis} {span(chosen)} is used"))
    return tuple(rows)


def _length_row(cell: str, length: Length, used: set[int]) -> list[Row]:
    """used: the draft lengths that the engine uses where this cell speaks; none where cells before it cover it all."""
    if not used:
        return [Row(cell, "k", "kept", "never speaks: cells before it cover it")]
    if used == {length.k}:
        return [Row(cell, "k", length.fate, length.note)] if length.said else []
    here = " or ".join(str(k) if k else "no speculation" for k in sorted(used))
    fate: Fate = "dropped" if length.k == 0 or used == {0} else "approximated"
    return [Row(cell, "k", fate, f"{length.note}: {here} here")]
