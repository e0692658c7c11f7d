"""Bad model files and names: each a UserError of one line that names what is wrong."""

import json
import shutil
import struct

import pytest

from specdial.engine.models import ModelConfig
from specdial.engine.weights import load_model
from specdial.engine.weights.gguf_header import GgufFile
from specdial.engine.weights.hf import SafetensorsWeights, read_config
from specdial.policies.errors import UserError


def refused(source, *words):
    with pytest.raises(UserError) as caught:
        load_model(str(source), device="cpu")
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text
    return text


@pytest.fixture
def folder(tiny_checkpoint, tmp_path):
    """A copy of a tiny Llama folder, to be damaged."""
    return shutil.copytree(tiny_checkpoint("llama", shards=2), tmp_path / "model")


@pytest.fixture
def gguf_path(tiny_checkpoint, write_gguf, tmp_path):
    """A tiny GGUF file, to be damaged."""
    checkpoint = tiny_checkpoint("llama")
    return write_gguf(tmp_path / "tiny.gguf", read_config(checkpoint, "tiny"), dict(SafetensorsWeights(checkpoint)))


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v != "DROP"}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "unknown architecture GPT2LMHeadModel"),
        ({"architectures": "DROP"}, "unknown architecture (none)"),
        ({"hidden_size": "DROP"}, "hidden_size is None"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_attention_heads": 3}, "do not make a decoder"),
        ({"num_hidden_layers": 10**7}, "do not make a decoder"),
        ({"rms_norm_eps": "tiny"}, "wrong kind (could not convert string to float: 'tiny')"),
        ({"rope_scaling": ["yarn"]}, "wrong kind"),
        ({"num_key_value_heads": "two"}, "kv_heads is 'two'"),
        ({"eos_token_id": "end"}, "eos_token_id"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -2}}, "finite and positive"),
        ({"partial_rotary_factor": 0.5}, "partial RoPE"),
        ({"vocab_size": 300}, "model.embed_tokens.weight has shape (288, 64)"),
        ({"num_hidden_layers": 2}, "model.layers.2.input_layernorm.weight (and 8 more) is unexpected"),
        ({"tie_word_embeddings": "DROP", "num_hidden_layers": 4}, "model.layers.3.input_layernorm.weight (and 8 more)"),
    ],
)
def test_config_that_does_not_fit(changes, words, folder):
    edit_config(folder, **changes)
    refused(folder, words)


def test_folder_without_config(tmp_path):
    refused(tmp_path, "config.json")


def test_config_that_is_not_json(folder):
    (folder / "config.json").write_text("{")
    refused(folder, "config.json is not JSON")


def test_tokenizer_missing_and_damaged(folder):
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    refused(folder, "cannot read tokenizer")
    (folder / "tokenizer.json").unlink()
    refused(folder, "no tokenizer at", "tokenizer.json")


def test_shard_missing_and_truncated(folder):
    shard = sorted(folder.glob("model-*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-100])
    refused(folder, shard.name, "truncated or damaged")
    shard.unlink()
    refused(folder, shard.name, "missing")


def test_pickled_checkpoint(folder):
    for path in folder.glob("model*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    refused(folder, "no safetensors file")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("nothing-here", "no model at 'nothing-here'"),
        ("nothing/here.gguf", "no model file nothing/here.gguf"),
        ("shape:gpt-5", "unknown shape 'gpt-5'"),
        ("wheel:other", "no wheel is known for 'other'"),
    ],
)
def test_names_that_lead_nowhere(source, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(source, words)


def test_hub_offline(monkeypatch, tmp_path):
    import huggingface_hub

    def offline(*args, **kwargs):
        raise OSError("no route\nto the hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    monkeypatch.chdir(tmp_path)
    refused("owner/model", "no folder 'owner/model'", "no route to the hub", "model.source=PATH")


@pytest.mark.parametrize(("device", "dtype", "words"), [("warp", "auto", "'warp'"), ("cpu", "int3", "'int3'")])
def test_device_and_dtype(device, dtype, words):
    with pytest.raises(UserError, match=words):
        load_model("shape:smollm2-135m", device=device, dtype=dtype)


def test_not_gguf(tmp_path):
    for name, content in (("a.gguf", b"GGML" + bytes(64)), ("b.gguf", b""), ("c.gguf", b"GGUF\x09\0\0\0" + bytes(64))):
        (tmp_path / name).write_bytes(content)
        refused(tmp_path / name, name)


@pytest.mark.parametrize("keep", [3, 20, 100, 3000, 0.5, 0.9, -1])
def test_truncated_gguf(keep, gguf_path):
    data = gguf_path.read_bytes()
    kept = keep if isinstance(keep, int) else int(len(data) * keep)
    gguf_path.write_bytes(data[:kept])
    refused(gguf_path, "tiny.gguf")


@pytest.mark.parametrize("at", [8, 16])  # where the header counts its tensors and its keys
def test_absurd_counts_allocate_nothing(at, gguf_path):
    data = bytearray(gguf_path.read_bytes())
    struct.pack_into("<Q", data, at, 2**60)
    gguf_path.write_bytes(data)
    refused(gguf_path, "truncated or damaged")


def test_any_flipped_header_byte_is_an_error_or_a_model(gguf_path):
    """No damage in the header gives anything but a UserError."""
    data = gguf_path.read_bytes()
    outcomes, messages = set(), []
    for at in range(4, 2600, 7):
        gguf_path.write_bytes(data[:at] + bytes([data[at] ^ 0xA5]) + data[at + 1 :])
        try:
            load_model(str(gguf_path), device="cpu", dtype="float32")
            outcomes.add("model")
        except UserError as error:
            outcomes.add("error")
            messages.append(str(error))
    assert outcomes == {"model", "error"}
    assert [m for m in messages if "\n" in m] == []


def test_gguf_of_another_architecture(tiny_checkpoint, write_gguf, tmp_path):
    checkpoint = tiny_checkpoint("llama")
    path = write_gguf(tmp_path / "tiny.gguf", read_config(checkpoint, "tiny"), dict(SafetensorsWeights(checkpoint)))
    path.write_bytes(path.read_bytes().replace(b"llama", b"mamba"))
    refused(path, "unknown architecture 'mamba'")


def test_gguf_with_a_tensor_missing(tiny_checkpoint, write_gguf, tmp_path):
    checkpoint = tiny_checkpoint("llama")
    weights = dict(SafetensorsWeights(checkpoint))
    del weights["model.layers.1.mlp.down_proj.weight"]
    path = write_gguf(tmp_path / "tiny.gguf", read_config(checkpoint, "tiny"), weights)
    refused(path, "model.layers.1.mlp.down_proj.weight is missing")


def test_gguf_without_tokenizer(gguf_path):
    gguf_path.write_bytes(gguf_path.read_bytes().replace(b"tokenizer.ggml.tokens", b"tokenizer.ggml.tokenz"))
    refused(gguf_path, "holds no tokenizer")


def test_gguf_values_are_checked_against_the_file(gguf_path):
    file = GgufFile(gguf_path)
    ends = [tensor.offset_bytes + tensor.size_bytes for tensor in file.tensors.values()]
    assert max(ends) <= gguf_path.stat().st_size


def test_context_beyond_the_model(tiny_checkpoint):
    config = read_config(tiny_checkpoint("mistral", sliding_window=100), "tiny")
    config.check_context(100)
    with pytest.raises(UserError, match=r"101 tokens exceed tiny's sliding window .* of 100"):
        config.check_context(101)
    with pytest.raises(UserError, match="exceed tiny's context of 512"):
        read_config(tiny_checkpoint("llama"), "tiny").check_context(513)


@pytest.mark.parametrize("value", [float("nan"), 0.0, -1e-5])
def test_norm_epsilon_out_of_range(value, tiny_checkpoint):
    raw = json.loads((tiny_checkpoint("llama") / "config.json").read_text())
    with pytest.raises(UserError):
        ModelConfig.from_hf(raw | {"rms_norm_eps": value}, name="tiny")
