"""Predicted against measured: every validated policy, the intervals of both, and how wrong predictions were."""

from html import escape
from typing import Any

from specdial.simulator.report.inputs import Inputs
from specdial.simulator.report.section import (
    SYMBOLS,
    Figure,
    Json,
    Section,
    chart,
    counted,
    key,
    kind_key,
    layout,
    named,
    number,
    rule,
    span,
    table,
    times,
)

NEEDS = "specdial validate policy=runs/tune/policies workload=book split=test out=runs/validation"
TITLE = "Predicted and measured"
Row = dict[str, Any]


def section(inputs: Inputs) -> Section:
    """A scatter with both intervals about the diagonal, and the table behind it."""
    validation = inputs.json("validation")
    if validation is None:
        return Section("measured", TITLE, needs=NEEDS)
    rows: list[Row] = sorted(validation["policies"], key=lambda row: (not row["lossless"], -row["measured"]["speedup"]))
    known = [row for row in rows if row["predicted"].get("speedup") is not None]
    figures = [_figure(known)] if known else []
    html = ""
    for figure in figures:
        html += key(*kind_key({row["lossless"] for row in known}), ("line dotted", "measured = predicted"))
        caption = "Bars: 95 % intervals over documents. On the diagonal a prediction is exact."
        html += chart(figure, "Measured against predicted speedup", caption, "chart square")
    return Section("measured", TITLE, _lead(validation, rows), html + _table(rows), tuple(figures))


def _lead(validation: dict[str, Any], rows: list[Row]) -> str:
    documents = len(validation["documents"])
    text = f"{counted(len(rows), 'policy', 'policies')} on {documents} {escape(validation['split'])} documents, "
    text += f"batch {validation['batch']}. "
    if validation["median_error_frac"] is not None:
        text += (
            f"Predictions were off by {validation['median_error_frac']:.1%} (median), "
            f"{validation['worst_error_frac']:.1%} at worst. "
            f"The policy predicted fastest is {validation['regret']:.1%} slower than the one measured fastest."
        )
    differing = [row for row in rows if row["lossless"] and row["measured"]["documents_differing_from_plain"]]
    if differing:
        text += f" Of the lossless policies {len(differing)} wrote a text that differs from plain decoding's."
    return text


def _figure(rows: list[Row]) -> Figure:
    data = [_points([r for r in rows if r["lossless"] is kind], kind) for kind in (True, False)]
    ends = [end for row in rows for part in ("predicted", "measured") for end in _ends(row[part])]
    low, high = min(ends), max(ends)
    room = 0.06 * max(high - low, 0.1)
    limits = [low - room, high + room]
    drawn = layout(
        "predicted speedup",
        "",
        height=400,
        xaxis={"range": limits, "tickformat": ".2f", "ticksuffix": "×"},
        yaxis={"range": limits, "tickformat": ".2f", "ticksuffix": "×"},
        shapes=[rule((limits[0], limits[1]), (limits[0], limits[1]))],
    )
    label_ = "Measured against predicted speedup of every validated policy"
    return Figure("chart-measured", label_, [part for part in data if part["x"]], drawn, {"height": 340})


def _ends(part: dict[str, Any]) -> list[float]:
    return [part[name] for name in ("speedup", "low", "high") if part.get(name) is not None]


def _points(rows: list[Row], lossless: bool) -> Json:
    kind = "lossless" if lossless else "lossy"
    return {
        "type": "scatter",
        "mode": "markers",
        "name": kind,
        "x": [row["predicted"]["speedup"] for row in rows],
        "y": [row["measured"]["speedup"] for row in rows],
        "error_x": _bars([row["predicted"] for row in rows]),
        "error_y": _bars([row["measured"] for row in rows]),
        "customdata": [f"{row['name']}, {kind}" for row in rows],
        "marker": {
            "symbol": SYMBOLS[lossless],
            "size": 9,
            "color": "@accent",
            "opacity": 1,
            "line": {"width": 1.5, "color": "@accent"},
        },
        "hovertemplate": "%{customdata}<br>predicted %{x:.3f}×<br>measured %{y:.3f}×<extra></extra>",
    }


def _bars(parts: list[dict[str, Any]]) -> Json:
    def reach(part: dict[str, Any], name: str, sign: float) -> float:
        return 0.0 if part.get(name) is None else max(0.0, sign * (part[name] - part["speedup"]))

    return {
        "type": "data",
        "symmetric": False,
        "array": [reach(part, "high", 1.0) for part in parts],
        "arrayminus": [reach(part, "low", -1.0) for part in parts],
        "color": "@accent-soft",
        "thickness": 1.5,
        "width": 0,
    }


def _table(rows: list[Row]) -> str:
    lossy = any(not row["lossless"] for row in rows)
    columns = ["policy", "predicted", "95 %", "measured", "95 %", "error", "tokens/round", "alpha", "k", "= plain"]
    columns += ["top-1", "same text"] if lossy else []
    return table(columns, [_cells(row, lossy) for row in rows], text=1)


def _cells(row: Row, lossy: bool) -> list[str]:
    predicted, measured = row["predicted"], row["measured"]
    cells = [
        named(row["name"], row["lossless"]),
        times(predicted.get("speedup")),
        span(predicted.get("low"), predicted.get("high")),
        times(measured["speedup"]),
        span(measured["low"], measured["high"]),
        "–" if row["error_frac"] is None else f"{row['error_frac']:+.1%}".replace("-", "−"),
        number(measured["tokens_per_round"]),
        number(measured["alpha"]),
        number(measured["k"], 1),
        _same(measured["documents_differing_from_plain"]),
    ]
    if lossy:
        found = measured.get("fidelity") or {}
        cells += [_share(found.get(name)) for name in ("top1_agreement", "token_agreement")]
    return cells


def _same(differing: int | None) -> str:
    return "–" if differing is None else "yes" if differing == 0 else f"{differing} differ"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"
