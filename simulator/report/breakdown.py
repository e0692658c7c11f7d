"""Where a token's time goes: draft, verify, select, host, or a plain step; recorded rounds beside replayed policies."""

from dataclasses import dataclass, replace
from html import escape
from typing import Any

from specdial.policies.schema import policy_from_mapping
from specdial.simulator.pricing import TERMS
from specdial.simulator.replay import replay
from specdial.simulator.report.inputs import Inputs
from specdial.simulator.report.section import (
    Figure,
    Json,
    Section,
    chart,
    key,
    layout,
    named,
    number,
    rule,
    table,
    times,
)

NEEDS = "specdial replay trace=runs/book costs=runs/costs policy=runs/tune/policies out=runs/replay"
MOST_BARS = 12
END = "<extra></extra>"  # no second box beside the hover text
WORDS = {
    "draft": "draft",
    "verify": "verify",
    "select": "select keys",
    "host": "host",
    "plain": "plain step",
    "verify_partial": "partial verify",
    "refresh": "correct keys",
    "transfer": "wait for keys",
}


@dataclass(frozen=True, slots=True)
class Bar:
    """One policy's time. breakdown: microseconds per token by term. at: which batch, where that must be said."""

    name: str
    lossless: bool
    source: str
    breakdown: dict[str, float]
    speedup: float | None
    us_per_token: float
    batch: int
    at: str = ""

    @property
    def label(self) -> str:
        """Its name, and its batch where that must be said."""
        return self.name + self.at


def section(inputs: Inputs) -> Section:
    """Stacked bars, lossless policies first, then the fastest."""
    bars, left_out = _bars(inputs)
    if not bars:
        return Section("breakdown", TITLE, needs=NEEDS)
    drafting = [bar for bar in bars if bar.breakdown.get("draft") and bar.lossless]
    lead = "No lossless policy here drafts."
    if drafting:
        best = drafting[0]
        largest = max(best.breakdown, key=lambda term: best.breakdown[term])
        share = best.breakdown[largest] / best.us_per_token
        lead = f"A token of the fastest lossless policy that drafts, {escape(best.label)}, "
        lead += f"takes {best.us_per_token / 1e3:.3g} ms; {share:.0%} of that is {WORDS[largest]}."
    marks = [(_color(term), WORDS[term]) for term in TERMS if any(bar.breakdown.get(term) for bar in bars)]
    figure = _figure(bars)
    caption = ""
    if left_out is not None:
        caption = f"The recorded rounds are left out: they are at batch {left_out}, and no policy here is."
    html = key(*marks) + chart(figure, "Time per token, ms", caption) + _table(bars)
    return Section("breakdown", TITLE, lead, html, (figure,))


TITLE = "Where the time of a token goes"


def _bars(inputs: Inputs) -> tuple[list[Bar], int | None]:
    """The bars, and the recorded rounds' batch where no other is at it: they are left out then."""
    found: list[Bar] = []
    study = inputs.json("tune") or {}
    replayed = [*(inputs.json("replay") or {}).get("outcomes", [])]
    replayed += [study[name] for name in ("best", "best_fixed") if study.get(name)]  # a round's parts, pay or not
    names: set[tuple[str, int]] = set()
    for outcome in sorted(replayed, key=lambda o: o["us_per_token"] or 0.0):
        if outcome["breakdown"] and (outcome["name"], outcome["batch"]) not in names:
            names.add((outcome["name"], outcome["batch"]))
            found.append(_bar(outcome, "replayed"))
    recorded, left_out = _recorded(inputs), None
    if recorded is not None:
        if found and recorded.batch not in {bar.batch for bar in found}:
            left_out = recorded.batch
        else:
            found = [recorded, *found]
    if {bar.batch for bar in found} - {1}:
        found = [replace(bar, at=f", batch {bar.batch}") for bar in found]
    found.sort(key=_order)
    always = [bar for bar in found if bar.source == "recorded" or not bar.breakdown.get("draft")]
    fastest = [bar for bar in found if bar not in always][: max(MOST_BARS - len(always), 1)]
    return sorted(always + fastest, key=_order), left_out


def _order(bar: Bar) -> tuple[bool, float]:
    """Lossless policies are never ranked with lossy ones."""
    return not bar.lossless, bar.us_per_token


def _recorded(inputs: Inputs) -> Bar | None:
    """The rounds of the trace itself: a replay of the recorded policy costs its recorded time. None where refused."""
    if inputs.record is None:
        return None
    trace = inputs.record.trace
    policy = policy_from_mapping({"name": "recorded", **trace.meta["policy"]})
    batch = max(trace.rounds["batch"].to_pylist())
    outcome = replay(inputs.record, inputs.costs, [policy], None, batch, bootstrap=0)[0]
    return _bar(outcome.plain(), "recorded") if outcome.breakdown else None


def _bar(outcome: dict[str, Any], source: str) -> Bar:
    return Bar(
        outcome["name"],
        outcome["lossless"],
        source,
        outcome["breakdown"],
        outcome["speedup"],
        outcome["us_per_token"],
        outcome["batch"],
    )


def _figure(bars: list[Bar]) -> Figure:
    rows = list(range(len(bars)))[::-1]
    data: list[Json] = []
    for term in TERMS:
        values = [bar.breakdown.get(term, 0.0) / 1e3 for bar in bars]
        if not any(values):
            continue
        shares = [bar.breakdown.get(term, 0.0) / bar.us_per_token for bar in bars]
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": WORDS[term],
                "x": values,
                "y": rows,
                "customdata": [[bar.label, share] for bar, share in zip(bars, shares, strict=True)],
                "marker": {"color": f"@{_color(term)}", "line": {"color": "@paper", "width": 1}},
                "hovertemplate": f"%{{customdata[0]}}<br>{WORDS[term]} %{{x:.2f}} ms, %{{customdata[1]:.0%}}{END}",
            }
        )
    plain = next((bar.us_per_token for bar in bars if not bar.breakdown.get("draft")), None)
    plain = plain if len({bar.batch for bar in bars}) == 1 else None  # one line is of one batch
    ticks = [f"{bar.label}, {'lossless' if bar.lossless else 'lossy'}" for bar in bars]
    drawn = layout(
        "",
        "",
        height=64 + 30 * len(bars),
        barmode="stack",
        bargap=0.35,
        yaxis={"tickvals": rows, "ticktext": ticks, "showgrid": False, "tickfont": {"color": "@ink", "size": 13}},
        xaxis={"showgrid": True, "rangemode": "tozero", "showline": False, "ticks": ""},
        margin={"l": 8, "r": 16, "t": 8, "b": 32},
        shapes=[] if plain is None else [rule((plain / 1e3,) * 2, (-0.6, len(bars) - 0.4))],
    )
    narrow = {"yaxis": {"ticktext": [_short(bar.name) + bar.at for bar in bars], "tickfont": {"size": 11}}}
    return Figure("chart-breakdown", "Time per token by part, for each policy", data, drawn, narrow)


def _color(term: str) -> str:
    return f"term-{term.replace('_', '-')}"


def _short(name: str) -> str:
    return name if len(name) <= 16 else f"{name[:15]}…"


def _table(bars: list[Bar]) -> str:
    terms = [term for term in TERMS if any(bar.breakdown.get(term) for bar in bars)]
    rows = [
        [
            named(bar.label, bar.lossless),
            bar.source,
            *(number(bar.breakdown.get(term, 0.0) / 1e3 or None) for term in terms),
            number(bar.us_per_token / 1e3),
            times(bar.speedup),
        ]
        for bar in bars
    ]
    columns = ["policy", "time", *(WORDS[term] for term in terms), "ms per token", "speedup"]
    return table(columns, rows, text=2)
