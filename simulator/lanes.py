"""A trace as arrays: one cell per (recorded position, arm), its drafts by depth, and the documents they belong to.

Positions of all documents lie one after another, so ragged outputs waste nothing. Leaves out policies and costs.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from specdial.engine.trace.reader import Trace
from specdial.policies.errors import UserError
from specdial.policies.fields import parse, to_plain
from specdial.policies.file import policy_digest
from specdial.policies.schema import Drafter, DraftKV, policy_from_mapping
from specdial.simulator.fidelity import Model

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
SIGNALS = ("entropy_nats", "top1_prob", "margin")


@dataclass(frozen=True, slots=True)
class Documents:
    """Recorded documents, arrays [D] in the order of meta.json. A round starts at committed length n, start <= n < end.

    requested_end: where generation would have stopped without an end-of-text token; it bounds what a round may draft.
    offset: row of the document's first position.
    """

    doc: Ints
    split: npt.NDArray[np.str_]
    start: Ints
    end: Ints
    requested_end: Ints
    offset: Ints

    def __len__(self) -> int:
        return len(self.doc)

    def take(self, index: Ints) -> "Documents":
        return Documents(*(getattr(self, name)[index] for name in self.__slots__))

    def rows(self, split: str | None = None) -> Ints:
        """Rows of all documents, or of those in a split; of one that is there twice, once."""
        chosen = np.flatnonzero(self.split == split if split else self.doc >= 0)
        parts = [np.arange(self.offset[i], self.offset[i] + self.end[i] - self.start[i]) for i in chosen]
        return np.unique(np.concatenate([np.zeros(0, np.int64), *parts]))

    def left(self, rows: Ints) -> Ints:
        """Tokens of its document's output from each row's position on, [rows]."""
        order = np.argsort(self.offset, kind="stable")
        mine = order[np.searchsorted(self.offset[order], rows, side="right") - 1]
        return np.asarray((self.end - self.start + self.offset)[mine] - rows)

    def filling(self, batch: int) -> "Documents":
        """The same in whole batches, the first ones again in what is left of the last."""
        return self.take(np.arange(-(-len(self) // batch) * batch) % len(self))


@dataclass(frozen=True, slots=True)
class Record:
    """What a trace says about drafts. Cell c = row * arms + arm, row = offset + position - start.

    signals: name -> [K, cells] float32. run: [cells] leading drafts that matched. depths: [cells] drafts recorded,
    depth 1 on. complete: [arms] every draft any round could ask for, up to K, is there.
    accept_prob: [K, cells] when decoding was sampled, else None. policy_digest: of the policy that was recorded.
    age: [rows] rounds since the scores were made by which a place's round chose its keys, None where all are 0.
    fidelity: what probes say of partial verification, None without any. log_luck: [rows] log of a uniform draw a place,
    by which partial verification changes what is accepted; None until `with_luck`.
    """

    trace: Trace
    documents: Documents
    arms: tuple[dict[str, Any], ...]
    k_max: int
    signals: dict[str, npt.NDArray[np.float32]]
    match: Bools  # [K, cells]
    run: Ints
    depths: Ints
    complete: Bools
    accept_prob: npt.NDArray[np.float32] | None
    policy_digest: str
    fidelity: Model | None = None
    log_luck: npt.NDArray[np.float64] | None = None
    age: Ints | None = None

    def age_of(self, cells: Ints) -> Ints:
        """`age` of cells [n]."""
        return np.zeros_like(cells) if self.age is None else self.age[cells // max(len(self.arms), 1)]

    @property
    def sampled(self) -> bool:
        return float(self.trace.meta["sampling"]["temperature"]) > 0.0

    def budget(self, arm: int) -> int:
        """Keys of an arm's selection; where it is a fraction of the prompt, of the mean prompt."""
        kv = parse(DraftKV, self.arms[arm]["draft_kv"])
        return kv.resolved(round(float(self.documents.start.mean()))).budget


def read_documents(trace: Trace) -> Documents:
    """The documents with a finished output. Raises UserError when meta.json and the outputs disagree."""
    doc = trace.outputs["doc"].to_numpy().astype(np.int64)
    position = trace.outputs["position"].to_numpy().astype(np.int64)
    rows: list[tuple[int, str, int, int, int]] = []
    unknown = set(doc.tolist()) - {int(d["doc"]) for d in trace.meta["documents"]}
    if unknown:
        raise UserError(f"trace {trace.path} holds outputs of unknown documents {sorted(unknown)}", "do not mix traces")
    for entry in trace.meta["documents"]:
        number, start = int(entry["doc"]), int(entry["prompt_tokens"])
        mine = np.sort(position[doc == number])
        if not len(mine):
            continue
        if not np.array_equal(mine, np.arange(start, start + len(mine))):
            raise UserError(f"trace {trace.path} lacks output tokens of document {number}", "record it again")
        rows.append((number, str(entry["split"]), start, start + len(mine), start + int(entry["new_tokens"])))
    if not rows:
        raise UserError(f"trace {trace.path} has no output", "record it again")
    number_, split_, start_, end_, requested_ = (list(column) for column in zip(*rows, strict=True))
    length = np.array(end_, np.int64) - np.array(start_, np.int64)
    return Documents(
        doc=np.array(number_, np.int64),
        split=np.array(split_),
        start=np.array(start_, np.int64),
        end=np.array(end_, np.int64),
        requested_end=np.maximum(np.array(requested_, np.int64), np.array(end_, np.int64)),
        offset=np.concatenate([[0], np.cumsum(length)[:-1]]).astype(np.int64),
    )


def has_signals(trace: Trace) -> bool:
    """Do its drafts have entropies, probabilities and margins? Imported logs have none."""
    return bool(trace.meta.get("imported", {}).get("signals", True))


def longest_k(trace: Trace) -> Ints:
    """[rounds] the longest draft of the batch that each round was part of: its times are the batch's.

    Of imported logs, which do not say what decoded together, and of mixed documents each round's own k.
    """
    k: Ints = trace.rounds["k"].to_numpy().astype(np.int64)
    batch = int(trace.meta.get("batch", 1))
    if batch == 1 or "imported" in trace.meta or "mixed" in trace.meta or not len(k):
        return k
    group = {int(entry["doc"]): i // batch for i, entry in enumerate(trace.meta["documents"])}
    mine = np.array([group[doc] for doc in trace.rounds["doc"].to_pylist()])
    _, place = np.unique(np.stack([mine, trace.rounds["round"].to_numpy()]), axis=1, return_inverse=True)
    longest = np.zeros(len(k), np.int64)
    np.maximum.at(longest, place, k)
    return np.asarray(longest[place])


def read_record(trace: Trace) -> Record:
    """Arrange a trace's drafts as arrays. Raises UserError naming what is inconsistent."""
    documents = read_documents(trace)
    arms = tuple(_normal_arm(trace, i) for i in range(len(trace.meta["arms"])))
    k_max = int(trace.meta["k_max"])
    cells = int((documents.end - documents.start).sum()) * max(len(arms), 1)
    signals = {name: np.zeros((k_max, cells), np.float32) for name in SIGNALS}
    match, have = np.zeros((k_max, cells), np.bool_), np.zeros((k_max, cells), np.bool_)
    sampled = float(trace.meta["sampling"]["temperature"]) > 0.0
    accept_prob = np.zeros((k_max, cells), np.float32) if sampled else None
    depth, cell, rows = _addresses(trace, documents, k_max)
    for name in SIGNALS:
        signals[name][depth, cell] = rows[name].to_numpy()
    match[depth, cell] = rows["match"].to_numpy(zero_copy_only=False)
    have[depth, cell] = True
    if accept_prob is not None:
        if rows["accept_prob"].null_count:
            raise UserError(f"trace {trace.path} was sampled but lacks accept_prob", "record it again")
        accept_prob[depth, cell] = rows["accept_prob"].to_numpy()
    depths = np.cumprod(have, axis=0, dtype=np.int64).sum(axis=0)
    run = np.cumprod(match & have, axis=0, dtype=np.int64).sum(axis=0)
    complete = _complete(documents, depths.reshape(-1, max(len(arms), 1)), k_max)
    return Record(
        trace, documents, arms, k_max, signals, match, run, depths, complete, accept_prob, recorded_digest(trace),
        Model.of(trace), age=_score_age(trace, documents),
    )  # fmt: skip


def _normal_arm(trace: Trace, place: int) -> dict[str, Any]:
    """An arm with every setting of today's schema: an older trace lacks the newest, which then had its default.

    A sparse trace holds what its own policy drafted, so its arm is of that policy's drafter.
    """
    arm = trace.meta["arms"][place]
    drafter = arm.get("drafter", {}) if trace.meta["dense"] else trace.meta["policy"].get("drafter", {})
    draft_kv = parse(DraftKV, arm["draft_kv"], f"arms[{place}].draft_kv")
    parsed = parse(Drafter, drafter, f"arms[{place}].drafter")
    return {**arm, "draft_kv": to_plain(draft_kv, complete=True), "drafter": to_plain(parsed, complete=True)}


def recorded_digest(trace: Trace) -> str:
    """Digest of the policy whose rounds the trace shows, by today's schema."""
    return policy_digest(policy_from_mapping(dict(trace.meta["policy"]), "meta.json policy"))


def _addresses(trace: Trace, documents: Documents, k_max: int) -> tuple[Ints, Ints, pa.Table]:
    """(depth - 1, cell) of every row of `drafts` that belongs to a finished document, and those rows."""
    table = trace.drafts
    place = {int(number): i for i, number in enumerate(documents.doc)}
    known = {int(d["doc"]) for d in trace.meta["documents"]}
    numbers = table["doc"].to_numpy()
    strangers = set(np.unique(numbers).tolist()) - known
    if strangers:
        raise UserError(
            f"trace {trace.path} holds drafts of unknown documents {sorted(strangers)}", "do not mix traces"
        )
    lookup = np.full(max(known) + 1, -1, np.int64)
    lookup[list(place)] = list(place.values())
    index = lookup[numbers]
    if (index < 0).any():
        table, index = table.filter(pa.array(index >= 0)), index[index >= 0]
    arm_place = {int(arm["arm"]): i for i, arm in enumerate(trace.meta["arms"])}
    arm = np.array([arm_place.get(a, -1) for a in range(int(max(arm_place, default=0)) + 1)], np.int64)
    number = table["arm"].to_numpy().astype(np.int64)
    depth = table["depth"].to_numpy().astype(np.int64)
    position = table["position"].to_numpy().astype(np.int64)
    if len(number) and ((number < 0).any() or (number >= len(arm)).any() or (arm[number] < 0).any()):
        raise UserError(f"trace {trace.path} holds drafts of an arm that meta.json does not name", "record it again")
    if ((depth < 1) | (depth > k_max)).any():
        raise UserError(f"trace {trace.path} holds drafts outside depth 1..{k_max}", "record it again")
    if ((position < documents.start[index]) | (position >= documents.end[index])).any():
        raise UserError(f"trace {trace.path} holds drafts outside its documents' outputs", "record it again")
    row = documents.offset[index] + position - documents.start[index]
    return depth - 1, row * max(len(arm_place), 1) + arm[number], table


def _score_age(trace: Trace, documents: Documents) -> Ints | None:
    """[rows] see Record.age: where a drafter keeps its selection, and where partial rounds left scores as they were.

    A dense record chooses anew at every place.
    """
    every = parse(DraftKV, trace.meta["policy"]["draft_kv"], "meta.json policy.draft_kv").refresh_rounds
    since = trace.rounds["rounds_since_full"].to_numpy()
    if trace.meta["dense"] or (every == 1 and not since.any()):
        return None
    doc, number, context = (trace.rounds[name].to_numpy() for name in ("doc", "round", "context_tokens"))
    found = np.zeros(int((documents.end - documents.start).sum()), np.int64)
    for place, one in enumerate(documents.doc):
        mine = np.flatnonzero(doc == one)
        mine = mine[np.argsort(number[mine])]
        scores = np.concatenate([[0], since[mine][:-1]])  # of a round: partial rounds just before it
        rounds = np.arange(len(mine))
        chosen = rounds - rounds % every if every else np.zeros_like(rounds)
        found[documents.offset[place] + context[mine] - documents.start[place]] = scores[chosen] + rounds - chosen
    return found


def _complete(documents: Documents, depths: Ints, k_max: int) -> Bools:
    """[arms]: is every draft there that a round could ask for?"""
    length = documents.end - documents.start
    row_end = np.repeat(documents.requested_end, length)
    position = np.arange(len(depths)) - np.repeat(documents.offset - documents.start, length)
    needed = np.minimum(k_max, row_end - position - 1)
    return np.asarray((depths >= needed[:, None]).all(axis=0))
