"""Tables of a search for people: what was refused and why, the surface, what test documents say."""

from rich.table import Table

from specdial.policies.console import table_console
from specdial.simulator.outcome import Outcome
from specdial.simulator.search import Found
from specdial.simulator.surface import Surface
from specdial.simulator.tables import print_odd_batches

MOST_REASONS = 8


def print_refused(found: Found) -> None:
    """How many trials were refused, and why, the commonest reason first; nothing where none was."""
    if not found.refused:
        return
    console = table_console()
    total = sum(found.refused.values())
    console.print(f"{total} of {found.trials} trials refused:", highlight=False)
    shown = list(found.refused.items())[:MOST_REASONS]
    for reason, count in shown:
        console.print(f"  {count} x {reason}", highlight=False)
    if len(shown) < len(found.refused):
        console.print(f"  {total - sum(count for _, count in shown)} x others: see study.json", highlight=False)


def print_test(test: dict[str, Outcome]) -> None:
    """A line of speedups on documents that nothing was tuned or selected on."""
    console = table_console()
    if not test:
        console.print("the trace has no test documents: nothing here is free of selection", highlight=False)
        return
    parts = [
        f"{name.replace('_', ' ')} {o.speedup:.3f}" + (f" ({o.low:.2f}-{o.high:.2f})" if o.low and o.high else "")
        for name, o in test.items()
        if o.speedup is not None
    ]
    console.print(f"on test documents: {', '.join(parts) or 'no prediction'}", highlight=False)
    print_odd_batches(list(test.values()))


def print_surface_cells(surface: Surface | None) -> None:
    """The policy of every cell with its speedup, and what that gains over the best single policy."""
    if surface is None:
        return
    console = table_console()
    batches = sorted({cell.batch for cell in surface.cells})
    console.print("surface: policy (its speedup) by context and batch")
    table = Table()
    table.add_column("context", justify="right")
    for batch in batches:
        table.add_column(f"batch {batch}", overflow="fold")
    for context in sorted({cell.context_tokens for cell in surface.cells}):
        row = [cell for cell in surface.cells if cell.context_tokens == context]
        texts = [f"{c.policy} ({c.speedup:.2f}){'*' if c.moved else ''}" for c in sorted(row, key=lambda c: c.batch)]
        table.add_row(str(context), *texts)
    console.print(table)
    if any(cell.moved for cell in surface.cells):
        console.print("* no document was recorded there: acceptance is that of others", highlight=False)
    verdict = (
        f"{surface.gain_frac:.1%} less time" if surface.pays else "a surface gains nothing here, use the single policy"
    )
    console.print(
        f"equal plain time in every cell: surface {surface.speedup:.3f}, best single policy {surface.single.name} "
        f"{surface.single_speedup:.3f}: {verdict}",
        highlight=False,
    )
