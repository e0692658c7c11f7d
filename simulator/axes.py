"""What a search may vary, as conf/search/ declares it. An empty list of values means those that were recorded.

Leaves out which of these a point holds (simulator.space) and what a record can say about them (simulator.support).
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from specdial.policies.fields import setting


@dataclass(frozen=True, slots=True)
class Range:
    """A number from low to high; whole, or a multiple of step from low, or on a log scale with 12 grid points."""

    low: float
    high: float
    scale: Literal["int", "linear", "log", "int_log"] = "linear"
    step: float = 0.05

    def grid(self) -> list[float]:
        """The values brute force tries."""
        if self.scale == "int":
            return list(range(int(self.low), int(self.high) + 1))
        if self.scale == "linear":
            count = round((self.high - self.low) / self.step)
            return [min(round(self.low + i * self.step, 9), self.high) for i in range(count + 1)]
        values = [min(self.low * (self.high / self.low) ** (i / 11), self.high) for i in range(12)]
        return sorted({round(v) for v in values}) if self.scale == "int_log" else values


Axis = Range | tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class DraftAxes:
    """Values of draft_kv to try. budget_frac: beside the budgets in tokens; a point has one or the other."""

    budget_frac: tuple[float, ...] = setting((), low=0.0, high=1.0)
    sink: tuple[int, ...] = setting((), low=0)
    recent: tuple[int, ...] = setting((), low=0)
    window: tuple[int, ...] = setting((), low=1)
    decay: tuple[float, ...] = setting((), low=0.0, high=1.0)
    scope: tuple[Literal["kv_head", "layer", "model"], ...] = ()
    page: tuple[Literal[1, 16, 32, 64], ...] = ()
    refresh_rounds: tuple[int, ...] = setting((), low=0)

    def __bool__(self) -> bool:
        return any(getattr(self, name) for name in self.__slots__)


@dataclass(frozen=True, slots=True)
class VerifyAxes:
    """Values of verify_kv to try; all but `mode` are of partial verification.

    full_period: rounds from one full verification to the next, 0 for none; buffer: or the tokens between, 0 for any
    number. refresh, bound, rows: see VerifyKV. heads: scoring heads, a policy file that
    `tune_heads` wrote or an attention trace, whose ranking gives them. head_counts: how many target heads, the best
    first; () for all of a policy file.
    """

    mode: tuple[Literal["full", "partial"], ...] = ("full",)
    source: tuple[Literal["history", "lookahead", "hybrid", "page_bound", "recent"], ...] = ("history",)
    budget: tuple[int, ...] = setting((512,), low=1)
    sink: tuple[int, ...] = setting((4,), low=0)
    recent: tuple[int, ...] = setting((16,), low=0)
    scope: tuple[Literal["kv_head", "layer", "model"], ...] = ("kv_head",)
    page: tuple[Literal[1, 16, 32, 64], ...] = (1,)
    full_period: tuple[int, ...] = setting((8,), low=0)
    buffer: tuple[int, ...] = setting((0,), low=0, later=True)
    refresh: tuple[Literal["round", "full"], ...] = setting(("round",), later=True)
    bound: tuple[Literal["quest", "specpv"], ...] = setting(("quest",), later=True)
    rows: tuple[Literal["mean", "max", "last"], ...] = setting(("mean",), later=True)
    lookahead_tokens: tuple[int, ...] = setting((0,), low=0)
    heads: str | None = None
    head_counts: tuple[int, ...] = setting((), low=1)


@dataclass(frozen=True, slots=True)
class Search:
    """Settings of the space.

    controllers: kinds to try; plain decoding is always among the candidates. drafters: labels of recorded ones (model
    drafters as model/NAME), () for all. k_max: the longest draft, None for the longest recorded. budgets: of the
    selection, keys; () for all recorded. between: try budgets between recorded ones (modelled). lag: what every
    controller that looks at signals has; it is not searched. draft_kv: while it names nothing, selections are tried as
    recorded; else every combination of what it and `budgets` name. batches: sequences decoding together, tried in turn;
    () for the verb's own.
    """

    controllers: tuple[str, ...] = ("fixed", "entropy", "confidence", "rate")
    drafters: tuple[str, ...] = ()
    k_max: int | None = setting(None, low=1, high=64)
    budgets: tuple[int, ...] = setting((), low=1)
    between: bool = False
    lag: Literal[0, 1] = 0
    draft_kv: DraftAxes = field(default_factory=DraftAxes)
    verify_kv: VerifyAxes = field(default_factory=VerifyAxes)
    batches: tuple[int, ...] = setting((), low=1)
