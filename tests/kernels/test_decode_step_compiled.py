"""Compiles the small kernels of a decode step for sm_90 without a GPU: nothing spills, rows come in 16-byte loads."""

import os
import re
import subprocess
import tempfile
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from specdial.kernels.norm import MAX_HIDDEN  # noqa: E402
from specdial.kernels.norm.launch import row_block  # noqa: E402
from specdial.kernels.norm.triton import add_rms_norm_kernel  # noqa: E402
from specdial.kernels.rope_cache.launch import HEADS, WARPS  # noqa: E402
from specdial.kernels.rope_cache.triton import rope_and_cache_kernel  # noqa: E402
from specdial.kernels.swiglu import launch as swiglu  # noqa: E402
from specdial.kernels.token_statistics import launch as statistics  # noqa: E402

UNALIGNED = {"T", "splits", "tiles", "H", "Hk", "P", "N", "ahead", "eps"}  # numbers that need not be multiples of 16


def compile_kernel(
    kernel, types: dict[str, str], constants: dict[str, object], **options: object
) -> tuple[str, int, int]:
    """(PTX, registers, stack bytes) of a kernel with aligned pointers and strides."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = [i for i, name in enumerate(names) if name not in constants and name not in UNALIGNED]
    source = ASTSource(
        fn=kernel, signature=signature, constexprs=constants, attrs={(i,): [["tt.divisibility", 16]] for i in aligned}
    )
    built = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options=options | {"launch_pdl": True, "enable_fp_fusion": False}
    )
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(built.asm["cubin"])
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    return built.asm["ptx"], int(registers), int(stack)


@pytest.mark.parametrize("hidden", [576, 1536, 4096, 8192, MAX_HIDDEN])
@pytest.mark.parametrize("dtype", ["*bf16", "*fp32"])
def test_norm_keeps_a_row_in_registers(hidden: int, dtype: str) -> None:
    block, warps = row_block(hidden)
    types = dict.fromkeys(("x", "residual", "weight", "normed"), dtype) | {"eps": "fp32"}
    ptx, registers, stack = compile_kernel(
        add_rms_norm_kernel, types, {"BLOCK": block, "ADD": True, "PDL": True}, num_warps=warps
    )
    assert stack == 0
    assert registers * warps * 32 <= 65536
    loads = re.findall(r"ld\.global[.\w:]*\.v(\d)\.b32", ptx)
    assert loads
    assert set(loads) == {"4"}


@pytest.mark.parametrize(("head_dim", "dtype"), [(128, "*bf16"), (64, "*bf16"), (80, "*fp16"), (128, "*fp32")])
@pytest.mark.parametrize("norm", [False, True])
def test_rotation_neither_spills_nor_fuses(head_dim: int, dtype: str, norm: bool) -> None:
    names = ("qkv", "k_cache", "v_cache", "q_norm", "k_norm", "q_out")
    types = dict.fromkeys(names, dtype) | {"cos": "*fp32", "sin": "*fp32", "eps": "fp32"}
    types |= {"lengths": "*i64", "depths": "*i64"}
    block = triton.next_power_of_2(head_dim // 2)
    constants = {"D": head_dim, "BLOCK_D": block, "HEADS": HEADS, "NORM": norm, "TREE": norm, "PDL": True}
    ptx, registers, stack = compile_kernel(rope_and_cache_kernel, types, constants, num_warps=WARPS)
    assert stack == 0
    assert registers <= 128
    assert "fma.rn.f32" not in ptx


@pytest.mark.parametrize("dtype", ["*bf16", "*fp32"])
def test_activation_does_not_spill(dtype: str) -> None:
    constants = {"BLOCK": swiglu.BLOCK, "PDL": True}
    ptx, registers, stack = compile_kernel(
        swiglu.swiglu_kernel, {"gate_up": dtype, "out": dtype}, constants, num_warps=swiglu.WARPS
    )
    assert stack == 0
    assert registers <= 64
    assert set(re.findall(r"ld\.global[.\w:]*\.v(\d)\.b32", ptx)) == {"4"}


@pytest.mark.parametrize("dtype", ["*bf16", "*fp32"])
def test_logit_statistics_do_not_spill_and_fill_a_multiprocessor(dtype: str) -> None:
    types = {"logits": dtype, "tokens": "*i32", "token": "*i64"}
    types |= dict.fromkeys(("parts", "entropy", "top1", "margin"), "*fp32")
    constants = {"BLOCK": statistics.BLOCK, "PDL": True}
    _, registers, stack = compile_kernel(statistics.split_logits_kernel, types, constants, num_warps=statistics.WARPS)
    assert stack == 0
    assert registers * 32 * statistics.WARPS * statistics.PER_SM <= 65536
    _, registers, stack = compile_kernel(
        statistics.merge_logits_kernel, types, {"BLOCK": 256, "PDL": True}, num_warps=1
    )
    assert stack == 0
    assert registers <= 128


@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 151936), (16, 151936), (144, 32000), (5000, 49152), (1, 2)])
def test_splits_cover_the_vocabulary_once(rows: int, vocabulary: int) -> None:
    tiles, splits = statistics.choose_splits(rows, vocabulary, 132)
    assert tiles * splits * statistics.BLOCK >= vocabulary
    assert tiles * (splits - 1) * statistics.BLOCK < vocabulary
    assert splits == 1 or rows * splits <= statistics.PER_SM * 132
