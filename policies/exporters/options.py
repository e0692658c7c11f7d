"""What lowering needs to know beside the policy, and which targets use it. Leaves out what it does with that."""

from dataclasses import dataclass, fields
from typing import Literal

from specdial.policies.errors import UserError
from specdial.policies.fields import setting

# What may draft in another engine; eagle is the first and second EAGLE, which no policy of ours drafts by.
STAND_INS = ("lookup", "model", "eagle", "eagle3")
ENGINES = ("vllm", "sglang", "tensorrt_llm", "transformers", "llama_cpp")

# Options that only some targets use.
USES = {
    "stand_in": ENGINES,
    "stand_in_model": ENGINES,
    "context_tokens": ENGINES,
    "batch": ("sglang", "llama_cpp"),
    "max_batch": ("vllm", "tensorrt_llm"),
    "vllm_context_ranges": ("vllm",),
    "trtllm_schedule": ("tensorrt_llm",),
    "trace": ("profile",),
    "alternatives": ENGINES,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What lowering needs to know beside the policy.

    stand_in: what drafts in the other engine instead of the policy's drafter; model, eagle and eagle3 take
    stand_in_model. context_tokens, batch: which cell speaks where an engine cannot vary by it; null takes the longest
    context that a cell starts at, and the batch of the policy's prediction. max_batch: where open batch ranges end.
    vllm_context_ranges: write k by context as well, in the five-number form that no release of vLLM reads.
    trtllm_schedule: whether a key of draft_len_schedule is the last batch of its range (current) or its first (older).
    trace: a record that a profile is counted from. alternatives: a policy file or a directory of them, whose
    predictions may tell what lowering loses.
    """

    stand_in: Literal["lookup", "model", "eagle", "eagle3"] | None = None
    stand_in_model: str = ""
    context_tokens: int | None = setting(None, low=0)
    batch: int | None = setting(None, low=1)
    max_batch: int = setting(512, low=1, high=1 << 20)
    vllm_context_ranges: bool = False
    trtllm_schedule: Literal["upto", "from"] = "upto"
    trace: str | None = None
    alternatives: str | None = None

    def check(self, target: str) -> None:
        """Raises UserError on what the target does not use, and where a stand-in lacks its model."""
        defaults = {f.name: f.default for f in fields(Options)}
        for name, used in USES.items():
            value = getattr(self, name)
            if value != defaults[name] and target not in used:
                cause = f"{name} is {value!r}, which target {target} does not use"
                raise UserError(cause, f"it is for {', '.join(used)}")
        needs = self.stand_in in ("model", "eagle", "eagle3")
        if needs and not self.stand_in_model:
            raise UserError(f"stand_in is {self.stand_in} without a model", "add stand_in_model=ID")
        if self.stand_in_model and not needs:
            raise UserError("stand_in_model is given, and no stand-in uses it", "add stand_in=model, eagle or eagle3")
