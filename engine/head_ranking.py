"""Which heads look a fact up: every head's attention on the needle while the answer to it is produced.

needle_mass(l, h) = mean over documents of mean over answer rows r of sum over needle keys j of A[l, h, r, j]: rows r
are the positions that predict the answer's tokens, teacher-forced, and needle keys are those of the sentence that
holds the answer. That is the score Dustin ranks heads by inside each layer. copy_frac is the retrieval score of Wu et
al. 2024 ("Retrieval Head Mechanistically Explains Long-Context Factuality"): the share of answer tokens for which the
head's most attended key lies in the needle and is that very token.
Leaves out the search for which heads to use (simulator.heads).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from specdial.engine.attention_rows import attention_rows, read_queries
from specdial.engine.job import empty_sequences
from specdial.engine.trace.attention import HeadScore
from specdial.engine.weights import LoadedModel
from specdial.engine.workloads import Document
from specdial.policies.errors import UserError
from specdial.policies.schema import plain_policy


@dataclass(frozen=True, slots=True)
class NeedleScores:
    """Means over documents, [L, H] float64 each."""

    needle_mass: np.ndarray
    copy_frac: np.ndarray


def needle_scores(
    model: LoadedModel, documents: list[Document], advance: Callable[[], None] = lambda: None
) -> NeedleScores:
    """Both scores of every head on `needle` documents; `advance` is called after each.

    Raises UserError for documents without a needle, and before more memory is allocated than is free.
    """
    if not documents or any(d.answer is None or not d.meta.get("needles") for d in documents):
        raise UserError("heads are ranked by needles, and a document has none", "use workload needle for ranking")
    answers = [model.tokenizer.encode(f" {d.answer}") for d in documents]
    longest = max(len(d.prompt_ids) + len(answer) for d, answer in zip(documents, answers))
    s = empty_sequences(model, longest, 1, [plain_policy()])
    shape = (2, model.config.layers, model.config.heads)
    found = torch.zeros(shape, dtype=torch.float64, device=model.decoder.device)
    for document, answer in zip(documents, answers):
        needle = document.meta["needles"][0]
        span = slice(needle["start_token"], needle["end_token"])
        start = len(document.prompt_ids) - 1  # its row predicts the first token of the answer
        text = [*document.prompt_ids, *answer[:-1]]
        s.prefill([document.prompt_ids], [0])
        queries = read_queries(s, text, start)  # [L, T, H, D]
        produced = torch.tensor(answer, device=queries.device)  # [T]
        tokens = torch.tensor(text, device=queries.device)  # [S]
        for layer in range(model.config.layers):
            rows = attention_rows(queries[layer], s.cache.view(layer, len(text))[0][0], start)  # [T, H, S]
            first = rows.argmax(-1)  # [T, H] the most attended key
            copied = (first >= span.start) & (first < span.stop) & (tokens[first] == produced[:, None])  # [T, H]
            found[0, layer] += rows[..., span].sum(-1).mean(0)
            found[1, layer] += copied.double().mean(0)
        advance()
    return NeedleScores(*(found / len(documents)).cpu().numpy())


def rank_heads(source: str, scores: NeedleScores) -> list[HeadScore]:
    """Every head with its ranks by needle_mass, 1 the best: inside its layer, and over all. Ties: lower index first."""
    layers, heads = scores.needle_mass.shape
    overall = ranks(scores.needle_mass.reshape(1, -1)).reshape(layers, heads)
    inside = ranks(scores.needle_mass)
    return [
        HeadScore(
            source,
            layer,
            head,
            float(scores.needle_mass[layer, head]),
            float(scores.copy_frac[layer, head]),
            int(inside[layer, head]),
            int(overall[layer, head]),
        )
        for layer in range(layers)
        for head in range(heads)
    ]


def ranks(values: np.ndarray) -> np.ndarray:
    """Rank of each value in its row, 1 the largest; ties: lower index first. [N, M] -> [N, M]"""
    order = np.argsort(-values, axis=-1, kind="stable")
    found = np.empty_like(order)
    np.put_along_axis(found, order, np.arange(1, values.shape[-1] + 1)[None].repeat(len(values), 0), axis=-1)
    return found
