"""GGUF files written as llama.cpp's converter does, read back, against the Hugging Face folder they came from."""

import struct

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize

from specdial.engine.models import Decoder, RopeConfig
from specdial.engine.models.rope import inverse_frequencies
from specdial.engine.weights import gguf_header, load_model
from specdial.engine.weights.gguf_header import GgufFile
from specdial.engine.weights.hf import SafetensorsWeights, read_config
from specdial.policies.errors import UserError

TOKENS = torch.randint(0, 288, (2, 64), generator=torch.Generator().manual_seed(5))
QUANTISED = [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1]


def source(folder):
    return read_config(folder, "tiny"), dict(SafetensorsWeights(folder))


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_f32_gives_the_folders_logits(architecture, tied, tiny_checkpoint, write_gguf, full_logits, tmp_path):
    folder = tiny_checkpoint(architecture, tied=tied)
    path = write_gguf(tmp_path / "tiny.gguf", *source(folder))
    model, wanted = load_model(str(path), device="cpu", dtype="float32"), load_model(str(folder), device="cpu")
    assert (model.origin, model.random, wanted.origin) == ("gguf", False, "hf")
    assert model.config.tied_embeddings is tied
    assert model.config.eos_ids == (257,)
    # The epsilon is stored as float32 in GGUF and as a decimal in JSON, hence not bit for bit.
    got = full_logits(model.decoder, TOKENS)
    torch.testing.assert_close(got, full_logits(wanted.decoder, TOKENS), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_quantised_gives_its_dequantised_logits(kind, tiny_checkpoint, write_gguf, full_logits, tmp_path):
    config, weights = source(tiny_checkpoint("llama"))
    path = write_gguf(tmp_path / "tiny.gguf", config, weights, kind)
    matrices = {name: w for name, w in weights.items() if w.ndim == 2}
    lossy = {n: torch.from_numpy(dequantize(quantize(w.numpy(), kind), kind)) for n, w in matrices.items()}
    wanted = full_logits(Decoder.from_weights(config, weights | lossy), TOKENS)
    exact = full_logits(Decoder.from_weights(config, weights), TOKENS)
    got = full_logits(load_model(str(path), device="cpu", dtype="float32").decoder, TOKENS)
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)
    assert (got - exact).abs().max() > 1e-4  # it was quantised


def test_rope_factors_of_llama31(tiny_checkpoint, write_gguf, full_logits, tmp_path):
    """llama.cpp stores Llama 3.1's scaling as divisors of the frequencies, computed as its converter does."""
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    folder = tiny_checkpoint("llama", rope_theta=500000.0, rope_scaling={"rope_type": "llama3", **scaling})
    config, weights = source(folder)
    divisors = []
    for i in range(0, config.head_dim, 2):
        wavelength = 2 * np.pi * 500000.0 ** (i / config.head_dim)
        if wavelength < 64 / 4.0:
            divisors.append(1.0)
        elif wavelength > 64 / 1.0:
            divisors.append(8.0)
        else:
            smooth = (64 / wavelength - 1.0) / (4.0 - 1.0)
            divisors.append(1 / ((1 - smooth) / 8.0 + smooth))
    assert len(set(divisors)) > 2

    def extra(writer):
        writer.add_tensor("rope_freqs.weight", np.array(divisors, dtype=np.float32))

    path = write_gguf(tmp_path / "tiny.gguf", config, weights, extra=extra)
    got = full_logits(load_model(str(path), device="cpu", dtype="float32").decoder, TOKENS)
    wanted = full_logits(load_model(str(folder), device="cpu", dtype="float32").decoder, TOKENS)
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["yarn", "linear"])
def test_rope_scaling_keys(kind, tiny_checkpoint, write_gguf, full_logits, tmp_path):
    original = {"original_max_position_embeddings": 32} if kind == "yarn" else {}
    folder = tiny_checkpoint("qwen2", rope_scaling={"rope_type": kind, "factor": 4.0, **original})
    config, weights = source(folder)

    def extra(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(4.0)
        if kind == "yarn":
            writer.add_rope_scaling_orig_ctx_len(32)

    path = write_gguf(tmp_path / "tiny.gguf", config, weights, extra=extra)
    got = full_logits(load_model(str(path), device="cpu", dtype="float32").decoder, TOKENS)
    wanted = full_logits(load_model(str(folder), device="cpu", dtype="float32").decoder, TOKENS)
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)


def dequantisable():
    kinds = []
    for kind in Kind:
        try:
            block, size = gguf.GGML_QUANT_SIZES[kind]
            dequantize(np.zeros((1, size), dtype=np.uint8), kind)
            kinds.append((kind, block, size))
        except (NotImplementedError, KeyError, TypeError):
            continue
    assert {Kind.Q4_K, Kind.Q6_K, Kind.IQ4_XS, Kind.MXFP4} <= {kind for kind, *_ in kinds}
    return kinds


@pytest.mark.parametrize(("kind", "block", "size"), dequantisable(), ids=lambda v: getattr(v, "name", None))
def test_every_type_of_the_library_loads(kind, block, size, tmp_path, monkeypatch):
    """Random bytes are a valid block of any type; read in pieces of a few rows they give what the library gives."""
    rows, width_blocks = 13, 2
    raw = np.random.default_rng(1).integers(0, 256, (rows, width_blocks * size), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_tensor("w", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    monkeypatch.setattr("specdial.engine.weights.gguf_header._CHUNK_ELEMENTS", 4 * width_blocks * block)
    with np.errstate(all="ignore"):
        got = GgufFile(tmp_path / "one.gguf").load("w")
        wanted = dequantize(raw, kind)
    assert got.shape == (rows, width_blocks * block)
    np.testing.assert_array_equal(got.numpy(), np.asarray(wanted, dtype=np.float32))


def test_header_reads_what_the_writer_wrote(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "meta.gguf", "llama")
    wanted = {"a.int": -3, "a.text": "naïve 🙂", "a.list": ["x", "", "語"], "a.numbers": [1, 2, 3], "a.flag": True}
    writer.add_int32("a.int", -3)
    writer.add_string("a.text", "naïve 🙂")
    writer.add_array("a.list", ["x", "", "語"])
    writer.add_array("a.numbers", [1, 2, 3])
    writer.add_bool("a.flag", True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = GgufFile(tmp_path / "meta.gguf").metadata
    assert {key: metadata[key] for key in wanted} == wanted


def test_yarn_attention_factor_multiplies_in_gguf():
    """A replaced factor reaches cos and sin; without one it is the paper's 0.1 ln(factor) + 1."""
    plain = RopeConfig(kind="yarn", factor=4.0, original_context_tokens=32)
    assert inverse_frequencies(plain, 16)[1] == pytest.approx(1.1386294)
    replaced = RopeConfig(kind="yarn", factor=4.0, original_context_tokens=32, attention_factor=0.5)
    assert inverse_frequencies(replaced, 16)[1] == 0.5


def header(tmp_path, tensors, keys, body=b"", version=3):
    path = tmp_path / "made.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + body)
    return path


def named(text):
    return struct.pack("<Q", len(text.encode())) + text.encode()


def placed(name, shape, kind, offset):
    """A tensor's entry; shape in torch's order."""
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
    return named(name) + dims + struct.pack("<IQ", int(kind), offset)


@pytest.mark.parametrize(("tensors", "keys", "needed"), [(2, 0, 48), (0, 3, 36), (1, 1, 36)])
def test_counts_are_held_against_the_file_before_anything_is_read(tmp_path, tensors, keys, needed):
    """A tensor takes 24 bytes at least, a key 12."""
    with pytest.raises(UserError, match=f"{needed} bytes declared at 24, the file has {23 + needed}"):
        GgufFile(header(tmp_path, tensors, keys, bytes(needed - 1)))
    with pytest.raises(UserError) as caught:
        GgufFile(header(tmp_path, tensors, keys, b"\xff" * needed))
    assert f"{needed} bytes declared at 24" not in str(caught.value)


def test_a_header_by_hand(tmp_path):
    values = (
        (4, struct.pack("<I", 7), 7), (8, named("é"), "é"), (7, b"\x01", True), (1, b"\xfe", -2),
        (9, struct.pack("<IQ3h", 3, 3, 1, -2, 3), [1, -2, 3]),
        (9, struct.pack("<IQ", 8, 2) + named("a") + named("bc"), ["a", "bc"]),
    )  # fmt: skip
    body = b"".join(named(f"k{i}") + struct.pack("<I", kind) + raw for i, (kind, raw, _) in enumerate(values))
    body += named("general.alignment") + struct.pack("<II", 4, 64)
    body += placed("one", (2, 3), Kind.F32, 0) + placed("two", (1, 2, 1, 32), Kind.Q8_0, 64)
    start = -(-(24 + len(body)) // 64) * 64
    one, two = np.arange(6, dtype=np.float32), np.arange(64, dtype=np.float32).reshape(2, 32)
    data = one.tobytes().ljust(64, b"\0") + quantize(two, Kind.Q8_0).tobytes()
    path = header(tmp_path, 2, len(values) + 1, body.ljust(start - 24, b"\0") + data)
    file = GgufFile(path)
    assert [file.metadata[f"k{i}"] for i in range(len(values))] == [value for _, _, value in values]
    assert {name: (t.shape, t.offset_bytes, t.size_bytes) for name, t in file.tensors.items()} == {
        "one": ((2, 3), start, 24), "two": ((1, 2, 1, 32), start + 64, 68),
    }  # fmt: skip
    assert file.load("one").tolist() == one.reshape(2, 3).tolist()
    assert file.load("two", torch.float16).dtype == torch.float16
    assert torch.allclose(file.load("two").view(2, 32), torch.from_numpy(two), atol=0.3)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match=f"tensor two ends at byte {start + 132} of {start + 131}"):
        GgufFile(path)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (placed("x", (1,) * 5, Kind.F32, 0), "tensor x has 5 dimensions"),
        (placed("x", (), Kind.F32, 0), "odd"),
        (placed("x", (0, 4), Kind.F32, 0), "odd"),
        (placed("x", (4, 33), Kind.Q8_0, 0), "odd"),
        (placed("x", (1,), 99, 0), "unknown type 99"),
        (named("\x00")[:-1] + b"\xff" + bytes(40), "is not UTF-8"),
    ],
)
def test_tensors_that_cannot_be_are_named(tmp_path, body, says):
    with pytest.raises(UserError, match=says):
        GgufFile(header(tmp_path, 1, 0, body + bytes(200)))


@pytest.mark.parametrize("alignment", [(4, "<I", 0), (5, "<i", -32), (6, "<f", 32.0)])
def test_alignment_is_a_whole_number_above_zero(tmp_path, alignment):
    kind, code, value = alignment
    body = named("general.alignment") + struct.pack("<I", kind) + struct.pack(code, value)
    with pytest.raises(UserError, match="alignment"):
        GgufFile(header(tmp_path, 0, 1, body))
    assert GgufFile(header(tmp_path, 0, 1, named("general.alignment") + struct.pack("<II", 4, 1))).tensors == {}


def test_no_more_rows_than_a_chunk_holds_are_dequantised_at_once(tmp_path, monkeypatch):
    body = placed("x", (5, 32), Kind.Q8_0, 0)
    rows = np.arange(160, dtype=np.float32).reshape(5, 32)
    start = -(-(24 + len(body)) // 32) * 32
    file = GgufFile(header(tmp_path, 1, 0, body.ljust(start - 24, b"\0") + quantize(rows, Kind.Q8_0).tobytes()))
    sizes = []
    monkeypatch.setattr(gguf_header, "dequantize", lambda raw, kind: (sizes.append(len(raw)), dequantize(raw, kind))[1])
    for chunk, wanted in ((64, [2, 2, 1]), (1, [1] * 5), (1 << 22, [5])):
        monkeypatch.setattr(gguf_header, "_CHUNK_ELEMENTS", chunk)
        assert torch.allclose(file.load("x"), torch.from_numpy(rows), atol=1.0)
        assert sizes == wanted
        sizes.clear()


@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_versions_2_and_3_are_read(tmp_path, version):
    path = header(tmp_path, 0, 0, version=version)
    if version in (2, 3):
        assert (GgufFile(path).metadata, GgufFile(path).tensors) == ({}, {})
    else:
        with pytest.raises(UserError, match=f"is GGUF version {version}; convert the model"):
            GgufFile(path)


@pytest.mark.parametrize(("item", "count", "needed"), [(8, 3, 24), (3, 5, 10), (12, 2, 16)])
def test_arrays_are_held_against_the_file_before_they_are_read(tmp_path, item, count, needed):
    """Of a text its length alone counts, 8 bytes."""
    body = named("k") + struct.pack("<IIQ", 9, item, count)
    with pytest.raises(UserError, match=f"{needed} bytes declared at {24 + len(body)}"):
        GgufFile(header(tmp_path, 0, 1, body + bytes(needed - 1)))
    assert len(GgufFile(header(tmp_path, 0, 1, body + bytes(needed))).metadata["k"]) == count
