"""Tiny random checkpoints on disk, a plain causal attention with a cache, and the real SmolLM2 where it can be had.

Fixtures that make things return functions, since test files import no helpers.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gguf.quants import quantize
from safetensors.torch import save_file

from specdial.engine.models import ModelConfig
from specdial.engine.models.tensors import tensor_shapes
from specdial.engine.tokenizer import Tokenizer
from specdial.engine.weights import load_model
from specdial.policies.errors import UserError

HF_CLASS = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


class CausalAttend:
    """Causal attention over everything it has seen, keys and values in lists: the simplest `attend` there is."""

    def __init__(self) -> None:
        self.cache: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, layer, q, k, v):
        if layer in self.cache:
            k, v = torch.cat([self.cache[layer][0], k], 1), torch.cat([self.cache[layer][1], v], 1)
        self.cache[layer] = k, v
        queries, keys = q.shape[1], k.shape[1]
        mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)  # [T, S]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)


@pytest.fixture(scope="session")
def make_attend() -> type[CausalAttend]:
    """Call it for a fresh causal `attend` with an empty cache."""
    return CausalAttend


@pytest.fixture(scope="session")
def full_logits():
    """full_logits(decoder, tokens [B, T]) -> [B, T, V]: one causal pass from position 0."""

    def run(decoder, tokens):
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return decoder.logits(decoder.forward(tokens, positions, CausalAttend()))

    return run


def random_tensor(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Scaled so that activations and attention stay O(1): a wrong layout must show in the logits."""
    if name.endswith("norm.weight"):
        return 1 + 0.2 * torch.randn(shape, generator=generator)
    scale = 0.5 if name.endswith(".bias") else 1.0 if "embed" in name else shape[-1] ** -0.5
    return scale * torch.randn(shape, generator=generator)


def write_checkpoint(folder: Path, raw: dict, *, seed: int, shards: int) -> None:
    """config.json, safetensors and a byte tokenizer with ChatML tokens."""
    generator = torch.Generator().manual_seed(seed)
    shapes = dict(tensor_shapes(ModelConfig.from_hf(raw, name="tiny")))
    weights = {name: random_tensor(name, shape, generator) for name, shape in shapes.items()}
    (folder / "config.json").write_text(json.dumps(raw))
    if shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        place = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(weights)}
        for file in set(place.values()):
            part = {name: weights[name] for name in weights if place[name] == file}
            save_file(part, folder / file, metadata={"format": "pt"})
        index = {"metadata": {}, "weight_map": place}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    backend = Tokenizer.of_bytes()._backend
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])  # ids 256 and 257
    backend.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory) -> Callable[..., Path]:
    """tiny_checkpoint("qwen3", tied=True, shards=2, seed=1, **config) -> folder; made once for the same arguments."""
    made: dict[str, Path] = {}

    def make(architecture: str = "llama", *, tied: bool = False, shards: int = 1, seed: int = 0, **changes) -> Path:
        raw = {
            "architectures": [HF_CLASS[architecture]],
            "model_type": architecture,
            "num_hidden_layers": 3,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "intermediate_size": 96,
            "vocab_size": 288,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": tied,
            "sliding_window": None,
            "eos_token_id": 257,
            "bos_token_id": None,
            **changes,
        }
        key = json.dumps([raw, shards, seed], sort_keys=True)
        if key not in made:
            folder = tmp_path_factory.mktemp(f"tiny-{architecture}")
            write_checkpoint(folder, raw, seed=seed, shards=shards)
            made[key] = folder
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny_model(tiny_checkpoint):
    """tiny_model("llama", ...) -> LoadedModel of `tiny_checkpoint(...)` on the CPU in float32."""
    return lambda *args, **kwargs: load_model(str(tiny_checkpoint(*args, **kwargs)), device="cpu", dtype="float32")


@pytest.fixture(scope="session")
def smollm2():
    """The real SmolLM2-135M, fetched once into the user's cache; its tests carry the mark `model`."""
    try:
        return load_model("smollm2-135m", device="cpu", dtype="float32")
    except UserError as error:
        pytest.skip(str(error))


GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """llama.cpp's name of a Hugging Face tensor."""
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem, suffix = name.rsplit(".", 1)
    if stem in top:
        return f"{top[stem]}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[part]}.{suffix}"


def permuted(tensor: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's conversion script, `LlamaModel.permute`: rows of q and k for interleaved RoPE."""
    return (
        tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
    )


@pytest.fixture(scope="session")
def write_gguf():
    """write_gguf(path, config, weights, kind, extra=...): as llama.cpp's converter writes it; matrices quantised."""

    def write(path: Path, config: ModelConfig, weights, kind=gguf.GGMLQuantizationType.F32, *, extra=None):
        architecture = "llama" if config.architecture == "mistral" else config.architecture
        writer = gguf.GGUFWriter(path, architecture)
        writer.add_name(config.name)
        writer.add_block_count(config.layers)
        writer.add_context_length(config.max_context_tokens)
        writer.add_embedding_length(config.hidden)
        writer.add_feed_forward_length(config.intermediate)
        writer.add_head_count(config.heads)
        writer.add_head_count_kv(config.kv_heads)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_layer_norm_rms_eps(config.norm_eps)
        writer.add_rope_freq_base(config.rope.theta)
        characters = [Tokenizer.of_bytes()._backend.id_to_token(i) for i in range(256)]
        tokens = [*characters, "<|im_start|>", "<|im_end|>", characters[0] + characters[1]]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(tokens)
        writer.add_token_types([1] * 256 + [3, 3, 1])
        writer.add_token_merges([f"{characters[0]} {characters[1]}"])
        writer.add_eos_token_id(257)
        if extra:
            extra(writer)
        for name, tensor in weights.items():
            values = tensor.numpy()
            if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
                values = permuted(values, config.heads if ".q_proj." in name else config.kv_heads)
            quantised = kind if values.ndim == 2 else gguf.GGMLQuantizationType.F32
            writer.add_tensor(gguf_name(name), quantize(values, quantised), raw_dtype=quantised)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


@pytest.fixture(scope="module")
def one_thread():
    """Tiny models are faster so, and far faster beside other work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_configure(config) -> None:
    """In Triton's interpreter a kernel's own functions need not have the language patched again, call by call.

    The interpreter looks through the whole language at every call of a device function, `tl.sum` included: a quarter
    of its time, though the launch has patched it already.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    import triton.language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang

    def patch_once(fn):
        seen = [module for module in (tl, tl.core) if any(module is value for value in fn.__globals__.values())]
        if seen and not any(tl.core.is_builtin(module.load) for module in seen):
            return getattr(interpreter, "_LangPatchScope", object)()
        return patch(fn)

    interpreter._patch_lang = patch_once
    _check_addresses(interpreter)


def _check_addresses(interpreter) -> None:
    """In the interpreter a kernel fails at its first access outside the tensors it was given; on a GPU it might not."""
    extents = []  # [begin, end) of every storage of the launch
    Executor, Builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    on_host, load, store = Executor._init_args_hst, Builder.create_masked_load, Builder.create_masked_store

    def noting(self, args, kwargs):
        found = on_host(self, args, kwargs)
        extents.clear()
        for arg in (*found[0], *found[1].values()):
            tensor = getattr(arg, "base", arg)
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                extents.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
        return found

    def check(pointers, mask) -> None:
        size = pointers.get_element_ty().primitive_bitwidth // 8 or 1
        address = pointers.data[np.broadcast_to(mask.data, pointers.data.shape)].astype(np.uint64)
        outside = np.ones(address.shape, dtype=bool)
        for begin, end in extents:
            outside &= (address < begin) | (address + np.uint64(size) > end)
        if outside.any():
            raise IndexError(f"{outside.sum()} of {outside.size} addresses lie in no tensor of the launch")

    def checked_load(self, ptrs, mask, *rest, **more):
        check(ptrs, mask)
        return load(self, ptrs, mask, *rest, **more)

    def checked_store(self, ptrs, value, mask, *rest, **more):
        check(ptrs, mask)
        return store(self, ptrs, value, mask, *rest, **more)

    Executor._init_args_hst = noting
    Builder.create_masked_load, Builder.create_masked_store = checked_load, checked_store


@pytest.fixture
def in_interpreter():
    """in_interpreter(test file, names) runs case files beside it in a process that chose Triton's interpreter.

    It must be chosen before the kernels are imported.
    """

    def run(test_file: str, *names: str) -> None:
        pytest.importorskip("triton")
        files = [str(Path(test_file).with_name(name)) for name in names]
        without = ["-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-p", "no:xdist"]  # they take long to import
        command = [sys.executable, "-m", "pytest", "-q", "--import-mode=importlib", *without, *files]
        environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
        assert " passed" in done.stdout
        assert "skipped" not in done.stdout

    return run
