"""The benchmark of a draft model with sparse verification, run on tiny weights: ids, and what must hold among them."""

import pytest


@pytest.fixture
def dustin(script):
    return script("dustin")


def test_cpu_run(dustin, tiny_checkpoint):
    sizes = {"head_dim": 64, "max_position_embeddings": 1024}
    target = str(tiny_checkpoint("llama", num_hidden_layers=2, **sizes))
    draft = str(tiny_checkpoint("llama", num_hidden_layers=1, **sizes))
    records = {
        r["id"]: r
        for r in dustin.main(
            ["--cpu", "--cases", "D3", "--model", target, "--draft", draft, "--new-tokens", "8", "--lookahead", "0.5"]
        )
    }
    partial = {"c64-m22-p0-k3", "c64-m22-p2-k3"}
    names = {"plain", "full-k3", *partial}
    assert set(records) == {f"cpu-D3-{case}-{name}" for case in ("code-0k-B2", "needle-0k") for name in names}
    full = records["cpu-D3-code-0k-B2-full-k3"]
    assert (full["lossless"], full["top1_agreement"], full["token_agreement"]) == (True, 1.0, 1.0)
    for name in partial:
        row = records[f"cpu-D3-code-0k-B2-{name}"]
        assert not row["lossless"]
        assert row["kl_nats"] > 0.0
