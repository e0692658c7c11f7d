"""Drafters: what proposes tokens. The registry maps a policy's drafter kind to how it is made for a batch."""

from collections.abc import Callable

from specdial.engine.drafters.base import Drafter, HostDrafter
from specdial.engine.drafters.lookup import Lookup
from specdial.engine.drafters.model import ModelDrafter
from specdial.engine.drafters.quest import Quest
from specdial.engine.drafters.sparse_self import SparseSelf
from specdial.engine.sequences import Sequences
from specdial.policies.schema import DraftKV, Policy


def draft_kv_of(sequences: Sequences, policy: Policy) -> DraftKV:
    """The policy's selection with a budget in keys: a fraction is one of the longest prompt."""
    return policy.draft_kv.resolved(int(sequences.prompt_tokens.max()))


DRAFTERS: dict[str, Callable[[Sequences, Policy], Drafter | HostDrafter]] = {
    "sparse_self": lambda s, p: SparseSelf(s, draft_kv_of(s, p), float8=p.drafter.weights == "fp8"),
    "model": lambda s, p: ModelDrafter(s, p.drafter.model),
    "lookup": lambda s, p: Lookup(s, p.drafter.ngram),
    "quest": lambda s, p: Quest(s, draft_kv_of(s, p)),
}


def make_drafter(sequences: Sequences, policy: Policy) -> Drafter | HostDrafter:
    """The drafter that one variant of a policy asks for.

    Raises ValueError where sequences lack what it needs, UserError where policy, model and prompts do not go together.
    """
    return DRAFTERS[policy.drafter.kind](sequences, policy)
