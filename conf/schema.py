"""From a composed Hydra config to the plain settings of a verb.

Policies are resolved here: a built-in name, a file, or a directory of files, with the parts that the command line
overrides merged in. (No conf group: Hydra could then not take a path.) Everything else is passed on as it stands; the
verb's own Settings check it.
"""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from specdial import policies
from specdial.policies.errors import UserError
from specdial.policies.fields import to_plain
from specdial.policies.file import load_policy
from specdial.policies.naming import short_name
from specdial.policies.schema import Policy

BUILTIN = Path(policies.__file__).parent / "builtin"
PARTS = ("drafter", "controller", "draft_kv", "verify_kv", "kv")


def plain_settings(cfg: DictConfig) -> dict[str, Any]:
    """The config as plain data, without Hydra's own node. Raises UserError naming a value that was not given."""
    container = OmegaConf.to_container(cfg, resolve=False)
    missing = _missing(container, "")
    if missing is not None:
        raise UserError(f"{missing} is missing", f"add {missing}=VALUE")
    container = OmegaConf.to_container(cfg, resolve=True)
    if not isinstance(container, dict):
        raise UserError("the config is not a mapping", "write key: value pairs")
    return {str(key): value for key, value in container.items()}


def with_model(settings: dict[str, Any]) -> dict[str, Any]:
    """Move the hardware group into the model's settings."""
    hardware = settings.pop("hardware")
    settings["model"] = {**settings["model"], **hardware}
    return settings


def with_trace(settings: dict[str, Any]) -> dict[str, Any]:
    """Let `workload` name the trace runs/WORKLOAD, and hold a trace to the workload it is said to be of."""
    workload = settings.pop("workload").get("kind")
    if workload is None and settings["trace"] is None:
        raise UserError("trace is missing", "add trace=DIR, or workload=NAME for the trace runs/NAME")
    if workload is None:
        return settings
    from specdial.engine.trace.meta import read_meta  # here, since pyarrow would slow every --help
    from specdial.engine.trace.schema import TRACE_SCHEMA

    trace = Path(str(settings["trace"] or f"runs/{workload}"))
    recorded = read_meta(trace, TRACE_SCHEMA, "trace").get("workload")
    kind = recorded.get("kind") if isinstance(recorded, dict) else None
    if kind != workload:
        raise UserError(f"trace {trace} is of workload {kind}, not {workload}", "give another trace or workload")
    return {**settings, "trace": str(trace)}


def with_policies(settings: dict[str, Any], *, many: bool) -> dict[str, Any]:
    """Replace policy, drafter, controller, draft_kv, verify_kv and kv by `policies` (many) or one `policy` mapping."""
    overrides = {part: settings.pop(part, None) for part in PARTS}
    found = [_merge(policy, overrides) for policy in find_policies(settings.pop("policy"))]
    if many:
        return {**settings, "policies": found}
    if len(found) != 1:
        raise UserError(f"{len(found)} policies given where one is needed", "name one policy file")
    return {**settings, "policy": found[0]}


def with_policy_file(settings: dict[str, Any]) -> dict[str, Any]:
    """One `policy`, and the file it came from where nothing else changed it: that file may be read again."""
    where = settings["policy"]
    found = with_policies(settings, many=False)
    is_file = isinstance(where, str) and Path(where).is_file()
    unchanged = is_file and found["policy"] == to_plain(load_policy(str(where)))
    return {**found, "policy_file": where if unchanged else None}


def find_policies(where: object) -> list[Policy]:
    """The policies that a command line's `policy=` names. Raises UserError when there is none."""
    if not isinstance(where, str) or not where:
        raise UserError(f"policy is {where!r}", "give policy=NAME, policy=FILE or policy=DIRECTORY")
    path = Path(where)
    if path.is_dir():
        files = sorted(path.glob("*.yaml"))
        if not files:
            raise UserError(f"no policy file (*.yaml) in {where}", "give a policy file or another directory")
        return [load_policy(file) for file in files]
    named = BUILTIN / f"{where}.yaml"
    if not path.exists() and "/" not in where and named.exists():
        return [load_policy(named)]
    if not path.exists():
        names = ", ".join(sorted((p.stem for p in BUILTIN.glob("*.yaml")), key=lambda name: (name != "plain", name)))
        raise UserError(f"no policy {where!r}", f"give a policy file, a directory, or one of {names}")
    return [load_policy(path)]


def _missing(container: Any, where: str) -> str | None:
    """The first key without a value. (OmegaConf's own search stops at values that interpolate one.)"""
    if not isinstance(container, dict):
        return where if container == "???" else None
    found = (_missing(value, f"{where}.{key}".lstrip(".")) for key, value in container.items())
    return next((path for path in found if path is not None), None)


def _merge(policy: Policy, overrides: dict[str, Any]) -> dict[str, Any]:
    """The policy's mapping with overridden parts; a changed policy loses what was expected and measured of the old."""
    plain: dict[str, Any] = to_plain(policy)
    whole = {part: to_plain(getattr(policy, part), complete=True) for part in PARTS}
    changed = False
    for part, value in overrides.items():
        given = {k: v for k, v in (value or {}).items() if v is not None}
        if not given:
            continue
        same_kind = "kind" not in given or given["kind"] == whole[part].get("kind")
        merged = {**whole[part], **given} if same_kind and part != "controller" else given
        if merged != whole[part]:
            own = next((i for i, cell in enumerate(policy.cells) if part in cell.overrides), None)
            if own is not None:
                cause = f"{part} is given, and policy {policy.name} overrides it in cells[{own}]"
                raise UserError(cause, "edit its file, or name a policy without cells")
            changed, plain[part] = True, merged
    if changed:
        if plain["drafter"]["kind"] == "none" and plain["controller"]["kind"] != "none":
            plain["drafter"] = {"kind": "sparse_self"}
        plain |= {"expected": None, "measured": None, "provenance": None}
        plain["name"] = short_name(plain["drafter"], plain["controller"], plain["draft_kv"], plain["verify_kv"])
        if "kv" in plain and plain["kv"]["where"] != "device":
            plain["name"] += f"-{plain['kv']['where']}"
    return plain
