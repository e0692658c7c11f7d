"""`import`: logs, traffic traces and data sets of other tools, as traces, cost tables, mixes and prompts of ours.

vllm, vllm_metrics, aiperf   acceptance as logged      -> a trace: replay, tune and drift read it
step_times                   measured step times       -> a cost table for the same model and drafter
mooncake, azure              lengths of requests       -> mix.json, and with trace= that recording in this mix
sharegpt, longbench, pg19    texts                     -> a file for workload=file
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from specdial.engine.trace.reader import read_trace
from specdial.engine.trace.writer import write_costs
from specdial.policies.artifact import claim_directory, provenance, write_json_atomic
from specdial.policies.console import table_console
from specdial.policies.errors import UserError
from specdial.policies.fields import parse, setting, to_plain
from specdial.policies.schema import Drafter
from specdial.simulator.importers import IMPORTERS, Kind
from specdial.simulator.importers.lengths import SCHEMA as MIX_SCHEMA
from specdial.simulator.importers.lengths import mix_of
from specdial.simulator.importers.mixed_trace import write_mixed
from specdial.simulator.importers.prompts import write_prompts
from specdial.simulator.importers.step_times import cost_rows
from specdial.simulator.importers.traces import About, write_requests

# Settings that only some kinds of what is written use.
USES: dict[str, tuple[Kind, ...]] = {
    "model_name": ("trace", "costs"),
    "drafter": ("trace", "costs"),
    "batch": ("trace",),
    "documents": ("trace", "mix"),
    "kv_bytes_per_token": ("trace", "costs"),
    "hardware_name": ("trace", "costs"),
    "trace": ("mix",),
}


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of `import`.

    format: of importers.IMPORTERS. source: a file, or a folder where the format has one. model_name, drafter: what ran,
    so that costs and acceptance find together; a drafter's kind, model and ngram. batch: sequences that decoded
    together. documents: at most so many. kv_bytes_per_token: of the model, 0 unknown. trace: a recording to put in a
    mix.
    """

    format: str
    source: str
    out: str
    model_name: str = "imported"
    drafter: dict[str, Any] = field(default_factory=dict)
    batch: int = setting(1, low=1, high=1 << 20)
    documents: int = setting(256, low=1, high=100_000)
    kv_bytes_per_token: float = setting(0.0, low=0.0)
    hardware_name: str = "another engine"
    trace: str | None = None


def run(settings: dict[str, Any]) -> dict[str, Any]:
    """Read, write `out`, print what was found. Returns {kind, out, ...} with the counts of its kind."""
    s = parse(Settings, settings)
    if s.format not in IMPORTERS:
        raise UserError(f"format is {s.format!r}", f"use one of {', '.join(IMPORTERS)}")
    kind, read = IMPORTERS[s.format]
    _check(s, kind)
    about = About(
        s.format, Path(s.source).name, s.model_name, _drafter(s.drafter), s.batch, s.kv_bytes_per_token, s.hardware_name
    )
    found = read(Path(s.source))
    out = Path(s.out)
    if kind != "prompts":
        claim_directory(out, "import", to_plain(s))
    if kind == "trace":
        told = write_requests(out, found, about, s.documents)
    elif kind == "costs":
        rows = cost_rows(found, about.drafter.label)
        hardware = {"device": "unknown", "name": s.hardware_name}
        write_costs(out, {"model": about.model_block(), "hardware": hardware, "provenance": provenance()}, rows)
        told = {"measurements": len(found), "rows": len(rows), "drafter": about.drafter.label}
    elif kind == "mix":
        told = _write_mix(out, s, found)
    else:
        if out.is_dir():
            raise UserError(f"{out} is a directory", "give out=FILE.jsonl")
        told = {"records": len(found), "prompts": write_prompts(out, found)}
    _print(s, told)
    return {"kind": kind, "out": s.out, **told}


def _check(s: Settings, kind: Kind) -> None:
    """Raises UserError on what the format does not use."""
    defaults = Settings(s.format, s.source, s.out)
    for name, used in USES.items():
        value = getattr(s, name)
        given = any(v is not None for v in value.values()) if name == "drafter" else value != getattr(defaults, name)
        if given and kind not in used:
            formats = ", ".join(format_ for format_, (its, _) in IMPORTERS.items() if its in used)
            raise UserError(f"{name} is given, which format {s.format} does not use", f"it is for {formats}")
    if kind == "mix" and s.trace is None and s.documents != defaults.documents:
        raise UserError("documents is given, and nothing is recorded in this mix", "add trace=DIRECTORY")


def _drafter(given: dict[str, Any]) -> Drafter:
    """What drafted there; a model of no name where nothing is said."""
    named = {"kind": "model", **{name: value for name, value in given.items() if value is not None}}
    if named["kind"] in ("model", "eagle"):
        named = {"model": "draft", **named}
    drafter = parse(Drafter, named, "drafter")
    drafter.check()
    if drafter.kind not in ("model", "eagle", "lookup"):
        raise UserError(f"drafter.kind is {drafter.kind!r}", "use model, eagle or lookup: what other engines draft by")
    return drafter


def _write_mix(out: Path, s: Settings, lengths: list[Any]) -> dict[str, Any]:
    if not lengths:
        raise UserError(f"{s.source} holds no request with a prompt and an output", "give another file")
    mix = mix_of(lengths)
    told: dict[str, Any] = {"requests": len(lengths), "mix": mix}
    if s.trace is not None:
        told["mixed"] = write_mixed(out / "trace", read_trace(s.trace), mix, s.documents)
    source = {"format": s.format, "source": Path(s.source).name}
    write_json_atomic(out / "mix.json", {"schema": MIX_SCHEMA, **source, **told, "provenance": provenance()})
    return told


def _print(s: Settings, told: dict[str, Any]) -> None:
    console = table_console()
    if "mix" in told:
        table = Table(title=f"{s.format}: {told['requests']} requests", title_justify="left")
        for name in ("context", "requests", "of generated tokens", "mean context", "mean output"):
            table.add_column(name, justify="left" if name == "context" else "right")
        for row in told["mix"]:
            table.add_row(
                f"{row['from_context_tokens']}..{row['to_context_tokens'] - 1}",
                f"{row['requests_frac']:.1%}",
                f"{row['tokens_frac']:.1%}",
                f"{row['mean_context_tokens']:.0f}",
                f"{row['mean_new_tokens']:.0f}",
            )
        console.print(table)
        told = told.get("mixed", {})
    shown = ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in told.items()
    )
    console.print(f"wrote {s.out}" + (f": {shown}" if shown else ""), highlight=False, soft_wrap=True)
