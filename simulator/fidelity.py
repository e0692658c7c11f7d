"""What partial verification is worth, as curves over its budget and age, fitted to a trace's probes.

Of every quantity the error is modelled: KL(full || partial) in nats, the share of tokens that are not full
verification's likeliest, the share of the target's attention that the selection missed, and the share of drafts, of
those whose predecessors were right, that it rejected, beside what full verification rejected in the same places. For
each selection (all settings but the budget):

    link(error) = bias + by_budget * log(keys) + by_age * log(rounds since full verification)

link is log for KL, logit for shares. Errors do not rise with the budget nor fall with age: where the data say
otherwise the slope is 0 and `flat` names it. Fitted by quasi-likelihood on means of (document, budget, age), so few and
many probes count as what they are. Budgets outside the probed ones are not supported; ages past the oldest probed are
extrapolated and counted, but acceptance stays what it was there. Full rounds err in nothing. Leaves out the length of
the context: probes are of their trace's.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from specdial.engine.trace.reader import Trace
from specdial.engine.trace.sources import selection_kind
from specdial.policies.artifact import digest_of
from specdial.policies.fields import parse, to_plain
from specdial.policies.schema import Policy, ScoringHeads, VerifyKV
from specdial.simulator.curves import Curve, Link, cells_of, fit_curve

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
QUANTITIES: dict[str, Link] = {
    "kl_nats": "log",
    "top1": "logit",
    "arr": "logit",
    "draft": "logit",
    "full_draft": "logit",
}
RESAMPLES = 100
LEAST = 20  # probes of a selection below which nothing is fitted


@dataclass(frozen=True, slots=True)
class Selection:
    """The curves of one selection, by quantity, where they could be fitted; what was probed of it."""

    label: str
    curves: dict[str, Curve]
    budgets: tuple[int, ...]
    oldest: int
    probes: int

    def changes(self, budget: int, ages: int) -> "Changes":
        """How partial rounds accept, by age from 0 (full) to `ages`; nothing changes where no drafts were probed."""
        kept, lifted, accepted = np.ones(ages + 1), np.zeros(ages + 1), np.ones(ages + 1)
        if "draft" in self.curves and "full_draft" in self.curves:
            age = np.minimum(np.arange(1.0, ages + 1.0), self.oldest)
            ours, full = (1.0 - self.curves[name].error(float(budget), age)[0] for name in ("draft", "full_draft"))
            kept[1:] = np.minimum(ours / np.maximum(full, 1e-6), 1.0)
            lifted[1:] = np.maximum(ours - full, 0.0) / np.maximum(1.0 - full, 1e-6)
            accepted[1:] = ours
        return Changes(kept, lifted, accepted)


@dataclass(frozen=True, slots=True)
class Changes:
    """What partial verification makes of drafts, by rounds since full verification, [ages + 1] each.

    kept: the chance that it accepts a draft that full verification accepts. lifted: one that full verification rejects,
    as a drafter does that reads much the same keys; accepted: any draft, its predecessors accepted.
    """

    kept: Floats
    lifted: Floats
    accepted: Floats


@dataclass(frozen=True, slots=True)
class Model:
    """Everything a trace's probes say. fitted_on: the split whose documents were used, all where it has no train."""

    selections: dict[str, Selection]
    fitted_on: str

    @classmethod
    def of(cls, trace: Trace) -> "Model | None":
        """None where the trace holds no probes of partial rounds."""
        splits = {int(d["doc"]): str(d["split"]) for d in trace.meta["documents"]}
        arms = _arms(trace)
        rows = {name: trace.probes[name].to_numpy(zero_copy_only=False) for name in trace.probes.column_names}
        used = (rows["rounds_since_full"] > 0) & np.isin(rows["arm"], list(arms))
        train = used & np.array([splits.get(int(doc)) == "train" for doc in rows["doc"]], np.bool_)
        chosen, fitted_on = (train, "train") if train.any() else (used, "all")
        rows = {name: column[chosen] for name, column in rows.items()}
        found = {}
        for key in dict.fromkeys(kind for kind, _, _ in arms.values()):
            mine = {arm: (budget, label) for arm, (kind, budget, label) in arms.items() if kind == key}
            here = np.isin(rows["arm"], list(mine))
            if int(here.sum()) >= LEAST:
                found[key] = _selection({name: column[here] for name, column in rows.items()}, mine)
        return cls(found, fitted_on) if found else None

    def lacks(self, variant: Policy) -> str | None:
        """Why nothing is known of a lossy variant's partial rounds, None where something is."""
        verify_kv = variant.verify_kv
        selection = self.selections.get(_kind(verify_kv, variant.scoring_heads))
        budget = verify_kv.keys.budget
        if selection is None:
            known = ", ".join(sorted(s.label for s in self.selections.values()))
            return f"verification from {verify_kv.source} with these settings was not probed (probed: {known})"
        if not selection.budgets[0] <= budget <= selection.budgets[-1]:
            known = ", ".join(map(str, selection.budgets))
            return f"a verification of {budget} keys lies outside the probed budgets ({known})"
        return None

    def of_variant(self, variant: Policy) -> Selection | None:
        """The selection that a variant's partial rounds read, None for a lossless one or one not probed."""
        if variant.verify_kv.lossless:
            return None
        return self.selections.get(_kind(variant.verify_kv, variant.scoring_heads))


@dataclass(frozen=True, slots=True)
class Bounded:
    """A prediction with its 95 % interval over documents, None where one document was probed."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Fidelity:
    """Of all tokens a policy commits: KL from full verification, and shares: tokens that are full verification's
    likeliest, attention held. None where not probed. partial_frac: tokens that partial rounds committed.

    extrapolated_frac: tokens of rounds older than any probed.
    """

    kl_nats: Bounded | None
    top1_agreement: Bounded | None
    arr: Bounded | None
    partial_frac: float
    extrapolated_frac: float


def predict(model: Model, policy: Policy, emitted: Floats) -> Fidelity | None:
    """Fidelity of a policy whose variants commit emitted [variants, ages] tokens; None where a part is not probed."""
    total = float(emitted.sum())
    sums: dict[str, Floats | None] = {name: np.zeros(1) for name in ("kl_nats", "top1", "arr")}
    extrapolated = partial = 0.0
    for variant, counts in zip(policy.variants(), emitted, strict=False):
        ages = np.flatnonzero(counts[1:]) + 1
        if not len(ages):
            continue
        selection = model.of_variant(variant)
        if selection is None:
            return None
        weight = counts[ages]
        partial += float(weight.sum())
        extrapolated += float(weight[ages > selection.oldest].sum())
        for name, total_so_far in sums.items():
            curve = selection.curves.get(name)
            if curve is None or total_so_far is None:
                sums[name] = None
                continue
            sums[name] = (
                total_so_far + curve.error(float(variant.verify_kv.keys.budget), ages.astype(np.float64)) @ weight
            )

    def bounded(name: str, *, share: bool) -> Bounded | None:
        found = sums[name]
        if found is None:
            return None
        values = 1.0 - found / total if share else found / total
        if len(values) == 1:
            return Bounded(float(values[0]))
        low, high = np.percentile(values[1:], [2.5, 97.5])
        return Bounded(float(values[0]), float(low), float(high))

    return Fidelity(
        bounded("kl_nats", share=False), bounded("top1", share=True), bounded("arr", share=True),
        partial / total, extrapolated / total,
    )  # fmt: skip


def _kind(verify_kv: VerifyKV, heads: ScoringHeads) -> str:
    """What two verifications share whose fidelity is one curve of budget and age."""
    used = heads if verify_kv.source in ("history", "hybrid", "lookahead") else ScoringHeads()
    return digest_of({"verify_kv": selection_kind(verify_kv), "heads": to_plain(used)})


def _arms(trace: Trace) -> dict[int, tuple[str, int, str]]:
    """(kind, budget, source) of every arm of the probes; 0 is the recorded policy, where it has one selection."""
    found: dict[int, tuple[str, int, str]] = {}
    recorded = trace.meta["policy"]
    if "verify_kv" in recorded and not any("verify_kv" in c["overrides"] for c in recorded.get("cells", ())):
        arms = [{"arm": 0, **recorded}, *trace.meta.get("probe_arms", ())]
    else:
        arms = list(trace.meta.get("probe_arms", ()))
    for arm in arms:
        verify_kv = parse(VerifyKV, arm["verify_kv"], "probe_arms.verify_kv")
        heads = parse(ScoringHeads, arm.get("scoring_heads", {}), "probe_arms.scoring_heads")
        if not verify_kv.lossless:
            found[int(arm["arm"])] = _kind(verify_kv, heads), verify_kv.keys.budget, verify_kv.source
    return found


def _selection(rows: dict[str, Any], arms: dict[int, tuple[int, str]]) -> Selection:
    """Fit all curves of one selection. rows: its probes; arms: (budget, source) of each."""
    budget = np.array([arms[int(arm)][0] for arm in rows["arm"]], np.float64)
    age = rows["rounds_since_full"].astype(np.float64)
    documents = np.unique(rows["doc"])
    errors = {
        "kl_nats": rows["kl_nats"].astype(np.float64),
        "top1": 1.0 - rows["top1_match"].astype(np.float64),
        "arr": 1.0 - rows["arr"].astype(np.float64),
        "draft": 1.0 - _optional(rows["draft_match"]),
        "full_draft": 1.0 - _optional(rows["full_match"]),
    }
    draws = np.random.default_rng(0).multinomial(
        len(documents), np.full(len(documents), 1.0 / len(documents)), size=RESAMPLES
    )  # [R, documents]
    curves = {}
    for name, link in QUANTITIES.items():
        known = np.isfinite(errors[name])
        if int(known.sum()) >= LEAST:
            cells = cells_of(rows["doc"][known], budget[known], age[known], errors[name][known])
            curves[name] = fit_curve(link, cells, documents, draws)
    return Selection(
        label=next(iter(arms.values()))[1],
        curves=curves,
        budgets=tuple(sorted({int(keys) for keys in budget})),
        oldest=int(age.max()),
        probes=len(age),
    )


def _optional(column: Any) -> Floats:
    """Booleans that may be null, as numbers and NaN."""
    return np.array([np.nan if value is None else float(value) for value in column], np.float64)


def describe(model: Model) -> list[dict[str, Any]]:
    """The fitted curves as plain data, for files and tables."""
    return [
        {
            "source": selection.label,
            "probes": selection.probes,
            "budgets": list(selection.budgets),
            "oldest_rounds": selection.oldest,
            "fitted_on": model.fitted_on,
            "quantity": name,
            "bias": float(curve.coefficients[0, 0]),
            "by_log_budget": float(curve.coefficients[0, 1]),
            "by_log_age": float(curve.coefficients[0, 2]),
            "flat": list(curve.flat),
            "held_out_error": curve.held_out,
            "mean_alone_error": curve.mean_alone,
        }
        for selection in model.selections.values()
        for name, curve in selection.curves.items()
    ]
