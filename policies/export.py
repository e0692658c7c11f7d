"""specdial export: write a policy as a canonical policy file, or lower it to another engine's settings.

Lowering says of every axis what was kept, approximated and dropped, and what that is predicted to cost where the
policies' own predictions can tell. Leaves out running the other engine.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from specdial.policies.artifact import write_json_atomic, write_text_atomic
from specdial.policies.errors import UserError
from specdial.policies.exporters import EXPORTERS, Options
from specdial.policies.exporters.loss import predicted_loss
from specdial.policies.exporters.report import print_report, report
from specdial.policies.fields import parse
from specdial.policies.file import load_policy, policy_digest
from specdial.policies.schema import Policy, policy_from_mapping

Target = Literal["specdial", "vllm", "sglang", "tensorrt_llm", "transformers", "llama_cpp", "profile"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Options):
    """Settings of `export`. out: the file to write, or a directory to name it in. target: whose format.

    The rest is of exporters.options.Options.
    """

    policy: dict[str, Any]
    out: str
    target: Target = "specdial"


def run(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Write the files and print the report. Returns where they are, the digest of the decisions and the report."""
    s = parse(Settings, settings)
    s.check(s.target)
    policy = policy_from_mapping(s.policy, "policy")
    digest = policy_digest(policy)
    alternatives = _alternatives(s.alternatives)
    folder, stem, name = _place(s, policy)
    lowered = EXPORTERS[s.target](policy, s, stem)
    files = {folder / f"{stem}{suffix}": text for suffix, text in lowered.files.items()}
    if name is not None:
        files = dict(zip([folder / name, *list(files)[1:]], files.values()))
    for path, text in reversed(files.items()):  # the main file last, since it may name the others
        write_text_atomic(path, text)
    found = {"out": str(next(iter(files))), "policy_digest": digest, "lossless": policy.lossless}
    if s.target != "specdial":
        loss = predicted_loss(policy, lowered, alternatives)
        found["report"] = report(policy, s.target, lowered, loss)
        write_json_atomic(folder / f"{stem}.report.json", found["report"])
        print_report(policy, s.target, lowered, loss)
    lossless = "lossless" if policy.lossless else "lossy"
    print(f"wrote {', '.join(map(str, files))}: policy {policy.name}, {lossless}, decisions {digest[:12]}")
    return found


def _place(s: Settings, policy: Policy) -> tuple[Path, str, str | None]:
    """(folder, what all files' names begin with, the main file's whole name where `out` gives it)."""
    out = Path(s.out)
    if out.is_dir() or s.out.endswith("/"):
        return out, policy.name if s.target == "specdial" else f"{policy.name}.{s.target}", None
    return out.parent, out.stem, out.name


def _alternatives(where: str | None) -> list[Policy]:
    if where is None:
        return []
    path = Path(where)
    files = sorted(path.glob("*.yaml")) if path.is_dir() else [path]
    if not files:
        raise UserError(f"no policy file (*.yaml) in {where}", "give a policy file or another directory")
    return [load_policy(file) for file in files]
