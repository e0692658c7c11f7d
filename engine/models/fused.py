"""A decoder's step for few rows on a GPU: five fused kernels and attention a layer, weights streamed once.

Leaves out many rows (prefill, wide verifications), where `Decoder.forward_cached` is faster, and attention.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, TypedDict

import torch
from torch import Tensor

from specdial.engine.models.decoder import (
    NO_TAPS,
    AttendCached,
    AttendUnrotated,
    CacheOf,
    Decoder,
    Taps,
    float8_matrices,
)
from specdial.kernels import Backend
from specdial.kernels.linear import (
    LinearWorkspace,
    Prepared,
    Quantised,
    linear,
    linear_gated,
    linear_into_norm,
    quantise,
)
from specdial.kernels.norm import add_rms_norm
from specdial.kernels.rope_cache import rope_and_cache


@dataclass(frozen=True, slots=True)
class Products:
    """The matrices of one layer, as they are or in float8."""

    qkv: Tensor | Quantised
    out: Tensor
    gate_up: Tensor | Quantised
    down: Tensor | Quantised


class Shared(TypedDict):
    """What every product of a step is told."""

    backend: Backend
    workspace: LinearWorkspace


class FusedStep:
    """Logits of up to `linear.MAX_ROWS` rows, by the decoder's own weights or by float8 copies of them."""

    def __init__(self, decoder: Decoder, *, float8: bool) -> None:
        """float8 takes memory for copies of `float8_matrices` and the head, a byte a weight."""
        self.decoder = decoder

        def products(index: int) -> Products:
            small = float8_matrices(index) if float8 else ()
            made: dict[str, Any] = {f.name: getattr(decoder.layers[index], f.name) for f in fields(Products)}
            return Products(**(made | {name: quantise(made[name]) for name in small}))

        self._products = [products(index) for index in range(len(decoder.layers))]
        self._head = quantise(decoder.head) if float8 else decoder.head
        self._pieces = float8
        self._workspace = LinearWorkspace.allocate(decoder.device)

    @torch.inference_mode()
    def logits(
        self,
        tokens: Tensor,
        lengths: Tensor,
        cache: CacheOf,
        attend: AttendCached,
        *,
        backend: Backend,
        taps: Taps = NO_TAPS,
        attend_unrotated: AttendUnrotated | None = None,
        depths: Tensor | None = None,
    ) -> Tensor:
        """[B, T, V] float32 of tokens [B, T] at positions lengths[b] + t, keys and values written into `cache`.

        depths: as in `Decoder.forward_cached`; it goes without attend_unrotated.
        attend_unrotated: serves instead of `attend` where it can: where no norm comes before the rotation, and it does
        not answer None.
        """
        d, c = self.decoder, self.decoder.config
        shared: Shared = {"backend": backend, "workspace": self._workspace}
        cos, sin = d.angles(cache(0)[0].shape[2])
        h = d.embedding[tokens]  # [B, T, hidden], the residual stream, changed in place
        x: Tensor | Prepared = add_rms_norm(h, None, d.layers[0].attention_norm, c.norm_eps, backend=backend)[0]
        norms_after = [*(layer.attention_norm for layer in d.layers[1:]), d.norm]
        for index, (layer, products, norm_after) in enumerate(zip(d.layers, self._products, norms_after)):
            if index in taps:
                taps[index].copy_(h)
            qkv = linear(x, products.qkv, bias=layer.qkv_bias, eps=c.norm_eps, out_dtype=d.dtype, **shared)
            mixed = None
            if attend_unrotated and layer.q_norm is None:
                mixed = attend_unrotated(index, qkv, cos, sin)  # [B, T, H, D]
            if mixed is None:
                q = rope_and_cache(
                    qkv, lengths, *cache(index), cos=cos, sin=sin, backend=backend, depths=depths,
                    q_norm=layer.q_norm, k_norm=layer.k_norm, eps=c.norm_eps,
                )  # fmt: skip
                mixed = attend(index, q)
            mixed = mixed.flatten(-2)  # [B, T, H D]
            x = linear_into_norm(mixed, products.out, residual=h, norm=layer.mlp_norm, pieces=self._pieces, **shared)
            active = linear_gated(x, products.gate_up, eps=c.norm_eps, **shared)
            x = linear_into_norm(active, products.down, residual=h, norm=norm_after, pieces=self._pieces, **shared)
        return linear(x, self._head, eps=c.norm_eps, out_dtype=torch.float32, **shared)
