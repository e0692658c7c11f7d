"""What an EAGLE head is taught: texts, and the order in which their parts are learned; and how it is judged.

The texts are documents, followed by what the target writes greedily after them. Every epoch learns each text as a whole
and, if it is much longer, again in short parts that are read as texts of their own: a head that has seen nothing but
short texts drafts badly after long ones, and the other way round. Judged is what counts, accepted drafts on held-out
documents. Leaves out how a part is learned (eagle_training).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from specdial.engine.batches import Batches
from specdial.engine.job import Job, empty_sequences
from specdial.engine.loop import Decoding
from specdial.engine.models.eagle import EagleHead
from specdial.engine.progress import progress
from specdial.engine.sampling import Sampling
from specdial.engine.sequences import Sequences
from specdial.engine.workloads import Document
from specdial.policies.artifact import write_bytes_atomic
from specdial.policies.errors import UserError
from specdial.policies.schema import plain_policy, policy_from_mapping

IN_TRAINING = "in training"


@dataclass(frozen=True, slots=True)
class Lesson:
    """Parts of one text, equally long, that are learned at once."""

    text: int
    starts: tuple[int, ...]
    tokens: int

    def of(self, texts: list[list[int]]) -> list[list[int]]:
        """The parts."""
        return [texts[self.text][start : start + self.tokens] for start in self.starts]


def lessons(texts: list[list[int]], *, short_tokens: int, segment_tokens: int) -> list[Lesson]:
    """Of every text the whole, and if it has two short parts, those of short_tokens that end with it.

    So many parts make a lesson as make segment_tokens, one at least.
    """
    made = []
    for number, text in enumerate(texts):
        made.append(Lesson(number, (0,), len(text)))
        if len(text) >= 2 * short_tokens:
            starts = range(len(text) % short_tokens, len(text), short_tokens)
            group = max(segment_tokens // short_tokens, 1)
            for first in range(0, len(starts), group):
                made.append(Lesson(number, tuple(starts[first : first + group]), short_tokens))
    return made


def in_order(made: list[Lesson], seed: int, skipped: int) -> Iterator[Lesson]:
    """Lessons without end but the first `skipped`: every epoch all of them, in an order of its own."""
    epoch, at = divmod(skipped, len(made))
    while True:
        order = np.random.default_rng([seed, epoch]).permutation(len(made))
        yield from (made[number] for number in order[at:])
        epoch, at = epoch + 1, 0


def kept_texts(path: Path, job: Job, documents: list[Document], *, own: int, batch: int) -> list[list[int]]:
    """The texts to learn, written down once they are known. own: the target goes on after so many of the documents."""
    if not path.exists():
        texts = [*_own_texts(job, documents[:own], batch), *(d.prompt_ids for d in documents[own:])]
        lengths = torch.tensor([len(text) for text in texts])
        tokens = torch.tensor([token for text in texts for token in text], dtype=torch.int32)
        write_bytes_atomic(path, save({"lengths": lengths, "tokens": tokens}))
    try:
        kept = load_file(path)
        found = [part.tolist() for part in kept["tokens"].split(kept["lengths"].tolist())]
    except (SafetensorError, KeyError, RuntimeError):
        raise UserError(f"{path} is damaged", "delete that directory and start over") from None
    if min(map(len, found)) < 2:
        raise UserError("a text to learn has a single token", "raise context or workload.new_tokens")
    return found


def _own_texts(job: Job, documents: list[Document], batch: int) -> Iterator[list[int]]:
    """Documents with the model's greedy continuations, so many at once."""
    plain = plain_policy()
    batches = Batches(job, [plain])
    with progress("texts", len(documents)) as bar:
        for start in range(0, len(documents), batch):
            sequences = batches.prefilled(documents[start : start + batch])
            for _ in Decoding(sequences, plain, Sampling(), list(range(sequences.batch))).rounds():
                pass
            bar.advance(sequences.batch)
            yield from (list(tokens) for tokens in sequences.tokens)


def mean_accepted(
    job: Job, head: EagleHead, documents: list[Document], *, k: int, prompt_tokens: int | None, batch: int
) -> float:
    """Mean accepted drafts a round of greedy decoding with the head, k drafts a round, after documents' ends.

    prompt_tokens: of each document, None for all. batch: documents decoded at once.
    """
    prompts = [d.prompt_ids[-prompt_tokens:] if prompt_tokens else d.prompt_ids for d in documents]
    limits = [d.new_tokens for d in documents]
    drafter = {"kind": "eagle", "model": IN_TRAINING}
    policy = policy_from_mapping({"drafter": drafter, "controller": {"kind": "fixed", "k": k}})
    longest = max(len(prompt) + limit for prompt, limit in zip(prompts, limits))
    accepted = rounds = 0
    sequences: Sequences | None = None
    for start in range(0, len(documents), batch):
        part = slice(start, start + batch)
        if sequences is None or sequences.batch != len(prompts[part]):
            sequences = None  # before others are made
            sequences = empty_sequences(job.model, longest, len(prompts[part]), [policy], heads={IN_TRAINING: head})
        sequences.prefill(prompts[part], limits[part], job.stop_ids)
        for round_ in Decoding(sequences, policy, Sampling(), list(range(sequences.batch))).rounds():
            accepted += int(round_.accepted[round_.active].sum())
            rounds += int(round_.active.sum())
    return accepted / rounds
