"""Help explains every setting, from the files that hold them; completion knows them too."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from specdial.conf import help as module
from specdial.conf.cli import VERBS
from specdial.conf.help import help_text, options_in, read_verb

CONF = Path(module.__file__).parent


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")


@pytest.mark.parametrize("verb", VERBS)
def test_every_setting_of_a_verb_is_explained(verb):
    found = read_verb(verb)
    assert [option.name for option in found.settings if option.default and not option.text] == []
    assert all(text for group in found.groups for text in group.options.values())
    content = yaml.safe_load((CONF / f"{verb}.yaml").read_text())
    groups = {group.name for group in found.groups}
    top = {option.name.split(".")[0] for option in found.settings}
    assert top == set(content) - groups - {"defaults", "hydra"}
    text = help_text(verb)
    assert all(f"  {option.name}=" in text for option in found.settings if option.default)
    assert max(map(len, text.splitlines())) <= 120


def test_every_option_of_every_group_is_explained():
    silent = [
        f"{path.parent.name}/{path.stem}: {option.name}"
        for path in CONF.glob("*/*.yaml")
        for option in options_in(path.read_text(), f"{path.parent.name}.")
        if option.default and not option.text
    ]
    assert silent == []


def test_meanings_come_from_behind_above_and_the_shared_table():
    text = "# about the file\na: 1  # behind\n# above\n# it\nb: {seed: '#', x: 2}\nout: ???\n"
    text += "c:  # a block\n  d: [1,\n    2]\n"
    found = {option.name: (option.default, option.text) for option in options_in(text)}
    assert found == {
        "a": ("1", "behind"),
        "b": ("", "above it"),
        "b.seed": ("'#'", module.EXPLAINED["seed"]),
        "b.x": ("2", ""),
        "out": ("???", module.EXPLAINED["out"]),
        "c": ("", "a block"),
        "c.d": ("[1, 2]", ""),
    }


def test_help_of_another_option_of_a_group(cli):
    result = cli("record", "workload=needle", "--help")
    assert (result.code, result.err) == (0, "")
    assert "Settings of workload=needle:" in result.out
    assert "workload.needles=1" in result.out
    assert "Settings of workload" not in cli("record", "workload=nowhere", "-h").out


def test_a_verbs_own_defaults_of_a_group_are_shown(cli):
    assert re.search(r"workload\.documents=5 ", cli("demo", "--help").out)


COMPLETIONS = {
    "specdial re": ["record", "replay", "refine", "report"],
    "specdial record mo": ["model=", "model.name=", "model.source="],
    "specdial record workload.doc": ["workload.documents="],
    "specdial record model=sm": ["smollm2-135m"],
    "specdial tune search=": ["between", "default", "fixed", "full"],
    "specdial record out=o workload=b": ["book"],
    "specdial replay trace=ru": ["runs"],
    "specdial replay --c": ["--cfg"],
}


def test_completion_in_bash(cli, tmp_path):
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash on this machine")
    result = cli("--completion", "bash")
    assert (result.code, result.err) == (0, "")
    (tmp_path / "script").write_text(result.out)
    (tmp_path / "runs").mkdir()
    lines = [
        f"COMP_LINE='{line}' COMP_POINT={len(line)}; _specdial 2>/dev/null; echo \"${{COMPREPLY[*]}}\""
        for line in COMPLETIONS
    ]
    command = "\n".join(["source ./script || exit 1", *lines])
    found = subprocess.run([bash, "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert dict(zip(COMPLETIONS, map(str.split, found.stdout.splitlines()))) == COMPLETIONS


def test_completion_in_zsh(cli, tmp_path):
    """Zsh's own functions are stood in for: what they are given is what completes."""
    zsh = shutil.which("zsh")
    if zsh is None:
        pytest.skip("no zsh on this machine: apt-get install zsh")
    result = cli("--completion", "zsh")
    assert (result.code, result.err) == (0, "")
    (tmp_path / "script").write_text(result.out)
    standing = (
        "compdef() { : }; compset() { PREFIX=${words[CURRENT]#*=} }; _files() { print -l $PREFIX*(N/) }",
        "compadd() { while [[ $1 != -- ]] { shift }; shift; print -rl -- ${(M)@:#$PREFIX*} }",
    )
    lines = [
        f"words=({line} {chr(39) * 2 if line.endswith(' ') else ''}); CURRENT=$#words PREFIX=$words[-1]; "
        "print -r -- ${(f)$(_specdial)}"
        for line in COMPLETIONS
    ]
    command = "\n".join([*standing, "source ./script || exit 1", *lines])
    (tmp_path / "runs").mkdir()
    found = subprocess.run([zsh, "-fc", command], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert found.stderr == ""
    assert dict(zip(COMPLETIONS, map(str.split, found.stdout.splitlines()))) == COMPLETIONS


def test_completion_of_another_shell_is_refused(refused):
    refused("--completion", "fish", says="no completion for fish")
