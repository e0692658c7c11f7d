"""What a partial verification is called in cost tables, and which of its settings two of them share.

Leaves out what any of them costs or is worth.
"""

from dataclasses import replace
from typing import Any

from specdial.policies.fields import to_plain
from specdial.policies.schema import Policy, ScoringHeads, VerifyKV

SOURCES = ("history", "lookahead", "hybrid", "page_bound", "recent")
DEFAULT = VerifyKV(mode="partial")


def source_label(verify_kv: VerifyKV, heads: ScoringHeads) -> str:
    """Under which cost tables file rounds of this verification: where its scores come from, apart from the budget.

    "" for a lossless one. Behind history and hybrid stands the number of scoring heads of the target, where it has any.
    """
    if verify_kv.lossless:
        return ""
    parts: list[str] = [verify_kv.source]
    parts += [f"heads{len(heads.target)}"] if heads.target and verify_kv.source in ("history", "hybrid") else []
    parts += [verify_kv.scope] if verify_kv.scope not in ("kv_head", "model") else []
    parts += ["model"] if verify_kv.scope == "model" and verify_kv.source == "history" and not heads.target else []
    parts += [f"page{verify_kv.page}"] if verify_kv.page > 1 else []
    parts += [verify_kv.bound] if verify_kv.bound != DEFAULT.bound else []
    parts += [verify_kv.rows] if verify_kv.rows != DEFAULT.rows else []
    parts += ["kept"] if verify_kv.refresh == "full" else []
    return "-".join(parts)


def selection_kind(verify_kv: VerifyKV) -> dict[str, Any]:
    """The settings that say which keys it reads, but not how many or when: what its fidelity is a curve of."""
    kept = to_plain(verify_kv, complete=True)
    left_out = ("budget", "full_period", "buffer", *(("recent",) if verify_kv.source == "recent" else ()))
    return {name: value for name, value in kept.items() if name not in left_out}


def of_source(verify_kv: VerifyKV, source: str, budget: int) -> VerifyKV:
    """The same partial verification from another source with so many keys; what that source does not use is left out.

    recent reads its sink and as many recent keys as the budget leaves; page_bound takes pages of 16 where keys are
    single and selections by kv head where there is one for all; lookahead and hybrid make one selection for all. The
    buffer, which decides when and not what, is left out too.
    """
    named: Any = source
    if source == "recent":
        return VerifyKV(
            mode="partial", full_period=verify_kv.full_period, source=named, sink=verify_kv.sink,
            recent=max(budget - verify_kv.sink, 0),
        )  # fmt: skip
    kept = replace(verify_kv, mode="partial", source=named, budget=budget, buffer=DEFAULT.buffer)
    if source != "hybrid":
        kept = replace(kept, lookahead_tokens=DEFAULT.lookahead_tokens)
    if source in ("lookahead", "hybrid"):
        kept = replace(kept, page=DEFAULT.page, scope="model")
    if source != "page_bound":
        kept = replace(kept, bound=DEFAULT.bound, rows=DEFAULT.rows)
    else:
        kept = replace(kept, page=kept.page if kept.page > 1 else 16)
        kept = kept if kept.scope != "model" else replace(kept, scope=DEFAULT.scope)
    return kept


def heads_used(heads: ScoringHeads, source: str) -> dict[str, Any]:
    """The scoring heads that a source reads, as plain settings; a policy may name no other ones."""
    used = {"target": source in ("history", "hybrid"), "draft": source in ("lookahead", "hybrid")}
    return {whose: to_plain(getattr(heads, whose)) for whose, read in used.items() if read and getattr(heads, whose)}


def policy_source(policy: Policy) -> str:
    """`source_label` of a policy's lossy variants, which share one drafter; "" for a lossless policy."""
    labels = [source_label(v.verify_kv, v.scoring_heads) for v in policy.variants()]
    return next((label for label in labels if label), "")
