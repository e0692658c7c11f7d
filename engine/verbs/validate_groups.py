"""What validate measured of one group of documents, and the journal that keeps it until all groups are measured.

A group is decoded by every policy, so a killed run loses the group in flight. Nothing is kept of a finished run.
"""

import json
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from specdial.engine.fidelity import Fidelity
from specdial.engine.round import PARTS, Round, kept_full
from specdial.policies.artifact import digest_of
from specdial.policies.errors import UserError

FILE = "groups.journal"
SCHEMA = "specdial/validation-group/1"
TYPES = {"top1_match": np.bool_, "kl_nats": np.float32, "hidden_cosine": np.float32, "rounds_since_full": np.int64}


@dataclass
class Group:
    """What one policy did on one group. times_us: of each run; the rest sums over documents, of the last run.

    full_us, full_tokens, full_rounds: the same as if the batch was kept full. longest_us: the parts of the longest
    round of all runs. differing: sequences whose greedy output is not the plain one.
    """

    times_us: list[float] = field(default_factory=list)
    full_us: list[float] = field(default_factory=list)
    tokens: int = 0
    full_tokens: int = 0
    full_rounds: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    differing: int = 0
    longest_us: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    fidelity: list[Fidelity] = field(default_factory=list)

    def add_run(self, rounds: list[Round], batch: int) -> None:
        """Note the times of one more run. batch: of a whole group."""
        self.times_us.append(sum(r.spent_us for r in rounds))
        self.full_us.append(sum(r.shared_us for r in kept_full(rounds, batch)))
        known = [{part: getattr(r, f"{part}_us") for part in PARTS} for r in rounds]
        self.longest_us = max((self.longest_us, *known), key=total_us)

    def count(self, rounds: list[Round], batch: int) -> None:
        """Note what the last run did."""
        self.rounds = sum(int(r.active.sum()) for r in rounds)
        self.tokens = sum(len(e) for r in rounds for e in r.emitted)
        full = kept_full(rounds, batch)
        self.full_rounds = sum(int(r.active.sum()) for r in full)
        self.full_tokens = sum(len(e) for r in full for e in r.emitted)
        self.drafted = sum(int(r.k.sum()) for r in rounds)
        self.accepted = sum(int(r.accepted.sum()) for r in rounds)


def total_us(parts: dict[str, float]) -> float:
    """Of a round, from its parts."""
    return sum(parts.values())


@dataclass(frozen=True, slots=True)
class KeptGroup:
    """What every policy did on one group, in their order, and how long measuring it took."""

    groups: list[Group]
    spent_s: float


class KeptGroups:
    """Measured groups in a run's directory, by number: a journal of one line a group, each with its digest.

    A last line without an end is one that a killed run did not finish, and counts for nothing. Lines that were written
    under other facts are not this run's own.
    """

    def __init__(self, out: Path, of: dict[str, Any]) -> None:
        """of: plain facts that must be the same for groups to go together."""
        self._path, self._of = out / FILE, digest_of({"schema": SCHEMA, **of})

    def load(self) -> dict[int, KeptGroup]:
        """What was measured under these facts. Raises UserError on a line that `save` did not write."""
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise UserError(f"cannot read {self._path}: {error.strerror}", "choose another out=") from None
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            self._path.write_bytes(whole)
        lines = [self._line(number, line) for number, line in enumerate(whole.splitlines(), start=1)]
        return {
            line["number"]: KeptGroup([_group(g) for g in line["policies"]], line["spent_s"])
            for line in lines
            if line["of"] == self._of
        }

    def save(self, number: int, kept: KeptGroup) -> None:
        """Add one group. Raises UserError when the file refuses it."""
        groups = [{**asdict(g), "fidelity": [_plain(f) for f in g.fidelity]} for g in kept.groups]
        line = {"of": self._of, "number": number, "spent_s": kept.spent_s, "policies": groups}
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([digest_of(line), line], allow_nan=False) + "\n")
        except OSError as error:
            raise UserError(f"cannot write {self._path}: {error.strerror}", "choose another out=") from None

    def forget(self) -> None:
        """Remove them all at once."""
        self._path.unlink(missing_ok=True)

    def _line(self, number: int, text: bytes) -> dict[str, Any]:
        try:
            digest, line = json.loads(text)
            if digest == digest_of(line):
                return dict(line)
        except (ValueError, TypeError, RecursionError):
            pass
        raise UserError(f"line {number} of {self._path} is damaged", "delete that file to measure its documents again")


def _plain(found: Fidelity) -> dict[str, Any]:
    """NaN, which JSON has not, as None."""
    columns = {name: getattr(found, name).tolist() for name in TYPES}
    known = {name: [None if isinstance(x, float) and math.isnan(x) else x for x in v] for name, v in columns.items()}
    return {f.name: known[f.name] if f.name in TYPES else getattr(found, f.name) for f in fields(found)}


def _group(content: dict[str, Any]) -> Group:
    """The inverse of what `save` writes."""
    arrays = [{n: np.array(v, TYPES[n]) if n in TYPES else v for n, v in f.items()} for f in content["fidelity"]]
    return Group(**{**content, "fidelity": [Fidelity(**f) for f in arrays]})
