"""Selection's reference against a plain statement of the rule, ties included, and its boundary."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdial.kernels.selection import select


def select_plainly(scores: list[float], length: int, budget: int, sink: int, recent: int) -> list[int]:
    """The rule in plain Python: protected keys first, then by score, ties to the lowest index; ascending."""

    def rank(i: int) -> tuple[bool, float, int]:
        protected = i < sink or i >= length - recent
        return (not protected, 0.0 if protected else -scores[i], i)

    return sorted(sorted(range(length), key=rank)[:budget])


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[float], int, int, int, int]:
    keys = draw(st.integers(1, 40))
    levels = st.sampled_from([0.0, 0.25, 0.5, 1.0, -1.0, float("-inf")])  # few levels: many ties
    scores = draw(st.lists(levels, min_size=keys, max_size=keys))
    sink, recent = draw(st.integers(0, 4)), draw(st.integers(0, 4))
    budget = draw(st.integers(max(1, sink + recent), 48))
    return scores, draw(st.integers(0, keys)), budget, sink, recent


@settings(max_examples=150, deadline=None)
@given(problems())
def test_reference_is_the_rule(problem: tuple[list[float], int, int, int, int]) -> None:
    scores, length, budget, sink, recent = problem
    got, counts = select(
        torch.tensor(scores).view(1, 1, -1),
        torch.tensor([length]),
        budget=budget,
        sink=sink,
        recent=recent,
        backend="reference",
    )
    want = select_plainly(scores, length, budget, sink, recent)
    assert counts.tolist() == [len(want)]
    padding = [max(length - 1, 0)] * (budget - len(want))
    assert got.view(-1).tolist() == want + padding


def test_keys_past_the_length_are_never_looked_at() -> None:
    scores = torch.rand(2, 3, 50)
    lengths = torch.tensor([20, 50])
    clean = select(scores, lengths, budget=8, sink=1, recent=2, backend="reference")[0]
    scores[0, :, 20:] = float("nan")
    assert torch.equal(select(scores, lengths, budget=8, sink=1, recent=2, backend="reference")[0], clean)


@pytest.mark.parametrize("scope", ["layer", "model"])
def test_a_shared_selection_is_that_of_the_summed_scores(scope: str) -> None:
    scores = torch.rand(3, 2, 4, 60)  # [L, B, Hk, S]
    lengths = torch.tensor([60, 33])
    options = {"budget": 10, "sink": 2, "recent": 3, "backend": "reference"}
    got, counts = select(scores, lengths, scope=scope, **options)
    assert got.shape == (3, 2, 4, 10)
    assert counts.tolist() == [10, 10]
    summed = scores.sum(dim=2, keepdim=True)  # [L, B, 1, S]
    if scope == "model":
        summed = scores.sum(dim=(0, 2))[None, :, None]  # [1, B, 1, S]
    want = select(summed, lengths, **options)[0]
    assert torch.equal(got, want.expand(3, 2, 4, 10))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": torch.rand(4, 9)}, r"scores has shape \[4, 9\]"),
        ({"scores": torch.rand(2, 9, 3).transpose(1, 2)}, r"scores \[2, 3, 9\] has strides"),
        ({"scores": torch.zeros(2, 3, 9, dtype=torch.int64)}, "scores .* dtype"),
        ({"lengths": torch.tensor([9])}, r"lengths has shape \[1\], expected \[2\]"),
        ({"lengths": torch.tensor([9.0, 9.0])}, "lengths .* dtype"),
        ({"budget": 0}, "budget 0"),
        ({"budget": 2, "sink": 2, "recent": 1}, "budget 2 .* sink 2"),
        ({"sink": -1}, "sink -1"),
        ({"scope": "head"}, "scope is 'head'"),
        ({"backend": "cuda"}, "backend is 'cuda'"),
        ({"backend": "triton"}, "needs a CUDA device"),
    ],
)
def test_a_wrong_argument_is_named(change: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    good = {"scores": torch.rand(2, 3, 9), "lengths": torch.tensor([9, 5]), "budget": 4, "sink": 1, "recent": 1}
    arguments = good | {"backend": "reference"} | change
    with pytest.raises(ValueError, match=message):
        select(arguments.pop("scores"), arguments.pop("lengths"), **arguments)
