"""SGLang: server arguments as the YAML of `--config`, and for EAGLE heads the JSON of adaptive draft lengths.

Arguments: docs/advanced_features/{server_arguments,speculative_decoding,adaptive_speculative_decoding}.md of
https://github.com/sgl-project/sglang. num-draft-tokens counts the last committed token, which NGRAM's does as well
(python/sglang/srt/speculative/ngram_worker.py): without branching (topk 1) it is num-steps + 1. The adaptive file maps
the first batch of a range, as text, to candidate steps (python/sglang/srt/speculative/adaptive_spec_params.py and
adaptive_step_router.py); only EAGLE and EAGLE3 with topk 1 read it. Leaves out the trie's size and depth, whose meaning
differs from the length of the looked-up n-gram.
"""

import json
from typing import Any

import yaml

from specdial.policies.controllers import RateConfig
from specdial.policies.exporters.lengths import length_rows
from specdial.policies.exporters.lowering import Plan, engine_kind, plan
from specdial.policies.exporters.options import Options
from specdial.policies.exporters.rows import Lowered, Row
from specdial.policies.exporters.vllm import model_row
from specdial.policies.schema import Policy

ALGORITHMS = {"lookup": "NGRAM", "model": "STANDALONE", "eagle": "EAGLE", "eagle3": "EAGLE3"}
ADAPTIVE = ("eagle", "eagle3")
ADAPTIVE_FILE = ".adaptive.json"


def lower(policy: Policy, options: Options, stem: str) -> Lowered:
    """Server arguments, none for a policy that never drafts; with EAGLE heads a second file where k varies by batch."""
    lengths = _lengths(policy) if (options.stand_in or engine_kind(policy.drafter)) in ADAPTIVE else ()
    p = plan(policy, options, ALGORITHMS, keeps=("rate",) if lengths else ("tree",))
    if p.drafter.tree and p.varies_by_batch:
        p = plan(policy, options, ALGORITHMS)
    kind, tree = p.kind, p.drafter.tree
    by_batch = p.by_batch(p.at_context)
    adaptive = kind in ADAPTIVE and (len(by_batch) > 1 or bool(lengths))
    rows = [*p.rows, *length_rows(p, context=False, batch=adaptive)]
    if lengths:
        note = (
            f"rate replaced by SGLang's average of accepted lengths, which picks among {', '.join(map(str, lengths))}"
        )
        rows.append(Row("all", "k", "approximated", note))
    k = max(entry[2] for entry in by_batch) if adaptive else p.fixed_k
    k = min(lengths, key=lambda length: abs(length - k)) if lengths else k
    usage = "python -m sglang.launch_server --model-path MODEL --config FILE"
    if k == 0:
        return Lowered({".yaml": "{}\n"}, tuple(rows), "leave the speculative arguments out", p.effective(0))
    arguments: dict[str, Any] = {"speculative-algorithm": ALGORITHMS[kind]}
    if kind == "lookup":
        arguments |= {"speculative-num-draft-tokens": k + 1, "speculative-ngram-max-bfs-breadth": 1}
        rows.append(Row("all", "drafter", "approximated", f"a trie of past n-grams; ngram {p.drafter.ngram} dropped"))
    else:
        arguments |= {
            "speculative-draft-model-path": p.drafter.model,
            "speculative-num-steps": k,
            "speculative-eagle-topk": tree.width if tree else 1,
            "speculative-num-draft-tokens": (tree.size(k) if tree else k) + 1,
        }
        rows += model_row(p)
    files = {".yaml": ""}
    if adaptive:
        arguments |= {"speculative-adaptive": True, "speculative-adaptive-config": stem + ADAPTIVE_FILE}
        files[ADAPTIVE_FILE] = json.dumps(_candidates(p, lengths), indent=1) + "\n"
    files[".yaml"] = yaml.safe_dump(arguments, sort_keys=False)
    effective = p.effective(k) if kind != "lookup" and not adaptive else None
    return Lowered(files, tuple(rows), usage, effective)


def _candidates(p: Plan, lengths: tuple[int, ...]) -> dict[str, dict[str, list[int]]]:
    """Candidate steps from the first batch of each range; a rate controller's own lengths where it has them."""
    return {str(low): {"candidate_steps": sorted(lengths or [k])} for low, _, k in p.by_batch(p.at_context)}


def _lengths(policy: Policy) -> tuple[int, ...]:
    return policy.controller.k_set if isinstance(policy.controller, RateConfig) and not policy.cells else ()
