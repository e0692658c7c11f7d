"""Prompt and output lengths of requests, and their mix: what share of requests and of tokens has which context.

Ranges are powers of two. `tokens_frac` weighs a range by the tokens generated there, which is where decoding spends
its rounds; `requests_frac` by requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SCHEMA = "specdial/mix/1"


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of one request, in tokens."""

    context_tokens: int
    new_tokens: int


def mix_of(lengths: Sequence[Lengths]) -> list[dict[str, Any]]:
    """One row a range that has requests: its bounds, its shares, and the mean lengths in it."""
    found: dict[int, list[Lengths]] = {}
    for request in lengths:
        found.setdefault(request.context_tokens.bit_length() - 1, []).append(request)
    tokens = sum(request.new_tokens for request in lengths)
    rows = []
    for i, mine in sorted(found.items()):
        new = sum(request.new_tokens for request in mine)
        rows.append(
            {
                "from_context_tokens": 2**i,
                "to_context_tokens": 2 ** (i + 1),
                "requests": len(mine),
                "requests_frac": len(mine) / len(lengths),
                "tokens_frac": new / tokens,
                "mean_context_tokens": sum(request.context_tokens for request in mine) / len(mine),
                "mean_new_tokens": new / len(mine),
            }
        )
    return rows
