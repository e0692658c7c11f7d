"""A policy in the words of another engine: one drafter, and draft lengths by ranges of context and batch.

Another engine can express a part of a policy: some drafters, a draft length, perhaps one that varies by batch. What an
exporter cannot say it must report, so every axis of every cell ends as a row: kept, approximated or dropped. Leaves out
the formats (one module per engine) and what the loss is predicted to cost (exporters.loss).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from specdial.policies.controllers import FixedConfig, NoneConfig, longest_draft
from specdial.policies.drafting import Drafter
from specdial.policies.errors import UserError
from specdial.policies.exporters.options import STAND_INS, Options
from specdial.policies.exporters.rows import Fate, Length, Range, Row, cell_name, told
from specdial.policies.schema import Policy, plain_policy


@dataclass(frozen=True, slots=True)
class Plan:
    """A policy in the words of another engine: one drafter, and a draft length for every range of context and batch.

    k: draft length by context range, then batch range; 0 where the engine is not to speculate. cell: the index in the
    policy's variants() of each. lengths: of each variant, what its controller became, None where nothing is to be said.
    """

    policy: Policy
    options: Options
    drafter: Drafter
    stand_in: str | None
    contexts: tuple[Range, ...]
    batches: tuple[Range, ...]
    k: tuple[tuple[int, ...], ...]
    cell: tuple[tuple[int, ...], ...]
    lengths: tuple["Length | None", ...]
    rows: tuple[Row, ...]

    @property
    def kind(self) -> str:
        """What drafts, in the words of exporters.options.STAND_INS; none where nothing does."""
        return self.stand_in or engine_kind(self.drafter)

    @property
    def at_context(self) -> int:
        """Index of the context range that speaks where the engine has no context axis."""
        given = self.options.context_tokens
        return len(self.contexts) - 1 if given is None else _index(self.contexts, given)

    @property
    def at_batch(self) -> int:
        """Index of the batch range that speaks where the engine has no batch axis."""
        return _index(self.batches, self.options.batch or int(told(self.policy.expected, "batch") or 1))

    @property
    def varies_by_context(self) -> bool:
        return len(set(self.k)) > 1

    @property
    def varies_by_batch(self) -> bool:
        return any(len(set(row)) > 1 for row in self.k)

    def by_batch(self, context: int) -> tuple[tuple[int, int | None, int], ...]:
        """(first batch, one past the last or None, k) of one context range, neighbours with the same k joined."""
        joined: list[tuple[int, int | None, int]] = []
        for (low, high), k in zip(self.batches, self.k[context]):
            if joined and joined[-1][2] == k:
                joined[-1] = (joined[-1][0], high, k)
            else:
                joined.append((low, high, k))
        return tuple(joined)

    @property
    def fixed_k(self) -> int:
        """The one k of an engine that varies it by nothing."""
        return self.k[self.at_context][self.at_batch]

    def effective(self, k: int) -> Policy | None:
        """What an engine does that drafts k tokens always, as a policy of ours; None with a stand-in."""
        if k == 0:
            return plain_policy()
        if self.stand_in is not None:
            return None
        return Policy(name="lowered", drafter=self.drafter, controller=FixedConfig(k=k))


def plan(policy: Policy, options: Options, drafters: Iterable[str], *, keeps: Iterable[str] = ()) -> Plan:
    """Choose the one drafter and the draft lengths an engine can express.

    drafters: what it has, of exporters.options.STAND_INS. keeps: adaptive controllers it has the like of, whose rows
    the exporter writes itself, and "tree" where it drafts trees of one shape. Raises UserError where nothing of the
    policy's speculation would remain.
    """
    able = tuple(drafters)
    variants = policy.variants()
    drafting = [v for v in variants if longest_draft(v.controller) > 0]
    if options.stand_in is not None and options.stand_in not in able:
        raise UserError(
            f"this target has no {options.stand_in} drafter",
            f"use stand_in={' or '.join(k for k in STAND_INS if k in able)}",
        )
    drafter, left = _drafter(policy, options, able, drafting), set(keeps)
    if "tree" not in left or len({v.drafter.tree for v in drafting}) > 1:
        drafter = replace(drafter, tree=None)
    rows: list[Row] = []
    lengths = []
    for i, variant in enumerate(variants):
        length, found = _variant(variant, drafter, policy, options)
        lengths.append(length)
        rows += [Row(cell_name(policy, i), *row) for row in found]
    if policy.scoring_heads:
        rows.append(Row("all", "scoring_heads", "dropped", "no selection is scored"))
    if policy.kv.where == "host":
        rows.append(Row("all", "kv", "dropped", "keys live where the engine puts them"))
    contexts = _ranges(0, [(c.from_context_tokens, c.to_context_tokens) for c in policy.cells])
    batches = _ranges(1, [(c.from_batch, c.to_batch) for c in policy.cells])
    cell = tuple(tuple(policy.variant_index(c, b) for b, _ in batches) for c, _ in contexts)
    grid = tuple(tuple(lengths[i].k for i in row) for row in cell)
    said = tuple(None if v.controller.kind in left else length for v, length in zip(variants, lengths))
    return Plan(policy, options, drafter, options.stand_in, contexts, batches, grid, cell, said, tuple(rows))


def engine_kind(drafter: Drafter) -> str:
    """A drafter's kind in the words of exporters.options.STAND_INS: our EAGLE heads are EAGLE-3's."""
    return "eagle3" if drafter.kind == "eagle" else drafter.kind


def _drafter(policy: Policy, options: Options, able: tuple[str, ...], drafting: list[Policy]) -> Drafter:
    """The drafter that the engine will use in every cell."""
    if options.stand_in is not None:
        model = options.stand_in_model
        _check_model(model, "stand_in_model")
        return Drafter(kind="lookup") if options.stand_in == "lookup" else Drafter(kind="model", model=model)
    if not drafting:
        return Drafter(kind="none")
    fitting = [v.drafter for v in drafting if engine_kind(v.drafter) in able]
    if not fitting:
        kinds = ", ".join(sorted({v.drafter.kind for v in drafting}))
        raise UserError(
            f"policy {policy.name} drafts by {kinds}, which this target has not: nothing of it would remain",
            "add stand_in=lookup for its own n-gram drafts with this policy's k, or export another policy",
        )
    # The last variant is the one outside every cell.
    drafter = policy.drafter if policy.drafter in fitting else fitting[0]
    _check_model(drafter.model, "drafter.model")
    return drafter


def _variant(
    variant: Policy, drafter: Drafter, policy: Policy, options: Options
) -> tuple[Length, list[tuple[str, Fate, str]]]:
    """The draft length of one cell, and (axis, fate, note) of what else it is made of."""
    if isinstance(variant.controller, NoneConfig):
        return Length(0, "kept", "no speculation"), []
    rows: list[tuple[str, Fate, str]] = []
    if options.stand_in is not None:
        stand_in = f"{options.stand_in} {options.stand_in_model}".strip()
        rows.append(("drafter", "approximated", f"{variant.drafter.label} replaced by {stand_in}, as asked"))
    elif replace(variant.drafter, tree=drafter.tree) != drafter:
        note = f"{variant.drafter.label} beside {drafter.label}: one drafter an engine, no speculation here"
        return Length(0, "dropped", "no speculation", said=False), [("drafter", "dropped", note)]
    elif variant.drafter.tree and not drafter.tree:
        rows.append(("drafter.tree", "dropped", "drafts a chain"))
    elif variant.drafter.window:
        rows.append(("drafter.window", "dropped", "the draft model reads every key"))
    elif variant.drafter.budget:
        rows.append(("drafter.budget", "dropped", "the draft model reads every key"))
    if variant.drafter.reads_selection:
        rows.append(("draft_kv", "dropped", "drafts over a selection of keys"))
    if not variant.verify_kv.lossless:
        rows.append(("verify_kv", "dropped", "verifies over every key, which is lossless"))
    return draft_length(variant, policy), rows


def draft_length(variant: Policy, policy: Policy) -> Length:
    """The one draft length nearest to a controller's."""
    controller = variant.controller
    if isinstance(controller, FixedConfig):
        return Length(controller.k, "kept", f"k {controller.k}")
    longest = longest_draft(controller)
    mean = told(policy.expected, "k") if not policy.cells else None
    if mean is not None:
        k = min(max(round(mean), 1), longest)
        note = f"{controller.kind} replaced by fixed k {k}, near its predicted mean {mean:.2f}"
        return Length(k, "approximated", note)
    return Length(longest, "approximated", f"{controller.kind} replaced by fixed k {longest}, its longest draft")


def _check_model(name: str, where: str) -> None:
    """A model's name ends up on command lines. Raises UserError on one that could be read as something else."""
    if name.startswith("-") or not name.isprintable():
        raise UserError(f"{where} is {name[:60]!r}", "use printable characters and no dash in front", field=where)


def _ranges(start: int, given: list[Range]) -> tuple[Range, ...]:
    """Ranges between all the boundaries, from start to no end."""
    cuts = sorted({start, *(low for low, _ in given), *(high for _, high in given if high is not None)})
    return tuple((low, high) for low, high in zip(cuts, [*cuts[1:], None]))


def _index(ranges: tuple[Range, ...], value: int) -> int:
    return max(i for i, (low, _) in enumerate(ranges) if low <= value or i == 0)
