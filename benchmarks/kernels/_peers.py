"""Library attention on the same inputs: SDPA flash and cuDNN, packed and unpacked, and flex_attention.

Packed means the G*T rows of a kv head are one query of G*T positions without a mask inside the block: the same bytes,
slightly more work than causality allows, and what a library can do best. Its output differs from the causal one only
in the new block, so peers are timed, and gated loosely, not used as references.
"""

import importlib.util
from collections.abc import Callable, Sequence

import torch
from _bench import Timing, relative_error
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Peer = Callable[..., torch.Tensor]
LOOSE = 0.05  # the rows that see up to T-1 keys too many


def _pack(q: torch.Tensor, kv_heads: int) -> torch.Tensor:
    B, T, H, D = q.shape
    return q.view(B, T, kv_heads, H // kv_heads, D).permute(0, 2, 1, 3, 4).reshape(B, kv_heads, -1, D)


def _unpack(out: torch.Tensor, T: int) -> torch.Tensor:
    B, Hk, M, D = out.shape
    return out.view(B, Hk, T, M // T, D).permute(0, 2, 1, 3, 4).reshape(B, T, -1, D)


def _packed(backend: SDPBackend) -> Peer:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return _unpack(sdpa(_pack(q, k.shape[1]), k, v), q.shape[1])

    return call


def _unpacked(backend: SDPBackend) -> Peer:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return sdpa(q.transpose(1, 2), k, v, enable_gqa=True).transpose(1, 2)

    return call


def _flex(sample: Inputs) -> Peer:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, _, lengths = sample
    first = int(lengths[0])
    mask = create_block_mask(lambda b, h, t, n: n <= first + t, None, None, q.shape[1], k.shape[2], device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return compiled(q.transpose(1, 2), k, v, block_mask=mask, enable_gqa=True).transpose(1, 2)

    return call


def peers(sample: Inputs, *, flex: bool) -> dict[str, Callable[[], Peer]]:
    """Name to a constructor, which may fail where a library cannot do the shape."""
    found: dict[str, Callable[[], Peer]] = {
        "sdpa_flash_packed": lambda: _packed(SDPBackend.FLASH_ATTENTION),
        "sdpa_cudnn_packed": lambda: _packed(SDPBackend.CUDNN_ATTENTION),
        "sdpa_flash": lambda: _unpacked(SDPBackend.FLASH_ATTENTION),
        "sdpa_cudnn": lambda: _unpacked(SDPBackend.CUDNN_ATTENTION),
    }
    if flex:  # slow to compile
        found["flex"] = lambda: _flex(sample)
    return found


def time_peers(
    sets: Sequence[Inputs], timer: Callable[[Peer], Timing], want: torch.Tensor, *, flex: bool
) -> dict[str, float | str]:
    """Median microseconds of every peer, or the reason it has none."""
    result: dict[str, float | str] = {}
    for name, build in peers(sets[0], flex=flex).items():
        try:
            peer = build()
            error = relative_error(peer(*sets[0]), want)
            if not error <= LOOSE:
                result[name] = f"wrong: relative error {error:.1e}"
                continue
            result[name] = round(timer(peer).median_us, 3)
        except Exception as problem:  # a peer may refuse a shape; the reason is part of the result
            result[name] = f"{type(problem).__name__}: {str(problem).splitlines()[0][:80]}"
            torch.cuda.synchronize()
    result["flashinfer"] = "installed, not measured" if importlib.util.find_spec("flashinfer") else "not installed"
    return result
