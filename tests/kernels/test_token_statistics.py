"""Statistics of logits: the reference against float64, ties, impossible tokens; the boundary."""

import pytest
import torch

from specdial.kernels.token_statistics import logit_statistics


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_are_the_formulas_in_float64(dtype: torch.dtype) -> None:
    logits = (4 * torch.randn(5, 1000, generator=torch.Generator().manual_seed(0))).to(dtype)
    token, entropy, top1, margin = logit_statistics(logits, backend="reference")
    p = torch.softmax(logits.double(), -1)
    ordered = logits.double().sort(-1, descending=True).values
    assert token.tolist() == [row.tolist().index(max(row.tolist())) for row in logits]
    torch.testing.assert_close(entropy.double(), -(p * p.log()).sum(-1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(top1.double(), p.amax(-1), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(margin.double(), ordered[:, 0] - ordered[:, 1], atol=1e-6, rtol=1e-6)


def test_ties_and_impossible_tokens() -> None:
    inf = float("inf")
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [-inf, 2.0, -inf, -inf], [0.5, 0.5, 0.5, 0.5]])
    token, entropy, top1, margin = logit_statistics(logits, backend="reference")
    assert token.tolist() == [1, 1, 0]
    assert margin.tolist() == [0.0, inf, 0.0]
    torch.testing.assert_close(entropy[1:], torch.tensor([0.0, 4.0]).clamp(min=1.0).log())
    torch.testing.assert_close(top1[1:], torch.tensor([1.0, 0.25]))


@pytest.mark.parametrize(
    ("logits", "backend", "message"),
    [
        (torch.zeros(4), "reference", r"logits has shape \[4\]"),
        (torch.zeros(2, 1), "reference", r"logits has shape \[2, 1\]"),
        (torch.zeros(0, 4), "reference", r"logits has shape \[0, 4\]"),
        (torch.zeros(2, 4).double(), "reference", "logits .* dtype torch.float64"),
        (torch.zeros(4, 2).t(), "reference", r"logits \[2, 4\] has strides \[1, 2\]"),
        (torch.zeros(2, 4), "fast", "backend is 'fast'"),
    ],
)
def test_a_wrong_argument_is_named(logits: torch.Tensor, backend: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        logit_statistics(logits, backend=backend)
