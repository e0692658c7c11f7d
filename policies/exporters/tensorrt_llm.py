"""TensorRT-LLM: the YAML of `--config`, its speculative_config with decoding_type and draft_len_schedule.

Fields and rules: tensorrt_llm/llmapi/llm_args.py (DecodingBaseConfig, NGramDecodingConfig, DraftTargetDecodingConfig)
and docs/source/features/speculative-decoding.md of https://github.com/NVIDIA/TensorRT-LLM. The smallest key of a
schedule maps to max_draft_len, and no length is above it. What a key means changed: now the last batch of its range
({4: 4, 8: 2}: batches 1-4 draft 4, 5-8 draft 2, more draft none), before that the first ({1: 4, 4: 2}). The class takes
Draft_Target where the guide prints DraftTarget; the class is followed. Leaves out dynamic trees and pools of n-grams.
"""

from typing import Any

import yaml

from specdial.policies.exporters.lengths import length_rows
from specdial.policies.exporters.lowering import Plan, plan
from specdial.policies.exporters.options import Options
from specdial.policies.exporters.rows import Lowered, Row
from specdial.policies.exporters.vllm import model_row
from specdial.policies.schema import Policy

TYPES = {"lookup": "NGram", "model": "Draft_Target", "eagle3": "Eagle3"}


def lower(policy: Policy, options: Options, stem: str) -> Lowered:
    """`speculative_config` as YAML; null for a policy that never drafts."""
    p = plan(policy, options, TYPES)
    kind = p.kind
    entries, cut = _cut(p.by_batch(p.at_context))
    k = entries[0][2]
    rows = [*p.rows, *length_rows(p, context=False, batch=True, most=k)]
    if cut:
        note = f"no draft may be longer than that of the smallest batch, {k}: longer ones are cut to it"
        rows.append(Row("all", "k", "approximated", note))
    usage = "trtllm-serve MODEL --config FILE"
    if k == 0:
        text = yaml.safe_dump({"speculative_config": None})
        return Lowered({".yaml": text}, tuple(rows), "leave speculative_config out", p.effective(0))
    config: dict[str, Any] = {"decoding_type": TYPES[kind], "max_draft_len": k}
    if kind == "lookup":
        config["max_matching_ngram_size"] = p.drafter.ngram
        rows.append(Row("all", "drafter", "approximated", "a pool of n-grams shared by all requests"))
    else:
        config["speculative_model"] = p.drafter.model
        rows += model_row(p)
    notes = []
    if len(entries) > 1:
        config["draft_len_schedule"] = _schedule(entries, p)
        meaning = "the last batch of its range" if options.trtllm_schedule == "upto" else "the first batch of its range"
        notes.append(f"a key of draft_len_schedule is {meaning}; the other meaning: trtllm_schedule=from or upto")
        if options.trtllm_schedule == "upto" and entries[-1][1] is None and entries[-1][2] > 0:
            notes.append(f"batches above max_batch {max(options.max_batch, entries[-1][0])} draft nothing")
        notes.append("draft_len_schedule is a developer interface: not every decoding type and release follows it")
    effective = p.effective(k) if len(entries) == 1 and kind != "lookup" else None
    text = yaml.safe_dump({"speculative_config": config}, sort_keys=False)
    return Lowered({".yaml": text}, tuple(rows), usage, effective, tuple(notes))


def _cut(entries: tuple[tuple[int, int | None, int], ...]) -> tuple[list[tuple[int, int | None, int]], bool]:
    """The entries with no k above the first one's, neighbours joined, and whether any was."""
    most = entries[0][2]
    joined: list[tuple[int, int | None, int]] = []
    for low, high, k in entries:
        if joined and joined[-1][2] == min(k, most):
            joined[-1] = (joined[-1][0], high, joined[-1][2])
        else:
            joined.append((low, high, min(k, most)))
    return joined, any(k > most for _, _, k in entries)


def _schedule(entries: list[tuple[int, int | None, int]], p: Plan) -> dict[int, int]:
    """Batch to draft length. Batches above the last key of an `upto` schedule draft nothing."""
    if p.options.trtllm_schedule == "from":
        return {low: k for low, _, k in entries}
    ends = {max(p.options.max_batch, low) if high is None else high - 1: k for low, high, k in entries}
    last = max(ends)
    return {end: k for end, k in ends.items() if end != last or k > 0}
