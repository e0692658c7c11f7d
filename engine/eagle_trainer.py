"""The training of one EAGLE-3 head: optimiser, schedule, and checkpoints that a killed run goes on from.

Weights and the optimiser's moments are float32; every update computes with copies in the target's dtype. A checkpoint
is one file, replaced at once. Leaves out what is learned (eagle_training) and on which texts (verbs/train_eagle).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from specdial.engine.eagle_training import Text, Unrolling, segment_loss, segments
from specdial.engine.models.decoder import Decoder
from specdial.engine.models.eagle import EagleHead, HeadWeights
from specdial.policies.artifact import write_bytes_atomic
from specdial.policies.errors import UserError

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Optimisation:
    """AdamW with a linear rise of its learning rate, over the first part of the training, and a cosine down to 0.

    learning_rate: the highest. warmup_frac: the rise's part. clip: largest norm of an update's gradient.
    """

    learning_rate: float
    warmup_frac: float
    clip: float

    def rate(self, done_frac: float) -> float:
        """The learning rate when so much of the training is done."""
        rise = 0.1 + 0.9 * done_frac / self.warmup_frac if done_frac < self.warmup_frac else 1.0
        return self.learning_rate * rise * 0.5 * (1 + math.cos(math.pi * min(done_frac, 1.0)))


class Trainer:
    """A head and its optimiser."""

    def __init__(self, decoder: Decoder, head: EagleHead, how: Optimisation, unrolling: Unrolling) -> None:
        """head: as `new_head` makes it."""
        self.how, self.unrolling, self.updates = how, unrolling, 0
        self.base, self._place = head, (decoder.device, decoder.dtype)
        self._masters = {f.name: torch.nn.Parameter(getattr(head.weights, f.name).clone()) for f in fields(HeadWeights)}
        self._optimiser = torch.optim.AdamW(self._masters.values(), lr=how.learning_rate, betas=(0.9, 0.95))

    def head(self) -> EagleHead:
        """The head as it is now, in the target's dtype; what is computed with it can be differentiated."""
        return self.base.with_weights(HeadWeights(**self._masters).to(*self._place))

    def trained(self) -> EagleHead:
        """The head as it is now, for use: a copy without gradients."""
        with torch.no_grad():
            weights = HeadWeights(**{name: master.detach().clone() for name, master in self._masters.items()})
            return self.base.with_weights(weights.to(*self._place))

    def learn(self, text: Text, done_frac: float) -> Tensor:
        """One update a segment of the text; returns their mean loss, a scalar that nobody has waited for."""
        losses = []
        for group in self._optimiser.param_groups:
            group["lr"] = self.how.rate(done_frac)
        for segment in segments(text.tokens.shape[1] - 1, self.unrolling):
            self._optimiser.zero_grad()
            loss = segment_loss(self.head(), text, segment, self.unrolling)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self._masters.values(), self.how.clip)
            self._optimiser.step()
            self.updates += 1
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    def save(self, path: Path, account: dict[str, Any]) -> None:
        """Write weights, moments and an account of what was done, plain data."""
        tensors = {f"master.{name}": master.detach().cpu() for name, master in self._masters.items()}
        for name, master in self._masters.items():
            for moment in _MOMENTS if self.updates else ():
                tensors[f"{moment}.{name}"] = self._optimiser.state[master][moment].cpu()
        metadata = {"updates": str(self.updates), "account": json.dumps(account, allow_nan=False)}
        write_bytes_atomic(path, save(tensors, metadata=metadata))

    def restore(self, path: Path) -> dict[str, Any]:
        """Go on from a checkpoint; returns its account. Raises UserError where it is damaged."""
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata()
                self.updates = int(metadata["updates"])
                account: dict[str, Any] = json.loads(metadata["account"])
                with torch.no_grad():
                    for name, master in self._masters.items():
                        master.copy_(file.get_tensor(f"master.{name}"))
                        if self.updates:
                            self._optimiser.state[master] = self._state(file, name, master)
        except (SafetensorError, KeyError, ValueError, TypeError) as error:
            cause = " ".join(str(error).split())
            raise UserError(f"{path} is damaged: {cause}", "delete that directory and start over") from None
        return account

    def _state(self, file: Any, name: str, master: Tensor) -> dict[str, Tensor]:
        moments = {moment: file.get_tensor(f"{moment}.{name}").to(master.device) for moment in _MOMENTS}
        return {"step": torch.tensor(float(self.updates)), **moments}
