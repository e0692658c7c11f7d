"""Drafters: what proposes tokens. The registry maps a policy's drafter kind to how it is made for a batch."""

from collections.abc import Callable

from specdial.engine.drafters.base import Drafter, HostDrafter
from specdial.engine.drafters.eagle import Eagle
from specdial.engine.drafters.lookup import Lookup
from specdial.engine.drafters.model import ModelDrafter
from specdial.engine.drafters.quest import Quest
from specdial.engine.drafters.sparse_self import SparseSelf
from specdial.engine.drafters.tree import TreeEagle
from specdial.engine.sequences import Sequences
from specdial.policies.controllers import longest_draft
from specdial.policies.schema import DraftKV, Policy
from specdial.policies.verification import LOOKAHEAD


def draft_kv_of(sequences: Sequences, policy: Policy) -> DraftKV:
    """The policy's selection with a budget in keys: a fraction is one of the longest prompt."""
    return policy.draft_kv.resolved(int(sequences.prompt_tokens.max()))


def model_drafter(sequences: Sequences, policy: Policy) -> ModelDrafter:
    """A draft model, which keeps its scoring heads' attention if the policy verifies by it."""
    kv, own = policy.verify_kv, policy.drafter
    scored = not kv.lossless and kv.source in LOOKAHEAD
    heads, most = policy.scoring_heads.by_layer("draft") if scored else None, longest_draft(policy.controller)
    return ModelDrafter(sequences, own.model, window=own.window, own_kv=own.own_kv, heads=heads, most_drafts=most)


def eagle_drafter(sequences: Sequences, policy: Policy) -> Eagle:
    """A head that drafts chains or trees."""
    name, tree = policy.drafter.model, policy.drafter.tree
    return Eagle(sequences, name) if tree is None else TreeEagle(sequences, name, tree)


DRAFTERS: dict[str, Callable[[Sequences, Policy], Drafter | HostDrafter]] = {
    "sparse_self": lambda s, p: SparseSelf(s, draft_kv_of(s, p), float8=p.drafter.weights == "fp8"),
    "model": model_drafter,
    "lookup": lambda s, p: Lookup(s, p.drafter.ngram),
    "quest": lambda s, p: Quest(s, draft_kv_of(s, p)),
    "eagle": eagle_drafter,
}


def make_drafter(sequences: Sequences, policy: Policy) -> Drafter | HostDrafter:
    """The drafter that one variant of a policy asks for.

    Raises ValueError where sequences lack what it needs, UserError where policy, model and prompts do not go together.
    """
    return DRAFTERS[policy.drafter.kind](sequences, policy)
