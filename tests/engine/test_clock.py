"""Laps measure work, and leave out what was spent on capturing graphs."""

import time

from specdial.engine.clock import Clock
from specdial.engine.graphs import Graphs


def test_laps_follow_each_other_and_leave_capturing_out():
    graphs = Graphs("cpu")
    clock = Clock("cpu", graphs)
    time.sleep(0.02)
    first = clock.lap_us()
    assert first >= 20_000
    time.sleep(0.03)
    graphs.capturing_us += 20_000
    second = clock.lap_us()
    assert second >= 10_000
    time.sleep(0.01)
    third = clock.lap_us()
    assert third >= 10_000, "a capture is left out once, not again"
    started_s = time.perf_counter()
    clock.restart()
    time.sleep(0.03)
    graphs.capturing_us += 20_000
    lap = clock.lap_us()
    assert lap <= (time.perf_counter() - started_s) * 1e6 - 20_000


def test_without_a_gpu_a_pass_is_simply_called():
    graphs = Graphs("cpu")
    assert graphs.run("key", lambda: 3) == 3
    assert graphs.run("key", lambda: 4) == 4, "nothing may be remembered"
    assert graphs.capturing_us == 0.0
