"""The heat map shows what the search chose: a surface where it pays, else the single policy for all places."""

import pytest

from specdial.simulator.report.surface import _composed

CELL = {"context_tokens": 2048, "batch": 1, "policy": "rate-k8-b512", "k_max": 8, "moved": False, "speedup": 0.9}


@pytest.mark.parametrize(
    ("pays", "single", "k_max", "shown"),
    [
        (True, "plain", 0, ("rate-k8-b512", 0.9, True)),
        (False, "plain", 0, ("k = 0", 1.0, False)),
        (False, "fixed-k4-b256", 4, ("fixed-k4-b256", 1.0, True)),
    ],
)
def test_cells_hold_what_was_chosen(pays, single, k_max, shown):
    surface = {"pays": pays, "single": single, "single_k_max": k_max, "cells": [{**CELL, "single_speedup": 1.0}]}
    (tile,) = _composed({"surface": surface})
    assert (tile.name, tile.speedup, tile.drafts) == shown


def test_no_surface_no_cells():
    assert _composed({}) == []
