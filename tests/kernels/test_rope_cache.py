"""Norm, rotation and cache write: the reference against the decoder, bit for bit, and float64; the boundary."""

import pytest
import torch

from specdial.engine.models.decoder import rms_norm
from specdial.engine.models.rope import cos_sin, rotate
from specdial.kernels.rope_cache import rope_and_cache

NAN = float("nan")


def table(positions: int, D: int, factor: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """The engine's cos and sin for every position: [positions, D/2] each."""
    inverse = 10000.0 ** (-torch.arange(0, D, 2, dtype=torch.float32) / D)
    cos, sin = cos_sin(torch.arange(positions)[None], inverse, factor)
    return cos[0, :, 0, : D // 2], sin[0, :, 0, : D // 2]


def problem(B: int, T: int, heads: tuple[int, int], D: int, S: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    H, Hk = heads
    random = torch.Generator().manual_seed(B + T + D)
    qkv = torch.randn(B, T, (H + 2 * Hk) * D, generator=random).to(dtype)
    k_cache, v_cache = (torch.full((B, Hk, S, D), NAN, dtype=dtype) for _ in range(2))
    return {"qkv": qkv, "k_cache": k_cache, "v_cache": v_cache}


def decoder_does(
    qkv: torch.Tensor, positions: torch.Tensor, heads: tuple[int, int], D: int, norms: tuple[torch.Tensor, ...] | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v of these positions by the engine's own functions, in its own order."""
    H, Hk = heads
    q, k, v = (part.unflatten(-1, (-1, D)) for part in qkv.split((H * D, Hk * D, Hk * D), -1))
    if norms is not None:
        q, k = rms_norm(q, norms[0], 1e-6), rms_norm(k, norms[1], 1e-6)
    inverse = 10000.0 ** (-torch.arange(0, D, 2, dtype=torch.float32) / D)
    cos, sin = cos_sin(positions, inverse, 0.9)
    return rotate(q, cos, sin), rotate(k, cos, sin), v


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("B", "T", "heads", "D", "ahead", "depths"),
    [(1, 1, (8, 2), 64, 0, None), (3, 4, (6, 3), 16, 2, None), (3, 4, (6, 3), 16, 2, [0, 1, 1, 2])],
)
def test_bits_are_the_decoders(
    dtype: torch.dtype,
    normed: bool,
    B: int,
    T: int,
    heads: tuple[int, int],
    D: int,
    ahead: int,
    depths: list[int] | None,
) -> None:
    S = 40
    given = problem(B, T, heads, D, S, dtype)
    lengths = torch.tensor([0, 17, 30])[-B:]
    norms = (torch.randn(D).to(dtype), torch.randn(D).to(dtype)) if normed else None
    options = {} if norms is None else {"q_norm": norms[0], "k_norm": norms[1], "eps": 1e-6}
    cos, sin = table(S + 5, D, 0.9)
    within = torch.arange(T) if depths is None else torch.tensor(depths)
    options["depths"] = None if depths is None else within.repeat(B, 1)
    q = rope_and_cache(**given, lengths=lengths, cos=cos, sin=sin, ahead=ahead, backend="reference", **options)
    positions = lengths[:, None] + ahead + within
    want_q, want_k, want_v = decoder_does(given["qkv"], positions, heads, D, norms)
    assert torch.equal(q, want_q)
    assert q.is_contiguous()
    for cache, want in ((given["k_cache"], want_k), (given["v_cache"], want_v)):
        for b in range(B):
            start = int(lengths[b]) + ahead
            assert torch.equal(cache[b, :, start : start + T], want[b].transpose(0, 1))
            assert cache[b, :, :start].isnan().all()
            assert cache[b, :, start + T :].isnan().all()


def test_rotation_is_a_rotation_in_float64() -> None:
    D, S = 32, 4000
    given = problem(2, 3, (2, 1), D, S, torch.float32)
    lengths = torch.tensor([3990, 7], dtype=torch.int32)
    cos, sin = table(S, D)
    q = rope_and_cache(**given, lengths=lengths, cos=cos, sin=sin, backend="reference")
    x = given["qkv"].view(2, 3, 4, D)[:, :, :2].double()
    plane = torch.complex(x[..., : D // 2], x[..., D // 2 :])
    positions = (lengths[:, None] + torch.arange(3)).double()
    inverse = 10000.0 ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    angle = (positions[..., None] * inverse)[:, :, None]
    turned = plane * torch.polar(torch.ones_like(angle), angle)
    want = torch.cat((turned.real, turned.imag), -1)
    torch.testing.assert_close(q.double(), want, atol=2e-3, rtol=0)  # a float32 angle of 4000 is off by 2e-4


def test_rows_outside_the_capacity_write_nothing() -> None:
    S, D = 10, 16
    given = problem(3, 3, (2, 1), D, S, torch.float32)
    cos, sin = table(S, D)
    q = rope_and_cache(**given, lengths=torch.tensor([8, 10, -1]), cos=cos, sin=sin, backend="reference")
    assert q.isfinite().all()
    written = [given["v_cache"][b, 0, :, 0].isfinite().nonzero().flatten().tolist() for b in range(3)]
    assert written == [[8, 9], [], [0, 1]]


GOOD = {
    "qkv": torch.zeros(2, 1, 4 * 16), "lengths": torch.tensor([1, 2]), "k_cache": torch.zeros(2, 1, 8, 16),
    "v_cache": torch.zeros(2, 1, 8, 16), "cos": torch.zeros(8, 8), "sin": torch.zeros(8, 8),
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qkv": torch.zeros(2, 64)}, r"qkv has shape \[2, 64\]"),
        ({"qkv": torch.zeros(2, 1, 40)}, r"qkv \[2, 1, 40\] does not fit k_cache \[2, 1, 8, 16\]"),
        ({"qkv": torch.zeros(2, 1, 32)}, r"qkv \[2, 1, 32\] does not fit"),
        ({"qkv": torch.zeros(2, 1, 64).half()}, "k_cache .* dtype"),
        ({"qkv": torch.zeros(2, 1, 128)[..., ::2]}, r"qkv \[2, 1, 64\] has strides"),
        ({"v_cache": torch.zeros(2, 1, 9, 16)}, r"v_cache has shape \[2, 1, 9, 16\]"),
        ({"lengths": torch.tensor([1])}, r"lengths has shape \[1\]"),
        ({"lengths": torch.tensor([1.0, 2.0])}, "lengths .* dtype"),
        ({"cos": torch.zeros(8, 16)}, r"cos has shape \[8, 16\], expected \[any, 8\]"),
        ({"sin": torch.zeros(9, 8)}, r"sin has shape \[9, 8\]"),
        ({"cos": torch.zeros(7, 8), "sin": torch.zeros(7, 8)}, r"cos \[7, 8\] has fewer positions than k_cache"),
        ({"cos": torch.zeros(8, 8).half()}, "cos .* dtype"),
        ({"q_norm": torch.zeros(16)}, "give both or neither"),
        ({"q_norm": torch.zeros(16), "k_norm": torch.zeros(8)}, r"k_norm has shape \[8\]"),
        ({"backend": "fast"}, "backend is 'fast'"),
    ],
)
def test_a_wrong_argument_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rope_and_cache(**(GOOD | {"backend": "reference"} | change))
