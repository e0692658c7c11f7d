"""Attention statistics before they are normalised: what every key or page received from every query row.

One split of the attention loop knows a row's scores but not yet its normaliser, so the loop writes logarithms and the
normaliser follows from the merge. Per query head, because rows of one group have different normalisers.
"""

from dataclasses import dataclass, replace
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

    @classmethod
    def empty(
        cls,
        granularity: Granularity,
        *,
        batch: int,
        kv_heads: int,
        keys: int,
        rows: int,
        group: int,
        page_tokens: int = TILE_TOKENS,
        exact: bool = False,
        device: torch.device | str = "cpu",
    ) -> "Statistics":
        """Buffers for `rows` query positions over `keys` cached keys; `exact` keeps token scores in float32.

        With batch = layers * sequences they hold one round of every layer: `layer` cuts one out to be written, and
        `history.push_rows` takes them all in one launch.
        """
        M, tiles, pages = rows * group, -(-keys // TILE_TOKENS), -(-keys // page_tokens)
        lse = torch.empty(batch, kv_heads, M, dtype=torch.float32, device=device)
        if granularity == "page":
            log_mass = torch.empty(batch, kv_heads, pages, M, dtype=torch.float32, device=device)
            return cls("page", page_tokens, group, log_mass, None, lse)
        dtype = torch.float32 if exact else torch.float16
        log_mass = torch.empty(batch, kv_heads, M, keys, dtype=dtype, device=device)
        tile_max = torch.empty(batch, kv_heads, tiles, M, dtype=torch.float32, device=device)
        return cls("token", page_tokens, group, log_mass, tile_max, lse)

    def layer(self, index: int, sequences: int) -> "Statistics":
        """The part of layer `index`, sharing memory: batch entries index * sequences and the following."""
        part = slice(index * sequences, (index + 1) * sequences)
        tile_max = None if self.tile_max is None else self.tile_max[part]
        return replace(self, log_mass=self.log_mass[part], tile_max=tile_max, lse=self.lse[part])

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
