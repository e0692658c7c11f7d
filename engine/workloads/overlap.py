"""Documents that overlap, for a text too short to give enough of them apart: asked for with workload.stride_tokens.

The text is first cut into one region per split, so that documents of different splits never share text; inside its
region a document may start stride_tokens after another. Regions depend on how many documents each split has, so
another number of documents gives other documents.
"""

import random
from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate, islice

from specdial.engine.workloads.packing import Frame, split_labels
from specdial.engine.workloads.sources import Passage
from specdial.engine.workloads.spec import SPLITS, Draft, Tokenizer, WorkloadSpec
from specdial.policies.errors import UserError


def overlapping(
    passages: list[Passage], what: str, spec: WorkloadSpec, tokenizer: Tokenizer, frame: Frame
) -> list[Draft]:
    """A draft for each label of `split_labels`, in that order, from the region of its split.

    Raises UserError saying which split has too few. spec.stride_tokens must be set. what: the text's name in errors.
    """
    stride = spec.stride_tokens or 1
    sizes = [len(tokenizer.encode(p.text)) for p in passages]
    labels = split_labels(spec)
    wanted = {split: labels.count(split) for split in SPLITS if split in labels}
    need = frame.body_tokens(spec) + frame.beyond_tokens
    edges = _edges(sizes, [need + (count - 1) * stride for count in wanted.values()])
    found: dict[str, Iterator[Draft]] = {}
    for (split, count), first, last in zip(wanted.items(), edges, edges[1:], strict=False):
        windows = _windows(passages[first:last], sizes[first:last], spec, tokenizer, frame)
        drafts = list(islice(windows, count))
        if len(drafts) < count:
            raise UserError(
                f"{what} holds {len(drafts)} documents of {spec.context_tokens} + {frame.beyond_tokens} tokens for "
                f"split {split}, one every {stride} tokens, {count} asked for",
                "lower workload.stride_tokens, workload.documents or the context, or use a longer text",
            )
        found[split] = iter(drafts)
    return [next(found[label]) for label in labels]


def _edges(sizes: list[int], shares: list[int]) -> list[int]:
    """Where to cut passages of these sizes into regions in proportion to shares: len(shares) + 1 passage indices."""
    ends = list(accumulate(sizes))
    inner = list(accumulate(shares))[:-1]
    total = ends[-1] if ends else 0
    return [0, *(bisect_left(ends, total * part / sum(shares)) for part in inner), len(sizes)]


def _windows(
    region: list[Passage], sizes: list[int], spec: WorkloadSpec, tokenizer: Tokenizer, frame: Frame
) -> Iterator[Draft]:
    """Drafts that start at least stride_tokens apart in a region, in the seed's order."""
    stride, need = spec.stride_tokens or 1, frame.body_tokens(spec) + frame.beyond_tokens
    starts: list[int] = []
    since = stride  # tokens since the last start
    for i, size in enumerate(sizes):
        if since >= stride:
            starts.append(i)
            since = 0
        since += size
    for first in random.Random(f"{spec.seed}:choose").sample(starts, len(starts)):
        total = 0
        for last in range(first, len(region)):
            total += sizes[last]
            if total < need:
                continue
            # Encoding passages together may give fewer ids than apart: encode the run, and go on if it is short.
            run = region[first : last + 1]
            ids = tokenizer.encode("".join(p.text for p in run))
            if len(ids) >= need:
                yield frame.draft(run, ids, spec)
                break
