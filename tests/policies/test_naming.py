"""Names of changed policies: the settings of a sweep show, what is usual does not."""

import pytest

from specdial.policies.fields import to_plain
from specdial.policies.naming import short_name
from specdial.policies.schema import policy_from_mapping

FIXED = {"kind": "fixed", "k": 4}
NAMES = {
    "fixed-k4-b512": {"controller": FIXED},
    "rate-k8-b256-lag": {"controller": {"kind": "rate", "lag": 1}, "draft_kv": {"budget": 256}},
    "lookup-fixed-k4-b512": {"controller": FIXED, "drafter": {"kind": "lookup"}},
    "fp8-fixed-k4-f0.05": {
        "controller": FIXED,
        "drafter": {"kind": "sparse_self", "weights": "fp8"},
        "draft_kv": {"budget_frac": 0.05},
    },
    "fixed-k4-b512-d0.9-r4": {"controller": FIXED, "draft_kv": {"decay": 0.9, "refresh_rounds": 4}},
    "none-k0-b512": {"drafter": {"kind": "none"}},
}


@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_a_name_says_what_differs(name, complete):
    plain = to_plain(policy_from_mapping(NAMES[name]), complete=complete)
    assert short_name(plain["drafter"], plain["controller"], plain["draft_kv"]) == name
