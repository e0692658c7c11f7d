"""From passages to prompts of an exact length that share no text, and from prompts to splits.

Prompts that do share text, because the workload asks for it with stride_tokens, are cut in overlap.py.

Assembly is in token space: passages are joined, encoded together, and the ids are cut at context_tokens. A document
claims every passage it touches, and claims new_tokens more than its prompt, so that neither another document's prompt
nor its natural continuation can come from the same text.
"""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from specdial.engine.workloads.sources import Passage
from specdial.engine.workloads.spec import SPLITS, Document, Draft, Tokenizer, WorkloadSpec
from specdial.policies.errors import UserError


@dataclass(frozen=True, slots=True)
class Frame:
    """What stands round the text of a prompt: ids before it and after it; beyond_tokens: text claimed past its cut."""

    before: list[int]
    after: list[int]
    beyond_tokens: int

    def body_tokens(self, spec: WorkloadSpec) -> int:
        """Tokens of text in a prompt."""
        return spec.context_tokens - len(self.before) - len(self.after)

    def draft(self, run: list[Passage], ids: list[int], spec: WorkloadSpec) -> Draft:
        """The prompt that starts with a run of passages, whose text is `ids`."""
        first = run[0]
        name = first.source if first.start_char == 0 else f"{first.source}@{first.start_char}"
        prompt = [*self.before, *ids[: self.body_tokens(spec)], *self.after]
        return Draft(name, prompt, meta={"source": claims(run)})


def bare(tokenizer: Tokenizer, spec: WorkloadSpec) -> Frame:
    """Nothing but the model's begin mark; the natural continuation is claimed too."""
    return Frame(tokenizer.encode("", add_special=True), [], spec.new_tokens)


def pack(passages: Iterable[Passage], tokenizer: Tokenizer, spec: WorkloadSpec, frame: Frame) -> Iterator[Draft]:
    """Yields prompts of exactly context_tokens, each the start of a run of passages, in the order given.

    The cut falls wherever the length puts it, so a prompt usually ends inside a passage; what is left of the last
    passage is not used.
    """
    need = frame.body_tokens(spec) + frame.beyond_tokens
    run: list[Passage] = []
    count = 0
    for passage in passages:
        run.append(passage)
        count += len(tokenizer.encode(passage.text))
        if count < need:
            continue
        # Encoding passages together may give fewer ids than apart: encode the run, and go on if it is short.
        ids = tokenizer.encode("".join(p.text for p in run))
        count = len(ids)
        if count < need:
            continue
        yield frame.draft(run, ids, spec)
        run, count = [], 0


def claims(run: list[Passage]) -> list[list[str | int]]:
    """The source ranges of a run as [name, start_char, end_char], neighbours merged."""
    merged: list[list[str | int]] = []
    for p in run:
        if merged and merged[-1][0] == p.source and merged[-1][2] == p.start_char:
            merged[-1][2] = p.end_char
        else:
            merged.append([p.source, p.start_char, p.end_char])
    return merged


def enough(drafts: list[Draft], spec: WorkloadSpec, what: str) -> list[Draft]:
    """The first spec.documents drafts. Raises UserError saying how many there are when that is too few."""
    if len(drafts) < spec.documents:
        raise UserError(
            f"{what} holds {len(drafts)} documents of {spec.context_tokens} + {spec.new_tokens} tokens "
            f"without overlap, {spec.documents} asked for",
            f"set workload.documents to at most {len(drafts)}, lower the context, or let documents of a split overlap "
            "with workload.stride_tokens"
            if drafts
            else "lower the context or use a longer text",
        )
    return drafts[: spec.documents]


def shuffled(drafts: list[Draft], spec: WorkloadSpec) -> list[Draft]:
    """All drafts in the seed's order, which does not depend on spec.documents."""
    return random.Random(f"{spec.seed}:choose").sample(drafts, len(drafts))


def whole_parts(parts: list[float], total: int) -> list[int]:
    """Whole numbers in place of `parts` that add up to `total`, by largest remainder; a tie goes to the later one."""
    counts = [int(part) for part in parts]
    wanted = sorted(range(len(parts)), key=lambda i: (round(counts[i] - parts[i], 9), -i))
    for i in wanted[: total - sum(counts)]:
        counts[i] += 1
    return counts


def split_labels(spec: WorkloadSpec) -> list[str]:
    """A split for each document, by largest remainder, shuffled by seed.

    With three documents or more, no split with a share above zero is empty. A tie goes to the later split, so that of
    two documents under the default shares one is train and one is test.
    """
    shares = [spec.train_frac, spec.validation_frac, spec.test_frac]
    counts = whole_parts([share * spec.documents for share in shares], spec.documents)
    for i, share in enumerate(shares):
        if share > 0 and counts[i] == 0 and spec.documents >= len(SPLITS):
            counts[counts.index(max(counts))] -= 1
            counts[i] = 1
    labels = [name for name, count in zip(SPLITS, counts) for _ in range(count)]
    random.Random(f"{spec.seed}:split").shuffle(labels)
    return labels


def place(drafts: list[Draft], spec: WorkloadSpec) -> list[Document]:
    """Gives each draft its index and split. Raises UserError if two documents claim the same text.

    With spec.stride_tokens they may, within a split.
    """
    labels = split_labels(spec)
    alone = [str(i) for i in range(len(drafts))] if spec.stride_tokens is None else labels
    shared = sorted(_overlaps(drafts, alone))
    if shared:
        a, b = shared[0]
        raise UserError(
            f"documents {a} ({drafts[a].name}) and {b} ({drafts[b].name}) share source text", "lower workload.documents"
        )
    return [
        Document(index, f"{spec.kind}-{index:03d}:{d.name}", split, d.prompt_ids, spec.new_tokens, d.answer, d.meta)
        for index, (d, split) in enumerate(zip(drafts, labels, strict=True))
    ]


def _overlaps(drafts: list[Draft], groups: list[str]) -> Iterator[tuple[int, int]]:
    """Pairs of documents of different groups that claim the same text."""
    ranges = sorted(
        (str(name), int(start), int(end), i)
        for i, d in enumerate(drafts)
        if not d.meta.get("filler_shared", False)
        for name, start, end in d.meta["source"]
    )
    reached: dict[str, dict[str, tuple[int, int]]] = {}  # source: group: how far its claims go, and whose that is
    for name, start, end, b in ranges:
        ends = reached.setdefault(name, {})
        yield from ((min(a, b), max(a, b)) for group, (to, a) in ends.items() if group != groups[b] and start < to)
        ends[groups[b]] = max(ends.get(groups[b], (0, b)), (end, b))
