"""Full attention's reference against a float64 loop over rows, its statistics, and its boundary."""

import pytest
import torch

from specdial.kernels.full_attention import Statistics, full_attention, full_attention_raw
from specdial.kernels.full_attention.reference import normalise_reference


def naive(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Float64 attention one row at a time, and the pooled mass of every key."""
    (B, T, H, D), (Hk, S) = q.shape, k.shape[1:3]
    q, k, v = q.double(), k.double(), v.double()
    out, mass = torch.zeros_like(q), torch.zeros(B, Hk, T, S, dtype=torch.float64)
    for b in range(B):
        for t in range(T):
            seen = int(lengths[b]) + t + 1
            for h in range(H):
                kv = h // (H // Hk)
                weights = torch.softmax(k[b, kv, :seen] @ q[b, t, h] * D**-0.5, dim=0)
                out[b, t, h] = weights @ v[b, kv, :seen]
                mass[b, kv, t, :seen] += weights
    return out, mass


def make(T: int, G: int, D: int, S: int, lengths: list[int]) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(T + S)
    B, Hk = len(lengths), 2
    q = torch.randn(B, T, Hk * G, D)
    return q, torch.randn(B, Hk, S, D), torch.randn(B, Hk, S, D), torch.tensor(lengths)


@pytest.mark.parametrize(
    ("T", "G", "D", "S", "lengths"),
    [
        (1, 1, 64, 70, [1, 0]),
        (5, 3, 128, 72, [63, 67]),
        (3, 6, 64, 1003, [1000]),
        (33, 8, 64, 80, [40]),
        (2, 7, 32, 9, [7]),
    ],
)
def test_reference_matches_float64(T: int, G: int, D: int, S: int, lengths: list[int]) -> None:
    inputs = make(T, G, D, S, lengths)
    want, mass = naive(*inputs)
    out, tokens = full_attention(*inputs, backend="reference", mass=True)
    torch.testing.assert_close(out.double(), want, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(tokens.double(), mass, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(tokens.sum(-1), torch.full(tokens.shape[:3], float(G)))


def test_a_tree_row_sees_what_its_path_alone_would_see() -> None:
    """Every row of a tree against causal attention over the prefix and its ancestors in a row."""
    parents = [0, 0, 0, 1, 1, 2, 3, 6]
    paths = []
    for node in range(len(parents)):
        path = [node]
        while path[-1]:
            path.append(parents[path[-1]])
        paths.append(path[::-1])
    q, k, v, lengths = make(len(parents), 3, 32, 80, [63, 5])
    ancestors = torch.zeros(2, len(parents), len(parents), dtype=torch.bool)
    for node, path in enumerate(paths):
        ancestors[:, node, path] = True
    out, _ = full_attention(q, k, v, lengths, backend="reference", ancestors=ancestors)
    for b, length in enumerate(lengths.tolist()):
        for node, path in enumerate(paths):
            keys = [*range(length), *(length + n for n in path)]
            one = slice(b, b + 1)
            own = (q[one, node : node + 1], k[one, :, keys], v[one, :, keys])
            alone, _ = naive(*own, torch.tensor([len(keys) - 1]))
            torch.testing.assert_close(out[b, node].double(), alone[0, 0], atol=2e-6, rtol=1e-5)
    causal = torch.ones(2, 8, 8, dtype=torch.bool).tril()
    chain = [full_attention(q, k, v, lengths, backend="reference", ancestors=a)[0] for a in (causal, None)]
    assert torch.equal(*chain)


@pytest.mark.parametrize("page", [16, 32, 64])
def test_page_masses_are_summed_token_masses_raw_or_not(page: int) -> None:
    inputs = make(3, 4, 32, 150, [100, 147])
    _, tokens = full_attention(*inputs, backend="reference", mass="token")
    want = torch.nn.functional.pad(tokens, (0, -150 % page)).unflatten(-1, (-1, page)).sum(-1)
    _, pages = full_attention(*inputs, backend="reference", mass="page", page_tokens=page)
    torch.testing.assert_close(pages, want)
    for granularity, mass in (("page", want), ("token", tokens)):
        _, raw = full_attention_raw(*inputs, backend="reference", granularity=granularity, page_tokens=page)
        assert (raw.rows, raw.width) == (3, mass.shape[-1])
        torch.testing.assert_close(normalise_reference(raw), mass, atol=1e-6, rtol=1e-4)


def test_statistics_of_two_layers_share_one_buffer() -> None:
    inputs = make(2, 3, 32, 100, [10, 90])
    both = Statistics.empty("page", batch=4, kv_heads=2, keys=100, rows=2, group=3)
    for layer in (0, 1):
        full_attention_raw(*inputs, backend="reference", into=both.layer(layer, 2))
    _, mass = full_attention(*inputs, backend="reference", mass="page")
    torch.testing.assert_close(normalise_reference(both), mass.repeat(2, 1, 1, 1), atol=1e-6, rtol=1e-4)


def test_rows_do_not_depend_on_their_block() -> None:
    """Row t of a verification equals the decode step at that position, up to rounding."""
    q, k, v, _ = make(4, 3, 64, 50, [40])
    together, _ = full_attention(q, k, v, torch.tensor([40]), backend="reference")
    for t in range(4):
        alone, _ = full_attention(q[:, t : t + 1], k, v, torch.tensor([40 + t]), backend="reference")
        torch.testing.assert_close(together[:, t : t + 1], alone, atol=1e-6, rtol=1e-6)


def arguments(**change: object) -> dict[str, object]:
    good: dict[str, object] = {
        "q": torch.zeros(2, 3, 4, 64),
        "k_cache": torch.zeros(2, 2, 9, 64),
        "v_cache": torch.zeros(2, 2, 9, 64),
        "lengths": torch.tensor([1, 2]),
        "backend": "reference",
    }
    return good | change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 3, 64)}, r"q has shape \[2, 3, 64\]"),
        ({"q": torch.zeros(2, 3, 5, 64)}, r"q \[2, 3, 5, 64\] does not fit k_cache \[2, 2, 9, 64\]"),
        ({"q": torch.zeros(2, 10, 4, 64)}, r"q \[2, 10, 4, 64\] has more positions"),
        ({"k_cache": torch.zeros(2, 2, 9, 32)}, r"k_cache has shape \[2, 2, 9, 32\]"),
        ({"v_cache": torch.zeros(2, 2, 8, 64)}, r"v_cache has shape \[2, 2, 8, 64\], expected \[2, 2, 9, 64\]"),
        ({"v_cache": torch.zeros(2, 2, 9, 64).half()}, r"v_cache \[2, 2, 9, 64\] has dtype torch.float16"),
        ({"q": torch.zeros(2, 3, 4, 64).double()}, r"q \[2, 3, 4, 64\] has dtype torch.float64"),
        ({"k_cache": torch.zeros(2, 2, 64, 9).transpose(2, 3)}, r"k_cache \[2, 2, 9, 64\] has strides"),
        ({"k_cache": torch.zeros(2, 2, 9, 64, device="meta")}, r"k_cache \[2, 2, 9, 64\] is on meta"),
        ({"lengths": torch.tensor([1])}, r"lengths has shape \[1\], expected \[2\]"),
        ({"lengths": torch.tensor([1.0, 2.0])}, r"lengths \[2\] has dtype torch.float32"),
        ({"backend": "cuda"}, r"backend is 'cuda'"),
        ({"mass": "head"}, r"mass is 'head'"),
        ({"page_tokens": 48}, r"page_tokens is 48"),
        (
            {"ancestors": torch.ones(2, 2, 4, dtype=torch.bool)},
            r"ancestors has shape \[2, 2, 4\], expected \[2, 3, any\]",
        ),
        ({"ancestors": torch.ones(2, 3, 4)}, r"ancestors \[2, 3, 4\] has dtype torch.float32"),
        ({"ancestors": torch.ones(2, 3, 10, dtype=torch.bool)}, r"ancestors \[2, 3, 10\] does not fit k_cache"),
        ({"ancestors": torch.ones(2, 3, 4, dtype=torch.bool), "mass": True}, "mass is asked for with ancestors"),
    ],
)
def test_wrong_arguments_raise_with_the_offender(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        full_attention(**arguments(**change))


def test_triton_without_a_gpu_is_refused_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="needs a CUDA device"):
        full_attention(**arguments(backend="triton"))


def test_statistics_of_the_wrong_shape_are_refused() -> None:
    into = Statistics.empty("token", batch=2, kv_heads=2, keys=8, rows=3, group=2)
    with pytest.raises(ValueError, match=r"into\.log_mass has shape \[2, 2, 6, 8\], expected \[2, 2, 6, 9\]"):
        full_attention_raw(**arguments(), into=into)
