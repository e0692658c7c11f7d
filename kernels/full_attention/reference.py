"""Full attention in plain torch: the specification of `full_attention`."""

import math

import torch

from specdial.kernels.full_attention.statistics import TILE_TOKENS, Granularity, Statistics


def full_attention_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    lengths: torch.Tensor,
    *,
    mass: bool = False,
    ancestors: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `full_attention`. Rows are packed [T*G] per kv head, so that K and V are read once per group."""
    B, T, H, D = q.shape
    Hk, S = k_cache.shape[1], k_cache.shape[2]
    G = H // Hk
    scores = _scores(q, k_cache, lengths, ancestors)  # [B, Hk, T, G, S]
    weights = torch.softmax(scores, dim=-1)  # [B, Hk, T, G, S]
    out = torch.matmul(weights.view(B, Hk, T * G, S).to(v_cache.dtype), v_cache)  # [B, Hk, T*G, D]
    out = out.view(B, Hk, T, G, D).permute(0, 2, 1, 3, 4).reshape(B, T, H, D)
    return out, weights.sum(dim=3) if mass else None


def full_attention_raw_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    lengths: torch.Tensor,
    *,
    granularity: Granularity,
    page_tokens: int,
) -> tuple[torch.Tensor, Statistics]:
    """See `full_attention_raw`. The statistics are computed from the scores, not from the normalised weights."""
    B, T, H, _ = q.shape
    Hk, S = k_cache.shape[1], k_cache.shape[2]
    G = H // Hk
    out, _ = full_attention_reference(q, k_cache, v_cache, lengths)
    log2_scores = _scores(q, k_cache, lengths).view(B, Hk, T * G, S) / math.log(2.0)  # [B, Hk, M, S]
    lse = torch.logsumexp(log2_scores * math.log(2.0), dim=-1) / math.log(2.0)  # [B, Hk, M]
    if granularity == "page":
        pages = _in_units(log2_scores, page_tokens)  # [B, Hk, M, P, page]
        log_mass = torch.logsumexp(pages * math.log(2.0), dim=-1) / math.log(2.0)  # [B, Hk, M, P]
        return out, Statistics("page", page_tokens, G, log_mass.transpose(2, 3).contiguous(), None, lse)
    tile_max = _in_units(log2_scores, TILE_TOKENS).amax(dim=-1)  # [B, Hk, M, tiles]
    floor = tile_max.clamp(min=torch.finfo(torch.float32).min)  # a hidden tile has no largest score
    relative = log2_scores - floor.repeat_interleave(TILE_TOKENS, dim=-1)[..., :S]  # [B, Hk, M, S]
    return out, Statistics("token", page_tokens, G, relative, floor.transpose(2, 3).contiguous(), lse)


def normalise_reference(raw: Statistics) -> torch.Tensor:
    """Mass of every row, pooled over the group: [B, Hk, T, width] float32."""
    B, Hk, M = raw.lse.shape
    if raw.granularity == "page":
        log_mass = raw.log_mass.transpose(2, 3)  # [B, Hk, M, P]
    else:
        assert raw.tile_max is not None  # token statistics carry it
        tile_max = raw.tile_max.transpose(2, 3).repeat_interleave(TILE_TOKENS, dim=-1)[..., : raw.width]
        log_mass = raw.log_mass.float() + tile_max  # [B, Hk, M, S]
    mass = torch.exp2(log_mass - raw.lse[..., None])  # [B, Hk, M, width]
    return mass.view(B, Hk, M // raw.group, raw.group, raw.width).sum(dim=3)


def pool_pages(mass: torch.Tensor, page_tokens: int) -> torch.Tensor:
    """Sum token masses [..., S] over pages: [..., ceil(S / page_tokens)]."""
    return _in_units(mass, page_tokens, fill=0.0).sum(dim=-1)


def _scores(
    q: torch.Tensor, k_cache: torch.Tensor, lengths: torch.Tensor, ancestors: torch.Tensor | None = None
) -> torch.Tensor:
    """Scaled scores, -inf where a row must not look: [B, Hk, T, G, S] float32."""
    B, T, H, D = q.shape
    Hk, S = k_cache.shape[1], k_cache.shape[2]
    G = H // Hk
    packed = q.view(B, T, Hk, G, D).permute(0, 2, 1, 3, 4).reshape(B, Hk, T * G, D)
    scores = torch.matmul(packed, k_cache.transpose(-1, -2)).float() * D**-0.5  # [B, Hk, T*G, S]
    place = torch.arange(S, device=q.device)  # [S]
    if ancestors is None:
        last_visible = lengths[:, None] + torch.arange(T, device=q.device)  # [B, T]
        hidden = place > last_visible[..., None]  # [B, T, S]
    else:
        hidden = (place >= lengths[:, None])[:, None].repeat(1, T, 1)  # [B, T, S]
        block = lengths[:, None].long() + torch.arange(ancestors.shape[2], device=q.device)  # [B, N]
        hidden.scatter_(2, block[:, None].expand_as(ancestors), ~ancestors)
    return scores.view(B, Hk, T, G, S).masked_fill_(hidden[:, None, :, None, :], float("-inf"))


def _in_units(values: torch.Tensor, unit_tokens: int, fill: float = float("-inf")) -> torch.Tensor:
    """Split the last dimension into units of `unit_tokens`, the last one padded with `fill`."""
    S = values.shape[-1]
    padded = torch.nn.functional.pad(values, (0, -S % unit_tokens), value=fill)
    return padded.view(*values.shape[:-1], -1, unit_tokens)
