"""Two tokenizers small enough to check by hand: bytes with a begin mark, and words without one."""

import re
from functools import cache

import pytest

from specdial.engine.workloads import running_text

BEGIN_ID = 256


class ByteTokenizer:
    """One id per UTF-8 byte, a begin mark before any text, and role marks round chat messages."""

    def encode(self, text, *, add_special=False):
        return [BEGIN_ID] * add_special + list(text.encode())

    def decode(self, ids):
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def chat(self, messages):
        return [BEGIN_ID, *(b for m in messages for b in [257, *m["content"].encode(), 258])]


class WordTokenizer:
    """One id per word with the white space after it; ids are handed out as words are met. No begin mark."""

    def __init__(self):
        self.words = []
        self.ids = {}

    def encode(self, text, *, add_special=False):
        ids = []
        for word in re.findall(r"\s*\S+\s*|\s+", text):
            if word not in self.ids:
                self.ids[word] = len(self.words)
                self.words.append(word)
            ids.append(self.ids[word])
        return ids

    def decode(self, ids):
        return "".join(self.words[i] for i in ids)

    def chat(self, messages):
        return self.encode(" ".join(m["content"] for m in messages))


@pytest.fixture(scope="session")
def library():
    return cache(running_text.stdlib)


@pytest.fixture(autouse=True)
def library_read_once(library, monkeypatch):
    """Python's library is read from disk by one test alone; a list of its own each time, since builders shuffle it."""
    monkeypatch.setattr(running_text, "stdlib", lambda: list(library()))


@pytest.fixture(params=[ByteTokenizer, WordTokenizer], ids=["bytes", "words"])
def tokenizer(request):
    return request.param()


@pytest.fixture
def byte_tokenizer():
    return ByteTokenizer()
