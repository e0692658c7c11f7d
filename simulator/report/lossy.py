"""What lossy policies give up for their speed: agreement with full verification, predicted and measured.

A section of its own, so that no lossy policy stands in a ranking of lossless ones.
"""

from dataclasses import dataclass
from html import escape
from typing import Any

from specdial.simulator.report.inputs import Inputs
from specdial.simulator.report.section import (
    SYMBOLS,
    Figure,
    Json,
    Section,
    chart,
    key,
    label,
    layout,
    named,
    number,
    rule,
    table,
    times,
)

NEEDS = "specdial replay trace=runs/probed costs=runs/costs policy=lossy.yaml out=runs/replay"
TITLE = "What lossy policies give up"
MARKS = [("measured", "lossy", "measured"), ("predicted", "lossy soft", "predicted from probes")]


@dataclass(frozen=True, slots=True)
class Point:
    """One lossy policy as one source has it. top1, low, high: share of its tokens that full verification finds best."""

    name: str
    source: str
    speedup: float | None
    top1: float | None
    low: float | None
    high: float | None
    kl_nats: float | None
    same_text: float | None


def section(inputs: Inputs) -> Section:
    """Speed against agreement; a table; how far what was measured drifts from one full verification to the next."""
    rows = [row for row in (inputs.json("validation") or {}).get("policies", []) if not row["lossless"]]
    replayed = [outcome for outcome in (inputs.json("replay") or {}).get("outcomes", []) if not outcome["lossless"]]
    names = {row["name"] for row in rows if row["predicted"].get("fidelity")}
    predicted = [_predicted(row["name"], row["predicted"]) for row in rows if row["name"] in names]
    predicted += [_predicted(o["name"], o) for o in replayed if o.get("fidelity") and o["name"] not in names]
    points = [*predicted, *(_measured(row) for row in rows if row["measured"].get("fidelity"))]
    if not points:
        return Section("lossy", TITLE, needs=NEEDS)
    shown = [point for point in points if point.top1 is not None and point.speedup is not None]
    figures = [_figure(shown)] if shown else []
    sources = list(dict.fromkeys(point.source for point in points))
    lead = f"Partial verification, {' and '.join(sources)}: how often a token is the one that full verification finds "
    lead += "likeliest, against the speed."
    html = f'<p class="kinds">Every policy here is {label(False)}</p>'
    for figure in figures:
        marks = [(kind, words) for source, kind, words in MARKS if source in {point.source for point in shown}]
        html += key(*marks) + chart(figure, "Speedup against top-1 agreement with full verification")
    return Section("lossy", TITLE, lead, html + _table(points) + _drift(rows), tuple(figures))


def _predicted(name: str, found: dict[str, Any]) -> Point:
    """found: has the speedup and fidelity that were predicted."""
    top1, kl = (found["fidelity"][part] or {} for part in ("top1_agreement", "kl_nats"))
    ends = (top1.get("value"), top1.get("low"), top1.get("high"))
    return Point(name, "predicted", found["speedup"], *ends, kl.get("value"), None)


def _measured(row: dict[str, Any]) -> Point:
    found = row["measured"]["fidelity"]
    low, high = found.get("top1_agreement_interval", (None, None))
    facts = (found["top1_agreement"], low, high, found["kl_nats"], found["token_agreement"])
    return Point(row["name"], "measured", row["measured"]["speedup"], *facts)


def _figure(points: list[Point]) -> Figure:
    data = [_dots([p for p in points if p.source == source], source) for source in ("predicted", "measured")]
    drawn = layout(
        "top-1 agreement with full verification",
        "",
        height=360,
        xaxis={"tickformat": ".1%"},
        yaxis={"tickformat": ".2f", "ticksuffix": "×"},
        shapes=[rule((0, 1), (1.0, 1.0), xref="paper")],
    )
    label_ = "Speedup of lossy policies against their agreement with full verification"
    return Figure("chart-lossy", label_, [part for part in data if part["x"]], drawn)


def _dots(points: list[Point], source: str) -> Json:
    color = "@accent" if source == "measured" else "@accent-soft"
    return {
        "type": "scatter",
        "mode": "markers",
        "name": f"lossy, {source}",
        "x": [point.top1 for point in points],
        "y": [point.speedup for point in points],
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [_reach(point.high, point.top1) for point in points],
            "arrayminus": [_reach(point.top1, point.low) for point in points],
            "color": color,
            "thickness": 1.5,
            "width": 0,
        },
        "customdata": [escape(f"{point.name}, lossy, {source}", quote=False) for point in points],
        "marker": {"symbol": SYMBOLS[False], "size": 9, "color": color, "line": {"width": 1.5, "color": color}},
        "hovertemplate": "%{customdata}<br>top-1 %{x:.2%}, %{y:.3f}×<extra></extra>",
    }


def _reach(above: float | None, below: float | None) -> float:
    return 0.0 if above is None or below is None else max(above - below, 0.0)


def _table(points: list[Point]) -> str:
    rows = [
        [
            named(point.name, False),
            point.source,
            times(point.speedup),
            _share(point.top1),
            "–" if point.low is None or point.high is None else f"{point.low:.1%} to {point.high:.1%}",
            number(point.kl_nats, 4),
            _share(point.same_text),
        ]
        for point in sorted(points, key=lambda point: (point.name, point.source))
    ]
    return table(["policy", "", "speedup", "top-1", "95 %", "KL, nats", "same text as plain"], rows, text=2)


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _drift(rows: list[dict[str, Any]]) -> str:
    """Of every validated policy, by rounds since full verification: 0 are the full rounds themselves."""
    cells = [
        [
            named(row["name"], False),
            str(age["rounds_since_full"]),
            str(age["tokens"]),
            _share(age["top1_agreement"]),
            number(age["kl_nats"], 4),
            number(age["hidden_cosine"], 4),
        ]
        for row in rows
        for age in row["measured"].get("fidelity", {}).get("drift", [])
    ]
    if not cells:
        return ""
    columns = ["policy", "rounds since full", "tokens", "top-1", "KL, nats", "cosine of hidden states"]
    return "<h3>Drift since full verification</h3>" + table(columns, cells)
