"""What lowering a policy to another engine is made of: its ranges of context and batch, its drafter there, its rows.

Another engine can express a part of a policy: some drafters, a draft length, perhaps one that varies by batch. What an
exporter cannot say it must report, so every axis of every cell ends as a row: kept, approximated or dropped. Leaves out
the formats (one module per engine) and what the loss is predicted to cost (exporters.loss).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Literal

from specdial.policies.controllers import FixedConfig, NoneConfig, longest_draft
from specdial.policies.drafting import Drafter
from specdial.policies.errors import UserError
from specdial.policies.fields import setting
from specdial.policies.schema import Policy, plain_policy

Fate = Literal["kept", "approximated", "dropped"]
Range = tuple[int, int | None]  # first value and one past the last, None for no end

# What a stand-in is in the words of Drafter.kind; EAGLE heads are the other engine's own.
STAND_INS = ("lookup", "model", "eagle", "eagle3")
ENGINES = ("vllm", "sglang", "tensorrt_llm", "transformers", "llama_cpp")

# Options that only some targets use.
USES = {
    "stand_in": ENGINES,
    "stand_in_model": ENGINES,
    "context_tokens": ENGINES,
    "batch": ("sglang", "llama_cpp"),
    "max_batch": ("vllm", "tensorrt_llm"),
    "vllm_context_ranges": ("vllm",),
    "trtllm_schedule": ("tensorrt_llm",),
    "trace": ("profile",),
}


@dataclass(frozen=True, slots=True)
class Options:
    """What lowering needs to know beside the policy.

    stand_in: what drafts in the other engine instead of the policy's drafter; model, eagle and eagle3 take
    stand_in_model. context_tokens, batch: which cell speaks where an engine cannot vary by it; null takes the longest
    context that a cell starts at, and the batch of the policy's prediction. max_batch: where open batch ranges end.
    vllm_context_ranges: write k by context as well, in the five-number form that no release of vLLM reads.
    trtllm_schedule: whether a key of draft_len_schedule is the last batch of its range (current) or its first (older).
    trace: a record that a profile is counted from. stem: what the files are called, without their endings.
    """

    stand_in: Literal["lookup", "model", "eagle", "eagle3"] | None = None
    stand_in_model: str = ""
    context_tokens: int | None = setting(None, low=0)
    batch: int | None = setting(None, low=1)
    max_batch: int = setting(512, low=1, high=1 << 20)
    vllm_context_ranges: bool = False
    trtllm_schedule: Literal["upto", "from"] = "upto"
    trace: str | None = None
    stem: str = "policy"

    def check(self, target: str) -> None:
        """Raises UserError on what the target does not use, and where a stand-in lacks its model."""
        for f in fields(self):
            value = getattr(self, f.name)
            if value != f.default and target not in USES.get(f.name, (target,)):
                used = ", ".join(USES[f.name])
                raise UserError(f"{f.name} is {value!r}, which target {target} does not use", f"it is for {used}")
        needs = self.stand_in in ("model", "eagle", "eagle3")
        if needs and not self.stand_in_model:
            raise UserError(f"stand_in is {self.stand_in} without a model", "add stand_in_model=ID")
        if self.stand_in_model and not needs:
            raise UserError("stand_in_model is given, and no stand-in uses it", "add stand_in=model, eagle or eagle3")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the report: an axis of a cell (or of the whole policy), and what became of it."""

    cell: str
    axis: str
    fate: Fate
    note: str


@dataclass(frozen=True, slots=True)
class Lowered:
    """What an exporter returns.

    files: text by the ending of the file's name, the main one first. usage: how the engine takes
    them, one line. effective: the policy that the engine will then carry out, None where no policy of ours is like it.
    """

    files: dict[str, str]
    rows: tuple[Row, ...]
    usage: str
    effective: Policy | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """A policy in the words of another engine: one drafter, and a draft length for every range of context and batch.

    k: draft length by context range, then batch range; 0 where the engine is not to speculate.
    """

    policy: Policy
    options: Options
    drafter: Drafter
    stand_in: str | None
    contexts: tuple[Range, ...]
    batches: tuple[Range, ...]
    k: tuple[tuple[int, ...], ...]
    rows: tuple[Row, ...] = field(default=())

    @property
    def at_context(self) -> int:
        """Index of the context range that speaks where the engine has no context axis."""
        given = self.options.context_tokens
        return len(self.contexts) - 1 if given is None else _index(self.contexts, given)

    @property
    def at_batch(self) -> int:
        """Index of the batch range that speaks where the engine has no batch axis."""
        expected = (self.policy.expected or {}).get("batch")
        usual = expected if isinstance(expected, int) and not isinstance(expected, bool) and expected >= 1 else 1
        return _index(self.batches, self.options.batch or usual)

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

    drafters: kinds of Drafter, and stand-ins, that it has. keeps: adaptive controllers it has the like of, whose rows
    the exporter writes itself. Raises UserError where nothing of the policy's speculation would remain.
    """
    able = tuple(drafters)
    variants = policy.variants()
    drafting = [v for v in variants if longest_draft(v.controller) > 0]
    if options.stand_in is not None and options.stand_in not in able:
        raise UserError(
            f"this target has no {options.stand_in} drafter",
            f"use stand_in={' or '.join(k for k in STAND_INS if k in able)}",
        )
    drafter = _drafter(policy, options, able, drafting)
    rows: list[Row] = []
    ks = []
    for i, variant in enumerate(variants):
        k, found = _variant(variant, drafter, policy, options, tuple(keeps))
        ks.append(k)
        rows += [Row(cell_name(policy, i), *row) for row in found]
    if policy.scoring_heads:
        rows.append(Row("all", "scoring_heads", "dropped", "no selection is scored"))
    contexts = _ranges(0, [(c.from_context_tokens, c.to_context_tokens) for c in policy.cells])
    batches = _ranges(1, [(c.from_batch, c.to_batch) for c in policy.cells])
    grid = tuple(tuple(ks[policy.variant_index(c, b)] for b, _ in batches) for c, _ in contexts)
    return Plan(policy, options, drafter, options.stand_in, contexts, batches, grid, tuple(rows))


def cell_name(policy: Policy, index: int) -> str:
    """A cell as people read it; a policy without cells has one, `all`."""
    if not policy.cells:
        return "all"
    if index == len(policy.cells):
        return "elsewhere"
    cell = policy.cells[index]
    context = span((cell.from_context_tokens, cell.to_context_tokens))
    return f"{index}: context {context}, batch {span((cell.from_batch, cell.to_batch))}"


def span(of: Range) -> str:
    """8192.., 1..15: both ends included."""
    return f"{of[0]}.." if of[1] is None else f"{of[0]}..{of[1] - 1}"


def axis_rows(plan: Plan, *, context: bool, batch: bool) -> tuple[Row, ...]:
    """Rows for the two axes of the cells; context and batch say which of them the engine's settings carry."""
    rows = []
    for axis, varies, kept, chosen in (
        ("context", plan.varies_by_context, context, plan.contexts[plan.at_context]),
        ("batch", plan.varies_by_batch, batch, plan.batches[plan.at_batch]),
    ):
        if not varies:
            continue
        if kept:
            rows.append(Row("all", axis, "kept", f"k varies by {axis}"))
        else:
            rows.append(Row("all", axis, "dropped", f"k cannot vary by {axis}: that of {axis} {span(chosen)} is used"))
    return tuple(rows)


def _drafter(policy: Policy, options: Options, able: tuple[str, ...], drafting: list[Policy]) -> Drafter:
    """The drafter that the engine will use in every cell."""
    if options.stand_in is not None:
        model = options.stand_in_model
        _check_model(model, "stand_in_model")
        return Drafter(kind="lookup") if options.stand_in == "lookup" else Drafter(kind="model", model=model)
    if not drafting:
        return Drafter(kind="none")
    fitting = [v.drafter for v in drafting if v.drafter.kind in able]
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
    variant: Policy, drafter: Drafter, policy: Policy, options: Options, keeps: tuple[str, ...]
) -> tuple[int, list[tuple[str, Fate, str]]]:
    """k of one cell, and (axis, fate, note) of what it is made of."""
    if isinstance(variant.controller, NoneConfig):
        return 0, [("k", "kept", "no speculation")]
    rows: list[tuple[str, Fate, str]] = []
    if options.stand_in is not None:
        stand_in = f"{options.stand_in} {options.stand_in_model}".strip()
        rows.append(("drafter", "approximated", f"{variant.drafter.label} replaced by {stand_in}, as asked"))
    elif variant.drafter != drafter:
        note = f"{variant.drafter.label} beside {drafter.label}: one drafter an engine, no speculation here"
        return 0, [("drafter", "dropped", note)]
    k, fate, note = draft_length(variant, policy)
    if variant.controller.kind not in keeps:
        rows.append(("k", fate, note))
    if variant.drafter.reads_selection:
        rows.append(("draft_kv", "dropped", "drafts over a selection of keys"))
    if not variant.verify_kv.lossless:
        rows.append(("verify_kv", "dropped", "verifies over every key, which is lossless"))
    return k, rows


def draft_length(variant: Policy, policy: Policy) -> tuple[int, Fate, str]:
    """(k, fate, note): the one draft length nearest to a controller's."""
    controller = variant.controller
    if isinstance(controller, FixedConfig):
        return controller.k, "kept", f"k {controller.k}"
    longest = longest_draft(controller)
    mean = (policy.expected or {}).get("k") if not policy.cells else None
    if isinstance(mean, (int, float)) and not isinstance(mean, bool) and mean > 0:
        k = min(max(round(mean), 1), longest)
        return k, "approximated", f"{controller.kind} replaced by fixed k {k}, near its predicted mean {mean:.2f}"
    return longest, "approximated", f"{controller.kind} replaced by fixed k {longest}, its longest draft"


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
