"""Tables for people: what they say of batches, and where there is nothing to divide by."""

from dataclasses import replace

import pytest

from specdial.simulator.check import AcceptanceCheck, LeftOut
from specdial.simulator.lossy_tables import print_lossy
from specdial.simulator.replay import replay
from specdial.simulator.search_tables import print_test
from specdial.simulator.tables import print_acceptance, print_outcomes

ODD = "6 documents: the last batch is of 2, not 4, and whole runs take it in"


@pytest.fixture(scope="module")
def batched(trace, costs, policy):
    """A policy's outcome on six documents, four at a time."""
    return replay(trace, costs, [policy("fixed")], None, 4, bootstrap=0, full_batch=True)[0]


@pytest.mark.parametrize("printed", [print_outcomes, print_lossy])
def test_batches_are_told_in_every_table(batched, capsys, printed):
    printed([batched], "six")
    said = capsys.readouterr().out
    assert "full batch" in said
    assert f" {batched.full_batch.speedup:.3f} " in said
    assert ODD in said
    printed([replace(batched, full_batch=None, batch=2)], "six")
    said = capsys.readouterr().out
    assert "full batch" not in said
    assert "the last batch" not in said


def test_documents_of_a_test_that_make_no_whole_batches_are_told(batched, capsys):
    print_test({"best": batched, "plain": batched})
    assert capsys.readouterr().out.count(ODD) == 1


def test_a_budget_that_never_had_a_draft_accepted_has_no_relative_error(capsys):
    left_out = (LeftOut(128, 0.0, 0.5), LeftOut(256, 2.0, 1.0))
    print_acceptance(AcceptanceCheck("train", "test", None, left_out))
    none, half = capsys.readouterr().out.splitlines()
    assert none.endswith("recorded 0.00")
    assert half.endswith("recorded 2.00 (-50.0%)")
