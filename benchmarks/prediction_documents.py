"""Train and test documents of the prediction benchmark, with no text in common.

They come from a workload that this machine can build, or from a file of prompts (engine/prompts.py) where it has no
texts. Both splits come from all parts of a book and from all files of a library, taking turns, so that what sets them
apart is chance and not a chapter. So does any run of documents in a row, whether it is a batch or as many as were
measured before time ran out. Leaves out the texts themselves.
"""

import math
from dataclasses import replace

from prompts import read

from specdial.engine.workloads import Document, WorkloadSpec, build
from specdial.policies.errors import UserError

KINDS = {"code": "stdlib", "novel": "book", "summary": "summary"}
GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0
SHARED_RUN = 256  # tokens in a row that only overlapping text has in common; requests and licences are shorter


def spec_of(workload, context, train, test, new_tokens):
    """The workload of `train` + `test` documents, none for validation."""
    total = train + test
    shares = {"train_frac": train / total, "validation_frac": 0.0, "test_frac": test / total}
    return WorkloadSpec(KINDS[workload], context, total, new_tokens, **shares)


def documents(a, model, workload, context, spec):
    """Documents of a cell, train first, and plain facts on their texts. a: of prompts, train, test and new_tokens."""
    if a.prompts is None:
        return built(spec, model.tokenizer), {"workload": spec.kind}
    ids, about = read(a.prompts, model.tokenizer, workload, context)
    return from_prompts(ids, a.train, a.test, a.new_tokens), about


def check_batch(batch, train, test):
    """Raises UserError unless train documents make whole batches and there is one to test: runs of a smaller last batch
    would be predicted, and none measured."""
    if len(test) < batch or len(train) % batch:
        cause = f"batch {batch} of {len(train)} train and {len(test)} test documents"
        raise UserError(cause, "ask for multiples of it or for smaller batches")


def built(spec, tokenizer):
    """Documents of a workload, train first. Raises UserError where the text is too short."""
    documents = sorted(build(spec, tokenizer), key=lambda d: d.meta["source"][0])
    return _split(documents, round(spec.test_frac * spec.documents))


def from_prompts(ids, train, test, new_tokens):
    """Train and test documents of a file of prompts, train first.

    ids: [prompts, context]. The first train + test that share no run of SHARED_RUN tokens with one before, both splits
    from all over. Prompts of running text that overlap their neighbours cannot alternate: there the first ones train,
    and the last that share no run with those test. Raises UserError where too few are left.
    """
    made = [Document(i, f"prompt-{i:03d}", "train", prompt.tolist(), new_tokens) for i, prompt in enumerate(ids)]
    runs = [_runs(prompt) for prompt in ids]
    alone, seen = [], set()
    for document, own in zip(made, runs):
        if seen.isdisjoint(own):
            alone.append(document)
            seen |= own
    if len(alone) >= train + test:
        return _split(alone[: train + test], test)
    known = set().union(*runs[:train])
    apart = [i for i in range(train, len(ids)) if known.isdisjoint(runs[i])]
    if len(ids) < train or len(apart) < test:
        cause = f"of {len(ids)} prompts, {len(apart)} share no text with the first {train}; {test} are needed"
        raise UserError(cause, "ask for fewer documents, or write a file of more prompts")
    return _numbered(made[:train], [replace(made[i], split="test") for i in apart[-test:]])


def _split(documents, test):
    """So many of the documents to test on, evenly among them, the others to train on; train first."""
    total = len(documents)
    tested = [(i + 1) * test // total > i * test // total for i in range(total)]
    train = [replace(d, split="train") for d, late in zip(documents, tested) if not late]
    return _numbered(train, [replace(d, split="test") for d, late in zip(documents, tested) if late])


def _runs(prompt):
    """Hashes of every run: two runs that only seem equal cost a test document, no more."""
    return {hash(prompt[i : i + SHARED_RUN].tobytes()) for i in range(len(prompt) - SHARED_RUN + 1)}


def _numbered(train, test):
    return [replace(d, index=i) for i, d in enumerate([*_scattered(train), *_scattered(test)])]


def _scattered(items):
    """In the order of the fractional parts of i times the golden ratio: a run of them in a row comes from all over, as
    evenly as can be."""
    return [items[i] for i in sorted(range(len(items)), key=lambda i: i * GOLDEN % 1.0)]
