"""How much memory a job will take, known before any of it is allocated, and what fits where it would not.

The large parts are asked of the very objects that will hold them, made on the meta device, where tensors have shapes
and no memory. Activations are a bound. On a GPU the parts that a pass makes and drops count twice (`graphs`): captured
passes keep them in a pool of their own, while the next pass is practised outside it.

Keys in host memory leave on the device 4 B Hk S D values for two layers of keys and values, and 2 L B Hk G D for the G
keys per kv head that policies gather; the host holds 2 L B Hk S D.

Leaves out what sampled decoding adds to logits. Draft models and page summaries are added where sequences are made.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch

from specdial.engine.cache import KVCache, round_up
from specdial.engine.history import History, HistorySpec
from specdial.engine.models.config import ModelConfig
from specdial.engine.models.tensors import tensor_shapes
from specdial.engine.offload import HostCache
from specdial.engine.prefill import CPU_CHUNK_TOKENS, CUDA_CHUNK_TOKENS, ROW_MULTIPLE
from specdial.kernels import Backend
from specdial.policies.errors import UserError
from specdial.policies.placement import Where

META = torch.device("meta")
CUDA_FIXED_BYTES = 512 << 20  # library workspaces, kernels, graphs' own nodes, blocks rounded up by the allocator
CPU_FIXED_BYTES = 64 << 20
HOST_USED_FRAC = 0.95  # of free host memory: what is locked there nobody else can have


@dataclass(frozen=True, slots=True)
class Demand:
    """What sequences are wanted for.

    backend: triton on a GPU, else reference. longest_tokens: of a sequence, prompt and output. k_max: most drafts of a
    round. history: of the attention rows, None when nothing drafts. selected: most keys a draft selects per kv head.
    float8: drafts read float8 copies of the weights. recomputed: most committed rows that a block puts in front of its
    own; where blocks do, logits are those of all its rows. kv_where: where the cache lives. gathered: keys per kv head
    that are held on the device beside it, in all.
    """

    config: ModelConfig
    dtype: torch.dtype
    backend: Backend
    batch: int
    longest_tokens: int
    k_max: int
    history: HistorySpec | None
    selected: int
    float8: bool = False
    recomputed: int = 0
    kv_where: Where = "device"
    gathered: int = 0

    @property
    def capacity_tokens(self) -> int:
        """The capacity to build `Sequences` with: the longest one, and the block behind it."""
        return self.longest_tokens + self.k_max + 1


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes by what they hold.

    weights: of the model, loaded already. kv_cache: what of it is on the device, gathered keys included. history: ring,
    scores and their saved copy. statistics: attention rows of the widest block, raw. logits: of the widest block.
    selection: the chosen keys' indices, on a CPU the keys too. activations: of the largest chunk or block. float8: of
    the weights' copies, a byte each on a GPU, in the dtype on a CPU. graphs: see the module's first lines. fixed: a
    margin.
    """

    weights: int
    kv_cache: int
    history: int
    statistics: int
    logits: int
    selection: int
    activations: int
    float8: int
    graphs: int
    fixed: int

    @property
    def total(self) -> int:
        return sum(getattr(self, f.name) for f in fields(self))

    @property
    def to_allocate(self) -> int:
        """Everything but the weights."""
        return self.total - self.weights


def predict(demand: Demand) -> Memory:
    """Bytes of every part. Grows with batch and longest_tokens."""
    c, size, on_gpu = demand.config, demand.dtype.itemsize, demand.backend == "triton"
    cache = cache_of(demand)
    keys, rows = cache.capacity_tokens, demand.k_max + 1 + demand.recomputed
    rows = rows if on_gpu else round_up(rows, ROW_MULTIPLE)
    history = statistics = 0
    if demand.history is not None:
        held = History(c, demand.batch, keys, demand.history, device=META, backend=demand.backend)
        history = 2 * (held.ring.nbytes + held.scores().nbytes)
        tail = round_up(demand.history.window, ROW_MULTIPLE)  # of a prompt, one sequence at a time
        statistics = max(_statistics(held, rows, demand.batch), _statistics(held, tail, 1))
    logits = demand.batch * rows * c.vocab * (4 if size == 4 else 4 + size)  # in the dtype, then in float32
    lanes = c.layers * demand.batch * c.kv_heads
    chosen = min(demand.selected, keys) if demand.history is not None else 0
    selection = lanes * chosen * 4
    if not on_gpu and chosen:
        selection += 2 * lanes * round_up(chosen + demand.k_max, 64) * c.head_dim * size
    gathered = 2 * lanes * demand.gathered * c.head_dim * size
    block, chunk = _activations(demand, demand.batch * rows, keys), _chunk_activations(demand, keys)
    weights = sum(torch.Size(shape).numel() for _, shape in tensor_shapes(c))
    return Memory(
        weights=weights * size,
        kv_cache=cache.device_bytes + gathered,
        history=history,
        statistics=statistics,
        logits=logits,
        selection=selection,
        activations=max(block, chunk) + keys * c.head_dim * 4,  # and the table of angles
        float8=weights * (1 if on_gpu else size) if demand.float8 else 0,
        graphs=statistics + logits + selection + block if on_gpu else 0,
        fixed=CUDA_FIXED_BYTES if on_gpu else CPU_FIXED_BYTES,
    )


def cache_of(demand: Demand) -> KVCache:
    """The cache that such sequences will have, without its memory."""
    made = HostCache if demand.kv_where == "host" else KVCache
    return made(demand.config, demand.batch, demand.capacity_tokens + ROW_MULTIPLE, device=META, dtype=demand.dtype)


def _statistics(history: History, rows: int, batch: int) -> int:
    """Bytes of the attention rows of a block, all layers."""
    raw = history.rows(rows, batch).raw
    if raw is not None:
        return sum(t.nbytes for t in (raw.log_mass, raw.tile_max, raw.lse) if t is not None)
    c = history.config
    return c.layers * batch * c.kv_heads * rows * (history.keys // history.spec.page) * 4  # float32


def _activations(demand: Demand, tokens: int, keys: int) -> int:
    """A bound on what one layer makes of a verified block of so many tokens in all."""
    c = demand.config
    if demand.backend == "triton":  # float32 partial sums of attention
        return tokens * (_layer_bytes(demand) + 3 * c.heads * c.head_dim * 4)
    return tokens * (2 * _layer_bytes(demand) + 3 * c.heads * keys * 4)  # scores and weights of attention


def _chunk_activations(demand: Demand, keys: int) -> int:
    """A bound on what one layer makes of a chunk of a prompt, or on a CPU of its end."""
    if demand.backend == "triton":
        return _activations(demand, min(CUDA_CHUNK_TOKENS, keys), keys)
    chunk = min(CPU_CHUNK_TOKENS, keys) * (2 * _layer_bytes(demand) + 5 * keys)  # the mask, as booleans and as float32
    tail = 0 if demand.history is None else _activations(demand, round_up(demand.history.window, ROW_MULTIPLE), keys)
    return max(chunk, tail)


def _layer_bytes(demand: Demand) -> int:
    """Of one token's tensors in a layer, counted as if all lived at once."""
    c = demand.config
    width = 4 * c.hidden + 3 * c.intermediate + (3 * c.heads + 2 * c.kv_heads) * c.head_dim
    return width * demand.dtype.itemsize


def require(demand: Demand, free_bytes: int) -> Memory:
    """The prediction, if it fits into `free_bytes` beside the weights.

    Raises UserError that says what is needed, and the largest batch and the longest sequence that fit by themselves.
    """
    memory = predict(demand)
    if memory.to_allocate <= free_bytes:
        return memory
    batch, longest = (
        largest(demand, name, lambda changed: predict(changed).to_allocate <= free_bytes)
        for name in ("batch", "longest_tokens")
    )
    ways = [f"the batch to {batch}"] if batch else []
    ways += [f"context and new tokens together to {longest}"] if longest else []
    parts = [f"{f.name.replace('_', ' ')} {_text(getattr(memory, f.name))}" for f in fields(memory)[1:]]
    raise UserError(
        f"batch {demand.batch} at {demand.longest_tokens} tokens needs {_text(memory.to_allocate)} beside the weights "
        f"({', '.join(parts)}), {_text(max(free_bytes, 0))} are free",
        f"lower {' or '.join(ways)}" if ways else "use a smaller model or a device with more memory",
    )


def require_host(demand: Demand, free_bytes: int) -> int:
    """Bytes of host memory that the cache takes, 0 where it lives on the device.

    Raises UserError unless they fit into HOST_USED_FRAC of `free_bytes`, with the longest sequence that does.
    """

    def taken(of: Demand) -> int:
        cache = cache_of(of)
        return cache.k.nbytes + cache.v.nbytes

    if demand.kv_where == "device":
        return 0
    if taken(demand) <= HOST_USED_FRAC * free_bytes:
        return taken(demand)
    longest = largest(demand, "longest_tokens", lambda changed: taken(changed) <= HOST_USED_FRAC * free_bytes)
    raise UserError(
        f"keys of batch {demand.batch} at {demand.longest_tokens} tokens take {_text(taken(demand))} of host memory, "
        f"{_text(int(HOST_USED_FRAC * max(free_bytes, 0)))} can be taken",
        f"lower context and new tokens together to {longest}" if longest else "lower the batch, or use kv.where device",
        field="kv.where",
    )


def largest(demand: Demand, name: str, fits: Callable[[Demand], bool]) -> int:
    """The largest value of a field, below the present one, with which a demand fits; 0 if none does."""
    most, too_large = 0, getattr(demand, name)
    while too_large - most > 1:
        middle = (most + too_large) // 2
        changed = {name: middle}
        if fits(replace(demand, **changed)):
            most = middle
        else:
            too_large = middle
    return most


def _text(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.0f} MB"
