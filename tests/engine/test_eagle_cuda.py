"""An EAGLE head on a CUDA device: no token changes in float32, rounds wait for nothing, and training learns."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from specdial.engine import eagle_training
from specdial.engine.eagle_attention import unrolled_attention
from specdial.engine.eagle_trainer import Optimisation, Trainer
from specdial.engine.eagle_training import Unrolling, new_head, read_text
from specdial.engine.loop import Decoding
from specdial.engine.probing import Probing, probe_arms, record_probes
from specdial.engine.sampling import Sampling
from specdial.engine.sequences import Sequences
from specdial.engine.weights import load_model
from specdial.policies.schema import plain_policy, policy_from_mapping

pytestmark = pytest.mark.gpu
PROMPTS = [np.random.default_rng(seed).integers(0, 256, n).tolist() for seed, n in ((1, 60), (2, 131), (3, 17))]


def target(tiny_checkpoint, dtype):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return load_model(str(tiny_checkpoint("llama", head_dim=64)), device="cuda", dtype=dtype).decoder


def untrained(decoder):
    head = new_head(decoder, torch.arange(0, 260), seed=0)
    return head.with_weights(head.weights.to(decoder.device, decoder.dtype))


def decode(s, policy):
    s.rewind()
    rounds = list(Decoding(s, policy, Sampling(), list(range(s.batch))).rounds())
    return [list(t) for t in s.tokens], rounds


FIXED = {"kind": "fixed", "k": 4}


ALL_PAGES = {"mode": "partial", "source": "page_bound", "page": 16, "budget": 400, "full_period": 3}


def eagle(controller, tree=None, **more):
    drafter = {"kind": "eagle", "model": "head", "tree": tree}
    return policy_from_mapping({"drafter": drafter, "controller": controller, **more})


def test_trees_verified_over_all_pages_and_corrected_on_cuda(tiny_checkpoint):
    """Partial verification that leaves nothing out, so that in float32 no token changes."""
    decoder = target(tiny_checkpoint, "float32")
    s = Sequences(decoder, 300, 3, history=None, backend="triton", heads={"head": untrained(decoder)})
    s.prefill(PROMPTS, [40, 33, 48])
    plain, _ = decode(s, plain_policy())
    tokens, rounds = decode(s, eagle(FIXED, {"width": 6, "nodes": 30}, verify_kv=ALL_PAGES))
    assert tokens == plain
    assert {r.mode for r in rounds} == {"partial", "full"}


@pytest.mark.parametrize(
    ("controller", "tree"),
    [
        (FIXED, None),
        ({"kind": "entropy"}, None),
        ({"kind": "rate", "gamma": 0.1, "lag": 1}, None),
        (FIXED, {"width": 4, "nodes": 15}),  # 48 rows, through the most fused kernels
        (FIXED, {"width": 10, "nodes": 60}),
    ],
)
def test_lossless_on_cuda_and_the_same_drafts_again(tiny_checkpoint, controller, tree):
    decoder = target(tiny_checkpoint, "float32")
    s = Sequences(decoder, 300, 3, history=None, backend="triton", heads={"head": untrained(decoder)})
    s.prefill(PROMPTS, [40, 33, 48])
    plain, _ = decode(s, plain_policy())
    tokens, rounds = decode(s, eagle(controller, tree))
    assert tokens == plain
    assert sum(int(r.k.sum()) for r in rounds) > 0
    again = decode(s, eagle(controller, tree))[1]
    assert [r.drafts.tolist() for r in again] == [r.drafts.tolist() for r in rounds]


def test_probes_between_captured_decodings(tiny_checkpoint):
    """Over every page they say what full verification says, and the graphs captured before go on as they did."""
    decoder = target(tiny_checkpoint, "float32")
    s = Sequences(decoder, 300, 1, history=None, backend="triton", heads={"head": untrained(decoder)})
    s.prefill(PROMPTS[1:2], [60])
    some = Probing(sources=("page_bound", "recent"), budgets=(64, 4096), rounds=3, places=2, k=3)
    arms = probe_arms(eagle(FIXED, verify_kv={**ALL_PAGES, "refresh": "full"}), some)
    for policy in (eagle(FIXED), eagle({"kind": "fixed", "k": some.k}, verify_kv=ALL_PAGES)):
        (text,), rounds = decode(s, policy)
        found = record_probes(s, text, arms, some)
        whole = [kl for kl, arm in zip(found["kl_nats"], found["arm"]) if arm in (2, 4)]
        assert len(whole) == 2 * some.places * some.span_tokens
        assert max(whole) < 1e-4 < max(found["kl_nats"])
        again = decode(s, policy)
        assert again[0] == [text]
        assert [r.drafts.tolist() for r in again[1]] == [r.drafts.tolist() for r in rounds]


@pytest.mark.parametrize("tree", [None, {"width": 10, "nodes": 60}])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_fifty_rounds_wait_for_nothing_but_the_read_back(tiny_checkpoint, tree, temperature):
    decoder = target(tiny_checkpoint, "bfloat16")
    s = Sequences(decoder, 900, 2, history=None, backend="triton", heads={"head": untrained(decoder)})
    s.prefill([[5] * 100, [7] * 60], [700, 700])
    running = Decoding(s, eagle(FIXED, tree), Sampling(temperature=temperature), [0, 1]).rounds()
    for _ in range(3):
        next(running)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(50):
            next(running)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    running.close()
    assert [len(t) for t in s.tokens] == (s.cache.lengths + 1).tolist()


def test_training_in_bfloat16_lowers_the_loss(tiny_checkpoint):
    decoder = target(tiny_checkpoint, "bfloat16")
    decoder.head.mul_(6)
    base = new_head(decoder, torch.arange(0, 288), seed=0)
    assert base.weights.fc.dtype == torch.float32
    trainer = Trainer(decoder, base, Optimisation(3e-3, 0.02, 0.5), replace(Unrolling(), segment_tokens=50))
    text = read_text(decoder, [PROMPTS[1], PROMPTS[1][::-1]], base)
    trainer.learn(text, 0.0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        losses = [trainer.learn(text, 0.1) for _ in range(20)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert losses[-1] < 0.9 * losses[0]
    assert trainer.trained().weights.fc.dtype == torch.bfloat16


@pytest.mark.parametrize(("rows", "keys", "own"), [(130, 130, 0), (70, 200, 6)])
def test_unrolled_attention_is_the_masked_one(rows, keys, own):
    """Output and gradients in bfloat16, against float32 with a mask of rows by keys."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch.manual_seed(0)
    shapes = [(2, rows, 6, 64), *[(2, keys, 2, 64)] * 2, *[(2, rows, 2, 64)] * (2 * own)]
    wide = [torch.randn(shape, device="cuda").bfloat16().float().requires_grad_() for shape in shapes]
    narrow = [x.detach().bfloat16().requires_grad_() for x in wide]
    q, k, v, *more = narrow
    out = unrolled_attention(q, k, v, list(zip(more[::2], more[1::2])))
    q, k, v, *more = wide
    seen = torch.ones(rows, keys, dtype=torch.bool, device="cuda").tril(keys - rows)
    mask = torch.cat([seen, *[torch.eye(rows, dtype=torch.bool, device="cuda")] * own], 1)
    k, v = torch.cat([k, *more[::2]], 1), torch.cat([v, *more[1::2]], 1)
    wanted = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask, enable_gqa=True)
    wanted = wanted.transpose(1, 2)
    torch.testing.assert_close(out.float(), wanted, atol=2e-2, rtol=0)
    grad = torch.randn_like(wanted)
    found, expected = torch.autograd.grad(out, narrow, grad.bfloat16()), torch.autograd.grad(wanted, wide, grad)
    for got, exact in zip(found, expected, strict=True):
        assert (got.float() - exact).norm() < 2e-2 * exact.norm()


@pytest.mark.parametrize("rows", [3, 40])
def test_fused_passes_leave_the_taps_of_the_plain_decoder(tiny_checkpoint, make_attend, rows):
    """Through the most fused kernels and through those for many rows."""
    decoder = target(tiny_checkpoint, "float32")
    tokens, layers = torch.arange(2 * rows, device="cuda").view(2, rows), (0, 2, 1)
    positions = torch.arange(rows, device="cuda").expand(2, rows)
    _, wanted = decoder.forward_with_taps(tokens, positions, make_attend(), layers)
    s = Sequences(decoder, 100, 2, history=None, backend="triton", heads={"head": untrained(decoder)})
    reader = s.heads["head"]
    reader.head.config = replace(reader.head.config, taps=layers)
    with s.tapping([reader]):
        s.forward_block(tokens, padded=True, rows=False)
    torch.testing.assert_close(reader._seen, wanted, atol=2e-3, rtol=0)


def test_texts_are_read_as_on_a_cpu(tiny_checkpoint, monkeypatch):
    """Two at once, in several chunks of the fused passes."""
    decoder = target(tiny_checkpoint, "float32")
    monkeypatch.setattr(eagle_training, "CUDA_CHUNK_TOKENS", 100)
    here = load_model(str(tiny_checkpoint("llama", head_dim=64)), device="cpu", dtype="float32").decoder
    texts = [PROMPTS[1], PROMPTS[1][::-1]]
    got, wanted = (read_text(d, texts, new_head(d, torch.arange(0, 260), seed=0)) for d in (decoder, here))
    torch.testing.assert_close(got.taps.cpu(), wanted.taps, atol=2e-3, rtol=0)
    torch.testing.assert_close(got.wanted.cpu(), wanted.wanted, atol=2e-3, rtol=0)
    assert (got.drafted.cpu() == wanted.drafted).float().mean() > 0.98
