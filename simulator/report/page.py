"""One self-contained HTML page of every section: Plotly's script, the figures, styles and data are all in it.

Its content policy forbids the network altogether.
"""

import importlib.util
import json
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

from specdial.policies.errors import UserError
from specdial.simulator.report import breakdown, entropy, foot, front, heads, inversion, lossy, measured, surface
from specdial.simulator.report.inputs import Inputs
from specdial.simulator.report.section import Section, number, span, times
from specdial.simulator.report.theme import DARK, FONT, LIGHT, variables

SECTIONS: dict[str, Callable[[Inputs], Section]] = {
    "breakdown": breakdown.section,
    "inversion": inversion.section,
    "entropy": entropy.section,
    "surface": surface.section,
    "front": front.section,
    "measured": measured.section,
    "lossy": lossy.section,
    "heads": heads.section,
    "provenance": foot.section,
}
HERE = Path(__file__).parent
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def build_page(inputs: Inputs) -> tuple[str, list[Section]]:
    """The page, and the sections on it.

    Raises UserError when the plotly package, whose script it holds, is missing, and where a file lacks what it should
    hold: changed by hand, or another version's.
    """
    script = plotly_script()
    sections = [_made(name, inputs) for name in SECTIONS]
    figures = {figure.name: figure.plain() for section in sections for figure in section.figures}
    data = {"figures": figures, "themes": {"light": LIGHT, "dark": DARK}, "font": FONT}
    title = f"specdial: {_model_name(inputs)}"
    links = "".join(f'<a class="{_kind(s)}" href="#{s.name}">{escape(s.title)}</a>' for s in sections)
    page = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{escape(title)}</title>
<style>{_style()}</style>
</head>
<body>
<main>
<header>{_header(inputs)}<nav aria-label="Sections">{links}</nav></header>
{"".join(section.to_html() for section in sections)}
<noscript><p>The charts need JavaScript; the tables hold the same numbers.</p></noscript>
</main>
<script type="application/json" id="figures">{_inert(json.dumps(data, allow_nan=False))}</script>
<script>{script}</script>
<script>{(HERE / "page.js").read_text("utf-8")}</script>
</body>
</html>
"""
    return page, sections


def _made(name: str, inputs: Inputs) -> Section:
    try:
        return SECTIONS[name](inputs)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        files = ", ".join(str(source.path) for source in inputs.sources.values())
        cause = f"no section {name} can be made of {files}: {type(error).__name__} {error}"
        raise UserError(cause, "make these files again with this version") from error


def plotly_script() -> str:
    """The text of plotly.js as the plotly package ships it; the package itself is not imported."""
    found = importlib.util.find_spec("plotly")
    if found is None or not found.submodule_search_locations:
        raise UserError("the report needs plotly, which is not installed", "pip install 'plotly>=5.24'")
    script = Path(found.submodule_search_locations[0]) / "package_data" / "plotly.min.js"
    try:
        return script.read_text(encoding="utf-8").replace("</script", "<\\/script")
    except OSError:
        raise UserError("the installed plotly has no plotly.min.js", "pip install --force-reinstall plotly") from None


def _inert(text: str) -> str:
    """JSON that cannot end the script element it stands in."""
    return text.replace("<", "\\u003c")


def _kind(section: Section) -> str:
    return "empty" if section.needs is not None else "full"


def _style() -> str:
    dark = f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {variables(DARK)} }} }}"
    return f":root {{ {variables(LIGHT)} --font: {FONT}; }} {dark}\n{(HERE / 'page.css').read_text('utf-8')}"


def _header(inputs: Inputs) -> str:
    model = inputs.model
    about = [part for part in (_workload(inputs), _hardware(inputs), str(model.get("dtype") or "")) if part]
    caveats = inputs.caveats()
    warning = f'<p class="warn">Read with care: {escape(", ".join(caveats))}.</p>' if caveats else ""
    facts = "".join(f"<div><dt>{name}</dt>{value}</div>" for name, value in _facts(inputs))
    return (
        f'<p class="kicker">specdial report</p><h1>{escape(_model_name(inputs))}</h1>'
        f'<p class="about">{escape(" · ".join(about))}</p>{warning}<dl class="facts">{facts}</dl>'
    )


def _model_name(inputs: Inputs) -> str:
    """Its name, of a path the last part; the whole path stands in the provenance."""
    return str(inputs.model["name"]).rstrip("/").rsplit("/", 1)[-1]


def _workload(inputs: Inputs) -> str:
    for kind in ("trace", "validation"):
        workload = (inputs.json(kind) or {}).get("workload") or {}
        if workload.get("kind"):
            context = f", {workload['context_tokens']:,} tokens" if workload.get("context_tokens") else ""
            return f"{workload['kind']}{context}"
    return ""


def _hardware(inputs: Inputs) -> str:
    return str(inputs.hardware.get("name") or inputs.hardware.get("device") or "")


def _facts(inputs: Inputs) -> list[tuple[str, str]]:
    """The few numbers that answer what this page is opened for."""
    facts = []
    study, validation = inputs.json("tune"), inputs.json("validation")
    if study is not None:
        best = study["best"]
        kind = "lossless" if best["lossless"] else "lossy"
        facts.append(("tuned policy", _words(best["name"], f"{kind}, {best['level']}")))
        facts.append(("predicted", _value(times(best["speedup"]), _interval(best))))
    if validation is not None:
        for lossless, word in ((True, "lossless"), (False, "lossy")):
            rows = [row for row in validation["policies"] if row["lossless"] is lossless]
            if rows:
                top = max(rows, key=lambda row: row["measured"]["speedup"])
                facts.append((f"measured, best {word}", _value(times(top["measured"]["speedup"]), top["name"])))
    record = inputs.record
    if record is not None:
        rounds = record.trace.rounds
        emitted = float(sum(rounds["emitted"].to_pylist())) / rounds.num_rows
        facts.append(("tokens per recorded round", _value(number(emitted), f"{len(record.documents)} documents")))
    gbps = (study or inputs.json("replay") or {}).get("plain_gbps")
    if gbps:
        facts.append(("plain decoding moves", _value(f"{gbps:.1f}", "GB/s of weights, keys and values")))
    return facts


def _interval(outcome: dict[str, Any]) -> str:
    known = outcome["low"] is not None and outcome["high"] is not None
    return span(outcome["low"], outcome["high"]) if known else "no interval"


def _value(value: str, below: str) -> str:
    return f"<dd>{escape(value)}<small>{escape(below)}</small></dd>"


def _words(value: str, below: str) -> str:
    return f'<dd class="words">{escape(value)}<small>{escape(below)}</small></dd>'
