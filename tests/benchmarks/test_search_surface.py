"""The surface benchmark: a dry run on tiny weights, and its arithmetic on made-up times."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from specdial.policies.errors import UserError
from specdial.policies.schema import plain_policy, policy_from_mapping


@pytest.fixture
def surface(script):
    return script("search_surface")


def test_dry_run_measures_a_surface_where_tune_says_that_it_pays(surface, tiny_checkpoint, capsys):
    sizes = ["--contexts", "150", "300", "--batches", "1", "--train", "1", "--new-tokens", "4", "--trials", "10"]
    (row,) = surface.main(["--dry", "--model", str(tiny_checkpoint("qwen2")), "--workload", "novel", *sizes])
    assert [cell[:2] for cell in row["chosen"]] == [[150, 1], [300, 1]]
    assert ("speedup" in row) == row["predicted"]["pays"]
    assert row["bar"]["met"] == (row["value"] > 0)
    assert row["predicted"]["pays"] or "gains nothing" in row["case"]
    assert list(json.loads(capsys.readouterr().out.splitlines()[-1])) == [row["id"]]


def test_every_cell_is_measured_on_its_own_test_documents(surface, tiny_checkpoint, tmp_path):
    sizes = ["--contexts", "200", "100", "--workload", "novel", "--new-tokens", "4"]
    a = surface.arguments(["--dry", "--model", str(tiny_checkpoint("qwen2")), *sizes])
    cell = surface.Cell.load(a, a.contexts, tmp_path)
    found = [(d.index, len(d.prompt_ids), d.split) for d in cell.job.documents]
    splits = ("train", "train", "test", "test")
    assert found == [(4 * c + i, size, split) for c, size in enumerate((200, 100)) for i, split in enumerate(splits)]
    drafting = policy_from_mapping({"controller": {"kind": "fixed", "k": 2}, "draft_kv": {"budget": 80}})
    relative, unlike = surface.margins(cell, [plain_policy(), drafting, plain_policy()], surface.Clock())
    assert relative.shape == (2, 2, 2, 3)
    assert np.median(relative[..., 0], axis=2) == pytest.approx(1.0)
    assert (relative > 0).all()
    assert unlike == 0
    with pytest.raises(UserError, match="batch 3 of 2 train and 2 test documents"):
        cell.groups(3, 200)


def test_the_margin_is_time_saved_with_equal_plain_time_in_every_cell(surface):
    """Times over plain: the surface .5 and .7, the single policy .5 and .9: .6 against .7 on the mixed workload."""
    a = SimpleNamespace(contexts=[8000, 31000], batches=[1], train=8, test=8, singles=2, workload="code", repeats=1)
    cell = SimpleNamespace(a=a, about={}, job=SimpleNamespace(name="tiny"))
    said = {"speedup": 1.6, "single_speedup": 1.4, "gain_frac": 0.1, "pays": True, "single": "fixed-k4", "cells": []}
    relative = np.array([[[[1.0, 0.5, 0.5]]], [[[1.0, 0.7, 0.9]]]])  # [contexts, batches, repeats, policies]
    row = surface.row_of(cell, said, relative, 0)
    assert row["value"] == pytest.approx(100 / 7, abs=1e-3)
    assert row["cells"] == [[8000, 1, 2.0, 2.0], [31000, 1, 1.4286, 1.1111]]
    assert row["bar"]["met"]
    assert surface.row_of(cell, {**said, "pays": False}, None, 0)["value"] == 0.0
