"""What ends a round on a GPU: settling equals its reference, alone and inside a graph; timestamps bracket the work."""

import pytest
import torch

from specdial.kernels.settle import settle
from specdial.kernels.timestamp import timestamp

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

VECTORS = ("k", "room", "accepted", "counts", "pending", "before")


def random_round(B: int, K: int, seed: int) -> dict[str, torch.Tensor]:
    """A round in which runs of drafts are right, some sequences are finished, some nearly so."""
    g = torch.Generator(device="cuda").manual_seed(seed)

    def integers(most: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, most, shape, generator=g, device="cuda")

    choices = integers(20, B, K + 1)
    wrong = integers(K + 2, B, K) < 2
    block = integers(20, B, K + 3)
    block[:, 1 : K + 1] = torch.where(wrong, block[:, 1 : K + 1], choices[:, :K])
    k = integers(K + 1, B)
    room = integers(K + 4, B) * integers(4, B).clamp(max=1)
    columns = {"k": k, "room": room, "accepted": k - integers(K + 1, B).minimum(k), "counts": integers(9, B)}
    columns |= {"pending": integers(99, B), "before": integers(99, B)}
    return {"block": block, "choices": choices, "wide": integers(9, B, K + 5), **columns}


def run(given: dict[str, torch.Tensor], stops: torch.Tensor, judged: bool, backend: str) -> None:
    K = given["choices"].shape[1] - 1
    settle(
        given["block"][:, 1 : K + 1], given["choices"], stop_ids=stops, emitted=given["wide"][:, : K + 1],
        judged=judged, backend=backend, **{name: given[name] for name in VECTORS},
    )  # fmt: skip


@pytest.fixture
def stops() -> torch.Tensor:
    return torch.tensor([3, 11, *[-1] * 14], device="cuda")


@pytest.mark.parametrize("judged", [False, True])
@pytest.mark.parametrize(("B", "K"), [(1, 0), (300, 0), (1, 1), (64, 4), (1000, 8), (33, 15), (64, 63), (7, 64)])
def test_random_rounds_equal_the_reference(judged: bool, B: int, K: int, stops: torch.Tensor) -> None:
    for seed in range(5):
        got = random_round(B, K, seed)
        want = {name: tensor.clone() for name, tensor in got.items()}
        run(want, stops, judged, "reference")
        run(got, stops, judged, "triton")
        for name, tensor in want.items():
            assert torch.equal(got[name], tensor), (name, seed)


def test_rounds_in_a_graph_equal_the_reference(stops: torch.Tensor) -> None:
    """Several settled in one graph, each from what the last one left: early launches must not read too early."""
    got = random_round(64, 8, 0)
    run({name: tensor.clone() for name, tensor in got.items()}, stops, False, "triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):
            run(got, stops, False, "triton")
    for seed in range(1, 6):
        fresh = random_round(64, 8, seed)
        fresh["room"] *= 3
        want = {name: tensor.clone() for name, tensor in fresh.items()}
        for name, tensor in got.items():
            tensor.copy_(fresh[name])
        graph.replay()
        for _ in range(4):
            run(want, stops, False, "reference")
        for name, tensor in want.items():
            assert torch.equal(got[name], tensor), (name, seed)


def test_settling_waits_for_nothing_on_the_host(stops: torch.Tensor) -> None:
    given = random_round(8, 4, 0)
    run(given, stops, False, "triton")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(given, stops, False, "triton")
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_timestamps_bracket_the_work_between_them() -> None:
    """The same product, timed by timestamps and by events, alone and inside a graph."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    moments = torch.zeros(5, device="cuda", dtype=torch.int64)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def work() -> None:
        timestamp(moments, 0, 1, backend="triton")
        for _ in range(4):
            torch.mm(a, a)
        timestamp(moments, 2, 2, backend="triton")
        timestamp(moments, 3, 4, backend="triton")

    for _ in range(3):
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    check(moments.tolist(), start.elapsed_time(end) * 1e6)
    with torch.cuda.graph(graph):
        work()
    last = 0
    for _ in range(3):
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found = moments.tolist()
        check(found, start.elapsed_time(end) * 1e6)
        assert found[0] > last
        last = found[-1]


def check(moments_ns: list[int], elapsed_ns: float) -> None:
    """Moments are in order, and the work is nearly all that lies between the events around it."""
    assert moments_ns == sorted(moments_ns)
    assert moments_ns[0] == moments_ns[1]
    assert moments_ns[3] == moments_ns[4]
    worked_ns = moments_ns[2] - moments_ns[1]
    assert 0.5 * elapsed_ns < worked_ns < 1.05 * elapsed_ns + 5000
