"""Cases for Triton's interpreter: settling a round equals the reference, bit for bit.

Started by test_decode_step_interpreted.
"""

import pytest
import torch

from specdial.kernels.settle import settle


def random_round(B: int, K: int, seed: int) -> dict[str, torch.Tensor]:
    """A round in which runs of drafts are right, some sequences are finished, some nearly so. Drafts are a view."""
    g = torch.Generator().manual_seed(seed)
    vocabulary = 4 if K < 9 else 40
    choices = torch.randint(0, vocabulary, (B, K + 1), generator=g)
    wrong = torch.rand(B, K, generator=g) < 2 / (K + 2)
    block = torch.randint(0, vocabulary, (B, K + 3), generator=g)
    block[:, 1 : K + 1] = torch.where(wrong, block[:, 1 : K + 1], choices[:, :K])
    k = torch.randint(0, K + 1, (B,), generator=g)
    room = torch.randint(0, K + 4, (B,), generator=g) * torch.randint(0, 4, (B,), generator=g).clamp(max=1)
    return {
        "block": block,
        "choices": choices,
        "k": k,
        "room": room,
        "accepted": (torch.rand(B, generator=g) * (k + 1)).long(),
        "counts": torch.full((B,), 99),
        "pending": torch.randint(0, 99, (B,), generator=g),
        "before": torch.randint(0, 99, (B,), generator=g),
        "wide": torch.full((B, K + 5), 99),
    }


def settled(given: dict[str, torch.Tensor], stops: list[int], judged: bool, backend: str) -> dict[str, torch.Tensor]:
    K = given["choices"].shape[1] - 1
    mine = {name: tensor.clone() for name, tensor in given.items()}
    rest = {name: tensor for name, tensor in mine.items() if name not in ("block", "choices", "wide")}
    settle(
        mine["block"][:, 1 : K + 1],
        mine["choices"],
        stop_ids=torch.tensor([*stops, *[-1] * (16 - len(stops))]),
        emitted=mine["wide"][:, : K + 1],
        judged=judged,
        backend=backend,
        **rest,
    )
    return mine


@pytest.mark.parametrize("judged", [False, True])
@pytest.mark.parametrize(("B", "K"), [(1, 0), (5, 0), (1, 1), (17, 3), (9, 8), (6, 15), (4, 63), (3, 64)])
@pytest.mark.parametrize("stops", [[], [2], [0, 3]])
def test_equals_the_reference(judged: bool, B: int, K: int, stops: list[int]) -> None:
    for seed in range(2 * len(stops) + judged, 2 * len(stops) + judged + (1 if K > 8 else 2)):
        given = random_round(B, K, seed)
        want, got = (settled(given, stops, judged, backend) for backend in ("reference", "triton"))
        for name, tensor in want.items():
            assert torch.equal(got[name], tensor), (name, seed)
        assert (got["wide"][:, K + 1 :] == 99).all()


def test_every_draft_right_and_none() -> None:
    for K in (1, 4, 63):
        given = random_round(3, K, 0)
        given |= {"k": torch.full((3,), K), "room": torch.full((3,), 1000)}
        given["block"][:, 1 : K + 1] = given["choices"][:, :K]
        given["block"][1, 1] += 1
        got = settled(given, [], False, "triton")
        assert got["accepted"].tolist() == [K, 0, K]
        assert got["counts"].tolist() == [K + 1, 1, K + 1]
        assert torch.equal(got["wide"][0, : K + 1], given["choices"][0])
