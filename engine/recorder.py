"""Turns rounds into trace rows, document by document."""

from typing import Any

import numpy as np
import pyarrow as pa

from specdial.engine.loop import Round
from specdial.engine.trace.schema import DRAFTS, FULL, PLAIN, ROUNDS
from specdial.engine.workloads import Document


class Recorder:
    """Collects the rounds of one batch of documents."""

    def __init__(self, documents: list[Document]) -> None:
        self.documents = documents
        self.rounds: list[dict[str, list[Any]]] = [_columns(ROUNDS) for _ in documents]
        self.drafts: list[dict[str, list[Any]]] = [_columns(DRAFTS) for _ in documents]

    def add(self, round_: Round) -> None:
        """Record one round of every active sequence."""
        for b in np.flatnonzero(round_.active).tolist():
            rows = self.rounds[b]
            number = len(rows["doc"])
            row = {
                "doc": self.documents[b].index,
                "round": number,
                "context_tokens": int(round_.context_tokens[b]),
                "batch": len(self.documents),
                "k": int(round_.k[b]),
                "accepted": int(round_.accepted[b]),
                "emitted": len(round_.emitted[b]),
                "mode": PLAIN if round_.plain else FULL,
                "rounds_since_full": 0,
                "draft_us": round_.draft_us,
                "verify_us": round_.verify_us,
                "select_us": round_.select_us,
                "host_us": round_.host_us,
            }
            for name, value in row.items():
                rows[name].append(value)
            self._add_drafts(b, number, round_)

    def tables(self, b: int, tokens: list[int]) -> dict[str, dict[str, Any]]:
        """Trace tables of the b-th document; tokens: its whole sequence, prompt included."""
        prompt = len(self.documents[b].prompt_ids)
        output = tokens[prompt:]
        outputs = {
            "doc": [self.documents[b].index] * len(output),
            "position": list(range(prompt, len(tokens))),
            "token_id": output,
        }
        return {"rounds": self.rounds[b], "drafts": self.drafts[b], "outputs": outputs}

    def _add_drafts(self, b: int, number: int, round_: Round) -> None:
        k, accepted = int(round_.k[b]), int(round_.accepted[b])
        for i in range(k):
            row = {
                "doc": self.documents[b].index,
                "round": number,
                "position": int(round_.context_tokens[b]),
                "arm": 0,
                "depth": i + 1,
                "entropy_nats": round_.signals.entropy_nats[b, i],
                "top1_prob": round_.signals.top1_prob[b, i],
                "margin": round_.signals.margin[b, i],
                "match": i < accepted,
                "accept_prob": None if round_.accept_prob is None else float(round_.accept_prob[b, i]),
                "reached": i <= accepted,
            }
            for name, value in row.items():
                self.drafts[b][name].append(value)


def _columns(schema: pa.Schema) -> dict[str, list[Any]]:
    return {name: [] for name in schema.names}
