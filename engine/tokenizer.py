"""Text to token ids and back, over a `tokenizers` backend; streaming decode and chat formats.

Leaves out how the backend is made from GGUF metadata (weights/gguf_tokenizer.py) and training of tokenizers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from specdial.policies.errors import UserError

Message = Mapping[str, str]  # {"role": ..., "content": ...}
_HOLE = "\N{REPLACEMENT CHARACTER}"  # what the backend decodes an unfinished UTF-8 sequence to


class Tokenizer:
    """Ids match Hugging Face's fast tokenizers. eos_ids: ids that end a generation; digest: of vocabulary and rules.

    chat_template: the model's own Jinja template, or None.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        digest: str,
        eos_ids: tuple[int, ...] = (),
        bos_id: int | None = None,
        chat_template: str | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.digest = digest
        self.eos_ids = eos_ids
        self.bos_id = bos_id
        self.chat_template = chat_template

    @classmethod
    def from_file(cls, path: Path, **settings: Any) -> Tokenizer:
        """From a tokenizer.json. Errors: UserError if it is missing or damaged."""
        try:
            raw = path.read_bytes()
        except OSError:
            raise UserError(f"no tokenizer at {path}", "add tokenizer.json beside config.json") from None
        try:
            backend = tokenizers.Tokenizer.from_str(raw.decode("utf-8"))
        except Exception as error:  # the library raises bare Exception
            cause = " ".join(str(error).split())[:120]
            raise UserError(f"cannot read tokenizer {path}: {cause}", "download tokenizer.json again") from None
        return cls(backend, digest=hashlib.sha256(raw).hexdigest(), **settings)

    @classmethod
    def of_bytes(cls) -> Tokenizer:
        """One token a byte, ids 0..255: lets random weights run on text. It has no special tokens."""
        vocab = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        return cls(backend, digest="bytes")

    @property
    def vocab_size(self) -> int:
        """Tokens the tokenizer knows, special ones included; a model's vocabulary may be padded beyond it."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def token_id(self, text: str) -> int | None:
        """Id of the token that is exactly `text`, or None."""
        found = self._backend.token_to_id(text)
        return None if found is None else int(found)

    def same_ids(self, other: Tokenizer) -> bool:
        """Do both give every token the same id? Then one model can read what the other one writes."""
        if self.digest == other.digest:
            return True
        return bool(self._backend.get_vocab() == other._backend.get_vocab())

    def encode(self, text: str, *, add_special: bool = False) -> list[int]:
        """Ids of `text`. Special tokens written in it become their ids, as in transformers; add_special adds BOS.

        Raises UserError where it holds half a character, as JSON's \\ud800 or an argument that is not UTF-8 makes.
        """
        try:
            return list(self._backend.encode(text, add_special_tokens=add_special).ids)
        except TypeError:
            raise UserError(f"a text is not valid Unicode: {text!r}"[:120], "give UTF-8 text") from None

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 come out as U+FFFD, ids beyond the vocabulary as nothing."""
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special))

    def stream(self) -> TextStream:
        """A fresh incremental decoder for one output."""
        return TextStream(self)

    def chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
        """Ids of a conversation, ready for the assistant's turn.

        Uses the model's own template if jinja2 is importable (torch brings it), else ChatML or the Llama-3 format,
        whichever the vocabulary has the tokens of. Errors: UserError for malformed messages or no known format.
        """
        for message in messages:
            if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
                raise UserError(f"a message lacks role or content: {message!r}"[:120], "give both as text")
        if not messages:
            raise UserError("a conversation has no messages", "give at least one message")
        text = None
        if self.chat_template:
            text = _render(self.chat_template, messages, add_generation_prompt, self._text_of(self.bos_id))
        if text is None:
            text = self._built_in(messages, add_generation_prompt)
        return self.encode(text)

    def _text_of(self, token: int | None) -> str:
        return "" if token is None else (self._backend.id_to_token(token) or "")

    def _built_in(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        for (start, end), (head, middle, tail) in _CHAT_FORMATS.items():
            if self.token_id(start) is None or self.token_id(end) is None:
                continue
            turns = [f"{head}{m['role']}{middle}{m['content'].strip()}{tail}" for m in messages]
            bos = self._text_of(self.bos_id) if start == "<|start_header_id|>" else ""
            return bos + "".join(turns) + (f"{head}assistant{middle}" if add_generation_prompt else "")
        raise UserError("this model's tokenizer has no chat format known here", "give a plain text prompt")


_CHAT_FORMATS = {  # tokens that must exist: (before the role, before the content, after it)
    ("<|im_start|>", "<|im_end|>"): ("<|im_start|>", "\n", "<|im_end|>\n"),
    ("<|start_header_id|>", "<|eot_id|>"): ("<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>"),
}


def _render(template: str, messages: Sequence[Message], add_generation_prompt: bool, bos: str) -> str | None:
    """The template's text, or None without jinja2. Sandboxed: a template comes from the model's author.

    It reaches no attribute that leads out of its values; how long it takes is its author's affair.
    """
    try:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        return None

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, **settings: Any) -> str:
        return json.dumps(value, ensure_ascii=False, **settings)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    try:
        return str(
            environment.from_string(template).render(
                messages=list(messages), add_generation_prompt=add_generation_prompt, bos_token=bos, eos_token=""
            )
        )
    except Exception as error:  # whatever the template's expressions raise: a division by zero, a text too long
        cause = (" ".join(str(error).split()) or type(error).__name__)[:120]
        raise UserError(f"the model's chat template failed: {cause}", "give a plain text prompt") from None


class TextStream:
    """Incremental decode: `push` ids, get the text they complete. An unfinished character waits for its last byte."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []  # the last flushed ids, as context for spaces, then the waiting ones
        self._flushed = 0  # how many of them are already out as text

    def push(self, ids: Iterable[int]) -> str:
        """Text newly complete after `ids`; the pieces and `finish` add up to `decode` of everything pushed."""
        count = len(self._window)
        self._window += ids
        if len(self._window) == count:  # or what gives the next ids their spaces would be forgotten
            return ""
        before, text = self._decode(self._flushed), self._decode(len(self._window))
        if text.endswith(_HOLE) or len(text) < len(before):
            return ""
        self._window, self._flushed = self._window[self._flushed :], len(self._window) - self._flushed
        return text[len(before) :]

    def finish(self) -> str:
        """Whatever still waits, an unfinished character as U+FFFD."""
        text = self._decode(len(self._window))[len(self._decode(self._flushed)) :]
        self._window, self._flushed = [], 0
        return text

    def _decode(self, count: int) -> str:
        return self._tokenizer.decode(self._window[:count])
