"""The surface: borders only where they pay, k = 0 cells included, never said to be better than it is."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdial.engine.trace.reader import read_costs, read_trace
from specdial.policies.file import dump_policy, parse_policy
from specdial.policies.schema import policy_from_mapping
from specdial.simulator.costs import CostModel
from specdial.simulator.lanes import read_record
from specdial.simulator.surface import Grid, compose, energy, find_surface, smooth
from specdial.simulator.synthetic import Shape, write_synthetic_costs, write_trace


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(1, 4), st.integers(1, 2), st.floats(0.0, 0.5))
def test_no_surface_with_this_border_price_is_cheaper(seed, options, contexts, batches, switch_frac):
    """Exact for one batch; for two, no single policy and no other choice in one row is cheaper."""
    relative = np.random.default_rng(seed).random((options, contexts, batches))
    chosen = smooth(relative, switch_frac)
    found = energy(relative, chosen, switch_frac)
    for j in range(batches):
        for row in itertools.product(range(options), repeat=contexts):
            other = chosen.copy()
            other[:, j] = row
            assert found <= energy(relative, other, switch_frac) + 1e-9
    for p in range(options):
        assert found <= energy(relative, np.full_like(chosen, p), switch_frac) + 1e-9


def test_neighbours_differ_only_where_it_pays():
    """Two policies, the second better by 3 % in the last of three contexts: a border there pays at 2 %, not at 4 %."""
    relative = np.array([[0.5, 0.5, 0.53], [0.6, 0.6, 0.50]])[:, :, None]
    assert smooth(relative, 0.02)[:, 0].tolist() == [0, 0, 1]
    assert smooth(relative, 0.04)[:, 0].tolist() == [0, 0, 0]


@pytest.mark.parametrize("seed", range(5))
def test_the_composed_policy_runs_what_was_chosen_in_every_cell(policy, seed):
    labels = [policy("none"), *(policy("fixed", controller={"k": k}, budget=128 * (1 + k % 2)) for k in (2, 3, 5))]
    grid = Grid((256, 1024, 4096), (1, 4))
    chosen = np.random.default_rng(seed).integers(0, len(labels), (3, 2))
    composed = parse_policy(dump_policy(compose(labels[1], labels, chosen, grid)))
    for (i, context), (j, batch) in itertools.product(enumerate(grid.contexts), enumerate(grid.batches)):
        for near in (context, context + context // 4):
            mine = composed.variants()[composed.variant_index(near, batch + 1 if j else batch)]
            wanted = labels[chosen[i, j]]
            assert mine.k_max == wanted.k_max
            assert mine.k_max == 0 or mine.draft_kv == wanted.draft_kv


def test_a_cell_that_does_not_draft_has_no_lookahead_to_verify_by(policy):
    verify = {"mode": "partial", "source": "lookahead", "scope": "model", "full_period": 0}
    dustin = policy_from_mapping({
        "drafter": {"kind": "model", "model": "small"}, "controller": {"kind": "fixed", "k": 3}, "verify_kv": verify,
        "scoring_heads": {"draft": [[0, 0]]},
    })  # fmt: skip
    composed = compose(dustin, [policy("none"), dustin], np.array([[0], [1]]), Grid((256, 1024), (1,)))
    short, long = (composed.variants()[composed.variant_index(context, 1)] for context in (256, 1024))
    assert (short.k_max, short.verify_kv.mode) == (0, "full")
    assert (long.k_max, long.verify_kv) == (3, dustin.verify_kv)


def test_a_surface_pays_where_the_best_draft_length_turns_with_the_context(tmp_path, policy):
    """Drafts hardly ever match: at short contexts they cost more than they save, at long ones one draft pays."""
    write_trace(tmp_path / "trace", Shape(documents=12, difficulty_nats=2.0))
    write_synthetic_costs(tmp_path / "costs", (256, 1024, 8192), (1, 4), Shape())
    record, costs = read_record(read_trace(tmp_path / "trace")), CostModel.from_table(read_costs(tmp_path / "costs"))
    kv = record.arms[1]["draft_kv"]
    candidates = [policy("none"), *(policy("fixed", controller={"k": k}, draft_kv=kv) for k in (1, 2, 4, 8))]
    grid = Grid((256, 1024, 8192), (1, 4))
    surface = find_surface(record, costs, candidates, grid, ("train", "validation"), 0.005)
    assert surface.pays == (surface.gain_frac > 0.0)
    assert surface.pays
    assert surface.gain_frac == pytest.approx(1.0 - surface.single_speedup / surface.speedup)
    assert surface.speedup == pytest.approx(len(surface.cells) / sum(1.0 / cell.speedup for cell in surface.cells))
    ks = {(cell.context_tokens, cell.batch): cell.k_max for cell in surface.cells}
    assert ks[256, 4] < ks[8192, 4]
    assert {cell.moved for cell in surface.cells if cell.context_tokens == 8192} == {True}
    dear = find_surface(record, costs, candidates, grid, ("train", "validation"), 1.0)
    assert not dear.pays
    assert dear.policy == dear.single
