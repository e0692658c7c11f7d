"""The policy: every choice a speculative decode makes, as frozen data. Files are read and written in policies.file."""

from dataclasses import dataclass, field, replace
from typing import Any

from specdial.policies.controllers import CONTROLLERS, ControllerConfig, NoneConfig, RateConfig, longest_draft
from specdial.policies.drafting import DRAFT_KV_USES, MOST_KEYS, Drafter, DraftKV, refuse_unused
from specdial.policies.errors import UserError
from specdial.policies.fields import parse, setting, to_plain
from specdial.policies.placement import DEVICE, KV, Variant, check_placement
from specdial.policies.verification import NO_HEADS, ScoringHeads, VerifyKV, check_variant, check_variants

SCHEMA = "specdial/policy/1"
MOST_BATCH = 1 << 20
MOST_CELLS = 1000  # every one of them is a policy of its own

__all__ = [
    "KV",
    "MOST_KEYS",
    "SCHEMA",
    "Cell",
    "DraftKV",
    "Drafter",
    "Policy",
    "ScoringHeads",
    "VerifyKV",
    "parse_controller",
    "plain_policy",
    "policy_from_mapping",
]


@dataclass(frozen=True, slots=True)
class Cell:
    """Overrides inside a range of (context, batch): from_context <= context < to_context, the same for batch."""

    overrides: dict[str, Any]
    from_context_tokens: int = setting(0, low=0, high=MOST_KEYS)
    to_context_tokens: int | None = setting(None, low=1, high=MOST_KEYS)
    from_batch: int = setting(1, low=1, high=MOST_BATCH)
    to_batch: int | None = setting(None, low=2, high=MOST_BATCH)

    def check(self, where: str) -> None:
        for name, low, high in (
            ("to_context_tokens", self.from_context_tokens, self.to_context_tokens),
            ("to_batch", self.from_batch, self.to_batch),
        ):
            if high is not None and high <= low:
                raise UserError(
                    f"{where}.{name} is {high}, not above where the cell starts ({low})",
                    "widen the cell or delete it",
                    field=f"{where}.{name}",
                )

    def covers(self, context_tokens: int, batch: int) -> bool:
        return (
            self.from_context_tokens <= context_tokens
            and (self.to_context_tokens is None or context_tokens < self.to_context_tokens)
            and self.from_batch <= batch
            and (self.to_batch is None or batch < self.to_batch)
        )


@dataclass(frozen=True, slots=True)
class Policy:
    """One policy. `cells` override parts of it by context and batch; the first that covers a round wins.

    expected, measured, provenance: what was predicted, what was then seen, and where from; they change no decision.
    expected.tuned_on, where it is there, is what `drift` compares with (simulator.tuned_on); it has its own version.
    """

    name: str = "unnamed"
    drafter: Drafter = field(default_factory=Drafter)
    controller: ControllerConfig = field(default_factory=NoneConfig)
    draft_kv: DraftKV = field(default_factory=DraftKV)
    verify_kv: VerifyKV = field(default_factory=VerifyKV)
    scoring_heads: ScoringHeads = field(default=NO_HEADS, metadata={"later": True})
    kv: KV = field(default=DEVICE, metadata={"later": True})
    cells: tuple[Cell, ...] = ()
    expected: dict[str, Any] | None = None
    measured: dict[str, Any] | None = None
    provenance: dict[str, Any] | None = None

    @property
    def lossless(self) -> bool:
        """Every round is verified in full with an exact acceptance rule."""
        return all(p.verify_kv.lossless for p in self.variants())

    @property
    def k_max(self) -> int:
        """The longest draft any cell can ask for."""
        return max(longest_draft(p.controller) for p in self.variants())

    @property
    def slots(self) -> int:
        """Most keys that a round writes behind the pending token's: one a draft, more where it drafts a tree."""
        drafts = [(p.drafter.tree, longest_draft(p.controller)) for p in self.variants()]
        return max(tree.slots(k) if tree and k else k for tree, k in drafts)

    @property
    def drafts_whole(self) -> bool:
        """Is a captured round of this variant one pass? It then drafts its k, however few the output still needs."""
        looks = CONTROLLERS[self.controller.kind][1].adaptive
        return self.drafter.tree is not None or not (looks or self.drafter.may_have_none)

    def variants(self) -> tuple["Policy", ...]:
        """The policy of each cell, then the one outside every cell; none has cells of its own."""
        return (
            *(_override(self, cell.overrides, f"cells[{i}]") for i, cell in enumerate(self.cells)),
            replace(self, cells=()),
        )

    def variant_index(self, context_tokens: int, batch: int) -> int:
        """Index into `variants()` of the policy for a round that starts at this context and batch."""
        return next((i for i, cell in enumerate(self.cells) if cell.covers(context_tokens, batch)), len(self.cells))

    def decisions(self) -> dict[str, Any]:
        """The part that changes what the engine does, as plain data: what digests and comparisons are made of."""
        plain: dict[str, Any] = to_plain(self)
        return {k: v for k, v in plain.items() if k not in ("name", "expected", "measured", "provenance")}


def policy_from_mapping(value: object, where: str = "") -> Policy:
    """Build and check a policy. Raises UserError naming the field at fault."""
    policy = _one(value, where)
    prefix = f"{where}." if where else ""
    if len(policy.cells) > MOST_CELLS:
        cause = f"{prefix}cells has {len(policy.cells)} entries"
        raise UserError(cause, f"use at most {MOST_CELLS}", field=f"{prefix}cells")
    variants = []
    for i, cell in enumerate(policy.cells):
        cell.check(f"{prefix}cells[{i}]")
        variants.append(_override(policy, cell.overrides, f"{prefix}cells[{i}]"))
    drafting = tuple((p.verify_kv, longest_draft(p.controller)) for p in [*variants, policy])
    check_variants(drafting, policy.scoring_heads, prefix)
    placed = (Variant(longest_draft(p.controller) > 0, p.drafter, p.draft_kv, p.verify_kv) for p in [*variants, policy])
    check_placement(policy.kv, tuple(placed), prefix)
    _check_trees([*variants, policy], prefix)
    return policy


def _one(value: object, where: str) -> Policy:
    """A policy, checked but for its cells. Raises UserError naming the field at fault."""
    if not isinstance(value, dict):
        raise UserError(
            f"{where or 'a policy'} must be a mapping, got {type(value).__name__}",
            "write key: value pairs",
            field=where,
        )
    prefix = f"{where}." if where else ""
    content = dict(value)
    controller = parse_controller(content.pop("controller", {"kind": "none"}), f"{prefix}controller")
    policy = replace(parse(Policy, content, where), controller=controller)
    _check_name(policy.name, f"{prefix}name")
    policy.drafter.check(f"{prefix}drafter")
    policy.draft_kv.check(f"{prefix}draft_kv")
    policy.verify_kv.check(f"{prefix}verify_kv")
    policy.scoring_heads.check(f"{prefix}scoring_heads")
    refuse_unused(policy.draft_kv, policy.drafter.kind, DRAFT_KV_USES, f"{prefix}draft_kv")
    if policy.drafter.kind == "quest" and policy.draft_kv.page == 1:
        field = f"{prefix}draft_kv.page"
        raise UserError(f"{field} is 1, and drafter quest chooses whole pages", "use 16, 32 or 64", field=field)
    if not policy.drafter.has_signals and CONTROLLERS[controller.kind][1].adaptive:
        raise UserError(
            f"{prefix}controller {controller.kind} asks how sure each draft is, which drafter {policy.drafter.kind} "
            "cannot say",
            "use controller fixed or another drafter",
            field=f"{prefix}controller",
        )
    if policy.drafter.tree and controller.kind not in ("fixed", "none"):
        raise UserError(
            f"{prefix}controller {controller.kind} stops a chain of drafts, and {prefix}drafter.tree drafts a tree",
            "use controller fixed, whose k is the tree's depth, or leave tree out",
            field=f"{prefix}controller",
        )
    if policy.drafter.tree:
        policy.drafter.tree.check(longest_draft(controller), f"{prefix}drafter.tree")
    if policy.drafter.kind == "none" and longest_draft(controller) > 0:
        raise UserError(
            f"{prefix}drafter none cannot serve controller {controller.kind}",
            "use controller none or another drafter",
            field=f"{prefix}drafter",
        )
    check_variant(policy.verify_kv, policy.scoring_heads, policy.drafter, policy.draft_kv, prefix)
    return policy


def _check_trees(variants: list[Policy], prefix: str) -> None:
    """Raises UserError where trees are drafted and something needs attention rows, which their rounds do not keep."""
    drafting = [v for v in variants if longest_draft(v.controller) > 0]
    if not any(v.drafter.tree for v in drafting):
        return
    if any(v.drafter.kind == "sparse_self" for v in drafting):
        field = f"{prefix}drafter"
        cause = f"{field} sparse_self scores keys by attention that rounds with drafter.tree leave out"
        raise UserError(cause, "draft by eagle in every cell", field=field)
    for kv in (v.verify_kv for v in drafting):
        if not kv.lossless and kv.source not in ("page_bound", "recent"):
            field = f"{prefix}verify_kv.source"
            cause = f"{field} is {kv.source!r}, which scores keys by attention that rounds with drafter.tree leave out"
            raise UserError(cause, "use page_bound or recent, or leave tree out", field=field)


def plain_policy() -> Policy:
    """Plain decoding, the baseline of every comparison."""
    return Policy(name="plain", drafter=Drafter(kind="none"))


def parse_controller(value: object, where: str) -> ControllerConfig:
    """Settings of the kind that `value["kind"]` names."""
    kind = value.get("kind") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in CONTROLLERS:
        raise UserError(f"{where}.kind is {kind!r}", f"use one of {', '.join(CONTROLLERS)}", field=f"{where}.kind")
    config: ControllerConfig = parse(CONTROLLERS[kind][0], value, where)
    if isinstance(config, RateConfig) and max(config.k_set, default=0) > config.k_max:
        raise UserError(
            f"{where}.k_set holds {max(config.k_set)}, k_max is {config.k_max}",
            "raise k_max or drop it from k_set",
            field=f"{where}.k_set",
        )
    return config


def _check_name(name: str, where: str) -> None:
    """A policy's name names its files too."""
    if (
        not name.strip()
        or name.startswith(".")
        or len(name) > 100
        or any(c in "/\\" or not c.isprintable() for c in name)
    ):
        raise UserError(
            f"{where} is {name[:60]!r}", "use up to 100 printable characters, no slash, no dot in front", field=where
        )


def _override(policy: Policy, overrides: dict[str, Any], where: str) -> Policy:
    plain = to_plain(replace(policy, cells=(), expected=None, measured=None, provenance=None))
    for name, value in overrides.items():
        if name not in ("drafter", "controller", "draft_kv", "verify_kv"):
            raise UserError(
                f"{where}.overrides.{name} cannot vary by cell",
                "override drafter, controller, draft_kv or verify_kv",
                field=f"{where}.overrides.{name}",
            )
        if not isinstance(value, dict):
            raise UserError(
                f"{where}.overrides.{name} must be a mapping",
                "write key: value pairs",
                field=f"{where}.overrides.{name}",
            )
        same_kind = "kind" not in value or value["kind"] == plain[name].get("kind")
        plain[name] = {**plain[name], **value} if same_kind else value
    return _one(plain, f"{where}.overrides")
