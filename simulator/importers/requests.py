"""Requests as other engines count them: how many drafts each speculative step made and how many were accepted.

vLLM and AIPerf use the same names for these counts. The token that prefill emits belongs to no step. Leaves out where
the counts stand in a file (one module a format) and what a trace makes of them (importers.traces).
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from specdial.simulator.importers.lines import Line

MOST_DRAFTS = 64  # the longest draft a policy can have
MOST_STEPS = 1 << 20


@dataclass(frozen=True, slots=True)
class Request:
    """drafted, accepted: of each step. k: the longest draft a step could have. new_tokens: all that were generated.

    ordered: the steps are in the order in which they happened; else only how many of each kind there were is known.
    decode_us: from the first token to the last, 0 where it was not measured.
    """

    name: str
    prompt_tokens: int
    new_tokens: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    k: int
    ordered: bool
    decode_us: float = 0.0


@dataclass(frozen=True, slots=True)
class Requests:
    """All of a file. skipped: records without speculative steps, or of requests that failed."""

    found: tuple[Request, ...]
    skipped: int = 0


def steps_of(line: Line, where: str) -> tuple[tuple[int, ...], tuple[int, ...], int, bool]:
    """(drafted, accepted, k, ordered) of the counts at a dotted place of a line. Raises UserError by line."""
    named = line.get(f"{where}.num_spec_tokens")
    if line.get(f"{where}.per_step_accepted") is not None:
        accepted = line.counts(f"{where}.per_step_accepted", high=MOST_DRAFTS)
        drafted = line.counts(f"{where}.per_step_drafted", high=MOST_DRAFTS)
        if len(accepted) != len(drafted):
            raise line.error(f"{len(accepted)} steps accepted drafts and {len(drafted)} made them")
        ordered = True
    else:
        histogram = _histogram(line, f"{where}.acceptance_histogram")
        total = line.whole(f"{where}.num_draft_tokens")
        k = len(histogram) - 1 if named is None else line.whole(f"{where}.num_spec_tokens", high=MOST_DRAFTS)
        accepted, drafted = unordered_steps(line, histogram, total, k)
        ordered = False
    k = max(drafted, default=0) if named is None else line.whole(f"{where}.num_spec_tokens", high=MOST_DRAFTS)
    for i, (a, d) in enumerate(zip(accepted, drafted, strict=True)):
        if not a <= d <= k:
            raise line.error(f"step {i + 1} accepted {a} of {d} drafts, at most {k}")
    return tuple(drafted), tuple(accepted), k, ordered


def unordered_steps(line: Line, histogram: Sequence[int], drafts: int, k: int) -> tuple[list[int], list[int]]:
    """(accepted, drafted) of steps of which only the counts are known, shuffled.

    histogram[j]: steps that accepted exactly j drafts. Where fewer than k drafts a step were made, the steps with most
    room are taken to have made fewer, one each in turn: which they were is not known.
    """
    if sum(histogram) > MOST_STEPS:
        raise line.error(f"{sum(histogram)} steps in one request")
    accepted = [j for j, steps in enumerate(histogram) for _ in range(steps)]
    if any(a > k for a in accepted):
        raise line.error(f"a step accepted {max(accepted)} drafts, at most {k}")
    drafted = [k] * len(accepted)
    short = k * len(accepted) - drafts
    if short < 0 or drafts < sum(accepted):
        raise line.error(f"{drafts} drafts do not fit {len(accepted)} steps of {k} with {sum(accepted)} accepted")
    for depth in range(k, 0, -1):
        for i, a in enumerate(accepted):
            if short > 0 and a < depth == drafted[i]:
                drafted[i] -= 1
                short -= 1
    order = random.Random(line.name).sample(range(len(accepted)), len(accepted))
    return [accepted[i] for i in order], [drafted[i] for i in order]


def _histogram(line: Line, where: str) -> list[int]:
    """A dense list, or AIPerf's map from the number accepted to the number of steps."""
    value = line.get(where)
    if not isinstance(value, dict):
        return line.counts(where)
    keys = {key: int(key) if str(key).isdecimal() and len(str(key)) < 3 else -1 for key in value}
    if any(not 0 <= j <= MOST_DRAFTS for j in keys.values()):
        raise line.error(f"{where} counts steps by something else than how many drafts they accepted")
    dense = [0] * (max(keys.values(), default=0) + 1)
    for key, j in keys.items():
        dense[j] = Line(line.path, line.number, {"steps": value[key]}).whole("steps")
    return dense
