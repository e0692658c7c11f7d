"""specdial train_eagle: train an EAGLE-3 head for a model on its own text, and say how many of its drafts it accepts.

The texts are a workload's training documents, each followed by what the model writes greedily after it. What counts is
measured, not estimated: held-out documents are decoded with the head as drafter. The head lies in `out/head`, as other
engines read it; a run that was killed goes on from its last checkpoint, and ends as if it had not been killed.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from specdial.engine.batches import Batches
from specdial.engine.eagle_trainer import Optimisation, Trainer
from specdial.engine.eagle_training import Unrolling, new_head, read_text, reduced_vocabulary, segments
from specdial.engine.job import Job, ModelSettings, describe, empty_sequences, hardware, load_job
from specdial.engine.loop import Decoding
from specdial.engine.models.eagle import EagleHead
from specdial.engine.progress import progress
from specdial.engine.sampling import Sampling
from specdial.engine.weights.eagle import save_head
from specdial.engine.workloads import Document, of_split
from specdial.policies.artifact import claim_directory, provenance, write_json_atomic
from specdial.policies.console import table_console
from specdial.policies.errors import UserError
from specdial.policies.fields import parse, setting, to_plain
from specdial.policies.schema import Policy, plain_policy, policy_from_mapping

SCHEMA = "specdial/eagle-training/1"
STATE, TEXTS, IN_TRAINING = "state.safetensors", "texts.json", "in training"


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of `train_eagle`.

    own_text: let the model go on after every document, by workload.new_tokens. draft_vocab: most tokens that the head
    drafts. epochs: passes over the texts. learning_rate: the highest. warmup_frac: of all updates. clip: most of a
    gradient's norm. steps, decay, segment_tokens: see `Unrolling`. checkpoint_documents: texts between checkpoints.
    k: drafts of a round when the head is judged. short_tokens: end of a held-out prompt it is judged on every epoch.
    """

    model: ModelSettings
    workload: dict[str, Any]
    out: str
    own_text: bool = True
    draft_vocab: int = setting(32000, low=1)
    epochs: int = setting(10, low=1, high=100_000)
    learning_rate: float = setting(1e-4, low=0.0, high=1.0)
    warmup_frac: float = setting(0.015, low=0.0, high=1.0)
    clip: float = setting(0.5, low=1e-6, high=1e6)
    steps: int = setting(7, low=1, high=32)
    decay: float = setting(0.8, low=0.0, high=1.0)
    segment_tokens: int = setting(1024, low=8, high=1 << 20)
    checkpoint_documents: int = setting(64, low=1)
    k: int = setting(5, low=1, high=32)
    short_tokens: int = setting(512, low=2)
    seed: int = setting(0, low=0, high=(1 << 32) - 1)


def run(settings: Mapping[str, Any], job: Job | None = None) -> dict[str, Any]:
    """Train into `out`, or go on. Returns where the head is, and its held-out accepted drafts a round.

    job: a loaded model and its documents, instead of those that the settings name.
    """
    s = parse(Settings, settings)
    job = job or load_job(s.model, s.workload)
    training, held_out = of_split(job.documents, "train"), of_split(job.documents, "validation")
    out = Path(s.out)
    claim_directory(out, "train_eagle", to_plain(s))
    texts = _texts(out, job, training, own=s.own_text)
    decoder, unrolling = job.model.decoder, Unrolling(s.steps, s.decay, s.segment_tokens)
    ids = reduced_vocabulary(texts, decoder.config.vocab, s.draft_vocab)
    updates = s.epochs * sum(len(segments(len(text) - 1, unrolling)) for text in texts)
    how = Optimisation(s.learning_rate, s.warmup_frac, s.clip, updates)
    trainer = Trainer(decoder, new_head(decoder, ids, s.seed), how, unrolling)
    account: dict[str, Any] = {"done": 0, "losses": [], "epochs": []}
    if (out / STATE).exists():
        account = trainer.restore(out / STATE)
    else:
        account["untrained"] = _accepted(job, trainer.trained(), held_out, s, short=True)
    _train(out, job, trainer, texts, account, s, held_out)
    head = trainer.trained()
    judged = {
        "short": _accepted(job, head, held_out, s, short=True),
        "full": _accepted(job, head, held_out, s, short=False),
    }
    write_json_atomic(
        out / "training.json",
        {
            "schema": SCHEMA,
            **describe(job, Sampling()),
            "hardware": hardware(decoder.device),
            "updates": updates,
            "draft_vocab": len(ids),
            "drafts_a_round": s.k,
            "accepted": {"untrained_short": account["untrained"], **judged},
            "epochs": account["epochs"],
            "losses": account["losses"],
            "config": to_plain(s),
            "provenance": provenance(),
        },
    )
    _print(out, job, account, judged, s)
    return {"out": str(out), "head": str(out / "head"), "updates": updates, "accepted": judged}


def _train(
    out: Path, job: Job, trainer: Trainer, texts: list[list[int]], account: dict[str, Any], s: Settings,
    held_out: list[Document],
) -> None:  # fmt: skip
    """What is left of all epochs, with checkpoints. account: what was done so far, brought up to date."""
    decoder, total = job.model.decoder, s.epochs * len(texts)
    with progress("train_eagle", total) as bar:
        bar.advance(account["done"])
        for number in _order(len(texts), s)[account["done"] :]:
            text = read_text(decoder, texts[number], trainer.base)
            account["losses"].append(trainer.learn(text))
            account["done"] += 1
            ended = account["done"] % len(texts) == 0
            if ended:
                loss = float(np.mean(account["losses"][-len(texts) :]))
                accepted = _accepted(job, trainer.trained(), held_out, s, short=True)
                account["epochs"].append({"epoch": len(account["epochs"]) + 1, "loss": loss, "accepted": accepted})
            if ended or account["done"] % s.checkpoint_documents == 0:
                save_head(out / "head", trainer.trained())
                trainer.save(out / STATE, account)
            bar.advance(1, f"loss {account['losses'][-1]:.3f}{_said(account)}")


def _said(account: dict[str, Any]) -> str:
    return f", held out {account['epochs'][-1]['accepted']:.2f} accepted" if account["epochs"] else ""


def _order(texts: int, s: Settings) -> list[int]:
    """The texts of all epochs, each epoch in an order of its own."""
    random = np.random.default_rng(s.seed)
    return [int(number) for _ in range(s.epochs) for number in random.permutation(texts)]


def _texts(out: Path, job: Job, documents: list[Document], *, own: bool) -> list[list[int]]:
    """The texts to learn, written down once they are known."""
    path = out / TEXTS
    if not path.exists():
        texts = list(_own_texts(job, documents)) if own else [d.prompt_ids for d in documents]
        write_json_atomic(path, texts)
    try:
        found: list[list[int]] = json.loads(path.read_text())
    except (OSError, ValueError):
        raise UserError(f"{path} is damaged", "delete that directory and start over") from None
    if min(map(len, found)) < 2:
        raise UserError("a text to learn has a single token", "raise context or workload.new_tokens")
    return found


def _own_texts(job: Job, documents: list[Document]) -> Iterator[list[int]]:
    """Every document with the model's greedy continuation."""
    plain = plain_policy()
    batches = Batches(job, [plain])
    with progress("texts", len(documents)) as bar:
        for document in documents:
            sequences = batches.prefilled([document])
            for _ in Decoding(sequences, plain, Sampling(), [0]).rounds():
                pass
            bar.advance()
            yield list(sequences.tokens[0])


def _accepted(job: Job, head: EagleHead, documents: list[Document], s: Settings, *, short: bool) -> float:
    """Mean accepted drafts a round of greedy decoding with the head, over all rounds. short: after prompts' ends."""
    prompts = [d.prompt_ids[-s.short_tokens :] if short else d.prompt_ids for d in documents]
    policy = _policy(s.k)
    longest = max(len(prompt) + d.new_tokens for prompt, d in zip(prompts, documents))
    sequences = empty_sequences(job.model, longest, 1, [policy], heads={IN_TRAINING: head})
    accepted = rounds = 0
    for prompt, document in zip(prompts, documents):
        sequences.prefill([prompt], [document.new_tokens], job.stop_ids)
        for round_ in Decoding(sequences, policy, Sampling(), [0]).rounds():
            accepted += int(round_.accepted[0])
            rounds += 1
    return accepted / rounds


def _policy(k: int) -> Policy:
    drafter = {"kind": "eagle", "model": IN_TRAINING}
    return policy_from_mapping({"drafter": drafter, "controller": {"kind": "fixed", "k": k}})


def _print(out: Path, job: Job, account: dict[str, Any], judged: dict[str, float], s: Settings) -> None:
    title = f"EAGLE head for {job.name}, {out / 'head'}" + (" (random weights)" if job.model.random else "")
    table = Table(title=title, title_justify="left")
    for column in ("epoch", "loss", f"accepted of {s.k}, held out"):
        table.add_column(column, justify="right")
    table.add_row("untrained", "-", f"{account['untrained']:.2f}")
    for epoch in account["epochs"]:
        table.add_row(str(epoch["epoch"]), f"{epoch['loss']:.4f}", f"{epoch['accepted']:.2f}")
    console = table_console()
    console.print(table)
    full = max(len(d.prompt_ids) for d in of_split(job.documents, "validation"))
    short = min(s.short_tokens, full)
    console.print(
        f"held-out mean accepted: {judged['short']:.2f} after {short} tokens, {judged['full']:.2f} after {full}"
    )
