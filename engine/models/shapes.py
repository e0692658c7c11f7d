"""Named shapes of public models, for random weights: what a decode costs depends on these numbers alone.

Each is copied from its model's config.json. Leaves out the weights and the tokenizers.
"""

from specdial.engine.models.config import ModelConfig, RopeConfig

_LLAMA31 = RopeConfig(theta=500000.0, kind="llama3", factor=8.0, original_context_tokens=8192)
_LLAMA32 = RopeConfig(theta=500000.0, kind="llama3", factor=32.0, original_context_tokens=8192)
_QWEN25 = RopeConfig(theta=1000000.0)
# Qwen2.5's own long-context setting: 32768 tokens trained, times 4 by YaRN.
_QWEN25_YARN = RopeConfig(theta=1000000.0, kind="yarn", factor=4.0, original_context_tokens=32768)


def _qwen25(name: str, sizes: tuple[int, int, int, int, int], *, vocab: int, small: bool = False) -> ModelConfig:
    """sizes: layers, hidden, heads, kv_heads, intermediate. small: tied embeddings and no YaRN."""
    layers, hidden, heads, kv_heads, intermediate = sizes
    return ModelConfig(
        name=name,
        architecture="qwen2",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        intermediate=intermediate,
        vocab=vocab,
        max_context_tokens=32768 if small else 131072,
        norm_eps=1e-6,
        rope=_QWEN25 if small else _QWEN25_YARN,
        qkv_bias=True,
        tied_embeddings=small,
    )


SHAPES = {
    "llama-3.1-8b": ModelConfig(
        name="llama-3.1-8b",
        architecture="llama",
        layers=32,
        hidden=4096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        intermediate=14336,
        vocab=128256,
        max_context_tokens=131072,
        norm_eps=1e-5,
        rope=_LLAMA31,
    ),
    "llama-3.2-1b": ModelConfig(
        name="llama-3.2-1b",
        architecture="llama",
        layers=16,
        hidden=2048,
        heads=32,
        kv_heads=8,
        head_dim=64,
        intermediate=8192,
        vocab=128256,
        max_context_tokens=131072,
        norm_eps=1e-5,
        rope=_LLAMA32,
        tied_embeddings=True,
    ),
    "qwen2.5-7b": _qwen25("qwen2.5-7b", (28, 3584, 28, 4, 18944), vocab=152064),
    "qwen2.5-14b": _qwen25("qwen2.5-14b", (48, 5120, 40, 8, 13824), vocab=152064),
    "qwen2.5-32b": _qwen25("qwen2.5-32b", (64, 5120, 40, 8, 27648), vocab=152064),
    "qwen2.5-72b": _qwen25("qwen2.5-72b", (80, 8192, 64, 8, 29568), vocab=152064),
    "qwen2.5-coder-0.5b": _qwen25("qwen2.5-coder-0.5b", (24, 896, 14, 2, 4864), vocab=151936, small=True),
    "qwen2.5-coder-1.5b": _qwen25("qwen2.5-coder-1.5b", (28, 1536, 12, 2, 8960), vocab=151936, small=True),
    "smollm2-135m": ModelConfig(
        name="smollm2-135m",
        architecture="llama",
        layers=30,
        hidden=576,
        heads=9,
        kv_heads=3,
        head_dim=64,
        intermediate=1536,
        vocab=49152,
        max_context_tokens=8192,
        norm_eps=1e-5,
        rope=RopeConfig(theta=100000.0),
        tied_embeddings=True,
    ),
}
