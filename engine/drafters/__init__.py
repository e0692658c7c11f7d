"""Drafters: what proposes tokens. The registry maps a policy's drafter kind to how it is made for a batch."""

from collections.abc import Callable

from specdial.engine.drafters.base import Drafter
from specdial.engine.drafters.sparse_self import SparseSelf
from specdial.engine.sequences import Sequences
from specdial.policies.schema import Policy

DRAFTERS: dict[str, Callable[[Sequences, Policy], Drafter]] = {
    "sparse_self": lambda s, policy: SparseSelf(s, policy.draft_kv, float8=policy.drafter.weights == "fp8"),
}


def make_drafter(sequences: Sequences, policy: Policy) -> Drafter:
    """The drafter that one variant of a policy asks for. Raises ValueError where sequences lack what it needs."""
    return DRAFTERS[policy.drafter.kind](sequences, policy)
