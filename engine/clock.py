"""Wall time of a round's parts, in microseconds, on either device."""

import time

import torch

from specdial.engine.graphs import Graphs


class Clock:
    """A stopwatch whose laps end when the device has finished the work issued so far.

    Time spent capturing graphs is left out: it is paid once a shape, not once a round.
    """

    def __init__(self, device: torch.device | str, graphs: Graphs) -> None:
        self._cuda = torch.device(device).type == "cuda"
        self._graphs = graphs
        self.restart()

    def restart(self) -> None:
        """Start a lap now."""
        self._started_s, self._capturing_us = self._now(), self._graphs.capturing_us

    def lap_us(self) -> float:
        """Microseconds since the last lap or restart; starts the next lap."""
        now = self._now()
        elapsed_us = (now - self._started_s) * 1e6 - (self._graphs.capturing_us - self._capturing_us)
        self._started_s, self._capturing_us = now, self._graphs.capturing_us
        return elapsed_us

    def _now(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter()
