"""A model of random weights so small that a verb takes a fraction of a second, and documents for it."""

from dataclasses import replace
from pathlib import Path

import torch

from specdial.engine.job import Job
from specdial.engine.models import ModelConfig
from specdial.engine.models.config import RopeConfig
from specdial.engine.models.decoder import Decoder
from specdial.engine.tokenizer import Tokenizer
from specdial.engine.weights import LoadedModel
from specdial.engine.weights.random_weights import RandomWeights
from specdial.engine.workloads import WorkloadSpec, build

CONFIG = ModelConfig(
    name="tiny",
    architecture="llama",
    layers=2,
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate=96,
    vocab=256,
    max_context_tokens=4096,
    norm_eps=1e-5,
    rope=RopeConfig(),
)


def tiny_model(device: str = "cpu", *, head_dim: int = CONFIG.head_dim) -> LoadedModel:
    """Tokens are bytes. float32 on a CUDA device too, so that outputs can be compared. Kernels there need 64 dims."""
    place, dtype = torch.device(device), torch.float32
    config = replace(CONFIG, head_dim=head_dim)
    decoder = Decoder.from_weights(config, RandomWeights(config, 0, place, dtype), device=place, dtype=dtype)
    return LoadedModel(decoder, Tokenizer.of_bytes(), config, "random:tiny:0", "random")


def tiny_workload(folder: Path, **changes: object) -> dict[str, object]:
    """Settings of a workload over a text written into `folder`; its documents are of every split."""
    text = folder / "text.txt"
    if not text.exists():
        text.write_text("\n\n".join(f"Paragraph {i}, on {i * i} things that happened." for i in range(2000)))
    sizes = {"context_tokens": 80, "documents": 4, "new_tokens": 12}
    return {"kind": "file", "path": str(text), **sizes, **changes}


def tiny_job(model: LoadedModel, workload: dict[str, object], split: str = "all") -> Job:
    """What verbs take as `job`: the model and the workload's documents of a split."""
    spec = WorkloadSpec.from_mapping(workload)
    documents = [d for d in build(spec, model.tokenizer) if split == "all" or d.split in split.split("+")]
    return Job(model, "tiny", spec, documents)
