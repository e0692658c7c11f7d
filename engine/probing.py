"""Probes: what partial verifications would have said of a recorded text, beside what full verification says of it.

At some places of a finished text every arm, a partial verification of one source and budget, verifies the text that
follows for a few rounds in a row, k drafts and one more token each. Each round commits the text, whatever was decided:
so all arms are judged at the same committed prefix. As in a lossy decoding, nothing is corrected in between: scores
stay those of the place, and keys of later rounds stem from partial attention. Then full verification reads the same
rows, and the next place is reached in full. In every round the policy's drafter drafts from the keys as they stand.

An EAGLE head reads what each verification leaves: its rows ahead of a place come from full verification, those of a
probe's later rounds from the arm's own, as in a decoding. Between probes nothing of it has to be saved. A decoding
makes its last row anew (HeadReader.start), and rows past that, an arm's or drafts', are rewritten before they are read.
Where a real decoding had partial rounds before, its head keeps their rows uncorrected, which probes do not show.

Cost: an arm takes places x rounds x (k draft steps and one partial verification) a document; full verification takes
as much once. What a draft model drafts depends on no arm: arms of the same scoring heads share its steps.

Leaves out a batch, trees of drafts, and the recall of page_bound, which chooses inside the pass. A selection that a
drafter keeps for several rounds is chosen anew at every place.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdial.engine.drafters.base import Drafter, HostDrafter
from specdial.engine.drafters.model import ModelDrafter
from specdial.engine.drafters.selection import Selection
from specdial.engine.fidelity import divergence
from specdial.engine.key_scores import Chooser
from specdial.engine.loop import Decoding
from specdial.engine.sampling import Sampling
from specdial.engine.sequences import Sequences
from specdial.engine.trace.sources import SOURCES, heads_used, of_source
from specdial.engine.verification import Plan
from specdial.policies.errors import UserError
from specdial.policies.fields import setting, to_plain
from specdial.policies.schema import Policy, ScoringHeads, VerifyKV, policy_from_mapping

CHUNK_ROWS = 16  # on the way from place to place


@dataclass(frozen=True, slots=True)
class Probing:
    """What to probe. Arms are sources x budgets, other settings those of the policy's verify_kv, if that is partial.

    rounds: partial rounds in a row, the oldest that scores and keys become. places: of each document, fewer where the
    text is short. k: drafts a round. scoring_heads: of sources that have some, where the policy names none.
    """

    sources: tuple[str, ...] = ("history", "recent")
    budgets: tuple[int, ...] = setting((128, 256, 512), low=1)
    rounds: int = setting(3, low=1, high=64)
    places: int = setting(3, low=1, high=1000)
    k: int = setting(4, low=1, high=64)
    scoring_heads: ScoringHeads = field(default_factory=ScoringHeads)

    @property
    def span_tokens(self) -> int:
        return self.rounds * (self.k + 1)


@dataclass(frozen=True, slots=True)
class Said:
    """What an arm said in one round: logits [T, V] of its rows, its drafts, the keys it read, where that is known."""

    logits: Tensor
    drafts: list[int]
    selection: Selection | None


def probe_arms(policy: Policy, probing: Probing) -> list[Policy]:
    """The policies that are probed, one an arm. Raises UserError on what cannot be probed."""
    if policy.k_max == 0:
        raise UserError("probes=true takes a policy that drafts", "record another policy")
    if any(v.drafter.tree is not None for v in policy.variants()):
        raise UserError("probes=true judges chains, the policy drafts trees", "record a policy without drafter.tree")
    if policy.kv.where != "device":
        raise UserError(f"probes=true reads keys on the device, kv.where is {policy.kv.where}", "set kv.where=device")
    base = policy.verify_kv if policy.verify_kv.mode == "partial" else VerifyKV(mode="partial")
    heads = policy.scoring_heads or probing.scoring_heads
    arms = []
    for source in probing.sources:
        if source not in SOURCES or probing.sources.count(source) > 1:
            raise UserError(f"probe.sources holds {source!r}", f"name some of {', '.join(SOURCES)}, each once")
        for budget in dict.fromkeys(probing.budgets):
            arms.append(
                policy_from_mapping(
                    {
                        "name": f"{source}-{budget}",
                        "drafter": to_plain(policy.drafter),
                        "controller": {"kind": "fixed", "k": probing.k},
                        "draft_kv": to_plain(policy.draft_kv),
                        "verify_kv": {**to_plain(of_source(base, source, budget)), "full_period": 0},
                        "scoring_heads": heads_used(heads, source),
                    },
                    "probe",
                )
            )
    if not arms:
        raise UserError("probes=true with no arm", "name sources and budgets")
    return arms


def arms_meta(arms: list[Policy]) -> list[dict[str, Any]]:
    """What meta.json says of the arms: numbers from 1 on."""
    return [
        {"arm": i, "verify_kv": to_plain(a.verify_kv, complete=True), "scoring_heads": to_plain(a.scoring_heads)}
        for i, a in enumerate(arms, start=1)
    ]


@torch.inference_mode()
def record_probes(s: Sequences, tokens: list[int], arms: list[Policy], probing: Probing) -> dict[str, Any]:
    """Columns of the `probes` table without doc, of one text, sorted by position and arm.

    tokens: the text, of which `s` holds the prompt at least; it is used as scratch and left rewound to the prompt.
    """
    if s.batch != 1:
        raise ValueError("probes take sequences one at a time")
    prompt, limits = int(s.prompt_tokens[0]), s.limits.copy()
    s.rewind()
    walk = _Walk(s, tokens, probing)
    rows: list[dict[str, Any]] = []
    for n in places_of(prompt, len(tokens), probing):
        walk.advance(n)
        said = [walk.partial_rounds(arm, n) for arm in arms]
        rows += walk.judged(arms, said, n)
    s.hold(tokens[:prompt], limit=int(limits[0]))
    s.rewind()
    rows.sort(key=lambda row: (row["position"], row["arm"]))
    names = ("position", "arm", "arr", "kl_nats", "top1_match", "rounds_since_full", "draft_match", "full_match")
    return {name: [row[name] for row in rows] for name in names}


def places_of(prompt: int, end: int, probing: Probing) -> list[int]:
    """Committed lengths at which rounds are probed, evenly spread over a text; none where it is too short."""
    most = min((end - prompt) // probing.span_tokens, probing.places)
    return [prompt + i * (end - prompt) // most for i in range(most)]


class _Walk:
    """One text, walked through in full from place to place."""

    def __init__(self, s: Sequences, tokens: list[int], probing: Probing) -> None:
        self.s, self.tokens, self.probing = s, tokens, probing
        self.width = probing.k + 1
        self._fed = len(s.tokens[0])  # tokens whose keys the draft models have right
        self._at = len(s.tokens[0])
        self._drafted: dict[tuple[Hashable, int], tuple[list[int], Tensor | None]] = {}  # see _model_drafts
        self.readers = tuple(s.heads.values())
        for reader in self.readers:
            reader.start(probing.k)

    def advance(self, n: int) -> None:
        """Move on to a committed length of n, in full."""
        self._drafted.clear()
        most = self.width if self.readers else CHUNK_ROWS  # a head has room for the rows of one round
        while self._at < n:
            self._full_rows(min(most, n - self._at))

    def partial_rounds(self, arm: Policy, n: int) -> list[Said]:
        """The rounds of one arm from a place on. They leave keys behind it that the next ones overwrite."""
        s, k = self.s, self.probing.k
        self._hold(n)
        decoding = Decoding(s, arm, Sampling(), [0])
        verification, drafter = decoding.verifications[0], decoding.drafters[0]
        if decoding.queries is not None:
            decoding.queries.start()
        kept = drafter.lookahead if isinstance(drafter, ModelDrafter) else None
        choose: Chooser | None = None
        if arm.verify_kv.source != "page_bound":
            lookahead = None if kept is None else kept.scores
            choose = Chooser(s, arm.verify_kv, lookahead=lookahead, queries=decoding.queries)
        said: list[Said] = []
        selection: Selection | None = None
        for number in range(self.probing.rounds):
            at = n + number * self.width
            self._hold(at)
            drafts = self._drafts(decoding, at)
            counts = torch.full((1,), k, device=s.decoder.device)  # [B]
            chooses = number == 0 or arm.verify_kv.refresh == "round"
            if choose is not None and chooses:
                selection = choose(counts)
            plan = Plan(partial=True, since_full=number + 1, chooses=chooses)
            verification.prepare(plan)
            with s.tapping(decoding.readers):
                block = verification.block(self._block(at, self.width), plan, k=counts, padded=True, rows=True)
            verification.settled(block, counts + 1)
            for reader in decoding.readers:
                reader.take(block, self._block(at + 1, self.width), counts + 1)
            said.append(Said(block.logits[0].clone(), drafts, selection))
        self._hold(n)
        return said

    def judged(self, arms: list[Policy], said: list[list[Said]], n: int) -> list[dict[str, Any]]:
        """Rows of all arms at one place, by full verification, which moves on over them."""
        rows: list[dict[str, Any]] = []
        drafting = Decoding(self.s, arms[0], Sampling(), [0])
        for number in range(self.probing.rounds):
            at = n + number * self.width
            self._hold(at)
            drafts = self._drafts(drafting, at)
            recalled = [np.zeros(self.width) for _ in arms]
            full = self._full_rows(self.width, [one[number].selection for one in said], recalled)  # [T, V]
            best = full.argmax(dim=-1).tolist()
            full_match = self._match(drafts, best, at)
            for arm, one in enumerate(said):
                own = one[number]
                chosen = own.logits.argmax(dim=-1).tolist()
                kl = divergence(full, own.logits).tolist()
                match = self._match(own.drafts, chosen, at)
                rows += [
                    {
                        "position": at + t,
                        "arm": arm + 1,
                        "arr": float(recalled[arm][t]) if own.selection is not None else None,
                        "kl_nats": kl[t],
                        "top1_match": chosen[t] == best[t],
                        "rounds_since_full": number + 1,
                        "draft_match": match[t],
                        "full_match": full_match[t],
                    }
                    for t in range(self.width)
                ]
        return rows

    def _match(self, drafts: list[int], chosen: list[int], at: int) -> list[bool | None]:
        """Is each draft what was chosen? None past the first that left the text, and past the last, [T]."""
        found: list[bool | None] = [None] * self.width
        for t, draft in enumerate(drafts):
            found[t] = draft == chosen[t]
            if draft != self.tokens[at + t]:
                break
        return found

    def _hold(self, n: int) -> None:
        self.s.hold(self.tokens[:n], limit=self.width + 1)

    def _block(self, n: int, rows: int) -> Tensor:
        """The pending token of a committed length n and those after it, [1, rows]."""
        return torch.tensor([self.tokens[n - 1 : n - 1 + rows]], device=self.s.decoder.device)

    def _drafts(self, decoding: Decoding, n: int) -> list[int]:
        """What the drafter drafts at a committed length of n, at most k tokens."""
        drafter, limit = decoding.drafters[0], np.array([self.probing.k])
        if isinstance(drafter, HostDrafter):
            return drafter.drafts(limit)[0]
        if drafter is None:
            raise ValueError("an arm drafts")
        if isinstance(drafter, ModelDrafter):
            return self._model_drafts(drafter, n, limit)
        return self._chain(drafter, limit)

    def _model_drafts(self, drafter: ModelDrafter, n: int, limit: np.ndarray) -> list[int]:
        """The same of a draft model. It reads committed tokens alone, so one drafting at a length serves every arm."""
        s, kept = self.s, drafter.lookahead
        if (drafter.key, n) in self._drafted:
            drafts, scores = self._drafted[drafter.key, n]
            if kept is not None and scores is not None:
                kept.scores.copy_(scores)
            return drafts
        for own in s.companions.values():  # what was drafted before may not be the text
            own.cache.set_lengths(np.array([max(min(self._fed, n) - 2, 0)]))
            own.turn = -1
        drafts, self._fed = self._chain(drafter, limit), n
        self._drafted[drafter.key, n] = drafts, None if kept is None else kept.scores.clone()
        return drafts

    def _chain(self, drafter: Drafter, limit: np.ndarray) -> list[int]:
        """Its drafts, one after another."""
        self.s.turn += 1
        drafter.prepare(limit)
        draft, token, drafts = drafter.begin(self.probing.k), self.s.pending, []
        for depth in range(self.probing.k):
            token = draft.step(depth, token).token
            drafts.append(token)
        return torch.cat(drafts).tolist()

    def _full_rows(
        self, rows: int, selections: list[Selection | None] | None = None, recalled: list[np.ndarray] | None = None
    ) -> Tensor:
        """Full verification of the next rows, which are committed: logits [rows, V].

        selections, recalled: add up the share of attention that each selection holds, a mean over layers and heads.
        """
        s, at = self.s, self._at

        def watch(layer: int, q: Tensor) -> None:
            self._recall(layer, q[0, :rows], selections or [], recalled or [])

        self._hold(at)
        counts = torch.full((1,), rows, device=s.decoder.device)  # [B]
        with s.tapping(self.readers):
            block = s.forward_block(
                self._block(at, rows), padded=True, rows=True, watch=watch if selections is not None else None
            )
        for reader in self.readers:
            reader.take(block, self._block(at + 1, rows), counts)
            reader.read()  # now, as the next rows may come without a draft
        s.advance(block, counts)
        self._at = at + rows
        return block.logits[0].clone()

    def _recall(self, layer: int, q: Tensor, selections: list[Selection | None], recalled: list[np.ndarray]) -> None:
        """Add this layer's share of the attention of rows q [T, H, D] that falls on each selection to `recalled`."""
        c, T = self.s.decoder.config, q.shape[0]
        first = int(self.s.cache.host_lengths[0])  # position of the first row
        keys = self.s.cache.layer(layer)[0][0, :, : first + T].float()  # [Hk, S, D]
        grouped = q.float().unflatten(1, (c.kv_heads, -1))  # [T, Hk, G, D]
        scores = torch.einsum("thgd,hsd->hgts", grouped, keys) * c.head_dim**-0.5  # [Hk, G, T, S]
        place = torch.arange(first + T, device=q.device)
        seen = place <= first + torch.arange(T, device=q.device)[:, None]  # [T, S]
        mass = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1).sum(dim=1)  # [Hk, T, S]
        for selection, total in zip(selections, recalled, strict=True):
            if selection is None:
                continue
            held = place >= selection.tail_start[0]  # [S]
            chosen = selection.indices[layer, 0, :, : int(selection.counts[0])].long()  # [Hk, C]
            pages = chosen[..., None] * selection.page + torch.arange(selection.page, device=q.device)
            read = held.expand(c.kv_heads, -1).scatter(1, pages.flatten(1), True)  # [Hk, S]
            share = (mass * read[:, None]).sum(dim=(0, 2)) / c.heads  # [T]
            total += share.cpu().numpy() / c.layers
