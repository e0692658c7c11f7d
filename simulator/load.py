"""Opens what a verb names: cost tables that belong to a trace."""

from specdial.engine.trace.reader import Trace, read_costs
from specdial.policies.errors import UserError
from specdial.simulator.costs import CostModel


def load_costs(path: str | None, trace: Trace) -> CostModel:
    """The cost table at `path`, or the trace's own rounds. Raises UserError when it times another model."""
    if path is None:
        return CostModel.from_rounds(trace)
    table = read_costs(path)
    theirs, ours = table.meta.get("model", {}), trace.meta["model"]
    if theirs.get("digest") != ours["digest"]:
        raise UserError(
            f"costs of another model: {path} timed {theirs.get('name')}, {trace.path} recorded {ours['name']}",
            "calibrate that model or give its trace",
        )
    return CostModel.from_table(table)
