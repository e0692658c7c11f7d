"""The `needle` kind: a fact hidden in a long text, asked for at the end. The answer is known at any length.

A prompt is filler with needle sentences between its paragraphs, then the question and the start of the answer, so
that base and chat models alike can go on with the number; the chat template is not used. Paragraphs are encoded one
by one, which makes every token position exact: meta["needles"] gives the token span of each, the one asked for first.
Filler comes from the book, or from the standard library (filler=stdlib), one document going on where the last one
ended. When the documents together need more than there is, the text starts over at another offset: such documents
carry meta["filler_shared"] = True, and their filler, though never their needles, is met in other documents as well.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from specdial.engine.workloads.packing import claims
from specdial.engine.workloads.sources import Passage, book, paragraphs, stdlib
from specdial.engine.workloads.spec import Draft, Tokenizer, WorkloadSpec
from specdial.policies.errors import UserError

# fmt: off
NAMES = (
    "Avalon", "Brigadoon", "Cockaigne", "Dorado", "Elysium", "Faerun", "Gondal", "Hyperborea", "Islandia",
    "Jotunheim", "Kadath", "Lyonesse", "Mordor", "Narnia", "Orplid", "Pellucidar", "Quivira", "Ruritania",
    "Shangri-La", "Thule", "Utopia", "Valhalla", "Wakanda", "Xanadu", "Zothique", "Angria", "Barsoom", "Camelot",
    "Earthsea", "Freedonia", "Gormenghast", "Iram", "Laputa", "Nysa", "Osgiliath", "Poictesme", "Rhovanion",
    "Tartary", "Zenda",
)
# fmt: on
QUESTION = "Question: What is the secret number of {name}?\nAnswer: The secret number of {name} is"
GOLDEN_FRAC = 0.6180339887498949  # Steps of this share spread any number of documents evenly over the depths.

Encode = Callable[[str], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class _Needle:
    name: str
    number: str
    depth_frac: float

    @property
    def sentence(self) -> str:
        return f"The secret number of {self.name} is {self.number}.\n\n"


def filler_passages(kind: str) -> list[Passage]:
    """Paragraphs of the filler source. Raises UserError for an unknown one."""
    if kind == "book":
        return book()
    if kind == "stdlib":
        return [p for file in stdlib() for p in paragraphs(file.source, file.text)]
    raise UserError(f"workload.filler is {kind!r}", "use book or stdlib")


def build_needle(spec: WorkloadSpec, tokenizer: Tokenizer) -> list[Draft]:
    """Needle prompts. Raises UserError when the context cannot hold the needles and the question."""
    if spec.needles > len(NAMES):
        raise UserError(f"workload.needles is {spec.needles}", f"give at most {len(NAMES)}")
    if spec.stride_tokens is not None:
        raise UserError("workload=needle has no workload.stride_tokens", "leave it out: filler repeats where it must")
    ring = filler_passages(spec.filler)
    encode = cache(lambda text: tuple(tokenizer.encode(text)))
    prefix = tokenizer.encode("", add_special=True)
    at = random.Random(f"{spec.seed}:needle").randrange(len(ring))
    drafts: list[Draft] = []
    for index in range(spec.documents):
        needles = _needles(spec, index)
        asked = needles[0]
        tail = encode(QUESTION.format(name=asked.name))
        sentences = [encode(n.sentence) for n in needles]
        fixed_tokens = len(prefix) + len(tail) + sum(map(len, sentences))
        if fixed_tokens > spec.context_tokens:
            raise UserError(
                f"a context of {spec.context_tokens} tokens cannot hold the question and the needles "
                f"({fixed_tokens} tokens)",
                "raise the context or lower workload.needles",
            )
        filler, count = _fill(ring, at, spec.context_tokens - fixed_tokens, encode)
        body, starts = _insert(filler, [(n.depth_frac, ids) for n, ids in zip(needles, sentences, strict=True)])
        meta = {
            "filler": spec.filler,
            "depth_frac": asked.depth_frac,
            "needles": [
                {
                    "name": n.name,
                    "number": n.number,
                    "start_token": len(prefix) + start,
                    "end_token": len(prefix) + start + len(ids),
                }
                for n, start, ids in zip(needles, starts, sentences, strict=True)
            ],
            "passages": range(at, at + count),
        }
        drafts.append(Draft(asked.name, [*prefix, *body, *tail], asked.number, meta))
        at += count
    return _mark_shared(drafts, ring)


def _fill(ring: list[Passage], at: int, length: int, encode: Encode) -> tuple[list[tuple[int, ...]], int]:
    """Paragraphs of the ring from position at, exactly length ids in all, and how many paragraphs that took.

    What is too much goes from the beginning, so that needles and question follow whole paragraphs.
    """
    filler: list[tuple[int, ...]] = []
    total = 0
    while total < length:
        filler.append(encode(ring[(at + len(filler)) % len(ring)].text))
        total += len(filler[-1])
    count = len(filler)
    excess = total - length
    while filler and excess >= len(filler[0]):
        excess -= len(filler.pop(0))
    if excess:
        filler[0] = filler[0][excess:]
    return filler, count


def _mark_shared(drafts: list[Draft], ring: list[Passage]) -> list[Draft]:
    """Replaces each draft's ring positions by source ranges, and says whether its filler occurs anywhere else."""
    uses = Counter(i % len(ring) for draft in drafts for i in draft.meta["passages"])
    marked = []
    for draft in drafts:
        taken = [i % len(ring) for i in draft.meta["passages"]]
        meta = {name: value for name, value in draft.meta.items() if name != "passages"}
        meta["filler_shared"] = any(uses[i] > 1 for i in taken)
        meta["source"] = claims([ring[i] for i in taken])
        marked.append(replace(draft, meta=meta))
    return marked


def _needles(spec: WorkloadSpec, index: int) -> list[_Needle]:
    """The needles of one document; the first is the one asked for, the others lie evenly round it."""
    rng = random.Random(f"{spec.seed}:needle:{index}")
    names = rng.sample(NAMES, spec.needles)
    numbers = rng.sample(range(10_000, 100_000), spec.needles)
    depth = (0.5 + index * GOLDEN_FRAC) % 1.0 if spec.depth_frac is None else spec.depth_frac
    return [
        _Needle(name, str(number), (depth + i / spec.needles) % 1.0 if i else depth)
        for i, (name, number) in enumerate(zip(names, numbers, strict=True))
    ]


def _insert(filler: list[tuple[int, ...]], needles: list[tuple[float, tuple[int, ...]]]) -> tuple[list[int], list[int]]:
    """Filler ids with each needle at the paragraph boundary nearest its depth; the needles' positions."""
    ends = [0]
    for ids in filler:
        ends.append(ends[-1] + len(ids))
    slots: dict[int, list[int]] = {}
    for i, (depth, _) in enumerate(needles):
        nearest = min(range(len(ends)), key=lambda e: abs(ends[e] - depth * ends[-1]))
        slots.setdefault(nearest, []).append(i)
    body: list[int] = []
    starts: dict[int, int] = {}
    for e in range(len(ends)):
        for i in slots.get(e, []):
            starts[i] = len(body)
            body.extend(needles[i][1])
        if e < len(filler):
            body.extend(filler[e])
    return body, [starts[i] for i in range(len(needles))]
