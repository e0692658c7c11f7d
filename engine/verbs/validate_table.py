"""The table that `validate` prints. Leaves out how its numbers came about (validate)."""

from pathlib import Path
from typing import Any

from rich.table import Table

from specdial.engine.acceptance import SAID
from specdial.engine.job import Job
from specdial.policies.console import odd_batch, table_console

COSTS_HOLD_FRAC = 0.05


def _equality(measured: dict[str, Any]) -> str:
    """How the outputs compare with plain decoding, in a word."""
    if "synthetic_acceptance" in measured:
        return "synthetic"
    differing = measured["documents_differing_from_plain"]
    return "yes" if differing == 0 else f"{differing} differ"


def _strayed(row: dict[str, Any]) -> tuple[str, str, str]:
    """Top-1 agreement with full verification, KL in nats, and the share of tokens that plain decoding wrote too.

    Behind a number, in brackets, what was predicted.
    """
    found, predicted = row["measured"].get("fidelity"), row["predicted"].get("fidelity") or {}
    if found is None:
        return "-", "-", "-"

    def beside(name: str, form: str) -> str:
        value, expected = found[name], predicted.get(name)
        shown = "-" if value is None else format(value, form)
        return shown if expected is None else f"{shown} ({expected['value']:{form}})"

    return beside("top1_agreement", ".1%"), beside("kl_nats", ".2g"), f"{found['token_agreement']:.1%}"


def _full_batch_text(row: dict[str, Any]) -> str:
    """The measured speedup of batches as if they were kept full, in brackets the predicted one."""
    predicted = (row["predicted"].get("full_batch") or {}).get("speedup")
    return f"{row['measured']['full_batch']['speedup']:.2f}x" + ("" if predicted is None else f" ({predicted:.2f}x)")


def print_validation(out: Path, job: Job, rows: list[dict[str, Any]], content: dict[str, Any]) -> None:
    """One row a policy, and below what all of them say. out, job: for the title; rows, content: of validation.json."""
    said = (" (random weights)" if job.model.random else "") + (SAID if "acceptance" in content else "")
    table = Table(title=f"validation {out}: {job.name}{said}, split {content['split']}", title_justify="left")
    lossy = any(not row["lossless"] for row in rows)
    batched = any("full_batch" in row["measured"] for row in rows)
    for column in (
        "policy",
        "lossless",
        "predicted",
        "measured",
        "[95 %]",
        "error",
        *(("full batch",) if batched else ()),
        "tokens/round",
        "alpha",
        "k",
        "= plain",
        *(("top-1", "KL nats", "same text") if lossy else ()),
    ):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for row in rows:
        m, predicted = row["measured"], row["predicted"].get("speedup")
        table.add_row(
            row["name"],
            "yes" if row["lossless"] else "no",
            "-" if predicted is None else f"{predicted:.2f}x",
            f"{m['speedup']:.2f}x",
            f"{m['low']:.2f}-{m['high']:.2f}",
            "-" if row["error_frac"] is None else f"{row['error_frac']:+.1%}",
            *((_full_batch_text(row),) if batched else ()),
            f"{m['tokens_per_round']:.2f}",
            "-" if m["alpha"] is None else f"{m['alpha']:.2f}",
            f"{m['k']:.1f}",
            _equality(m),
            *(_strayed(row) if lossy else ()),
        )
    console = table_console()
    console.print(table)
    if content["regret"] is not None:
        said = " among lossless policies" if "lossy_ranking" in content else ""
        rank = "-" if content["rank_correlation"] is None else f"{content['rank_correlation']:.2f}"
        console.print(f"regret of the best-predicted policy{said} {content['regret']:.1%}")
        if content["median_error_frac"] is not None:
            errors = f"median {content['median_error_frac']:.1%}, worst {content['worst_error_frac']:.1%}"
            console.print(f"predicted against measured, plain apart: error {errors}, rank correlation {rank}")
    if content["cost_error_frac"] is not None:
        parts = f"tokens a round {content['tokens_error_frac']:.1%}, costs {content['cost_error_frac']:.1%}"
        console.print(f"what was off, medians: {parts}")
    if content["plain_error_frac"] is not None:
        off = content["plain_error_frac"]
        doubt = ": costs were timed at other contexts or batches, or have changed since; calibrate again"
        console.print(f"plain decoding was predicted {off:+.1%}{doubt if abs(off) > COSTS_HOLD_FRAC else ''}")
    if odd := odd_batch(len(job.documents), content["batch"]):
        console.print(odd)
    for row in rows:
        told = row["predicted"].get("batch", content["batch"])
        if told != content["batch"]:
            console.print(f"{row['name']} was predicted for batch {told}, not {content['batch']}: not compared")
    for count in sorted({row["predicted"].get("documents", 0) for row in rows}):
        if odd := odd_batch(count, content["batch"]):
            console.print(f"predicted from {odd}")
