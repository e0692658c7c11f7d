"""Turns rounds into trace rows, document by document.

While documents are decoded a round is only kept; rows are made of all rounds at once, by columns, when the first
document's tables are asked for. A row at a time would cost more than a round of a large batch.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specdial.engine.round import Round
from specdial.engine.trace.schema import PLAIN
from specdial.engine.workloads import Document

Column = npt.NDArray[np.generic]
Columns = dict[str, Column]
Grids = dict[str, npt.NDArray[np.int64]]
_TIMES = ("draft_us", "verify_us", "select_us", "host_us")
_SIGNALS = ("entropy_nats", "top1_prob", "margin")


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of all documents, sorted by place in the batch: those of place b are at starts[b] .. starts[b+1]-1."""

    columns: Columns
    starts: npt.NDArray[np.int64]  # [B + 1]

    def of(self, b: int) -> Columns:
        part = slice(self.starts[b], self.starts[b + 1])
        return {name: column[part] for name, column in self.columns.items()}


class Recorder:
    """Collects the rounds of one batch of documents."""

    def __init__(self, documents: list[Document]) -> None:
        self.documents = documents
        self._played: list[Round] = []
        self._rows: tuple[_Rows, _Rows] | None = None  # rounds and drafts, once made

    def add(self, round_: Round) -> None:
        """Record one round of every active sequence. The round is kept: its arrays must not change any more."""
        self._played.append(round_)
        self._rows = None

    @property
    def rounds(self) -> list[Columns]:
        """The trace's `rounds` columns of every document."""
        return [self._made()[0].of(b) for b in range(len(self.documents))]

    def tables(self, b: int, tokens: list[int]) -> dict[str, Columns]:
        """Trace tables of the b-th document; tokens: its whole sequence, prompt included."""
        rounds, drafts = self._made()
        prompt = len(self.documents[b].prompt_ids)
        outputs: Columns = {
            "doc": np.full(len(tokens) - prompt, self.documents[b].index),
            "position": np.arange(prompt, len(tokens)),
            "token_id": np.array(tokens[prompt:], dtype=np.int64),
        }
        return {"rounds": rounds.of(b), "drafts": drafts.of(b), "outputs": outputs}

    def _made(self) -> tuple[_Rows, _Rows]:
        if self._rows is None:
            played, batch = self._played, len(self.documents)
            index = np.array([d.index for d in self.documents])  # [B]
            grids: Grids = {  # [R, B] each
                name: np.array([getattr(r, name) for r in played], dtype=np.int64).reshape(-1, batch)
                for name in ("active", "context_tokens", "k", "accepted")
            }
            emitted = [[len(e) for e in r.emitted] for r in played]
            grids["emitted"] = np.array(emitted, dtype=np.int64).reshape(-1, batch)
            active = grids.pop("active").astype(np.bool_)
            grids["doc"] = np.broadcast_to(index, active.shape)
            grids["round"] = np.cumsum(active, axis=0) - 1  # counts the rounds its document took part in
            self._rows = _round_rows(played, active, grids), _draft_rows(played, active, grids)
        return self._rows


def _round_rows(played: list[Round], active: npt.NDArray[np.bool_], grids: Grids) -> _Rows:
    """Columns of schema.ROUNDS. active and the grids are [R, B]."""
    b, r = np.nonzero(active.T)
    mode = np.array([PLAIN if p.plain else p.mode for p in played], dtype=np.str_)  # [R]
    columns: Columns = {name: grid[r, b] for name, grid in grids.items()}
    columns["batch"] = np.full(len(r), active.shape[1])
    for name in ("rounds_since_full", "recomputed"):
        columns[name] = np.array([getattr(p, name) for p in played], dtype=np.int64)[r]
    columns["mode"] = mode[r]
    for name in _TIMES:
        columns[name] = np.array([getattr(p, name) for p in played], dtype=np.float64)[r]
    for name in ("transfer_us", "exposed_us"):
        columns[name] = np.array([getattr(p, name) for p in played], dtype=object)[r]
    return _Rows(columns, _starts(b, active.shape[1]))


def _draft_rows(played: list[Round], active: npt.NDArray[np.bool_], grids: Grids) -> _Rows:
    """Columns of schema.DRAFTS, the policy's own arm. active and the grids are [R, B]."""
    parts: dict[str, list[Column]] = {name: [] for name in ("r", "b", "step", "accept_prob", *_SIGNALS)}
    for number, p in enumerate(played):
        drafted = np.where(p.active, p.k, 0)  # [B]
        place, drafts_before = np.nonzero(np.arange(drafted.max()) < drafted[:, None])
        parts["r"].append(np.full(len(place), number))
        parts["b"].append(place)
        parts["step"].append(drafts_before)
        for name in _SIGNALS:
            parts[name].append(getattr(p.signals, name)[place, drafts_before])
        none = np.full(len(place), None)  # objects: None says that there is none
        parts["accept_prob"].append(
            none if p.accept_prob is None else p.accept_prob[place, drafts_before].astype(object)
        )
    joined = {name: np.concatenate(values) if values else np.zeros(0, dtype=np.int64) for name, values in parts.items()}
    order = np.argsort(joined["b"], kind="stable")  # by place in the batch, then as drafted
    columns = {name: values[order] for name, values in joined.items()}
    r, b, step = columns.pop("r"), columns.pop("b"), columns.pop("step")
    accepted = grids["accepted"][r, b]
    columns["doc"] = grids["doc"][r, b]
    columns["round"] = grids["round"][r, b]
    columns["position"] = grids["context_tokens"][r, b]
    columns["arm"] = np.zeros(len(r), dtype=np.int64)
    columns["depth"] = step + 1
    columns["match"] = step < accepted
    judged_next = grids["emitted"][r, b] > accepted  # unless the output ended within the accepted drafts
    columns["reached"] = (step < accepted) | ((step == accepted) & judged_next)
    return _Rows(columns, _starts(b, active.shape[1]))


def _starts(b: Column, batch: int) -> npt.NDArray[np.int64]:
    """Where each place's rows begin in the sorted places b, and where the last one's end: [batch + 1]."""
    return np.searchsorted(b, np.arange(batch + 1))
