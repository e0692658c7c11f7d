"""Parts that every section is built of: its figures, tables, labels and numbers, as HTML or plain data.

Figures are Plotly's JSON; their colours are names such as "@accent", which the page resolves: light, dark or printed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

Json = dict[str, Any]
# Circle and diamond differ in shape and in filling, so that the two are told apart without colour.
SYMBOLS = {True: "circle", False: "diamond-open"}


@dataclass(frozen=True, slots=True)
class Figure:
    """One chart. label: what it shows, for those who cannot see it. narrow: changes to the layout below 560 pixels.

    Traces with a name stand in the legend of a saved image, which has no key beside it.
    """

    name: str
    label: str
    data: list[Json]
    layout: Json
    narrow: Json = field(default_factory=dict)

    def plain(self) -> Json:
        """What the page's script draws."""
        return {"data": self.data, "layout": self.layout, "narrow": self.narrow}


@dataclass(frozen=True, slots=True)
class Section:
    """One section. lead: what it found, in a sentence or two. needs: without data, the command that makes them."""

    name: str
    title: str
    lead: str = ""
    html: str = ""
    figures: tuple[Figure, ...] = ()
    needs: str | None = None

    def to_html(self) -> str:
        """The section as it stands on the page."""
        if self.needs is not None:
            body = f'<p class="needs">No data. Make them with <code>{escape(self.needs)}</code></p>'
        else:
            body = f'<p class="lead">{self.lead}</p>{self.html}'
        kind = "empty" if self.needs is not None else "full"
        return f'<section id="{self.name}" class="{kind}"><h2>{escape(self.title)}</h2>{body}</section>'


def chart(figure: Figure, title: str, note: str = "", kind: str = "chart") -> str:
    """A figure's place on the page, under its own title; the script draws into it. kind: classes of the style sheet."""
    place = f'id="{figure.name}" role="img" aria-label="{escape(figure.label)}"'
    return (
        f'<figure><div class="head"><h3>{title}</h3>{_save(figure)}</div>'
        f'<div class="{kind}" {place} style="height:{figure.layout["height"]}px"></div>'
        + (f"<figcaption>{note}</figcaption>" if note else "")
        + "</figure>"
    )


def _save(figure: Figure) -> str:
    """Buttons that save a chart as an image; the page's script makes it, without a network."""
    buttons = (
        f'<button type="button" data-chart="{figure.name}" data-format="{kind}" '
        f'aria-label="Save {escape(figure.label)} as {kind.upper()}">{kind.upper()}</button>'
        for kind in ("svg", "png")
    )
    return f'<span class="save">{"".join(buttons)}</span>'


def pair(*charts: str) -> str:
    """Charts side by side where there is room."""
    return f'<div class="pair">{"".join(charts)}</div>'


def key(*entries: tuple[str, str]) -> str:
    """A legend: (kind of mark, words); the marks are drawn by the style sheet."""
    marks = "".join(f'<li><i class="mark {kind}"></i>{escape(words)}</li>' for kind, words in entries)
    return f'<ul class="key">{marks}</ul>'


def kind_key(kinds: set[bool]) -> list[tuple[str, str]]:
    """Legend entries of the kinds of policy that a chart shows."""
    return [(word, word) for lossless, word in ((True, "lossless"), (False, "lossy")) if lossless in kinds]


def label(lossless: bool) -> str:
    """The word that stands beside every policy."""
    word = "lossless" if lossless else "lossy"
    return f'<span class="tag {word}">{word}</span>'


def named(name: str, lossless: bool) -> str:
    """A policy in a table."""
    return f'<span class="name">{escape(name)}</span> {label(lossless)}'


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], text: int = 1) -> str:
    """A table of ready HTML cells; the first `text` columns hold words, the others numbers, aligned right."""

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(f'<{tag} class="{"word" if i < text else "num"}">{cell}</{tag}>' for i, cell in enumerate(row))

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table><thead><tr>{cells("th", columns)}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def fold(summary: str, html: str) -> str:
    """Something to open."""
    return f"<details><summary>{escape(summary)}</summary>{html}</details>"


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    """A number, or a dash where there is none."""
    return "–" if value is None else f"{value:.{digits}f}{unit}".replace("-", "−")


def counted(count: int, one: str, several: str) -> str:
    """A count and what is counted."""
    return f"{count:,} {one if count == 1 else several}"


def times(value: float | None) -> str:
    """A speedup."""
    return number(value, 2, "×")


def span(low: float | None, high: float | None) -> str:
    """An interval, or a dash."""
    return "–" if low is None or high is None else f"{low:.2f} to {high:.2f}"


def layout(x: str, y: str, height: int = 320, **more: Any) -> Json:
    """A chart's layout: the x title below, the y title (if any) flat above the axis, and whatever else is given."""
    axis = {"gridcolor": "@grid", "zeroline": False, "linecolor": "@line", "tickcolor": "@line", "automargin": True}
    title = {"text": y, "xref": "paper", "yref": "paper", "x": 0, "y": 1, "xanchor": "left", "yanchor": "bottom"}
    above = {**title, "showarrow": False, "yshift": 8, "font": {"color": "@muted", "size": 13}}
    base: Json = {
        "height": height,
        "margin": {"l": 44, "r": 16, "t": 36 if y else 20, "b": 48},
        "showlegend": False,
        "dragmode": False,
        "hovermode": "closest",
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "@font", "size": 13, "color": "@muted"},
        "hoverlabel": {"bgcolor": "@paper", "bordercolor": "@line", "font": {"family": "@font", "color": "@ink"}},
        "xaxis": {**axis, "showgrid": False, "showline": True, "ticks": "outside", "ticklen": 4},
        "yaxis": {**axis, "showline": False, "ticks": "", "ticklabelstandoff": 8},
    }
    base["xaxis"] |= {"title": {"text": x, "standoff": 10, "font": {"size": 13, "color": "@muted"}}}
    base["xaxis"] |= more.pop("xaxis", {})
    base["yaxis"] |= more.pop("yaxis", {})
    base["annotations"] = ([above] if y else []) + more.pop("annotations", [])
    return base | more


def note(text: str, x: float, y: float, **more: Any) -> Json:
    """Words beside a point of the plot, without an arrow."""
    return {"text": text, "x": x, "y": y, "showarrow": False, "font": {"color": "@muted", "size": 12}, **more}


def rule(x: tuple[float, float], y: tuple[float, float], **more: Any) -> Json:
    """A thin reference line from (x0, y0) to (x1, y1)."""
    line = {"color": "@muted", "width": 1, "dash": "dot"}
    return {"type": "line", "x0": x[0], "x1": x[1], "y0": y[0], "y1": y[1], "line": line, "layer": "below", **more}
