"""specdial demo: the verbs in sequence, as a newcomer would type them, and one table at the end.

A second call with the same settings uses the trace and the costs on disk as they stand.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from specdial.engine.verbs import calibrate, record, validate
from specdial.engine.verbs import run as run_verb
from specdial.engine.weights import resolve
from specdial.policies import export
from specdial.policies.console import table_console
from specdial.policies.errors import UserError
from specdial.policies.fields import parse, setting, to_plain
from specdial.policies.file import load_policy, policy_digest
from specdial.policies.schema import DraftKV, Policy, plain_policy
from specdial.simulator.verbs import report, tune

PROMPT = "Once upon a time, in a small house by the sea,"
PAGE = "report.html"
FILES = ("trace", "costs", "study", "policy.yaml", "validation", PAGE, "report.trace.json")  # what a demo leaves


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of `demo`. budgets: the arms recorded; k_max: the longest draft considered."""

    model: dict[str, Any]
    workload: dict[str, Any]
    search: dict[str, Any]
    out: str
    budgets: tuple[int, ...] = setting((128, 512), low=1)
    k_max: int = setting(8, low=1, high=64)
    repeats: int = setting(2, low=1)
    trials: int = setting(300, low=1)
    seed: int = setting(0, low=0)


def run(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Run the loop into `out` and print the table. Returns its rows."""
    s = parse(Settings, settings)
    out = Path(s.out)
    if out.is_file() or (out.is_dir() and any(path.name not in FILES for path in out.iterdir())):
        raise UserError(f"{out} exists and is not a demo", "choose another out=")
    started_s = time.monotonic()
    context, new_tokens = int(s.workload["context_tokens"]), int(s.workload["new_tokens"])
    shared = {"model": s.model, "workload": s.workload}
    device, _ = resolve(s.model.get("device", "auto"), s.model.get("dtype", "auto"))
    page: Literal[1, 16] = 16 if device.type == "cuda" else 1  # measured: scores of single keys cost a GPU 2 ms a round
    draft_kv = to_plain(DraftKV(page=page))

    def step(title: str, verb: Callable[[dict[str, Any]], dict[str, Any]], arguments: dict[str, Any]) -> dict[str, Any]:
        print(f"\n[{time.monotonic() - started_s:4.0f} s] {title}", flush=True)
        return verb(arguments)

    step(
        f"record: {context} tokens of context, drafts at every position under {len(s.budgets)} budgets",
        record.run,
        {
            **shared,
            "policy": {**to_plain(plain_policy()), "draft_kv": draft_kv},
            "split": "train+validation",
            "dense": True,
            "budgets": list(s.budgets),
            "k_max": s.k_max,
            "out": str(out / "trace"),
        },
    )
    step(
        "calibrate: what each operation costs here",
        calibrate.run,
        {
            **shared,
            "contexts": [max(context // 2, 64), context + new_tokens],
            "ks": sorted({0, 1, 2, s.k_max // 2, s.k_max}),
            "budgets": list(s.budgets),
            "repeats": 4,
            "draft_kv": {**draft_kv, "budget": s.budgets[0]},
            "out": str(out / "costs"),
        },
    )
    source = {"trace": str(out / "trace"), "costs": str(out / "costs")}
    tuned = step(
        f"tune: {s.trials} trials on the train documents, chosen on the validation documents",
        tune.run,
        {**source, "trials": s.trials, "seed": s.seed, "search": s.search, "out": str(out / "study")},
    )
    policies = [load_policy(out / "study" / "policies" / f"{name}.yaml") for name in ("plain", "best_fixed", "best")]
    step(
        "export: the tuned policy file", export.run, {"policy": to_plain(policies[-1]), "out": str(out / "policy.yaml")}
    )
    step(
        "run: the tuned policy on a prompt",
        run_verb.run,
        {"model": s.model, "policy": to_plain(policies[-1]), "prompt": PROMPT, "new_tokens": 32},
    )
    distinct = {policy_digest(p): p for p in policies}
    validated = step(
        "validate: the same policies on held-out documents, against plain decoding",
        validate.run,
        {
            **shared,
            "policies": [to_plain(p) for p in distinct.values()],
            "split": "test",
            "repeats": s.repeats,
            "out": str(out / "validation"),
        },
    )
    if find_spec("plotly"):
        step("report: all of it on one page", report.run, {"runs": str(out), "out": str(out / PAGE)})
    else:
        print(f"\nno {PAGE}: plots need the extra report (pip install 'specdial[report]')")
    rows = {row["policy_digest"]: row for row in validated["policies"]}
    _print(policies, rows, tuned, out)
    return {"policies": validated["policies"], "pays": tuned["pays"], "seconds": time.monotonic() - started_s}


def _print(policies: list[Policy], rows: dict[str, dict[str, Any]], tuned: dict[str, Any], out: Path) -> None:
    """The closing table, and the crossover where drafting does not pay."""
    table = Table(title="predicted on the trace, measured on held-out documents", title_justify="left")
    for column in ("", "predicted", "measured", "tokens/round", "alpha", "gamma", "k", "budget", "lossless"):
        table.add_column(column, justify="right" if column else "left")
    for title, policy in zip(("plain", "best fixed k", "tuned"), policies):
        row, expected = rows[policy_digest(policy)], policy.expected or {}
        measured, gamma = row["measured"], expected.get("gamma")
        table.add_row(
            f"{title}: {policy.controller.kind}" if policy.k_max else f"{title}: k = 0",
            f"{expected['speedup']:.2f}x",
            f"{measured['speedup']:.2f}x",
            f"{measured['tokens_per_round']:.2f}",
            "-" if measured["alpha"] is None else f"{measured['alpha']:.2f}",
            f"{gamma:.2f}" if policy.k_max and gamma is not None else "-",
            f"{measured['k']:.1f}",
            str(policy.draft_kv.budget) if policy.k_max else "-",
            "yes" if policy.lossless else "no",
        )
    console = table_console()
    console.print(table)
    crossover = tuned["crossover"]
    if not tuned["pays"] and crossover is not None:
        console.print(
            f"Speculation does not pay here: the best drafting policy ({crossover['policy']}) is predicted at "
            f"{crossover['speedup']:.2f}x. It would break even at gamma {crossover['gamma_needed']:.2f} "
            f"(measured {crossover['gamma']:.2f}) with its alpha of {crossover['alpha']:.2f}."
        )
    console.print(f"On disk under {out}: {', '.join(name for name in FILES if (out / name).exists())}", soft_wrap=True)
