"""AIPerf's per-request records: profile_export.jsonl, one request a line.

`metrics` holds {value, unit} by name, of which input_sequence_length, output_sequence_length, request_latency and
time_to_first_token are read; `error` is null where the request succeeded. With --export-level records,
`spec_decode_acceptance` holds the counts of the engine that answered (vLLM, SGLang, TensorRT-LLM): a sparse histogram
of accepted drafts, and per_step_accepted and per_step_drafted where the engine reports them.

Sources: AIPerf docs/tutorials/working-with-profile-exports.md, docs/tutorials/spec-decode-metrics.md and
src/aiperf/common/models/spec_decode_models.py (SpecDecodeAcceptanceRecord). Failed requests are passed over.
"""

from pathlib import Path

from specdial.simulator.importers.lines import MOST_TOKENS, Line, json_lines
from specdial.simulator.importers.requests import Request, Requests, steps_of

PLACE = "spec_decode_acceptance"


def read(path: Path) -> Requests:
    """The requests of a benchmark. Raises UserError naming the first bad line."""
    found, skipped = [], 0
    for line in json_lines(path):
        if line.get("error") is not None or line.get(PLACE) is None:
            skipped += 1
            continue
        drafted, accepted, k, ordered = steps_of(line, PLACE)
        counted = f"{PLACE}.completion_tokens"  # as the engine counted them; AIPerf's own tokenizer may differ
        output = counted if line.get(counted) is not None else "metrics.output_sequence_length.value"
        found.append(
            Request(
                line.name,
                line.whole("metrics.input_sequence_length.value", low=1, high=MOST_TOKENS),
                line.whole(output, low=1, high=MOST_TOKENS),
                drafted,
                accepted,
                k,
                ordered,
                _decode_us(line),
            )
        )
    return Requests(tuple(found), skipped)


def _decode_us(line: Line) -> float:
    """Latency less the time to the first token; 0 where either is missing."""
    names = ("metrics.request_latency", "metrics.time_to_first_token")
    if any(line.get(f"{name}.value") is None for name in names):
        return 0.0
    for name in names:
        if line.get(f"{name}.unit") != "ms":
            raise line.error(f"{name}.unit is {line.get(f'{name}.unit')!r}, not 'ms'")
    latency, first = (line.number_at(f"{name}.value") for name in names)
    return max(latency - first, 0.0) * 1e3
