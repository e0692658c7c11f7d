"""verify_kv on the command line: every verb that overrides draft_kv overrides it too, setting by setting."""

import dataclasses
from pathlib import Path

import pytest
import yaml

from specdial import conf
from specdial.conf.schema import with_policies
from specdial.policies.errors import UserError
from specdial.policies.schema import VerifyKV, policy_from_mapping

FIELDS = [f.name for f in dataclasses.fields(VerifyKV)]


@pytest.mark.parametrize("verb", ["calibrate", "record", "replay", "run", "validate"])
def test_every_setting_can_be_overridden(verb):
    composed = yaml.safe_load((Path(conf.__file__).parent / f"{verb}.yaml").read_text())
    assert list(composed["verify_kv"]) == FIELDS


def overridden(policy="lookup", **verify_kv):
    parts = {"verify_kv": dict.fromkeys(FIELDS) | verify_kv}
    return policy_from_mapping(with_policies({"policy": policy, **parts}, many=False)["policy"])


def test_an_override_changes_the_policy_and_its_name():
    assert overridden() == overridden(mode="full")
    lossy = overridden(mode="partial", full_period=4, budget=128)
    assert (lossy.verify_kv.budget, lossy.lossless, lossy.verify_kv.sink) == (128, False, 4)
    assert lossy.name.endswith("history128-p4")


def test_a_setting_that_mode_full_does_not_use_is_refused():
    with pytest.raises(UserError, match=r"verify_kv\.budget is 128, which mode full does not use"):
        overridden(budget=128)
