"""Importers: what other tools write, read as requests, lengths, prompts or step times. One module a format.

Every reader takes a path, and raises UserError with file and line on the first record that is not what its format
says. None needs the tool whose files it reads.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from specdial.simulator.importers import (
    aiperf,
    azure,
    longbench,
    mooncake,
    pg19,
    sharegpt,
    step_times,
    vllm,
    vllm_metrics,
)

Kind = Literal["trace", "mix", "prompts", "costs"]
# format: (what it becomes, its reader)
IMPORTERS: dict[str, tuple[Kind, Callable[[Path], Any]]] = {
    "vllm": ("trace", vllm.read),
    "vllm_metrics": ("trace", vllm_metrics.read),
    "aiperf": ("trace", aiperf.read),
    "mooncake": ("mix", mooncake.read),
    "azure": ("mix", azure.read),
    "sharegpt": ("prompts", sharegpt.read),
    "longbench": ("prompts", longbench.read),
    "pg19": ("prompts", pg19.read),
    "step_times": ("costs", step_times.read),
}

__all__ = ["IMPORTERS", "Kind"]
