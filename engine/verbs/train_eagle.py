"""specdial train_eagle: train an EAGLE-3 head for a model on its own text, and say how many of its drafts it accepts.

The texts are a workload's training documents, followed by what the model writes greedily after them. What counts is
measured, not estimated: held-out documents are decoded with the head as drafter, after a short and after the whole
prompt. The head lies in `out/head`, as other engines read it. A run that was killed goes on from its last checkpoint;
one of so many epochs ends as if it had not been killed, one of so many minutes learns for what was left of them.
"""

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch import Tensor

from specdial.engine.eagle_lessons import in_order, kept_texts, lessons, mean_accepted
from specdial.engine.eagle_memory import TrainingDemand, require_training
from specdial.engine.eagle_trainer import Optimisation, Trainer
from specdial.engine.eagle_training import Unrolling, new_config, new_head, read_text, reduced_vocabulary
from specdial.engine.free_memory import free_bytes
from specdial.engine.job import Job, ModelSettings, describe, hardware, load_job
from specdial.engine.models.eagle import EagleHead
from specdial.engine.progress import progress
from specdial.engine.sampling import Sampling
from specdial.engine.weights.eagle import load_head, save_head
from specdial.engine.workloads import Document, of_split
from specdial.policies.artifact import claim_directory, provenance, write_json_atomic
from specdial.policies.console import table_console
from specdial.policies.errors import UserError
from specdial.policies.fields import parse, setting, to_plain

SCHEMA = "specdial/eagle-training/1"
STATE, TEXTS = "state.safetensors", "texts.safetensors"
NOTED_S = 5.0  # between looks at the loss, for each of which the device is waited for


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of `train_eagle`.

    own_documents: the model goes on after so many of the documents, None for all, by workload.new_tokens.
    batch: documents decoded at once. draft_vocab: most tokens that the head drafts. epochs: passes over the texts;
    minutes: instead, how long to learn. learning_rate: the highest. warmup_frac: of the training. clip: most of a
    gradient's norm. steps, decay, segment_tokens: see `Unrolling`. short_tokens: of the parts in which long texts are
    learned too, and of the ends of prompts that the head is judged on every epoch. checkpoint_minutes: between
    checkpoints. k: drafts of a round when the head is judged. int8: leave the head in 8 bits too, in out/head-int8.
    """

    model: ModelSettings
    workload: dict[str, Any]
    out: str
    own_documents: int | None = setting(None, low=0)
    batch: int = setting(1, low=1, high=1024)
    draft_vocab: int = setting(32000, low=1)
    epochs: int = setting(10, low=1, high=100_000)
    minutes: float | None = setting(None, low=0.0, high=100_000.0)
    learning_rate: float = setting(1e-4, low=0.0, high=1.0)
    warmup_frac: float = setting(0.015, low=0.0, high=1.0)
    clip: float = setting(0.5, low=1e-6, high=1e6)
    steps: int = setting(7, low=1, high=32)
    decay: float = setting(0.8, low=0.0, high=1.0)
    segment_tokens: int = setting(8192, low=8, high=1 << 20)
    short_tokens: int = setting(2048, low=2)
    checkpoint_minutes: float = setting(1.0, low=0.0)
    k: int = setting(5, low=1, high=32)
    int8: bool = False
    seed: int = setting(0, low=0, high=(1 << 32) - 1)


def run(settings: Mapping[str, Any], job: Job | None = None) -> dict[str, Any]:
    """Train into `out`, or go on. Returns where the head is, and its held-out accepted drafts a round.

    job: a loaded model and its documents, instead of those that the settings name.
    """
    s = parse(Settings, settings)
    job = job or load_job(s.model, s.workload)
    training, held_out = of_split(job.documents, "train"), of_split(job.documents, "validation")
    decoder = job.model.decoder
    if decoder.device.type == "cuda" and decoder.dtype == torch.float32:
        raise UserError("on a GPU heads are trained in 16 bits", "set model.dtype=bfloat16", field="model.dtype")
    demand = _demand(job, training, s)
    memory = require_training(demand, free_bytes(decoder.device))
    print(f"training takes up to {memory.total / 1e9:.1f} GB beside the target", file=sys.stderr, flush=True)
    out = Path(s.out)
    claim_directory(out, "train_eagle", to_plain(s))
    own = len(training) if s.own_documents is None else s.own_documents
    texts = kept_texts(out / TEXTS, job, training, own=own, batch=s.batch)
    ids = reduced_vocabulary(texts, decoder.config.vocab, s.draft_vocab)
    how = Optimisation(s.learning_rate, s.warmup_frac, s.clip)
    unrolling = Unrolling(s.steps, s.decay, s.segment_tokens)
    trainer = Trainer(decoder, new_head(decoder, ids, s.seed), how, unrolling)
    account: dict[str, Any] = {"done": 0, "tokens": 0, "seconds": 0.0, "losses": [], "epochs": []}
    if (out / STATE).exists():
        account |= trainer.restore(out / STATE)
    else:
        account["untrained"] = _judged(job, trainer.trained(), held_out, s)
    require_training(demand, free_bytes(decoder.device))  # which lets go of what judged the head
    _Training(out, job, trainer, texts, account, s).run(held_out)
    judged = {"trained": _judged(job, trainer.trained(), held_out, s)}
    if s.int8:
        save_head(out / "head-int8", trainer.trained(), int8=True)
        judged["in 8 bits"] = _judged(job, load_head(out / "head-int8", decoder), held_out, s)
    write_json_atomic(
        out / "training.json",
        {
            "schema": SCHEMA,
            **describe(job, Sampling()),
            "hardware": hardware(decoder.device),
            "updates": trainer.updates,
            "texts": len(texts),
            "own_texts": min(own, len(texts)),
            "tokens": account["tokens"],
            "seconds": round(account["seconds"], 3),
            "draft_vocab": len(ids),
            "drafts_a_round": s.k,
            "accepted": {"untrained": account["untrained"], **judged},
            "epochs": account["epochs"],
            "losses": account["losses"],
            "config": to_plain(s),
            "provenance": provenance(),
        },
    )
    _print(out, job, account, judged, s)
    return {"out": str(out), "head": str(out / "head"), "updates": trainer.updates, "accepted": judged["trained"]}


def _demand(job: Job, documents: list[Document], s: Settings) -> TrainingDemand:
    config, decoder = job.model.config, job.model.decoder
    return TrainingDemand(
        target=config,
        head=new_config(config, min(s.draft_vocab, config.vocab)),
        dtype=decoder.dtype,
        on_gpu=decoder.device.type == "cuda",
        text_tokens=max(len(d.prompt_ids) + (0 if s.own_documents == 0 else d.new_tokens) for d in documents),
        segment_tokens=s.segment_tokens,
        steps=s.steps,
    )


class _Training:
    """What is left of a training, lesson by lesson, with checkpoints. account: what was done, brought up to date."""

    def __init__(
        self, out: Path, job: Job, trainer: Trainer, texts: list[list[int]], account: dict[str, Any], s: Settings
    ) -> None:
        self.out, self.job, self.trainer, self.texts, self.account, self.s = out, job, trainer, texts, account, s
        self.lessons = lessons(texts, short_tokens=s.short_tokens, segment_tokens=s.segment_tokens)
        self._waiting: list[Tensor] = []  # losses on the device
        self._since_s = time.monotonic() - account["seconds"]

    @property
    def done_frac(self) -> float:
        if self.s.minutes is None:
            return float(self.account["done"] / (self.s.epochs * len(self.lessons)))
        return self.account["seconds"] / (60 * self.s.minutes) if self.s.minutes else 1.0

    def run(self, held_out: list[Document]) -> None:
        """To the end. held_out: judged after every epoch, unless minutes are counted."""
        s, account = self.s, self.account
        noted_s = saved_s = time.monotonic()
        with progress("train_eagle", 1000) as bar:
            shown = int(1000 * self.done_frac)  # in thousandths
            bar.advance(shown)
            for lesson in in_order(self.lessons, s.seed, account["done"]):
                if self.done_frac >= 1:
                    break
                text = read_text(self.job.model.decoder, lesson.of(self.texts), self.trainer.base)
                self._waiting.append(self.trainer.learn(text, self.done_frac))
                del text  # before the next one is read
                account["done"] += 1
                account["tokens"] += lesson.tokens * len(lesson.starts)
                account["seconds"] = (now_s := time.monotonic()) - self._since_s
                ended = s.minutes is None and account["done"] % len(self.lessons) == 0
                if ended:
                    self._end_epoch(held_out)
                if ended or now_s - saved_s >= 60 * s.checkpoint_minutes:
                    self._save()
                    saved_s = time.monotonic()
                if now_s - noted_s > NOTED_S or self.done_frac >= 1:
                    self._note()
                    noted_s = now_s
                    reached = min(int(1000 * self.done_frac), 1000)
                    bar.advance(reached - shown, self._said())
                    shown = reached
        self._save()

    def _end_epoch(self, held_out: list[Document]) -> None:
        self._note()
        loss = float(np.mean(self.account["losses"][-len(self.lessons) :]))
        accepted = _accepted(self.job, self.trainer.trained(), held_out, self.s, short=True)
        self.account["epochs"].append({"epoch": len(self.account["epochs"]) + 1, "loss": loss, "accepted": accepted})
        self._since_s = time.monotonic() - self.account["seconds"]  # judging is not learning

    def _note(self) -> None:
        """Wait for the losses so far. Raises UserError where training has failed."""
        if self._waiting:
            self.account["losses"] += torch.stack(self._waiting).tolist()
            self._waiting = []
            if not np.isfinite(self.account["losses"][-1]):
                raise UserError("the loss is no longer a number", "lower learning_rate, and use another out=")

    def _save(self) -> None:
        self._note()
        save_head(self.out / "head", self.trainer.trained())
        self.trainer.save(self.out / STATE, self.account)

    def _said(self) -> str:
        account = self.account
        left_s = account["seconds"] * (1 / max(self.done_frac, 1e-9) - 1)
        said = f"loss {account['losses'][-1]:.3f}, {account['tokens'] / account['seconds']:,.0f} tokens/s"
        said += f", {max(left_s, 0):.0f} s left"
        return said + (f", held out {account['epochs'][-1]['accepted']:.2f} accepted" if account["epochs"] else "")


def _judged(job: Job, head: EagleHead, documents: list[Document], s: Settings) -> dict[str, float]:
    """Held-out accepted drafts a round after short prompts, and after whole ones, those half as long as the longest."""
    short = _accepted(job, head, documents, s, short=True)
    longest = max(len(d.prompt_ids) for d in documents)
    long = [d for d in documents if 2 * len(d.prompt_ids) >= longest]
    return {"short": short, "full": short if longest <= s.short_tokens else _accepted(job, head, long, s, short=False)}


def _accepted(job: Job, head: EagleHead, documents: list[Document], s: Settings, *, short: bool) -> float:
    prompt_tokens = s.short_tokens if short else None
    return mean_accepted(job, head, documents, k=s.k, prompt_tokens=prompt_tokens, batch=s.batch)


def _print(out: Path, job: Job, account: dict[str, Any], judged: dict[str, dict[str, float]], s: Settings) -> None:
    title = f"EAGLE head for {job.name}, {out / 'head'}" + (" (random weights)" if job.model.random else "")
    full = max(len(d.prompt_ids) for d in of_split(job.documents, "validation"))
    table = Table(title=title, title_justify="left")
    for column in ("", "loss", f"after {min(s.short_tokens, full)} tokens", f"after {full} tokens"):
        table.add_column(column, justify="right")
    table.add_row("untrained", "-", *(f"{account['untrained'][part]:.2f}" for part in ("short", "full")))
    for epoch in account["epochs"]:
        table.add_row(f"epoch {epoch['epoch']}", f"{epoch['loss']:.4f}", f"{epoch['accepted']:.2f}", "-")
    last = f"{np.mean(account['losses'][-20:]):.4f}" if account["losses"] else "-"
    for name, accepted in judged.items():
        table.add_row(name, last, *(f"{accepted[part]:.2f}" for part in ("short", "full")))
    console = table_console()
    console.print(table)
    console.print(f"held-out mean accepted of {s.k} drafts, greedy")
    console.print(f"{account['tokens']} tokens learned in {account['seconds']:.0f} s")
