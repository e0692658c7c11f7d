"""From the fused q, k, v projection to attention's inputs: per-head norm, rotary embedding, cache write, one pass.

The angles come as a table, made once by the model in float32: sine and cosine of a large angle need a range reduction
that is slow on the device, and its bits would depend on the compiler.
"""

import torch

from specdial.kernels import Backend
from specdial.kernels.checks import (
    FLOATS,
    INTEGERS,
    check_backend,
    check_device,
    check_dtype,
    check_last_stride,
    check_shape,
)
from specdial.kernels.rope_cache.reference import rope_and_cache_reference

__all__ = ["rope_and_cache"]


def rope_and_cache(
    qkv: torch.Tensor,
    lengths: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cos: torch.Tensor,
    sin: torch.Tensor,
    backend: Backend,
    ahead: int = 0,
    depths: torch.Tensor | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Norm (optional) and rotate q and k, write k and v into the cache, return q [B, T, H, D] contiguous.

    qkv: [B, T, (H + 2 Hk) D], bias included, heads of q, then k, then v; k_cache, v_cache: [B, Hk, S, D], written in
    place; lengths: [B] integer, read on the device. Row t of sequence b has position p = lengths[b] + ahead + t: it is
    rotated by row p of `cos` and `sin`, and its k and v land in slot p. A row with p outside 0 .. S-1 writes nothing;
    outside the table, its q is rotated by the nearest row. Nothing past a sequence's own rows is touched.
    depths: [B, T] int64; row t is rotated by row lengths[b] + ahead + depths[b, t] of the table, its slot is as above.
    cos, sin: [P, D/2] float32, P >= S: of position * inverse frequency, times the attention factor; channel i turns
    with i + D/2. A slice [..., : D/2] of a wider table will do.
    q_norm, k_norm: [D], both or neither: RMS norm of every head with `eps`, rounded as `add_rms_norm` rounds. Rotation
    is in float32, product by product, then rounded to the dtype. qkv and the caches: last stride 1, else free. On a
    device with early launch lengths and depths are read while the kernel just before may still run: they must be older
    than it.
    Raises ValueError on a wrong shape, dtype, device, stride or backend.
    """
    check_shape("qkv", qkv, (None, None, None))
    B, T, width = qkv.shape
    check_shape("k_cache", k_cache, (B, None, None, None))
    Hk, S, D = k_cache.shape[1:]
    check_shape("v_cache", v_cache, (B, Hk, S, D))
    check_shape("lengths", lengths, (B,))
    heads = width // D - 2 * Hk if D else 0
    if B == 0 or T == 0 or Hk == 0 or D < 2 or D % 2 or width % D or heads < 1:
        raise ValueError(
            f"qkv {list(qkv.shape)} does not fit k_cache {list(k_cache.shape)}: need B, T > 0, an even head dim D, "
            f"and (H + 2 Hk) D columns with H > 0"
        )
    check_dtype("qkv", qkv, FLOATS)
    check_last_stride("qkv", qkv)
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_dtype(name, tensor, (qkv.dtype,))
        check_device(name, tensor, qkv.device)
        check_last_stride(name, tensor)
    check_dtype("lengths", lengths, INTEGERS)
    check_device("lengths", lengths, qkv.device)
    check_shape("cos", cos, (None, D // 2))
    check_shape("sin", sin, tuple(cos.shape))
    for name, tensor in (("cos", cos), ("sin", sin)):
        check_dtype(name, tensor, (torch.float32,))
        check_device(name, tensor, qkv.device)
        check_last_stride(name, tensor)
    if cos.shape[0] < S:
        raise ValueError(f"cos {list(cos.shape)} has fewer positions than k_cache {list(k_cache.shape)} has slots")
    if depths is not None:
        check_shape("depths", depths, (B, T))
        check_dtype("depths", depths, (torch.int64,))
        check_device("depths", depths, qkv.device)
        if not depths.is_contiguous():
            raise ValueError(f"depths has strides {list(depths.stride())}, expected contiguous")
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm: give both or neither")
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        if norm is not None:
            check_shape(name, norm, (D,))
            check_dtype(name, norm, (qkv.dtype,))
            check_device(name, norm, qkv.device)
            check_last_stride(name, norm)
    check_backend(backend, qkv.device)
    if backend == "reference":
        return rope_and_cache_reference(
            qkv, lengths, k_cache, v_cache, cos=cos, sin=sin, ahead=ahead, depths=depths, q_norm=q_norm, k_norm=k_norm,
            eps=eps,
        )  # fmt: skip
    from specdial.kernels.rope_cache import launch

    return launch.rope_and_cache_triton(
        qkv, lengths, k_cache, v_cache, cos=cos, sin=sin, ahead=ahead, depths=depths, q_norm=q_norm, k_norm=k_norm,
        eps=eps,
    )  # fmt: skip
