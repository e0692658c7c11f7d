"""specdial run: decode a prompt, or many, with a policy file, or plainly, and stream the text.

The policy file is read again between prompts, so that a new one takes over without a restart. With `trace` every round
is kept, as `record` keeps them: what `drift` compares with what the policy was tuned on.
"""

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from specdial.engine.acceptance import SAID, Acceptance, said_of
from specdial.engine.deployment import Deployment
from specdial.engine.job import Job, ModelSettings
from specdial.engine.progress import text_view
from specdial.engine.requests import documents, read_requests
from specdial.engine.round import Round
from specdial.engine.sampling import Sampling
from specdial.engine.weights import load_model
from specdial.engine.workloads import Document, WorkloadSpec
from specdial.policies.artifact import claim_directory, write_json_atomic
from specdial.policies.errors import UserError
from specdial.policies.fields import parse, setting, to_plain
from specdial.policies.file import policy_digest
from specdial.policies.schema import Policy, policy_from_mapping
from specdial.policies.watched import WatchedPolicy


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of `run`. prompt: the text, or @FILE; prompts: instead, a file of many (engine.requests).

    chat: put texts into the model's chat template. policy_file: where `policy` came from, to be read again before every
    prompt; None where it did not, or was changed on the way. trace: a directory for the rounds.
    """

    model: ModelSettings
    policy: dict[str, Any]
    prompt: str | None = None
    prompts: str | None = None
    policy_file: str | None = None
    chat: bool = False
    new_tokens: int = setting(128, low=1)
    ignore_eos: bool = False
    sampling: Sampling = field(default_factory=Sampling)
    acceptance: Acceptance = field(default_factory=Acceptance)
    trace: str | None = None
    out: str | None = None


def run(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Decode and stream to standard output; metrics go to standard error and, with `out`, to a JSON file.

    Returns the metrics of the one prompt, or of all together with `requests`, those of each.
    """
    s = parse(Settings, settings)
    policy = policy_from_mapping(s.policy, "policy")
    s.acceptance.of_one(policy)
    requests = read_requests(s.prompt, s.prompts)
    if s.out is not None and Path(s.out).is_dir():
        raise UserError(f"{s.out} is a directory", "give out=FILE.json")
    model = load_model(s.model.source, device=s.model.device, dtype=s.model.dtype, seed=s.model.seed)
    prompts = documents(requests, model.tokenizer, chat=s.chat, new_tokens=s.new_tokens)
    spec = WorkloadSpec(
        kind="prompts",
        context_tokens=max(len(d.prompt_ids) for d in prompts),
        documents=len(prompts),
        new_tokens=s.new_tokens,
        ignore_eos=s.ignore_eos,
        path=s.prompts,
    )
    job = Job(model, s.model.name or model.config.name, spec, prompts)
    if s.trace is not None:  # whatever the policy: each has a folder of its own in there
        claim_directory(Path(s.trace), "run", {**to_plain(s), "policy": None, "policy_file": None, "trace": None})
    path = None if s.policy_file is None else Path(s.policy_file)
    trace = None if s.trace is None else Path(s.trace)
    deployment = Deployment(job, WatchedPolicy(policy, path), s.sampling, s.acceptance, trace)
    found = [_answer(deployment, document) for document in prompts]
    metrics = found[0] if s.prompts is None else _together(found)
    if s.out is not None:
        write_json_atomic(Path(s.out), {"schema": "specdial/metrics/1", **metrics})
    return metrics


def _answer(deployment: Deployment, document: Document) -> dict[str, Any]:
    """Decode one prompt and stream its text. Returns its metrics and the text."""
    job = deployment.job
    started_s = time.perf_counter()
    decoding = deployment.prepare(document)
    prefilled_s = time.perf_counter()
    rounds: list[Round] = []
    stream, shown = job.model.tokenizer.stream(), ""
    with text_view(document.new_tokens) as view:
        for round_ in decoding.rounds():
            rounds.append(round_)
            accepted, ids = int(round_.accepted[0]), round_.emitted[0]
            for part, drafted in ((ids[:accepted], True), (ids[accepted:], False)):
                piece = stream.push(part)
                view.write(piece, drafted=drafted)
                shown += piece
            view.count(round_)
    rest = stream.finish()
    sys.stdout.write(f"{rest}\n")
    metrics = _metrics(rounds, deployment.policy, prefilled_s - started_s, time.perf_counter() - prefilled_s)
    metrics |= {"prompt": document.name, "prompt_tokens": len(document.prompt_ids), "model": job.name}
    metrics |= {"random_weights": job.model.random, **said_of(deployment.synthetic())}
    print(_line(metrics), file=sys.stderr)
    deployment.keep(document, rounds, decoding.s.tokens[0])
    return {**metrics, "text": shown + rest}


def _together(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Of all prompts: sums, and what follows from them."""
    tokens, rounds = (sum(m[name] for m in found) for name in ("new_tokens", "rounds"))
    return {
        "model": found[0]["model"],
        "random_weights": found[0]["random_weights"],
        "policies": list(dict.fromkeys(m["policy"] for m in found)),
        "lossless": all(m["lossless"] for m in found),
        "new_tokens": tokens,
        "rounds": rounds,
        "tokens_per_round": tokens / rounds,
        "tokens_per_s": tokens / sum(m["decode_s"] for m in found),
        "requests": found,
    }


def _metrics(rounds: list[Round], policy: Policy, prefill_s: float, decode_s: float) -> dict[str, Any]:
    drafted = int(np.sum([r.k[0] for r in rounds]))
    accepted = int(np.sum([r.accepted[0] for r in rounds]))
    tokens = sum(len(r.emitted[0]) for r in rounds)
    return {
        "policy": policy.name,
        "policy_digest": policy_digest(policy),
        "lossless": policy.lossless,
        "new_tokens": tokens,
        "rounds": len(rounds),
        "tokens_per_round": tokens / len(rounds),
        "alpha": accepted / drafted if drafted else None,
        "tokens_per_s": tokens / decode_s,
        "prefill_s": prefill_s,
        "decode_s": decode_s,
    }


def _line(m: dict[str, Any]) -> str:
    alpha = f", alpha {m['alpha']:.2f}" if m["alpha"] is not None else ""
    said = (" (random weights)" if m["random_weights"] else "") + (SAID if "synthetic_acceptance" in m else "")
    return (
        f"{m['model']}{said}, policy {m['policy']} ({'lossless' if m['lossless'] else 'lossy'}): "
        f"{m['new_tokens']} tokens in {m['rounds']} rounds, {m['tokens_per_round']:.2f} tokens/round{alpha}, "
        f"{m['tokens_per_s']:.1f} tokens/s after {m['prefill_s']:.1f} s of prefill over {m['prompt_tokens']} tokens"
    )
