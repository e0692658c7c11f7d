"""The `summary` kind: a long excerpt of a novel, then the request to summarise it, through the chat template.

The excerpt is cut in token space so that the whole prompt, template included, has exactly context_tokens. Summaries
quote names and events from all over the text, so drafts must look far back. There is no known answer.
"""

from itertools import takewhile

from specdial.engine.workloads.packing import Frame
from specdial.engine.workloads.running_text import build_text, novel
from specdial.engine.workloads.spec import Draft, Tokenizer, WorkloadSpec
from specdial.policies.errors import UserError

REQUEST = """

[End of the excerpt]

Summarise the excerpt above in detail: go through it from beginning to end and say, for each part, what happens, who is
involved and why it matters. Begin with the summary itself."""


def build_summary(spec: WorkloadSpec, tokenizer: Tokenizer) -> list[Draft]:
    """Prompts from the shipped excerpt or from spec.path. Raises UserError when the request leaves no room for text."""
    frame = _frame(tokenizer)
    if frame.body_tokens(spec) < 1:
        raise UserError(
            f"a context of {spec.context_tokens} tokens cannot hold the request for a summary "
            f"({len(frame.before) + len(frame.after)} tokens)",
            "raise the context",
        )
    passages, what = novel(spec)
    return build_text(passages, what, spec, tokenizer, frame)


def _frame(tokenizer: Tokenizer) -> Frame:
    """What the template and the request put round a text: what two conversations about different texts share."""
    one, other = (tokenizer.chat([{"role": "user", "content": text + REQUEST}]) for text in ("A", "9"))
    before, after = _shared(one, other), _shared(one[::-1], other[::-1])[::-1]
    return Frame(before, after, beyond_tokens=0)  # nothing goes on after the cut: the answer is the model's own


def _shared(one: list[int], other: list[int]) -> list[int]:
    return [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other))]
