"""The EAGLE-3 head that is kept here for SmolLM2-135M, in 8 bits: its drafts are accepted, and change nothing."""

from pathlib import Path

import pytest

from specdial.engine.job import empty_sequences
from specdial.engine.loop import Decoding
from specdial.engine.sampling import Sampling
from specdial.engine.workloads import WorkloadSpec, build
from specdial.policies.schema import plain_policy, policy_from_mapping

pytestmark = pytest.mark.model
HEAD = Path(__file__).resolve().parents[1] / "data" / "heads" / "smollm2-135m"
NEW_TOKENS = 24


@pytest.mark.parametrize("tree", [None, {"width": 4, "nodes": 12}])
def test_the_head_drafts_what_the_model_says(smollm2, tree):
    drafter = {"kind": "eagle", "model": str(HEAD), **({"tree": tree} if tree else {})}
    eagle = policy_from_mapping({"drafter": drafter, "controller": {"kind": "fixed", "k": 3}})
    spec = WorkloadSpec("book", 200, 1, NEW_TOKENS, train_frac=0.0, validation_frac=0.0, test_frac=1.0)
    prompt = build(spec, smollm2.tokenizer)[0].prompt_ids
    s = empty_sequences(smollm2, len(prompt) + NEW_TOKENS, 1, [eagle])
    tokens, accepted = {}, {}
    for name, policy in {"plain": plain_policy(), "eagle": eagle}.items():
        s.prefill([prompt], [NEW_TOKENS])
        rounds = list(Decoding(s, policy, Sampling(), [0]).rounds())
        tokens[name], accepted[name] = s.tokens[0], sum(int(r.accepted.sum()) for r in rounds) / len(rounds)
    assert tokens["eagle"] == tokens["plain"]
    assert accepted["eagle"] > 0.4, "of three drafts a round; a guess is never accepted"
