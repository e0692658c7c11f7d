"""What study.json implies about the policies it tried without saying it of each: whether they are lossless."""

from typing import Any


def searches_lossy(study: dict[str, Any]) -> bool:
    """Could the search try policies that verify partially?"""
    return "partial" in _axis(study, "mode", "full")


def is_lossless(study: dict[str, Any], tried: dict[str, Any]) -> bool:
    """Is every round of a tried policy verified in full? What a trial does not name, the search held fixed."""
    params = tried["params"]
    mode = params.get("verify_kv.mode", _axis(study, "mode", "full")[0])
    period = params.get("verify_kv.full_period", _axis(study, "full_period", 1)[0])
    return bool(mode == "full" or period == 1)


def _axis(study: dict[str, Any], name: str, default: Any) -> list[Any]:
    """Values searched; studies older than partial verification have none."""
    axes = study["settings"].get("search", {}).get("verify_kv") or {}
    found: list[Any] = axes.get(name) or [default]
    return found
