"""What a report is made of: the files that verbs wrote, named one by one or found in a directory, read once.

Files of different models are refused. Leaves out what is shown of them.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdial.engine.trace.attention import ATTENTION_SCHEMA, HEADS, HeadScore
from specdial.engine.trace.reader import read_table, read_trace
from specdial.engine.trace.schema import COSTS_SCHEMA, TRACE_SCHEMA
from specdial.policies.artifact import RUN_FILE
from specdial.policies.errors import UserError
from specdial.simulator.costs import CostModel
from specdial.simulator.lanes import Record, read_record
from specdial.simulator.load import REPEATED, load_costs, repeats, trace_digest

# kind: (the file that names a directory of this kind, its schema); a directory with several is several
KINDS: dict[str, tuple[str, str]] = {
    "trace": ("meta.json", TRACE_SCHEMA),
    "costs": ("meta.json", COSTS_SCHEMA),
    "replay": ("replay.json", "specdial/replay/1"),
    "tune": ("study.json", "specdial/study/1"),
    "validation": ("validation.json", "specdial/validation/1"),
    "heads": ("meta.json", ATTENTION_SCHEMA),
    "tuned_heads": ("heads.json", "specdial/heads/1"),
}


@dataclass(frozen=True, slots=True)
class Source:
    """One input: its kind, where it lies, its JSON, and the marker of the run that made it ({} where there is none)."""

    kind: str
    path: Path
    content: dict[str, Any]
    run: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything a section may read; None where it was not given. heads: every head's ranking."""

    sources: dict[str, Source]
    record: Record | None = None
    trace_digest: str | None = None
    costs: CostModel | None = None
    heads: tuple[HeadScore, ...] | None = None

    def json(self, kind: str) -> dict[str, Any] | None:
        """The JSON of one kind."""
        return self.sources[kind].content if kind in self.sources else None

    @property
    def model(self) -> dict[str, Any]:
        """The model that every input is of."""
        model: dict[str, Any] = next(iter(self.sources.values())).content["model"]
        return model

    @property
    def hardware(self) -> dict[str, Any]:
        """The machine, as the measured inputs name it, validation first."""
        order = ("validation", "costs", "trace", "replay", "tune", "heads")
        found = (self.sources[kind].content.get("hardware") for kind in order if kind in self.sources)
        return next((hardware for hardware in found if hardware), {})

    def caveats(self) -> list[str]:
        """What every number here must be read with, each once."""
        words = ["random weights"] if any(s.content["model"].get("random") for s in self.sources.values()) else []
        words += [REPEATED] if any(repeats(s.content) for s in self.sources.values()) else []
        for source in self.sources.values():
            words += source.content.get("caveats") or []
            words += ["synthetic acceptance"] if source.content.get("synthetic_acceptance") else []
            words += ["synthetic acceptance"] if source.content.get("acceptance") else []
        return list(dict.fromkeys(words))


def read_inputs(named: dict[str, str | None], runs: str | None) -> Inputs:
    """Read what is named, and what `runs` or a directory in it holds besides.

    Raises UserError when there is nothing, when a file is damaged or of another kind, or when models differ.
    """
    given = {kind: Path(path) for kind, path in named.items() if path is not None}
    if runs is not None:
        given = _found(Path(runs), set(given)) | given
    if not given:
        raise UserError("nothing to report on", "give runs=DIR, or trace=, costs=, replay=, tune=, validation=, heads=")
    sources = {kind: _read(kind, given[kind]) for kind in KINDS if kind in given}
    _check_models(list(sources.values()))
    record = read_record(read_trace(given["trace"])) if "trace" in given else None
    heads = None
    if "heads" in given:
        heads = tuple(HeadScore(**row) for row in read_table(given["heads"] / "heads.parquet", HEADS).to_pylist())
    costs = load_costs(str(given["costs"]) if "costs" in given else None, record.trace) if record is not None else None
    return Inputs(sources, record, trace_digest(record.trace) if record is not None else None, costs, heads)


def _found(runs: Path, named: set[str]) -> dict[str, Path]:
    """What a directory and those in it hold, one of each kind that was not named."""
    if not runs.is_dir():
        raise UserError(f"runs {runs} is not a directory", "give the directory that holds the verbs' output")
    found: dict[str, Path] = {}
    for folder in [runs, *sorted(path for path in runs.iterdir() if path.is_dir())]:
        for kind in _kinds_of(folder):
            if kind in found and kind not in named:
                raise UserError(f"{runs} holds two of kind {kind}: {found[kind].name}, {folder.name}", f"give {kind}=")
            found[kind] = folder
    return found


def _kinds_of(folder: Path) -> Iterator[str]:
    for kind, (name, schema) in KINDS.items():
        try:
            content = json.loads((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(content, dict) and content.get("schema") == schema:
            yield kind


def _read(kind: str, folder: Path) -> Source:
    name, schema = KINDS[kind]
    path = folder if folder.is_file() else folder / name
    content = _json(path)
    if content.get("schema") != schema:
        raise UserError(f"{path} has schema {content.get('schema')!r}, not {schema!r}", f"give another {kind}=")
    if not isinstance(content.get("model"), dict) or "digest" not in content["model"]:
        raise UserError(f"{path} does not say which model it is of", "make it again")
    marker = path.parent / RUN_FILE
    return Source(kind, path.parent, content, _json(marker) if marker.exists() else {})


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}", "check the path") from None
    except (ValueError, RecursionError):
        raise UserError(f"{path} is not readable JSON", "make it again") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a mapping", "make it again")
    return content


def _check_models(sources: list[Source]) -> None:
    first = sources[0]
    for other in sources[1:]:
        ours, theirs = first.content["model"], other.content["model"]
        if ours["digest"] != theirs["digest"]:
            raise UserError(
                f"{first.path} is of model {ours.get('name')}, {other.path} of {theirs.get('name')}, another one",
                "report on files of one model",
            )
