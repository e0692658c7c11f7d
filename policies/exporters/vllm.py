"""vLLM: the JSON of `--speculative-config`, the same mapping that LLM(speculative_config=...) takes.

Fields and rules: vllm/config/speculative.py (SpeculativeConfig) and docs/features/speculative_decoding/{README.md,
dynamic_speculative_decoding.md} of https://github.com/vllm-project/vllm. A schedule is a list of [first batch, last
batch, k], both included, from batch 1, without overlap, no k above num_speculative_tokens; past its end the last k
holds. The form with a context range, [first batch, last batch, first context, last context, k] over a rectangular grid,
is a proposal to vLLM (vllm/v1/spec_decode/dynamic/utils.py of its branch): no release reads it, so it is written only
when asked for. Leaves out fields that are about the engine: parallelism, quantisation, sampling of drafts.
"""

import json
from typing import Any

from specdial.policies.exporters.lengths import length_rows
from specdial.policies.exporters.lowering import Plan, plan
from specdial.policies.exporters.options import Options
from specdial.policies.exporters.rows import Lowered, Row
from specdial.policies.schema import Policy

METHODS = {"lookup": "ngram", "model": "draft_model", "eagle": "eagle", "eagle3": "eagle3"}
NO_END = 2**31 - 1


def lower(policy: Policy, options: Options, stem: str) -> Lowered:
    """`speculative_config` as JSON; null for a policy that never drafts."""
    p = plan(policy, options, METHODS)
    ranges = options.vllm_context_ranges and p.varies_by_context
    rows = [*p.rows, *length_rows(p, context=ranges, batch=True)]
    scheduled = [k for context in (p.k if ranges else [p.k[p.at_context]]) for k in context]
    usage = 'vllm serve MODEL --speculative-config "$(cat FILE)"'
    if max(scheduled) == 0:
        return Lowered({".json": "null\n"}, tuple(rows), "leave --speculative-config out", p.effective(0))
    kind = p.kind
    config: dict[str, Any] = {"method": METHODS[kind], "num_speculative_tokens": max(scheduled)}
    if kind == "lookup":
        config |= {"prompt_lookup_max": p.drafter.ngram, "prompt_lookup_min": 1}
        rows.append(
            Row(
                "all",
                "drafter",
                "approximated",
                "takes the earliest earlier place, not the latest, and stops at the end of the text",
            )
        )
    else:
        config["model"] = p.drafter.model
        rows += model_row(p)
    notes = []
    if len(set(scheduled)) > 1:
        config["num_speculative_tokens_per_batch_size"] = _schedule(p, ranges)
        notes.append("k by batch is off with data parallelism; vLLM tests it with EAGLE, EAGLE-3 and DFlash drafters")
    if ranges:
        notes.append("context ranges are a proposal: no release of vLLM reads entries of five numbers")
    effective = p.effective(scheduled[0]) if len(set(scheduled)) == 1 and kind != "lookup" else None
    return Lowered({".json": json.dumps(config, indent=1) + "\n"}, tuple(rows), usage, effective, tuple(notes))


def model_row(p: Plan) -> list[Row]:
    """What becomes of a drafting model; a stand-in has its rows already."""
    if p.stand_in is not None:
        return []
    if p.drafter.model.endswith(".gguf"):
        note = f"{p.drafter.model} is GGUF: this engine wants a Hugging Face folder or id, give stand_in=model"
        return [Row("all", "drafter", "approximated", note)]
    return [Row("all", "drafter", "kept", f"{p.drafter.label}")]


def _schedule(p: Plan, ranges: bool) -> list[list[int]]:
    """Entries of three numbers, or of five over the whole grid."""

    def last(high: int | None, low: int) -> int:
        return max(p.options.max_batch, low) if high is None else high - 1

    if not ranges:
        return [[low, last(high, low), k] for low, high, k in p.by_batch(p.at_context)]
    return [
        [b_low, last(b_high, b_low), max(c_low, 1), NO_END if c_high is None else c_high - 1, p.k[c][b]]
        for b, (b_low, b_high) in enumerate(p.batches)
        for c, (c_low, c_high) in enumerate(p.contexts)
    ]
