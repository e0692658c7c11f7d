"""Hugging Face transformers: generation settings of the target, and of the assistant where a model drafts.

Fields: GenerationConfig in src/transformers/generation/configuration_utils.py of
https://github.com/huggingface/transformers, read by generation/candidate_generator.py: the assistant's own generation
config says how much it drafts. Assisted generation runs at batch 1 only. The confidence threshold is adapted at run
time where scikit-learn is installed. Leaves out early exit and assistants with another tokenizer.
"""

import json
from dataclasses import replace
from typing import Any

from specdial.policies.controllers import ConfidenceConfig
from specdial.policies.exporters.lengths import length_rows
from specdial.policies.exporters.lowering import plan
from specdial.policies.exporters.options import Options
from specdial.policies.exporters.rows import Lowered, Row
from specdial.policies.exporters.vllm import model_row
from specdial.policies.schema import Policy


def lower(policy: Policy, options: Options, stem: str) -> Lowered:
    """generation_config, and assistant_model with assistant_generation_config; empty for a policy that never drafts."""
    confident = isinstance(policy.controller, ConfidenceConfig) and not policy.cells
    options = options if options.batch is not None else replace(options, batch=1)
    p = plan(policy, options, ("lookup", "model"), keeps=("confidence",) if confident else ())
    rows = [*p.rows, *length_rows(p, context=False, batch=False)]
    k = policy.k_max if confident and p.fixed_k else p.fixed_k
    content: dict[str, Any] = {}
    usage = "model.generate(**inputs) without assistance"
    if k > 0 and p.kind == "lookup":
        content["generation_config"] = {"prompt_lookup_num_tokens": k, "max_matching_ngram_size": p.drafter.ngram}
        usage = "model.generate(**inputs, **FILE['generation_config'])"
        rows.append(
            Row(
                "all",
                "drafter",
                "approximated",
                "takes the earliest earlier place, not the latest, and stops at the end of the text",
            )
        )
    elif k > 0:
        threshold = 0.0
        if isinstance(policy.controller, ConfidenceConfig) and confident:
            threshold = policy.controller.threshold
            note = f"stops below {threshold:g} too, adapted at run time where scikit-learn is installed"
            rows.append(Row("all", "k", "approximated", f"confidence up to {k}: {note}"))
        content["assistant_model"] = p.drafter.model
        content["assistant_generation_config"] = {
            "is_assistant": True,
            "num_assistant_tokens": k,
            "num_assistant_tokens_schedule": "constant",
            "assistant_confidence_threshold": threshold,
        }
        usage = "assistant.generation_config.update(**FILE['assistant_generation_config']); assistant_model=assistant"
        rows += model_row(p)
    effective = None if confident or (k and p.kind == "lookup") else p.effective(k)
    notes = ("assisted generation runs at batch 1 only",) if k else ()
    return Lowered({".json": json.dumps(content, indent=1) + "\n"}, tuple(rows), usage, effective, notes)
