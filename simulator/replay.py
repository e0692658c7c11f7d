"""Replay: a trace's documents decoded again under other policies, in NumPy, and priced by a cost model.

The round is the engine's (simulator.loop), the controllers are the engine's own objects. Documents run in consecutive
groups of `batch` within the split, in document order; a batch's round lasts as long as its longest member and the last
group may be smaller. The baseline is plain decoding in the same groups, so plain's speedup is 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from specdial.engine.trace.reader import Trace
from specdial.engine.trace.schema import PARTIAL
from specdial.policies.errors import UserError
from specdial.policies.schema import Policy
from specdial.simulator.costs import CostModel, CostRefusedError
from specdial.simulator.imputation import imputed
from specdial.simulator.lanes import Documents, Record, read_record
from specdial.simulator.mixing import drawn, with_budgets, with_luck
from specdial.simulator.outcome import FullBatch, Outcome, Rounds, bootstrap_interval
from specdial.simulator.own_time import own_time_us, was_recorded
from specdial.simulator.pricing import Setting, knots_for, plain_time_us, rows_for
from specdial.simulator.summary import Frame, Known, Tables, price_tables, summarise
from specdial.simulator.support import Support, support
from specdial.simulator.tally import Units, tally

Floats = npt.NDArray[np.float64]
CHUNK_SEQUENCES = 8192  # sequences stepped together: wide enough for NumPy, small enough for the cache


def replay(
    trace: Trace | Record,
    costs: CostModel | None,
    policies: Sequence[Policy],
    split: str | None = None,
    batch: int = 1,
    *,
    bootstrap: int = 1000,
    seed: int = 0,
    keep_rounds: bool = False,
    full_batch: bool = False,
) -> list[Outcome]:
    """One Outcome per policy, in order.

    costs: None takes the trace's own rounds. bootstrap: resamples for the interval, 0 for none. seed: of the bootstrap
    and of whatever acceptance is modelled. full_batch: also as if batches were kept full, see Outcome.full_batch;
    the first documents fill up the last batch there.
    Raises UserError when the split has no document.
    """
    record = trace if isinstance(trace, Record) else read_record(trace)
    costs = CostModel.from_rounds(record.trace) if costs is None else costs
    record, judged = _judge(drawn(record, seed), policies, batch, seed)
    frame = _frame(record, costs, split, batch)
    knots = knots_for(costs, float(frame.documents.start.min()), float(frame.documents.end.max()))
    job = _Job(record, costs, batch, frame, knots, keep_rounds)
    done = job.run_all(policies, judged)
    if full_batch and batch > 1:
        full = replace(job, frame=_frame(record, costs, split, batch, full=True), full=True, keep_rounds=False)
        done = [_with_full_batch(*both) for both in zip(done, full.run_all(policies, judged), strict=True)]
    return _with_intervals(done, job.frame, bootstrap, seed) if bootstrap else done


def replay_rounds(
    trace: Trace | Record, policies: Sequence[Policy], split: str | None = None, batch: int = 1, *, seed: int = 0
) -> list[Rounds]:
    """The rounds of each policy, without any cost. Raises UserError where the record does not support one."""
    read = trace if isinstance(trace, Record) else read_record(trace)
    record, judged = _judge(drawn(read, seed), policies, batch, seed)
    documents = _documents(record, split)
    logs = []
    for policy, judgement in zip(policies, judged, strict=True):
        if judgement.level == "refused":
            raise UserError(f"policy {policy.name} cannot be replayed: {judgement.reason}", "record it densely")
        units = Units.of(len(documents), batch)
        found = tally(record, documents, [policy], [judgement.arms], units=units, knots=np.zeros(1), logged=(0,))
        if found.missing[0]:
            raise UserError(f"policy {policy.name} drafts where nothing was recorded", "record with dense=true")
        logs.append(found.logs[0])
    return logs


def _judge(record: Record, policies: Sequence[Policy], batch: int, seed: int) -> tuple[Record, list[Support]]:
    """Support of each policy; arms between recorded budgets are appended to the record and named in the support."""
    judged = [support(record, policy, batch) for policy in policies]
    wanted = sorted({mix for judgement in judged for mix in judgement.between if mix is not None})
    place = {mix: len(record.arms) + i for i, mix in enumerate(wanted)}
    renamed = [
        replace(j, arms=tuple(a if mix is None else place[mix] for a, mix in zip(j.arms, j.between, strict=True)))
        for j in judged
    ]
    complete = with_budgets(imputed(record, seed), wanted, seed)
    lossy = any(not policy.lossless for policy in policies)
    recorded_lossy = PARTIAL in pc.unique(record.trace.rounds["mode"]).to_pylist()  # it shows what they accept
    return (with_luck(complete, seed) if lossy and not recorded_lossy else complete), renamed


def _documents(record: Record, split: str | None) -> Documents:
    documents = record.documents
    if split is not None:
        documents = documents.take(np.flatnonzero(documents.split == split))
    if not len(documents):
        known = ", ".join(sorted(set(record.documents.split.tolist())))
        raise UserError(f"the trace has no finished document in split {split!r}", f"use one of {known}")
    return documents


def _frame(record: Record, costs: CostModel, split: str | None, batch: int, *, full: bool = False) -> Frame:
    """full: all batches are whole, and plain decoding is as if they were kept full."""
    documents = _documents(record, split)
    if full:
        documents = documents.filling(batch)
    units = Units.of(len(documents), batch)
    parts = [slice(f, f + n) for f, n in zip(units.first, units.sizes, strict=True)]
    base: Floats | None = None
    base_tokens = int((documents.end - documents.start).sum())
    try:
        plain = [plain_time_us(costs, documents.start[part], documents.end[part], full=full) for part in parts]
        base, base_tokens = np.array([us for us, _ in plain]), sum(tokens for _, tokens in plain)
    except CostRefusedError:
        pass
    prompt_tokens = np.array([documents.start[part].max() for part in parts])
    output_tokens = np.array([round(float((documents.end - documents.start)[part].mean())) for part in parts])
    kv_bytes = float(record.trace.meta["model"]["kv_bytes_per_token"])
    rows = rows_for(costs, int((documents.end - documents.start).max()) + costs.recomputed_multiple)
    return Frame(documents, units, base, base_tokens, kv_bytes, prompt_tokens, output_tokens, rows, record.fidelity)


def _with_full_batch(outcome: Outcome, full: Outcome) -> Outcome:
    if full.us_per_token is None or full.tokens_per_round is None:
        return outcome
    return replace(outcome, full_batch=FullBatch(full.speedup, full.us_per_token, full.tokens_per_round))


def _with_intervals(outcomes: list[Outcome], frame: Frame, resamples: int, seed: int) -> list[Outcome]:
    """Add 95 % intervals; a single unit has none, for resampling it shows nothing."""
    priced = [(i, outcome.unit_us) for i, outcome in enumerate(outcomes) if outcome.speedup is not None]
    if frame.base_us is None or not priced or len(frame.units.first) < 2:
        return outcomes
    times = np.stack([unit_us for _, unit_us in priced if unit_us is not None])
    low, high = bootstrap_interval(frame.base_us, times, resamples, seed)
    for place, (i, _) in enumerate(priced):
        outcomes[i] = replace(outcomes[i], low=float(low[place]), high=float(high[place]))
    return outcomes


def misplaced(policy: Policy, costs: CostModel) -> str | None:
    """Why costs say nothing of a policy whose keys live elsewhere: a trace's own rounds are of its policy's place."""
    recorded = (costs.meta["policy"] if costs.own_rounds else costs.meta).get("kv", {}).get("where", "device")
    if policy.k_max == 0 or policy.kv.where == recorded:
        return None
    mine, theirs = ("in host memory", "on the device")[:: 1 if policy.kv.where == "host" else -1]
    return f"its keys live {mine}, and costs are of keys {theirs}: validate measures it"


@dataclass(frozen=True, slots=True)
class _Job:
    """What all chunks of one replay share. priced: price tables so far. full: as if batches were kept full."""

    record: Record
    costs: CostModel
    batch: int
    frame: Frame
    knots: Floats
    keep_rounds: bool
    full: bool = False
    priced: Known = field(default_factory=Known)

    def run_all(self, policies: Sequence[Policy], judged: Sequence[Support]) -> list[Outcome]:
        """Outcomes without intervals, in order: policies that share their controller kinds step together."""
        groups: dict[tuple[bool, tuple[str, ...]], list[int]] = {}
        for i, policy in enumerate(policies):
            kinds = tuple(v.controller.kind for v in policy.variants())
            groups.setdefault((policy.lossless, kinds), []).append(i)
        width = max(CHUNK_SEQUENCES // len(self.frame.documents), 1)
        outcomes: dict[int, Outcome] = {}
        for members in groups.values():
            members.sort(key=lambda i: policies[i].k_max)
            for first in range(0, len(members), width):
                chunk = members[first : first + width]
                found = self.run([policies[i] for i in chunk], [judged[i] for i in chunk])
                outcomes |= dict(zip(chunk, found, strict=True))
        return [outcomes[i] for i in range(len(policies))]

    def run(self, policies: list[Policy], judged: list[Support]) -> list[Outcome]:
        """Outcomes without intervals of policies that share their controller kinds."""
        outcomes: list[Outcome] = []
        tables: list[Tables] = []
        for policy, judgement in zip(policies, judged, strict=True):
            tables.append(
                []
                if judgement.level == "refused"
                else price_tables(policy, self.costs, self.frame, self.knots, self.priced)
            )
            budget = self._budget(policy)
            level, reason = judgement.level, judgement.reason
            if level != "refused" and (placed := misplaced(policy, self.costs)) is not None:
                level, reason = "refused", placed
            outcomes.append(Outcome(policy, level, reason, policy.lossless, (), self.batch, budget))
        live = [i for i, outcome in enumerate(outcomes) if outcome.level != "refused"]
        if not live:
            return outcomes
        timed = self.costs.own_rounds and not self.full
        own = [p for p, i in enumerate(live) if timed and self._was_recorded(policies[i])]
        found = tally(
            self.record,
            self.frame.documents,
            [policies[i] for i in live],
            [judged[i].arms for i in live],
            units=self.frame.units,
            knots=self.knots,
            logged=range(len(live)) if self.keep_rounds else own,
            rows=self.frame.rows,
            multiple=self.costs.recomputed_multiple,
            full=self.full,
        )
        for place, i in enumerate(live):
            own_us = self._own_us(found.logs[place]) if place in own else None
            outcomes[i] = summarise(outcomes[i], found, place, tables[i], self.frame, own_us=own_us)
            if self.keep_rounds:
                outcomes[i] = replace(outcomes[i], round_log=found.logs[place])
        return outcomes

    def _budget(self, policy: Policy) -> int:
        """The budget to show for a policy: 0 where it reads no selection, at the mean prompt where it is a fraction."""
        prompt_tokens = round(float(self.frame.documents.start.mean()))
        return Setting.of(policy, replace(policy, cells=()), prompt_tokens).budget

    def _was_recorded(self, policy: Policy) -> bool:
        whole = np.array_equal(self.frame.documents.doc, self.record.documents.doc)  # a split regroups batches
        return was_recorded(self.record, policy, self.batch) and (whole or self.batch == 1)

    def _own_us(self, log: Rounds) -> Floats | None:
        """[units, terms] recorded time of the very same rounds, None where the record shows others."""
        units = self.frame.units
        unit = np.repeat(np.arange(len(units.first)), units.sizes).tolist()
        unit_of = dict(zip(self.frame.documents.doc.tolist(), unit, strict=True))
        return own_time_us(self.record.trace, log, unit_of, len(units.first))
