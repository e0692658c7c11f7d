"""Names that say what a policy is, so that the rows of a sweep or a search can be told apart."""

from collections.abc import Mapping
from typing import Any


def short_name(
    drafter: Mapping[str, Any],
    controller: Mapping[str, Any],
    draft_kv: Mapping[str, Any],
    verify_kv: Mapping[str, Any] | None = None,
) -> str:
    """rate-k8-b256, fp8-entropy-k8-f0.05-lag, lookup-fixed-k4-b512-history256-p4: what is usual goes unsaid.

    Plain settings in. Behind the source and budget of a partial verification stands its full period.
    """
    parts = [] if drafter["kind"] in ("none", "sparse_self") else [drafter["kind"]]
    parts += [drafter["weights"]] if drafter.get("weights", "model") != "model" else []
    tree = drafter.get("tree")
    parts += [f"w{tree.get('width', 10)}n{tree.get('nodes', 60)}"] if isinstance(tree, Mapping) else []
    parts += [f"{name}{drafter[name]}" for name in ("window", "budget") if drafter.get(name)]
    parts += [controller["kind"], f"k{controller.get('k', controller.get('k_max', 0))}"]
    parts += [f"f{draft_kv['budget_frac']:g}" if draft_kv.get("budget_frac") else f"b{draft_kv['budget']}"]
    parts += [f"d{draft_kv['decay']:g}"] if draft_kv.get("decay", 1.0) != 1.0 else []
    parts += [f"r{draft_kv['refresh_rounds']}"] if draft_kv.get("refresh_rounds", 1) != 1 else []
    parts += ["lag"] if controller.get("lag") else []
    return "-".join([*parts, *(_partial(verify_kv) if verify_kv and verify_kv["mode"] == "partial" else [])])


def _partial(verify_kv: Mapping[str, Any]) -> list[str]:
    source, protected = verify_kv.get("source", "history"), verify_kv.get("sink", 4) + verify_kv.get("recent", 16)
    ahead = [f"m{verify_kv['lookahead_tokens']}"] if verify_kv.get("lookahead_tokens") else []
    budget = protected if source == "recent" else verify_kv.get("budget", 512)
    kept = ["kept"] if verify_kv.get("refresh", "round") == "full" else []
    return [f"{source}{budget}", *ahead, *kept, f"p{verify_kv['full_period']}"]
