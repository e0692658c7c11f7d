"""A policy as a function of (context, batch): which of some candidates to run in every cell of a grid, k = 0 included.

A cell is replayed on the documents recorded inside it, or, where there are none, on all of them moved to its context:
acceptance is then taken as recorded elsewhere and the cell is called moved. Neighbouring cells may hold different
policies only where each such border saves more than `switch_frac` of one cell's plain time. The mixed workload spends
equal plain time in every cell. Chosen on one split, judged on another, by replaying the composed policy itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from specdial.policies.errors import UserError
from specdial.policies.fields import setting, to_plain
from specdial.policies.schema import Cell, Policy, policy_from_mapping
from specdial.policies.verification import LOOKAHEAD, VerifyKV
from specdial.simulator.costs import CostModel
from specdial.simulator.lanes import Record
from specdial.simulator.replay import replay

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
NEVER = 1e6  # relative time of a policy that a cell does not support


@dataclass(frozen=True, slots=True)
class SurfaceSettings:
    """contexts: one a row of cells, tokens; () for those with measured costs. batches: () for those searched.

    switch_frac: what a border between different policies must save, of a cell's plain time.
    """

    contexts: tuple[int, ...] = setting((), low=1)
    batches: tuple[int, ...] = setting((), low=1)
    switch_frac: float = setting(0.005, low=0.0, high=1.0)


@dataclass(frozen=True, slots=True)
class SurfaceCell:
    """One cell of the judged surface; speedup of the composed policy and of the best single one there."""

    context_tokens: int
    batch: int
    policy: str
    k_max: int
    moved: bool
    speedup: float
    single_speedup: float


@dataclass(frozen=True, slots=True)
class Surface:
    """policy: composed, or the best single one where composing gains nothing. gain_frac: time saved against `single`.

    gain_frac, speedups: on the mixed workload of the judging split.
    """

    policy: Policy
    single: Policy
    cells: tuple[SurfaceCell, ...]
    speedup: float
    single_speedup: float
    gain_frac: float
    pays: bool
    switch_frac: float


@dataclass(frozen=True, slots=True)
class Grid:
    """Ascending contexts and batches; a cell reaches from its own to the next, contexts to the geometric middle."""

    contexts: tuple[int, ...]
    batches: tuple[int, ...]

    def edges(self) -> list[int]:
        """Contexts at which cells end, without the last."""
        return [round(float(np.sqrt(low * high))) for low, high in zip(self.contexts, self.contexts[1:])]

    def cell(self, i: int, j: int) -> dict[str, int | None]:
        """Where a cell lies, as a policy file has it."""
        edges: list[int | None] = [0, *self.edges(), None]
        batches: list[int | None] = [1, *self.batches[1:], None]
        context = {"from_context_tokens": edges[i], "to_context_tokens": edges[i + 1]}
        return {**context, "from_batch": batches[j], "to_batch": batches[j + 1]}


def find_surface(
    record: Record,
    costs: CostModel,
    candidates: Sequence[Policy],
    grid: Grid,
    splits: tuple[str, str],
    switch_frac: float,
) -> Surface | None:
    """Choose on splits[0], judge on splits[1]. candidates: the first is plain decoding.

    None where nothing drafts, or some cell has no price.
    """
    plain = candidates[0]
    drafting = [p for p in candidates[1:] if p.k_max > 0]
    relative = _relative_times(record, costs, [plain, *drafting], grid, splits[0])  # [P, contexts, batches]
    if not drafting or (relative[0] >= NEVER).any():
        return None
    total = relative.mean(axis=(1, 2))
    single = [plain, *drafting][int(total.argmin())]
    base = drafting[int(total[1:].argmin())]
    idle = _composed(base, [Cell(_idle(base))])
    places = [1 + i for i, p in enumerate(drafting) if _fits(base, p)]
    fitting = [drafting[i - 1] for i in places]
    relative = np.concatenate([_relative_times(record, costs, [idle], grid, splits[0]), relative[places]])
    labels = [idle, *fitting]
    chosen = smooth(relative, switch_frac)  # [contexts, batches]
    composed = compose(base, labels, chosen, grid)
    times = _relative_times(record, costs, [composed, single], grid, splits[1])
    if (times >= NEVER).any():
        return None
    speedups = 1.0 / times.mean(axis=(1, 2))
    gain = float(1.0 - speedups[1] / speedups[0])
    pays = bool(composed.cells) and gain > 0.0
    cells = tuple(
        SurfaceCell(
            context,
            batch,
            "plain" if chosen[i, j] == 0 else labels[chosen[i, j]].name,
            0 if chosen[i, j] == 0 else labels[chosen[i, j]].k_max,
            _documents(record, splits[1], grid, i)[1],
            float(1.0 / times[0, i, j]),
            float(1.0 / times[1, i, j]),
        )
        for i, context in enumerate(grid.contexts)
        for j, batch in enumerate(grid.batches)
    )
    policy = composed if pays else single
    return Surface(policy, single, cells, float(speedups[0]), float(speedups[1]), gain, pays, switch_frac)


def smooth(relative: Floats, switch_frac: float) -> Ints:
    """[contexts, batches] places in `relative` [P, contexts, batches], times over plain decoding.

    Minimises the sum of chosen times plus switch_frac for every two neighbours that differ: rows of contexts by dynamic
    programming, given the rows of the batches beside them, again and again until nothing changes. Exact for one batch;
    for more no row can be bettered alone, and no single policy is better.
    """
    options, _, batches = relative.shape
    starts = [np.full(relative.shape[1:], p) for p in range(options)]
    starts.append(relative.argmin(axis=0))
    chosen: Ints = min(starts, key=lambda start: energy(relative, start, switch_frac)).copy()
    best = energy(relative, chosen, switch_frac)
    while True:
        for j in range(batches):
            unary = relative[:, :, j].copy()  # [P, contexts]
            for beside in (j - 1, j + 1):
                if 0 <= beside < batches:
                    unary += switch_frac * (np.arange(options)[:, None] != chosen[None, :, beside])
            chosen[:, j] = _row(unary, switch_frac)
        now = energy(relative, chosen, switch_frac)
        if now >= best - 1e-12:
            return chosen
        best = now


def energy(relative: Floats, chosen: Ints, switch_frac: float) -> float:
    """What `smooth` minimises."""
    i, j = np.indices(chosen.shape)
    borders = int((chosen[1:] != chosen[:-1]).sum() + (chosen[:, 1:] != chosen[:, :-1]).sum())
    return float(relative[chosen, i, j].sum()) + switch_frac * borders


def compose(base: Policy, labels: Sequence[Policy], chosen: Ints, grid: Grid) -> Policy:
    """A policy whose cells run labels[chosen], labels[0] standing for k = 0; cells of equal policies are joined.

    The commonest drafting policy becomes the policy outside every cell.
    """
    counts = np.bincount(chosen.reshape(-1), minlength=len(labels))
    common = int(counts[1:].argmax()) + 1 if counts[1:].any() else None
    outer = base if common is None else labels[common]
    cells = []
    for i, j, height, width in _rectangles(chosen):
        place = int(chosen[i, j])
        if place == common:
            continue
        last = grid.cell(i + height - 1, j + width - 1)
        ends = {"to_context_tokens": last["to_context_tokens"], "to_batch": last["to_batch"]}
        wanted = _idle(outer) if place == 0 else _parts(labels[place])
        parts = {name: part for name, part in wanted.items() if part != _parts(outer)[name]}
        cells.append(Cell(parts, **{**grid.cell(i, j), **ends}))  # type: ignore[arg-type]
    return _composed(outer, cells)


def _idle(outer: Policy) -> dict[str, Any]:
    """The overrides of a k = 0 cell. Without drafts there is no lookahead to choose keys by: it verifies in full."""
    full = {"verify_kv": to_plain(VerifyKV(), complete=True)} if outer.verify_kv.source in LOOKAHEAD else {}
    return {"controller": {"kind": "none"}, **full}


def _row(unary: Floats, switch_frac: float) -> Ints:
    """[contexts] the cheapest path through [P, contexts] that pays switch_frac at every change."""
    options, length = unary.shape
    cost, back = unary[:, 0].copy(), np.zeros((length, options), np.int64)
    for i in range(1, length):
        cheapest = int(cost.argmin())
        stays = cost <= cost[cheapest] + switch_frac
        back[i] = np.where(stays, np.arange(options), cheapest)
        cost = np.where(stays, cost, cost[cheapest] + switch_frac) + unary[:, i]
    path = np.zeros(length, np.int64)
    path[-1] = cost.argmin()
    for i in range(length - 1, 0, -1):
        path[i - 1] = back[i, path[i]]
    return path


def _rectangles(chosen: Ints) -> list[tuple[int, int, int, int]]:
    """(context, batch, height, width) of rectangles of equal cells that cover the grid, greedily."""
    left = np.ones(chosen.shape, np.bool_)
    found = []
    for i, j in np.ndindex(chosen.shape):
        if not left[i, j]:
            continue
        same = left & (chosen == chosen[i, j])
        height = 1
        while i + height < chosen.shape[0] and same[i + height, j]:
            height += 1
        width = 1
        while j + width < chosen.shape[1] and same[i : i + height, j + width].all():
            width += 1
        left[i : i + height, j : j + width] = False
        found.append((i, j, height, width))
    return found


def _parts(policy: Policy) -> dict[str, Any]:
    """What a cell can override, complete, so that nothing of the outer policy shines through."""
    return {
        name: to_plain(getattr(policy, name), complete=True)
        for name in ("drafter", "controller", "draft_kv", "verify_kv")
    }


def _fits(base: Policy, policy: Policy) -> bool:
    """Can both be cells of one policy? Heads are the policy's own, and history is kept in one form."""
    kept = [(p.draft_kv.window, p.draft_kv.page, p.draft_kv.decay) for p in (base, policy)]
    if base.scoring_heads != policy.scoring_heads or kept[0] != kept[1]:
        return False
    try:
        _composed(base, [Cell(_parts(policy)), Cell(_idle(base))])
    except UserError:
        return False
    return True


def _composed(outer: Policy, cells: Sequence[Cell]) -> Policy:
    plain = to_plain(replace(outer, cells=tuple(cells), expected=None, measured=None, provenance=None))
    return policy_from_mapping({**plain, "name": "surface"})


def _documents(record: Record, split: str, grid: Grid, place: int) -> tuple[Record, bool]:
    """The record with only a cell's documents, or with all of the split's moved to its context (True)."""
    documents = record.documents.take(np.flatnonzero(record.documents.split == split))
    middle = (documents.start + documents.end) // 2
    inside = np.flatnonzero(np.searchsorted(grid.edges(), middle, side="right") == place)
    if len(inside):
        return replace(record, documents=documents.take(inside)), False
    shift = grid.contexts[place] - documents.start
    ends = {name: getattr(documents, name) + shift for name in ("start", "end", "requested_end")}
    return replace(record, documents=replace(documents, **ends)), True


def _relative_times(record: Record, costs: CostModel, policies: Sequence[Policy], grid: Grid, split: str) -> Floats:
    """[policies, contexts, batches] time over plain decoding's; NEVER where refused or without a price."""
    found = np.full((len(policies), len(grid.contexts), len(grid.batches)), NEVER)
    for i in range(len(grid.contexts)):
        mine, _ = _documents(record, split, grid, i)
        for j, batch in enumerate(grid.batches):
            whole = replace(mine, documents=mine.documents.filling(batch))
            for p, outcome in enumerate(replay(whole, costs, policies, split, batch, bootstrap=0)):
                if outcome.speedup is not None:
                    found[p, i, j] = 1.0 / outcome.speedup
    return found
