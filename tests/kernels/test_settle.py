"""Settling a round against the rule in plain Python, sequence by sequence; the boundary."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specdial.kernels.settle import settle


@dataclass
class Lane:
    """One sequence before a round."""

    drafts: list[int]
    choices: list[int]
    k: int
    room: int
    accepted: int
    pending: int = 7
    before: int = 8


def rule(lane: Lane, stops: set[int], judged: bool) -> dict[str, object]:
    """The docstring of `settle`, said in Python."""
    k = min(lane.k, max(lane.room - 1, 0))
    accepted = 0
    if judged:
        accepted = min(lane.accepted, k)
    else:
        while accepted < k and lane.drafts[accepted] == lane.choices[accepted]:
            accepted += 1
    emitted: list[int] = []
    room, stopped = lane.room, False
    for token in [*lane.drafts[:accepted], lane.choices[accepted]]:
        if room > 0 and not stopped:
            emitted.append(token)
            room, stopped = room - 1, token in stops
    history = [lane.before, lane.pending, *emitted]
    return {
        "emitted": emitted + [-1] * (len(lane.choices) - len(emitted)),
        "accepted": min(accepted, len(emitted)),
        "counts": len(emitted),
        "k": k,
        "room": 0 if stopped else room,
        "pending": history[-1],
        "before": history[-2],
    }


def settled(lanes: list[Lane], stops: list[int], judged: bool) -> list[dict[str, object]]:
    """The reference on a batch, its drafts a view of a wider buffer."""
    K = len(lanes[0].drafts)
    block = torch.tensor([[5, *lane.drafts, 6] for lane in lanes])  # [B, K+2]
    wide = torch.full((len(lanes), K + 3), 99)
    column = {
        name: torch.tensor([getattr(lane, name) for lane in lanes])
        for name in ("k", "room", "accepted", "pending", "before")
    }
    column["counts"] = torch.full((len(lanes),), 99)
    settle(
        block[:, 1 : K + 1],
        torch.tensor([lane.choices for lane in lanes]),
        stop_ids=torch.tensor([*stops, -1, -1]),
        emitted=wide[:, : K + 1],
        judged=judged,
        backend="reference",
        **column,
    )
    assert (wide[:, K + 1 :] == 99).all()
    assert block[:, 0].tolist() == [5] * len(lanes)
    return [
        {"emitted": wide[b, : K + 1].tolist(), **{name: int(values[b]) for name, values in column.items()}}
        for b in range(len(lanes))
    ]


@st.composite
def rounds(draw: st.DrawFn) -> tuple[list[Lane], list[int], bool]:
    K = draw(st.integers(0, 6))
    token = st.integers(0, 3)
    judged = draw(st.booleans())
    lanes = []
    for _ in range(draw(st.integers(1, 4))):
        choices = draw(st.lists(token, min_size=K + 1, max_size=K + 1))
        wrong = draw(st.lists(st.sampled_from([0, 0, 0, 1]), min_size=K, max_size=K))  # mostly right
        drafts = [(c + w) % 4 for c, w in zip(choices, wrong)]
        k = draw(st.integers(0, K))
        lanes.append(Lane(drafts, choices, k, draw(st.integers(0, K + 3)), draw(st.integers(0, k))))
    return lanes, draw(st.lists(token, max_size=2)), judged


@given(rounds())
@example(([Lane([1, 2, 3], [1, 2, 3, 0], 3, 10, 0)], [2], False))  # a stop token inside accepted drafts
@example(([Lane([1, 2, 3], [1, 2, 3, 0], 3, 2, 0)], [], False))  # no room for all of them
@example(([Lane([1, 2, 3], [1, 2, 3, 0], 3, 0, 0)], [], False))  # finished
@example(([Lane([1, 2, 3], [0, 0, 0, 0], 3, 2, 3)], [], True))  # judged beyond what there is room for
@example(([Lane([], [4], 0, 1, 0)], [], False))  # plain decoding
@settings(max_examples=300, deadline=None)
def test_the_reference_is_the_rule(case: tuple[list[Lane], list[int], bool]) -> None:
    lanes, stops, judged = case
    assert settled(lanes, stops, judged) == [rule(lane, set(stops), judged) for lane in lanes]


def test_a_round_read_by_eye() -> None:
    lanes = [Lane([1, 2, 3], [1, 2, 9, 4], 3, 10, 0), Lane([1, 2, 3], [1, 2, 3, 4], 3, 10, 0)]
    first, second = settled(lanes, [2], False)
    assert first == second == {
        "emitted": [1, 2, -1, -1], "accepted": 2, "counts": 2, "k": 3, "room": 0, "pending": 2, "before": 1
    }  # fmt: skip
    first, second = settled(lanes, [], False)
    assert (first["emitted"], first["accepted"], first["room"]) == ([1, 2, 9, -1], 2, 7)
    assert (second["emitted"], second["accepted"], second["room"]) == ([1, 2, 3, 4], 3, 6)


def arguments(**changes: object) -> dict[str, object]:
    vector = {name: torch.zeros(2, dtype=torch.int64) for name in ("k", "room", "accepted", "counts")}
    vector |= {name: torch.zeros(2, dtype=torch.int64) for name in ("pending", "before")}
    grids = {"drafts": torch.zeros(2, 3, dtype=torch.int64), "choices": torch.zeros(2, 4, dtype=torch.int64)}
    grids["emitted"] = torch.zeros(2, 4, dtype=torch.int64)
    stops = torch.full((4,), -1)
    return {**vector, **grids, "stop_ids": stops, "judged": False, "backend": "reference", **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drafts": torch.zeros(3, dtype=torch.int64)}, r"drafts has shape \[3\]"),
        ({"drafts": torch.zeros(2, 3)}, "drafts .* dtype torch.float32"),
        ({"drafts": torch.zeros(3, 2, dtype=torch.int64).t()}, r"drafts \[2, 3\] has strides \[1, 2\]"),
        ({"choices": torch.zeros(2, 3, dtype=torch.int64)}, r"choices has shape \[2, 3\], expected \[2, 4\]"),
        ({"emitted": torch.zeros(2, 5, dtype=torch.int64)}, "emitted has shape"),
        ({"room": torch.zeros(3, dtype=torch.int64)}, r"room has shape \[3\]"),
        ({"counts": torch.zeros(2, dtype=torch.int32)}, "counts .* dtype torch.int32"),
        ({"pending": torch.zeros(4, dtype=torch.int64)[::2]}, "pending .* strides"),
        ({"backend": "fast"}, "backend is 'fast'"),
    ],
)
def test_a_wrong_argument_is_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settle(**arguments(**changes))
