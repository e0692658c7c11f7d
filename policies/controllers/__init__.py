"""Controllers: the rules that pick k. The registry maps a kind to its settings and its class."""

from collections.abc import Sequence
from typing import Any

from specdial.policies.controllers.base import Controller, Signals, draft_limit
from specdial.policies.controllers.rate import Rate, RateConfig
from specdial.policies.controllers.simple import (
    Confidence,
    ConfidenceConfig,
    Entropy,
    EntropyConfig,
    Fixed,
    FixedConfig,
    NoDraft,
    NoneConfig,
)

ControllerConfig = NoneConfig | FixedConfig | EntropyConfig | ConfidenceConfig | RateConfig

CONTROLLERS: dict[str, tuple[type, type[Any]]] = {
    "none": (NoneConfig, NoDraft),
    "fixed": (FixedConfig, Fixed),
    "entropy": (EntropyConfig, Entropy),
    "confidence": (ConfidenceConfig, Confidence),
    "rate": (RateConfig, Rate),
}

__all__ = [
    "CONTROLLERS",
    "ConfidenceConfig",
    "Controller",
    "ControllerConfig",
    "EntropyConfig",
    "FixedConfig",
    "NoneConfig",
    "RateConfig",
    "Signals",
    "draft_limit",
    "make_controller",
]


def make_controller(configs: Sequence[ControllerConfig]) -> Controller:
    """One controller over len(configs) lanes, all of one kind. Raises ValueError on mixed or no kinds."""
    kinds = {config.kind for config in configs}
    if len(kinds) != 1:
        raise ValueError(f"a controller holds lanes of one kind, got {sorted(kinds)}")
    controller: Controller = CONTROLLERS[kinds.pop()][1](configs)
    return controller


def longest_draft(config: ControllerConfig) -> int:
    """The largest k the settings can ever ask for; 0 means plain decoding."""
    return int(make_controller([config]).k_max[0])
