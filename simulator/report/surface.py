"""The policy surface: what is best at each context and batch, k = 0 (plain decoding) hatched.

Two of them: the policies that a search composed, and the best fixed draft length by recorded acceptance.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from specdial.simulator.report.inputs import Inputs
from specdial.simulator.report.section import Figure, Json, Section, chart, key, label, layout, note, times
from specdial.simulator.report.study import searches_lossy

NEEDS = "specdial replay trace=runs/book costs=runs/costs inversion=true out=runs/replay"
TITLE = "Where drafting pays"
INK = {"color": "@ink", "size": 13}


@dataclass(frozen=True, slots=True)
class Tile:
    """One cell. name: what is best there. guessed: from what was not measured, or not recorded, at this very place."""

    context_tokens: int
    batch: int
    name: str
    speedup: float
    drafts: bool
    guessed: bool

    @property
    def star(self) -> str:
        return "*" if self.guessed else ""


def section(inputs: Inputs) -> Section:
    """A heat map for each, context by batch."""
    composed = _composed(inputs.json("tune") or {})
    fixed = _fixed((inputs.json("replay") or {}).get("surface", []))
    if not composed and not fixed:
        return Section("surface", TITLE, needs=NEEDS)
    tiles = composed or fixed
    paying = [tile for tile in tiles if tile.drafts and tile.speedup > 1.0]
    lead = f"Drafting pays at {len(paying)} of {len(tiles)} places"
    if paying:
        best = max(paying, key=lambda tile: tile.speedup)
        lead += f"; most, {times(best.speedup)} with {escape(best.name)}, at {_where(best)}"
    lead += "." + _verdict(inputs.json("tune") or {})
    marks = [("cell soft", "speedup, from 1× up")]
    if not all(tile.drafts for tile in (*composed, *fixed)):
        marks.append(("hatch", "k = 0: plain decoding is best"))
    if any(tile.guessed for tile in (*composed, *fixed)):
        marks.append(("star", "from costs or acceptance of other contexts"))
    figures, html, lossy = [], key(*marks), searches_lossy(inputs.json("tune") or {})
    if composed:
        figures.append(_figure("chart-composed", composed))
        html += _kinds(lossy) + chart(
            figures[-1], f"Policy by context and batch, as the search chose it{_all(not lossy)}"
        )
    if fixed:
        figures.append(_figure("chart-fixed", fixed))
        caption = "Acceptance is as recorded, whatever the context: this shows where costs turn, not where text does."
        html += chart(figures[-1], f"Best fixed k by context and batch{_all(True)}", caption)
    return Section("surface", TITLE, lead, html, tuple(figures))


def _kinds(lossy: bool) -> str:
    """What kinds of policy a composed surface may be of."""
    words = f"Policies here may be {label(True)} or {label(False)}: their names say how they verify"
    return f'<p class="kinds">{words}</p>' if lossy else ""


def _all(lossless: bool) -> str:
    """Behind a title, which goes with a saved image too."""
    return ": all lossless" if lossless else ""


def _composed(study: dict[str, Any]) -> list[Tile]:
    """The surface, or the single policy that is the choice where a surface saves nothing."""
    surface = study.get("surface") or {}
    found = []
    for c in surface.get("cells", []):
        k_max = c["k_max"] if surface["pays"] else surface["single_k_max"]
        name, speedup = (c["policy"], c["speedup"]) if surface["pays"] else (surface["single"], c["single_speedup"])
        at = (c["context_tokens"], c["batch"])
        found.append(Tile(*at, name if k_max else "k = 0", speedup, k_max > 0, c["moved"]))
    return found


def _fixed(corners: Sequence[dict[str, Any]]) -> list[Tile]:
    return [
        Tile(c["context_tokens"], c["batch"], f"k = {c['k']}", c["speedup"], c["k"] > 0, c["extrapolated"])
        for c in corners
    ]


def _verdict(study: dict[str, Any]) -> str:
    """Whether composing gains anything over one policy for all places."""
    surface = study.get("surface")
    if not surface:
        return ""
    single = escape(surface["single"])
    if surface["pays"]:
        return f" Over every place alike, the surface saves {surface['gain_frac']:.1%} of the time of {single} alone."
    return f" Over every place alike, a surface saves nothing: {single} alone is the choice."


def _words(tile: Tile | None) -> str:
    """In a cell: the name on two lines, so that it fits on a phone, and the speedup."""
    if tile is None or not tile.drafts:
        return ""
    return f"{tile.name.replace('-', '<br>', 1)}<br>{times(tile.speedup)}{tile.star}"


def _where(tile: Tile) -> str:
    return f"{tile.context_tokens:,} tokens, batch {tile.batch}"


def _figure(name: str, tiles: Sequence[Tile]) -> Figure:
    contexts = sorted({tile.context_tokens for tile in tiles})
    batches = sorted({tile.batch for tile in tiles})
    found = {(tile.context_tokens, tile.batch): tile for tile in tiles}
    grid = [[found.get((context, batch)) for context in contexts] for batch in batches]
    hatched = [(i, j, t) for j, row in enumerate(grid) for i, t in enumerate(row) if t is not None and not t.drafts]
    cells: Json = {
        "type": "heatmap",
        "x": list(range(len(contexts))),
        "y": list(range(len(batches))),
        "z": [[None if tile is None else tile.speedup for tile in row] for row in grid],
        "zmin": 1.0,
        "zmax": max(max(tile.speedup for tile in tiles), 1.05),
        "colorscale": [[0, "@cell"], [1, "@accent-soft"]],  # words are read on all of it
        "showscale": False,
        "xgap": 3,
        "ygap": 3,
        "text": [[_words(tile) for tile in row] for row in grid],
        "texttemplate": "%{text}",
        "textfont": {**INK, "family": "@font"},
        "customdata": [[f"{_where(t)}<br>{t.name}<br>{t.speedup:.3f}×" if t else "" for t in row] for row in grid],
        "hovertemplate": "%{customdata}<extra></extra>",
        "hoverongaps": False,
    }
    hatch: Json = {
        "type": "bar",
        "name": "k = 0: plain decoding is best",
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
    words = [note(f"k = 0{t.star}", i, j, bgcolor="@cell", borderpad=3, font=INK) for i, j, t in hatched]
    drawn = layout(
        "context, tokens",
        "batch",
        annotations=words,
        height=96 + 60 * len(batches),
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
    label_ = "What is best, and its speedup, for each context length and batch size"
    return Figure(name, label_, [cells, *([hatch] if hatched else [])], drawn)
