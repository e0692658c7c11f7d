"""What several engine tests share: settings of verbs, models on a GPU, and graphs that are played on a CPU."""

import pytest
import torch

from specdial.engine.graphs import WARMUP_RUNS, Graphs
from specdial.engine.sequences import Sequences
from specdial.engine.weights import load_model


@pytest.fixture
def shared(tiny_checkpoint, tmp_path):
    """Settings that verbs with a workload share: three documents of 96 tokens and 20 new ones."""
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"The {i}th paragraph, on {i * i} things that happened." for i in range(200)))
    workload = {"kind": "file", "path": str(text), "context_tokens": 96, "documents": 3, "new_tokens": 20}
    return {"model": {"source": str(tiny_checkpoint("llama")), "device": "cpu"}, "workload": workload}


@pytest.fixture(scope="module")
def cuda_pair(tiny_checkpoint):
    """cuda_pair(sharpened=...): on a GPU a target and a draft model that agrees with it now and then.

    sharpened: their attention looks at few keys.
    """
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")

    def make(*, sharpened: bool):
        source = str(tiny_checkpoint("llama", head_dim=64))
        target, draft = (load_model(source, device="cuda", dtype="float32").decoder for _ in range(2))
        for decoder in (target, draft) if sharpened else ():
            for layer in decoder.layers:
                layer.qkv.mul_(2.0)
        for layer in draft.layers[1:]:
            layer.down.mul_(0.9)
        return target, draft

    return make


class Played(Graphs):
    """Graphs that are only played: `runs` times practised when new, and then called.

    frozen: what is called is what was new, as a captured graph goes on reading the buffers it was captured with.
    """

    def __init__(self, sequences: Sequences, *, runs: int = WARMUP_RUNS, frozen: bool = True) -> None:
        super().__init__("cpu", sequences._at_rest)
        self.enabled, self.runs, self.frozen = True, runs, frozen
        self.first: dict[object, object] = {}

    def run(self, key, function, *inputs):
        if self._capturing:
            return function(*inputs)
        self._capturing = True
        if key not in self.first:
            self.first[key] = function
            with self._at_rest():
                for _ in range(self.runs):
                    function(*inputs)
        self.before_call()
        result = (self.first[key] if self.frozen else function)(*inputs)
        self._capturing = False
        return result

    def before_call(self) -> None:
        """For subclasses."""


@pytest.fixture(scope="session")
def played() -> type[Played]:
    """The class Played."""
    return Played
