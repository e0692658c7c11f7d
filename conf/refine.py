"""specdial refine: the verbs `tune` and `validate` in turn, until replay ranks the finalists as the engine does.

Every round measures the best few policies on documents they were not tuned on, fits corrections of the costs to that,
and tunes again with them. It ends when no two finalists (plain decoding is one) are in another order than predicted,
but for what repeats differ by; after so many rounds; or when the next would take more engine time than is left.

Policies that replay refuses may be tried in the engine too. They decode the first documents once; those that are far
behind the best finalist there are pruned, and only the others are measured with the finalists.

A killed run goes on: what was measured to its end is not measured again, nor is anything of a finished run.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from rich.table import Table

from specdial.engine.job import Job, ModelSettings, history_spec, load_job
from specdial.engine.verbs import validate
from specdial.policies.artifact import claim_directory, provenance, write_json_atomic
from specdial.policies.console import table_console
from specdial.policies.errors import UserError
from specdial.policies.fields import parse, setting, to_plain
from specdial.policies.file import load_policy, policy_digest, save_policy
from specdial.policies.schema import Policy, plain_policy
from specdial.simulator.verbs import tune

SCHEMA = "specdial/refine/1"
LEAST_SPREAD = 0.01  # measured speedups closer than this are equal, however well repeats agree
PLAIN = {"name": "plain", "predicted": {"speedup": 1.0}, "measured": {"speedup": 1.0, "repeat_spread_frac": 0.0}}
PRUNED_FRAC = 0.1  # so far behind the best finalist a policy is not measured any further
FIRST = ("best", "best_lossless", "surface", "best_fixed")  # files of `tune` measured before others


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of `refine`. tune: further settings of that verb. engine_s: seconds that measuring may take in all.

    engine_trials: policies a round that replay refuses and the engine tries.
    """

    model: dict[str, Any]
    workload: dict[str, Any]
    search: dict[str, Any]
    trace: str
    costs: str
    out: str
    finalists: int = setting(6, low=2, high=100)
    rounds: int = setting(3, low=1, high=100)
    engine_s: float = setting(1800.0, low=0.0)
    engine_trials: int = setting(0, low=0, high=100)
    split: str = "validation"
    batch: int = setting(1, low=1)
    repeats: int = setting(2, low=1, high=100)
    tune: dict[str, Any] = field(default_factory=dict)


def run(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Refine into `out`: policy.yaml, refine.json and a directory a round. Returns refine.json's content."""
    s = parse(Settings, settings)
    out = Path(s.out)
    claim_directory(out, "refine", to_plain(s))
    job = cache(lambda: load_job(parse(ModelSettings, s.model, "model"), s.workload, s.split))
    rounds: list[dict[str, Any]] = []
    corrections: list[str] = []
    measured: dict[str, Policy] = {}
    ended = "rounds"
    for number in range(1, s.rounds + 1):
        if rounds and sum(r["engine_s"] for r in rounds) + rounds[-1]["engine_s"] > s.engine_s:
            ended = "engine time"
            break
        here = out / f"round-{number}"
        print(f"\nround {number}: tune", flush=True)
        tuned = tune.run(_tune_settings(s, here, corrections))
        finalists, left_out = _finalists(here / "tune" / "policies", s.finalists)
        tried, pruned, trials_s = _tried(s, here, job, finalists)
        print(f"\nround {number}: measure {len(finalists) + len(tried)} policies", flush=True)
        found = _validated(_validate_settings(s, here, [*finalists, *tried]), job)
        measured |= {policy_digest(p): p for p in _files(here / "validation" / "policies")}
        swapped = disagreements(found["policies"])
        about = {"policies": found["policies"], "swapped": swapped, "left_out": left_out, "pruned": pruned}
        rounds.append({**about, "engine_s": trials_s + found["engine_s"]})
        corrections.append(str(here / "validation"))
        if not swapped:
            ended = "agreement"
            break
    best = _fastest(list(measured.values()), lossy=not tuned["lossless"])
    save_policy(best, out / "policy.yaml")
    content = {
        "schema": SCHEMA,
        "ended": ended,
        "best": best.name,
        "speedup": _measured_speedup(best),
        "engine_s": sum(r["engine_s"] for r in rounds),
        "rounds": rounds,
        "settings": to_plain(s),
        "provenance": provenance(),
    }
    write_json_atomic(out / "refine.json", content)
    _print(content, out)
    return content


def disagreements(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Pairs of policies, by name, that were measured in another order than predicted, by more than repeats differ.

    rows: as `validate` returns them; those without a prediction are left out. Plain decoding is one of the policies.
    """
    known = [PLAIN, *(row for row in rows if row["predicted"].get("speedup") is not None)]
    known.sort(key=lambda row: -row["predicted"]["speedup"])
    found = []
    for i, ahead in enumerate(known):
        for behind in known[i + 1 :]:
            spread = max(LEAST_SPREAD, *(row["measured"]["repeat_spread_frac"] for row in (ahead, behind)))
            differ = ahead["predicted"]["speedup"] > behind["predicted"]["speedup"]
            if differ and behind["measured"]["speedup"] > ahead["measured"]["speedup"] * (1.0 + spread):
                found.append([ahead["name"], behind["name"]])
    return found


def _tune_settings(s: Settings, here: Path, corrections: list[str]) -> dict[str, Any]:
    own = {"trace": s.trace, "costs": s.costs, "search": s.search, "batch": s.batch, "out": str(here / "tune")}
    clash = sorted(set(own) & set(s.tune))
    if clash:
        raise UserError(f"tune.{clash[0]} is given", f"set {clash[0]} itself")
    return {**s.tune, **own, "corrections": list(corrections), "keep_refused": s.engine_trials}


def _validate_settings(s: Settings, here: Path, policies: list[Policy]) -> dict[str, Any]:
    shared = {"model": s.model, "workload": s.workload, "split": s.split, "batch": s.batch, "repeats": s.repeats}
    return {**shared, "policies": [to_plain(p) for p in policies], "out": str(here / "validation")}


def _finalists(folder: Path, most: int) -> tuple[list[Policy], list[str]]:
    """The policies to measure, and the names of those that cannot be measured along with the best one.

    One decoding keeps history in one form: the same window, page and decay.
    """
    names = sorted(
        (path.stem for path in folder.glob("*.yaml")), key=lambda n: (FIRST.index(n) if n in FIRST else 9, n)
    )
    distinct = {policy_digest(policy): policy for policy in (load_policy(folder / f"{name}.yaml") for name in names)}
    fitting, left_out = _fitting([], [policy for policy in distinct.values() if policy.k_max])
    return fitting[:most], [policy.name for policy in left_out]


def _fitting(known: Sequence[Policy], policies: Sequence[Policy]) -> tuple[list[Policy], list[Policy]]:
    """(those that can be measured along with the known ones and each other, those that cannot)."""
    fitting: list[Policy] = []
    left_out = []
    for policy in policies:
        try:
            history_spec([*known, *fitting, policy])
        except UserError:
            left_out.append(policy)
        else:
            fitting.append(policy)
    return fitting, left_out


def _tried(
    s: Settings, here: Path, job: Callable[[], Job], finalists: list[Policy]
) -> tuple[list[Policy], list[list[Any]], float]:
    """(policies that replay refuses and that are worth measuring, [name, speedup] of those that are not, seconds that
    trying took)."""
    refused, _ = _fitting(finalists, _files(here / "tune" / "refused"))
    if not refused:
        return [], [], 0.0
    policies = [*finalists[:1], *refused]
    once = {"repeats": 1, "fidelity": False, "out": str(here / "trials")}
    found = _validated({**_validate_settings(s, here, policies), **once}, job, documents=s.batch)
    speedups = [float(row["measured"]["speedup"]) for row in found["policies"]]
    least = (1.0 - PRUNED_FRAC) * max([1.0, *speedups[: len(finalists[:1])]])
    judged = list(zip(refused, speedups[len(finalists[:1]) :], strict=True))
    kept = [policy for policy, speedup in judged if speedup >= least]
    pruned = [[policy.name, speedup] for policy, speedup in judged if speedup < least]
    return kept, pruned, float(found["engine_s"])


def _validated(settings: dict[str, Any], job: Callable[[], Job], documents: int | None = None) -> dict[str, Any]:
    """validate's rows (policies) and seconds (engine_s) on the job's first documents, or all; read where an earlier
    call came to their end. Raises UserError on a file that is none of validate's."""
    path = Path(settings["out"]) / "validation.json"
    if not path.exists():
        loaded = job()
        return validate.run(settings, replace(loaded, documents=loaded.documents[:documents]))
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["schema"] == validate.SCHEMA:
            return {name: content[name] for name in ("policies", "engine_s")}
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        pass
    raise UserError(f"{path} is not a whole validation", f"delete {path.parent} to measure it again")


def _files(folder: Path) -> list[Policy]:
    return [load_policy(path) for path in sorted(folder.glob("*.yaml"))]


def _fastest(policies: list[Policy], *, lossy: bool) -> Policy:
    """The fastest as measured, plain decoding where none is faster than that."""
    asked = [policy for policy in policies if lossy or policy.lossless]
    best = max(asked, key=_measured_speedup, default=plain_policy())
    return best if _measured_speedup(best) > 1.0 else plain_policy()


def _measured_speedup(policy: Policy) -> float:
    return float((policy.measured or {}).get("speedup", 1.0))


def _print(content: Mapping[str, Any], out: Path) -> None:
    table = Table(title=f"refined {out}", title_justify="left")
    for column in ("round", "policy", "predicted", "measured", "error"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for number, found in enumerate(content["rounds"], start=1):
        for row in found["policies"]:
            predicted, speedup = row["predicted"].get("speedup"), row["measured"]["speedup"]
            error = "-" if predicted is None else f"{predicted / speedup - 1.0:+.1%}"
            said = "-" if predicted is None else f"{predicted:.3f}x"
            table.add_row(str(number), row["name"], said, f"{speedup:.3f}x", error)
    console = table_console()
    console.print(table)
    for number, found in enumerate(content["rounds"], start=1):
        if found["pruned"]:
            names = ", ".join(f"{name} {speedup:.2f}x" for name, speedup in found["pruned"])
            console.print(f"round {number}: tried and pruned: {names}", highlight=False)
        pairs = ", ".join(" before ".join(pair) for pair in found["swapped"]) or "none"
        console.print(f"round {number}: predicted in the wrong order: {pairs}", highlight=False)
        if found["left_out"]:
            console.print(
                f"round {number}: not measured, as their history has another form: {', '.join(found['left_out'])}"
            )
    console.print(f"ended by {content['ended']}; best as measured: {content['best']}", highlight=False)
