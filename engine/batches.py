"""Batch after batch of a job's documents in one set of sequences, so that every graph is captured once.

The sequences are made for the longest document of the job. A last, smaller batch gets sequences of its own, made when
the larger ones are gone: whoever asks for the next batch must have let go of the last.
"""

from specdial.engine.job import Job
from specdial.engine.sequences import Sequences
from specdial.engine.workloads import Document
from specdial.policies.schema import Policy


class Batches:
    """Prefills groups of a job's documents, for the same policies."""

    def __init__(self, job: Job, policies: list[Policy]) -> None:
        self.job, self.policies = job, policies
        self._longest_tokens = max((len(d.prompt_ids) + d.new_tokens for d in job.documents), default=0)
        self._held: Sequences | None = None

    def prefilled(self, documents: list[Document]) -> Sequences:
        """Sequences that hold these documents, with room for every policy's drafts; the last ones are overwritten.

        Raises UserError past the model's context, and before it allocates more memory than is free.
        """
        held = self._held
        if held is None or held.batch != len(documents):
            self._held = held = None
            self._held = self.job.sequences(documents, self.policies, room_tokens=self._longest_tokens)
            return self._held
        prompts, limits = [d.prompt_ids for d in documents], [d.new_tokens for d in documents]
        held.prefill(prompts, limits, self.job.stop_ids)
        return held
