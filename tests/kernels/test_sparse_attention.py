"""Sparse attention's reference against a float64 loop over rows, and its boundary."""

import math

import pytest
import torch

from specdial.kernels.full_attention import full_attention
from specdial.kernels.sparse_attention import sparse_attention

NAN = float("nan")


def attend_plainly(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: list[int]) -> torch.Tensor:
    """One head's softmax attention over the listed positions, in float64."""
    weights = [math.exp(float(q.double() @ k[i].double()) / math.sqrt(q.numel())) for i in seen]
    total = sum(weights)
    return sum((w / total) * v[i].double() for w, i in zip(weights, seen))


@pytest.mark.parametrize(
    ("T", "G", "page", "drafted"), [(1, 1, 1, 0), (3, 3, 1, 2), (5, 6, 1, 0), (2, 8, 4, 5), (33, 1, 16, 1)]
)
def test_reference_is_attention_over_the_selection_and_the_tail(T: int, G: int, page: int, drafted: int) -> None:
    torch.manual_seed(T)
    B, Hk, S, D = 2, 2, 120, 64
    tail_start = torch.tensor([32, 64])
    lengths = tail_start + drafted
    q = torch.randn(B, T, Hk * G, D)
    k, v = torch.randn(B, Hk, S, D), torch.randn(B, Hk, S, D)
    for b in range(B):
        k[b, :, int(lengths[b]) + T :] = NAN
        v[b, :, int(lengths[b]) + T :] = NAN
    indices = torch.stack([torch.randperm(32 // page)[:2].sort().values for _ in range(B * Hk)]).view(B, Hk, 2).int()
    indices = torch.cat([indices, torch.full((B, Hk, 1), 2**30 // page, dtype=torch.int32)], dim=2)  # past the count
    counts = torch.tensor([[2, 1], [0, 2]])
    out = sparse_attention(
        q, k, v, indices, counts, tail_start=tail_start, lengths=lengths, page=page, backend="reference"
    )
    for b in range(B):
        for t in range(T):
            for head in range(Hk * G):
                h = head // G
                chosen = [int(i) * page + j for i in indices[b, h, : counts[b, h]] for j in range(page)]
                tail = list(range(int(tail_start[b]), int(lengths[b]) + t + 1))
                want = attend_plainly(q[b, t, head], k[b, h], v[b, h], chosen + tail)
                torch.testing.assert_close(out[b, t, head].double(), want, atol=1e-5, rtol=1e-5)


def test_a_selection_of_everything_is_full_attention() -> None:
    torch.manual_seed(0)
    B, T, Hk, G, S, D = 1, 2, 2, 3, 40, 64
    q, k, v = torch.randn(B, T, Hk * G, D), torch.randn(B, Hk, S, D), torch.randn(B, Hk, S, D)
    lengths = torch.tensor([38])
    everything = torch.arange(38, dtype=torch.int32).expand(B, Hk, 38)
    out = sparse_attention(
        q, k, v, everything, torch.tensor([38]), tail_start=lengths, lengths=lengths, backend="reference"
    )
    mask = torch.arange(S) <= 38 + torch.arange(T)[:, None]
    want = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.repeat_interleave(G, 1), v.repeat_interleave(G, 1), attn_mask=mask
    )
    torch.testing.assert_close(out, want.transpose(1, 2), atol=1e-5, rtol=1e-5)


def test_a_trees_rows_see_the_selection_the_tail_and_their_ancestors() -> None:
    """Over everything it is full attention with the same mask, whatever of it is called selection and what tail."""
    torch.manual_seed(1)
    B, T, Hk, G, S, D = 2, 6, 2, 3, 40, 64
    q, k, v = torch.randn(B, T, Hk * G, D), torch.randn(B, Hk, S, D), torch.randn(B, Hk, S, D)
    lengths, start = torch.tensor([33, 9]), torch.tensor([20, 9])
    ancestors = (torch.rand(B, T, T) < 0.3) | torch.eye(T, dtype=torch.bool)
    chosen = torch.arange(20, dtype=torch.int32).expand(B, Hk, 20)
    where = {"tail_start": start, "lengths": lengths, "backend": "reference"}
    out = sparse_attention(q, k, v, chosen, start, ancestors=ancestors, **where)
    want, _ = full_attention(q, k, v, lengths, backend="reference", ancestors=ancestors)
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)


def arguments(**change: object) -> dict[str, object]:
    """A valid call with some arguments replaced."""
    good: dict[str, object] = {
        "q": torch.zeros(2, 1, 4, 64),
        "k_cache": torch.zeros(2, 2, 9, 64),
        "v_cache": torch.zeros(2, 2, 9, 64),
        "indices": torch.zeros(2, 2, 3, dtype=torch.int32),
        "counts": torch.tensor([3, 3]),
        "tail_start": torch.tensor([5, 5]),
        "lengths": torch.tensor([5, 6]),
        "backend": "reference",
    }
    return good | change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(1, 4, 64)}, r"q has shape \[1, 4, 64\]"),
        ({"q": torch.zeros(2, 1, 3, 64)}, r"q \[2, 1, 3, 64\] needs"),
        ({"q": torch.zeros(2, 0, 4, 64)}, r"q \[2, 0, 4, 64\] needs"),
        ({"q": torch.zeros(2, 1, 4, 64).double()}, "q .* dtype"),
        ({"k_cache": torch.zeros(2, 2, 9, 32)}, r"k_cache has shape \[2, 2, 9, 32\]"),
        ({"k_cache": torch.zeros(2, 9, 2, 64).transpose(1, 2)}, "k_cache has strides"),
        ({"v_cache": torch.zeros(2, 2, 8, 64)}, r"v_cache has shape \[2, 2, 8, 64\]"),
        ({"v_cache": torch.zeros(2, 2, 9, 64).half()}, "v_cache .* dtype"),
        ({"v_cache": torch.zeros(2, 2, 64, 9).transpose(2, 3)}, "v_cache .* strides"),
        ({"indices": torch.zeros(2, 1, 3, dtype=torch.int32)}, r"indices has shape \[2, 1, 3\]"),
        ({"indices": torch.zeros(2, 2, 3, dtype=torch.int64)}, "indices .* dtype"),
        ({"counts": torch.zeros(2, 3, dtype=torch.int64)}, r"counts has shape \[2, 3\]"),
        ({"counts": torch.zeros(2)}, "counts .* dtype"),
        ({"tail_start": torch.tensor([5])}, r"tail_start has shape \[1\]"),
        ({"lengths": torch.tensor([[5, 6]])}, r"lengths has shape \[1, 2\]"),
        ({"lengths": torch.zeros(2, dtype=torch.int64, device="meta")}, "lengths .* is on meta"),
        ({"page": 0}, "page is 0"),
        ({"backend": "triton"}, "needs a CUDA device"),
    ],
)
def test_a_wrong_argument_is_named(change: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    call = arguments(**change)
    tensors = [call.pop(name) for name in ("q", "k_cache", "v_cache", "indices", "counts")]
    with pytest.raises(ValueError, match=message):
        sparse_attention(*tensors, **call)


def test_a_head_dim_without_a_kernel_is_refused() -> None:
    call = arguments(q=torch.zeros(2, 1, 4, 80), k_cache=torch.zeros(2, 2, 9, 80), v_cache=torch.zeros(2, 2, 9, 80))
    tensors = [call.pop(name) for name in ("q", "k_cache", "v_cache", "indices", "counts")]
    with pytest.raises(ValueError, match="head dim 80"):
        sparse_attention(*tensors, **call)
