"""A tokenizer out of GGUF metadata: vocabulary, merges, and the pre-tokenizer that `tokenizer.ggml.pre` names.

The rules are those of each model's own tokenizer.json. Leaves out WordPiece, Unigram and pre-tokenizers not listed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from specdial.engine.tokenizer import Tokenizer
from specdial.engine.weights.gguf_model import end_ids
from specdial.policies.errors import UserError

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLIT = {"qwen2": _QWEN2, "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3, "tekken": _TEKKEN}
_OWN_REGEX = ("smollm", "gpt-2", "gpt2", "default")  # GPT-2's regex, which ByteLevel carries
_WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3", "tekken")  # a word in the vocabulary skips the merges
_ADD_BOS = ("llama-bpe", "llama3", "llama-v3", "tekken")  # where the metadata says nothing
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6  # tokenizer.ggml.token_type


def gguf_tokenizer(metadata: Mapping[str, Any], name: str) -> Tokenizer:
    """The tokenizer of a GGUF file's metadata; `name` is for messages.

    Errors: UserError if there is none, or of a kind whose ids could not be trusted.
    """
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    tokens, kinds = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if not isinstance(tokens, list) or not tokens:
        raise UserError(f"{name} holds no tokenizer", "use a GGUF file with tokenizer.ggml.tokens")
    if kinds is None:
        kinds = [_NORMAL] * len(tokens)
    if len(kinds) != len(tokens):
        raise UserError(f"{name}: {len(kinds)} token types for {len(tokens)} tokens", "download the model file again")
    try:
        if kind == "gpt2":
            backend = _byte_level(metadata, tokens, pre, name)
        elif kind == "llama":
            backend = _sentencepiece(metadata, tokens, kinds, name)
        else:
            raise UserError(f"{name}: tokenizer model {kind!r} is not supported", "use a gpt2 or llama tokenizer")
    except UserError:
        raise
    except Exception as error:  # the library raises bare Exception for merges that do not fit the vocabulary
        raise UserError(f"{name}: damaged tokenizer ({error})", "download the model file again") from None
    for wanted, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [AddedToken(t, special=special, normalized=False) for t, k in zip(tokens, kinds) if k == wanted]
        (backend.add_special_tokens if special else backend.add_tokens)(added)
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if bos is not None and not (isinstance(bos, int) and 0 <= bos < len(tokens)):
        raise UserError(f"{name}: bos_token_id {bos!r} is not in the vocabulary", "download the model file again")
    if metadata.get("tokenizer.ggml.add_bos_token", kind == "llama" or pre in _ADD_BOS) and bos is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=["<bos>", "$A"],
            pair=["<bos>", "$A", "$B"],
            special_tokens=[{"id": "<bos>", "ids": [bos], "tokens": [tokens[bos]]}],
        )
    template = metadata.get("tokenizer.chat_template")
    digest = hashlib.sha256(repr((kind, pre, tokens, kinds, metadata.get("tokenizer.ggml.merges"))).encode())
    return Tokenizer(
        backend,
        digest=digest.hexdigest(),
        eos_ids=end_ids(metadata),
        bos_id=bos,
        chat_template=template if isinstance(template, str) else None,
    )


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], pre: str, name: str) -> Backend:
    """GPT-2 style: bytes as printable characters, merges by rank."""
    if pre not in _SPLIT and pre not in _OWN_REGEX:
        known = ", ".join((*_SPLIT, *_OWN_REGEX))
        raise UserError(f"{name}: pre-tokenizer {pre!r} is unknown", f"use a model with one of {known}")
    merges = [tuple(merge.split(" ")) for merge in metadata.get("tokenizer.ggml.merges") or []]
    if not merges or any(len(merge) != 2 for merge in merges):
        raise UserError(f"{name}: tokenizer.ggml.merges is missing or odd", "download the model file again")
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in _WHOLE_WORDS_FIRST))
    if pre in _SPLIT:
        split = pre_tokenizers.Split(Regex(_SPLIT[pre]), "isolated")
        steps = [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    else:
        steps = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
        if pre == "smollm":
            steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], kinds: list[int], name: str) -> Backend:
    """SentencePiece BPE (Llama 2, Mistral 7B): merges rebuilt from scores, unknown characters as bytes."""
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise UserError(f"{name}: tokenizer.ggml.scores is missing or odd", "download the model file again")
    vocab = {token: i for i, token in enumerate(tokens)}
    ranked = []
    for token, kind, score in zip(tokens, kinds, scores):
        if kind != _NORMAL:
            continue
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = [(left, right) for left, right in pairs if left in vocab and right in vocab]
        pairs.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        ranked += [(score, len(left), len(right), left, right) for left, right in pairs]
    ranked.sort(key=lambda entry: entry[:3], reverse=True)
    merges = [(left, right) for *_, left, right in ranked]
    unknown = next((t for t, k in zip(tokens, kinds) if k == _UNKNOWN), None)
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    steps: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    ends = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *ends])
    return backend
