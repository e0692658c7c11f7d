"""What another draft buys: speedup, and the last draft's acceptance against its cost, by fixed draft length k."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from specdial.simulator.report.inputs import Inputs
from specdial.simulator.report.section import (
    Figure,
    Json,
    Section,
    chart,
    fold,
    key,
    label,
    layout,
    note,
    number,
    pair,
    rule,
    table,
    times,
)

NEEDS = "specdial replay trace=runs/book costs=runs/costs inversion=true out=runs/replay"
TITLE = "How far to draft"
Row = dict[str, Any]
EACH: Json = {"dtick": 1, "tickangle": 0}
RATIO: Json = {"tickformat": ".2f", "ticksuffix": "×"}


def section(inputs: Inputs) -> Section:
    """Two charts over k; the arm with the fastest point in the accent colour."""
    rows: list[Row] = (inputs.json("replay") or {}).get("inversion", [])
    if not rows:
        return Section("inversion", TITLE, needs=NEEDS)
    arms = [list(group) for _, group in groupby(rows, key=lambda row: row["arm"])]
    arms.sort(key=lambda arm: -max(row["speedup"] or 0.0 for row in arm))
    best = max(arms[0], key=lambda row: row["speedup"] or 0.0)
    turn = next((row["k"] for row in arms[0] if row["inverted"]), None)
    figures = (_speedups(arms, best, turn), _tails(arms, turn))
    lead = f"Fixed draft lengths reach {times(best['speedup'])} of plain decoding, with k = {best['k']}"
    lead += f" on {_arm(arms[0])}. "
    lead += (
        f"From k = {turn} on, the last draft is accepted less often than it costs: the inversion."
        if turn is not None
        else f"Up to k = {rows[-1]['k']} every draft is accepted more often than it costs."
    )
    others = [("line faint", "other arms")] if len(arms) > 1 else []
    marks = [("line", _arm(arms[0])), *others, ("line dashed", "cost of a draft (gamma)")]
    marks.append(("line dotted", "plain decoding"))
    html = f'<p class="kinds">Every policy here is {label(True)}</p>' + key(*marks)
    html += pair(
        chart(figures[0], "Speedup over plain decoding"),
        chart(figures[1], "Acceptance of draft k, and what it costs", "Both in units of one verification."),
    )
    html += fold("Numbers", _table(rows))
    return Section("inversion", TITLE, lead, html, figures)


def _arm(arm: Sequence[Row]) -> str:
    first = arm[0]
    return f"{first['drafter']}, {first['budget']} keys" if first["budget"] else str(first["drafter"])


def _line(arm: Sequence[Row], name: str, first: bool, **more: Any) -> Json:
    color = "@accent" if first else "@faint"
    line: Json = {"color": color, "width": 2.5 if first else 1.5, **more}
    return {
        "type": "scatter",
        "name": f"{_arm(arm)}, lossless",
        "mode": "lines+markers" if first else "lines",
        "x": [row["k"] for row in arm],
        "y": [row[name] for row in arm],
        "line": line,
        "marker": {"color": color, "size": 6},
        "hovertemplate": f"{_arm(arm)}<br>k = %{{x}}: %{{y:.3f}}<extra></extra>",
    }


def _speedups(arms: list[list[Row]], best: Row, turn: int | None) -> Figure:
    data = [_line(arm, "speedup", i == 0) for i, arm in reversed(list(enumerate(arms)))]
    top = {
        "type": "scatter",
        "mode": "markers",
        "x": [best["k"]],
        "y": [best["speedup"]],
        "marker": {"color": "@paper", "size": 11, "line": {"color": "@accent", "width": 2.5}},
        "hoverinfo": "skip",
    }
    ks = [row["k"] for row in arms[0]]
    font = {"color": "@accent", "size": 13}
    words = [note(f"best, k = {best['k']}", best["k"], best["speedup"], yshift=16, font=font)]
    lines = [rule((ks[0] - 0.3, ks[-1] + 0.3), (1.0, 1.0))]
    if turn is not None:
        lines.append(rule((turn, turn), (0, 1), yref="paper"))
        words.append(note("inversion", turn, 0, yref="paper", xanchor="left", yanchor="bottom", xshift=4))
    drawn = layout("drafts per round, k", "", annotations=words, shapes=lines, xaxis=EACH, yaxis=RATIO)
    label_ = "Speedup over plain decoding against the number of drafts per round"
    return Figure("chart-speedup", label_, [*data, top], drawn)


def _tails(arms: list[list[Row]], turn: int | None) -> Figure:
    data = [_line(arm, "tail", i == 0) for i, arm in reversed(list(enumerate(arms)))]
    gamma = _line(arms[0], "gamma", True, dash="dash")
    gamma |= {
        "name": "cost of a draft (gamma)",
        "mode": "lines",
        "line": {"color": "@ink", "width": 1.5, "dash": "dash"},
    }
    lines, words = [], []
    if turn is not None:
        lines.append(rule((turn, turn), (0, 1), yref="paper"))
        words.append(note("inversion", turn, 1, yref="paper", xanchor="left", yanchor="top", xshift=4))
    drawn = layout(
        "drafts per round, k",
        "",
        annotations=words,
        shapes=lines,
        xaxis=EACH,
        yaxis={"rangemode": "tozero", "tickformat": ".1f"},
    )
    return Figure("chart-tail", "Acceptance of the k-th draft beside its cost", [*data, gamma], drawn)


def _table(rows: Sequence[Row]) -> str:
    columns = ["arm", "k", "speedup", "accepted", "alpha", "tail", "gamma", "breaks even at alpha", ""]
    cells = [
        [
            _arm([row]),
            str(row["k"]),
            times(row["speedup"]),
            number(row["accepted"]),
            number(row["alpha"], 3),
            number(row["tail"], 3),
            number(row["gamma"], 3),
            number(row["crossover_alpha"], 3),
            ", ".join(word for word in ("best", "inverted") if row[word]),
        ]
        for row in rows
    ]
    return table(columns, cells)
