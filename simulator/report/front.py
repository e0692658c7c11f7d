"""The Pareto front of a search: speed against the bytes of keys and values that a token costs to read.

Lossless and lossy policies have fronts of their own: neither is ever ranked with the other.
"""

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
    kind_key,
    layout,
    named,
    number,
    rule,
    span,
    table,
    times,
)
from specdial.simulator.report.study import is_lossless

NEEDS = "specdial tune trace=runs/book costs=runs/costs out=runs/tune"
TITLE = "What the search found"
Tried = dict[str, Any]  # of study.json, and whether it is lossless


def section(inputs: Inputs) -> Section:
    """Everything tried, the fronts, and the policies that were written."""
    study = inputs.json("tune")
    if study is None:
        return Section("front", TITLE, needs=NEEDS)
    tried = [
        {**t, "lossless": is_lossless(study, t)}
        for t in study["tried"]
        if t["values"]["train"].get("speedup") is not None
    ]
    kinds = {t["lossless"] for t in tried}
    figure = _figure(tried)
    best, selected = study["best"], study["selected_on"]
    lead = f"{study['trials']:,} trials, {len(tried):,} different policies that could be priced. "
    lead += (
        f"The choice, {escape(best['name'])}, is predicted at {times(best['speedup'])} on {selected} documents."
        if study["pays"]
        else _does_not_pay(study)
    )
    marks = [("line", "front"), ("dot faint", "other policies tried"), *kind_key(kinds)]
    caption = f"Speedups on train documents; the choice was made on {selected} documents. Hover for settings."
    html = key(*marks) + chart(figure, "Speedup against KV read per token", caption) + _table(study)
    return Section("front", TITLE, lead, html, (figure,))


def _does_not_pay(study: dict[str, Any]) -> str:
    crossover = study["crossover"]
    text = "Speculation does not pay here: the choice is k = 0, plain decoding."
    if crossover is not None:
        text += (
            f" The best drafting policy, {escape(crossover['policy'])}, is predicted at "
            f"{times(crossover['speedup'])}; it would break even at gamma {crossover['gamma_needed']:.2f}, "
            f"measured {crossover['gamma']:.2f}."
        )
    return text


def fronts(tried: list[Tried]) -> dict[bool, list[Tried]]:
    """{lossless: the tried policies of that kind that no other of it beats in both objectives, fastest first}."""
    found: dict[bool, list[Tried]] = {}
    for t in sorted(
        tried, key=lambda t: (-t["values"]["train"]["speedup"], t["values"]["train"]["kv_bytes_per_token"])
    ):
        front = found.setdefault(t["lossless"], [])
        if not front or _megabytes(t) < _megabytes(front[-1]):
            front.append(t)
    return found


def _megabytes(tried: Tried) -> float:
    return float(tried["values"]["train"]["kv_bytes_per_token"]) / 1e6


def _place(tried: Tried) -> tuple[str, int | None]:
    """What tells one tried policy from another: it is tried again at every batch. Studies of before have none."""
    return tried["policy_digest"], tried.get("batch")


def _figure(tried: list[Tried]) -> Figure:
    data: list[Json] = []
    front = fronts(tried)
    members = {_place(t) for each in front.values() for t in each}
    for lossless in (True, False):
        rest = [t for t in tried if t["lossless"] is lossless and _place(t) not in members]
        if rest:
            data.append(_points(rest, lossless, "@faint", 5) | {"name": f"{_kind(lossless)}, others tried"})
        if front.get(lossless):
            line = {"color": "@accent", "width": 2, "shape": "hv", "dash": "solid" if lossless else "dash"}
            drawn_ = {"mode": "lines+markers", "line": line, "name": f"{_kind(lossless)}, front"}
            data.append(_points(front[lossless], lossless, "@accent", 9) | drawn_)
    drawn = layout(
        "keys and values read per token, MB",
        "",
        height=380,
        yaxis={"tickformat": ".2f", "ticksuffix": "×"},
        shapes=[rule((0, 1), (1.0, 1.0), xref="paper")],
        annotations=[
            {
                "text": "plain decoding",
                "xref": "paper",
                "x": 1,
                "y": 1.0,
                "xanchor": "right",
                "yanchor": "bottom",
                "showarrow": False,
                "font": {"color": "@muted", "size": 12},
            }
        ],
    )
    label_ = "Predicted speedup against bytes of keys and values read per token, for every policy tried"
    return Figure("chart-front", label_, data, drawn)


def _kind(lossless: bool) -> str:
    return "lossless" if lossless else "lossy"


def _points(tried: list[Tried], lossless: bool, color: str, size: int) -> Json:
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [_megabytes(t) for t in tried],
        "y": [t["values"]["train"]["speedup"] for t in tried],
        "customdata": [_hover(t) for t in tried],
        "marker": {"symbol": SYMBOLS[lossless], "size": size, "color": color, "line": {"width": 1.5, "color": color}},
        "hovertemplate": "%{customdata}<br>%{y:.3f}×, %{x:.1f} MB<extra></extra>",
    }


def _hover(tried: Tried) -> str:
    batch = [f"batch {tried['batch']}"] if "batch" in tried and "batch" not in tried["params"] else []
    settings = [escape(f"{name} {_value(value)}", quote=False) for name, value in tried["params"].items()]
    return "<br>".join([f"{_kind(tried['lossless'])}, {tried['level']}", *settings, *batch])


def _value(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _table(study: dict[str, Any]) -> str:
    shown = {"best": study["best"], "best fixed k": study["best_fixed"]}
    rows = [
        [
            part,
            named(o["name"], o["lossless"]),
            o["level"],
            times(o["speedup"]),
            span(o["low"], o["high"]),
            number(o["tokens_per_round"]),
            number(o["alpha"]),
            number(o["gamma"]),
            number(o["k"], 1),
        ]
        for part, o in shown.items()
    ]
    columns = ["", "policy", "level", "speedup", "95 %", "tokens/round", "alpha", "gamma", "k"]
    return table(columns, rows, text=3)
