"""The policy surface: the best fixed draft length at each context and batch, k = 0 (plain decoding) hatched."""

from typing import Any

from specdial.simulator.report.inputs import Inputs
from specdial.simulator.report.section import Figure, Json, Section, chart, key, label, layout, note, times

NEEDS = "specdial replay trace=runs/book costs=runs/costs inversion=true out=runs/replay"
TITLE = "Where drafting pays"
Corner = dict[str, Any]
INK = {"color": "@ink", "size": 14}


def section(inputs: Inputs) -> Section:
    """A heat map, context by batch."""
    corners: list[Corner] = (inputs.json("replay") or {}).get("surface", [])
    if not corners:
        return Section("surface", TITLE, needs=NEEDS)
    paying = [corner for corner in corners if corner["k"]]
    best = max(corners, key=lambda corner: corner["speedup"])
    lead = f"Drafting pays at {len(paying)} of {len(corners)} measured corners of context and batch"
    lead += (
        f"; at best {times(best['speedup'])} with k = {best['k']} at {best['context_tokens']:,} tokens, "
        f"batch {best['batch']}."
        if paying
        else ": plain decoding is best at all of them."
    )
    figure = _figure(corners)
    marks = [("cell", "speedup, from 1× up"), ("hatch", "k = 0: plain decoding is best")]
    if any(corner["extrapolated"] for corner in corners):
        marks.append(("star", "some cost lies outside what was measured"))
    caption = "Acceptance is as recorded, whatever the context: the map shows where costs turn, not where text does."
    html = f'<p class="kinds">Every policy here is {label(True)}</p>' + key(*marks)
    html += chart(figure, "Best fixed k by context and batch", caption)
    return Section("surface", TITLE, lead, html, (figure,))


def _figure(corners: list[Corner]) -> Figure:
    contexts = sorted({corner["context_tokens"] for corner in corners})
    batches = sorted({corner["batch"] for corner in corners})
    found = {(corner["context_tokens"], corner["batch"]): corner for corner in corners}
    grid = [[found.get((context, batch)) for context in contexts] for batch in batches]
    top = max(max(corner["speedup"] for corner in corners), 1.05)
    cells: Json = {
        "type": "heatmap",
        "x": list(range(len(contexts))),
        "y": list(range(len(batches))),
        "z": [[None if corner is None else corner["speedup"] for corner in row] for row in grid],
        "zmin": 1.0,
        "zmax": top,
        "colorscale": [[0, "@cell"], [1, "@accent"]],
        "showscale": False,
        "xgap": 3,
        "ygap": 3,
        "text": [[_text(corner) for corner in row] for row in grid],
        "texttemplate": "%{text}",
        "textfont": {"family": "@font", "size": 14},
        "customdata": [[_hover(corner) for corner in row] for row in grid],
        "hovertemplate": "%{customdata}<extra></extra>",
        "hoverongaps": False,
    }
    hatched = [(i, j, c["extrapolated"]) for j, row in enumerate(grid) for i, c in enumerate(row) if c and not c["k"]]
    hatch: Json = {
        "type": "bar",
        "x": [i for i, _, _ in hatched],
        "base": [j - 0.47 for _, j, _ in hatched],
        "y": [0.94] * len(hatched),
        "width": [0.97] * len(hatched),
        "marker": {
            "color": "rgba(0,0,0,0)",
            "line": {"width": 0},
            "pattern": {"shape": "/", "fgcolor": "@hatch", "bgcolor": "rgba(0,0,0,0)", "size": 8, "solidity": 0.12},
        },
        "hoverinfo": "skip",
    }
    words = [
        note(f"k = 0{'*' if extrapolated else ''}", i, j, bgcolor="@cell", borderpad=3, font=INK)
        for i, j, extrapolated in hatched
    ]
    drawn = layout(
        "context, tokens",
        "batch",
        annotations=words,
        height=96 + 56 * len(batches),
        xaxis={
            "tickvals": list(range(len(contexts))),
            "ticktext": [f"{context:,}" for context in contexts],
            "range": [-0.5, len(contexts) - 0.5],
            "showline": False,
            "ticks": "",
        },
        yaxis={
            "tickvals": list(range(len(batches))),
            "ticktext": [str(batch) for batch in batches],
            "range": [-0.5, len(batches) - 0.5],
            "showgrid": False,
        },
        bargap=0,
    )
    label_ = "Best draft length and its speedup for each context length and batch size"
    return Figure("chart-surface", label_, [cells, *([hatch] if hatched else [])], drawn)


def _text(corner: Corner | None) -> str:
    if corner is None:
        return ""
    star = "*" if corner["extrapolated"] else ""
    return f"k = {corner['k']}<br>{corner['speedup']:.2f}×{star}" if corner["k"] else ""


def _hover(corner: Corner | None) -> str:
    if corner is None:
        return ""
    drafter = f", {corner['drafter']}, {corner['budget']} keys" if corner["k"] else ""
    where = f"{corner['context_tokens']:,} tokens, batch {corner['batch']}"
    return f"{where}<br>k = {corner['k']}{drafter}<br>{corner['speedup']:.3f}×, lossless"
