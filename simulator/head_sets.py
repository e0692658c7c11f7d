"""The scoring heads a search may verify by: the set that `tune_heads` chose, or the best so many of a ranking."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdial.engine.trace.attention import DRAFT, TARGET, HeadScore
from specdial.engine.trace.attention_file import read_attention
from specdial.policies.errors import UserError
from specdial.policies.file import load_policy

Heads = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class HeadSets:
    """target, draft: (layer, head), the best first. counts: how many of the target's to try, (0,) for no heads."""

    target: Heads = ()
    draft: Heads = ()
    counts: tuple[int, ...] = (0,)

    def of(self, count: int | None, verify_kv: dict[str, Any]) -> dict[str, Any]:
        """The `scoring_heads` part of a policy that verifies so; empty where nothing is scored by heads."""
        count, source = self.counts[0] if count is None else count, verify_kv["source"]
        target = self.target[:count] if source in ("history", "hybrid") else ()
        draft = self.draft if source in ("lookahead", "hybrid") else ()
        return {"scoring_heads": {"target": list(target), "draft": list(draft)}} if target or draft else {}


def read_head_sets(path: str | None, counts: tuple[int, ...]) -> HeadSets:
    """Read a policy file of `tune_heads` or rank an attention trace's heads.

    Raises UserError when there are fewer heads than wanted, or counts without heads.
    """
    if path is None:
        if counts:
            raise UserError("search.verify_kv.head_counts is given without heads", "add search.verify_kv.heads=PATH")
        return HeadSets()
    if Path(path).is_dir():
        ranked = sorted(read_attention(path).heads, key=lambda head: head.rank)
        target, draft = (_ranked(ranked, source) for source in (TARGET, DRAFT))
        if not counts:
            raise UserError(f"{path} ranks heads and chooses none", "add search.verify_kv.head_counts")
        draft = draft[: max(counts)]
    else:
        heads = load_policy(path).scoring_heads
        target, draft = heads.target, heads.draft
    if max(counts, default=0) > len(target):
        raise UserError(f"{path} has {len(target)} target heads", f"ask for {max(counts)} of them elsewhere")
    return HeadSets(target, draft, counts or (len(target),))


def _ranked(heads: list[HeadScore], source: str) -> Heads:
    return tuple((head.layer, head.head) for head in heads if head.source == source)
