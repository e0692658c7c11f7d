"""Exporters: what each engine can express of a policy, and its settings in that engine's own words."""

from collections.abc import Callable

from specdial.policies.exporters import huggingface, llama_cpp, native, profile, sglang, tensorrt_llm, vllm
from specdial.policies.exporters.options import Options
from specdial.policies.exporters.rows import Lowered
from specdial.policies.schema import Policy

# Each takes what all its files' names begin with as well, since one file may name another.
EXPORTERS: dict[str, Callable[[Policy, Options, str], Lowered]] = {
    "specdial": native.lower,
    "vllm": vllm.lower,
    "sglang": sglang.lower,
    "tensorrt_llm": tensorrt_llm.lower,
    "transformers": huggingface.lower,
    "llama_cpp": llama_cpp.lower,
    "profile": profile.lower,
}

__all__ = ["EXPORTERS", "Lowered", "Options"]
