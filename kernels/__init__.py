"""Kernels: one folder per operation, each a torch reference (the specification) beside a Triton kernel.

Every operation takes `backend`, and nothing falls back silently: "reference" runs the torch specification on any
device, "triton" runs the kernel on a CUDA device (or in Triton's interpreter when TRITON_INTERPRET=1).
"""

from typing import Literal

Backend = Literal["reference", "triton"]
