"""vLLM's Prometheus counters: one scrape of /metrics, or a folder of scrapes in the order of their names.

    vllm:spec_decode_num_drafts_total                           speculative steps
    vllm:spec_decode_num_draft_tokens_total                     drafts made
    vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"}   steps that accepted the first draft, and so on
    vllm:prompt_tokens_total, vllm:request_success_total        tokens of all prompts, requests that ended

summed over engines and models. They tell how often every depth is accepted over all requests, and nothing of one
request: the steps between two scrapes are shuffled and dealt to requests of mean length, so what comes of them is
modelled, and an interval over those requests says only how much chance is in them.

Sources: vLLM vllm/v1/spec_decode/metrics.py, docs/design/metrics.md and docs/features/speculative_decoding/
acceptance_metrics.md (counters against per-request fields); the Prometheus text format 0.0.4. Counters of a server that
started anew between two scrapes are refused.
"""

import re
from pathlib import Path

from specdial.policies.errors import UserError
from specdial.simulator.importers.lines import Line, text_lines
from specdial.simulator.importers.requests import Request, Requests, unordered_steps

STEPS, DRAFTS = "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
PROMPT_TOKENS, DONE = "vllm:prompt_tokens_total", "vllm:request_success_total"
SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+-?\d+)?\s*$")
POSITION = re.compile(r'(?:^|,)\s*position="(\d{1,2})"')
MOST_REQUESTS, MOST_REQUEST_STEPS = 32, 512  # that a window is dealt to: enough for an estimate


def read(path: Path) -> Requests:
    """Requests of mean length that share the counted steps. Raises UserError naming file and line."""
    scrapes = sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]
    if not scrapes:
        raise UserError(f"{path} holds no scrape", "save /metrics into files there")
    counters = [_scrape(scrape) for scrape in scrapes]
    if len(counters) == 1:
        return Requests(tuple(_window(scrapes[0], {}, counters[0])))
    found = []
    for scrape, before, after in zip(scrapes[1:], counters, counters[1:], strict=False):
        found += _window(scrape, before, after)
    return Requests(tuple(found))


def _scrape(path: Path) -> dict[str, float]:
    """The counters by name, those by position as NAME/POSITION."""
    found: dict[str, float] = {}
    for number, text in text_lines(path):
        if not text.startswith("vllm:"):
            continue
        match = SAMPLE.match(text)
        if match is None:
            raise Line(path, number, {}).error("not a Prometheus sample")
        name = match["name"]
        if name not in (STEPS, DRAFTS, ACCEPTED, PROMPT_TOKENS, DONE):
            continue
        line = Line(path, number, {"value": match["value"]})
        if name == ACCEPTED:
            position = POSITION.search(match["labels"] or "")
            if position is None:
                raise line.error(f"{name} has no position")
            name = f"{name}/{int(position[1])}"
        found[name] = found.get(name, 0.0) + line.number_at("value")
    missing = [name for name in (STEPS, DRAFTS, f"{ACCEPTED}/0", PROMPT_TOKENS, DONE) if name not in found]
    if missing:
        raise UserError(f"{path} has no {missing[0]}", "scrape a server that speculates")
    return found


def _window(scrape: Path, before: dict[str, float], after: dict[str, float]) -> list[Request]:
    """What happened between two scrapes, as requests."""
    line = Line(scrape, 1, {})
    grown = {name: round(value - before.get(name, 0.0)) for name, value in after.items()}
    if min(grown.values()) < 0:
        raise line.error("its counters are lower than those of the scrape before: the server started anew")
    steps, done = grown[STEPS], grown[DONE]
    if not steps or not done:
        return []
    positions = [grown[f"{ACCEPTED}/{i}"] for i in range(64) if f"{ACCEPTED}/{i}" in grown]
    reached = [steps, *positions]
    if any(b > a for a, b in zip(reached, positions, strict=False)):
        raise line.error("a draft was accepted more often than the one before it")
    histogram = [a - b for a, b in zip(reached, [*positions, 0], strict=True)]
    kept = min(steps, MOST_REQUESTS * MOST_REQUEST_STEPS)
    histogram = [round(count * kept / steps) for count in histogram]
    total, k = sum(histogram), len(positions)
    drafts = min(max(round(grown[DRAFTS] * total / steps), sum(j * n for j, n in enumerate(histogram))), k * total)
    accepted, drafted = unordered_steps(line, histogram, drafts, k)
    requests = max(min(done, MOST_REQUESTS, total), 1)
    size = max(min(round(steps / done), total // requests, MOST_REQUEST_STEPS), 1)
    prompt = max(round(grown[PROMPT_TOKENS] / done), 1)
    found = []
    for i in range(requests):
        part = slice(i * size, (i + 1) * size)
        tokens = 1 + sum(a + 1 for a in accepted[part])
        name = f"{scrape.name}:{i + 1}"
        found.append(Request(name, prompt, tokens, tuple(drafted[part]), tuple(accepted[part]), k, ordered=False))
    return found
