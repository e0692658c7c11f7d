"""Compiles the kernels for sm_90 without a GPU: no spills, the shared memory and registers that the tilings rely on."""

import os
import re
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from specdial.kernels.full_attention.launch import Tiling, choose_slots, choose_tiling  # noqa: E402
from specdial.kernels.full_attention.triton import merge_kernel, split_kernel  # noqa: E402
from specdial.kernels.head_scores.triton import scores_kernel  # noqa: E402
from specdial.kernels.history.triton import push_rows_kernel  # noqa: E402

SM_SHARED = 228 * 1024  # bytes of a multiprocessor, of which every program reserves 1 KiB
SM_REGISTERS = 65536
ALIGNED = ("q_s", "k_s", "v_s")  # strides, multiples of 16 elements


def compile_kernel(kernel, types: dict[str, str], constants: dict[str, object], **options: int):
    """The compiled kernel and (registers, stack bytes) as the assembler reports them."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = [i for i, n in enumerate(names) if signature[n].startswith("*") or n.startswith(ALIGNED) or n == "S"]
    source = ASTSource(
        fn=kernel, signature=signature, constexprs=constants, attrs={(i,): [["tt.divisibility", 16]] for i in aligned}
    )
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(built.asm["cubin"])
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    return built, int(registers), int(stack)


@pytest.mark.parametrize(
    ("rows", "group", "mass", "programs", "tree"),
    [
        (4, 4, 0, 3, False),
        (8, 8, 1, 3, False),
        (20, 4, 1, 2, False),
        (40, 8, 0, 1, False),
        (40, 8, 1, 1, False),
        (78, 6, 0, 1, False),
        (78, 6, 1, 1, False),
        (128, 8, 1, 1, False),
        (10, 1, 0, 3, True),  # a level of a tree of drafts
        (61 * 4, 4, 0, 1, True),  # 60 drafts verified
    ],
)
def test_split_kernel_fits(rows: int, group: int, mass: int, programs: int, tree: bool) -> None:
    """`programs` of it run on a multiprocessor at once, and K and V come through the copy engine in stages."""
    tiling = choose_tiling(rows, 128, torch.bfloat16)
    types = dict.fromkeys(("q", "k", "v"), "*bf16") | dict.fromkeys(("part_out", "part_lse", "tile_max"), "*fp32")
    types |= {"lengths": "*i32", "log_mass": "*fp32", "ancestors": "*u8", "scale_log2": "fp32"}
    types |= dict.fromkeys(("k_desc", "v_desc"), "tensordesc<bf16[64, 128]>")
    constants = {"G": group, "D": 128, "BLOCK_M": tiling.block_m, "BLOCK_N": 64, "BLOCK_B": 16, "MASS": mass}
    constants |= {"PAGE": 64, "PRECISION": "ieee", "TMA": True, "TREE": tree, "PDL": True}
    built, registers, stack = compile_kernel(
        split_kernel, types, constants, num_warps=tiling.warps, num_stages=tiling.stages, launch_pdl=True
    )
    assert stack == 0
    assert programs * (built.metadata.shared + 1024) <= SM_SHARED
    assert programs * registers * 32 * tiling.warps <= SM_REGISTERS
    assert built.metadata.shared >= 2 * (tiling.stages - 1) * 64 * 128 * 2  # K and V, stages - 1 tiles in flight
    assert built.asm["ptx"].count("cp.async.bulk.tensor") >= 2 * tiling.stages
    assert ("wgmma" in built.asm["ptx"]) == (tiling.block_m >= 64)


def test_small_kernels_do_not_spill() -> None:
    floats = dict.fromkeys(("part_out", "part_lse", "lse", "ring", "mass", "tile_max", "score", "scores"), "*fp32")
    types = floats | {"out": "*bf16", "q": "*bf16", "k": "*bf16", "lengths": "*i32", "committed": "*i32"}
    types |= {"heads": "*i32", "row_weights": "*fp32", "scale_log2": "fp32"}
    merge = {"G": 8, "D": 128, "BLOCK_N": 64, "BLOCK_B": 16, "WITH_LSE": True, "PDL": True}
    long, short = merge | {"BLOCK_PARTS": 64, "BLOCK_ROWS": 1}, merge | {"BLOCK_PARTS": 4, "BLOCK_ROWS": 4}
    push = {"G": 8, "KIND": 1, "UNIT": 64, "TILE": 64, "BLOCK_W": 16, "BLOCK": 64, "SCORE": True, "PDL": True}
    heads = {"G": 8, "D": 128, "WIDTH": 1, "BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_B": 16, "PDL": True}
    heads["PRECISION"] = "ieee"
    for kernel, constants, warps, stages in (
        (merge_kernel, long, 4, 3),
        (merge_kernel, short, 1, 3),
        (push_rows_kernel, push, 4, 3),
        (scores_kernel, heads, 4, 4),
    ):
        options = {"num_warps": warps, "num_stages": stages, "launch_pdl": True}
        _, registers, stack = compile_kernel(kernel, types, constants, **options)
        assert stack == 0
        assert registers <= 200


@pytest.mark.parametrize(("batch", "pairs"), [(1, 8), (1, 2), (16, 8), (16, 2), (4, 8), (64, 8), (256, 8), (3, 40)])
def test_slots_hold_every_batch(batch: int, pairs: int) -> None:
    """Room for one chunk per sequence at least, and for equal lengths no wave is left mostly empty."""
    tiling = Tiling(block_m=32, warps=4, stages=3, per_sm=2, crowded_per_sm=4)
    slots = choose_slots(batch, pairs, 132, tiling)
    assert slots >= batch
    used = slots // batch * batch * pairs
    assert used >= 0.65 * 264 or slots == 2 * batch
