"""One decoder for Llama, Mistral, Qwen2 and Qwen3, inference only: embeddings in, hidden states out.

Leaves out attention and the KV cache: `attend` gets q, k, v of each layer, keeps what it wants, returns the mix.
Every operation here works row by row, so a token's result depends on other tokens only through `attend`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from specdial.engine.models.config import ModelConfig
from specdial.engine.models.rope import cos_sin, inverse_frequencies, rotate
from specdial.engine.models.tensors import ignorable, tensor_shapes
from specdial.kernels import Backend
from specdial.kernels.linear import quantise
from specdial.kernels.norm import add_rms_norm
from specdial.kernels.rope_cache import rope_and_cache
from specdial.kernels.swiglu import swiglu
from specdial.policies.errors import UserError

if TYPE_CHECKING:
    from specdial.engine.models.fused import FusedStep

# attend(layer, q [B, T, H, D], k [B, T, Hk, D], v [B, T, Hk, D]) -> [B, T, H, D]; RoPE is already in q and k.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
# attend(layer, q [B, T, H, D]) -> [B, T, H, D]; keys and values are in the cache already.
AttendCached = Callable[[int, Tensor], Tensor]
# attend(layer, qkv [B, 1, (H + 2 Hk) D], cos, sin) -> [B, 1, H, D]; it rotates, and writes the cache itself, or it
# answers None and leaves the layer to the other form.
AttendUnrotated = Callable[[int, Tensor, Tensor, Tensor], Tensor | None]
# cache(layer) -> keys and values [B, Hk, S, D] to write into.
CacheOf = Callable[[int], tuple[Tensor, Tensor]]
# Buffers [B, T, hidden] by layer: a pass copies there the hidden states that enter the layer.
Taps = Mapping[int, Tensor]
NO_TAPS: Taps = MappingProxyType({})
ANGLE_ROWS = 1 << 16  # positions whose angles are made at a time


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's weights. q, k, v share a matrix, and so do gate and up: fewer passes over the input."""

    attention_norm: Tensor  # [hidden]
    qkv: Tensor  # [(H + 2 Hk) D, hidden]
    qkv_bias: Tensor | None  # [(H + 2 Hk) D]
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None  # [D]
    out: Tensor  # [hidden, H D]
    mlp_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 intermediate, hidden]
    down: Tensor  # [hidden, intermediate]


class Decoder:
    """A decoder's weights on one device in one dtype. Build it with `from_weights`."""

    def __init__(self, config: ModelConfig, embedding: Tensor, layers: list[Layer], norm: Tensor, head: Tensor) -> None:
        self.config = config
        self.device = embedding.device
        self.dtype = embedding.dtype
        self.embedding = embedding  # [V, hidden]
        self.layers = layers
        self.norm = norm  # [hidden]
        self.head = head  # [V, hidden]; the embedding itself when tied
        inverse, self._attention_factor = inverse_frequencies(config.rope, config.head_dim)
        self._inverse = inverse.to(self.device)  # [D/2]
        # growing tables; captured graphs may still read the shorter ones
        self._angles: list[tuple[Tensor, Tensor]] = []
        self._fused: dict[bool, FusedStep] = {}
        self._in_float8: Decoder | None = None

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights one forward pass and its logits read (the embedding counts once, as the head)."""
        tensors = [self.head, self.norm]
        for layer in self.layers:
            tensors += [t for t in (getattr(layer, name) for name in Layer.__slots__) if t is not None]
        return sum(t.numel() * t.element_size() for t in tensors)

    @torch.inference_mode()
    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, taps: Taps = NO_TAPS) -> Tensor:
        """Hidden states [B, T, hidden] after the final norm, for tokens and positions [B, T] int64."""
        c = self.config
        widths = (c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim)
        cos, sin = cos_sin(positions, self._inverse, self._attention_factor)  # [B, T, 1, D] each
        x = F.embedding(tokens, self.embedding)  # [B, T, hidden]
        for index, layer in enumerate(self.layers):
            if index in taps:
                taps[index].copy_(x)
            normed = rms_norm(x, layer.attention_norm, c.norm_eps)
            q, k, v = F.linear(normed, layer.qkv, layer.qkv_bias).split(widths, -1)
            q = q.unflatten(-1, (c.heads, c.head_dim))  # [B, T, H, D]
            k = k.unflatten(-1, (c.kv_heads, c.head_dim))  # [B, T, Hk, D]
            v = v.unflatten(-1, (c.kv_heads, c.head_dim))  # [B, T, Hk, D]
            if layer.q_norm is not None and layer.k_norm is not None:
                q, k = rms_norm(q, layer.q_norm, c.norm_eps), rms_norm(k, layer.k_norm, c.norm_eps)
            mixed = attend(index, rotate(q, cos, sin), rotate(k, cos, sin), v)  # [B, T, H, D]
            x = x + F.linear(mixed.flatten(-2), layer.out)
            gate, up = F.linear(rms_norm(x, layer.mlp_norm, c.norm_eps), layer.gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer.down)
        return rms_norm(x, self.norm, c.norm_eps)

    def forward_with_taps(
        self, tokens: Tensor, positions: Tensor, attend: Attend, layers: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """As `forward`, and the hidden states entering `layers`, [len(layers), B, T, hidden]; EAGLE-3 reads them."""
        taps = self.tap_buffers(tokens.shape, layers)
        hidden = self.forward(tokens, positions, attend, taps)
        return hidden, torch.stack([taps[layer] for layer in layers])

    def tap_buffers(self, rows: torch.Size, layers: Iterable[int]) -> Taps:
        """Room for the hidden states that a pass over tokens of shape `rows`, [B, T], has before these layers."""
        shape = (*rows, self.config.hidden)
        return {layer: torch.empty(shape, device=self.device, dtype=self.dtype) for layer in layers}  # [B, T, hidden]

    @torch.inference_mode()
    def forward_cached(
        self,
        tokens: Tensor,
        lengths: Tensor,
        cache: CacheOf,
        attend: AttendCached,
        *,
        backend: Backend,
        taps: Taps = NO_TAPS,
        depths: Tensor | None = None,
    ) -> Tensor:
        """As `forward` for rows at positions lengths[b] + t, with keys and values written straight into `cache`.

        tokens: [B, T]; lengths: [B]. Norm, rotation with cache write, and activation are one kernel each, lengths are
        read on the device, and nothing depends on the host: fit for a CUDA graph.
        depths: [B, T], positions are lengths[b] + depths[b, t] instead, and keys stay in order.
        """
        c = self.config
        cos, sin = self.angles(cache(0)[0].shape[2])
        x: Tensor | None = None
        branch = F.embedding(tokens, self.embedding)  # [B, T, hidden]
        for index, layer in enumerate(self.layers):
            normed, x = add_rms_norm(branch, x, layer.attention_norm, c.norm_eps, backend=backend)
            if index in taps:
                taps[index].copy_(x)  # which later layers overwrite
            q = rope_and_cache(
                F.linear(normed, layer.qkv, layer.qkv_bias),
                lengths,
                *cache(index),
                cos=cos,
                sin=sin,
                backend=backend,
                depths=depths,
                q_norm=layer.q_norm,
                k_norm=layer.k_norm,
                eps=c.norm_eps,
            )  # [B, T, H, D]
            mixed = attend(index, q)
            normed, x = add_rms_norm(
                F.linear(mixed.flatten(-2), layer.out), x, layer.mlp_norm, c.norm_eps, backend=backend
            )
            branch = F.linear(swiglu(F.linear(normed, layer.gate_up), backend=backend), layer.down)
        return add_rms_norm(branch, x, self.norm, c.norm_eps, backend=backend)[0]

    def fused_step(self, *, float8: bool) -> FusedStep:
        """The fused step for few rows, by these weights or by float8 copies; made once."""
        if float8 not in self._fused:
            from specdial.engine.models.fused import FusedStep  # which needs this module first

            self._fused[float8] = FusedStep(self, float8=float8)
        return self._fused[float8]

    def in_float8(self) -> Decoder:
        """This decoder with the matrices that float8 drafts take rounded to float8, in its own dtype; made once."""
        if self._in_float8 is None:
            layers = [
                replace(layer, **{name: rounded(getattr(layer, name)) for name in float8_matrices(index)})
                for index, layer in enumerate(self.layers)
            ]
            self._in_float8 = Decoder(self.config, self.embedding, layers, self.norm, rounded(self.head))
        return self._in_float8

    def angles(self, positions: int) -> tuple[Tensor, Tensor]:
        """cos and sin of positions 0 .. positions-1, [>= positions, D/2] float32; made once for the longest asked.

        In pieces: what `cos_sin` makes on its way to a million positions takes 2 GB more.
        """
        if not self._angles or self._angles[-1][0].shape[0] < positions:
            half = self.config.head_dim // 2
            cos, sin = torch.empty(2, positions, half, device=self.device)  # [P, D/2] each
            for start in range(0, positions, ANGLE_ROWS):
                steps = torch.arange(start, min(start + ANGLE_ROWS, positions), device=self.device)[None]
                piece = cos_sin(steps, self._inverse, self._attention_factor)  # [1, rows, 1, D] each
                for table, of_piece in zip((cos, sin), piece):
                    table[start : start + ANGLE_ROWS] = of_piece[0, :, 0, :half]
            self._angles.append((cos, sin))
        return self._angles[-1]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] float32 of hidden states [..., hidden] that `forward` returned."""
        if hidden.is_cuda and hidden.dtype != torch.float32:  # the sums as they are, not rounded in between
            product = torch.mm(hidden.flatten(0, -2), self.head.t(), out_dtype=torch.float32)
            return product.unflatten(0, hidden.shape[:-1])
        return F.linear(hidden, self.head).float()

    @classmethod
    def from_weights(
        cls,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Decoder:
        """Build from Hugging Face tensor names; `weights` may be lazy, each tensor is asked for once and let go.

        Errors: UserError naming the first tensor that is missing, unexpected, or of another shape.
        """
        shapes = dict(tensor_shapes(config))
        given = {name for name in weights if not ignorable(name, config)}
        for names, what in ((shapes.keys() - given, "is missing"), (given - shapes.keys(), "is unexpected")):
            if names:
                more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
                raise UserError(
                    f"{config.name}: tensor {min(names)}{more} {what}", "give weights that belong to this config"
                )

        def take(name: str) -> Tensor:
            tensor = weights[name]
            if tuple(tensor.shape) != shapes[name]:
                raise UserError(
                    f"{config.name}: tensor {name} has shape {tuple(tensor.shape)}, the config says {shapes[name]}",
                    "give weights that belong to this config",
                )
            return tensor.to(device=device, dtype=dtype).contiguous()

        def fuse(prefix: str, parts: tuple[str, ...], suffix: str) -> Tensor:
            return torch.cat([take(f"{prefix}{part}{suffix}") for part in parts])

        embedding = take("model.embed_tokens.weight")
        layers = []
        for i in range(config.layers):
            attention, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
            layers.append(
                Layer(
                    attention_norm=take(f"model.layers.{i}.input_layernorm.weight"),
                    qkv=fuse(attention, ("q_proj", "k_proj", "v_proj"), ".weight"),
                    qkv_bias=fuse(attention, ("q_proj", "k_proj", "v_proj"), ".bias") if config.qkv_bias else None,
                    q_norm=take(f"{attention}q_norm.weight") if config.qk_norm else None,
                    k_norm=take(f"{attention}k_norm.weight") if config.qk_norm else None,
                    out=take(f"{attention}o_proj.weight"),
                    mlp_norm=take(f"model.layers.{i}.post_attention_layernorm.weight"),
                    gate_up=fuse(mlp, ("gate_proj", "up_proj"), ".weight"),
                    down=take(f"{mlp}down_proj.weight"),
                )
            )
        head = embedding if config.tied_embeddings else take("lm_head.weight")
        return cls(config, embedding, layers, take("model.norm.weight"), head)


def float8_matrices(index: int) -> tuple[str, ...]:
    """What float8 drafts hold in float8 of layer `index`: matrices whose input a product leaves in float8 pieces.

    The head is another one. `out` follows attention, and the first layer's qkv the embedding.
    """
    return ("qkv", "gate_up", "down") if index else ("gate_up", "down")


def rounded(weight: Tensor) -> Tensor:
    """A weight [N, K] as float8 holds it, in its own dtype."""
    small = quantise(weight)
    return (small.values.float() * small.scale[:, None]).to(weight.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) over the last dim in float32, rounded to x's dtype, times weight: Hugging Face's order of rounding."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
