"""From a model to a policy that verifies by chosen heads, as typed: heads, then tune_heads."""

import json

from specdial.policies.file import load_policy

SEARCH = ("search.budget=64", "search.stage_budgets=[40,48]", "search.trials=5", "budgets=[40]", "k=3")


def test_heads_then_tune_heads(cli, tiny_checkpoint, tmp_path):
    target = tiny_checkpoint("llama", head_dim=64)
    draft = tiny_checkpoint("llama", head_dim=64, num_hidden_layers=2, seed=3)
    workload = ("workload=needle", "context=220", "workload.documents=3", "workload.new_tokens=24", "rows=24")
    model = (f"model={target}", f"draft={draft}", "hardware=cpu")
    result = cli("heads", *model, *workload, "ranking.documents=1", "out=h")
    assert (result.code, {line.split()[0] for line in result.err.splitlines()}) == (0, {"heads"})  # how it goes
    assert "needle mass" in result.out
    result = cli("tune_heads", "trace=h", *SEARCH, "out=t")
    assert (result.code, {line.split()[0] for line in result.err.splitlines()} - {"tune_heads"}) == (0, set())
    policy = load_policy(tmp_path / "t" / "policy.yaml")
    document = json.loads((tmp_path / "t" / "heads.json").read_text())
    assert (policy.verify_kv.mode, policy.verify_kv.budget, policy.controller.k) == ("partial", 64, 3)
    assert document["choice"]["m"] == policy.verify_kv.lookahead_tokens
    assert document["draft"]["name"] == str(draft)
    assert len(policy.scoring_heads.target) == 4
    prompt = "prompt=" + "What was said in the beginning? " * 6
    result = cli("run", f"model={target}", "hardware=cpu", "policy=t/policy.yaml", prompt, "new_tokens=12")
    assert result.code == 0, result.err


def test_mistakes_are_one_line(refused, tiny_checkpoint, replayed):
    trace = replayed[0]
    model = f"model={tiny_checkpoint('llama')}"
    refused("tune_heads", "trace=nowhere", "out=t", says="nowhere is not an attention trace")
    refused("tune_heads", trace, "out=t", says="this version reads 'specdial/attention/1'")
    refused("heads", model, "hardware=cpu", "context=220", "rows=4", "out=h", says="rows is 4; use at least 20")
    refused("heads", model, "hardware=cpu", "context=220", "draft=nowhere", "out=h", says="no model at 'nowhere'")
