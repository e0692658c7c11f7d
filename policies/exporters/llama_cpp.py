"""llama.cpp: arguments of llama-server, one line as a shell reads it.

Arguments: tools/server/README.md and docs/speculative.md of https://github.com/ggml-org/llama.cpp. Older builds call
them --draft-max and --draft-min, which newer ones refuse (-md and --draft-p-min are the same in both), so the report
prints the older line too. ngram-simple looks up exactly size-n tokens and drafts size-m. Leaves out the other n-gram
types, whose statistics no policy of ours describes, and everything about devices and memory.
"""

import shlex

from specdial.policies.controllers import ConfidenceConfig
from specdial.policies.exporters.lengths import length_rows
from specdial.policies.exporters.lowering import plan
from specdial.policies.exporters.options import Options
from specdial.policies.exporters.rows import Lowered, Row
from specdial.policies.schema import Policy

TYPES = {"lookup": "ngram-simple", "model": "draft-simple", "eagle3": "draft-eagle3"}
OLDER = {
    "--spec-draft-model": "-md",
    "--spec-draft-n-max": "--draft-max",
    "--spec-draft-n-min": "--draft-min",
    "--spec-draft-p-min": "--draft-p-min",
    "--spec-ngram-simple-size-n": "--spec-ngram-size-n",
    "--spec-ngram-simple-size-m": "--spec-ngram-size-m",
}


def lower(policy: Policy, options: Options, stem: str) -> Lowered:
    """Arguments for llama-server; --spec-type none for a policy that never drafts."""
    confident = isinstance(policy.controller, ConfidenceConfig) and not policy.cells
    p = plan(policy, options, TYPES, keeps=("confidence",) if confident else ())
    rows = [*p.rows, *length_rows(p, context=False, batch=False)]
    k = policy.k_max if confident and p.fixed_k else p.fixed_k
    arguments: list[str] = ["--spec-type", "none"]
    notes: list[str] = []
    if k > 0 and p.kind == "lookup":
        arguments = ["--spec-type", TYPES[p.kind]]
        arguments += ["--spec-ngram-simple-size-n", str(p.drafter.ngram), "--spec-ngram-simple-size-m", str(k)]
        older = [*_older(arguments), "--draft-max", str(k)]
        note = f"looks up exactly {p.drafter.ngram} tokens, never fewer"
        rows.append(Row("all", "drafter", "approximated", note))
    elif k > 0:
        arguments = ["--spec-type", TYPES[p.kind], "--spec-draft-model", p.drafter.model]
        arguments += ["--spec-draft-n-max", str(k), "--spec-draft-n-min", "0"]
        if isinstance(policy.controller, ConfidenceConfig) and confident:
            arguments += ["--spec-draft-p-min", f"{policy.controller.threshold:g}"]
            note = f"drafts up to {k} while sure by {policy.controller.threshold:g}"
            rows.append(Row("all", "k", "approximated", f"{note}; the draft that fails is kept here, not there"))
        else:
            arguments += ["--spec-draft-p-min", "0"]
        older = _older(arguments[2:])
        rows += _model_row(p.drafter.model, p.stand_in)
    if k > 0:
        notes.append(f"builds before the renaming: {shlex.join(older)}")
    effective = None if confident or (k and p.kind == "lookup") else p.effective(k)
    text = shlex.join(arguments) + "\n"
    usage = "xargs llama-server -m MODEL.gguf < FILE"
    return Lowered({".args": text}, tuple(rows), usage, effective, tuple(notes))


def _older(arguments: list[str]) -> list[str]:
    return [OLDER.get(argument, argument) for argument in arguments]


def _model_row(model: str, stand_in: str | None) -> list[Row]:
    if stand_in is not None:
        return []
    if not model.endswith(".gguf"):
        return [Row("all", "drafter", "approximated", f"{model} must be a GGUF file here: convert it")]
    return [Row("all", "drafter", "kept", model)]
