"""What calibrate times: its settings, and a plan for every drafter, alone and with every partial verification."""

from dataclasses import dataclass, field
from typing import Any

from specdial.engine.acceptance import JUDGED, Acceptance
from specdial.engine.history import HistorySpec
from specdial.engine.job import ModelSettings, history_spec
from specdial.engine.trace.sources import SOURCES, heads_used, of_source, source_label
from specdial.policies.errors import UserError
from specdial.policies.fields import setting, to_plain
from specdial.policies.placement import DEVICE, KV
from specdial.policies.schema import Drafter, DraftKV, Policy, ScoringHeads, VerifyKV, policy_from_mapping
from specdial.policies.verification import LOOKAHEAD

GPU_ROUNDS, CPU_ROUNDS = 4, 2  # in a row, of which the first is left out


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of `calibrate`. contexts: committed lengths; ks: draft lengths, 0 is a verification without drafts.

    drafters: what drafts; plain steps are timed beside the first. draft_kv: the selection apart from its budget.
    verify_kv: in mode partial, every drafter is timed with partial verification too: with each of `sources` (its own
    where there are none) and `verify_budgets` (its own where there are none), and in full rounds that recompute about
    so many of `refresh_rows`. scoring_heads: of sources that have some. kv: where keys live; a table is of one place.
    """

    model: ModelSettings
    workload: dict[str, Any]
    out: str
    contexts: tuple[int, ...] = setting((2048, 4096), low=64)
    batches: tuple[int, ...] = setting((1,), low=1)
    ks: tuple[int, ...] = setting((0, 1, 2, 4, 8), low=0, high=64)
    budgets: tuple[int, ...] = setting((256, 512), low=1)
    draft_kv: DraftKV = field(default_factory=DraftKV)
    drafters: tuple[Drafter, ...] = setting((Drafter(),), later=True)
    repeats: int = setting(5, low=3, high=1000)
    acceptance: Acceptance = field(default=JUDGED, metadata={"later": True})
    verify_kv: VerifyKV = field(default=VerifyKV(), metadata={"later": True})
    sources: tuple[str, ...] = setting((), later=True)
    verify_budgets: tuple[int, ...] = setting((), low=1, later=True)
    refresh_rows: tuple[int, ...] = setting((8, 32), low=1, high=4096, later=True)
    scoring_heads: ScoringHeads = field(default=ScoringHeads(), metadata={"later": True})
    kv: KV = field(default=DEVICE, metadata={"later": True})

    @property
    def new_tokens(self) -> int:
        """Room that no measured round comes to the end of."""
        partial = max(self.refresh_rows, default=0) if self.verify_kv.mode == "partial" else 0
        return (GPU_ROUNDS + 2) * (max(self.ks) + 1) + partial


@dataclass(frozen=True, slots=True)
class Plan:
    """What to time of one drafter: a policy for every (k, budget); the only budget is 0 where it reads no selection.

    source: the label of its partial verification, "" for none. partial: a policy for every (k, budget, verified keys),
    never corrected. refresh: by (rows, k), policies whose last round of a period recomputes so many rows in front of
    those of k drafts; each is a period long.
    """

    drafter: Drafter
    budgets: tuple[int, ...]
    policies: dict[tuple[int, int], Policy]
    source: str = ""
    partial: dict[tuple[int, int, int], Policy] = field(default_factory=dict)
    refresh: dict[tuple[int, int], Policy] = field(default_factory=dict)

    @property
    def all_policies(self) -> list[Policy]:
        return [*self.policies.values(), *self.partial.values(), *self.refresh.values()]

    @property
    def keeps(self) -> bool:
        """Do partial rounds keep their selection? Those that are timed then choose none."""
        return any(policy.verify_kv.refresh == "full" for policy in self.partial.values())

    @property
    def verify_budgets(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(keys for _, _, keys in self.partial))


def plans_of(s: Settings) -> list[list[Plan]]:
    """Plans in groups that the same sequences serve: one drafter, and the history that it or a verification needs.

    Raises UserError on drafters that cannot be timed, or that the table could not tell apart.
    """
    if not (s.contexts and s.batches and s.ks and s.budgets):
        raise UserError("contexts, batches, ks and budgets must not be empty", "name at least one value of each")
    labels = [drafter.label for drafter in s.drafters]
    repeated = next((label for label in labels if labels.count(label) > 1), None)
    if not labels or repeated:
        raise UserError(f"drafters holds {repeated} twice" if repeated else "drafters is empty", "name each once")
    for name, only in (("budget_frac", 0.0), ("refresh_rounds", 1)):
        if getattr(s.draft_kv, name) != only:
            raise UserError(f"draft_kv.{name} is {getattr(s.draft_kv, name)}", f"leave it at {only}: replay prices it")
    _check_partial(s)
    plans = []
    for i, drafter in enumerate(s.drafters):
        if drafter.kind == "none":
            raise UserError(f"drafters[{i}].kind is none", "leave it out: plain steps are always timed")
        budgets = s.budgets if drafter.reads_selection else (0,)
        _check_turns(s, budgets)
        plan = Plan(drafter, budgets, {(k, b): _policy(s, drafter, k, b) for k in s.ks for b in budgets})
        plans.append(plan)
        for (k, _), policy in plan.policies.items():
            if k:
                s.acceptance.of(policy)
    if s.verify_kv.mode == "partial":
        plans += [_partial(s, plan, source) for plan in list(plans) for source in s.sources or (s.verify_kv.source,)]
    groups: dict[tuple[str, HistorySpec | None], list[Plan]] = {}
    for plan in plans:
        groups.setdefault((plan.drafter.label, history_spec(plan.all_policies)), []).append(plan)
    return list(groups.values())


def _check_turns(s: Settings, budgets: tuple[int, ...]) -> None:
    """Raises UserError where some budget would never be timed: they take turns over draft lengths and repeats."""
    drafting = len({k for k in s.ks if k})
    timed = drafting + s.repeats - 1
    if drafting and len(budgets) > timed:
        cause = f"{s.repeats} repeats with draft lengths {list(s.ks)} time {timed} of {len(budgets)} budgets"
        raise UserError(cause, f"set repeats={len(budgets) - drafting + 1} or name fewer budgets")


def _check_partial(s: Settings) -> None:
    s.verify_kv.check("verify_kv")
    if s.verify_kv.full_period != 1:
        raise UserError(f"verify_kv.full_period is {s.verify_kv.full_period}", "leave it at 1: replay prices it")
    if s.verify_kv.mode == "full":
        for name in ("sources", "verify_budgets"):
            if getattr(s, name):
                raise UserError(f"{name} is given, and verify_kv.mode is full", "set verify_kv.mode=partial")
        return
    for source in s.sources:
        if source not in SOURCES or s.sources.count(source) > 1:
            raise UserError(f"sources holds {source!r}", f"name some of {', '.join(SOURCES)}, each once")
    if max(s.ks) == 0 or not s.refresh_rows:
        raise UserError("partial verification is timed with drafts and corrections", "name ks above 0 and refresh_rows")


def _partial(s: Settings, plan: Plan, source: str) -> Plan:
    """The same drafter with a partial verification beside its full ones: by lookahead, of drafts alone."""
    ks = [k for k in s.ks if k or source not in LOOKAHEAD]
    budgets = s.verify_budgets or (s.verify_kv.keys.budget,)

    def policy(k: int, budget: int, keys: int, period: int) -> Policy:
        kv = {**to_plain(of_source(s.verify_kv, source, keys)), "full_period": period}
        return _policy(s, plan.drafter, k, budget, verify_kv=kv, scoring_heads=heads_used(s.scoring_heads, source))

    partial = {(k, b, keys): policy(k, b, keys, 0) for k in ks for b in plan.budgets for keys in budgets}
    # A wide verification takes its rows in tiles: what more rows add depends on how many there are without them.
    refresh = {
        (n * (k + 1), k): policy(k, plan.budgets[0], budgets[0], n + 1)
        for k in s.ks if k
        for n in sorted({max(round(rows / (k + 1)), 1) for rows in s.refresh_rows})  # partial rounds before a full one
    }  # fmt: skip
    one = next(iter(refresh.values()))
    return Plan(
        plan.drafter, plan.budgets, plan.policies, source_label(one.verify_kv, one.scoring_heads), partial, refresh
    )


def _policy(s: Settings, drafter: Drafter, k: int, budget: int, **verification: Any) -> Policy:
    """k 0: a policy that could draft and never does, so that its rounds keep attention rows as others do."""
    parts: dict[str, Any] = {"drafter": to_plain(drafter), "controller": {"kind": "fixed", "k": max(k, 1)}}
    if k == 0:
        parts["cells"] = [{"overrides": {"controller": {"kind": "none"}}}]
    if s.kv != DEVICE:
        parts["kv"] = to_plain(s.kv)
    selection = {"draft_kv": {**to_plain(s.draft_kv), "budget": budget}} if drafter.reads_selection else {}
    return policy_from_mapping({**parts, **selection, **verification})
