"""Memory predicted against memory taken; the error names what then passes."""

import re
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from specdial.engine import job
from specdial.engine.free_memory import free_bytes, free_host_bytes
from specdial.engine.history import HistorySpec
from specdial.engine.loop import Decoding
from specdial.engine.memory import CUDA_FIXED_BYTES, Demand, Memory, predict, require, require_host
from specdial.engine.models import ModelConfig
from specdial.engine.models.config import RopeConfig
from specdial.engine.models.shapes import SHAPES
from specdial.engine.sampling import Sampling
from specdial.engine.sequences import Sequences
from specdial.engine.weights import load_model
from specdial.kernels.full_attention import Statistics
from specdial.policies.errors import UserError
from specdial.policies.schema import policy_from_mapping

GB = 10**9


def demand(**changes):
    """The 8B shape in bfloat16 on a GPU: 16 sequences of 32k tokens."""
    given = Demand(
        config=SHAPES["llama-3.1-8b"], dtype=torch.bfloat16, backend="triton", batch=16, longest_tokens=32768, k_max=8,
        history=HistorySpec(16, 1), selected=512,
    )  # fmt: skip
    return replace(given, **changes)


@pytest.mark.parametrize(("window", "page"), [(16, 1), (5, 16), (8, 64)])
@pytest.mark.parametrize(("architecture", "batch", "longest", "k_max"), [("llama", 1, 100, 4), ("qwen3", 3, 251, 0)])
def test_cache_history_and_weights_equal_the_tensors(tiny_model, architecture, batch, longest, k_max, window, page):
    model = tiny_model(architecture, num_key_value_heads=1 + (page == 1))
    decoder = model.decoder
    given = Demand(decoder.config, decoder.dtype, "reference", batch, longest, k_max, HistorySpec(window, page), 40)
    s = Sequences(decoder, given.capacity_tokens, batch, history=given.history, backend="reference")
    s.history.save()
    memory = predict(given)
    assert memory.kv_cache == s.cache.k.nbytes + s.cache.v.nbytes
    held = [s.history.ring, s.history._scores, *s.history._saved]
    assert memory.history == sum(t.nbytes for t in held)
    c = decoder.config
    assert memory.weights == decoder.weight_bytes + c.vocab * c.hidden * 4  # which counts the head, not the embedding
    assert memory.to_allocate == memory.total - memory.weights


@pytest.mark.parametrize(("page", "granularity"), [(1, "token"), (16, "page"), (64, "page")])
def test_statistics_equal_the_buffers_of_the_widest_block(page, granularity):
    given = demand(batch=2, longest_tokens=1000, history=HistorySpec(16, page))
    keys = predict(given).kv_cache // (2 * 32 * 2 * 8 * 128 * 2)
    assert keys % 64 == 0
    assert 0 <= keys - (1000 + 8 + 1 + 4) < 64

    def size(rows, batch):
        raw = Statistics.empty(
            granularity, batch=32 * batch, kv_heads=8, keys=keys, rows=rows, group=4, page_tokens=max(page, 16),
            device="meta",
        )  # fmt: skip
        return sum(t.nbytes for t in (raw.log_mass, raw.tile_max, raw.lse) if t is not None)

    assert predict(given).statistics == size(9, 2)  # 9 rows of two sequences, more than 16 of one
    assert predict(replace(given, batch=1)).statistics == size(16, 1)  # the end of a prompt
    assert predict(replace(given, history=None)).statistics == 0


def test_every_part_grows_with_batch_and_length():
    grown = [
        (demand(), demand(batch=17)),
        (demand(), demand(longest_tokens=40000)),
        (demand(backend="reference"), demand(backend="reference", batch=17)),
        (demand(backend="reference"), demand(backend="reference", longest_tokens=40000)),
    ]
    for less, more in grown:
        small, large = predict(less), predict(more)
        assert small.to_allocate < large.to_allocate
        assert all(getattr(small, f.name) <= getattr(large, f.name) for f in fields(Memory))
        assert small.kv_cache < large.kv_cache


def test_plain_decoding_needs_no_history():
    memory = predict(demand(history=None, selected=0, k_max=0))
    assert memory.history == memory.statistics == memory.selection == 0
    assert memory.logits == 16 * 128256 * 6


def test_what_fits_is_returned():
    needed = predict(demand()).to_allocate
    assert require(demand(), needed) == predict(demand())


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("free", [5 * GB, 20 * GB, 60 * GB])
def test_the_error_names_a_batch_and_a_length_that_then_pass(free, backend):
    given = demand(batch=64, longest_tokens=100_000, history=HistorySpec(16, 16), backend=backend)
    with pytest.raises(UserError) as caught:
        require(given, free)
    message = str(caught.value)
    assert "\n" not in message
    assert "batch 64 at 100000 tokens needs" in message
    assert f"{free / 1e9:.1f} GB are free" in message
    batch = re.search(r"the batch to (\d+)", message)
    length = int(re.search(r"together to (\d+)", message)[1])
    require(replace(given, longest_tokens=length), free)
    with pytest.raises(UserError):
        require(replace(given, longest_tokens=length + 1), free)
    if batch is not None:
        require(replace(given, batch=int(batch[1])), free)
        with pytest.raises(UserError):
            require(replace(given, batch=int(batch[1]) + 1), free)
    assert (batch is not None) == (free > 5 * GB)  # 5 GB hold not even one


def test_nothing_fits():
    with pytest.raises(UserError, match="smaller model"):
        require(demand(), 1 << 20)


@pytest.fixture
def policies():
    kv = {"budget": 40, "sink": 2, "recent": 8, "window": 8}
    return [policy_from_mapping({"controller": {"kind": "fixed", "k": 4}, "draft_kv": kv})]


def test_a_job_is_refused_before_anything_is_allocated(tiny_model, policies, monkeypatch):
    model = tiny_model("llama")
    one = predict(job.memory_demand(model, 200, 1, policies)).to_allocate
    two = predict(job.memory_demand(model, 200, 2, policies)).to_allocate
    monkeypatch.setattr(job, "free_bytes", lambda device: one + two)
    job.empty_sequences(model, 200, 2, policies)
    job.empty_sequences(model, 200, 1, policies, copies=2)
    monkeypatch.setattr(job, "Sequences", None)  # calling it would be another error
    with pytest.raises(UserError, match=r"batch 3 at 200 tokens needs .* lower the batch to 2"):
        job.empty_sequences(model, 200, 1, policies, copies=3)
    with pytest.raises(UserError, match="batch 9999 at 200 tokens"):
        job.empty_sequences(model, 200, 9999, policies)


def host(tmp_path, files):
    for name, text in {"proc/meminfo": "MemTotal: 900 kB\nMemAvailable: 700 kB\n", **files}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return free_host_bytes(tmp_path)


def group(folder, most, used, stat):
    v1 = "fs/cgroup/memory" in folder
    limit, usage = ("limit_in_bytes", "usage_in_bytes") if v1 else ("max", "current")
    names = (f"memory.{limit}", f"memory.{usage}", "memory.stat")
    return {f"sys/{folder}/{name}": text for name, text in zip(names, (most, used, stat))}


def test_free_host_memory_is_what_is_available(tmp_path):
    assert host(tmp_path, {}) == 700 * 1024


@pytest.mark.parametrize(
    ("most", "free"), [("max\n", 700 * 1024), ("100000\n", 100000 - 60000 + 5000), ("9000000\n", 700 * 1024)]
)
def test_control_group_version_2(tmp_path, most, free):
    files = {"proc/self/cgroup": "0::/a/b\n", **group("fs/cgroup/a/b", most, "60000\n", "anon 7\ninactive_file 5000\n")}
    assert host(tmp_path, files) == free


def test_the_group_above_limits_too(tmp_path):
    files = {
        "proc/self/cgroup": "0::/a/b\n",
        **group("fs/cgroup/a/b", "max\n", "10\n", "inactive_file 0\n"),
        **group("fs/cgroup/a", "5000\n", "1000\n", "inactive_file 0\n"),
    }
    assert host(tmp_path, files) == 4000


def test_control_group_version_1(tmp_path):
    """The process's own group may lie outside what is mounted here; the mount itself is then the group."""
    files = {
        "proc/self/cgroup": "5:cpu:/x\n4:memory:/elsewhere\n0::/\n",
        **group("fs/cgroup/memory", "5000\n", "2000\n", "total_inactive_file 100\n"),
    }
    assert host(tmp_path, files) == 3100


def test_this_machine_has_free_memory():
    assert 0 < free_bytes("cpu") < 1 << 50


def test_rope_and_names_do_not_matter():
    """A config that only a config.json could give: more heads than groups, an untied head, biases."""
    config = ModelConfig(
        name="odd", architecture="qwen2", layers=2, hidden=48, heads=6, kv_heads=3, head_dim=16, intermediate=80,
        vocab=100, max_context_tokens=512, norm_eps=1e-5, rope=RopeConfig(theta=1e4), qkv_bias=True,
    )  # fmt: skip
    layer = 48 * (6 + 6) * 16 + 12 * 16 + 6 * 16 * 48 + 3 * 48 * 80 + 2 * 48
    assert predict(demand(config=config)).weights == 2 * (2 * layer + 2 * 100 * 48 + 48)


@pytest.mark.gpu
@pytest.mark.parametrize("page", [1, 16])
def test_prediction_on_a_gpu(tiny_checkpoint, page):
    """Never less than what is really reserved, and at most twice as much beside the fixed margin."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    folder = tiny_checkpoint("llama", head_dim=64, max_position_embeddings=65536)
    model = load_model(str(folder), device="cuda", dtype="bfloat16")
    kv = {"budget": 512, "sink": 16, "recent": 64, "window": 16, "page": page}
    policy = policy_from_mapping({"controller": {"kind": "fixed", "k": 4}, "draft_kv": kv})
    length, batch = 40000, 8
    before = free_bytes("cuda")
    assert before > 4 * GB
    reserved = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    s = job.empty_sequences(model, length + 16, batch, [policy])
    prompts = [np.random.default_rng(b).integers(0, 256, length).tolist() for b in range(batch)]
    s.prefill(prompts, [16] * batch)
    assert list(Decoding(s, policy, Sampling(), list(range(batch))).rounds())
    torch.cuda.synchronize()
    taken = torch.cuda.max_memory_reserved() - reserved
    memory = predict(job.memory_demand(model, length + 16, batch, [policy]))
    assert taken <= memory.to_allocate
    assert memory.to_allocate - CUDA_FIXED_BYTES <= 2 * taken


def test_float8_copies_are_counted_where_a_policy_drafts_with_them(tiny_model):
    model = tiny_model("llama")
    drafts = {"controller": {"kind": "fixed", "k": 2}, "drafter": {"kind": "sparse_self", "weights": "fp8"}}
    policies = [policy_from_mapping(drafts), policy_from_mapping({"controller": {"kind": "fixed", "k": 2}})]
    with_copies, without = (predict(job.memory_demand(model, 100, 1, [p])) for p in policies)
    assert without.float8 == 0
    held = model.decoder.in_float8()
    copied = sum(getattr(layer, n).nbytes for layer in held.layers for n in ("qkv", "out", "gate_up", "down"))
    assert copied + held.head.nbytes <= with_copies.float8 <= 1.3 * (copied + held.head.nbytes)


def test_corrections_summaries_and_lookahead_count(tiny_model):
    """A full round's block holds what the partial ones before it may have committed."""
    model = tiny_model("llama", head_dim=64)
    full = {"drafter": {"kind": "model", "model": "d"}, "controller": {"kind": "fixed", "k": 3}}
    kv = {"mode": "partial", "full_period": 6, "scope": "model", "budget": 64}
    heads = {"draft": [[0, 1]]}
    hybrid = {**full, "verify_kv": {**kv, "source": "hybrid", "lookahead_tokens": 8}, "scoring_heads": heads}
    pages = {**full, "verify_kv": {**kv, "source": "page_bound", "page": 16, "scope": "layer"}}
    never = {**full, "verify_kv": {**kv, "full_period": 0}}
    whole, hybrid, pages, never = (policy_from_mapping(p) for p in (full, hybrid, pages, never))
    assert [job.most_recomputed([p]) for p in (whole, hybrid, pages, never)] == [
        0,
        32,
        32,
        0,
    ]  # 5 rounds of 4, in sixteens
    demand, corrected, paged = (job.memory_demand(model, 400, 2, [p]) for p in (whole, hybrid, pages))
    assert predict(corrected).logits == predict(demand).logits // 4 * 36
    assert job.summary_bytes(demand, 2, [whole]) == 0
    assert job.summary_bytes(paged, 2, [pages]) == predict(paged).kv_cache // 16
    assert job.summary_bytes(corrected, 2, [hybrid]) == 4 * 3 * 2 * corrected.capacity_tokens


ODD = ModelConfig(
    name="odd", architecture="llama", layers=2, hidden=48, heads=6, kv_heads=3, head_dim=16, intermediate=80,
    vocab=100, max_context_tokens=512, norm_eps=1e-5, rope=RopeConfig(theta=1e4),
)  # fmt: skip
ODD_WEIGHTS = 2 * (48 * 12 * 16 + 6 * 16 * 48 + 3 * 48 * 80 + 2 * 48) + 2 * 100 * 48 + 48
ODD_LAYER = 4 * 48 + 3 * 80 + (3 * 6 + 2 * 3) * 16  # values of one token in a layer
LANES = 2 * 3  # (layer, kv head) pairs of a sequence


@pytest.mark.parametrize(
    ("batch", "longest", "selected", "keys", "chunk"),
    [(3, 1016, 50, 1088, 1088), (100, 1015, 5000, 1024, 1024), (1, 5051, 50, 5120, 4096)],
)
def test_bytes_on_a_gpu_by_hand(batch, longest, selected, keys, chunk):
    """The second: a block of more rows than a chunk, more chosen than there is. The third: a prompt of two chunks."""
    memory = predict(
        Demand(
            ODD, torch.bfloat16, "triton", batch, longest, 4, HistorySpec(6, 1), selected, float8=True, recomputed=8,
            gathered=30,
        )
    )  # fmt: skip
    rows = batch * (4 + 1 + 8)
    token = 2 * ODD_LAYER + 3 * 6 * 16 * 4
    assert memory.weights == 2 * ODD_WEIGHTS
    assert memory.float8 == ODD_WEIGHTS
    assert memory.kv_cache == 2 * LANES * batch * (keys + 30) * 16 * 2
    assert memory.history == 2 * LANES * batch * (6 + 1) * keys * 4
    assert memory.logits == rows * 100 * (4 + 2)
    assert memory.selection == LANES * batch * min(selected, keys) * 4
    assert memory.activations == max(rows, chunk) * token + keys * 16 * 4
    assert memory.graphs == memory.statistics + memory.logits + memory.selection + rows * token
    assert memory.fixed == 512 << 20


@pytest.mark.parametrize(
    ("batch", "longest", "window", "page", "selected", "copied", "keys"),
    [(3, 1000, 6, 1, 50, 64, 1024), (1, 1000, 41, 64, 70, 128, 1024), (1, 121, 6, 1, 50, 64, 192)],
)
def test_bytes_on_a_cpu_by_hand(batch, longest, window, page, selected, copied, keys):
    given = Demand(
        ODD, torch.float32, "reference", batch, longest, 4, HistorySpec(window, page), selected, float8=True,
        recomputed=8, gathered=30,
    )  # fmt: skip
    memory = predict(given)
    rows, tail = batch * 16, {6: 8, 41: 44}[window]  # in fours
    token, masses = 2 * 4 * ODD_LAYER, keys // page
    assert memory.float8 == memory.weights == 4 * ODD_WEIGHTS
    assert memory.kv_cache == 2 * LANES * batch * (keys + 30) * 16 * 4
    assert memory.history == 2 * LANES * batch * (window + 1) * masses * 4
    assert memory.statistics == LANES * max(rows, tail) * masses * 4
    assert memory.logits == rows * 100 * 4
    assert memory.selection == LANES * batch * (selected * 4 + 2 * copied * 16 * 4)
    chunk = min(512, keys) * (token + 5 * keys)
    widest = max(rows, tail) * (token + 3 * 6 * keys * 4)
    assert memory.activations == max(chunk, widest) + keys * 16 * 4
    assert (memory.graphs, memory.fixed) == (0, 64 << 20)
    without = predict(replace(given, history=None, float8=False, dtype=torch.bfloat16))
    assert (without.float8, without.selection, without.history, without.statistics) == (0, 0, 0, 0)
    assert without.logits == rows * 100 * (4 + 2)
    assert predict(Demand(ODD, torch.float32, "reference", 1, 9, 0, None, 0)) == predict(
        Demand(ODD, torch.float32, "reference", 1, 9, 0, None, 0, float8=False, recomputed=0, gathered=0)
    )


def test_the_error_names_every_part_and_its_units():
    with pytest.raises(UserError) as caught:
        require(demand(batch=64), 10**9)
    message = str(caught.value)
    parts = re.search(r"\(kv cache (\S+) GB, history .* selection \S+ MB, .*, float8 0 MB, .*fixed 537 MB\)", message)
    assert float(parts[1]) == round(predict(demand(batch=64)).kv_cache / 1e9, 1)
    assert ", 1.0 GB are free" in message


def test_of_host_memory_a_twentieth_stays_free():
    given = Demand(ODD, torch.float32, "reference", 2, 1000, 4, None, 0, kv_where="host")
    taken = 2 * LANES * 2 * 1024 * 16 * 4
    assert require_host(given, -(-taken * 100 // 95)) == taken
    with pytest.raises(UserError, match="lower context and new tokens together to"):
        require_host(given, taken * 100 // 96)
    with pytest.raises(UserError, match=r"lower the batch, or use kv\.where device"):
        require_host(given, 1)
    assert require_host(replace(given, kv_where="device"), 0) == 0
