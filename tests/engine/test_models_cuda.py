"""The same decoder on a GPU: its logits against the CPU's, and random weights made there."""

import pytest
import torch

from specdial.engine.weights import load_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize(("dtype", "worst"), [("float32", 1e-3), ("bfloat16", 0.5)])
def test_logits_match_the_cpu(architecture, dtype, worst, tiny_checkpoint, full_logits):
    folder = str(tiny_checkpoint(architecture))
    tokens = torch.randint(0, 288, (2, 64), generator=torch.Generator().manual_seed(2))
    wanted = full_logits(load_model(folder, device="cpu", dtype="float32").decoder, tokens)
    model = load_model(folder, device="cuda", dtype=dtype)
    got = full_logits(model.decoder, tokens.cuda()).cpu()
    assert model.decoder.device.type == "cuda"
    assert (got - wanted).abs().max() < worst


def test_auto_is_cuda_in_bfloat16(tiny_checkpoint):
    decoder = load_model(str(tiny_checkpoint("llama"))).decoder
    assert (decoder.device.type, decoder.dtype) == ("cuda", torch.bfloat16)


def test_random_shape_on_the_device(full_logits):
    model = load_model("shape:llama-3.2-1b", device="cuda", dtype="bfloat16")
    logits = full_logits(model.decoder, torch.arange(8, device="cuda")[None])
    assert logits.shape == (1, 8, 128256)
    assert logits.isfinite().all()
