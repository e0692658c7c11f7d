"""A speculation profile: how often drafts are accepted at every depth, for simulators and for synthetic acceptance.

    marginal[d]     share of rounds in which drafts 1 .. d+1 were all accepted
    conditional[d]  share accepted of the rounds that drafted token d+1 and accepted all before it
    acceptance_length = 1 + sum(marginal), tokens a round

The marginals are what vLLM calls synthetic_acceptance_rates (vllm/config/speculative.py) and llama-server
--spec-synth-rates (tools/server/README.md). They are counted from a trace: from its rounds where this policy was
recorded, else, for a fixed k, from every position of a dense record whose arm is this policy's. Without a trace only
what the policy's measured or expected block says is written, and depths it does not tell are null. Reads the two
columns and the few fields it needs by itself, since policies may not import the engine's reader.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specdial.policies.controllers import FixedConfig
from specdial.policies.errors import UserError
from specdial.policies.exporters.options import Options
from specdial.policies.exporters.rows import Lowered, Row, told
from specdial.policies.file import policy_digest
from specdial.policies.schema import Policy

SCHEMA = "specdial/profile/1"
TRACE_SCHEMA = "specdial/trace/1"
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Counts:
    """accepted[d]: rounds (or positions) that accepted draft d+1. reached[d]: those that drafted it with all before it
    accepted.

    marginal: in rounds a count, so that acceptance_length is the mean number of tokens a round emits; of positions the
    product of the conditionals, since chains near the end of the output are cut short.
    """

    basis: str
    rounds: int
    accepted: Ints
    reached: Ints
    random_weights: bool

    @property
    def conditional(self) -> list[float | None]:
        return [float(a / n) if n else None for a, n in zip(self.accepted, self.reached)]

    @property
    def marginal(self) -> list[float]:
        if self.basis == "rounds":
            return [float(a / self.rounds) for a in self.accepted]
        return [float(p) for p in np.cumprod([c or 0.0 for c in self.conditional])]


def lower(policy: Policy, options: Options, stem: str) -> Lowered:
    """The profile as JSON. Raises UserError without a trace and without a block that tells tokens per round."""
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "policy": policy.name,
        "policy_digest": policy_digest(policy),
        "drafter": policy.drafter.label,
        "k_max": policy.k_max,
        "lossless": policy.lossless,
    }
    if options.trace is not None:
        counts = count(Path(options.trace), policy)
        content |= {
            "basis": counts.basis,
            "rounds": counts.rounds,
            "marginal": counts.marginal,
            "conditional": counts.conditional,
            "acceptance_length": 1.0 + sum(counts.marginal),
        }
        random = counts.random_weights
        row = Row("all", "acceptance", "kept", f"by depth, from {counts.rounds} {counts.basis}")
    else:
        blocks, row, random = _told(policy)
        content |= blocks
    if random:
        content["random_weights"] = True
        row = replace(row, note=f"{row.note}, of random weights")
    rows = (row, Row("all", "rest", "dropped", "a profile says how often drafts are accepted, not how they are made"))
    usage = "vLLM: synthetic_acceptance_rates takes `marginal`; specdial: acceptance.synthetic takes `conditional`"
    return Lowered({".json": json.dumps(content, indent=1, allow_nan=False) + "\n"}, rows, usage)


def count(trace: Path, policy: Policy) -> Counts:
    """Accepted drafts by depth. Raises UserError where the trace is not a record of this policy or its arm."""
    meta = _meta(trace)
    if policy.k_max == 0:
        raise UserError(f"policy {policy.name} drafts nothing", "a profile needs drafts: export another policy")
    if "synthetic_acceptance" in meta:
        raise UserError(f"trace {trace} accepted drafts by chance", "give a trace whose drafts were judged")
    model = meta.get("model")
    random = isinstance(model, dict) and bool(model.get("random"))
    if meta.get("policy") == policy.decisions():
        rounds = _columns(trace, "rounds", ("k", "accepted"))
        k, taken = rounds["k"], rounds["accepted"]
        depths = np.arange(1, policy.k_max + 1)[:, None]
        accepted = (taken >= depths).sum(axis=1)
        reached = ((k >= depths) & (taken >= depths - 1)).sum(axis=1)
        return Counts("rounds", len(k), accepted, reached, random)
    arm = _arm(meta, policy)
    if arm is None:
        raise UserError(
            f"trace {trace} records another policy, and has no dense arm of this one at a fixed k",
            "record this policy, or export without trace=",
        )
    drafts = _columns(trace, "drafts", ("round", "arm", "depth", "match", "reached"))
    mine = (drafts["round"] == -1) & (drafts["arm"] == arm)
    depths = np.arange(1, policy.k_max + 1)[:, None]
    at_depth = drafts["depth"][mine] == depths  # [k, drafts]
    accepted = (at_depth & (drafts["match"][mine] == 1)).sum(axis=1)
    reached = (at_depth & (drafts["reached"][mine] == 1)).sum(axis=1)
    if not reached[0]:
        raise UserError(f"trace {trace} has no draft of that arm", "record it again")
    return Counts("positions", int(reached[0]), accepted, reached, random)


def _arm(meta: dict[str, Any], policy: Policy) -> int | None:
    """The dense arm that drafts as the policy does: greedy, fixed k within the record's, no cells."""
    greedy = meta.get("sampling", {}).get("temperature") == 0
    fixed = isinstance(policy.controller, FixedConfig) and not policy.cells and policy.lossless
    if not (meta.get("dense") is True and greedy and fixed and policy.k_max <= meta.get("k_max", 0)):
        return None
    mine = policy.decisions()
    for arm in meta.get("arms", []):
        same_keys = arm.get("draft_kv") == mine["draft_kv"] or not policy.drafter.reads_selection
        if arm.get("drafter", {"kind": "sparse_self"}) == mine["drafter"] and same_keys:
            return int(arm["arm"])
    return None


def _told(policy: Policy) -> tuple[dict[str, Any], Row, bool]:
    """What the measured block says, else the expected one, and whether weights were random."""
    for basis, block in (("measured", policy.measured), ("expected", policy.expected)):
        length = told(block, "tokens_per_round")
        if block is None or length is None:
            continue
        found: dict[str, Any] = {
            "basis": basis,
            "rounds": None,
            "marginal": None,
            "conditional": None,
            "acceptance_length": length,
        }
        random = block.get("random_weights") is True or "random weights" in (block.get("caveats") or ())
        if told(block, "k") == 1.0:  # every round drafted one token: its share is all there is to know
            found |= {"marginal": [length - 1.0], "conditional": [length - 1.0]}
            return found, Row("all", "acceptance", "kept", f"one draft a round, from the {basis} block"), random
        note = f"tokens per round from the {basis} block; by depth unknown without trace="
        return found, Row("all", "acceptance", "approximated", note), random
    raise UserError(
        f"policy {policy.name} has no measured or expected tokens per round", "give trace=DIR, or a tuned policy"
    )


def _meta(trace: Path) -> dict[str, Any]:
    try:
        meta = json.loads((trace / "meta.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        raise UserError(f"{trace} is not a trace", "check the path") from None
    found = meta.get("schema") if isinstance(meta, dict) else None
    if not isinstance(meta, dict) or found != TRACE_SCHEMA:
        raise UserError(f"{trace} has schema {found!r}", f"this version reads {TRACE_SCHEMA!r}")
    return meta


def _columns(trace: Path, table: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Columns of a table over all finished documents. Raises UserError on none, and on damage."""
    import pyarrow as pa  # here, since it would slow every --help
    import pyarrow.parquet as pq

    parts = [trace / p.name.replace("rounds", table, 1) for p in sorted(trace.glob("rounds-*.parquet"))]
    try:
        found = [pq.read_table(p, columns=list(names), page_checksum_verification=True) for p in parts if p.exists()]
        joined = pa.concat_tables(found)
        columns = {name: joined[name].to_numpy().astype(np.int64) for name in names}
    except (OSError, ValueError, KeyError, pa.ArrowException):
        raise UserError(f"trace {trace} has no readable {table}", "record it again") from None
    if not len(columns[names[0]]):
        raise UserError(f"trace {trace} has no {table}", "record it again")
    return columns
