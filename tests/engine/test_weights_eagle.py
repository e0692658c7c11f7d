"""EAGLE-3 checkpoints: every layout that is published, what is refused and how it is said, and back to disk again."""

import json
import pickle
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdial.engine.models import RopeConfig
from specdial.engine.models.eagle import EagleHead, HeadConfig, HeadWeights, default_taps, head_shapes
from specdial.engine.weights.eagle import load_head, save_head
from specdial.policies.errors import UserError


@pytest.fixture(scope="module")
def decoder(tiny_model):
    return tiny_model("llama").decoder


def random_head(decoder, *, draft_vocab=200):
    c = decoder.config
    layer = replace(c, layers=1, qkv_bias=False, qk_norm=False, tied_embeddings=False)
    config = HeadConfig(layer, c.hidden, draft_vocab, default_taps(c.layers))
    generator = torch.Generator().manual_seed(1)
    weights = {n: torch.randn(s, generator=generator) * s[-1] ** -0.5 for n, s in head_shapes(config).items()}
    ids = torch.randperm(c.vocab, generator=generator)[:draft_vocab].sort().values
    return EagleHead(config, HeadWeights(**weights), ids, decoder.embedding)


@pytest.fixture
def folder(decoder, tmp_path):
    save_head(tmp_path / "head", random_head(decoder))
    return tmp_path / "head"


def logits(head):
    """Of a few rows that attend to themselves alone."""
    generator = torch.Generator().manual_seed(5)
    taps = torch.randn(3, 1, 4, head.config.target_hidden, generator=generator)
    tokens = torch.tensor([[3, 250, 11, 287]])
    group = head.config.layer.heads // head.config.layer.kv_heads

    def alone(q, k, v):
        return v.repeat_interleave(group, 2)

    return head.target_logits(head.forward(tokens, head.project(taps), torch.arange(4)[None], alone))


def changed(folder, *, config=None, tensors=None):
    """The same checkpoint with other settings, or with what `tensors` makes of its tensors."""
    raw = json.loads((folder / "config.json").read_text())
    raw.update(config or {})
    (folder / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))
    if tensors is not None:
        save_file(tensors(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    return folder


def test_saved_and_loaded_is_the_same_head(decoder, folder):
    head, again = random_head(decoder), load_head(folder, decoder)
    assert again.config == replace(head.config, layer=replace(head.config.layer, **again_names(again)))
    assert torch.equal(again.token_ids, head.token_ids)
    assert all(torch.equal(getattr(again.weights, n), getattr(head.weights, n)) for n in HeadWeights.__slots__)
    assert torch.equal(logits(again), logits(head))
    assert len(again.digest) == 64


def again_names(head):
    """What a config does not carry over: names and end marks, which a head has no use for."""
    c = head.config.layer
    return {"name": c.name, "architecture": c.architecture, "bos_id": c.bos_id, "eos_ids": c.eos_ids}


def test_public_names_and_the_mapping(decoder, folder):
    tensors = load_file(folder / "model.safetensors")
    assert set(tensors) == {
        "fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d",
        *(f"midlayer.self_attn.{p}_proj.weight" for p in "qkvo"),
        *(f"midlayer.mlp.{p}_proj.weight" for p in ("gate", "up", "down")),
        *(f"midlayer.{p}.weight" for p in ("hidden_norm", "input_layernorm", "post_attention_layernorm")),
    }  # fmt: skip
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (64, 128)
    ids = torch.arange(200) + tensors["d2t"]
    assert torch.equal(tensors["t2d"].nonzero()[:, 0], ids)


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name.replace("midlayer.", "layers.0."),
        lambda name: name.replace("midlayer.", ""),
        lambda name: f"model.{name}" if name not in ("d2t", "t2d") else name,
        lambda name: f"draft_model.{name}",
    ],
)
def test_other_prefixes_are_the_same_head(decoder, folder, rename):
    expected = logits(load_head(folder, decoder))
    other = changed(folder, tensors=lambda t: {rename(name): tensor for name, tensor in t.items()})
    assert torch.equal(logits(load_head(other, decoder)), expected)


def test_matrices_in_8_bits(decoder, tmp_path, folder):
    """Half a step off at most, a third of the bytes, and refused where the scales are not its own."""
    exact = random_head(decoder)
    save_head(tmp_path / "small", exact, int8=True)
    read = load_head(tmp_path / "small", decoder)
    for name in HeadWeights.__slots__:
        got, wanted = getattr(read.weights, name), getattr(exact.weights, name)
        step = wanted.abs().amax(-1, keepdim=True) / 127 if wanted.dim() == 2 else 0.0
        assert ((got - wanted).abs() <= 0.5001 * step + 1e-7).all()
    assert torch.equal(read.token_ids, exact.token_ids)
    sizes = [(place / "model.safetensors").stat().st_size for place in (tmp_path / "small", folder)]
    assert sizes[0] < 0.35 * sizes[1]
    changed(tmp_path / "small", tensors=lambda t: t | {"fc.weight_scale": torch.ones(3, 1)})
    with pytest.raises(UserError, match=r"fc\.weight_scale is not the scales of an 8-bit fc\.weight"):
        load_head(tmp_path / "small", decoder)


def test_pickled_tensors_are_read_and_anything_else_refused(decoder, folder):
    expected = logits(load_head(folder, decoder))
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert torch.equal(logits(load_head(folder, decoder)), expected)

    class Trap:
        def __reduce__(self):
            return (pytest.fail, ("the file was executed",))

    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": Trap()}, protocol=2))
    with pytest.raises(UserError, match="holds more than tensors"):
        load_head(folder, decoder)


def test_layers_that_are_read(decoder, folder):
    """Under eagle_config outputs of layers are counted, at the top level inputs; nothing said: 2, L//2, L-3."""
    assert load_head(folder, decoder).config.taps == (2, 1, 0)
    nested = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 0]}}
    assert load_head(changed(folder, config=nested), decoder).config.taps == (1, 2, 1)
    top = {"eagle_config": None, "aux_hidden_state_layer_ids": [0, 1, 2]}
    assert load_head(changed(folder, config=top), decoder).config.taps == (0, 1, 2)
    with pytest.raises(UserError, match=r"reads layers \[1, 2, 3\]"):
        load_head(changed(folder, config={"aux_hidden_state_layer_ids": [1, 2, 3]}), decoder)
    assert load_head(changed(folder, config={"aux_hidden_state_layer_ids": None}), decoder).config.taps == (2, 1, 0)


def test_rope_is_its_own_or_else_eagles_and_follows_a_targets_yarn(decoder, folder):
    def beside(rope):
        target = decoder.__class__(
            replace(decoder.config, rope=rope), decoder.embedding, [], decoder.norm, decoder.head
        )
        return load_head(folder, target)

    def of_head(**config):
        changed(folder, config={"rope_theta": None, "rope_scaling": None} | config)

    yarn = RopeConfig(theta=5e5, kind="yarn", factor=4.0, original_context_tokens=128)
    of_head(rope_theta=2e4)
    assert (beside(yarn).config.layer.rope.kind, beside(yarn).config.layer.rope.theta) == ("default", 2e4)
    of_head(rope_theta=5e5)
    assert beside(yarn).config.layer.rope == yarn, "trained before the target was extended"
    assert beside(replace(yarn, kind="linear")).config.layer.rope.kind == "default"
    head = beside(yarn)
    save_head(folder, head)
    assert load_head(folder, decoder).config.layer.rope == yarn
    of_head()
    assert (beside(yarn).config.layer.rope.kind, beside(yarn).config.layer.rope.theta) == ("default", 1e4)
    factors = RopeConfig(theta=5e5, kind="factors", freq_factors=(1.0,) * 8)
    layer = replace(head.config.layer, rope=factors)
    save_head(folder, EagleHead(replace(head.config, layer=layer), head.weights, head.token_ids, head.embedding))
    assert beside(factors).config.layer.rope == factors


def test_an_embedding_of_its_own(decoder, folder):
    own = torch.randn(288, 64, generator=torch.Generator().manual_seed(3))
    head = load_head(changed(folder, tensors=lambda t: {**t, "embed_tokens.weight": own}), decoder)
    assert torch.equal(head.embedding, own)


def without(*names):
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


def test_without_a_reduced_vocabulary_no_mapping_is_needed(decoder, tmp_path):
    save_head(tmp_path, random_head(decoder, draft_vocab=288))
    head = load_head(changed(tmp_path, tensors=without("d2t", "t2d")), decoder)
    assert head.token_ids.tolist() == list(range(288))


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({}, without("d2t"), "d2t is missing, and 200 of 288"),
        ({}, without("fc.weight"), r"tensor fc\.weight is missing"),
        ({}, lambda t: {**t, "fc.weight": t["fc.weight"][:, :128].contiguous()}, r"fc\.weight has shape \(64, 128\)"),
        (
            {},
            lambda t: {**t, "midlayer.self_attn.k_proj.weight": torch.zeros(16, 128)},
            r"midlayer\.self_attn\.k_proj\.weight has shape \(16, 128\), config and target say \(32, 128\)",
        ),
        ({}, lambda t: {**t, "midlayer.self_attn.q_norm.weight": torch.zeros(16)}, r"q_norm is unexpected"),
        ({}, lambda t: {**t, "d2t": t["d2t"] + 200}, "d2t does not name 200 tokens of 288"),
        ({}, lambda t: {**t, "t2d": ~t["t2d"]}, "t2d and d2t name different tokens"),
        ({}, lambda t: {**t, "lm_head.weight": t["lm_head.weight"].to(torch.int8)}, "lm_head.weight holds torch.int8"),
        ({"vocab_size": 32000}, None, "its vocabulary is 32000"),
        ({"hidden_size": 32}, None, "its width is 32|has shape"),
        ({"target_hidden_size": 4096}, None, "reads states 4096 wide"),
        ({"norm_before_residual": True}, None, "norm_before_residual are not supported"),
        ({"attention_bias": True}, None, "attention_bias=True is not supported"),
        ({"draft_vocab_size": 500}, None, "draft_vocab_size is 500, of 288"),
    ],
)  # fmt: skip
def test_what_is_refused(decoder, folder, config, tensors, message):
    with pytest.raises(UserError, match=message):
        load_head(changed(folder, config=config, tensors=tensors), decoder)


def test_files_that_are_missing_or_damaged(decoder, folder, tmp_path):
    with pytest.raises(UserError, match="no EAGLE head at"):
        load_head(tmp_path / "nowhere", decoder)
    (folder / "model.safetensors").write_bytes(b"short")
    with pytest.raises(UserError, match="truncated or damaged"):
        load_head(folder, decoder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="neither"):
        load_head(folder, decoder)
    (folder / "pytorch_model.bin").write_bytes(b"PK\x03\x04 not an archive")
    with pytest.raises(UserError, match=r"damaged|more than tensors"):
        load_head(folder, decoder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(UserError, match="does not hold an object"):
        load_head(folder, decoder)
