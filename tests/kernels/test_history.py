"""The history's references: a ring and a decayed score, functions of the committed sequence alone."""

import pytest
import torch

from specdial.kernels.history import decay_rows, push_rows

B, Hk, S = 2, 2, 40


def masses(steps: int) -> torch.Tensor:
    """One row of mass for every position of a sequence: [B, Hk, steps, S]."""
    return torch.rand(B, Hk, steps, S, generator=torch.Generator().manual_seed(0))


def replay(rounds: list[int], window: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Commit positions 0 .. sum(rounds) - 1 in rounds of those sizes, each verifying two rows too many."""
    rows = masses(sum(rounds) + 2)
    ring, score, decayed = torch.zeros(B, Hk, window, S), torch.zeros(B, Hk, S), torch.zeros(B, Hk, S)
    done = 0
    for committed in rounds:
        verified = rows[:, :, done : done + committed + 2]
        lengths, counts = torch.full((B,), done), torch.full((B,), committed)
        push_rows(ring, verified, lengths, counts, backend="reference", score=score)
        decay_rows(decayed, verified, lengths, counts, decay=0.8, backend="reference")
        done += committed
    return ring, score, decayed


@pytest.mark.parametrize("window", [1, 4, 16])
def test_bits_do_not_depend_on_the_rounds(window: int) -> None:
    whole = replay([12], window)
    for rounds in ([1] * 12, [5, 0, 7], [3, 3, 3, 3]):
        for got, want in zip(replay(rounds, window), whole):
            assert torch.equal(got, want)


def test_scores_are_the_last_rows_summed_and_the_decayed_sum() -> None:
    ring, score, decayed = replay([7, 5], 4)
    rows = masses(14)
    torch.testing.assert_close(score, rows[:, :, 8:12].sum(2))
    torch.testing.assert_close(ring.sum(2), score)
    fade = 0.8 ** torch.arange(11, -1, -1.0)
    torch.testing.assert_close(decayed, (rows[:, :, :12] * fade[:, None]).sum(2))


def test_layers_stacked_in_the_batch_share_lengths() -> None:
    rows, lengths, committed = masses(3), torch.tensor([5, 9]), torch.tensor([3, 1])
    one, two = torch.zeros(B, Hk, 4, S + 2), torch.zeros(3 * B, Hk, 4, S + 2)
    push_rows(one, rows, lengths, committed, backend="reference")
    push_rows(two, rows.repeat(3, 1, 1, 1), lengths, committed, backend="reference")
    assert torch.equal(two, one.repeat(3, 1, 1, 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ring": torch.zeros(B, Hk, S)}, r"ring has shape \[2, 2, 40\]"),
        ({"ring": torch.zeros(B, Hk, S, 4).transpose(2, 3)}, r"ring \[2, 2, 4, 40\] with strides"),
        ({"ring": torch.zeros(B, Hk, 4, 8)}, r"mass \[2, 2, 3, 40\] is wider than the history, 40 > 8"),
        ({"mass": torch.zeros(B, 1, 3, S)}, r"mass has shape \[2, 1, 3, 40\]"),
        ({"lengths": torch.tensor([1, 2, 3])}, r"lengths has shape \[3\]"),
        ({"committed": torch.tensor([1.0, 2.0])}, r"committed \[2\] has dtype torch.float32"),
        ({"score": torch.zeros(B, Hk, 8)}, r"score has shape \[2, 2, 8\]"),
    ],
)
def test_wrong_arguments_raise_with_the_offender(change: dict[str, torch.Tensor], message: str) -> None:
    good = {"ring": torch.zeros(B, Hk, 4, S), "mass": masses(3), "lengths": torch.tensor([1, 2])}
    good["committed"] = torch.tensor([1, 1])
    with pytest.raises(ValueError, match=message):
        push_rows(**(good | change), backend="reference")


def test_decay_outside_its_range_is_refused() -> None:
    with pytest.raises(ValueError, match=r"decay is 1\.5"):
        decay_rows(
            torch.zeros(B, Hk, S), masses(1), torch.tensor([1, 2]), torch.tensor([1, 1]), decay=1.5, backend="reference"
        )
