"""docs/formats.md names every column, every part of a policy file, every schema and every format of the code."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from specdial.engine.trace import schema
from specdial.policies.schema import Cell, Policy
from specdial.simulator.importers import IMPORTERS
from specdial.simulator.tuned_on import DocumentCounts, RoundCost, TunedOn

ROOT = Path(__file__).resolve().parents[1]
NAMED = set(re.findall(r"`([^`\n]+)`", (ROOT / "docs" / "formats.md").read_text("utf-8")))
TUNED = [f.name for part in (TunedOn, DocumentCounts, RoundCost) for f in fields(part)]


@pytest.mark.parametrize(
    "names",
    [
        schema.ROUNDS.names,
        schema.DRAFTS.names,
        schema.OUTPUTS.names,
        schema.PROBES.names,
        schema.COSTS.names,
        [f.name for f in fields(Policy)],
        [f.name for f in fields(Cell)],
        [name for name in TUNED if name not in ("documents", "costs", "k")],
        list(IMPORTERS),
    ],
)
def test_every_name_is_described(names):
    assert [name for name in names if name not in NAMED] == []


def test_every_schema_is_listed():
    found = set()
    for folder in ("engine", "policies", "simulator"):
        for path in (ROOT / folder).rglob("*.py"):
            found |= set(re.findall(r'SCHEMA = "(specdial/[\w-]+/\d+)"', path.read_text("utf-8")))
    assert sorted(found - NAMED) == []
