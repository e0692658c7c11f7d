"""The `expected` block of a policy file: what replay predicts of it, and from what."""

from typing import Any

from specdial.policies.fields import to_plain
from specdial.simulator.costs import CostModel
from specdial.simulator.lanes import Record
from specdial.simulator.load import caveats
from specdial.simulator.outcome import Outcome
from specdial.simulator.tuned_on import thinned, tuned_on

NAMES = (
    *("speedup", "low", "high", "level", "tokens_per_round", "alpha", "gamma", "k", "budget", "batch"),
    *("us_per_token", "baseline_us_per_token", "breakdown", "kv_bytes_per_token", "extrapolated_frac", "fidelity"),
    "full_batch",
)


def expected_block(outcome: Outcome, record: Record, costs: CostModel, *, split: str, digest: str) -> dict[str, Any]:
    """split: of the documents that were replayed; digest: of the trace. fidelity is null for a lossless policy."""
    return {
        **{name: to_plain(getattr(outcome, name)) for name in NAMES},
        "split": split,
        "documents": list(outcome.documents),
        "trace_digest": digest,
        "hardware": costs.meta.get("hardware"),
        "costs": "the trace's own rounds" if costs.own_rounds else "cost table",
        "caveats": caveats(record.trace, costs),
        "tuned_on": to_plain(thinned(tuned_on(record, costs, outcome.policy, None, outcome.batch))),
    }
