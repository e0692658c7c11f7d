"""What a sweep's objective is: numbers that are asked for by name."""

import pytest

from specdial.conf.cli import returned
from specdial.policies.errors import UserError

RESULT = {"speedup": 2, "pays": True, "policies": [{"measured": {"speedup": 1.5}}], "name": "best"}


def test_a_result_goes_back_whole_or_by_name():
    assert returned(RESULT, None) is RESULT
    assert returned(RESULT, "speedup") == 2.0
    assert returned(RESULT, ["policies.0.measured.speedup", "speedup"]) == (1.5, 2.0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("speed", "the result does not hold; use some of speedup, pays"),
        ("policies.1.measured", "does not hold; use some of 0"),
        ("speedup.x", "does not hold"),
        ("name.x", "does not hold"),
        ("pays", "is no number"),
        ("name", "is no number"),
    ],
)
def test_names_that_lead_nowhere_are_refused(name, message):
    with pytest.raises(UserError, match=message):
        returned(RESULT, name)
