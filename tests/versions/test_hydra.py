"""Hydra 1.3 and 1.4 are both served: 1.3 wants a version to be named and 1.4 warns when one is."""

import hydra
import pytest

from specdial.conf import cli


@pytest.mark.parametrize(("version", "asked"), [("1.3.8", {"version_base": "1.3"}), ("1.4.0rc3", {}), ("1.4.0", {})])
def test_hydra_is_started_as_its_version_wants(monkeypatch, version, asked):
    calls = []
    monkeypatch.setattr(hydra, "__version__", version)
    monkeypatch.setattr(hydra, "main", lambda **given: lambda task: lambda: calls.append(given))
    monkeypatch.setattr(cli.sys, "argv", ["specdial"])  # what is started takes its arguments from there
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    cli._main(["replay", "trace=somewhere"])
    assert calls == [{"config_path": "pkg://specdial.conf", "config_name": "replay", **asked}]
