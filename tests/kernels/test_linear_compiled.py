"""Compiles the skinny product for sm_90 without a GPU: pipelined 16-byte copies, no spills, early launch, residency."""

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

from specdial.kernels.linear.launch import SHRINK  # noqa: E402
from specdial.kernels.linear.plan import plan  # noqa: E402
from specdial.kernels.linear.triton import linear_kernel  # noqa: E402

SM_SHARED = 227 << 10
SM_REGISTERS = 65536
PROCESSORS = 132
QKV, ADD, GATE, HEAD = {"NORM": True, "BIAS": True}, {"RESIDUAL": True}, {"NORM": True, "GATED": True}, {"NORM": True}
LAYER = [(2048, 1536, QKV), (1536, 1536, ADD), (8960, 1536, GATE), (1536, 8960, ADD), (151936, 1536, HEAD)]
CASES = [(*product, rows, kind) for product in LAYER for rows in (1, 16, 64) for kind in ("bf16", "fp8")] + [
    (1152, 896, QKV, 1, "bf16"), (896, 896, ADD, 16, "fp8"), (4864, 896, GATE, 64, "bf16"), (896, 4864, ADD, 1, "fp8"),
    (6144, 4096, HEAD, 1, "bf16"), (4096, 4096, ADD, 16, "bf16"), (14336, 4096, GATE, 64, "fp8"),
    (4096, 14336, ADD, 5, "bf16"), (128256, 4096, HEAD, 16, "fp8"), (960, 576, QKV, 64, "bf16"),
    (576, 576, ADD, 1, "bf16"), (1536, 576, GATE, 5, "fp8"), (576, 1536, ADD, 16, "bf16"),
    (8192, 2048, GATE, 1, "bf16"), (2048, 8192, ADD, 64, "bf16"), (1536, 1536, ADD, 8, "fp16"),
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Compiled:
    """What the compiler made of a launch."""

    registers: int
    stack_bytes: int
    shared_bytes: int
    ptx: str
    ir: str


def compile_product(N: int, K: int, fused: dict[str, bool], rows: int, kind: str) -> tuple[Compiled, object]:
    """The kernel as the plan launches it, and the plan."""
    eight = kind == "fp8"
    config = plan(N, K, rows, item_bytes=1 if eight else 2, gated="GATED" in fused, normed="NORM" in fused)
    data = "*fp16" if kind == "fp16" else "*bf16"
    types = dict.fromkeys(("x", "weight", "bias", "norm", "residual", "out"), data)
    types |= {
        "scale": "*fp32",
        "partials": "*fp32",
        "arrivals": "*i32",
        "rows": "i32",
        "prefetch_bytes": "i32",
        "eps": "fp32",
    }
    types |= {"weight": "*fp8e4nv"} if eight else {}
    constants = dict.fromkeys(("GATED", "NORM", "BIAS", "RESIDUAL"), False) | fused | {
        "N": N, "K": K, "BLOCK_N": config.block_n, "BLOCK_M": config.block_m, "BLOCK_K": config.block_k,
        "FOLD": config.fold, "SPLITS": config.splits, "STAGES": config.stages, "SCALED": eight, "HALF": eight,
        "SHRINK": SHRINK if eight else 1.0, "PREFETCH": True, "KEEP": config.keep,
        "LATE": config.late, "PRECISION": "tf32",
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


@pytest.mark.parametrize(("N", "K", "fused", "rows", "kind"), CASES, ids=str)
def test_a_product_streams_its_weights(N: int, K: int, fused: dict[str, bool], rows: int, kind: str) -> None:
    built, config = compile_product(N, K, fused, rows, kind)
    assert built.stack_bytes == 0
    assert "wgmma.mma_async" in built.ptx

    sizes = re.findall(r"cp\.async\.c[ag]\.shared\.global \[.*?\], \[.*?\], (\w+)", built.ptx)
    copies = {int(size, 0) for size in sizes}
    if "NORM" in fused and config.fold == 1:
        copies -= {4}  # the norm's weights: a few hundred bytes
    assert copies == ({8, 16} if kind == "fp8" else {16})  # an 8-bit left operand is swizzled by 8 bytes

    loop = built.ir[built.ir.index("scf.for") :]
    loads = loop.count("ttg.async_copy_global_to_local")
    assert loads == 2 + ("NORM" in fused) * (config.fold > 1) + ("GATED" in fused) or config.fold == 1
    ahead = int(re.search(r"async_wait [^{]*\{num = (\d+)", loop).group(1))
    assert ahead == (config.stages - 2) * loads  # what stays in flight while a step is used

    order = [built.ptx.find(text) for text in (
        "cp.async.bulk.prefetch.L2.global", "griddepcontrol.wait", "griddepcontrol.launch_dependents",
        "cp.async.cg.shared.global", "st.global",
    )]  # fmt: skip
    assert order[0] > 0
    assert order == sorted(order)  # weights are asked for before the wait; x is read, and anything written, after it

    planned = config.shared_bytes(1 if kind == "fp8" else 2, gated="GATED" in fused, normed="NORM" in fused)
    assert built.shared_bytes <= max(planned, 16 << 10) + 2048
    programs = -(-N // config.block_n) * config.splits
    if programs <= 2 * PROCESSORS:  # one wave
        each = -(-programs // PROCESSORS)
        assert each * (built.shared_bytes + 1024) <= SM_SHARED
        assert each * built.registers * 32 * config.warps <= SM_REGISTERS


@pytest.mark.parametrize(("N", "K"), [(1001, 333), (1536, 8960 + 8)])
def test_any_k_compiles_without_spills(N: int, K: int) -> None:
    built, _ = compile_product(N, K, QKV, 5, "bf16")
    assert built.stack_bytes == 0
