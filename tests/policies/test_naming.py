"""Names of changed policies: the settings of a sweep show, what is usual does not."""

import pytest

from specdial.policies.fields import to_plain
from specdial.policies.naming import short_name
from specdial.policies.schema import policy_from_mapping

FIXED = {"kind": "fixed", "k": 4}
NAMES = {
    "fixed-k4-b512": {"controller": FIXED},
    "rate-k8-b256-lag": {"controller": {"kind": "rate", "lag": 1}, "draft_kv": {"budget": 256}},
    "eagle-w4n9-fixed-k4-b512": {
        "controller": FIXED,
        "drafter": {"kind": "eagle", "model": "head", "tree": {"width": 4, "nodes": 9}},
    },
    "eagle-w10n60-fixed-k4-b512": {"controller": FIXED, "drafter": {"kind": "eagle", "model": "head", "tree": {}}},
    "lookup-fixed-k4-b512": {"controller": FIXED, "drafter": {"kind": "lookup"}},
    "fp8-fixed-k4-f0.05": {
        "controller": FIXED,
        "drafter": {"kind": "sparse_self", "weights": "fp8"},
        "draft_kv": {"budget_frac": 0.05},
    },
    "fixed-k4-b512-d0.9-r4": {"controller": FIXED, "draft_kv": {"decay": 0.9, "refresh_rounds": 4}},
    "fixed-k4-b512-history512-p4": {"controller": FIXED, "verify_kv": {"mode": "partial", "full_period": 4}},
    "lookup-fixed-k4-b512-recent64-p0": {
        "controller": FIXED,
        "drafter": {"kind": "lookup"},
        "verify_kv": {"mode": "partial", "full_period": 0, "source": "recent", "recent": 60},
    },
    "model-fixed-k4-b512-hybrid128-m32-p0": {
        "controller": FIXED,
        "drafter": {"kind": "model", "model": "small"},
        "verify_kv": {
            "mode": "partial",
            "full_period": 0,
            "source": "hybrid",
            "budget": 128,
            "lookahead_tokens": 32,
            "scope": "model",
        },
        "scoring_heads": {"draft": [[0, 0]]},
    },
    "none-k0-b512": {"drafter": {"kind": "none"}},
}


@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_a_name_says_what_differs(name, complete):
    plain = to_plain(policy_from_mapping(NAMES[name]), complete=complete)
    parts = (plain[part] for part in ("drafter", "controller", "draft_kv", "verify_kv"))
    assert short_name(*parts) == name
