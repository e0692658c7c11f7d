"""Logits against transformers on tiny random checkpoints; the forward pass in pieces against the whole."""

import json

import pytest
import torch

from specdial.engine.models import Decoder, ModelConfig
from specdial.engine.models.decoder import ANGLE_ROWS
from specdial.engine.models.rope import cos_sin
from specdial.engine.weights import load_model
from specdial.engine.weights.hf import SafetensorsWeights
from specdial.kernels.full_attention import full_attention
from specdial.kernels.linear import Quantised
from specdial.policies.errors import UserError

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
CASES = {
    "llama": ("llama", {}),
    "llama-tied-sharded": ("llama", {"tied": True, "shards": 3}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-llama3": ("llama", {"rope_scaling": LLAMA3, "rope_theta": 500000.0}),
    "llama-linear": ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "llama-rope-parameters": ("llama", {"rope_theta": None, "rope_parameters": {**LLAMA3, "rope_theta": 500000.0}}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tied": True}),
    "qwen2-yarn": ("qwen2", {"rope_scaling": YARN, "rope_theta": 1000000.0}),
    "qwen2-yarn-attention": ("qwen2", {"rope_scaling": {**YARN, "attention_factor": 0.7, "beta_fast": 8}}),
    "qwen3-tied-sharded": ("qwen3", {"tied": True, "shards": 2}),
    "qwen3-wide-heads": ("qwen3", {"head_dim": 32}),
    "qwen3-yarn": ("qwen3", {"rope_scaling": {**YARN, "truncate": False}}),
    "mistral": ("mistral", {}),
    "mistral-window-not-reached": ("mistral", {"sliding_window": 128}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_match_transformers(case, tiny_checkpoint, full_logits):
    from transformers import AutoModelForCausalLM

    architecture, changes = CASES[case]
    folder = tiny_checkpoint(architecture, **changes)
    tokens = torch.randint(0, 288, (2, 96), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
        wanted = oracle(tokens).logits
    got = full_logits(load_model(str(folder), device="cpu", dtype="float32").decoder, tokens)
    assert wanted.std() > 0.5  # a flat oracle would agree with anything
    assert (got - wanted).abs().max() <= 1e-4


@pytest.mark.parametrize("scaling", [{"rope_scaling": YARN}, {"rope_scaling": LLAMA3}])
def test_scaling_changes_logits(scaling, tiny_model, full_logits):
    """So that the cases above cannot pass with scaling ignored on both sides."""
    tokens = torch.arange(96)[None]
    plain, scaled = (full_logits(tiny_model("qwen2", **c).decoder, tokens) for c in ({}, scaling))
    assert (plain - scaled).abs().max() > 1e-2


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
def test_pieces_equal_the_whole(architecture, tiny_model, make_attend, full_logits):
    decoder = tiny_model(architecture).decoder
    tokens = torch.randint(0, 288, (3, 23), generator=torch.Generator().manual_seed(3))
    attend, pieces, at = make_attend(), [], 0
    for length in (11, 1, 5, 1, 5):
        positions = torch.arange(at, at + length).expand(3, length)
        pieces.append(decoder.logits(decoder.forward(tokens[:, at : at + length], positions, attend)))
        at += length
    assert at == tokens.shape[1]
    torch.testing.assert_close(torch.cat(pieces, 1), full_logits(decoder, tokens), atol=2e-5, rtol=0)


def test_positions_are_per_row(tiny_model, make_attend):
    """Two rows at different positions give what each gives alone: batches have ragged progress."""
    decoder = tiny_model("llama").decoder
    tokens, positions = torch.tensor([[5, 6, 7], [8, 9, 10]]), torch.tensor([[0, 1, 2], [40, 41, 42]])
    together = decoder.forward(tokens, positions, make_attend())
    alone = [decoder.forward(tokens[i : i + 1], positions[i : i + 1], make_attend()) for i in range(2)]
    torch.testing.assert_close(together, torch.cat(alone), atol=2e-6, rtol=0)


def test_attend_sees_rotated_heads(tiny_model):
    seen = {}

    def attend(layer, q, k, v):
        seen[layer] = tuple(q.shape), tuple(k.shape), tuple(v.shape)
        return torch.zeros_like(q)

    decoder = tiny_model("qwen3", head_dim=32).decoder
    hidden = decoder.forward(torch.zeros(2, 5, dtype=torch.long), torch.arange(5).expand(2, 5), attend)
    assert hidden.shape == (2, 5, 64)
    assert seen == dict.fromkeys(range(3), ((2, 5, 4, 32), (2, 5, 2, 32), (2, 5, 2, 32)))
    assert decoder.logits(hidden[:, -1]).shape == (2, 288)


def test_taps_are_the_inputs_of_layers(tiny_model, make_attend):
    decoder = tiny_model("llama").decoder
    tokens, positions = torch.tensor([[1, 2, 3]]), torch.arange(3)[None]
    hidden, taps = decoder.forward_with_taps(tokens, positions, make_attend(), (2, 0))
    assert torch.equal(hidden, decoder.forward(tokens, positions, make_attend()))
    assert taps.shape == (2, 1, 3, 64)
    assert torch.equal(taps[1], decoder.embedding[tokens])
    assert not torch.equal(taps[0], taps[1])


def test_row_block_pads_and_cuts(tiny_model, full_logits):
    decoder = tiny_model("qwen2").decoder
    tokens = torch.arange(7)[None]
    plain = full_logits(decoder, tokens)
    decoder.row_block = 4
    padded = full_logits(decoder, tokens)
    assert padded.shape == plain.shape
    torch.testing.assert_close(padded, plain, atol=2e-5, rtol=0)


def test_bfloat16_stays_close(tiny_checkpoint, full_logits):
    folder = str(tiny_checkpoint("llama"))
    tokens = torch.arange(40)[None]
    wide, narrow = (
        full_logits(load_model(folder, device="cpu", dtype=t).decoder, tokens) for t in ("float32", "bfloat16")
    )
    assert narrow.dtype == torch.float32
    assert 0 < (wide - narrow).abs().mean() < 0.05


def loaded(folder):
    config = ModelConfig.from_hf(json.loads((folder / "config.json").read_text()), name="tiny")
    return config, dict(SafetensorsWeights(folder))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.pop("model.layers.1.mlp.up_proj.weight"), "model.layers.1.mlp.up_proj.weight is missing"),
        (lambda w: w.update(extra=torch.zeros(1)), "extra is unexpected"),
        (lambda w: w.update({"lm_head.weight": torch.zeros(5, 64)}), r"lm_head.weight has shape \(5, 64\)"),
    ],
)
def test_wrong_weights_are_named(change, words, tiny_checkpoint):
    config, weights = loaded(tiny_checkpoint("llama"))
    change(weights)
    with pytest.raises(UserError, match=words) as caught:
        Decoder.from_weights(config, weights)
    assert "\n" not in str(caught.value)


def test_saved_rope_buffers_and_tied_heads_are_ignored(tiny_checkpoint, full_logits):
    config, weights = loaded(tiny_checkpoint("llama", tied=True))
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8), "lm_head.weight": torch.zeros(288, 64)}
    tokens = torch.arange(9)[None]
    plain, more = (Decoder.from_weights(config, w) for w in (weights, weights | extra))
    assert torch.equal(full_logits(plain, tokens), full_logits(more, tokens))
    assert plain.weight_bytes == 4 * sum(w.numel() for w in weights.values())


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_the_fused_pass_equals_the_plain_one(tiny_model, make_attend, architecture):
    """On references: same hidden states, same taps, and the cache holds the keys that `attend` was given."""
    decoder = tiny_model(architecture).decoder
    c, tokens = decoder.config, torch.arange(14).view(2, 7) * 9
    shape = (c.layers, 2, c.kv_heads, 20, c.head_dim)
    keys, values = torch.zeros(shape), torch.zeros(shape)
    attend = make_attend()
    layers = (0, 2, 1)
    plain, wanted = decoder.forward_with_taps(tokens, torch.arange(7).expand(2, 7), attend, layers)

    def mix(layer, q):
        return full_attention(q, keys[layer], values[layer], lengths, backend="reference")[0]

    lengths = torch.zeros(2, dtype=torch.int64)
    cached, fused = (decoder.tap_buffers(tokens.shape, layers) for _ in range(2))
    hidden = decoder.forward_cached(
        tokens, lengths, lambda layer: (keys[layer], values[layer]), mix, backend="reference", taps=cached
    )
    assert torch.allclose(hidden, plain, atol=1e-5)
    logits = decoder.fused_step(float8=False).logits(
        tokens, lengths, lambda layer: (keys[layer], values[layer]), mix, backend="reference", taps=fused
    )
    assert torch.allclose(logits, decoder.logits(plain), atol=1e-4)
    for taps in (cached, fused):
        assert torch.allclose(torch.stack([taps[layer] for layer in layers]), wanted, atol=1e-5)
    for layer, (k, v) in attend.cache.items():
        assert torch.allclose(keys[layer, :, :, :7].transpose(1, 2), k, atol=1e-5)
        assert torch.allclose(values[layer, :, :, :7].transpose(1, 2), v, atol=1e-5)
        assert not keys[layer, :, :, 7:].any()


def test_float8_weights_are_the_same_in_both_forms(tiny_model, make_attend):
    """The fused step also takes its activations in two float8 pieces, 4e-3 off each: a tenth of what weights lose."""
    decoder = tiny_model("qwen2").decoder
    tokens = torch.arange(14).view(2, 7) * 9
    small = decoder.in_float8()
    rounded = small.logits(small.forward(tokens, torch.arange(7).expand(2, 7), make_attend()))
    exact = decoder.logits(decoder.forward(tokens, torch.arange(7).expand(2, 7), make_attend()))
    c = decoder.config
    keys, values = torch.zeros(2, c.layers, 2, c.kv_heads, 20, c.head_dim).unbind()

    def mix(layer, q):
        return full_attention(q, keys[layer], values[layer], lengths, backend="reference")[0]

    lengths = torch.zeros(2, dtype=torch.int64)
    step = decoder.fused_step(float8=True)
    fused = step.logits(tokens, lengths, lambda layer: (keys[layer], values[layer]), mix, backend="reference")
    lost = (rounded - exact).norm() / exact.norm()
    assert 0.01 < lost < 0.1
    assert (fused - rounded).norm() <= 0.25 * lost * exact.norm()
    for products, layer, original in zip(step._products, small.layers, decoder.layers, strict=True):
        for name in ("qkv", "out", "gate_up", "down"):
            matrix, twin = getattr(products, name), getattr(layer, name)
            if isinstance(matrix, Quantised):
                torch.testing.assert_close(matrix.values.float() * matrix.scale[:, None], twin, rtol=0, atol=0)
            else:  # out, and the first qkv
                assert matrix is twin is getattr(original, name)


def test_angle_tables_are_those_of_one_piece(tiny_model):
    decoder = tiny_model("llama").decoder
    rows = ANGLE_ROWS + 3
    wanted = cos_sin(torch.arange(rows)[None], decoder._inverse, decoder._attention_factor)  # [1, P, 1, D] each
    for table, whole in zip(decoder.angles(rows), wanted, strict=True):
        assert torch.equal(table, whole[0, :, 0, : table.shape[1]])


def test_angle_tables_outlive_longer_ones(tiny_model):
    """A captured graph holds addresses only: a table once given must stay as it is."""
    decoder = tiny_model("llama").decoder
    short = decoder.angles(10)
    kept, address = short[0].clone(), short[0].data_ptr()
    del short
    longer = decoder.angles(2000)
    assert torch.equal(longer[0][:10], kept)
    assert decoder.angles(5)[0].shape[0] == 2000
    assert any(table.data_ptr() == address for table, _ in decoder._angles)
