"""Token ids against independent tokenizers, streaming decode, chat formats.

Oracles: for a folder, transformers reading the same tokenizer.json; for GGUF metadata, transformers' own Qwen2
tokenizer class, and a naive BPE written here over the regexes that llama.cpp lists for each pre-tokenizer
(llama-vocab.cpp), run by the `regex` module. Transformers' GGUF reader is no oracle: it drops smollm's rule that
digits stand alone and Qwen2's NFC, both of which are in those models' own tokenizer.json.
"""

import json
import unicodedata
from itertools import pairwise

import pytest
import regex
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers

from specdial.engine.tokenizer import Tokenizer
from specdial.engine.weights.gguf_tokenizer import gguf_tokenizer
from specdial.policies.errors import UserError

TEXTS = [
    "It's a truth universally acknowledged, that they'll want 3 wives in 1813; WE'RE SURE of 12345678 things.",
    "def f(x: int) -> int:\n    if x != 10_000:\n\t\treturn x**2  # squares\n\n\n    return -1\r\n",
    "語学は楽しい。中文分词测试：一二三４５。한국어도 됩니다! Привет, мир — ça va? ﬁnal e\u0301 ½",
    "🙂👩‍👩‍👧🏳️‍🌈 emoji🙂mixed🙂🙂 in😀text  \u00a0 \u3000 end ",
    "   leading and trailing   \n \n  \t x",
    "<|im_start|>user\nhi<|im_end|> and <|not_special|>",
    "",
]
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN2 = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?((?=[\p{L}])([^a-z]))*((?=[\p{L}])([^A-Z]))+|[^\r\n\p{L}\p{N}]?((?=[\p{L}])([^a-z]))+"
    r"((?=[\p{L}])([^A-Z]))*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
REGEXES = {  # as llama.cpp applies them: each splits what the ones before left
    "gpt-2": [GPT2],
    "smollm": [r"\p{N}", GPT2],
    "qwen2": [QWEN2],
    "llama-bpe": [QWEN2.replace(r"|\p{N}", r"|\p{N}{1,3}", 1)],
    "tekken": [TEKKEN],
}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_characters():
    """GPT-2's table: printable bytes stand for themselves, the others for characters from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


BYTES = byte_characters()


class NaiveBpe:
    """Splits, then applies the lowest-ranked merge until none is left; slow and obvious."""

    def __init__(self, vocab, merges, pre):
        self.vocab, self.ranks, self.regexes = vocab, {tuple(m): i for i, m in enumerate(merges)}, REGEXES[pre]
        self.whole_words = pre in ("llama-bpe", "tekken")
        self.normal = (lambda s: unicodedata.normalize("NFC", s)) if pre == "qwen2" else str

    def split(self, text):
        pieces = [text]
        for pattern in self.regexes:
            found = []
            for piece in pieces:
                at = 0
                for match in regex.finditer(pattern, piece):
                    found += [piece[at : match.start()], match.group()]
                    at = match.end()
                found.append(piece[at:])
            pieces = [piece for piece in found if piece]
        return pieces

    def word(self, piece):
        parts = [BYTES[b] for b in piece.encode()]
        if self.whole_words and "".join(parts) in self.vocab:
            return [self.vocab["".join(parts)]]
        while len(parts) > 1:
            ranked = [(self.ranks.get(pair, 10**9), i) for i, pair in enumerate(pairwise(parts))]
            rank, i = min(ranked)
            if rank == 10**9:
                break
            parts[i : i + 2] = ["".join(parts[i : i + 2])]
        return [self.vocab[part] for part in parts]

    def encode(self, text):
        ids = []
        for part in regex.split("(" + "|".join(regex.escape(s) for s in SPECIAL) + ")", text):
            if part in SPECIAL:
                ids.append(self.vocab[part])
            else:
                ids += [i for piece in self.split(self.normal(part)) for i in self.word(piece)]
        return ids


@pytest.fixture(scope="module")
def trained():
    """(tokens, merges) of a byte-level BPE trained on TEXTS, special tokens first."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = list(BYTES.values())
    backend.train_from_iterator(
        [word for text in TEXTS for word in regex.findall(r" ?\w+|\W+", text)] * 3,
        trainers.BpeTrainer(vocab_size=900, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False),
    )
    model = json.loads(backend.to_str())["model"]
    assert len(model["merges"]) > 200
    return sorted(model["vocab"], key=model["vocab"].get), [tuple(merge) for merge in model["merges"]]


def metadata(trained, pre, **more):
    tokens, merges = trained
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **more,
    }


@pytest.mark.parametrize("pre", REGEXES)
def test_gguf_ids_match_a_naive_bpe(pre, trained):
    tokens, merges = trained
    ours = gguf_tokenizer(metadata(trained, pre), "test")
    naive = NaiveBpe({token: i for i, token in enumerate(tokens)}, merges, pre)
    texts = [t for t in TEXTS if pre != "tekken" or t.isascii()]  # llama.cpp's tekken regex is its own approximation
    assert [ours.encode(text) for text in texts] == [naive.encode(text) for text in texts]


def test_pre_tokenizers_differ(trained):
    """So that the test above cannot pass with one rule for all."""
    ids = {pre: tuple(gguf_tokenizer(metadata(trained, pre), "test").encode("".join(TEXTS))) for pre in REGEXES}
    assert len(set(ids.values())) == len(REGEXES)


def test_gguf_ids_match_transformers_qwen2(trained):
    from transformers import Qwen2Tokenizer

    tokens, merges = trained
    theirs = Qwen2Tokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    theirs.add_special_tokens({"additional_special_tokens": SPECIAL})
    ours = gguf_tokenizer(metadata(trained, "qwen2"), "test")
    assert [ours.encode(text) for text in TEXTS] == [theirs.encode(text, add_special_tokens=False) for text in TEXTS]


def test_folder_ids_match_transformers(tiny_checkpoint, tiny_model):
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tiny_checkpoint("llama") / "tokenizer.json"))
    ours = tiny_model("llama").tokenizer
    assert [ours.encode(text) for text in TEXTS] == [theirs.encode(text, add_special_tokens=False) for text in TEXTS]
    assert [ours.decode(theirs.encode(text), skip_special=False) for text in TEXTS] == TEXTS


@pytest.mark.parametrize("pre", REGEXES)
def test_round_trip_and_streaming(pre, trained):
    tokenizer = gguf_tokenizer(metadata(trained, pre), "test")
    for text in TEXTS:
        if pre == "qwen2" and "e\u0301" in text:
            continue  # NFC on the way in: not the same text back
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids, skip_special=False) == text
        stream = tokenizer.stream()
        pieces = [stream.push([i]) for i in ids]
        assert "".join(pieces) + stream.finish() == tokenizer.decode(ids)
        assert not any("\ufffd" in piece for piece in pieces)


def test_streaming_holds_an_unfinished_character_back():
    tokenizer = Tokenizer.of_bytes()
    ids = tokenizer.encode("a🙂b")
    stream = tokenizer.stream()
    assert [stream.push([i]) for i in ids] == ["a", "", "", "", "🙂", "b"]
    cut = tokenizer.stream()
    assert [cut.push(ids[:3]), cut.finish(), cut.push(ids[:1])] == ["", "a\ufffd", "a"]


SENTENCEPIECE = ["<unk>", "<s>", "</s>", *[f"<0x{b:02X}>" for b in range(256)]]


def sentencepiece(**more):
    words = ["▁", "h", "e", "l", "o", "w", "r", "d", "he", "ll", "hell", "hello", "▁hello", "▁w", "or", "▁wor", "ld"]
    pieces = [*SENTENCEPIECE, *words, "▁world"]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (len(words) + 1)],
        "tokenizer.ggml.scores": [-float(i) for i in range(len(pieces))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **more,
    }


def test_sentencepiece_merges_scores_and_falls_back_to_bytes():
    tokenizer = gguf_tokenizer(sentencepiece(), "test")
    names = sentencepiece()["tokenizer.ggml.tokens"]
    assert [names[i] for i in tokenizer.encode("hello world")] == ["▁hello", "▁world"]
    assert [names[i] for i in tokenizer.encode("é")] == ["▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.encode("hello", add_special=True)[0] == 1
    for text in ("hello world", "é 語 🙂", "  two  spaces "):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        stream = tokenizer.stream()  # rounds without an accepted draft push nothing
        assert "".join(stream.push(part) for i in ids for part in ([], [i], [])) + stream.finish() == text


@pytest.mark.parametrize(("pre", "adds"), [("smollm", False), ("qwen2", False), ("llama-bpe", True)])
def test_bos_only_where_the_model_wants_it(pre, adds, trained):
    tokenizer = gguf_tokenizer(metadata(trained, pre), "test")
    assert tokenizer.encode("x", add_special=True) == ([1] if adds else []) + tokenizer.encode("x")
    forced = gguf_tokenizer(metadata(trained, pre, **{"tokenizer.ggml.add_bos_token": not adds}), "test")
    assert (forced.encode("x", add_special=True)[0] == 1) is not adds


def test_ends_are_eos_and_the_known_end_tokens(trained):
    assert gguf_tokenizer(metadata(trained, "smollm"), "test").eos_ids == (2, 0)


MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi 🙂"}]
CHATML = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi 🙂<|im_end|>\n<|im_start|>assistant\n"


def test_chat_built_in_chatml(trained):
    tokenizer = gguf_tokenizer(metadata(trained, "smollm"), "test")
    assert tokenizer.chat(MESSAGES) == tokenizer.encode(CHATML)


def test_chat_uses_the_models_template(trained):
    template = (
        "{% for m in messages %}"
        "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}{{ bos_token }}"
    )
    tokenizer = gguf_tokenizer(metadata(trained, "smollm", **{"tokenizer.chat_template": template}), "test")
    assert tokenizer.chat(MESSAGES) == tokenizer.encode(CHATML + "<|im_start|>")
    broken = gguf_tokenizer(
        metadata(trained, "smollm", **{"tokenizer.chat_template": "{{ raise_exception('no') }}"}), "t"
    )
    with pytest.raises(UserError, match="chat template failed: no"):
        broken.chat(MESSAGES)


def test_chat_built_in_llama3(trained):
    tokens, merges = trained
    names = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    more = {
        "tokenizer.ggml.tokens": [*(t for t in tokens if t not in SPECIAL), *names],
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 3) + [3] * 4,
        "tokenizer.ggml.bos_token_id": len(tokens) - 3,
    }
    tokenizer = gguf_tokenizer(metadata((tokens, merges), "llama-bpe", **more), "test")
    wanted = "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nx<|eot_id|>"
    wanted += "<|start_header_id|>assistant<|end_header_id|>\n\n"
    assert tokenizer.chat([{"role": "user", "content": "x"}]) == tokenizer.encode(wanted)


@pytest.mark.parametrize("messages", [[], [{"role": "user"}], [{"role": "user", "content": 3}]])
def test_chat_refuses_malformed_messages(messages, trained):
    with pytest.raises(UserError):
        gguf_tokenizer(metadata(trained, "smollm"), "test").chat(messages)


def test_chat_without_a_known_format():
    with pytest.raises(UserError, match="no chat format"):
        Tokenizer.of_bytes().chat(MESSAGES)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokenizer.ggml.pre": "poro"}, "pre-tokenizer 'poro' is unknown"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer model 'bert'"),
        ({"tokenizer.ggml.tokens": []}, "holds no tokenizer"),
        ({"tokenizer.ggml.token_type": [1]}, "1 token types"),
        ({"tokenizer.ggml.merges": []}, "merges is missing"),
        ({"tokenizer.ggml.merges": ["zzzz qqqq"]}, "damaged tokenizer"),
        ({"tokenizer.ggml.merges": ["a b c"]}, "merges is missing or odd"),
        ({"tokenizer.ggml.model": "llama"}, "scores is missing"),
    ],
)
def test_metadata_that_gives_no_tokenizer(changes, words, trained):
    with pytest.raises(UserError, match=words) as caught:
        gguf_tokenizer(metadata(trained, "smollm", **changes), "test")
    assert "\n" not in str(caught.value)


def test_digest_follows_vocabulary_and_rules(trained):
    digests = {gguf_tokenizer(metadata(trained, pre), "test").digest for pre in REGEXES}
    assert len(digests) == len(REGEXES)
    assert gguf_tokenizer(metadata(trained, "smollm"), "test").digest in digests
