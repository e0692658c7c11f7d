"""Cases for Triton's interpreter: page summaries and scores against their references.

Started by test_sparse_attention_interpreted.
"""

import pytest
import torch

from specdial.kernels.page_summary import score_pages, update_pages

NAN = float("nan")


@pytest.mark.parametrize(("page", "dtype"), [(4, torch.float32), (16, torch.float16)])
def test_updates_equal_the_reference(page: int, dtype: torch.dtype) -> None:
    torch.manual_seed(page)
    k = torch.randn(2, 2, 75, 64, dtype=dtype)
    empty = torch.full((2, 2, -(-75 // page), 64), NAN, dtype=dtype)
    got, want = [empty.clone(), empty.clone()], [empty.clone(), empty.clone()]
    lengths = torch.tensor([0, 0], dtype=torch.int32)
    for added in ([37, 1], [1, 0], [0, 16], [5, 20], [32, 33]):
        committed = torch.tensor(added, dtype=torch.int32)
        keys = k.clone()
        for b in range(2):
            keys[b, :, int(lengths[b]) + added[b] :] = NAN
        for (low, high), backend in ((got, "triton"), (want, "reference")):
            update_pages(keys, low, high, lengths, committed, page=page, max_tokens=max(added), backend=backend)
        lengths = lengths + committed
        torch.testing.assert_close(got, want, equal_nan=True, atol=0, rtol=0)
    assert int((~got[0].isnan()).sum()) == sum(-(-int(n) // page) for n in lengths) * 2 * 64


@pytest.mark.parametrize("rule", ["specpv", "quest"])
@pytest.mark.parametrize("pool", ["mean", "max", "last"])
@pytest.mark.parametrize(("T", "G", "dtype"), [(1, 1, torch.float32), (3, 6, torch.float16), (20, 3, torch.float32)])
def test_scores_equal_the_reference(rule: str, pool: str, T: int, G: int, dtype: torch.dtype) -> None:
    torch.manual_seed(T)
    page, pages = 8, 5
    q = torch.randn(2, T, 2 * G, 64, dtype=dtype)
    low, high = torch.randn(2, 2, pages, 64, dtype=dtype) - 1, torch.randn(2, 2, pages, 64, dtype=dtype) + 1
    lengths, rows = torch.tensor([33, 8]), torch.tensor([T, max(1, T // 2)])
    low[1, :, 1:] = NAN
    high[1, :, 1:] = NAN
    q[1, int(rows[1]) :] = NAN
    options = {"page": page, "rule": rule, "pool": pool, "rows": rows}
    got = score_pages(q, low, high, lengths, backend="triton", **options)
    q[1, int(rows[1]) :] = 0.0
    want = score_pages(q, low, high, lengths, backend="reference", **options)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)
