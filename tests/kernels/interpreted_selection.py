"""Cases for Triton's interpreter: selection's kernels against the reference.

Started by test_sparse_attention_interpreted. Leaves out races, which only a GPU can show: tests/gpu looks for them.
"""

import pytest
import torch

from specdial.kernels.selection import launch as module
from specdial.kernels.selection import select


def scores_of(kind: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Random, tied or constant scores; signed zeros and -inf among the tied ones."""
    generator = torch.Generator().manual_seed(7)
    if kind == "random":
        return torch.randn(shape, generator=generator)
    if kind == "ties":
        levels = torch.tensor([-0.0, 0.0, 1.0, -1.0, float("-inf"), 0.5])
        return levels[torch.randint(0, 6, shape, generator=generator)]
    return torch.full(shape, -2.5)


def poisoned(scores: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """NaN past each length: reading it would show."""
    hidden = torch.arange(scores.shape[-1]) >= lengths[:, None, None]
    return scores.masked_fill(hidden, float("nan"))


@pytest.mark.parametrize("kind", ["random", "ties", "constant"])
@pytest.mark.parametrize(("S", "budget"), [(1, 1), (63, 8), (63, 40), (63, 100), (1000, 31)])
def test_short_rows_take_one_launch(kind: str, S: int, budget: int) -> None:
    scores, lengths = scores_of(kind, (2, 3, 1, S)), torch.tensor([S, S // 3, 0], dtype=torch.int32)
    options = {"budget": budget, "sink": min(2, budget // 2), "recent": min(4, budget // 2)}
    want = select(scores, lengths, backend="reference", **options)
    got = select(poisoned(scores, lengths), lengths, backend="triton", **options)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("kind", ["random", "ties", "constant"])
@pytest.mark.parametrize(("chunk", "budget"), [(256, 8), (64, 8), (64, 31), (64, 100)])
def test_long_rows_are_filtered_and_merged(kind: str, chunk: int, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_KEYS", 512)  # small lists: several rounds of merging
    scores, lengths = scores_of(kind, (1, 3, 1, 300)), torch.tensor([300, 77, 3])
    options = {"budget": budget, "sink": 2, "recent": 4}
    want = select(scores, lengths, backend="reference", **options)
    config = module.SelectConfig(chunk=chunk, warps=1, direct=0)
    got = module.select_triton(poisoned(scores, lengths), lengths, config=config, **options)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


def test_rows_cut_out_of_a_wider_buffer() -> None:
    wide, lengths = torch.randn(2, 2, 3, 80).half(), torch.tensor([50, 20])
    options = {"budget": 9, "sink": 1, "recent": 2}
    for scope in ("kv_head", "layer", "model"):
        want = select(wide[..., :50], lengths, backend="reference", scope=scope, **options)
        got = select(wide[..., :50], lengths, backend="triton", scope=scope, **options)
        assert torch.equal(got[0], want[0])
    with pytest.raises(ValueError, match="rows must be evenly spaced"):
        select(wide[:, :, 1:, :50], lengths, backend="triton", **options)
