"""Named shapes against the sizes their authors publish; random weights from them."""

import torch

from specdial.engine.models.shapes import SHAPES
from specdial.engine.models.tensors import tensor_shapes
from specdial.engine.weights import load_model
from specdial.engine.weights.random_weights import RandomWeights

# Parameters in billions, from the model cards.
PUBLISHED_BILLIONS = {
    "llama-3.1-8b": 8.03,
    "llama-3.2-1b": 1.24,
    "qwen2.5-7b": 7.61,
    "qwen2.5-14b": 14.77,  # the card rounds to 14.7
    "qwen2.5-32b": 32.76,  # 32.5
    "qwen2.5-72b": 72.71,  # 72.7
    "qwen2.5-coder-0.5b": 0.494,
    "qwen2.5-coder-1.5b": 1.54,
    "smollm2-135m": 0.1345,
}


def test_shapes_have_the_published_sizes():
    billions = {name: sum(torch.Size(s).numel() for _, s in tensor_shapes(c)) / 1e9 for name, c in SHAPES.items()}
    assert billions.keys() == PUBLISHED_BILLIONS.keys()
    assert {n: b for n, b in billions.items() if abs(b / PUBLISHED_BILLIONS[n] - 1) > 0.01} == {}


def test_shape_of_smollm2_is_random_and_says_so(full_logits):
    one = load_model("shape:smollm2-135m", device="cpu", dtype="bfloat16", seed=3)
    assert (one.random, one.origin, one.digest) == (True, "random", "random:smollm2-135m:3")
    assert one.decoder.dtype == torch.bfloat16
    ids = one.tokenizer.encode("naïve 🙂")
    assert one.tokenizer.decode(ids) == "naïve 🙂"
    assert max(ids) < 256 <= one.config.vocab
    assert full_logits(one.decoder, torch.tensor([ids])).isfinite().all()


def test_random_weights_depend_on_seed_and_name_alone():
    config, cpu = SHAPES["smollm2-135m"], torch.device("cpu")
    name = "model.layers.3.self_attn.q_proj.weight"
    first, again, other = (RandomWeights(config, seed, cpu, torch.float32)[name] for seed in (1, 1, 2))
    sibling = RandomWeights(config, 1, cpu, torch.float32)["model.layers.4.self_attn.q_proj.weight"]
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, sibling)
    assert 0.019 < first.std() < 0.021
