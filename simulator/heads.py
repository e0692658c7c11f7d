"""Which heads should score keys, and how many of their keys are read: Dustin's three-stage search, on recorded rows.

1. Target layer: every layer by history ARR of its best heads (ranked by needle mass inside the layer). Ours: layers
   whose best heads look little at the needle can be left out, of both models. Mean ARR is mostly sink and neighbours,
   so alone it may prefer heads that never find a fact.
2. Draft layers, greedily: the layer whose best heads raise hybrid ARR most joins, while one raises it and up to three.
   Half of what the budget leaves is then chosen by lookahead. ARR in 1 and 2 is the mean over fixed small budgets.
3. m, the keys chosen by lookahead at the wanted budget: every m where they are few, Optuna's TPE otherwise.

All ARR is window ARR (simulator.arr), averaged over a document's anchors, then over documents. The same seed gives the
same answer. Leaves out recording (specdial heads) and tables (simulator.arr_report).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import optuna

from specdial.engine.trace.attention import DRAFT, TARGET, AttentionTrace
from specdial.policies.errors import UserError
from specdial.policies.fields import setting
from specdial.simulator.arr import Floats, Frame, Order, falling, recall
from specdial.simulator.arr_cases import Case, Heads, best_heads, cases, mean_arr


@dataclass(frozen=True, slots=True)
class HeadSearch:
    """Settings of the search. budget: the wanted one, sink and recent keys included.

    window: rows to recall after an anchor; steps: draft rows summed into lookahead; heads_per_layer: heads of a chosen
    layer; least_needle_mass: what they must have on average for their layer to be chosen, 0 for Dustin's own rule;
    stage_budgets: of stages 1 and 2; trials: of stage 3.
    """

    budget: int = setting(512, low=1)
    sink: int = setting(4, low=0)
    recent: int = setting(16, low=0)
    window: int = setting(4, low=1)
    steps: int = setting(4, low=1)
    heads_per_layer: int = setting(4, low=1)
    least_needle_mass: float = setting(0.0, low=0.0, high=1.0)
    most_draft_layers: int = setting(3, low=0)
    stage_budgets: tuple[int, ...] = setting((128, 192, 256), low=1)
    trials: int = setting(40, low=1)
    seed: int = setting(0, low=0, high=2**32 - 1)

    def frame(self, budget: int | None = None) -> Frame:
        """The selection at this budget, None: at the wanted one."""
        return Frame(self.budget if budget is None else budget, self.sink, self.recent)

    @property
    def stage_frames(self) -> tuple[Frame, ...]:
        """The selections of stages 1 and 2."""
        return tuple(self.frame(budget) for budget in self.stage_budgets)


@dataclass(frozen=True, slots=True)
class FoundHeads:
    """What the search chose, and the ARR behind each choice.

    frame: the wanted selection; m: its keys by lookahead; arr: its ARR. layer_arr: stage 1, by target layer. draft_arr:
    stage 2, (layer, hybrid ARR with it) for each that joined, first (-1, ARR before any). m_arr: stage 3, by m tried.
    """

    frame: Frame
    target: Heads
    draft: Heads
    m: int
    arr: float
    layer_arr: dict[int, float]
    draft_arr: tuple[tuple[int, float], ...]
    m_arr: dict[int, float]

    def policy_parts(self) -> dict[str, Any]:
        """The parts of a policy that this decides, `verify_kv` and `scoring_heads`; no draft heads if m is 0.

        As in Dustin no round is verified in full: the policy is lossy.
        """
        f, hybrid = self.frame, self.m > 0
        source = "hybrid" if hybrid else "history"
        verify_kv = {"mode": "partial", "full_period": 0, "source": source, "scope": "model"}
        sizes = {"budget": f.budget, "sink": f.sink, "recent": f.recent}
        heads = {"target": [list(head) for head in self.target]}
        if not hybrid:
            return {"verify_kv": {**verify_kv, **sizes}, "scoring_heads": heads}
        heads["draft"] = [list(head) for head in self.draft]
        return {"verify_kv": {**verify_kv, **sizes, "lookahead_tokens": self.m}, "scoring_heads": heads}


def search_heads(trace: AttentionTrace, search: HeadSearch, split: str | None = None) -> FoundHeads:
    """The three stages on the trace's documents of a split. Without draft rows only the first has anything to choose.

    Raises UserError when the split is empty, when rows hold no window, when there is no stage budget or a budget cannot
    hold sink and recent, or when no target layer looks at the needle enough.
    """
    if not search.stage_budgets:
        raise UserError("search.stage_budgets is empty", "give at least one, as in search.stage_budgets=[128,256]")
    given = cases(trace, split, window=search.window, steps=search.steps)
    best = {source: _looking(trace, source, search) for source in (TARGET, DRAFT)}
    if not best[TARGET]:
        cause = f"no target layer's best heads have a mean needle mass of {search.least_needle_mass:g}"
        raise UserError(cause, "lower search.least_needle_mass")
    layer_arr = {layer: _history_arr(given, heads, search.stage_frames) for layer, heads in best[TARGET].items()}
    target = best[TARGET][_argmax(layer_arr)]
    draft, draft_arr = _add_draft_layers(given, target, best[DRAFT], search)
    m_arr = _try_m(given, target, draft, search) if draft else {0: _history_arr(given, target, (search.frame(),))}
    m = _argmax(m_arr)
    return FoundHeads(search.frame(), target, draft, m, m_arr[m], layer_arr, draft_arr, m_arr)


def _looking(trace: AttentionTrace, source: str, search: HeadSearch) -> dict[int, Heads]:
    """The best heads of every layer where they look at the needle enough."""
    mass = {(h.layer, h.head): h.needle_mass for h in trace.heads if h.source == source}
    best = best_heads(trace, source, search.heads_per_layer)
    return {
        layer: heads
        for layer, heads in best.items()
        if np.mean([mass[head] for head in heads]) >= search.least_needle_mass
    }


def _history_arr(given: list[Case], heads: Heads, frames: tuple[Frame, ...]) -> float:
    orders = _orders(given, [case.history(heads) for case in given], frames)
    return float(np.mean([mean_arr(recall(order, frame.free) for order in orders) for frame in frames]))


def _orders(given: list[Case], scores: list[Floats], frames: tuple[Frame, ...]) -> list[Order]:
    """Each document's keys by its scores, deep enough for every frame; they differ in nothing but their budgets."""
    depth = max(frame.free for frame in frames)
    return [falling(case.at, score, frames[0], depth) for case, score in zip(given, scores)]


def _add_draft_layers(
    given: list[Case], target: Heads, best: dict[int, Heads], search: HeadSearch
) -> tuple[Heads, tuple[tuple[int, float], ...]]:
    """Stage 2: the heads of the layers that joined, and the ARR after each."""
    frames = search.stage_frames
    orders = _orders(given, [case.history(target) for case in given], frames)
    totals: list[Floats] = [np.zeros_like(case.at.future, dtype=np.float64) for case in given]

    def hybrid(scores: list[Floats]) -> float:
        looks = _orders(given, scores, frames)
        arrs = [
            mean_arr(recall(order, frame.free, look, frame.free // 2) for look, order in zip(looks, orders))
            for frame in frames
        ]
        return float(np.mean(arrs))

    chosen: Heads = ()
    reached = [(-1, _history_arr(given, target, frames))]
    left = dict(best)
    while left and len(reached) <= search.most_draft_layers:
        found = {}
        for layer, heads in left.items():
            found[layer] = hybrid([total + case.lookahead(heads) for case, total in zip(given, totals)])
        layer = _argmax(found)
        if found[layer] <= reached[-1][1]:
            break
        heads = left.pop(layer)
        chosen += heads
        totals = [total + case.lookahead(heads) for case, total in zip(given, totals)]
        reached.append((layer, found[layer]))
    return chosen, tuple(reached)


def _try_m(given: list[Case], target: Heads, draft: Heads, search: HeadSearch) -> dict[int, float]:
    """Stage 3: ARR by m, for every m tried."""
    frame = search.frame()
    looks = _orders(given, [case.lookahead(draft) for case in given], (frame,))
    orders = _orders(given, [case.history(target) for case in given], (frame,))
    tried: dict[int, float] = {}

    def arr(m: int) -> float:
        if m not in tried:
            tried[m] = mean_arr(recall(order, frame.free, look, m) for look, order in zip(looks, orders))
        return tried[m]

    if frame.free < search.trials:
        return {m: arr(m) for m in range(frame.free + 1)}
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=search.seed))
    for m in (0, frame.free // 2, frame.free):
        study.enqueue_trial({"m": m})
    study.optimize(lambda trial: arr(trial.suggest_int("m", 0, frame.free)), n_trials=search.trials)
    return dict(sorted(tried.items()))


def _argmax(values: dict[int, float]) -> int:
    """The key of the largest value; ties: the lowest key."""
    return min(values, key=lambda key: (-values[key], key))
