"""The same round on a CUDA device with the Triton kernels: float32 speculation gives the plain greedy tokens."""

import numpy as np
import pytest
import torch

from specdial.engine.history import HistorySpec
from specdial.engine.job import backend_for
from specdial.engine.loop import Decoding
from specdial.engine.sampling import Sampling
from specdial.engine.sequences import Sequences
from specdial.engine.weights import load_model
from specdial.policies.schema import policy_from_mapping

pytestmark = pytest.mark.gpu
PLAIN = policy_from_mapping({"name": "plain", "drafter": {"kind": "none"}, "controller": {"kind": "none"}})


@pytest.fixture(scope="module", params=[1, 16, 64])
def sequences(tiny_checkpoint, request):
    page = request.param
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    model = load_model(str(tiny_checkpoint("llama", head_dim=64)), device="cuda", dtype="float32")
    assert backend_for(model.decoder.device) == "triton"
    prompts = [np.random.default_rng(seed).integers(0, 256, n).tolist() for seed, n in ((1, 60), (2, 131), (3, 17))]
    s = Sequences(model.decoder, 260, 3, history=HistorySpec(8, page), backend="triton")
    s.prefill(prompts, [40, 33, 48])
    return s


def decode(s, policy):
    s.rewind()
    rounds = list(Decoding(s, policy, Sampling(), [0, 1, 2]).rounds())
    return [list(t) for t in s.tokens], rounds


@pytest.mark.parametrize(
    "controller",
    [{"kind": "fixed", "k": 4}, {"kind": "fixed", "k": 9}, {"kind": "entropy"}, {"kind": "rate", "gamma": 0.1}],
)
def test_lossless_on_cuda(sequences, controller):
    plain, _ = decode(sequences, PLAIN)
    kv = {"budget": 128, "sink": 2, "recent": 8, "window": 8, "page": sequences.history.spec.page}
    tokens, rounds = decode(sequences, policy_from_mapping({"controller": controller, "draft_kv": kv}))
    assert tokens == plain
    assert sum(int(r.accepted.sum()) for r in rounds) > 0


@pytest.mark.parametrize("controller", [{"kind": "none"}, {"kind": "fixed", "k": 4}, {"kind": "rate", "lag": 1}])
def test_fifty_rounds_wait_for_nothing_but_the_read_back(tiny_checkpoint, controller):
    model = load_model(str(tiny_checkpoint("llama", head_dim=64)), device="cuda", dtype="bfloat16")
    kv = {"budget": 128, "sink": 2, "recent": 8, "window": 8, "page": 16}
    drafter = {"kind": "none" if controller["kind"] == "none" else "sparse_self"}
    policy = policy_from_mapping({"controller": controller, "drafter": drafter, "draft_kv": kv})
    s = Sequences(model.decoder, 900, 2, history=HistorySpec(8, 16), backend="triton")
    s.prefill([[5] * 100, [7] * 60], [700, 700])
    running = Decoding(s, policy, Sampling(), [0, 1]).rounds()
    for _ in range(3):
        next(running)
    torch.cuda.set_sync_debug_mode("error")
    try:
        seen = [next(running) for _ in range(50)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    running.close()
    assert all(sum(map(len, r.emitted)) >= 2 for r in seen)
    assert [len(t) for t in s.tokens] == (s.cache.lengths + 1).tolist(), "host and device agree where decoding stopped"
