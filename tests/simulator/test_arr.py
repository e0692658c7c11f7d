"""Attention recall: laws that hold for any rows, and small cases worked out by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdial.policies.errors import UserError
from specdial.simulator.arr import (
    Frame,
    Windows,
    arr_by_delta,
    falling,
    history_scores,
    hybrid_arr,
    lookahead_scores,
    oracle_arr,
    recall,
    scored_arr,
    windows,
)

FIRST = 20  # position of the first row


def attention(seed, rows=12, *, ties=False):
    """Causal rows [rows, FIRST + rows] that sum to 1; with ties, most weights of a row are equal."""
    rng = np.random.default_rng(seed)
    keys = FIRST + rows
    raw = rng.integers(1, 3, (rows, keys)).astype(float) if ties else rng.gamma(0.3, size=(rows, keys)) + 1e-6
    raw *= np.arange(keys) <= FIRST + np.arange(rows)[:, None]
    return (raw / raw.sum(-1, keepdims=True)).astype(np.float32)


cases = st.tuples(st.integers(0, 2**32 - 1), st.booleans())
frames = st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 30)).map(
    lambda t: Frame(max(t[0] + t[1] + t[2], 1), t[0], t[1])
)


def three(case, window=4):
    """Windows over one model's rows, and history and lookahead scores of two others."""
    seed, ties = case
    at = windows(attention(seed, ties=ties), FIRST, window=window)
    history = history_scores(attention(seed + 1, ties=ties), at)
    return at, history, lookahead_scores(attention(seed + 2, ties=ties), at, window)


@settings(max_examples=60, deadline=None)
@given(case=cases, frame=frames, m=st.integers(0, 40))
def test_recall_is_a_share_and_no_selection_beats_the_oracle(case, frame, m):
    at, history, lookahead = three(case)
    best = oracle_arr(at, frame)
    for arr in (
        scored_arr(at, history, frame),
        scored_arr(at, lookahead, frame),
        hybrid_arr(at, lookahead, history, m, frame),
        best,
    ):
        assert arr.shape == at.index.shape
        assert (arr >= 0).all()
        assert (arr <= 1 + 1e-5).all()
        assert (arr <= best + 1e-6).all()


@settings(max_examples=60, deadline=None)
@given(case=cases, frame=frames, more=st.integers(1, 20))
def test_a_larger_budget_recalls_no_less(case, frame, more):
    at, history, _ = three(case)
    larger = Frame(frame.budget + more, frame.sink, frame.recent)
    assert (scored_arr(at, history, larger) >= scored_arr(at, history, frame) - 1e-6).all()


@settings(max_examples=30, deadline=None)
@given(case=cases, m=st.integers(0, 40))
def test_a_budget_for_every_key_recalls_all(case, m):
    at, history, lookahead = three(case)
    assert hybrid_arr(at, lookahead, history, m, Frame(FIRST + 12)) == pytest.approx(1.0, abs=1e-5)


@settings(max_examples=60, deadline=None)
@given(case=cases, frame=frames)
def test_the_ends_of_the_hybrid_are_history_and_lookahead(case, frame):
    at, history, lookahead = three(case)
    assert (hybrid_arr(at, lookahead, history, 0, frame) == scored_arr(at, history, frame)).all()
    assert (hybrid_arr(at, lookahead, history, frame.free, frame) == scored_arr(at, lookahead, frame)).all()


def chosen(lookahead, history, m, seen, frame):
    """The keys read after one anchor, in the plainest words: a set."""
    keys = set(range(min(frame.sink, seen))) | set(range(max(0, seen - frame.recent), seen))
    room = frame.budget - len(keys)
    for scores, most in ((lookahead, min(m, room)), (history, room)):
        free = sorted(set(range(seen)) - keys, key=lambda key: (-scores[key], key))
        taken = min(most, len(free), frame.budget - len(keys))
        keys |= set(free[:taken])
    assert len(keys) == min(frame.budget, seen)
    return keys


@settings(max_examples=60, deadline=None)
@given(case=cases, frame=frames, m=st.integers(0, 40))
def test_what_is_recalled_lies_on_the_keys_chosen(case, frame, m):
    at, history, lookahead = three(case)
    found = hybrid_arr(at, lookahead, history, m, frame)
    for n, seen in enumerate(at.seen):
        keys = chosen(lookahead[n], history[n], m, seen, frame)
        read = [*keys, *range(seen, at.future.shape[1])]
        assert found[n] == pytest.approx(at.future[n, read].sum(), abs=1e-6)


@settings(max_examples=40, deadline=None)
@given(case=cases, frame=frames, m=st.integers(0, 40), less=st.integers(0, 30))
def test_a_deeper_order_serves_a_smaller_budget(case, frame, m, less):
    at, history, lookahead = three(case)
    smaller = Frame(frame.budget - min(less, frame.free), frame.sink, frame.recent)
    deep = (falling(at, scores, frame) for scores in (history, lookahead))
    assert (recall(next(deep), smaller.free, next(deep), m) == hybrid_arr(at, lookahead, history, m, smaller)).all()


@settings(max_examples=40, deadline=None)
@given(case=cases, frame=frames, window=st.integers(1, 5))
def test_a_window_is_the_mean_of_its_rows_under_one_selection(case, frame, window):
    rows = attention(*case[:1], ties=case[1])
    scores = attention(case[0] + 1, ties=case[1])
    at = windows(rows, FIRST, window=window)
    one_by_one = [
        scored_arr(Windows(rows[at.index + step], at.index, at.seen), history_scores(scores, at), frame)
        for step in range(1, window + 1)
    ]
    together = scored_arr(at, history_scores(scores, at), frame)
    assert together == pytest.approx(np.mean(one_by_one, axis=0), abs=1e-6)


def test_by_hand():
    """Two keys beside sink and recent, of six seen ones; the last key is the block's own."""
    future = np.array([[0.1, 0.2, 0.05, 0.3, 0.05, 0.1, 0.2]])
    at = Windows(future, np.array([0]), np.array([6]))
    frame = Frame(budget=4, sink=1, recent=1)
    history = np.array([[9.0, 1.0, 5.0, 1.0, 4.0, 9.0, 9.0]])
    lookahead = np.array([[9.0, 1.0, 5.0, 7.0, 4.0, 9.0, 9.0]])
    assert scored_arr(at, history, frame) == pytest.approx(0.1 + 0.05 + 0.05 + 0.1 + 0.2)  # keys 2 and 4
    assert scored_arr(at, lookahead, frame) == pytest.approx(0.1 + 0.3 + 0.05 + 0.1 + 0.2)  # keys 3 and 2
    assert hybrid_arr(at, lookahead, history, 1, frame) == pytest.approx(0.1 + 0.3 + 0.05 + 0.1 + 0.2)
    assert oracle_arr(at, frame) == pytest.approx(0.1 + 0.2 + 0.3 + 0.1 + 0.2)  # keys 1 and 3
    assert oracle_arr(at, Frame(1, 0, 0)) == pytest.approx(0.3 + 0.2)


def test_ties_go_to_the_lowest_key():
    at = Windows(np.full((1, 8), 0.125), np.array([0]), np.array([8]))
    order = falling(at, np.zeros((1, 8)), Frame(5, 1, 1))
    assert order.keys.tolist() == [[1, 2, 3]]
    assert falling(at, np.zeros((1, 8)), Frame(5, 1, 1), 9).keys.tolist() == [[1, 2, 3, 4, 5, 6, 8, 8, 8]]


def test_scores_decay_with_distance_where_attention_drifts():
    """Each row reads five keys, one further on than the row before."""
    rows = np.zeros((16, FIRST + 16), dtype=np.float32)
    for r in range(16):
        rows[r, r : r + 5] = 0.2
    found = arr_by_delta(rows, rows, FIRST, (0, 1, 2, 4), Frame(5, 0, 0))
    assert found == pytest.approx([1.0, 0.8, 0.6, 0.2])


@settings(max_examples=30, deadline=None)
@given(case=cases, frame=frames)
def test_the_row_itself_is_its_own_oracle(case, frame):
    rows = attention(case[0], ties=case[1])
    found = arr_by_delta(rows, rows, FIRST, (0, 1, 3), frame)
    assert found[0] >= max(found) - 1e-6
    at = Windows(rows[3:], np.arange(3, 12), FIRST + np.arange(4, 13))
    assert found[0] == pytest.approx(float(oracle_arr(at, frame).mean()))


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (lambda: Frame(10, 4, 16), "budget 10 cannot hold 4 sink and 16 recent keys"),
        (lambda: windows(attention(0, 4), FIRST, window=4), "hold no window of 4"),
        (lambda: history_scores(attention(0), windows(attention(0), FIRST), 2), "2 positions before"),
        (lambda: lookahead_scores(attention(0), windows(attention(0), FIRST), 5), "no 5 drafter rows"),
        (lambda: arr_by_delta(attention(0), attention(0), FIRST, (1, 12), Frame(20)), "none 12 after another"),
    ],
)
def test_what_cannot_be_is_refused(fault, says):
    with pytest.raises(UserError, match=says):
        fault()


def test_windows_by_hand():
    """Rows of position 10 on, of which each anchor sees one key more; a window is the mean of what follows."""
    rows = np.arange(8 * 20, dtype=np.float64).reshape(8, 20)
    at = windows(rows, 10)
    assert (at.index.tolist(), at.seen.tolist()) == ([0, 1, 2, 3], [11, 12, 13, 14])
    assert at.future[0].tolist() == ((rows[1] + rows[2] + rows[3] + rows[4]) / 4).tolist()
    led = windows(rows, 10, window=1, lead=2, after=3)
    assert (led.index.tolist(), led.seen.tolist()) == ([2, 3, 4], [13, 14, 15])
    assert np.array_equal(led.future, rows[3:6])
    assert history_scores(rows, led).tolist() == rows[2:5].tolist()
    assert history_scores(rows, led, 3).tolist() == rows[0:3].tolist()
    assert np.array_equal(lookahead_scores(rows, led, 1), rows[3:6])
    assert np.array_equal(lookahead_scores(rows, led, 3), rows[3:6] + rows[4:7] + rows[5:8])
    for refused in (
        lambda: history_scores(rows, led, 4),
        lambda: history_scores(rows, led, 0),
        lambda: lookahead_scores(rows, led, 4),
        lambda: lookahead_scores(rows, led, 0),
        lambda: windows(rows, 10, window=0),
        lambda: windows(rows, 10, window=2, lead=6),
        lambda: arr_by_delta(rows, rows, 10, (-1, 1), Frame(20)),
    ):
        with pytest.raises(UserError):
            refused()
    assert len(windows(rows, 10, window=2, lead=5).index) == 1


def test_a_frame_holds_sink_recent_and_what_is_free():
    frame = Frame(20)
    assert (frame.sink, frame.recent, frame.free) == (4, 16, 0)
    assert Frame(20, 0, 0).free == 20
    for sink, recent in ((-1, 0), (0, -1), (5, 16)):
        with pytest.raises(UserError, match="raise the budget"):
            Frame(20, sink, recent)


def test_what_falls_below_the_depth_is_not_kept():
    """Three keys score; a depth of two keeps the best, of four takes the lowest unscored one too, of none none."""
    at = Windows(np.arange(8.0)[None] / 28.0, np.array([0]), np.array([8]))
    scores = np.array([[9.0, 0.0, 3.0, 0.0, 5.0, 4.0, 0.0, 9.0]])
    frame = Frame(4, 1, 1)
    two = falling(at, scores, frame)
    assert two.keys.tolist() == [[4, 5]]
    assert two.gain == pytest.approx(np.array([[4, 5]]) / 28.0)
    assert two.rest == pytest.approx([(0 + 7) / 28.0])
    assert falling(at, scores, frame, 4).keys.tolist() == [[4, 5, 2, 1]]
    assert falling(at, scores, frame, 0).keys.shape == (1, 0)
    lookahead = falling(at, np.array([[0.0, 7.0, 0.0, 6.0, 5.0, 0.0, 0.0, 0.0]]), frame)  # 1, 3
    assert recall(two, 2, lookahead, 1) == pytest.approx([(7 + 1 + 4) / 28.0])
    assert recall(two, 2, lookahead, 2) == pytest.approx([(7 + 1 + 3) / 28.0])
    assert recall(two, 2, lookahead, 9) == pytest.approx([(7 + 1 + 3) / 28.0])
    assert recall(two, 2, lookahead) == pytest.approx([(7 + 4 + 5) / 28.0])
