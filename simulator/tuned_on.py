"""What a policy was tuned on, small enough for its file: acceptance by depth of every document, and what rounds cost.

It stands in a policy's `expected` block as `tuned_on`, and is what `drift` compares a live trace with. Where the trace
shows the policy's own rounds they are counted, with their times; else its rounds are replayed, and cost what the cost
table says. Leaves out the comparison (simulator.drift).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from specdial.engine.trace.reader import Trace
from specdial.engine.trace.schema import PARTIAL
from specdial.policies.errors import UserError
from specdial.policies.fields import parse, setting
from specdial.policies.file import policy_digest
from specdial.policies.schema import MOST_KEYS, Policy
from specdial.simulator.costs import CostModel
from specdial.simulator.lanes import Record, longest_k
from specdial.simulator.pricing import Setting, knots_for, tabulate
from specdial.simulator.replay import replay_rounds

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
VERSION = 1
MOST_DOCUMENTS = 64  # in a policy file
CONTEXT_SLACK_FRAC = 0.1  # how far beyond the priced contexts a round still has a price
MANY = 1 << 40


@dataclass(frozen=True, slots=True)
class DocumentCounts:
    """One document. context_tokens: where its first round starts. judged, accepted: drafts by depth, from depth 1.

    excess_log: log of the time its rounds took over what they were expected to take; 0 where none was measured.
    """

    context_tokens: int = setting(low=1, high=MOST_KEYS)
    judged: tuple[int, ...] = setting((), low=0, high=MANY)
    accepted: tuple[int, ...] = setting((), low=0, high=MANY)
    excess_log: float = setting(0.0, low=-100.0, high=100.0)


@dataclass(frozen=True, slots=True)
class RoundCost:
    """What a round of k drafts takes at a context, all its parts together; partial: one that verifies partially."""

    context_tokens: int = setting(low=1, high=MOST_KEYS)
    k: int = setting(low=0, high=64)
    round_us: float = setting(low=0.0)
    partial: bool = setting(False, later=True)


@dataclass(frozen=True, slots=True)
class TunedOn:
    """`expected.tuned_on` of a policy file. batch: sequences that decode together. split: which documents, None all."""

    version: int
    documents: tuple[DocumentCounts, ...]
    costs: tuple[RoundCost, ...] = ()
    batch: int = setting(1, low=1)
    split: str | None = None

    def expected_us(self, context_tokens: Ints, k: Ints, partial: Bools) -> Floats:
        """[n] expected time of each round, NaN where nothing was said of its kind, k or context."""
        found = np.full(len(k), np.nan)
        for kind, drafts in {(point.partial, point.k) for point in self.costs}:
            points = sorted((p.context_tokens, p.round_us) for p in self.costs if (p.partial, p.k) == (kind, drafts))
            at, us = (np.array(column, np.float64) for column in zip(*points, strict=True))
            low, high = at[0] * (1.0 - CONTEXT_SLACK_FRAC), at[-1] * (1.0 + CONTEXT_SLACK_FRAC)
            mine = (k == drafts) & (partial == kind) & (low <= context_tokens) & (context_tokens <= high)
            found[mine] = np.interp(context_tokens[mine], at, us)
        return found


def read_tuned_on(policy: Policy) -> TunedOn | None:
    """What a policy file says it was tuned on; None where it does not. Raises UserError naming the field at fault."""
    block = (policy.expected or {}).get("tuned_on")
    if block is None:
        return None
    found = parse(TunedOn, block, "expected.tuned_on")
    if found.version != VERSION:
        cause = f"expected.tuned_on.version is {found.version}"
        raise UserError(cause, f"this version reads {VERSION}: update specdial", field="expected.tuned_on.version")
    for i, document in enumerate(found.documents):
        pairs = zip(document.judged, document.accepted, strict=False)
        if len(document.judged) != len(document.accepted) or any(a > j for j, a in pairs):
            field = f"expected.tuned_on.documents[{i}].accepted"
            raise UserError(f"{field} does not fit what was judged", "stamp the policy again", field=field)
    return found


def tuned_on(record: Record, costs: CostModel, policy: Policy, split: str | None = None, batch: int = 1) -> TunedOn:
    """Count a policy's rounds on the documents of a split. Raises UserError where the record cannot show them."""
    points = round_costs(record, costs, policy, batch)
    bare = TunedOn(VERSION, (), points, batch, split)
    if record.policy_digest == policy_digest(policy):
        chosen = record.documents.doc if split is None else record.documents.doc[record.documents.split == split]
        documents = count_documents(record.trace, policy.k_max, bare, chosen)
    else:
        [log] = replay_rounds(record, [policy], split, batch)
        columns = {name: getattr(log, name) for name in ("doc", "context_tokens", "k", "accepted", "emitted")}
        documents = [_counts(rows, policy.k_max, 0.0) for _, rows in _by_document(columns)]
    if not documents:
        raise UserError(f"trace {record.trace.path} has no rounds of split {split!r}", "name another split")
    return TunedOn(VERSION, tuple(documents), points, batch, split)


def count_documents(trace: Trace, k_max: int, expected: TunedOn, docs: Ints | None = None) -> list[DocumentCounts]:
    """Each document of a trace as its own rounds show it, in order of their numbers. docs: these alone.

    Its time is its batch's, so the longest draft of that is priced; in a smaller last batch it is not compared.
    """
    names = ("doc", "context_tokens", "k", "accepted", "emitted", "draft_us", "verify_us", "select_us", "host_us")
    columns = {name: trace.rounds[name].to_numpy() for name in names}
    columns["partial"] = np.array(trace.rounds["mode"].to_pylist()) == PARTIAL
    columns["longest_k"] = longest_k(trace)
    columns["as_tuned"] = trace.rounds["batch"].to_numpy() == expected.batch
    if docs is not None:
        mine = np.isin(columns["doc"], docs)
        columns = {name: column[mine] for name, column in columns.items()}
    found = []
    for _, rows in _by_document(columns):
        took_us = rows["draft_us"] + rows["verify_us"] + rows["select_us"] + rows["host_us"]
        wanted_us = expected.expected_us(rows["context_tokens"], rows["longest_k"], rows["partial"])
        priced = np.isfinite(wanted_us) & rows["as_tuned"]
        took, wanted = float(took_us[priced].sum()), float(wanted_us[priced].sum())
        found.append(_counts(rows, k_max, float(np.log(took / wanted)) if took > 0.0 and wanted > 0.0 else 0.0))
    return found


def round_costs(record: Record, costs: CostModel, policy: Policy, batch: int = 1) -> tuple[RoundCost, ...]:
    """The price of a round by k, at the measured contexts and wherever a cell begins or ends; what has none is left."""
    documents = record.documents
    low, high = int(documents.start.min()), int(documents.end.max())
    ends = [end for c in policy.cells for end in (c.from_context_tokens, c.to_context_tokens or high)]
    inner = [at for end in ends for at in (end - 1, end) if low < at < high]
    knots = sorted({*(round(at) for at in knots_for(costs, low, high)), *inner})
    prompt = round(float(documents.start.mean()))
    output = round(float((documents.end - documents.start).mean()))
    variants = policy.variants()
    found = []
    for context in knots:
        variant = variants[policy.variant_index(context, batch)]
        for partial in (False,) if variant.verify_kv.lossless else (False, True):
            setting_ = Setting.of(policy, variant, prompt, output, partial=partial)
            table = tabulate(costs, setting_, batch, np.array([float(context)]))
            total_us = table.cost_us.sum(axis=0)[:, 0].tolist()  # [k + 1]
            priced = [k for k in range(len(total_us)) if not table.refused[k, 0]]
            found += [RoundCost(context, k, total_us[k], partial) for k in priced]
    return tuple(found)


def thinned(found: TunedOn) -> TunedOn:
    """At most MOST_DOCUMENTS of its documents, evenly spaced: what a policy file holds."""
    n = len(found.documents)
    kept = [found.documents[i * n // MOST_DOCUMENTS] for i in range(MOST_DOCUMENTS)] if n > MOST_DOCUMENTS else None
    return found if kept is None else TunedOn(found.version, tuple(kept), found.costs, found.batch, found.split)


def _by_document(columns: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    doc = columns["doc"]
    return [(int(d), {name: column[doc == d] for name, column in columns.items()}) for d in np.unique(doc)]


def _counts(rows: dict[str, Any], k_max: int, excess_log: float) -> DocumentCounts:
    depth = np.arange(k_max)[:, None]
    right = np.where(rows["emitted"] > rows["accepted"], rows["accepted"], rows["accepted"] - 1)  # of the last judged
    judged = ((rows["k"] > depth) & (right >= depth)).sum(axis=1)
    accepted = (np.minimum(rows["accepted"], rows["k"]) > depth).sum(axis=1)
    start = int(rows["context_tokens"].min())
    return DocumentCounts(start, tuple(judged.tolist()), tuple(accepted.tolist()), excess_log)
