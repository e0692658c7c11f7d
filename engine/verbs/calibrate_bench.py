"""One batch of identical prompts, held at a chosen length, whose rounds are timed configuration by configuration.

Configurations are interleaved so that drift of the machine falls on all alike. On a GPU each is also timed for a while
without a pause, as an answer takes: under some its clocks then fall.

Terms of a partial verification that no moment of a round tells apart are told apart by difference: choosing keys is
timed alone, right after a round, and what verifications take beyond its median is verify_partial; what a full round
that recomputes rows takes beyond the median full round is refresh. Sums are therefore what rounds took. Leaves out what
is timed (calibrate_plan).
"""

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch

from specdial.engine.cache import round_up
from specdial.engine.drafters.model import ModelDrafter
from specdial.engine.drafters.summaries import Summaries
from specdial.engine.garbage import uncollected
from specdial.engine.job import Job, describe
from specdial.engine.key_scores import Chooser
from specdial.engine.loop import Decoding
from specdial.engine.round import Round
from specdial.engine.round_state import SELECTED, START
from specdial.engine.sampling import Sampling
from specdial.engine.sequences import Sequences
from specdial.engine.trace.schema import WATCHED_OPS
from specdial.engine.verbs.calibrate_plan import CPU_ROUNDS, GPU_ROUNDS, Plan, Settings
from specdial.engine.verification import CUDA_RECOMPUTED_MULTIPLE
from specdial.kernels.page_summary import score_pages
from specdial.kernels.selection import select
from specdial.policies.controllers import ControllerConfig
from specdial.policies.controllers.rate import RateConfig
from specdial.policies.controllers.simple import ConfidenceConfig
from specdial.policies.errors import UserError
from specdial.policies.schema import Policy, plain_policy

WARMUP_REPEATS = 1
SUSTAINED_S = 1.0  # on a GPU, of every k in the last repeat: rounds were seen to take longer after .1 to .8 s
WATCHED_S = 0.3  # of every k and budget under a controller that looks at signals: the host's part scatters
PLAIN = plain_policy()
Key = tuple[str, int, int]  # operation, k, budget
Samples = dict[Key, list[float]]


class Bench:
    """Times the plans of one drafter that the same sequences serve, at one batch size."""

    def __init__(self, job: Job, settings: Settings, plans: list[Plan], sequences: Sequences) -> None:
        self.settings = settings
        self.kv_bytes = describe(job, Sampling())["model"]["kv_bytes_per_token"]
        self.weight_bytes = job.model.decoder.weight_bytes
        self.plans = plans
        self.prompt = job.documents[0].prompt_ids
        self.sequences = sequences

    def measure(self, context: int, *, plain: bool) -> list[dict[str, Any]]:
        """Cost rows at one committed length. plain: of plain decoding too."""
        full: Samples = {}
        partial: dict[str, Samples] = {plan.source: {} for plan in self.plans if plan.source}
        steps: list[float] = []
        for repeat in range(-WARMUP_REPEATS, self.settings.repeats):
            if repeat == 0:  # what came before was to warm up
                full, partial, steps = {}, {source: {} for source in partial}, []
            left = self.settings.repeats - repeat
            sustained_s = SUSTAINED_S if left == 1 else 0.0
            for k, budget in self._configurations(max(repeat, 0)):
                for _ in self._again(sustained_s):
                    self._full(full, context, k, budget)
                if k and self.waits:
                    self._watched(full, context, k, budget, WATCHED_S if left <= len(self.plans[0].budgets) else 0.0)
            for plan in self.plans:
                if plan.source:
                    self._partial(partial[plan.source], plan, context, max(repeat, 0))
            for _ in self._again(sustained_s) if plain else ():
                steps += [r.verify_us + r.host_us for r in self._rounds(context, PLAIN, self._usual)]
        self._check(full, partial, context)
        rows = [self._row("", ("plain", 0, 0), context, steps)] if plain else []
        for plan in self.plans:
            samples = full
            if plan.source:
                verified = {key: values for key, values in full.items() if key[0] in ("verify", "host", "transfer")}
                samples = _apart({**verified, **partial[plan.source]}, chosen=not plan.keeps)
            rows += [self._row(plan.source, key, context, values) for key, values in samples.items()]
        return rows

    def _check(self, full: Samples, partial: dict[str, Samples], context: int) -> None:
        """Raises UserError where a lookup found nothing to time."""
        missing = [k for k in self.settings.ks if ("verify", k, 0) not in full]
        for plan in (p for p in self.plans if p.source):
            samples = partial[plan.source]
            timed = {k for op, k, _ in samples if op == "verify_partial"}
            missing += [k for k, _, _ in plan.partial if k not in timed]
            corrected = {k for op, _, k in samples if op == "refresh"}
            missing += [k for _, k in plan.refresh if k not in corrected]
        if missing:
            raise UserError(
                f"drafter {self.plans[0].drafter.label} found no {missing[0]} drafts at context {context} of this text",
                "calibrate at another context or with another workload",
            )

    @property
    def _usual(self) -> int:
        return GPU_ROUNDS if self.sequences.graphs.enabled else CPU_ROUNDS

    def _configurations(self, repeat: int) -> Iterator[tuple[int, int]]:
        """Every k once, budgets and order rotating with the repeat."""
        ks, budgets = self.settings.ks, self.plans[0].budgets
        drafting = [k for k in ks if k]
        for i in range(len(ks)):
            k = ks[(i + repeat) % len(ks)]
            yield k, budgets[(drafting.index(k) + repeat) % len(budgets) if k else 0]

    def _accepted(self, policy: Policy, k: int) -> tuple[float, ...]:
        return self.settings.acceptance.of(policy) if k else ()

    def _full(self, found: Samples, context: int, k: int, budget: int) -> None:
        policy = self.plans[0].policies[k, budget]
        for r in self._rounds(context, policy, self._usual, synthetic=self._accepted(policy, k)):
            if int(r.k.min()) < k:  # a lookup that found nothing
                continue
            found.setdefault(("verify", k, 0), []).append(r.verify_us - (r.exposed_us or 0.0))
            if r.exposed_us is not None:
                found.setdefault(("transfer", 0, 0), []).append(r.exposed_us)
            found.setdefault(("host", k, 0), []).append(r.host_us)
            self._add_drafts(found, r, k, budget)

    @property
    def sustains(self) -> bool:
        """Is anything timed for a while without a pause? On a GPU."""
        return self.sequences.graphs.enabled

    def _again(self, least_s: float) -> Iterator[None]:
        """Once, and on a GPU until so many seconds have passed."""
        until_s = time.monotonic() + (least_s if self.sustains else 0.0)
        yield
        while time.monotonic() < until_s:
            yield

    @property
    def waits(self) -> bool:
        """Do rounds take longer where a controller looks at signals? On a GPU, unless drafts are known at once."""
        drafter = self.plans[0].drafter
        return self.sequences.graphs.enabled and drafter.kind != "lookup" and drafter.tree is None

    def _watched(self, found: Samples, context: int, k: int, budget: int, least_s: float) -> None:
        """Rounds of k drafts under controllers that look at every signal and never stop before, so long of each."""
        controllers: dict[str, ControllerConfig] = {
            "lag0": ConfidenceConfig(threshold=0.0, k_max=k),
            "lag1": ConfidenceConfig(threshold=0.0, k_max=k, lag=1),
            "rate_lag0": RateConfig(k_max=k, gamma=0.0, bias=50.0, slope=0.0, learning_rate=0.0),
        }
        for name, controller in controllers.items():
            policy = replace(self.plans[0].policies[k, budget], controller=controller)
            for _ in self._again(least_s):
                for r in self._rounds(context, policy, self._usual, synthetic=self._accepted(policy, k)):
                    found.setdefault((f"draft_{name}", k, budget), []).append(r.draft_us / k)
                    found.setdefault((f"host_{name}", k, 0), []).append(r.host_us)

    def _add_drafts(self, found: Samples, r: Round, k: int, budget: int) -> None:
        if k:
            found.setdefault(("draft", 0, budget), []).append(r.draft_us / k)
            found.setdefault(("select", 0, budget), []).append(r.select_us)

    def _partial(self, found: Samples, plan: Plan, context: int, repeat: int) -> None:
        """Partial rounds, the choice of their keys alone, and full rounds that recompute rows."""
        for k, draft_budget in self._configurations(repeat):
            for keys in plan.verify_budgets:
                policy = plan.partial.get((k, draft_budget, keys))
                if policy is None:
                    continue
                for r in self._rounds(context, policy, self._usual, synthetic=self._accepted(policy, k)):
                    if int(r.k.min()) < k:
                        continue
                    found.setdefault(("verify_partial", k, keys), []).append(r.verify_us)
                    found.setdefault(("host_partial", k, 0), []).append(r.host_us)
                    self._add_drafts(found, r, k, draft_budget)
                if k == max(self.settings.ks):
                    found.setdefault(("select_partial", 0, keys), []).append(self._choice_us(policy, k))
        for (rows, k), policy in plan.refresh.items():
            period = policy.verify_kv.full_period
            last = self._rounds(context, policy, period, synthetic=(1.0,), first=0)
            if len(last) < period or min(int(r.k.min()) for r in last) < k:
                continue
            if self.sequences.cache.on_gpu:
                rows = round_up(rows, CUDA_RECOMPUTED_MULTIPLE)
            found.setdefault(("refresh", rows, k), []).append(
                last[-1].verify_us - (last[-1].exposed_us or 0.0) + last[-1].host_us
            )

    def _rounds(
        self, context: int, policy: Policy, count: int, *, synthetic: tuple[float, ...] = (), first: int = 1
    ) -> list[Round]:
        """`count` rounds in a row from a committed length of `context`, without those before `first`.

        The first has no last one, so its host_us says nothing of what lies between two. On a CPU its drafts were also
        seen to take 15 % longer than those of later rounds.
        """
        self.sequences.hold(self.prompt[:context], limit=self.settings.new_tokens)
        numbers = list(range(self.sequences.batch))
        decoding = Decoding(self.sequences, policy, Sampling(), numbers, synthetic=synthetic)
        with uncollected(), closing(decoding.rounds()) as rounds:
            return list(islice(rounds, count))[first:]

    @torch.inference_mode()
    def _choice_us(self, policy: Policy, k: int) -> float:
        """Choosing the keys of one partial verification of k drafts, alone, as the sequences stand."""
        s, kv = self.sequences, policy.verify_kv
        decoding = Decoding(s, policy, Sampling(), list(range(s.batch)))
        drafter, queries = decoding.drafters[0], decoding.queries
        if queries is not None:
            s.graphs.run(("last queries", queries.key), queries.start)
        kept = drafter.lookahead if isinstance(drafter, ModelDrafter) else None
        # a captured graph goes on reading it
        counts = s.lasting(("drafts", k), lambda: torch.full((s.batch,), k, device=s.decoder.device))  # [B]
        by_page = kv.source == "page_bound"
        choose = None if by_page else Chooser(s, kv, lookahead=None if kept is None else kept.scores, queries=queries)

        def once() -> None:
            decoding.state.mark(START)
            if choose is None:
                _choose_pages(s, policy, k)
            else:
                choose(counts)
            decoding.state.mark(SELECTED)

        s.graphs.run(("choice", kv, policy.scoring_heads, k), once)
        moments_ns = decoding.state.read_back().wait().moments_ns
        return float(moments_ns[SELECTED] - moments_ns[START]) / 1e3

    def _row(self, source: str, key: Key, context: int, samples: list[float]) -> dict[str, Any]:
        op, k, budget = key
        values = np.array(samples)
        return {
            "op": op,
            "drafter": "none" if op == "plain" else self.plans[0].drafter.label,
            "source": source,
            "context_tokens": context,
            "batch": self.sequences.batch,
            "k": k,
            "budget": budget,
            "median_us": float(np.median(values)),
            "p10_us": float(np.percentile(values, 10)),
            "p90_us": float(np.percentile(values, 90)),
            "n": len(values),
            "bytes": self._bytes(op, context, k, budget),
        }

    def _bytes(self, op: str, context: int, k: int, budget: int) -> int:
        """Weights, keys and values that an operation must read; 0 where it is not known: for drafts with weights other
        than the model's, for choices of a partial verification and for what recomputed rows add."""
        drafter, page = self.plans[0].drafter, self.settings.draft_kv.page
        op = op.partition("_")[0] if op in WATCHED_OPS else op
        if op in ("draft", "select") and (not drafter.reads_selection or drafter.weights != "model"):
            return 0
        summaries = context // page if drafter.kind == "quest" else 0  # a smallest and a largest key a page
        keys = {
            "plain": context, "verify": context + k, "draft": budget + summaries, "select": 2 * budget,
            "verify_partial": min(budget, context) + k, "transfer": context,
        }  # fmt: skip
        weights = self.weight_bytes if op in ("plain", "verify", "draft", "verify_partial") else 0
        return weights + self.sequences.batch * keys.get(op, 0) * self.kv_bytes


def _choose_pages(s: Sequences, policy: Policy, k: int) -> None:
    """What source page_bound does in every layer of a verification of k drafts, for queries of zeros."""
    kv, keys, c = policy.verify_kv, policy.verify_kv.keys, s.decoder.config
    pages = Summaries.of(s, keys.page)
    q = s.lasting(
        ("zeros", k),
        lambda: torch.zeros(s.batch, k + 1, c.heads, c.head_dim, device=s.decoder.device, dtype=s.decoder.dtype),
    )  # [B, T, H, D]
    whole = s.cache.lengths // keys.page  # [B]
    for layer in range(c.layers):
        scores = score_pages(
            q, pages.low[layer], pages.high[layer], whole * keys.page, page=keys.page, rule=kv.bound,
            backend=s.backend, pool=kv.rows,
        )  # fmt: skip
        protected = keys.sink_pages + keys.recent_pages
        select(
            scores, whole, budget=max(min(keys.budget // keys.page, scores.shape[-1]), protected),
            sink=keys.sink_pages, recent=keys.recent_pages, backend=s.backend, scope=keys.scope,
        )  # fmt: skip


def _apart(samples: Samples, *, chosen: bool) -> Samples:
    """Samples with the terms of partial verification apart. Of rounds that recompute rows the last place is their k.

    chosen: the partial rounds that were timed chose their keys.
    """
    taken: Samples = {}
    for (op, k, budget), values in samples.items():
        less = 0.0
        if op == "verify_partial" and chosen:
            less = float(np.median(samples["select_partial", 0, budget]))
        if op == "refresh":
            less = float(np.median(samples["verify", budget, 0]) + np.median(samples["host", budget, 0]))
        taken[op, k, budget] = [max(value - less, 0.0) for value in values]
    return taken
