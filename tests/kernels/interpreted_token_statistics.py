"""Cases for Triton's interpreter: statistics of logits against the reference, over several tiles and splits.

Started by test_decode_step_interpreted.
"""

import pytest
import torch

from specdial.kernels.token_statistics import logit_statistics


def compare(logits: torch.Tensor) -> None:
    """Token and margin equal the reference, the rest float64: torch's own sum over many equal terms is off by 2e-5."""
    want = logit_statistics(logits, backend="reference")
    token, entropy, top1, margin = logit_statistics(logits, backend="triton")
    assert token.dtype == torch.int64
    assert torch.equal(token, want[0])
    assert torch.equal(margin, want[3])
    p = torch.softmax(logits.double(), dim=-1)
    torch.testing.assert_close(entropy.double(), torch.special.entr(p).sum(-1), atol=3e-6, rtol=1e-6)
    torch.testing.assert_close(top1.double(), p.amax(-1), atol=0, rtol=3e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("N", "V"), [(1, 2), (1, 49152), (3, 5001), (40, 2100)])
@pytest.mark.parametrize("spread", [0.01, 3.0, 30.0])
def test_random_logits(dtype: torch.dtype, N: int, V: int, spread: float) -> None:
    torch.manual_seed(V)
    compare((spread * torch.randn(N, V)).to(dtype))


def test_ties_take_the_lowest_index_wherever_they_lie() -> None:
    logits = torch.zeros(6, 40000)
    for row, places in enumerate([(7, 8), (7, 1031), (5, 39999), (39999,), (), (1024, 2048, 30000)]):
        logits[row, list(places)] = 5.0
    compare(logits)
    compare(torch.randint(0, 4, (2, 9000)).float())


def test_impossible_tokens_weigh_nothing() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 9000)
    logits[0, :5000] = float("-inf")
    logits[1, 5000:] = float("-inf")
    logits[2, torch.arange(9000) != 4321] = float("-inf")
    logits[3, torch.arange(9000) % 7 != 0] = torch.finfo(torch.float32).min
    logits[4, 100:] = -2e38
    compare(logits)


def test_a_row_without_a_token_still_names_one_below_the_vocabulary() -> None:
    token = logit_statistics(torch.full((2, 3000), float("-inf")), backend="triton")[0]
    assert token.tolist() == [0, 0]
    token = logit_statistics(torch.full((2, 3000), float("nan")), backend="triton")[0]
    assert ((token >= 0) & (token < 3000)).all()


def test_rows_of_a_wider_tensor() -> None:
    torch.manual_seed(0)
    compare(torch.randn(4, 1500)[:, 100:1400])
