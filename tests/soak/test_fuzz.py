"""A few of the damaged files that `make fuzz` makes by the hundred thousand, and files that were made to do harm."""

import json
import os
import pickle
import shutil
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdial.engine.tokenizer import Tokenizer
from specdial.engine.weights.eagle_files import read_tensors
from specdial.engine.weights.gguf_header import GgufFile
from specdial.engine.weights.hf import weight_files
from specdial.policies.errors import UserError
from specdial.policies.file import parse_policy
from specdial.policies.schema import policy_from_mapping
from specdial.simulator.importers.prompts import Prompt, write_prompts

QUICK = (
    "import aiperf",
    "prompts",
    "config",
    "config text",
    "gguf header",
    "policy by hand",
    "safetensors",
    "safetensors index",
    "trace meta",
)


@pytest.fixture(scope="module")
def readers(script, tmp_path_factory):
    return script("fuzz").targets(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("name", QUICK)
def test_a_damaged_file_is_read_or_refused_in_one_line(script, readers, name):
    fuzz, target = script("fuzz"), readers[name]

    @settings(deadline=None, max_examples=25, database=None)
    @given(st.binary(min_size=3, max_size=24))
    def hold(data):
        assert fuzz.judge(target, data) in fuzz.FINE

    try:
        hold()
        target.path.write_bytes(target.seed)
        target.read()
    finally:
        target.path.write_bytes(target.seed)


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/b.safetensors", "", ".hidden.safetensors", "x" * 400])
def test_a_shard_that_is_no_file_of_the_folder_is_refused(readers, tmp_path, name):
    folder = shutil.copytree(readers["safetensors"].path.parent, tmp_path / "hf")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(UserError, match="names the shard"):
        weight_files(folder)


@pytest.mark.parametrize("name", ["../../out", "/out", "a/b", "..", ".", "a\x00b", "a\nb", " ", "x" * 101])
def test_a_policy_whose_name_would_leave_its_directory_is_refused(name):
    with pytest.raises(UserError, match="name is"):
        policy_from_mapping({"name": name})


def test_half_a_character_is_refused_wherever_text_comes_in(tmp_path):
    """JSON can write it, an argument that is not UTF-8 becomes it, and neither UTF-8 nor a tokenizer takes it."""
    with pytest.raises(UserError, match="not valid Unicode"):
        Tokenizer.of_bytes().encode("a\ud800")
    with pytest.raises(UserError, match="prompt 2 is not valid Unicode"):
        write_prompts(tmp_path / "out.jsonl", [Prompt({"text": "a"}), Prompt({"text": "\ud800"})])
    assert list(tmp_path.iterdir()) == []


HOSTILE = [
    "{{ ''.__class__.__mro__[1].__subclasses__()[0]('x') }}",
    "{{ cycler.__init__.__globals__.os.system('touch harmed') }}",
    "{% for i in range(10 ** 9) %}{% endfor %}",
    "{{ 'a' * 10 ** 15 }}",
    "{{ 1 / 0 }}",
    "{{ messages + 1 }}",
    "{% include '/etc/passwd' %}",
    "{% if %}",
]


@pytest.mark.parametrize("template", HOSTILE)
def test_a_hostile_chat_template_is_refused_in_one_line(template, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer = Tokenizer.of_bytes()
    tokenizer.chat_template = template
    with pytest.raises(UserError, match="chat template failed: ") as caught:
        tokenizer.chat([{"role": "user", "content": "hi"}])
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


class Trap:
    def __reduce__(self):
        return os.system, ("touch harmed",)


def test_pickles_and_yaml_run_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"norm.weight": torch.ones(2), "trap": Trap()}, "pytorch_model.bin")
    (tmp_path / "bare.bin").write_bytes(pickle.dumps(Trap()))
    before = sorted(path.name for path in tmp_path.iterdir())
    for name in before:
        with pytest.raises(UserError, match=r"holds more than tensors|truncated or damaged"):
            read_tensors([tmp_path / name])
    for text in ("!!python/object/apply:os.system ['touch harmed']", "name: !!python/name:os.system"):
        with pytest.raises(UserError, match=r"tag|mapping|not valid YAML"):
            parse_policy(text)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", ["a\nb", "a\r\nb", "\x1b[2Jb", "a\u2028b", "a\x00b"])
def test_names_inside_a_file_reach_no_message_as_they_are(tmp_path, name):
    """Of a tensor with too many dimensions, whatever a terminal would make of it."""
    raw = name.encode()
    tensor = struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q", len(raw)) + raw + struct.pack("<I", 9) + bytes(64)
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + tensor)
    with pytest.raises(UserError, match="has 9 dimensions") as caught:
        GgufFile(tmp_path / "x.gguf")
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("sizes", [(2**60, 0), (0, 2**60), (2**40, 2**40), (2**63, 1)])
def test_declared_sizes_allocate_nothing(tmp_path, sizes):
    """Of tensors and keys in a GGUF header, of one tensor's shape, of an array."""
    head = b"GGUF" + struct.pack("<IQQ", 3, *sizes)
    array = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"a" + struct.pack("<IIQ", 9, 4, max(sizes))
    tensor = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q", 1) + b"a" + struct.pack("<I", 2)
    tensor += struct.pack("<QQIQ", 2**31, max(sizes), 0, 0) + bytes(64)
    for raw in (head, array, tensor):
        (tmp_path / "x.gguf").write_bytes(raw)
        with pytest.raises(UserError, match="truncated or damaged"):
            GgufFile(tmp_path / "x.gguf")
