"""The scoring heads' reference against the mass that full attention reports, and its boundary."""

import pytest
import torch

from specdial.kernels.full_attention import full_attention
from specdial.kernels.head_scores import head_scores

B, R, G, Hk, S, D = 2, 3, 4, 2, 60, 32


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(B, R, G * Hk, D), torch.randn(B, Hk, S, D), torch.tensor([50, 7])


def test_all_heads_with_equal_weights_are_the_mass_of_full_attention() -> None:
    q, k, lengths = inputs()
    _, mass = full_attention(q, k, torch.zeros_like(k), lengths, backend="reference", mass=True)
    got = head_scores(q, k, lengths, tuple(range(G * Hk)), backend="reference")
    torch.testing.assert_close(got, mass.sum((1, 2)))


def test_one_row_of_one_head_is_its_softmax_and_rows_of_weight_zero_are_not_read() -> None:
    q, k, lengths = inputs()
    weights = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 2.0]])
    q[0, 0] = float("nan")
    got = head_scores(q, k, lengths, (5,), backend="reference", row_weights=weights)
    for b, (row, weight) in enumerate([(1, 1.0), (2, 2.0)]):
        seen = int(lengths[b]) + row + 1
        want = weight * torch.softmax(k[b, 1, :seen].double() @ q[b, row, 5].double() * D**-0.5, dim=0)
        torch.testing.assert_close(got[b, :seen].double(), want, atol=1e-6, rtol=1e-5)
        assert got[b, seen:].abs().max() == 0


def test_layers_and_draft_steps_accumulate() -> None:
    q, k, lengths = inputs()
    once = head_scores(q, k, lengths, (0, 3), backend="reference")
    total = once.clone()
    assert head_scores(q, k, lengths, (0, 3), backend="reference", out=total) is total
    torch.testing.assert_close(total, 2 * once)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": ()}, r"heads \[\] must be distinct heads"),
        ({"heads": (1, 1)}, r"heads \[1, 1\] must be distinct heads"),
        ({"heads": (8,)}, r"heads \[8\] must be distinct heads of q \[2, 3, 8, 32\]"),
        ({"k_cache": torch.zeros(B, Hk, S, 16)}, r"k_cache has shape \[2, 2, 60, 16\]"),
        ({"lengths": torch.tensor([1])}, r"lengths has shape \[1\]"),
        ({"row_weights": torch.ones(B, R + 1)}, r"row_weights has shape \[2, 4\]"),
        ({"out": torch.zeros(B, S).double()}, r"out \[2, 60\] has dtype torch.float64"),
        ({"out": torch.zeros(S, B).T}, r"out \[2, 60\] has strides"),
        ({"backend": "fast"}, r"backend is 'fast'"),
    ],
)
def test_wrong_arguments_raise_with_the_offender(change: dict[str, object], message: str) -> None:
    q, k, lengths = inputs()
    good = {"q": q, "k_cache": k, "lengths": lengths, "heads": (0,), "backend": "reference"}
    with pytest.raises(ValueError, match=message):
        head_scores(**(good | change))
