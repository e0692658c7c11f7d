"""Full attention, history and scoring-head kernels in Triton's interpreter, against float64 and the references.

Not collected by name: the interpreter must be chosen before Triton is imported, so `test_full_attention_interpreted`
runs this file in a process of its own. Small shapes; float16 and float32 only, the interpreter is wrong in bfloat16.
"""

import pytest
import torch

from specdial.kernels.full_attention import full_attention, full_attention_raw
from specdial.kernels.full_attention.launch import Tiling, full_attention_triton
from specdial.kernels.head_scores import head_scores
from specdial.kernels.history import decay_rows, push_rows

NAN = float("nan")
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

# T, G, Hk, D, S, lengths: odd lengths, an empty sequence, ragged batches, more rows than one tile.
SHAPES = [
    (1, 1, 2, 64, 70, (1, 0)),
    (1, 8, 1, 32, 200, (63, 199)),
    (5, 3, 1, 32, 1008, (1000,)),
    (3, 6, 1, 128, 192, (63, 64, 1)),
    (2, 7, 1, 32, 140, (126, 127)),
    (9, 8, 1, 16, 130, (121,)),
]


def make(shape: tuple, dtype: torch.dtype) -> Tensors:
    """Random inputs; keys and values past the visible ones are NaN."""
    T, G, Hk, D, S, lengths = shape
    torch.manual_seed(S + T)
    B = len(lengths)
    q = torch.randn(B, T, Hk * G, D, dtype=dtype)
    k, v = torch.randn(B, Hk, S, D, dtype=dtype), torch.randn(B, Hk, S, D, dtype=dtype)
    for b, length in enumerate(lengths):
        k[b, :, length + T :] = NAN
        v[b, :, length + T :] = NAN
    return q, k, v, torch.tensor(lengths)


def naive(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Float64 attention one row at a time, and the pooled mass of every key."""
    (B, T, H, D), (Hk, S) = q.shape, k.shape[1:3]
    q, k, v = q.double(), k.double(), v.double()
    out, mass = torch.zeros_like(q), torch.zeros(B, Hk, T, S, dtype=torch.float64)
    for b in range(B):
        for t in range(T):
            seen = int(lengths[b]) + t + 1
            for h in range(H):
                kv = h // (H // Hk)
                weights = torch.softmax(k[b, kv, :seen] @ q[b, t, h] * D**-0.5, dim=0)
                out[b, t, h] = weights @ v[b, kv, :seen]
                mass[b, kv, t, :seen] += weights
    return out, mass


def pages(mass: torch.Tensor, page: int) -> torch.Tensor:
    return torch.nn.functional.pad(mass, (0, -mass.shape[-1] % page)).unflatten(-1, (-1, page)).sum(-1)


def assert_near(got: torch.Tensor, want: torch.Tensor, limit: float) -> None:
    assert got.shape == want.shape
    assert ((got.double() - want.double()).norm() / want.double().norm()).item() < limit


@pytest.mark.parametrize(
    ("shape", "dtype", "limit"),
    [(shape, torch.float32, 2e-6) for shape in SHAPES] + [(shape, torch.float16, 2e-3) for shape in SHAPES[:4]],
    ids=str,
)
def test_output_and_masses_match_float64(shape: tuple, dtype: torch.dtype, limit: float) -> None:
    inputs = make(shape, dtype)
    want, mass = naive(*inputs)
    out, tokens = full_attention(*inputs, backend="triton", mass="token")
    assert_near(out, want, limit)
    assert_near(tokens, mass, limit)
    assert torch.equal(tokens == 0, mass == 0)
    page = (16, 32, 64)[shape[0] % 3]
    _, paged = full_attention(*inputs, backend="triton", mass="page", page_tokens=page)
    assert_near(paged, pages(mass, page), 1e-5)
    assert_near(paged, pages(tokens, page), limit)
    assert_near(paged.sum(-1), torch.full_like(paged.sum(-1), shape[1]), 1e-5)


@pytest.mark.parametrize("splits", [1, 3, 9])
def test_splits_and_row_tiles_do_not_change_the_result(splits: int) -> None:
    """9 splits of a short context leave some of them empty."""
    inputs = make((3, 6, 1, 32, 270, (265, 5)), torch.float32)
    want, _ = naive(*inputs)
    out, nothing = full_attention(*inputs, backend="triton", splits=splits)
    assert nothing is None
    assert_near(out, want, 2e-6)
    for block_m, tma in ((32, True), (64, False)):
        tiling = Tiling(block_m=block_m, warps=4, stages=2, per_sm=1, crowded_per_sm=1, tma=tma)
        tiled, _ = full_attention_triton(*inputs, granularity=None, page_tokens=64, splits=splits, tiling=tiling)
        assert_near(tiled, want, 2e-6)


@pytest.mark.parametrize(
    ("T", "N", "G", "lengths"), [(13, 13, 3, (64, 5)), (3, 21, 1, (0, 60, 127)), (9, 70, 2, (62,))], ids=str
)
def test_trees_match_the_reference(T: int, N: int, G: int, lengths: tuple[int, ...]) -> None:
    """Blocks that begin on a tile's edge, inside one and span two; rows that see little, or nothing of a tile."""
    q, k, v, at = make((T, G, 2, 32, max(lengths) + N + 7, lengths), torch.float32)
    k, v = (torch.randn_like(x) for x in (k, v))
    for b, length in enumerate(lengths):
        k[b, :, length + N :], v[b, :, length + N :] = NAN, NAN
    ancestors = torch.rand(len(lengths), T, N) < 0.3
    ancestors[torch.arange(len(lengths))[:, None], torch.arange(T), torch.randint(N, (T,))] = True
    ancestors[0, 0] = torch.arange(N) == N - 1
    want, _ = full_attention(q, k.nan_to_num(), v.nan_to_num(), at, backend="reference", ancestors=ancestors)
    out, _ = full_attention(q, k, v, at, backend="triton", ancestors=ancestors)
    assert_near(out, want, 2e-6)


def test_ragged_batch_in_strided_caches() -> None:
    """Caches laid out [B, S, Hk, D] and cut from a longer one; queries cut from a fused projection."""
    q, k, v, lengths = make((2, 4, 2, 32, 150, (140, 0, 64, 3, 77)), torch.float32)
    want, _ = naive(q, k, v, lengths)
    fused = torch.cat([q, torch.randn_like(q[:, :, :4])], dim=2)
    wide_k = torch.full((5, 200, 2, 32), NAN)
    wide_v = torch.full((5, 200, 2, 32), NAN)
    wide_k[:, :150], wide_v[:, :150] = k.transpose(1, 2), v.transpose(1, 2)
    strided = (fused[:, :, :8], wide_k.transpose(1, 2)[:, :, :150], wide_v.transpose(1, 2)[:, :, :150], lengths)
    out, _ = full_attention(*strided, backend="triton")
    assert_near(out, want, 2e-6)
    tiling = Tiling(block_m=16, warps=4, stages=2, per_sm=1, crowded_per_sm=1, tma=True)
    out, _ = full_attention_triton(*strided, granularity=None, page_tokens=64, splits=None, tiling=tiling)
    assert_near(out, want, 2e-6)


@pytest.mark.parametrize(("granularity", "window"), [("token", 3), ("page", 16)])
def test_history_takes_committed_rows_only(granularity: str, window: int) -> None:
    """Raw statistics through the kernels equal normalised rows through the reference, for any number committed."""
    q, k, v, lengths = make((4, 3, 1, 32, 140, (17, 130, 63, 100)), torch.float32)
    committed = torch.tensor([0, 1, 4, 3])
    _, mass = full_attention(q, k.nan_to_num(), v.nan_to_num(), lengths, backend="reference", mass=granularity)
    _, raw = full_attention_raw(q, k, v, lengths, backend="triton", granularity=granularity)
    width = mass.shape[-1] + 5  # the history is wider than this cache
    rings = [torch.rand(4, 1, window, width, generator=torch.Generator().manual_seed(1)) for _ in range(3)]
    scores = [torch.full((4, 1, width), NAN) for _ in range(3)]
    push_rows(rings[0], mass, lengths, committed, backend="reference", score=scores[0])
    push_rows(rings[1], raw, lengths, committed, backend="triton", score=scores[1])
    push_rows(rings[2], mass, lengths, committed, backend="triton", score=scores[2])
    for ring, score in zip(rings[1:], scores[1:]):
        torch.testing.assert_close(ring, rings[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(score, scores[0], atol=1e-5, rtol=1e-5)
    decayed = [torch.ones(4, 1, width) for _ in range(3)]
    decay_rows(decayed[0], mass, lengths, committed, decay=0.9, backend="reference")
    decay_rows(decayed[1], raw, lengths, committed, decay=0.9, backend="triton")
    decay_rows(decayed[2], mass, lengths, committed, decay=0.9, backend="triton")
    for score in decayed[1:]:
        torch.testing.assert_close(score, decayed[0], atol=1e-5, rtol=1e-5)
    two = torch.rand(8, 1, window, width)  # two layers stacked in the batch, one launch
    push_rows(two, mass.repeat(2, 1, 1, 1), lengths, committed, backend="triton")
    want = two.clone()
    push_rows(want, mass.repeat(2, 1, 1, 1), lengths, committed, backend="reference")
    torch.testing.assert_close(two, want)
    assert torch.equal(decayed[1][0], torch.ones(1, width))  # nothing committed, nothing changed


@pytest.mark.parametrize(
    ("shape", "heads"),
    [
        ((1, 4, 2, 64, 128, (100,)), (0, 5, 6)),
        ((5, 6, 2, 32, 300, (1, 63, 290)), (3,)),
        ((9, 8, 2, 16, 200, (0, 150)), (0, 1, 2, 15)),
    ],
    ids=str,
)
def test_head_scores_match_the_mass_of_those_heads(shape: tuple, heads: tuple[int, ...]) -> None:
    q, k, _, lengths = make(shape, torch.float32)
    B, T, H, _ = q.shape
    weights = torch.rand(B, T)
    weights[0, 0] = 0.0
    q[0, 0] = NAN if T > 1 else q[0, 0]  # a row of weight 0 is not read
    clean = k.nan_to_num()
    want = torch.zeros(B, k.shape[2], dtype=torch.float64)
    for head in heads:
        one_kv = clean[:, head // (H // clean.shape[1])].unsqueeze(1)
        _, mass = naive(q[:, :, head : head + 1], one_kv, one_kv, lengths)
        want += torch.where(weights[..., None] != 0, mass[:, 0] * weights[..., None], 0.0).sum(1)
    got = head_scores(q, k, lengths, heads, backend="triton", row_weights=weights)
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)
    twice = head_scores(q, k, lengths, heads, backend="triton", row_weights=weights, out=got.clone())
    torch.testing.assert_close(twice.double(), 2 * want, atol=1e-5, rtol=1e-5)
