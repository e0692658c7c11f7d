"""Compiles sparse attention, selection and page kernels for sm_90 ahead of time: no spills, pipelined loads, occupancy.

Needs no GPU. Registers and stack come from the machine code's own resource table.
"""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

import triton.backends.nvidia as nvidia  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from specdial.kernels.page_summary import triton as pages  # noqa: E402
from specdial.kernels.selection import triton as selection  # noqa: E402
from specdial.kernels.sparse_attention import triton as sparse  # noqa: E402

KIB = 1024
SM_SHARED = 227 * KIB
CUOBJDUMP = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
INTEGER_POINTERS = re.compile(r"indices|counts|lengths|tail_start|arrivals|positions|list_|in_|rows|committed")
FLOAT32_POINTERS = {"partials", "scores", "out_scores", "cos", "sin"}


@dataclass(frozen=True, slots=True)
class Compiled:
    """What the compiler made of a kernel."""

    registers: int
    stack_bytes: int
    shared_bytes: int
    ir: str


def compile_for_h200(kernel: object, values: set[str], constants: dict[str, object], options: dict[str, int],
                     data: str, tmp_path: Path) -> Compiled:  # fmt: skip
    """Compile with aligned pointers and integer arguments divisible by 16, as the engine's shapes are."""
    signature: dict[str, str] = {}
    attributes = {}
    for position, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        if name == "scale":
            signature[name] = "fp32"
        elif name in values or name.startswith("stride_"):
            signature[name] = "i32"
        elif name in FLOAT32_POINTERS:
            signature[name] = "*fp32"
        else:
            signature[name] = "*i32" if INTEGER_POINTERS.match(name) or name in ("out_keys", "out_positions") else data
        if signature[name] not in ("fp32",) and name not in ("Hk", "S", "P", "sink"):
            attributes[(position,)] = [["tt.divisibility", 16]]
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=attributes)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(built.asm["cubin"])
    table = subprocess.run(
        [CUOBJDUMP, "--dump-resource-usage", binary], capture_output=True, text=True, check=True
    ).stdout
    found = dict(re.findall(r"(REG|STACK):(\d+)", table))
    return Compiled(int(found["REG"]), int(found["STACK"]), built.metadata.shared, built.asm["ttgir"])


SHAPES = [  # pairs, T, G, D, keys, dtype, page
    (128, 5, 8, 128, 517, "bf16", 1),
    (128, 1, 8, 128, 513, "bf16", 1),
    (32, 1, 6, 128, 513, "bf16", 1),
    (32, 5, 6, 128, 517, "fp16", 1),
    (128, 5, 8, 128, 517, "bf16", 16),
    (16, 33, 4, 64, 545, "bf16", 1),
    (8, 5, 4, 128, 517, "fp32", 1),
]


@pytest.mark.parametrize(
    ("pairs", "T", "G", "D", "keys", "dtype", "page", "form"),
    [
        *((*shape, "") for shape in SHAPES),
        (32, 1, 6, 128, 1025, "bf16", 16, "ROTATE"),
        (8, 61, 4, 128, 4157, "bf16", 16, "TREE"),
    ],
)
def test_sparse_attention_neither_spills_nor_waits_for_the_tile_it_just_asked_for(
    pairs: int, T: int, G: int, D: int, keys: int, dtype: str, page: int, form: str, tmp_path: Path
) -> None:
    import torch

    torch_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    config = sparse.plan(pairs, T * G, keys, torch_dtype, tree=form == "TREE")
    constants = {
        "T": T, "G": G, "D": D, "PAGE": page, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n,
        "SPLITS": config.splits, "ROW_BLOCKS": -(-T * G // config.block_m), "STAGES": config.stages,
        "PRECISION": "ieee" if dtype == "fp32" else "tf32", "FRESH": False,
        "ROTATE": form == "ROTATE", "TREE": form == "TREE", "PDL": True,
    }  # fmt: skip
    built = compile_for_h200(
        sparse._sparse_attention, {"Hk", "S", "P"}, constants, {"num_warps": config.warps}, f"*{dtype}", tmp_path
    )
    assert built.stack_bytes == 0
    tile_bytes = 2 * config.block_n * D * (4 if dtype == "fp32" else 2)  # K and V
    assert (config.stages - 1) * tile_bytes <= built.shared_bytes <= SM_SHARED
    loop = built.ir[built.ir.index("scf.for") :]
    waits = [int(left) for left in re.findall(r"async_wait [^{]*\{num = (\d+)", loop)]
    if config.stages > 2:
        assert waits[0] >= 2  # K and V of the next tile stay in flight while this one is used


@pytest.mark.parametrize(
    ("kernel", "constants", "warps"),
    [
        ("_filter_chunks", {"ROWS": 2, "CHUNK": 32768, "CHUNKS": 1, "COLUMNS": 4096, "WIDTH": 1024, "VECTOR": 4}, 32),
        ("_filter_chunks", {"ROWS": 8, "CHUNK": 16384, "CHUNKS": 2, "COLUMNS": 2048, "WIDTH": 1024, "VECTOR": 4}, 16),
        ("_select_rows", {"ROWS": 2, "BLOCK": 2048, "PAD": 256}, 4),
        (
            "_merge_lists",
            {"ROWS": 2, "BLOCK": 1024, "FAN": 1, "LISTS": 1, "GROUPS": 1, "WIDTH": 1024, "OUT_WIDTH": 512, "PAD": 512},
            4,
        ),
    ],
)
def test_selection_holds_its_keys_in_registers(
    kernel: str, constants: dict[str, int], warps: int, tmp_path: Path
) -> None:
    values = {"row_stride", "keys_per_row", "budget", "sink", "recent", "batches"}
    built = compile_for_h200(getattr(selection, kernel), values, constants, {"num_warps": warps}, "*fp32", tmp_path)
    assert built.registers * warps * 32 <= 65536
    # 32 warps leave a thread 64 registers for 32 keys: none is spilled by Triton 3.6, eight by 3.9.
    assert built.stack_bytes <= (32 if warps == 32 else 0)


@pytest.mark.parametrize(("quest", "pool"), [(False, "mean"), (True, "mean"), (True, "max")])
def test_page_scores_do_not_spill(quest: bool, pool: str, tmp_path: Path) -> None:
    constants = {
        "T": 5, "G": 6, "D": 128, "PAGE": 16, "BLOCK_T": 4, "BLOCK_G": 8, "BLOCK_P": 64, "QUEST": quest,
        "POOL": pool, "PRECISION": "tf32",
    }  # fmt: skip
    built = compile_for_h200(pages._score_pages, {"Hk", "pages"}, constants, {"num_warps": 4}, "*bf16", tmp_path)
    assert built.stack_bytes == 0
    assert built.shared_bytes <= SM_SHARED // 2


def test_page_updates_do_not_spill(tmp_path: Path) -> None:
    constants = {"D": 128, "PAGE": 16, "PAGES": 8}
    built = compile_for_h200(pages._update_pages, {"Hk", "pages"}, constants, {"num_warps": 4}, "*bf16", tmp_path)
    assert built.stack_bytes == 0
