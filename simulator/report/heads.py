"""The head map: how much each head looks at the needle, layers by heads, and which heads were chosen to score keys."""

from typing import Any

from specdial.engine.trace.attention import DRAFT, TARGET, HeadScore
from specdial.simulator.report.inputs import Inputs
from specdial.simulator.report.section import Figure, Json, Section, chart, fold, key, layout, number, table

NEEDS = "specdial heads workload=needle context=4096 out=runs/heads"
TITLE = "Heads that look things up"
SHOWN = 10
WORDS = {TARGET: "the model", DRAFT: "the draft model"}


def section(inputs: Inputs) -> Section:
    """One map a model; chosen heads carry a ring."""
    if not inputs.heads:
        return Section("heads", TITLE, needs=NEEDS)
    choice = (inputs.json("tuned_heads") or {}).get("choice", {})
    sources = [source for source in (TARGET, DRAFT) if any(head.source == source for head in inputs.heads)]
    figures = tuple(
        _map(source, [h for h in inputs.heads if h.source == source], choice.get(source, [])) for source in sources
    )
    top = min((head for head in inputs.heads if head.source == TARGET), key=lambda head: head.rank)
    lead = (
        f"Head {top.head} of layer {top.layer} looks most: {top.needle_mass:.0%} of its attention lies on the needle."
    )
    marks = [("cell", f"attention on the needle, up to {top.needle_mass:.2f}")]
    if choice:
        marks.append(("ring", f"chosen to score keys for partial verification (lossy), {choice['arr']:.2f} recalled"))
    html = key(*marks)
    for source, figure in zip(sources, figures, strict=True):
        html += chart(figure, f"Attention on the needle, {WORDS[source]}")
    html += fold("Best heads", _table(inputs.heads))
    return Section("heads", TITLE, lead, html, figures)


def _map(source: str, heads: list[HeadScore], chosen: list[list[int]]) -> Figure:
    layers, width = max(h.layer for h in heads) + 1, max(h.head for h in heads) + 1
    mass: list[list[float | None]] = [[None] * layers for _ in range(width)]
    for head in heads:
        mass[head.head][head.layer] = head.needle_mass
    data: list[Json] = [
        {
            "type": "heatmap",
            "z": mass,
            "zmin": 0.0,
            "colorscale": [[0, "@cell"], [1, "@accent"]],
            "showscale": False,
            "xgap": 1,
            "ygap": 1,
            "hovertemplate": "layer %{x}, head %{y}<br>%{z:.3f} of its attention on the needle<extra></extra>",
        }
    ]
    if chosen:
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "chosen to score keys",
                "x": [layer for layer, _ in chosen],
                "y": [head for _, head in chosen],
                "marker": {"symbol": "circle-open", "size": 11, "color": "@ink", "line": {"width": 2}},
                "hovertemplate": "layer %{x}, head %{y}: chosen<extra></extra>",
            }
        )
    drawn = layout(
        "layer",
        "head",
        height=max(180, min(100 + 18 * width, 560)),
        xaxis={"showline": False, "ticks": "", "range": [-0.5, layers - 0.5], "tick0": 0, "dtick": 1 + layers // 12},
        yaxis={"showgrid": False, "range": [width - 0.5, -0.5], "tick0": 0, "dtick": 1 + width // 12},
    )
    return Figure(f"chart-heads-{source}", f"Attention on the needle by layer and head, {WORDS[source]}", data, drawn)


def _table(heads: tuple[HeadScore, ...]) -> str:
    best = sorted((h for h in heads if h.rank <= SHOWN), key=lambda h: (h.source != TARGET, h.rank))
    rows: list[list[Any]] = [
        [WORDS[h.source], str(h.rank), str(h.layer), str(h.head), number(h.needle_mass, 3), f"{h.copy_frac:.0%}"]
        for h in best
    ]
    return table(["", "rank", "layer", "head", "needle mass", "copies"], rows)
