"""specdial run: decode one prompt with a policy file, or plainly, and stream the text."""

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from specdial.engine.acceptance import SAID, Acceptance, said_of
from specdial.engine.job import ModelSettings, empty_sequences
from specdial.engine.loop import Decoding, Round
from specdial.engine.sampling import Sampling
from specdial.engine.weights import load_model
from specdial.policies.artifact import write_json_atomic
from specdial.policies.errors import UserError
from specdial.policies.fields import parse, setting
from specdial.policies.file import policy_digest
from specdial.policies.schema import Policy, policy_from_mapping


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of `run`. prompt: the text, or @FILE. chat: put the prompt into the model's chat template."""

    model: ModelSettings
    policy: dict[str, Any]
    prompt: str
    chat: bool = False
    new_tokens: int = setting(128, low=1)
    ignore_eos: bool = False
    sampling: Sampling = field(default_factory=Sampling)
    acceptance: Acceptance = field(default_factory=Acceptance)
    out: str | None = None


def run(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Decode and stream to standard output; metrics go to standard error and, with `out`, to a JSON file."""
    s = parse(Settings, settings)
    policy = policy_from_mapping(s.policy, "policy")
    synthetic = s.acceptance.of_one(policy)
    text = _prompt(s.prompt)
    if s.out is not None and Path(s.out).is_dir():
        raise UserError(f"{s.out} is a directory", "give out=FILE.json")
    model = load_model(s.model.source, device=s.model.device, dtype=s.model.dtype, seed=s.model.seed)
    tokenizer = model.tokenizer
    ids = tokenizer.chat([{"role": "user", "content": text}]) if s.chat else tokenizer.encode(text)
    if not ids:
        raise UserError("the prompt is empty", "give prompt=TEXT or prompt=@FILE")
    sequences = empty_sequences(model, len(ids) + s.new_tokens, 1, [policy])
    started_s = time.perf_counter()
    sequences.prefill([ids], [s.new_tokens], frozenset() if s.ignore_eos else frozenset(tokenizer.eos_ids))
    prefilled_s = time.perf_counter()
    rounds: list[Round] = []
    stream, shown = tokenizer.stream(), ""
    for round_ in Decoding(sequences, policy, s.sampling, [0], synthetic=synthetic).rounds():
        rounds.append(round_)
        piece = stream.push(round_.emitted[0])
        sys.stdout.write(piece)
        sys.stdout.flush()
        shown += piece
    rest = stream.finish()
    sys.stdout.write(f"{rest}\n")
    shown += rest
    metrics = _metrics(rounds, policy, prefilled_s - started_s, time.perf_counter() - prefilled_s)
    metrics |= {"prompt_tokens": len(ids), "model": s.model.name or model.config.name, "random_weights": model.random}
    metrics |= said_of(synthetic)
    print(_line(metrics), file=sys.stderr)
    if s.out is not None:
        write_json_atomic(Path(s.out), {"schema": "specdial/metrics/1", **metrics, "text": shown})
    return metrics


def _prompt(prompt: str) -> str:
    if not prompt.startswith("@"):
        text = prompt
    else:
        try:
            text = Path(prompt[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"cannot read the prompt {prompt[1:]}: {error}", "give prompt=@FILE of UTF-8 text"
            ) from None
    if not text.strip():
        raise UserError("the prompt is empty", "give prompt=TEXT or prompt=@FILE")
    return text


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
