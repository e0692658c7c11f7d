"""Where the target's keys and values live, and which other choices go with that.

Leaves out how they are moved (engine/offload).
"""

from dataclasses import dataclass
from typing import Literal

from specdial.policies.drafting import Drafter, DraftKV
from specdial.policies.errors import UserError
from specdial.policies.verification import VerifyKV

Where = Literal["device", "host"]


@dataclass(frozen=True, slots=True)
class KV:
    """Where the target's keys and values live.

    where: device, beside the weights. host: page-locked memory of the host. The device then holds two layers of them,
    and what partial rounds read. Every full round moves all keys over the link once, layer by layer, and takes at least
    their bytes / the link's bandwidth: 131 kB a token for an 8B model, 2.4 s a round at a million tokens and 55 GB/s.
    Partial rounds cost what they cost on the device; the first one after a full one fetches its selection.
    """

    where: Where = "device"


DEVICE = KV()


@dataclass(frozen=True, slots=True)
class Variant:
    """What one cell of a policy drafts and verifies by. drafts: whether it drafts at all."""

    drafts: bool
    drafter: Drafter
    draft_kv: DraftKV
    verify_kv: VerifyKV


def check_placement(kv: KV, variants: tuple[Variant, ...], prefix: str) -> None:
    """Raises UserError where keys in host memory do not go with what some cell drafts or verifies by."""
    if kv.where == "device":
        return
    partial = [v for v in variants if not v.verify_kv.lossless]
    for v in variants:
        if v.drafts:
            _check_drafter(v, bool(partial), prefix)
    for verify_kv in (v.verify_kv for v in partial):
        for name, wrong, remedy in (
            ("refresh", verify_kv.refresh != "full", "use full, which keeps a selection until the next full round"),
            ("full_period", verify_kv.full_period == 0, "use a period, after which what was committed joins the rest"),
        ):
            if wrong:
                raise _clash(f"{prefix}verify_kv.{name}", getattr(verify_kv, name), remedy)
        if verify_kv != partial[0].verify_kv:
            raise UserError(
                f"{prefix}kv.where is 'host', and cells verify over different selections",
                "give all cells the same verify_kv",
                field=f"{prefix}kv.where",
            )


def _check_drafter(v: Variant, partial: bool, prefix: str) -> None:
    """Raises UserError on drafts that would read the target's keys where they are not."""
    kind = v.drafter.kind
    if kind == "quest" or (kind == "sparse_self" and partial):
        why = "in every step" if kind == "quest" else "which partial rounds leave incomplete"
        raise UserError(
            f"{prefix}kv.where is 'host', and drafter {kind} reads the target's keys, {why}",
            "draft by lookup, model or eagle" + (", or verify in full" if kind == "sparse_self" else ""),
            field=f"{prefix}kv.where",
        )
    if v.drafter.tree is not None:
        raise _clash(f"{prefix}drafter.tree", f"{v.drafter.tree.width} wide", "leave it out, which drafts a chain")
    if kind == "sparse_self" and v.draft_kv.refresh_rounds != 1:
        raise _clash(f"{prefix}draft_kv.refresh_rounds", v.draft_kv.refresh_rounds, "use 1")


def _clash(field: str, value: object, remedy: str) -> UserError:
    return UserError(f"{field} is {value!r}, which keys in host memory cannot serve", remedy, field=field)
