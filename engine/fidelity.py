"""How far partial verification strayed: its output judged by a full verification of the same text, teacher-forced.

Measured on a separate, untimed decoding whose logits are kept; then the text is read again in blocks of rows that see
every key. Per committed token: is it the likeliest under full verification too, KL(full || the deciding logits), and
the cosine between the hidden states that enter the last layer in the deciding pass and in the full one.
Per document: how far its text agrees with plain decoding. Leaves out sampled decoding, where a token need not be the
likeliest, and what a selection holds of the target's attention (arr).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from specdial.engine.loop import Decoding
from specdial.engine.prefill import ROW_MULTIPLE
from specdial.engine.sampling import Sampling
from specdial.engine.sequences import Sequences
from specdial.engine.states import LastStates
from specdial.policies.errors import UserError
from specdial.policies.schema import Policy, plain_policy

BLOCK_ROWS = 16
KEPT_BYTES = 1 << 30  # of logits, in host memory; later tokens of a batch have no KL


@dataclass(frozen=True, slots=True)
class Fidelity:
    """One document's committed tokens: arrays [N], from its first new one on.

    kl_nats, hidden_cosine: NaN where the deciding logits were not kept. prefix_tokens: leading tokens that are plain
    decoding's. agreeing_tokens: tokens that are plain decoding's at their place, of plain_tokens.
    """

    top1_match: npt.NDArray[np.bool_]
    kl_nats: npt.NDArray[np.float32]
    hidden_cosine: npt.NDArray[np.float32]
    rounds_since_full: npt.NDArray[np.int64]
    prefix_tokens: int
    agreeing_tokens: int
    plain_tokens: int


def check_greedy(sampling: Sampling) -> None:
    """Raises UserError in sampled decoding."""
    if not sampling.greedy:
        raise UserError(
            "fidelity=true compares with the likeliest token, and decoding is sampled",
            "set sampling.temperature=0 or fidelity=false",
            field="fidelity",
        )


def plain_output(s: Sequences, numbers: list[int]) -> list[list[int]]:
    """What plain greedy decoding adds to prefilled sequences; rewinds them first."""
    s.rewind()
    for _ in Decoding(s, plain_policy(), Sampling(), numbers).rounds():
        pass
    return s.outputs


@torch.inference_mode()
def measure_fidelity(
    s: Sequences, policy: Policy, numbers: list[int], plain: Sequence[Sequence[int]], *, kept_bytes: int = KEPT_BYTES
) -> list[Fidelity]:
    """Decode greedily under a policy and judge every token. plain: plain decoding's new tokens.

    `s` holds prefilled sequences; it is used as scratch and left rewound to the prompts.
    """
    s.rewind()
    decoding = Decoding(s, policy, Sampling(), numbers, keep_logits=True)
    if decoding.logits is None or decoding.states is None:
        raise ValueError("this decoding keeps no logits")
    decided: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(s.batch)]  # [n, V] and [n, hidden], on the host
    since: list[list[int]] = [[] for _ in range(s.batch)]
    left = kept_bytes
    for played in decoding.rounds():
        for b, emitted in enumerate(played.emitted):
            since[b] += [played.rounds_since_full] * len(emitted)
            logits = decoding.logits[b, : len(emitted)]  # [n, V]
            known = sum(len(part) for part, _ in decided[b])
            if emitted and left >= logits.nbytes and known + len(emitted) == len(since[b]):
                left -= logits.nbytes
                states = decoding.states.kept[b, : len(emitted)]  # [n, hidden]
                decided[b].append((logits.to("cpu", copy=True), states.to("cpu", copy=True)))
    tokens, ours = [list(t) for t in s.tokens], s.outputs
    kept = [tuple(map(torch.cat, zip(*parts))) if parts else None for parts in decided]
    judged = _judge(s, tokens, kept)
    s.rewind()
    found = []
    for b, judgement in enumerate(judged):
        theirs = plain[b]
        same = [a == c for a, c in zip(ours[b], theirs)]
        prefix = same.index(False) if False in same else len(same)
        found.append(Fidelity(*judgement, np.array(since[b], dtype=np.int64), prefix, sum(same), len(theirs)))
    return found


def _judge(
    s: Sequences, tokens: list[list[int]], kept: list[tuple[Tensor, ...] | None]
) -> list[tuple[npt.NDArray[np.bool_], npt.NDArray[np.float32], npt.NDArray[np.float32]]]:
    """Top-1 agreement, KL and cosine of every new token of `tokens`, by full attention over text alone."""
    s.rewind()
    new = [len(t) - int(p) for t, p in zip(tokens, s.prompt_tokens)]
    match = [np.zeros(n, dtype=np.bool_) for n in new]
    kl, cosine = ([np.full(n, np.nan, dtype=np.float32) for n in new] for _ in range(2))
    states = LastStates(s.decoder, s.batch, BLOCK_ROWS - 1)
    at = 0
    while at < max(new):
        room = s.cache.capacity_tokens - int(s.cache.host_lengths.max()) - ROW_MULTIPLE
        T = max(min(BLOCK_ROWS, max(new) - at, room), 1)
        block = np.zeros((s.batch, T), dtype=np.int64)  # [B, T]; rows past a sequence's end write scratch keys
        rows = np.clip(np.array(new) - at, 0, T)  # [B] that count
        for b, (text, start) in enumerate(zip(tokens, s.prompt_tokens)):
            given = text[int(start) - 1 + at : int(start) - 1 + at + int(rows[b])]
            block[b, : len(given)] = given
        with s.tapping([states]):
            logits = s.forward_block(torch.from_numpy(block).to(s.decoder.device), padded=True, rows=False).logits
        states.keep(None, T)
        s.cache.commit(rows)
        for b, n in enumerate(rows.tolist()):
            full = logits[b, :n]  # [n, V]
            wanted = torch.tensor(tokens[b][int(s.prompt_tokens[b]) + at :][:n], device=full.device)
            match[b][at : at + n] = (full.argmax(dim=-1) == wanted).cpu().numpy()
            decided = kept[b]
            if decided is not None and n:
                own, seen = (part[at : at + n].to(full.device) for part in decided)  # [<= n, V], [<= n, hidden]
                part = slice(at, at + len(own))
                kl[b][part] = divergence(full[: len(own)], own).cpu().numpy()
                cosine[b][part] = F.cosine_similarity(states.kept[b, : len(own)].float(), seen.float()).cpu().numpy()
        at += T
    return list(zip(match, kl, cosine))


def divergence(full: Tensor, own: Tensor) -> Tensor:
    """KL(full || own) of logits [n, V] each, in nats, [n] float32."""
    log_full, log_own = (torch.log_softmax(x.double(), dim=-1) for x in (full, own))
    return (log_full.exp() * (log_full - log_own)).sum(dim=-1).clamp(min=0.0).float()


def summary(documents: Sequence[Fidelity]) -> dict[str, Any]:
    """What a `measured` block and a table say of several documents: means over tokens, None where there are none.

    drift: the same by rounds since full verification, 0 for tokens that a full round decided.
    """
    match, kl, cosine, since = (
        np.concatenate([getattr(f, name) for f in documents])
        for name in ("top1_match", "kl_nats", "hidden_cosine", "rounds_since_full")
    )
    plain = sum(f.plain_tokens for f in documents)
    return {
        "top1_agreement": float(match.mean()) if len(match) else None,
        "kl_nats": _mean(kl),
        "kl_tokens": int((~np.isnan(kl)).sum()),
        "hidden_cosine": _mean(cosine),
        "drift": [
            {
                "rounds_since_full": int(age),
                "tokens": int((since == age).sum()),
                "top1_agreement": float(match[since == age].mean()),
                "kl_nats": _mean(kl[since == age]),
                "hidden_cosine": _mean(cosine[since == age]),
            }
            for age in np.unique(since)
        ],
        "prefix_frac": sum(f.prefix_tokens for f in documents) / plain if plain else None,
        "token_agreement": sum(f.agreeing_tokens for f in documents) / plain if plain else None,
    }


def _mean(values: npt.NDArray[np.float32]) -> float | None:
    """Of the values that are known, None where none is."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None


def intervals(documents: Sequence[Fidelity], resamples: int, seed: int) -> dict[str, list[float]]:
    """95 % bootstrap intervals over documents of top-1 agreement and, where it is known of every document, KL."""
    draws = np.random.default_rng(seed).integers(0, len(documents), (max(resamples, 1), len(documents)))
    found = {}
    for name, values in (
        ("top1_agreement", [f.top1_match.astype(np.float64) for f in documents]),
        ("kl_nats", [f.kl_nats[~np.isnan(f.kl_nats)].astype(np.float64) for f in documents]),
    ):
        total, count = np.array([v.sum() for v in values]), np.array([len(v) for v in values])
        if count.min() > 0:
            low, high = np.percentile(total[draws].sum(axis=1) / count[draws].sum(axis=1), [2.5, 97.5])
            found[f"{name}_interval"] = [float(low), float(high)]
    return found


def error_of(predicted: Mapping[str, Any] | None, measured: Mapping[str, Any]) -> dict[str, float | None]:
    """A prediction minus what `summary` says, None where either is not known."""
    found: dict[str, float | None] = {}
    for name in ("top1_agreement", "kl_nats"):
        value = ((predicted or {}).get(name) or {}).get("value")
        known = value is not None and measured[name] is not None
        found[name] = float(value - measured[name]) if known else None
    return found


def probes_table(doc: int, prompt_tokens: int, found: Fidelity) -> dict[str, Any]:
    """The trace's `probes` table of one document."""
    n = len(found.top1_match)
    return {
        "doc": np.full(n, doc),
        "position": np.arange(prompt_tokens, prompt_tokens + n),
        "arm": np.zeros(n, dtype=np.int64),
        "arr": [None] * n,
        "kl_nats": [None if np.isnan(x) else float(x) for x in found.kl_nats],
        "hidden_cosine": [None if np.isnan(x) else float(x) for x in found.hidden_cosine],
        "top1_match": found.top1_match,
        "rounds_since_full": found.rounds_since_full,
        "draft_match": [None] * n,
        "full_match": [None] * n,
    }
