"""vLLM's per-request speculative metrics: one API response a line, as a client logged it.

A response, or the last chunk of a stream, has `usage.prompt_tokens`, `usage.completion_tokens` and, where the server
ran with --per-request-spec-decode-metrics, `metrics.speculative_decoding`: at level `detailed` the drafts made and
accepted at every step in order (per_step_drafted, per_step_accepted), at level `summary` a histogram alone. With
--enable-per-request-metrics there is `metrics.generation_time_ms` too, from the first token to the last.

Sources: vLLM docs/features/speculative_decoding/acceptance_metrics.md and docs/features/per_request_metrics.md, both
of which call the shape experimental; pull requests 48915 and 43310. Leaves out responses of several sequences, for
which vLLM reports nothing.
"""

from pathlib import Path

from specdial.simulator.importers.lines import MOST_TOKENS, json_lines
from specdial.simulator.importers.requests import Request, Requests, steps_of

PLACE = "metrics.speculative_decoding"


def read(path: Path) -> Requests:
    """The requests of a log. Raises UserError naming the first bad line."""
    found, skipped = [], 0
    for line in json_lines(path):
        if line.get(PLACE) is None:
            skipped += 1
            continue
        drafted, accepted, k, ordered = steps_of(line, PLACE)
        timed = line.get("metrics.generation_time_ms") is not None
        found.append(
            Request(
                line.name,
                line.whole("usage.prompt_tokens", low=1, high=MOST_TOKENS),
                line.whole("usage.completion_tokens", low=1, high=MOST_TOKENS),
                drafted,
                accepted,
                k,
                ordered,
                1e3 * line.number_at("metrics.generation_time_ms") if timed else 0.0,
            )
        )
    return Requests(tuple(found), skipped)
