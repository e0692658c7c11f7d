"""Partial verification in a policy: what it computes, what it refuses and by which name, what old files keep."""

import pytest

from specdial.policies.errors import UserError
from specdial.policies.file import dump_policy, parse_policy, policy_digest
from specdial.policies.schema import policy_from_mapping
from specdial.policies.verification import ScoringHeads, VerifyKV

FIXED = {"kind": "fixed", "k": 4}
PARTIAL = {"mode": "partial", "full_period": 0}
MODEL = {"kind": "model", "model": "small"}
HEADS = {"target": [[1, 0]], "draft": [[0, 1], [2, 2]]}


def policy(verify_kv, **more):
    return policy_from_mapping({"controller": FIXED, "verify_kv": verify_kv, **more})


@pytest.mark.parametrize(
    ("verify_kv", "more", "says"),
    [
        ({"budget": 256}, {}, "verify_kv.budget is 256, which mode full does not use; leave it at 512"),
        ({"full_period": 0}, {}, "verify_kv.full_period is 0, which mode full does not use"),
        ({"source": "recent"}, {}, "verify_kv.source is 'recent', which mode full does not use"),
        ({**PARTIAL, "source": "recent", "budget": 64}, {}, "verify_kv.budget is 64, which source recent does not use"),
        ({**PARTIAL, "source": "recent", "page": 16}, {}, "verify_kv.page is 16, which source recent does not use"),
        ({**PARTIAL, "source": "recent", "sink": 0, "recent": 0}, {}, "verify_kv.recent is 0, and so is sink"),
        ({**PARTIAL, "lookahead_tokens": 4}, {}, "verify_kv.lookahead_tokens is 4, which source history does not use"),
        ({**PARTIAL, "budget": 19}, {}, "verify_kv.budget is 19, smaller than sink + recent = 20"),
        ({**PARTIAL, "budget": 100, "page": 16}, {}, "verify_kv.budget is 100, not whole pages of 16"),
        ({**PARTIAL, "source": "page_bound"}, {}, "verify_kv.page is 1, source page_bound chooses whole pages"),
        ({**PARTIAL, "bound": "specpv"}, {}, "verify_kv.bound is 'specpv', which source history does not use"),
        ({**PARTIAL, "rows": "max"}, {}, "verify_kv.rows is 'max', which source history does not use"),
        ({"buffer": 64}, {}, "verify_kv.buffer is 64, which mode full does not use"),
        ({**PARTIAL, "buffer": 64}, {}, "verify_kv.buffer is 64, and full_period 0 never corrects"),
        (
            {**PARTIAL, "full_period": 9, "buffer": 4},
            {},
            "verify_kv.buffer is 4, a round commits up to 5 tokens; use at least 5, or mode full",
        ),
        (
            {**PARTIAL, "source": "page_bound", "page": 16, "scope": "model"},
            {},
            "verify_kv.scope is 'model', source page_bound chooses",
        ),
        (
            {**PARTIAL, "source": "hybrid", "scope": "model", "lookahead_tokens": 81, "budget": 100},
            {"drafter": MODEL, "scoring_heads": HEADS},
            "verify_kv.lookahead_tokens is 81, sink and recent leave 80 of the budget; use at most 80",
        ),
        (
            {**PARTIAL, "source": "lookahead"},
            {"drafter": MODEL, "scoring_heads": HEADS},
            "verify_kv.scope is 'kv_head', source lookahead makes one selection",
        ),
        (
            {**PARTIAL, "source": "lookahead", "scope": "model"},
            {"drafter": MODEL},
            "verify_kv.source is 'lookahead', which reads a draft model's scoring heads: scoring_heads.draft is empty",
        ),
        (
            {**PARTIAL, "source": "hybrid", "scope": "model"},
            {"scoring_heads": HEADS},
            "verify_kv.source is 'hybrid', which reads a draft model's scoring heads: drafter sparse_self has none",
        ),
        (
            {**PARTIAL, "source": "lookahead", "scope": "model"},
            {
                "drafter": MODEL,
                "scoring_heads": {"draft": [[0, 1]]},
                "cells": [{"overrides": {"controller": {"kind": "none"}}}],
            },
            "cells has one that drafts nothing, and its verify_kv.source chooses keys by what is drafted; set",
        ),
        (PARTIAL, {"scoring_heads": {"target": [[1, 0]]}}, "verify_kv.scope is 'kv_head', history by scoring heads"),
        (
            {**PARTIAL, "scope": "model", "page": 16},
            {"scoring_heads": {"target": [[1, 0]]}},
            "verify_kv.page is 16, history by scoring heads",
        ),
        (PARTIAL, {"scoring_heads": {"draft": [[1, 0]]}}, "scoring_heads.draft is given, and no verification"),
        ({}, {"scoring_heads": {"target": [[1, 0]]}}, "scoring_heads.target is given, and no verification"),
        (PARTIAL, {"scoring_heads": {"target": [[1]]}}, "scoring_heads.target[0] is [1]; write it as [layer, head]"),
        (PARTIAL, {"scoring_heads": {"draft": [[1, -1]]}}, "scoring_heads.draft[0] is [1, -1]; write it as"),
        (
            PARTIAL,
            {"scoring_heads": {"target": [[1, 0], [1, 0]]}},
            "scoring_heads.target[1] is [1, 0], given before; give each head once",
        ),
        (PARTIAL, {"controller": {"kind": "none"}}, "verify_kv.mode is 'partial', and the policy drafts nothing"),
        (PARTIAL, {"draft_kv": {"decay": 0.9}}, "draft_kv.decay is 0.9, partial verification needs history by window"),
        (
            PARTIAL,
            {"cells": [{"overrides": {"verify_kv": {"full_period": 4}}}]},
            "verify_kv.full_period is 0 in some cells and not in others",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(verify_kv, more, says):
    with pytest.raises(UserError) as caught:
        policy(verify_kv, **more)
    assert says in str(caught.value)
    assert caught.value.field == says.split(" ")[0]


def test_lossless_is_computed():
    assert policy({}).lossless
    assert policy({"mode": "partial"}).lossless, "full_period is 1"
    assert policy({"mode": "partial", "source": "page_bound", "page": 16, "full_period": 1}).lossless
    assert not policy({"mode": "partial", "full_period": 2}).lossless
    assert not policy(PARTIAL).lossless
    cell = {"from_context_tokens": 4096, "overrides": {"verify_kv": {"mode": "partial", "full_period": 8}}}
    assert not policy({}, cells=[cell]).lossless


def test_a_cell_may_verify_partially_by_heads_of_the_whole_policy():
    kv = {**PARTIAL, "source": "hybrid", "scope": "model", "lookahead_tokens": 80, "budget": 100}
    one = policy({}, drafter=MODEL, scoring_heads=HEADS, cells=[{"overrides": {"verify_kv": kv}}])
    assert one.variants()[0].verify_kv.source == "hybrid"
    assert one.variants()[0].scoring_heads.by_layer("draft") == {0: (1,), 2: (2,)}
    assert one.variants()[1].lossless


def test_files_and_digests_from_before_partial_verification_stay():
    plain = policy({"mode": "full", "full_period": 1})
    text = dump_policy(plain)
    assert "verify_kv:\n  mode: full\n  full_period: 1\nlossless: true\ncells: []" in text or (
        "verify_kv:\n  mode: full\n  full_period: 1\ncells: []\nlossless: true" in text
    )
    assert "scoring_heads" not in text
    assert set(plain.decisions()["verify_kv"]) == {"mode", "full_period"}
    assert "scoring_heads" not in plain.decisions()


def test_a_partial_policy_reads_back_from_its_file():
    kv = {**PARTIAL, "source": "hybrid", "scope": "model", "lookahead_tokens": 80, "budget": 100}
    one = policy(kv, drafter=MODEL, scoring_heads=HEADS)
    text = dump_policy(one)
    assert "lossless: false" in text
    assert parse_policy(text) == one
    other = policy(kv, drafter=MODEL, scoring_heads={**HEADS, "target": [[1, 1]]})
    assert policy_digest(other) != policy_digest(one)


def test_heads_that_a_model_lacks_are_refused_when_they_meet():
    heads = policy(PARTIAL | {"scope": "model"}, scoring_heads={"target": [[0, 3], [3, 0]]}).scoring_heads
    heads.check_model("target", "tiny", layers=4, heads=4)
    with pytest.raises(UserError, match=r"scoring_heads.target\[1\] is \[3, 0\], tiny has 3 layers of 4 heads"):
        heads.check_model("target", "tiny", layers=3, heads=4)
    with pytest.raises(UserError, match=r"scoring_heads.target\[0\] is \[0, 3\], tiny has 4 layers of 3 heads"):
        heads.check_model("target", "tiny", layers=4, heads=3)


def test_buffer_and_period_bound_what_is_uncorrected():
    plain, buffered = VerifyKV(mode="partial", full_period=4), VerifyKV(mode="partial", full_period=4, buffer=12)
    assert (plain.overflows(10**6, 10**6), plain.holds(0), plain.most_uncorrected(3)) == (False, False, 12)
    assert [buffered.overflows(n, 5) for n in (0, 7, 8)] == [False, False, True]
    assert [buffered.holds(n) for n in (1, 512, 513)] == [True, True, False]
    least = VerifyKV(mode="partial", full_period=4, buffer=1)
    assert (least.overflows(0, 2), least.holds(512), least.most_uncorrected(3)) == (True, True, 1)
    assert [buffered.most_uncorrected(k) for k in (2, 3, 4)] == [9, 12, 12]
    assert VerifyKV(mode="partial", full_period=0).most_uncorrected(3) == 0
    assert [VerifyKV(mode="partial", full_period=n).lossless for n in (0, 1, 2)] == [False, True, False]


def test_the_largest_and_smallest_that_go_together():
    """Each is the last of its kind that is not refused."""
    hybrid = {**PARTIAL, "source": "hybrid", "scope": "model", "budget": 100}
    more = {"drafter": MODEL, "scoring_heads": HEADS}
    assert policy({**hybrid, "lookahead_tokens": 80}, **more).verify_kv.lookahead_tokens == 80
    with pytest.raises(UserError, match="leave 80 of the budget"):
        policy({**hybrid, "lookahead_tokens": 81}, **more)
    assert policy({**PARTIAL, "full_period": 9, "buffer": 5}).verify_kv.buffer == 5
    assert policy({**PARTIAL, "budget": 20}).verify_kv.budget == 20
    assert policy({**PARTIAL, "source": "recent", "sink": 0, "recent": 1}).verify_kv.keys.budget == 1
    assert policy({**PARTIAL, "full_period": 1}, draft_kv={"decay": 0.5}).lossless
    with pytest.raises(UserError, match=r"draft_kv\.decay is 0\.5, partial verification needs history by window"):
        policy(PARTIAL, draft_kv={"decay": 0.5})
    assert policy(PARTIAL, draft_kv={"decay": 1.0}).draft_kv.decay == 1.0


def test_heads_are_pairs_of_a_layer_and_a_head_that_a_model_has():
    heads = ScoringHeads(target=((3, 1), (0, 2), (3, 0)))
    assert heads.by_layer("target") == {0: (2,), 3: (0, 1)}
    assert (bool(heads), bool(ScoringHeads()), bool(ScoringHeads(draft=((0, 0),)))) == (True, False, True)
    heads.check()
    for wrong, says in ((((0,),), "as .layer, head., from 0"), (((0, 1, 2),), "from 0"), (((0, -1),), "from 0"),
                        (((1, 2), (1, 2)), "given before")):  # fmt: skip
        with pytest.raises(UserError, match=says):
            ScoringHeads(draft=wrong).check()
    heads.check_model("target", "m", layers=4, heads=3)
    for layers, count in ((3, 3), (4, 2)):
        with pytest.raises(UserError, match=f"m has {layers} layers of {count} heads"):
            heads.check_model("target", "m", layers=layers, heads=count)
