"""What selections recall, as plain data and as tables: by distance, by draft layer, and hybrid against the oracle.

These are the curves of Dustin's Figures 2 and 3. Every number is mean ARR over anchors, then over documents.
"""

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from specdial.engine.trace.attention import DRAFT, TARGET, AttentionTrace
from specdial.policies.console import table_console
from specdial.simulator.arr import Frame, arr_by_delta, hybrid_arr, oracle_arr, scored_arr
from specdial.simulator.arr_cases import best_heads, cases, mean_arr, sum_heads
from specdial.simulator.heads import FoundHeads, HeadSearch

Row = dict[str, Any]
DELTAS = (0, 1, 2, 4, 8, 16)


def delta_rows(
    trace: AttentionTrace, found: FoundHeads, deltas: Sequence[int], frames: Sequence[Frame], split: str | None = None
) -> list[Row]:
    """ARR of single rows by the distance of the row that scored them, for each budget and distance.

    history: scored by the found target heads. all_heads: by the mean over all layers and heads, which is what is to be
    recalled: the oracle at distance 0.
    """
    given = cases(trace, split)
    recalled = [case.document.recalled() for case in given]
    scored = {
        "history": [sum_heads(case.document, TARGET, found.target, lambda r: r) for case in given],
        "all_heads": recalled,
    }
    rows: list[Row] = []
    for frame in frames:
        arrs = {
            name: [
                arr_by_delta(attention, scores, case.document.run.first_position, deltas, frame)
                for case, attention, scores in zip(given, recalled, each)
            ]
            for name, each in scored.items()
        }
        for i, delta in enumerate(deltas):
            means = {name: sum(arr[i] for arr in each) / len(each) for name, each in arrs.items()}
            rows.append({"budget": frame.budget, "delta": delta, **means})
    return rows


def layer_rows(
    trace: AttentionTrace, search: HeadSearch, frames: Sequence[Frame], split: str | None = None
) -> list[Row]:
    """Window ARR of every layer's best heads alone: history of target layers, lookahead of draft layers."""
    given = cases(trace, split, window=search.window, steps=search.steps)
    rows: list[Row] = []
    for source, kind in ((TARGET, "history"), (DRAFT, "lookahead")):
        for layer, heads in best_heads(trace, source, search.heads_per_layer).items():
            scores = [case.history(heads) if source == TARGET else case.lookahead(heads) for case in given]
            for frame in frames:
                arr = mean_arr(scored_arr(case.at, score, frame) for case, score in zip(given, scores))
                rows.append({"source": source, "kind": kind, "layer": layer, "budget": frame.budget, "arr": arr})
    return rows


def budget_rows(
    trace: AttentionTrace, found: FoundHeads, search: HeadSearch, frames: Sequence[Frame], split: str | None = None
) -> list[Row]:
    """Window ARR at each budget: recent keys alone, history, lookahead, hybrid and oracle.

    The hybrid takes the share of free keys by lookahead that the search found at its own budget. Without draft heads
    lookahead and hybrid are None.
    """
    given = cases(trace, split, window=search.window, steps=search.steps)
    past = [case.history(found.target) for case in given]
    looks = [case.lookahead(found.draft) for case in given] if found.draft else []
    rows: list[Row] = []
    for frame in frames:
        m = round(found.m * frame.free / found.frame.free) if found.frame.free else 0
        nearest = Frame(frame.budget, frame.sink, frame.budget - frame.sink)
        row: Row = {
            "budget": frame.budget,
            "m": m,
            "recent": mean_arr(oracle_arr(case.at, nearest) for case in given),
            "history": mean_arr(scored_arr(case.at, score, frame) for case, score in zip(given, past)),
            "lookahead": None,
            "hybrid": None,
        }
        if found.draft:
            row["lookahead"] = mean_arr(scored_arr(case.at, look, frame) for case, look in zip(given, looks))
            row["hybrid"] = mean_arr(
                hybrid_arr(case.at, look, score, m, frame) for case, look, score in zip(given, looks, past)
            )
        row["oracle"] = mean_arr(oracle_arr(case.at, frame) for case in given)
        rows.append(row)
    return rows


def print_arr(rows: Sequence[Row], title: str) -> None:
    """Rows as a table, columns in the order of the first row; a dash where there is no number."""
    table = Table()
    for name in rows[0]:
        table.add_column(name, justify="left" if isinstance(rows[0][name], str) else "right")
    for row in rows:
        table.add_row(*(_text(value) for value in row.values()))
    console = table_console()
    console.print(title, highlight=False)  # not the table's own title, which wraps at its width
    console.print(table)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    return "-" if value is None else str(value)
