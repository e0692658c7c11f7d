"""Every command that a document shows composes: its verb exists, and Hydra takes its settings."""

import re
import shlex
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from specdial.conf.cli import VERBS, check_arguments, rewrite

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(text: str) -> list[list[str]]:
    """The arguments of every `specdial` command in code blocks, lines that end in a backslash joined."""
    blocks = re.findall(r"^```\w*\n(.*?)^```|^((?: {4}.*\n)+)", text, re.MULTILINE | re.DOTALL)
    lines = re.sub(r"\\\n\s*", " ", "\n".join("\n".join(block) for block in blocks)).splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines if line.strip().startswith("specdial ")]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_commands_compose(path):
    found = [c for c in commands(path.read_text("utf-8")) if c[0] in VERBS or "=" not in c[0]]
    with initialize_config_module("specdial.conf", version_base="1.3"):
        for verb, *arguments in found:
            if verb.isupper() or verb.startswith("-"):  # specdial VERB, specdial --help
                continue
            assert verb in VERBS, f"{path.name}: specdial {verb}"
            check_arguments(verb, arguments)
            swept = "-m" in arguments or "--multirun" in arguments
            overrides = [part for a in arguments if "=" in a for part in rewrite(a)]
            if swept:  # one of the values
                overrides = [re.sub(r"=([^,\[{]*),.*", r"=\1", override) for override in overrides]
            OmegaConf.to_container(compose(verb, overrides=overrides))


def test_documents_show_commands_of_every_verb():
    shown = {command[0] for path in DOCUMENTS for command in commands(path.read_text("utf-8"))}
    assert {"record", "calibrate", "replay", "tune", "validate", "export", "run", "report", "doctor"} <= shown


def test_files_that_documents_name_are_there():
    """What stands in backquotes and looks like a file of this repository."""
    folders = "(?:conf|engine|kernels|policies|simulator|tests|benchmarks)"
    named = re.compile(rf"`({folders}/[\w./-]+\.py|(?:conf|docs|benchmarks)/[\w./-]+\.(?:yaml|md|json))`")
    found = {(path.name, name) for path in DOCUMENTS for name in named.findall(path.read_text("utf-8"))}
    stands_for_many = re.compile(r"/[A-Z]+\.(?!md)|NAME")
    missing = {(path, name) for path, name in found if not stands_for_many.search(name) and not (ROOT / name).is_file()}
    assert missing == set()
