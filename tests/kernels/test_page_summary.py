"""Page summaries and scores: the references against loops over keys in float64, and the boundary."""

import pytest
import torch

from specdial.kernels.page_summary import score_pages, update_pages


def summaries(k: torch.Tensor, page: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Empty (NaN) summaries for a cache."""
    B, Hk, S, D = k.shape
    low = torch.full((B, Hk, -(-S // page), D), float("nan"), dtype=k.dtype)
    return low, low.clone()


@pytest.mark.parametrize("page", [4, 16])
def test_rounds_of_any_size_leave_the_min_and_max_of_the_committed_keys(page: int) -> None:
    torch.manual_seed(page)
    k = torch.randn(2, 2, 75, 64)
    low, high = summaries(k, page)
    lengths = torch.tensor([0, 0], dtype=torch.int32)
    for added in ([37, 1], [1, 0], [0, 16], [5, 20], [32, 33]):
        end = lengths + torch.tensor(added, dtype=torch.int32)
        drafted = k.clone()  # what drafting left past the committed keys must not be seen
        for b in range(2):
            drafted[b, :, int(end[b]) :] = 100.0
        update_pages(
            drafted, low, high, lengths, end - lengths, page=page, max_tokens=max(*added, 1), backend="reference"
        )
        lengths = end
        for b in range(2):
            for number in range(low.shape[2]):
                keys = k[b, :, number * page : min((number + 1) * page, int(lengths[b]))]
                if keys.shape[1] == 0:
                    assert low[b, :, number].isnan().all()
                else:
                    assert torch.equal(low[b, :, number], keys.amin(dim=1))
                    assert torch.equal(high[b, :, number], keys.amax(dim=1))


def score_plainly(q: torch.Tensor, low: torch.Tensor, high: torch.Tensor, rule: str) -> float:
    """One query head against one page, in float64."""
    q, low, high = q.double(), low.double(), high.double()
    if rule == "specpv":
        return max(float(q @ high), float(q @ low))
    return float(torch.maximum(q * high, q * low).sum())


@pytest.mark.parametrize("rule", ["specpv", "quest"])
@pytest.mark.parametrize("pool", ["mean", "max", "last"])
@pytest.mark.parametrize(("T", "G"), [(1, 1), (3, 6), (20, 3)])
def test_scores_are_the_rule(rule: str, pool: str, T: int, G: int) -> None:
    torch.manual_seed(T)
    B, Hk, S, D, page = 2, 1, 40, 64, 8
    k, q = torch.randn(B, Hk, S, D), torch.randn(B, T, Hk * G, D)
    lengths, rows = torch.tensor([33, 8]), torch.tensor([T, max(1, T // 2)])
    low, high = summaries(k, page)
    update_pages(k, low, high, torch.zeros_like(lengths), lengths, page=page, max_tokens=33, backend="reference")
    q[1, int(rows[1]) :] = 50.0  # rejected rows do not count
    got = score_pages(q, low, high, lengths, page=page, rule=rule, backend="reference", pool=pool, rows=rows)
    for b in range(B):
        for number in range(S // page):
            if number * page >= int(lengths[b]):
                assert got[b, 0, number] == float("-inf")
                continue
            by_row = [
                sum(score_plainly(q[b, t, g], low[b, 0, number], high[b, 0, number], rule) for g in range(G)) / G
                for t in range(int(rows[b]))
            ]
            want = {"mean": sum(by_row) / len(by_row), "max": max(by_row), "last": by_row[-1]}[pool]
            assert float(got[b, 0, number]) == pytest.approx(want, abs=2e-4)


def test_quest_bounds_every_key_of_its_page() -> None:
    torch.manual_seed(0)
    k, q = torch.randn(1, 1, 64, 64), torch.randn(1, 1, 1, 64)
    low, high = summaries(k, 16)
    lengths = torch.tensor([64])
    update_pages(k, low, high, torch.tensor([0]), lengths, page=16, max_tokens=64, backend="reference")
    bound = score_pages(q, low, high, lengths, page=16, rule="quest", backend="reference")[0, 0]
    largest = (k[0, 0] @ q[0, 0, 0]).view(4, 16).amax(dim=1)
    assert (bound >= largest).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k_cache": torch.zeros(1, 2, 40, 64)}, r"page_min \[1, 2, 2, 64\] does not cover k_cache \[1, 2, 40, 64\]"),
        ({"k_cache": torch.zeros(1, 1, 32, 64)}, r"k_cache has shape \[1, 1, 32, 64\]"),
        ({"page_max": torch.zeros(1, 2, 3, 64)}, r"page_max has shape \[1, 2, 3, 64\]"),
        ({"page_min": torch.zeros(1, 2, 64, 2).transpose(2, 3)}, "page_min .* strides"),
        ({"page": 5}, "page is 5"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"committed": torch.tensor([1, 2])}, r"committed has shape \[2\]"),
        ({"lengths": torch.tensor([1.0])}, "lengths .* dtype"),
        ({"backend": "fast"}, "backend is 'fast'"),
    ],
)
def test_a_wrong_argument_is_named(change: dict[str, object], message: str) -> None:
    summary = torch.zeros(1, 2, 2, 64)
    call = {
        "k_cache": torch.zeros(1, 2, 32, 64), "page_min": summary, "page_max": summary.clone(),
        "lengths": torch.tensor([3]), "committed": torch.tensor([1]), "page": 16, "max_tokens": 4,
        "backend": "reference",
    } | change  # fmt: skip
    tensors = [call.pop(name) for name in ("k_cache", "page_min", "page_max", "lengths", "committed")]
    with pytest.raises(ValueError, match=message):
        update_pages(*tensors, **call)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(1, 1, 3, 64)}, r"q \[1, 1, 3, 64\] needs"),
        ({"q": torch.zeros(1, 1, 4, 64).half()}, "q .* dtype"),
        ({"rule": "mean"}, "rule is 'mean'"),
        ({"pool": "sum"}, "pool is 'sum'"),
        ({"rows": torch.tensor([1, 1])}, r"rows has shape \[2\]"),
    ],
)
def test_a_wrong_scoring_argument_is_named(change: dict[str, object], message: str) -> None:
    summary = torch.zeros(1, 2, 2, 64)
    call = {"q": torch.zeros(1, 1, 4, 64), "page": 16, "rule": "quest", "backend": "reference"} | change
    with pytest.raises(ValueError, match=message):
        score_pages(call.pop("q"), summary, summary, torch.tensor([20]), **call)
