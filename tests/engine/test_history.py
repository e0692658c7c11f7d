"""History's own arithmetic: whose rows go where, what is kept and what is saved. Kernels have their tests elsewhere."""

import dataclasses

import pytest
import torch

from specdial.engine import history as histories
from specdial.engine.history import History, HistorySpec, Rows
from specdial.engine.models.shapes import SHAPES
from specdial.kernels.full_attention import Statistics

CONFIG = dataclasses.replace(SHAPES["smollm2-135m"], layers=3, kv_heads=2, heads=6, head_dim=4)


def make(spec, backend="reference", batch=2):
    return History(CONFIG, batch, 128, spec, device=torch.device("cpu"), backend=backend)


@pytest.mark.parametrize(("page", "granularity"), [(1, "token"), (32, "page")])
def test_raw_rows_of_all_layers_go_in_at_once_and_of_one_sequence_by_layer(monkeypatch, page, granularity):
    taken = []

    def push(ring, raw, lengths, committed, *, backend, score):
        assert score.shape == (*ring.shape[:2], ring.shape[3])
        taken.append((tuple(ring.shape), ring.data_ptr(), score.data_ptr(), tuple(raw.lse.shape), backend))

    monkeypatch.setattr(histories, "push_rows", push)
    kept = make(HistorySpec(5, page), "triton")
    rows = kept.rows(7, 2)
    assert rows.raw.page_tokens == max(page, 16)
    held = Statistics.empty(
        granularity, batch=6, kv_heads=2, keys=128, rows=7, group=3, page_tokens=max(page, 16), device="meta"
    )
    assert (rows.raw.lse.shape, rows.raw.log_mass.shape) == (held.lse.shape, held.log_mass.shape)
    assert (rows.raw.log_mass.shape[-1] == 128) == (granularity == "token")
    lengths = torch.tensor([3, 4])
    kept.push(rows, lengths, lengths)
    keys = 128 // page
    assert taken == [
        ((6, 2, 5, keys), kept.ring.data_ptr(), kept._scores.data_ptr(), tuple(rows.raw.lse.shape), "triton")
    ]
    assert rows.raw.lse.shape[0] == 6
    taken.clear()
    one = kept.rows(7, 1)
    kept.push(one, lengths[:1], lengths[:1], only=1)
    assert [t[0] for t in taken] == [(1, 2, 5, keys)] * 3
    assert [t[1] for t in taken] == [kept.ring[layer, 1].data_ptr() for layer in range(3)]
    assert [t[2] for t in taken] == [kept._scores[layer, 1].data_ptr() for layer in range(3)]
    assert [t[3][0] for t in taken] == [1] * 3
    assert kept.scores() is kept._scores


@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_committed_rows_become_scores_and_come_back(decay):
    kept = make(HistorySpec(4, 1, decay))
    assert (kept.decayed, kept.ring.shape[3]) == (decay < 1.0, 4 if decay == 1.0 else 0)
    generator = torch.Generator().manual_seed(0)
    masses = [torch.rand(2, 2, 3, 128, generator=generator) for _ in range(3)]
    kept.push(Rows(masses), torch.tensor([10, 20]), torch.tensor([3, 1]))
    assert kept.scores().shape == (3, 2, 2, 128)
    weights = torch.tensor([decay**2, decay, 1.0])
    for layer, mass in enumerate(masses):
        assert torch.allclose(kept.scores()[layer, 0], (mass[0] * weights[:, None]).sum(1))
        assert torch.allclose(kept.scores()[layer, 1], mass[1, :, 0])
    before = kept.scores().clone()
    kept.save()
    kept.push(Rows([m[1:] for m in masses]), torch.tensor([21]), torch.tensor([2]), only=1)
    assert torch.equal(kept.scores()[:, 0], before[:, 0])
    assert not torch.equal(kept.scores()[:, 1], before[:, 1])
    kept.restore()
    assert torch.equal(kept.scores(), before)
    single = make(HistorySpec(4, 1, decay), batch=1)
    single.push(Rows([m[:1] for m in masses]), torch.tensor([10]), torch.tensor([3]))
    kept.copy_from(single)
    assert torch.equal(kept.scores(), before[:, :1].expand(3, 2, 2, 128))
    kept.clear()
    assert kept.scores().abs().sum() == 0


@pytest.mark.parametrize("page", [1, 16, 64])
def test_attention_of_a_block_leaves_its_masses_by_layer(monkeypatch, page):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 5, 6, 4, generator=generator)
    kv = (torch.randn(2, 2, 128, 4, generator=generator), torch.randn(2, 2, 128, 4, generator=generator))
    lengths = torch.tensor([40, 90])
    kept = make(HistorySpec(5, page))
    rows = kept.rows(5, 2)
    out = kept.attend(rows, 0, q, kv, lengths)
    kept.attend(rows, 1, 2 * q, kv, lengths)
    wanted, mass = histories.full_attention(q, *kv, lengths, backend="reference", mass="token")
    assert torch.allclose(out, wanted, atol=1e-6)
    assert (len(rows.masses), rows.raw) == (2, None)
    assert torch.allclose(rows.masses[0], mass.unflatten(-1, (-1, page)).sum(-1), atol=1e-5)
    asked = {}
    monkeypatch.setattr(histories, "full_attention_raw", lambda *given, **named: asked.update(named) or (out,))
    raw = make(HistorySpec(5, page), "triton").rows(5, 2)
    make(HistorySpec(5, page), "triton").attend(raw, 2, q, kv, lengths)
    assert asked["backend"] == "triton"
    assert asked["into"].lse.data_ptr() == raw.raw.layer(2, 2).lse.data_ptr()
    assert asked["into"].lse.shape == raw.raw.layer(2, 2).lse.shape
