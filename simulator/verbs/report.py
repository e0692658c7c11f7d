"""`report`: one HTML page of what other verbs wrote, and beside it the timeline of a trace's rounds for Perfetto."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdial.policies.artifact import write_text_atomic
from specdial.policies.errors import UserError
from specdial.policies.fields import parse
from specdial.simulator.report.inputs import KINDS, read_inputs
from specdial.simulator.report.page import build_page
from specdial.simulator.report.tensorboard import write_events
from specdial.simulator.report.timeline import chrome_trace


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of `report`.

    runs: a directory that holds others' output, itself or in directories in it. The rest names one output each, and
    goes before what `runs` holds. out: the page; with a trace, its timeline lies beside it as NAME.trace.json.
    tensorboard: a directory for the trace's rounds as TensorBoard's event files.
    """

    out: str
    runs: str | None = None
    trace: str | None = None
    costs: str | None = None
    replay: str | None = None
    tune: str | None = None
    validation: str | None = None
    heads: str | None = None
    tuned_heads: str | None = None
    tensorboard: str | None = None


def run(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Write the page; returns where it is, its sections with data and those without, and where the timeline is."""
    s = parse(Settings, settings)
    out = Path(s.out)
    if out.is_dir() or out.suffix not in (".html", ".htm"):
        raise UserError(f"out {out} is not an HTML file", "give out=NAME.html")
    inputs = read_inputs({kind: getattr(s, kind) for kind in KINDS}, s.runs)
    if s.tensorboard is not None and inputs.record is None:
        raise UserError("tensorboard is given, and there is no trace", "give trace=, or leave tensorboard out")
    page, sections = build_page(inputs)
    write_text_atomic(out, page)
    timeline = None
    if inputs.record is not None:
        timeline = out.with_suffix(".trace.json")
        write_text_atomic(timeline, json.dumps(chrome_trace(inputs.record.trace), allow_nan=False))
        if s.tensorboard is not None:
            write_events(inputs.record.trace, Path(s.tensorboard))
    print(f"{out}: {', '.join(section.name for section in sections if section.needs is None)}")
    for section in sections:
        if section.needs is not None:
            print(f"no data for {section.name}: {section.needs}")
    if timeline is not None:
        print(f"{timeline}: open it in ui.perfetto.dev or chrome://tracing")
    if s.tensorboard is not None:
        print(f"{s.tensorboard}: look at it with tensorboard --logdir {s.tensorboard}")
    return {
        "out": str(out),
        "sections": [section.name for section in sections if section.needs is None],
        "empty": [section.name for section in sections if section.needs is not None],
        "timeline": str(timeline) if timeline is not None else None,
    }
