"""The surface benchmark: a dry run on tiny weights, and its arithmetic on made-up times."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from specdial.policies.errors import UserError
from specdial.policies.schema import plain_policy, policy_from_mapping
from specdial.simulator.surface import compose


@pytest.fixture
def surface(script):
    return script("search_surface")


@pytest.fixture
def watched(surface, monkeypatch):
    """watched(pays) -> the policies of every cell measured from here on, where `tune` finds that a surface pays.

    It drafts at short contexts only and is beside a single policy that drafts; `tune` itself writes both.
    """
    find, measure, seen = surface.tune.find_surface, surface.measured, []

    def found(record, costs, candidates, grid, *rest):
        drafting = next(p for p in candidates if p.k_max)
        chosen = np.array([[1], [0]])  # [contexts, batches]
        composed = compose(drafting, [candidates[0], drafting], chosen, grid)
        real = find(record, costs, candidates, grid, *rest)
        return replace(real, policy=composed, single=drafting, pays=True)

    def never(*given):
        real = find(*given)
        return replace(real, policy=real.single, pays=False)

    def measured(job, groups, policies, repeats):
        seen.append(policies)
        return measure(job, groups, policies, repeats)

    def watch(pays):
        monkeypatch.setattr(surface.tune, "find_surface", found if pays else never)
        monkeypatch.setattr(surface, "measured", measured)
        return seen

    return watch


@pytest.mark.parametrize("pays", [True, False])
def test_dry_run_measures_a_surface_where_tune_says_that_it_pays(surface, watched, tiny_checkpoint, capsys, pays):
    seen = watched(pays)
    sizes = ["--contexts", "150", "300", "--batches", "1", "--train", "1", "--new-tokens", "4", "--trials", "10"]
    (row,) = surface.main(["--dry", "--model", str(tiny_checkpoint("qwen2")), "--workload", "novel", *sizes])
    assert [cell[:2] for cell in row["chosen"]] == [[150, 1], [300, 1]]
    assert row["predicted"]["pays"] == pays == ("gains nothing" not in row["case"])
    assert row["bar"]["met"] == (row["value"] > 0)
    assert list(json.loads(capsys.readouterr().out.splitlines()[-1])) == [row["id"]]
    if not pays:
        assert (seen, row["value"]) == ([], 0.0)
        assert not {"speedup", "cells"} & set(row)
        return
    single = row["predicted"]["single"]
    assert [[p.name for p in policies] for policies in seen] == [["plain", "surface", f"single-{single}"]] * 2
    _, composed, alone = seen[0]
    assert [composed.variants()[composed.variant_index(c, 1)].k_max for c in (150, 300)] == [alone.k_max, 0]
    assert [cell[:2] for cell in row["cells"]] == [[150, 1], [300, 1]]
    for name, speedups in zip(("surface", "single"), np.array(row["cells"])[:, 2:].T, strict=True):
        assert (speedups > 0).all()
        assert row["speedup"][name] == pytest.approx(1.0 / (1.0 / speedups).mean(), rel=2e-3)
    assert row["value"] == pytest.approx(100 * (1 - row["speedup"]["single"] / row["speedup"]["surface"]), abs=0.5)
    assert row["outputs_differing_from_plain"] == 0


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
