"""The tensors a config calls for, under Hugging Face's names, and those a checkpoint may carry besides.

Leaves out how any file format names or stores them.
"""

from collections.abc import Iterator

from specdial.engine.models.config import ModelConfig


def tensor_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor the config calls for: its Hugging Face name and shape."""
    q_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim
    yield "model.embed_tokens.weight", (config.vocab, config.hidden)
    for i in range(config.layers):
        layer = f"model.layers.{i}."
        yield f"{layer}input_layernorm.weight", (config.hidden,)
        for part, rows in (("q_proj", q_rows), ("k_proj", kv_rows), ("v_proj", kv_rows)):
            yield f"{layer}self_attn.{part}.weight", (rows, config.hidden)
            if config.qkv_bias:
                yield f"{layer}self_attn.{part}.bias", (rows,)
        if config.qk_norm:
            yield f"{layer}self_attn.q_norm.weight", (config.head_dim,)
            yield f"{layer}self_attn.k_norm.weight", (config.head_dim,)
        yield f"{layer}self_attn.o_proj.weight", (config.hidden, q_rows)
        yield f"{layer}post_attention_layernorm.weight", (config.hidden,)
        yield f"{layer}mlp.gate_proj.weight", (config.intermediate, config.hidden)
        yield f"{layer}mlp.up_proj.weight", (config.intermediate, config.hidden)
        yield f"{layer}mlp.down_proj.weight", (config.hidden, config.intermediate)
    yield "model.norm.weight", (config.hidden,)
    if not config.tied_embeddings:
        yield "lm_head.weight", (config.vocab, config.hidden)


def ignorable(name: str, config: ModelConfig) -> bool:
    """Tensors that checkpoints carry and no one reads: saved RoPE buffers, and the head's copy when it is tied."""
    return name.endswith("rotary_emb.inv_freq") or (config.tied_embeddings and name == "lm_head.weight")
