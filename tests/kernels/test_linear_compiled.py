"""Compiles the skinny products for sm_90 without a GPU: what the loop does, no spills, early launch, residency."""

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from specdial.kernels.linear.plan import LinearConfig, plan  # noqa: E402
from specdial.kernels.linear.prepared import LARGEST_PIECE  # noqa: E402
from specdial.kernels.linear.triton import linear_kernel  # noqa: E402

SM_SHARED = 227 << 10
SM_REGISTERS = 65536
PROCESSORS = 132
# What is fused. "fp8" is a decoder with float8 weights: all products but "out" have them, and x in float8 pieces.
# parts: of a hidden size of 1536 and of 4096, by 16 and by 32 columns.
QKV, OUT, GATE, DOWN, HEAD = "qkv", "out", "gate_up", "down", "head"
LAYER = [(2048, 1536, QKV), (1536, 1536, OUT), (8960, 1536, GATE), (1536, 8960, DOWN), (151936, 1536, HEAD)]
LARGE = [(6144, 4096, QKV), (4096, 4096, OUT), (14336, 4096, GATE), (4096, 14336, DOWN), (128256, 4096, HEAD)]
CASES = [(*product, rows, kind) for product in LAYER for rows in (1, 16, 64) for kind in ("bf16", "fp8")]
CASES += [(*product, rows, "fp8") for product in LARGE for rows in (1, 16, 64)] + [
    (1152, 896, QKV, 1, "bf16"), (896, 896, OUT, 16, "fp8"), (4864, 896, GATE, 64, "bf16"), (896, 4864, DOWN, 1, "fp8"),
    (6144, 4096, QKV, 1, "bf16"), (4096, 4096, OUT, 16, "bf16"),
    (4096, 14336, DOWN, 5, "bf16"), (14336, 4096, GATE, 64, "bf16"), (960, 576, QKV, 64, "bf16"),
    (576, 576, OUT, 1, "bf16"), (1536, 576, GATE, 5, "fp8"), (576, 1536, DOWN, 16, "bf16"),
    (8192, 2048, GATE, 1, "bf16"), (2048, 8192, DOWN, 64, "bf16"), (1536, 1536, OUT, 8, "fp16"),
    (896, 4864, DOWN, 33, "fp8"), (1536, 576, GATE, 33, "bf16"),
    (2048, 1536, "first", 5, "bf16"),
]  # fmt: skip


def item_bytes(use: str, kind: str) -> int:
    """Of a weight."""
    return 1 if kind == "fp8" and use != OUT else 2


@dataclass(frozen=True, slots=True)
class Compiled:
    """What the compiler made of a launch."""

    registers: int
    stack_bytes: int
    shared_bytes: int
    ptx: str
    ir: str

    @property
    def loop(self) -> str:
        """The loop over K in the compiler's last device-independent form."""
        start = self.ir.index("scf.for")
        return self.ir[start : self.ir.index("scf.yield", start)]


def compile_product(N: int, K: int, use: str, rows: int, kind: str) -> tuple[Compiled, LinearConfig]:
    """The kernel as the plan launches it, and the plan."""
    eight, gated, into = item_bytes(use, kind) == 1, use == GATE, use in (OUT, DOWN)
    config = plan(N, K, rows, item_bytes=item_bytes(use, kind), gated=gated)
    data = "*fp16" if kind == "fp16" else "*bf16"
    left = "*fp8e5" if kind == "fp8" else data  # for the next product
    types = dict.fromkeys(("scale", "squares", "squares_out", "partials"), "*fp32") | {
        "x": "*fp8e5" if eight else data, "weight": "*fp8e4nv" if eight else data, "bias": data,
        "residual": data, "norm": data, "out": "*fp32" if use == HEAD else left if gated or into else data,
        "arrivals": "*i32", "rows": "i32", "eps": "fp32", "factor": "fp32",
    }  # fmt: skip
    parts = 0 if into or use == "first" else K // (16 if K < 2048 else 32)
    constants = {
        "N": N, "K": K, "PARTS": parts,
        "CHUNK": min(triton.next_power_of_2(max(1, parts)), 1024 * config.warps // config.block_m),
        "BLOCK_N": config.block_n, "BLOCK_M": config.block_m, "BLOCK_K": config.block_k, "FOLD": config.fold,
        "SPLITS": config.splits, "STAGES": config.stages, "PREFETCH": config.prefetch_bytes, "APART": config.apart,
        "GATED": gated, "BIAS": use in (QKV, "first"), "SCALED": eight, "INTO_NORM": into,
        "SHRINK": 0.25 if kind != "bf16" and (gated or into) else 1.0, "LARGEST": LARGEST_PIECE, "PRECISION": "tf32",
        "THREADS": 32 * config.warps, "PDL": True,
    }  # fmt: skip
    names = linear_kernel.arg_names
    source = ASTSource(
        fn=linear_kernel,
        signature={name: "constexpr" if name in constants else types[name] for name in names},
        constexprs=constants,
        attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if types.get(name, "")[:1] == "*"},
    )
    built = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": config.warps, "launch_pdl": True}
    )
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(built.asm["cubin"])
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    found = Compiled(int(registers), int(stack), built.metadata.shared, built.asm["ptx"], built.asm["ttgir"])
    return found, config


@pytest.mark.parametrize(("N", "K", "use", "rows", "kind"), CASES, ids=str)
def test_a_product_streams_its_weights(N: int, K: int, use: str, rows: int, kind: str) -> None:
    built, config = compile_product(N, K, use, rows, kind)
    assert built.stack_bytes == 0
    kinds = set(re.findall(r"wgmma\.mma_async\S*\.f32\.(\w+\.\w+)", built.ptx))
    eight = item_bytes(use, kind) == 1
    assert kinds == {"e4m3.e5m2" if eight else "f16.f16" if kind == "fp16" else "bf16.bf16"}

    sizes = re.findall(r"cp\.async\.c[ag]\.shared\.global \[.*?\], \[.*?\], (\w+)", built.ptx)
    copies = {int(size, 0) for size in sizes}
    small = config.block_k * config.block_m < 8 * 32 * config.warps  # a step of x, less than 16 bytes a thread
    assert copies == ({8, 16} if small else {16})

    loads = built.loop.count("ttg.async_copy_global_to_local")
    assert loads == (3 if use == GATE else 2) + config.apart
    ahead = int(re.search(r"async_wait [^{]*\{num = (\d+)", built.loop).group(1))
    assert ahead == (config.stages - 2) * loads  # what stays in flight while a step is used

    # x and the weights go from shared memory to the tensor cores untouched; float8 sums leave them after every step
    for touched in ("ttg.local_alloc", "ttg.local_store", "ttg.local_load"):
        assert touched not in built.loop
    assert built.loop.count("arith.addf") == (2 if use == GATE else 1) * eight

    order = [built.ptx.find(text) for text in (
        "cp.async.bulk.prefetch.L2.global", "griddepcontrol.wait", "griddepcontrol.launch_dependents",
        "cp.async.cg.shared.global", "st.global",
    )]  # fmt: skip
    assert (order[0] > 0) == (config.prefetch_bytes > 0)
    assert order == sorted(order)  # weights are asked for before the wait; anything is read or written after it
    assert built.ptx.find("ld.global") == -1 or built.ptx.find("ld.global") > order[2]
    if use in (OUT, DOWN, QKV) or eight:  # what the sums meet is on its way before the loop starts
        assert built.ptx.index("ld.global") < built.ptx.index("wgmma.mma_async")

    planned = config.shared_bytes(item_bytes(use, kind), gated=use == GATE)
    assert built.shared_bytes <= max(planned, 16 << 10) + 2048
    programs = -(-N // config.block_n) * config.splits
    if programs <= 2 * PROCESSORS:  # one wave
        each = -(-programs // PROCESSORS)
        assert each * (built.shared_bytes + 1024) <= SM_SHARED
        assert each * built.registers * 32 * config.warps <= SM_REGISTERS


@pytest.mark.parametrize(("N", "K"), [(1001, 333), (1536, 8960 + 8)])
@pytest.mark.parametrize("kind", ["bf16", "fp8"])
@pytest.mark.parametrize("use", [QKV, DOWN])
def test_any_k_compiles_without_spills(N: int, K: int, use: str, kind: str) -> None:
    built, _ = compile_product(N, K, use, 5, kind)
    assert built.stack_bytes == 0
