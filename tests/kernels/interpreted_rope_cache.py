"""Cases for Triton's interpreter: norm, rotation and cache write against the reference.

Started by test_decode_step_interpreted.
"""

import pytest
import torch

from specdial.kernels.rope_cache import rope_and_cache

NAN = float("nan")
CASES = [  # B, T, H, Hk, D, ahead, lengths; one lane ends past the capacity of 24, one starts past it
    (1, 1, 14, 2, 64, 0, (5,)),
    (4, 3, 9, 3, 16, 1, (0, 20, 21, 24)),
    (2, 2, 10, 10, 48, 0, (7, 23)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_q_and_caches_equal_the_reference(dtype: torch.dtype, normed: bool, case: tuple) -> None:
    B, T, H, Hk, D, ahead, lengths = case
    torch.manual_seed(B + D)
    S = 24
    wide = torch.randn(B, T, (H + 2 * Hk) * D + 16).to(dtype)
    angles = torch.rand(S + 2, D) * 7.0
    caches = torch.full((2, 2, B, Hk, S, D), NAN, dtype=dtype)  # [backend, k | v, B, Hk, S, D]
    depths = torch.arange(T).div(2, rounding_mode="floor").repeat(B, 1) if T == 3 else None  # rows of a tree
    options = {"depths": depths, "cos": angles.cos()[:, : D // 2], "sin": angles.sin()[:, : D // 2], "ahead": ahead}
    if normed:
        options |= {"q_norm": torch.randn(D).to(dtype), "k_norm": torch.randn(D).to(dtype), "eps": 1e-6}
    qkv, where = wide[..., 16:], torch.tensor(lengths, dtype=torch.int32)
    want = rope_and_cache(qkv, where, *caches[0], backend="reference", **options)
    got = rope_and_cache(qkv, where, *caches[1], backend="triton", **options)
    assert got.is_contiguous()
    if not normed:
        torch.testing.assert_close(got, want, atol=0, rtol=0)
        torch.testing.assert_close(caches[1], caches[0], atol=0, rtol=0, equal_nan=True)
        return
    tolerance = 2e-6 if dtype == torch.float32 else 4e-3  # a normed float16 may land one step away before it turns
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(caches[1], caches[0], atol=tolerance, rtol=tolerance, equal_nan=True)
    assert torch.equal(caches[1, 1].isnan(), caches[0, 1].isnan())
