"""What validate measured of one group of documents, and the files that keep it until all groups are measured.

A group is decoded by every policy, so a killed run loses the group in flight. Nothing is kept of a finished run.
"""

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from specdial.engine.fidelity import Fidelity
from specdial.engine.round import PARTS, Round, kept_full
from specdial.policies.artifact import write_json_atomic
from specdial.policies.errors import UserError

FOLDER = "groups"
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


class KeptGroups:
    """Measured groups below a run's directory, by number. Those of another machine, model or text are not its own."""

    def __init__(self, out: Path, of: dict[str, Any]) -> None:
        """of: plain facts that must be the same for groups to go together."""
        self._folder, self._of = out / FOLDER, json.loads(json.dumps(of))

    def load(self, number: int) -> list[Group] | None:
        """A group of each policy, in order; None where it was not measured, or under other facts.

        Raises UserError on a file that `save` did not write.
        """
        path = self._folder / f"{number:05d}.json"
        if not path.exists():
            return None
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            return [_group(g) for g in content["policies"]] if content["of"] == self._of else None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"{path} is damaged", "delete it to measure these documents again") from None

    def save(self, number: int, groups: Sequence[Group]) -> None:
        """Write one group. Raises UserError when the directory refuses it."""
        found = [{**asdict(g), "fidelity": [_plain(f) for f in g.fidelity]} for g in groups]
        write_json_atomic(self._folder / f"{number:05d}.json", {"of": self._of, "policies": found})

    def forget(self) -> None:
        """Remove them all."""
        shutil.rmtree(self._folder, ignore_errors=True)


def _plain(found: Fidelity) -> dict[str, Any]:
    """NaN, which JSON has not, as None."""
    columns = {name: getattr(found, name).tolist() for name in TYPES}
    known = {name: [None if isinstance(x, float) and math.isnan(x) else x for x in v] for name, v in columns.items()}
    return {f.name: known[f.name] if f.name in TYPES else getattr(found, f.name) for f in fields(found)}


def _group(content: dict[str, Any]) -> Group:
    """The inverse of what `save` writes."""
    arrays = [{n: np.array(v, TYPES[n]) if n in TYPES else v for n, v in f.items()} for f in content["fidelity"]]
    return Group(**{**content, "fidelity": [Fidelity(**f) for f in arrays]})
