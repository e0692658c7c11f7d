"""The head search finds heads that were planted to foretell the target's rows, and what it says makes a policy."""

import json
from dataclasses import replace

import numpy as np
import pytest

from specdial.engine.trace.attention import ALL_HEADS, DRAFT, TARGET, AttentionMeta, HeadScore, KeptRows, RowRun
from specdial.engine.trace.attention_file import read_attention, write_attention, write_rows
from specdial.policies.errors import UserError
from specdial.policies.schema import policy_from_mapping
from specdial.simulator.arr import Frame
from specdial.simulator.arr_report import budget_rows, delta_rows, layer_rows, print_arr
from specdial.simulator.heads import HeadSearch, search_heads

FIRST, ROWS, HEADS, LAYERS = 200, 24, 4, 6
HISTORY_LAYER, AHEAD = 3, (1, 4)  # the planted layers: of the target, and of the draft model
SEARCH = HeadSearch(budget=64, stage_budgets=(40, 48, 56), heads_per_layer=2, window=4, steps=4, trials=50)
FRAMES = (Frame(40), Frame(64))


def causal(rows):
    rows = rows * (np.arange(rows.shape[1]) <= FIRST + np.arange(len(rows))[:, None])
    return (rows / rows.sum(-1, keepdims=True)).astype(np.float32)


def whole(rows):
    """Rows with every visible key kept."""
    keys = np.broadcast_to(np.arange(rows.shape[1]), rows.shape)
    return KeptRows.of(keys, rows, FIRST + 1 + np.arange(len(rows)))


def noise(rng):
    return rng.gamma(0.2, size=(ROWS, FIRST + ROWS)) + 1e-6


def planted_rows(rng):
    """What one document's rows are.

    The target reads six keys in every row, which layer HISTORY_LAYER's heads show, and four that are others in every
    row: each draft layer of AHEAD sees two of them.
    """
    keys = rng.permutation(np.arange(8, FIRST - 30))
    lasting = keys[:6]
    moving = [rng.permutation(keys[6:])[:4] for _ in range(ROWS)]
    parts = np.zeros((3, ROWS, FIRST + ROWS))
    parts[0][:, lasting] = 1.0
    for row, keys in enumerate(moving):
        parts[1, row, keys[:2]] = 1.0
        parts[2, row, keys[2:]] = 1.0
    kept = {}
    for layer in range(LAYERS):
        recalled = causal(parts.sum(0) + 0.02 * noise(rng))
        kept[TARGET, layer, ALL_HEADS] = whole(recalled)
        for head in range(2):
            shown = parts[0] + 0.1 * noise(rng) if layer == HISTORY_LAYER else noise(rng)
            kept[TARGET, layer, head] = whole(causal(shown))
            seen = parts[1 + AHEAD.index(layer)] + 0.1 * noise(rng) if layer in AHEAD else noise(rng)
            kept[DRAFT, layer, head] = whole(causal(seen))
    return kept


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """A trace of three documents whose best heads, by ranking, are 0 and 1 of each layer."""
    out = tmp_path_factory.mktemp("planted")
    rng = np.random.default_rng(7)
    runs = []
    for doc, split in enumerate(("train", "train", "test")):
        write_rows(out, doc, planted_rows(rng), FIRST)
        runs.append(RowRun(doc, split, FIRST, FIRST, ROWS))
    heads = [
        HeadScore(source, layer, head, 0.1 * layer / (1 + head), 0.0, head + 1, layer * HEADS + head + 1)
        for source in (TARGET, DRAFT)
        for layer in range(LAYERS)
        for head in range(HEADS)
    ]
    write_attention(out, AttentionMeta({"name": "m"}, {"name": "d"}, tuple(runs), 2, 4096, 4096, {}, {}, {}, {}), heads)
    return read_attention(out)


@pytest.fixture(scope="module")
def found(planted):
    return search_heads(planted, SEARCH, "train")


def test_planted_heads_are_found(found):
    assert found.target == ((HISTORY_LAYER, 0), (HISTORY_LAYER, 1))
    joined = list(dict.fromkeys(layer for layer, _ in found.draft))
    assert sorted(joined[:2]) == list(AHEAD)  # what noise a third one may add is chance
    assert [layer for layer, _ in found.draft_arr] == [-1, *joined]
    arrs = [arr for _, arr in found.draft_arr]
    assert arrs == sorted(arrs)
    assert max(found.layer_arr, key=found.layer_arr.get) == HISTORY_LAYER


def test_layers_that_hardly_look_at_the_needle_can_be_left_out(planted):
    """The mean of the two best heads is 0.075 a layer: only layers 4 and 5 reach 0.3."""
    found = search_heads(planted, replace(SEARCH, least_needle_mass=0.3), "train")
    assert list(found.layer_arr) == [4, 5]
    assert {layer for layer, _ in found.target + found.draft} <= {4, 5}
    assert (4, 0) in found.draft


def test_m_is_the_best_of_all(found):
    """The free keys are few, so every m was tried: some keys by lookahead and some by history beat either alone."""
    assert sorted(found.m_arr) == list(range(found.frame.free + 1))
    assert found.arr == max(found.m_arr.values()) == found.m_arr[found.m]
    assert 0 < found.m < found.frame.free
    assert found.arr > max(found.m_arr[0], found.m_arr[found.frame.free])


def test_the_same_seed_gives_the_same_answer(planted):
    search = HeadSearch(budget=200, stage_budgets=(40,), heads_per_layer=2, trials=12, seed=3)
    first, second = (search_heads(planted, search, "train") for _ in range(2))
    assert first == second
    assert {0, first.frame.free // 2, first.frame.free} <= set(first.m_arr)
    assert len(first.m_arr) <= 12


def test_what_was_found_makes_a_policy(found):
    parts = found.policy_parts()
    drafter = {"kind": "model", "model": "small"}
    policy = policy_from_mapping({"drafter": drafter, "controller": {"kind": "fixed", "k": 4}, **parts})
    assert policy.scoring_heads.target == found.target
    assert policy.scoring_heads.draft == found.draft
    assert (policy.verify_kv.lookahead_tokens, policy.verify_kv.budget) == (found.m, 64)
    assert not policy.lossless


def test_without_a_draft_model_history_is_what_is_left(planted, tmp_path):
    for doc, document in enumerate(planted.documents):
        write_rows(tmp_path, doc, {name: k for name, k in document.kept.items() if name[0] == TARGET}, FIRST)
    write_attention(tmp_path, planted.meta, [head for head in planted.heads if head.source == TARGET])
    alone = search_heads(read_attention(tmp_path), SEARCH)
    assert (alone.draft, alone.m, sorted(alone.m_arr)) == ((), 0, [0])
    assert alone.target == ((HISTORY_LAYER, 0), (HISTORY_LAYER, 1))
    parts = alone.policy_parts()
    policy = policy_from_mapping({"controller": {"kind": "fixed", "k": 4}, **parts})
    assert (policy.verify_kv.source, policy.scoring_heads.draft) == ("history", ())


def test_tables(planted, found, capsys):
    deltas = delta_rows(planted, found, (1, 4), FRAMES, "test")
    layers = layer_rows(planted, SEARCH, FRAMES, "test")
    budgets = budget_rows(planted, found, SEARCH, FRAMES, "test")
    json.dumps([deltas, layers, budgets], allow_nan=False)
    assert [(row["budget"], row["delta"]) for row in deltas] == [(40, 1), (40, 4), (64, 1), (64, 4)]
    best = max((row for row in layers if row["kind"] == "history"), key=lambda row: row["arr"])
    assert (best["layer"], best["budget"]) == (HISTORY_LAYER, 64)
    for row in budgets:
        assert row["recent"] < row["history"] < row["hybrid"] < row["oracle"]
        assert row["lookahead"] < row["oracle"]
    assert budgets[1]["m"] == found.m
    print_arr(budgets, "hybrid against the oracle")
    assert f"{budgets[1]['hybrid']:.4f}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("search", "split", "says"),
    [
        (SEARCH, "validation", "no document in split validation"),
        (HeadSearch(heads_per_layer=3), None, "holds no rows of target layer 0 head 2"),
        (HeadSearch(stage_budgets=(16,), heads_per_layer=2), None, "budget 16 cannot hold"),
        (replace(SEARCH, least_needle_mass=0.9), None, "no target layer's best heads have a mean needle mass of 0.9"),
        (HeadSearch(window=ROWS, heads_per_layer=2), None, "hold no window of 24"),
    ],
)
def test_what_cannot_be_searched_is_refused(planted, search, split, says):
    with pytest.raises(UserError, match=says):
        search_heads(planted, search, split)
