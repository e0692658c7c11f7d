"""The time that a recorded policy really took, round by round: a replay of it must cost exactly that.

Leaves out every other policy; those are priced by medians (CostModel.from_rounds).
"""

import numpy as np
import numpy.typing as npt

from specdial.engine.trace.reader import Trace
from specdial.engine.trace.schema import PARTIAL, PLAIN
from specdial.policies.file import policy_digest
from specdial.policies.schema import Policy
from specdial.simulator.lanes import Record
from specdial.simulator.outcome import Rounds
from specdial.simulator.pricing import TERMS, TRANSFER, VERIFY, VERIFY_PARTIAL

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def was_recorded(record: Record, policy: Policy, batch: int) -> bool:
    """Is this the policy, at this batch, that the trace's rounds show?"""
    batches = np.unique(record.trace.rounds["batch"].to_numpy())
    recorded = int(batches.max()) if len(batches) else 0
    return record.policy_digest == policy_digest(policy) and recorded == batch


def own_time_us(trace: Trace, log: Rounds, unit_of: dict[int, int], units: int) -> Floats | None:
    """[units, terms] recorded time of the replayed rounds, or None when some were not recorded as replayed.

    unit_of: document -> unit. Members of a batch share a round's time, so it counts once, at its longest.
    """
    columns = {name: trace.rounds[name].to_numpy() for name in trace.rounds.column_names if name != "mode"}
    mode = np.array(trace.rounds["mode"].to_pylist())
    mine = np.isin(columns["doc"], np.unique(log.doc))
    columns, mode = {name: column[mine] for name, column in columns.items()}, mode[mine]
    order = np.lexsort((columns["round"], columns["doc"]))
    columns, mode = {name: column[order] for name, column in columns.items()}, mode[order]
    plain, partial = mode == PLAIN, mode == PARTIAL
    for name in ("doc", "context_tokens", "k", "accepted", "emitted"):
        if not np.array_equal(columns[name], getattr(log, name)):
            return None
    times = np.stack([columns["draft_us"], columns["verify_us"], columns["select_us"], columns["host_us"]], axis=1)
    terms = np.zeros((len(times), len(TERMS)))
    terms[:, :4] = np.where(plain[:, None], 0.0, times)
    terms[:, 4] = np.where(plain, times.sum(axis=1), 0.0)
    terms[~plain, TRANSFER] = np.nan_to_num(columns["exposed_us"].astype(np.float64))[~plain]
    terms[:, VERIFY] -= terms[:, TRANSFER]
    terms[partial, VERIFY_PARTIAL], terms[partial, VERIFY] = terms[partial, VERIFY], 0.0
    unit = np.array([unit_of[int(doc)] for doc in columns["doc"]])
    longest = np.zeros((units, int(log.round.max()) + 1, len(TERMS)))
    np.maximum.at(longest, (unit, log.round), terms)
    return np.asarray(longest.sum(axis=1))
