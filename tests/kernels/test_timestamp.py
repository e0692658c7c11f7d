"""Timestamps on a CPU: the clock goes on, only the named slots are written; the boundary."""

import time

import pytest
import torch

from specdial.kernels.timestamp import timestamp


def test_the_named_slots_get_the_clock() -> None:
    into = torch.full((6,), -1)
    before = time.perf_counter_ns()
    timestamp(into, 1, 1, backend="reference")
    between = time.perf_counter_ns()
    timestamp(into, 2, 4, backend="reference")
    after = time.perf_counter_ns()
    assert (into[0], into[5]) == (-1, -1)
    assert before <= into[1] <= between
    assert between <= into[2] == into[3] == into[4] <= after


@pytest.mark.parametrize(
    ("into", "slots", "backend", "message"),
    [
        (torch.zeros(2, 2, dtype=torch.int64), (0, 0), "reference", r"into has shape \[2, 2\]"),
        (torch.zeros(4), (0, 0), "reference", "into .* dtype torch.float32"),
        (torch.zeros(8, dtype=torch.int64)[::2], (0, 0), "reference", "into .* strides"),
        (torch.zeros(4, dtype=torch.int64), (0, 4), "reference", "slots are 0 to 4, into has 4"),
        (torch.zeros(4, dtype=torch.int64), (2, 1), "reference", "slots are 2 to 1"),
        (torch.zeros(4, dtype=torch.int64), (-1, 1), "reference", "slots are -1 to 1"),
        (torch.zeros(4, dtype=torch.int64), (0, 1), "fast", "backend is 'fast'"),
    ],
)
def test_a_wrong_argument_is_named(into: torch.Tensor, slots: tuple[int, int], backend: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        timestamp(into, *slots, backend=backend)
