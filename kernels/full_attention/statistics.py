"""Attention statistics before they are normalised: what every key or page received from every query row.

One split of the attention loop knows a row's scores but not yet its normaliser, so the loop writes logarithms and the
normaliser follows from the merge. Per query head, because rows of one group have different normalisers.
"""

from dataclasses import dataclass
from typing import Literal

import torch

Granularity = Literal["token", "page"]
TILE_TOKENS = 64  # keys per tile of the attention loop, the largest page


@dataclass(frozen=True, slots=True)
class Statistics:
    """Raw attention mass of the M = T*G packed rows (row t*G + g), in base-2 logarithms of unnormalised weights.

    page:  log_mass [B, Hk, P, M] float32, mass of page p = 2^(log_mass - lse); tile_max None.
    token: log_mass [B, Hk, M, S] float16 (float32 for float32 inputs), relative to its tile's largest score
           tile_max [B, Hk, ceil(S/64), M] float32: mass of key n = 2^(log_mass + tile_max - lse).
    lse: [B, Hk, M] float32. Keys or pages past a row's last visible key hold arbitrary values; readers mask them.
    """

    granularity: Granularity
    page_tokens: int
    group: int
    log_mass: torch.Tensor
    tile_max: torch.Tensor | None
    lse: torch.Tensor

    @property
    def rows(self) -> int:
        """Query positions T."""
        return self.lse.shape[2] // self.group

    @property
    def width(self) -> int:
        """Keys S, or pages P."""
        return self.log_mass.shape[3] if self.granularity == "token" else self.log_mass.shape[2]

    @property
    def unit_tokens(self) -> int:
        """Keys per entry: 1 for tokens, else the page size."""
        return 1 if self.granularity == "token" else self.page_tokens
