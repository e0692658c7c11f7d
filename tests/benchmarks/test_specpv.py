"""The benchmark of partial verification, run on tiny weights: ids, what full verification must say, bookkeeping."""

import pytest
import torch

from specdial.engine.eagle_training import new_head
from specdial.engine.weights import load_model
from specdial.engine.weights.eagle import save_head


def test_cpu_run(script, tiny_checkpoint, tmp_path, capsys):
    specpv = script("specpv")
    model = str(tiny_checkpoint("llama", head_dim=64, num_hidden_layers=2, max_position_embeddings=1024))
    decoder = load_model(model, device="cpu", dtype="float32").decoder
    save_head(tmp_path / "head", new_head(decoder, torch.arange(260), seed=0))
    command = [
        "--model",
        model,
        "--head",
        str(tmp_path / "head"),
        "--cpu",
        "--workloads",
        "novel",
        "--singles",
        "2",
        "--batches",
        "1",
    ]
    records = {r["id"]: r for r in specpv.main([*command, "--new-tokens", "8"])}
    partial = ("c128-p2", "c128-p3")
    cells = ("novel-0k-B1",)
    assert set(records) == {
        *(f"cpu-P1-{cell}-{name}" for cell in cells for name in ("plain", "full", *partial)),
        *(f"cpu-P2-{cell}-{name}" for cell in cells for name in ("full", *partial)),
        *(f"cpu-P4-needle-0k-{name}" for name in ("plain", "full", *partial)),
    }
    for cell in cells:
        plain, full = records[f"cpu-P1-{cell}-plain"], records[f"cpu-P1-{cell}-full"]
        assert (plain["speedup"], plain["mean_k"], full["over_full"]) == (1, 0, 1)
        assert plain["sequences"] == full["sequences"] == 2
        exact = records[f"cpu-P2-{cell}-full"]
        assert exact["value"] == exact["prefix_frac"] == exact["token_agreement"] == 1
        assert exact["kl_nats"] == pytest.approx(0, abs=1e-4)
        for name in partial:
            assert not records[f"cpu-P1-{cell}-{name}"]["lossless"]
            assert records[f"cpu-P1-{cell}-{name}"]["mean_k"] > 2
            assert 0 < records[f"cpu-P2-{cell}-{name}"]["value"] <= 1
            assert records[f"cpu-P2-{cell}-{name}"]["kl_nats"] > 1e-4
    assert "x plain" in capsys.readouterr().out
    other = ["--tree", "3", "6", "--bound", "specpv", "--rows", "max", "--periods", "2", "--needles", "0"]
    trees = {r["id"]: r for r in specpv.main([*command, "--new-tokens", "6", *other])}
    exact, partial = (trees[f"cpu-w3n6-specpv-max-P2-novel-0k-B1-{name}"] for name in ("full", "c128-p2"))
    assert exact["value"] == 1
    assert [age["rounds_since_full"] for age in partial["drift"]] == [0, 1]
