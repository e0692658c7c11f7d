"""The words of the lowering report: rows, draft lengths, names of cells, and what an exporter returns."""

from dataclasses import dataclass
from typing import Any, Literal

from specdial.policies.schema import Policy

Fate = Literal["kept", "approximated", "dropped"]
MOST = 1e6  # speedups and tokens per round are far below
Range = tuple[int, int | None]  # first value and one past the last, None for no end


@dataclass(frozen=True, slots=True)
class Length:
    """The draft length that a controller became. said: whether the report has a line on it even if it is used as is."""

    k: int
    fate: Fate
    note: str
    said: bool = True


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


def told(block: dict[str, Any] | None, name: str) -> float | None:
    """A positive number of an expected or measured block, which may hold anything; None where it is not one."""
    value = (block or {}).get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < MOST:
        return None
    return float(value)
