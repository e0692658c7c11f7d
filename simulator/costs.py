"""Costs: how long a draft, a verification, a selection, the host's part and a plain step take, and how sure that is.

All but plain steps are known per drafter: see `operation`. Leaves out acceptance (one cost table serves many traces)
and how a grid is interpolated (simulator.measured).
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from specdial.engine.trace.reader import CostTable, Trace
from specdial.engine.trace.schema import FULL, OPS, PARTIAL, PLAIN
from specdial.engine.trace.sources import policy_source
from specdial.policies.schema import Policy, policy_from_mapping
from specdial.simulator.lanes import longest_k
from specdial.simulator.measured import BATCH, CONTEXT, CostRefusedError, K, Measured, leave_one_out
from specdial.simulator.physics import AXES, fit_physics

Floats = npt.NDArray[np.float64]
USUAL = "sparse_self"


def operation(op: str, drafter: str = USUAL, source: str = "") -> str:
    """What an operation of a drafter's rounds is called: draft, draft (lookup), verify_partial (lookup) from history.

    source: of rounds of policies that verify partially, see engine.trace.sources. Plain steps have neither.
    """
    name = op if op == "plain" or drafter == USUAL else f"{op} ({drafter})"
    return f"{name} from {source}" if source else name


@dataclass(frozen=True, slots=True)
class CostModel:
    """Costs of every `operation` by name. `meta` says of which model and machine; own_rounds: from a trace's rounds.

    plain_gbps: bytes that plain decoding must move over its time, at the longest measured context. assumed: of another
    machine than was measured, what it would be.
    """

    measured: dict[str, Measured]
    meta: dict[str, Any]
    source: str
    own_rounds: bool = False
    plain_gbps: float | None = None
    assumed: str | None = None
    _seen: dict[tuple[str, str, str, int, int, int, float], tuple[float, bool]] = field(default_factory=dict)

    @classmethod
    def from_table(cls, table: CostTable) -> "CostModel":
        """Costs as calibrated."""
        column = {name: table.rows[name].to_numpy().astype(np.float64) for name in (*AXES, "median_us")}
        ops = np.array(table.rows["op"].to_pylist())
        whose = zip(ops.tolist(), table.rows["drafter"].to_pylist(), table.rows["source"].to_pylist())
        names = np.array([operation(op, drafter, source) for op, drafter, source in whose])
        points = np.stack([column[name] for name in AXES], axis=1)
        measured = {
            str(name): Measured.of(op, points[names == name], column["median_us"][names == name])
            for op in OPS
            for name in np.unique(names[ops == op])
        }
        gbps = None
        if (ops == "plain").any():
            moved = table.rows["bytes"].to_numpy()[ops == "plain"] / column["median_us"][ops == "plain"] / 1e3
            gbps = float(moved[points[ops == "plain"][:, CONTEXT].argmax()])
        return cls(measured, table.meta, f"cost table {table.path}", plain_gbps=gbps)

    @classmethod
    def from_rounds(cls, trace: Trace) -> "CostModel":
        """Costs as the trace's own rounds took them: medians by (mode, batch, longest k), constant over its contexts.

        They cover the recorded policy's drafter and budget and, without plain rounds, no baseline. A budget that is a
        fraction of the prompt is taken at the mean prompt. Of rounds that verify partially no moment tells the choice
        of keys from reading them, nor corrections from full verification: there are no costs of corrections.
        """
        rounds = {
            name: trace.rounds[name].to_numpy().astype(np.float64)
            for name in trace.rounds.column_names
            if name != "mode"
        }
        modes = np.array(trace.rounds["mode"].to_pylist())
        plain = modes == PLAIN
        contexts, waited_us = rounds["context_tokens"], np.nan_to_num(rounds["exposed_us"])
        policy = policy_from_mapping(dict(trace.meta["policy"]), "meta.json policy")
        prompt_tokens = round(float(np.mean([d["prompt_tokens"] for d in trace.meta["documents"]])))
        budget = float(policy.draft_kv.resolved(prompt_tokens).budget if policy.drafter.reads_selection else 0)
        rounds["k"] = longest_k(trace).astype(np.float64)
        if _captured(trace.meta) and not policy.cells and policy.drafts_whole:
            rounds["k"] = np.where(plain, 0.0, float(policy.k_max))
        source, keys = _recorded_source(policy)
        rows: dict[str, list[tuple[float, float, float, float, float]]] = {}

        def add(op: str, budget: float, k: float, batch: float, values_us: Floats) -> None:
            rows.setdefault(op, []).append((batch, budget, k, float(np.median(contexts)), float(np.median(values_us))))

        total = rounds["draft_us"] + rounds["verify_us"] + rounds["select_us"] + rounds["host_us"]
        for batch in np.unique(rounds["batch"]):
            mine = rounds["batch"] == batch
            if (plain & mine).any():
                add("plain", 0.0, 0.0, batch, total[plain & mine])
            if (moving := mine & (modes == FULL) & ~np.isnan(rounds["exposed_us"])).any():
                add("transfer", 0.0, 0.0, batch, rounds["exposed_us"][moving])
            for k in np.unique(rounds["k"][mine & ~plain]):
                chosen = mine & ~plain & (rounds["k"] == k)
                for mode, op, budget_read in ((FULL, "", 0.0), (PARTIAL, "_partial", keys)):
                    if (here := chosen & (modes == mode)).any():
                        add(f"verify{op}", budget_read, k, batch, (rounds["verify_us"] - waited_us)[here])
                        add(f"host{op}", 0.0, k, batch, rounds["host_us"][here])
                if k > 0:
                    add("draft", budget, k, batch, rounds["draft_us"][chosen] / k)
                    add("select", budget, k, batch, rounds["select_us"][chosen])
            if (mine & (modes == PARTIAL)).any():
                add("select_partial", keys, 0.0, batch, np.zeros(1))
        bounds = (float(contexts.min()), float(contexts.max()))
        measured = {}
        for op, found in rows.items():
            array = np.array(found)
            fitted = fit_physics(op, array[:, :4], array[:, 4])
            measured[operation(op, policy.drafter.label, source)] = Measured(
                op, array[:, :4], array[:, 4], fitted, bounds
            )
        return cls(measured, trace.meta, f"the rounds of {trace.path}", own_rounds=True)

    def at(
        self,
        op: str,
        context_tokens: float,
        batch: int,
        k: int = 0,
        budget: int = 0,
        drafter: str = USUAL,
        *,
        source: str = "",
    ) -> tuple[float, bool]:
        """(microseconds, extrapolated) of one operation in a round of this drafter, under policies that verify from
        this source. Raises CostRefusedError."""
        key = (op, drafter, source, batch, k, budget, context_tokens)
        if key not in self._seen:
            name = operation(op, drafter, "" if op == "plain" else source)
            if name not in self.measured:
                raise CostRefusedError(f"there is no measurement of {name} in {self.source}")
            self._seen[key] = self.measured[name].at(np.array([batch, budget, k, context_tokens], np.float64))
        return self._seen[key]

    def watched(self, op: str, controller: str, lag: int, drafter: str, source: str) -> str:
        """The operation in rounds whose controller looks at signals that late, where that was timed; else the same."""
        names = (f"{op}_{controller}_lag{lag}", f"{op}_lag{lag}")
        return next((name for name in names if operation(name, drafter, source) in self.measured), op)

    def plain_us(self, context_tokens: npt.ArrayLike, batch: int = 1) -> Floats:
        """One plain step of the whole batch."""
        return self._each("plain", context_tokens, batch, 0, 0)

    def draft_us(
        self, context_tokens: npt.ArrayLike, batch: int, budget: npt.ArrayLike, k: npt.ArrayLike = 0
    ) -> Floats:
        """One draft token of the whole batch, reading `budget` keys."""
        return self._each("draft", context_tokens, batch, k, budget)

    def verify_us(self, context_tokens: npt.ArrayLike, batch: int, k: npt.ArrayLike) -> Floats:
        """A full verification of k drafts of the whole batch."""
        return self._each("verify", context_tokens, batch, k, 0)

    def select_us(self, context_tokens: npt.ArrayLike, batch: int, budget: npt.ArrayLike) -> Floats:
        """Choosing and gathering `budget` keys, once a round."""
        return self._each("select", context_tokens, batch, 0, budget)

    def host_us(self, context_tokens: npt.ArrayLike, batch: int, k: npt.ArrayLike = 0) -> Floats:
        """The rest of a round."""
        return self._each("host", context_tokens, batch, k, 0)

    def contexts(self) -> list[float]:
        """Every measured context length: between two neighbours all costs are linear in context."""
        return sorted({float(c) for measured in self.measured.values() for c in measured.points[:, CONTEXT]})

    def refresh_rows(self) -> list[float]:
        """Every number of recomputed rows that was timed."""
        timed = [m.points[:, K] for m in self.measured.values() if m.op == "refresh"]
        return sorted({float(k) for ks in timed for k in ks})

    @property
    def captured(self) -> bool:
        """Do rounds run as captured passes?"""
        return _captured(self.meta)

    @property
    def recomputed_multiple(self) -> int:
        """Corrections recompute multiples of so many rows."""
        return int(self.meta.get("recomputed_multiple", 1))

    def batches(self) -> list[int]:
        """Every measured batch size."""
        return sorted({int(b) for measured in self.measured.values() for b in measured.points[:, BATCH]})

    def leave_one_out(self) -> dict[str, dict[str, float]]:
        """Per operation: relative error of each measurement predicted from the others, median and worst."""
        return {op: leave_one_out(measured) for op, measured in self.measured.items() if len(measured.values_us) > 2}

    def _each(
        self, op: str, context_tokens: npt.ArrayLike, batch: int, k: npt.ArrayLike, budget: npt.ArrayLike
    ) -> Floats:
        c, ks, b = np.broadcast_arrays(np.asarray(context_tokens, np.float64), np.asarray(k), np.asarray(budget))
        values = [self.at(op, float(x), batch, int(y), int(z))[0] for x, y, z in zip(c.flat, ks.flat, b.flat)]
        return np.array(values, np.float64).reshape(c.shape)


def _captured(meta: dict[str, Any]) -> bool:
    return bool(meta.get("graph_mode", "none") != "none")


def _recorded_source(policy: Policy) -> tuple[str, float]:
    """Under which source a recorded policy's rounds are filed, and the keys that its partial ones read."""
    lossy = [v for v in policy.variants() if not v.verify_kv.lossless]
    return policy_source(policy), float(lossy[0].verify_kv.keys.budget if lossy else 0)


__all__ = ["CostModel", "CostRefusedError", "operation"]
