"""Passes over device tensors, captured as CUDA graphs on first use and replayed afterwards.

A pass must be a function of its inputs and of buffers that stay where they are, and must not wait for the host. Before
it is captured it runs twice for practice, inside `at_rest`, which sees to it that nothing lasting changes. On a CPU it
is simply called. What a replay returns is overwritten by the next replay of the same pass. A pass that does wait, for
the host or for streams of its own, says so in its key (`UNCAPTURED`) and is simply called too.
"""

import time
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

UNCAPTURED = "uncaptured"
WARMUP_RUNS = 2  # compiles kernels and fills library handles outside the capture


@cache
def practice_stream(device: int) -> torch.cuda.Stream:
    """The one stream for practice runs: cuBLAS keeps a workspace of every stream that it ever saw."""
    return torch.cuda.Stream(device)


@dataclass(frozen=True, slots=True)
class Captured:
    """A graph with the buffers it reads and what it returns."""

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    outputs: Any


class Graphs:
    """The captured passes of one batch of sequences."""

    def __init__(self, device: torch.device | str, at_rest: Callable[[], AbstractContextManager[None]]) -> None:
        self.enabled = torch.device(device).type == "cuda"
        self.capturing_us = 0.0  # spent on capturing so far: paid once a shape, so clocks leave it out
        self._captured: dict[Hashable, Captured] = {}
        self._pool: Any = None
        self._capturing = False
        self._at_rest = at_rest

    def run(self, key: Hashable, function: Callable[..., Any], *inputs: Tensor) -> Any:
        """`function(*inputs)`, through the graph of this key, or as part of the pass that is being captured.

        Inputs of one key keep their shapes. A tuple with UNCAPTURED in it is the key of no graph.
        """
        if not self.enabled or self._capturing or (isinstance(key, tuple) and UNCAPTURED in key):
            return function(*inputs)
        found = self._captured.get(key)
        if found is None:
            found = self._captured[key] = self._capture(function, inputs)
        for static, given in zip(found.inputs, inputs, strict=True):
            static.copy_(given)
        found.graph.replay()
        return found.outputs

    def _capture(self, function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Captured:
        torch.cuda.synchronize()
        started_s = time.perf_counter()
        static = tuple(t.clone() for t in inputs)
        self._capturing = True
        side = practice_stream(torch.cuda.current_device())
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), self._at_rest():
            for _ in range(WARMUP_RUNS):
                function(*static)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            outputs = function(*static)
        self._capturing = False
        self._pool = self._pool or graph.pool()
        torch.cuda.synchronize()
        self.capturing_us += (time.perf_counter() - started_s) * 1e6
        return Captured(graph, static, outputs)
