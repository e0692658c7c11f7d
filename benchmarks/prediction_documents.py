"""Train and test documents of the prediction benchmark, with no text in common.

They come from a workload that this machine can build, or from a file of prompts (engine/prompts.py) where it has no
texts. Leaves out the texts themselves.
"""

from dataclasses import replace

from specdial.engine.workloads import Document, WorkloadSpec, build
from specdial.policies.errors import UserError

KINDS = {"code": "stdlib", "novel": "book", "summary": "summary"}
SHARED_RUN = 256  # tokens in a row that only overlapping text has in common; requests and licences are shorter


def spec_of(workload, context, train, test, new_tokens):
    """The workload of `train` + `test` documents, none for validation."""
    total = train + test
    shares = {"train_frac": train / total, "validation_frac": 0.0, "test_frac": test / total}
    return WorkloadSpec(KINDS[workload], context, total, new_tokens, **shares)


def built(spec, tokenizer):
    """Documents of a workload, train first. Raises UserError where the text is too short."""
    documents = build(spec, tokenizer)
    return _numbered([d for split in ("train", "test") for d in documents if d.split == split])


def from_prompts(ids, train, test, new_tokens):
    """The first prompts of a file to train on, and the last ones that share no run of SHARED_RUN tokens with them.

    ids: [prompts, context]. Prompts of running text overlap their neighbours, hence the distance. Raises UserError
    where too few are left.
    """
    known = {run for prompt in ids[:train] for run in _runs(prompt)}
    apart = [i for i in range(train, len(ids)) if known.isdisjoint(_runs(ids[i]))]
    if len(ids) < train or len(apart) < test:
        cause = f"of {len(ids)} prompts, {len(apart)} share no text with the first {train}; {test} are needed"
        raise UserError(cause, "ask for fewer documents, or write a file of more prompts")
    chosen = [(i, "train") for i in range(train)] + [(i, "test") for i in apart[-test:]]
    return _numbered([Document(i, f"prompt-{i:03d}", split, ids[i].tolist(), new_tokens) for i, split in chosen])


def _runs(prompt):
    """Hashes of every run: two runs that only seem equal cost a test document, no more."""
    return {hash(prompt[i : i + SHARED_RUN].tobytes()) for i in range(len(prompt) - SHARED_RUN + 1)}


def _numbered(documents):
    return [replace(d, index=i) for i, d in enumerate(documents)]
