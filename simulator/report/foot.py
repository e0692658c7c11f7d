"""Provenance: of every input its digest, machine, versions and time, and the settings that would make it again."""

import json
import subprocess
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from specdial.policies.artifact import digest_of, provenance
from specdial.simulator.report.inputs import Inputs, Source
from specdial.simulator.report.section import Section, fold, table

TITLE = "Provenance"
ROOT = Path(__file__).resolve().parents[2]
# Settings that a command line names in another form, or that hold whole policies.
OMITTED = ("policies", "policy", "model", "workload")
WORKLOAD = ("path", "context_tokens", "documents", "new_tokens", "seed")  # what is most often set
SHOWN_VERSIONS = ("specdial", "torch", "numpy", "triton")


def section(inputs: Inputs) -> Section:
    """A table of the inputs, the commands that made them, and what this page was made by."""
    rows = [_row(source, inputs) for source in inputs.sources.values()]
    commands = "\n".join(command(source.run, source.content) for source in inputs.sources.values() if source.run)
    here = provenance()
    model = inputs.model
    facts = [f"Model {escape(str(model['name']))}, digest <code>{model['digest'][:16]}</code>"]
    facts += [_machine(inputs.hardware)] if inputs.hardware else []
    made = here["made_at"][:16].replace("T", " ")
    facts.append(f"Page made {made} UTC by specdial {here['versions']['specdial']}, {commit()}")
    lead = ". ".join(facts) + "."
    html = table(["input", "made", "machine", "versions", "digest"], rows, text=5)
    html += f"<h3>Commands</h3><pre>{escape(commands)}</pre>" if commands else ""
    settings = {source.kind: source.run.get("config") for source in inputs.sources.values() if source.run}
    html += fold("Complete settings", f"<pre>{escape(json.dumps(settings, indent=1))}</pre>") if settings else ""
    mismatch = _other_trace(inputs)
    return Section("provenance", TITLE, lead, (f'<p class="warn">{mismatch}</p>' if mismatch else "") + html)


def command(run: dict[str, Any], content: dict[str, Any]) -> str:
    """The verb with its settings, as a line for the shell. content: what it wrote.

    Policies stand behind it by name: they are files, or settings that are shown below in full, as are the rest of what
    Hydra's groups hold.
    """
    config = run.get("config", {})
    parts = [f"specdial {run.get('verb')}"]
    model, workload = config.get("model"), config.get("workload")
    if isinstance(model, dict) and model.get("source"):
        parts.append(f"model={model.get('name') if str(model['source']).startswith('wheel:') else model['source']}")
    if isinstance(workload, dict) and workload.get("kind"):
        parts.append(f"workload={workload['kind']}")
        parts += [f"workload.{name}={workload[name]}" for name in WORKLOAD if workload.get(name) is not None]
    parts += [f"trials={content['trials']}"] if "trials" in content else []  # which may grow, so the run has none
    parts += [f"{name}={value}" for name, value in _leaves(config)]
    policies = [config["policy"]] if isinstance(config.get("policy"), dict) else config.get("policies") or []
    names = [str(policy.get("name")) for policy in policies if isinstance(policy, dict)]
    return " ".join(parts) + (f"  # with {', '.join(names)}" if names else "")


def _leaves(config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in config.items():
        if name in OMITTED or value is None or isinstance(value, dict):
            continue
        yield name, json.dumps(value, separators=(",", ":")).strip('"')


def commit() -> str:
    """The commit of the checkout that this code lies in, or that it lies in none."""
    if not (ROOT / ".git").exists():
        return "not from a checkout"
    line = ["git", "rev-parse", "--short=12", "HEAD"]
    found = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    return f"commit {found.stdout.strip()}" if found.returncode == 0 else "commit unknown"


def _row(source: Source, inputs: Inputs) -> list[str]:
    content = source.content
    made = content.get("provenance") or {}
    versions = made.get("versions") or {}
    shown = ", ".join(f"{name} {versions[name]}" for name in SHOWN_VERSIONS if name in versions)
    digest = inputs.trace_digest if source.kind == "trace" else digest_of(content)
    return [
        f"{source.kind.replace('_', ' ')}<br><small>{escape(str(source.path))}</small>",
        escape(str(made.get("made_at", "–"))[:16].replace("T", " ")),
        _machine(content.get("hardware") or {}) or "–",
        f"<small>{escape(shown) or '–'}</small>",
        f'<code title="{digest}">{str(digest)[:12]}</code>',
    ]


def _machine(hardware: dict[str, Any]) -> str:
    if not hardware:
        return ""
    words = [str(hardware.get("name") or hardware.get("device"))]
    words += [f"{hardware['cores']} cores"] if hardware.get("cores") else []
    words += [f"driver {hardware['driver']}"] if hardware.get("driver") else []
    return escape(", ".join(words))


def _other_trace(inputs: Inputs) -> str:
    """A sentence when replay or tune worked on another trace than the one that is shown."""
    names = [
        kind
        for kind in ("replay", "tune")
        if inputs.trace_digest
        and (inputs.json(kind) or {}).get("trace_digest", inputs.trace_digest) != inputs.trace_digest
    ]
    return f"{' and '.join(names)} worked on another trace than the one shown here." if names else ""
