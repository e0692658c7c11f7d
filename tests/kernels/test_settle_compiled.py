"""Compiles what ends a round for sm_90 without a GPU: settling spills nothing, a timestamp reads the clock once."""

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

from specdial.kernels.settle.triton import settle_kernel  # noqa: E402
from specdial.kernels.timestamp.triton import timestamp_kernel  # noqa: E402


def compile_kernel(kernel, pointers: int, constants: dict[str, object], **options: object) -> tuple[str, int, int]:
    """(PTX, registers, stack bytes) of a kernel whose first `pointers` arguments are int64 arrays, 8 bytes aligned."""
    names = kernel.arg_names
    types = {name: "*i64" if i < pointers else "i32" for i, name in enumerate(names)}
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs={})
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1, **options})
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(built.asm["cubin"])
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    return built.asm["ptx"], int(registers), int(stack)


@pytest.mark.parametrize("judged", [False, True])
@pytest.mark.parametrize("K", [0, 1, 8, 63, 64])
def test_settling_does_not_spill(judged: bool, K: int) -> None:
    constants = {"STOPS": 16, "BLOCK": triton.next_power_of_2(K + 1), "JUDGED": judged, "PDL": True}
    ptx, registers, stack = compile_kernel(settle_kernel, 10, constants, launch_pdl=True)
    assert stack == 0
    assert registers <= 128
    waits, loads = ptx.index("griddepcontrol.wait"), ptx.index("ld.global")
    assert waits < loads, "nothing may be read before the previous kernel is finished"


def test_a_timestamp_reads_the_clock_once() -> None:
    ptx, registers, stack = compile_kernel(timestamp_kernel, 1, {})
    assert ptx.count("%globaltimer") == 1
    assert "griddepcontrol" not in ptx, "it must not start before the work it times is finished"
    assert stack == 0
    assert registers <= 32
