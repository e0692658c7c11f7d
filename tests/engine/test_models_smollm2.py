"""The real SmolLM2-135M: it models English, answers a question, and its ids are right."""

import importlib.util

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.model

PARAGRAPH = (
    "The water cycle describes how water moves around the planet. Heat from the sun turns water in oceans, lakes and "
    "rivers into vapour, which rises into the air. As the air cools, the vapour condenses into tiny drops that form "
    "clouds. When the drops grow heavy enough they fall back to the ground as rain or snow, and the water flows into "
    "streams and rivers that carry it to the sea, where the cycle begins again."
)


def test_loss_on_english_is_low(smollm2, full_logits):
    tokens = torch.tensor([smollm2.tokenizer.encode(PARAGRAPH)])
    loss = F.cross_entropy(full_logits(smollm2.decoder, tokens)[0, :-1], tokens[0, 1:]).item()
    assert loss < 3.0  # nats a token; one wrong layout (say, q left permuted) gives more than 6
    assert loss > 1.0


def test_greedy_answer_makes_sense(smollm2, make_attend):
    ids = smollm2.tokenizer.chat([{"role": "user", "content": "What is the capital of France?"}])
    decoder, attend, stream, text = smollm2.decoder, make_attend(), smollm2.tokenizer.stream(), ""
    tokens, positions = torch.tensor([ids]), torch.arange(len(ids))[None]
    for _ in range(16):
        chosen = int(decoder.logits(decoder.forward(tokens, positions, attend)[:, -1]).argmax())
        if chosen in smollm2.config.eos_ids:
            break
        text += stream.push([chosen])
        tokens, positions = torch.tensor([[chosen]]), positions[:, -1:] + 1
    assert "Paris" in text + stream.finish()


def test_config_is_the_published_one(smollm2):
    from specdial.engine.models.shapes import SHAPES

    names = ("architecture", "layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab")
    names += ("max_context_tokens", "tied_embeddings", "qkv_bias", "qk_norm", "sliding_window")
    shape = SHAPES["smollm2-135m"]
    assert {n: getattr(smollm2.config, n) for n in names} == {n: getattr(shape, n) for n in names}
    assert smollm2.config.rope == shape.rope
    assert smollm2.config.norm_eps == pytest.approx(shape.norm_eps)
    assert smollm2.tokenizer.token_id("<|im_end|>") in smollm2.config.eos_ids
    assert smollm2.digest.startswith("b179c9523d0e")


# Ids worked out by hand from the vocabulary: digits alone, a space with the word after it, emoji as bytes.
@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("Hello world", ["Hello", "Ġworld"]),
        ("in 1984", ["in", "Ġ", "1", "9", "8", "4"]),
        ("    return x", ["ĠĠĠ", "Ġreturn", "Ġx"]),
        ("<|im_start|>user\n", ["<|im_start|>", "user", "Ċ"]),
    ],
)
def test_ids_are_those_of_the_pieces(text, pieces, smollm2):
    assert smollm2.tokenizer.encode(text) == [smollm2.tokenizer.token_id(piece) for piece in pieces]


def test_code_cjk_and_emoji_come_back(smollm2):
    for text in ("def f(x):\n\treturn x ** 2\r\n", "語学は楽しい。中文", "👩‍👩‍👧 naïve ½", PARAGRAPH * 20):
        ids = smollm2.tokenizer.encode(text)
        assert smollm2.tokenizer.decode(ids) == text
        assert max(ids) < smollm2.config.vocab


def test_chat_without_jinja2_is_chatml(smollm2, monkeypatch):
    assert importlib.util.find_spec("jinja2"), "torch depends on it"
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    with_template = smollm2.tokenizer.chat(messages)
    monkeypatch.setattr(smollm2.tokenizer, "chat_template", None)
    assert smollm2.tokenizer.chat(messages) == with_template
