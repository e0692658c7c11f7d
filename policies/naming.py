"""Names that say what a policy is, so that the rows of a sweep or a search can be told apart."""

from collections.abc import Mapping
from typing import Any


def short_name(drafter: Mapping[str, Any], controller: Mapping[str, Any], draft_kv: Mapping[str, Any]) -> str:
    """rate-k8-b256, lookup-fixed-k4-b512, fp8-entropy-k8-f0.05-lag: what is usual goes unsaid. Plain settings in."""
    parts = [] if drafter["kind"] in ("none", "sparse_self") else [drafter["kind"]]
    parts += [drafter["weights"]] if drafter.get("weights", "model") != "model" else []
    parts += [controller["kind"], f"k{controller.get('k', controller.get('k_max', 0))}"]
    parts += [f"f{draft_kv['budget_frac']:g}" if draft_kv.get("budget_frac") else f"b{draft_kv['budget']}"]
    parts += [f"d{draft_kv['decay']:g}"] if draft_kv.get("decay", 1.0) != 1.0 else []
    parts += [f"r{draft_kv['refresh_rounds']}"] if draft_kv.get("refresh_rounds", 1) != 1 else []
    return "-".join([*parts, *(["lag"] if controller.get("lag") else [])])
