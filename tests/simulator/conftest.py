"""Synthetic traces and cost tables on disk, read back through the real reader."""

import pytest

from specdial.engine.trace.reader import read_costs, read_trace
from specdial.policies.schema import policy_from_mapping
from specdial.simulator.costs import CostModel
from specdial.simulator.synthetic import Shape, write_synthetic_costs, write_trace

KV = {"budget": 256, "sink": 4, "recent": 16}


@pytest.fixture(scope="session")
def trace(tmp_path_factory):
    """Six documents, two budgets, chains of eight."""
    out = tmp_path_factory.mktemp("trace")
    write_trace(out, Shape())
    return read_trace(out)


@pytest.fixture(scope="session")
def costs(tmp_path_factory):
    out = tmp_path_factory.mktemp("costs")
    write_synthetic_costs(out, (256, 384, 512, 1024), (1, 2, 3, 4, 6), Shape())
    return CostModel.from_table(read_costs(out))


@pytest.fixture(scope="session")
def policy():
    """Build a policy from controller settings; other parts by keyword."""

    def build(kind, budget=256, **parts):
        controller = parts.pop("controller", {})
        name = parts.pop("name", kind)
        mapping = {"name": name, "controller": {"kind": kind, **controller}, "draft_kv": {**KV, "budget": budget}}
        return policy_from_mapping({**mapping, **parts})

    return build
