"""Wall time of a round's parts, in microseconds, on either device."""

import time

import torch


class Clock:
    """A stopwatch whose laps end when the device has finished the work issued so far."""

    def __init__(self, device: torch.device | str) -> None:
        self._cuda = torch.device(device).type == "cuda"
        self.restart()

    def restart(self) -> None:
        """Start a lap now."""
        self._started_s = self._now()

    def lap_us(self) -> float:
        """Microseconds since the last lap or restart; starts the next lap."""
        now = self._now()
        elapsed = (now - self._started_s) * 1e6
        self._started_s = now
        return elapsed

    def _now(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter()
