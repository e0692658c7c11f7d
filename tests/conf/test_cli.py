"""The command line as typed: usage, help, sweeps, and what the overrides mean."""

import json
import os
import subprocess
import sys
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_module

from specdial.conf import cli as command
from specdial.conf.cli import VERBS, rewrite, task
from specdial.policies.file import load_policy, save_policy
from specdial.policies.schema import DraftKV, policy_from_mapping

SWEEP = ("policy=plain,sparse_self", "draft_kv.budget=256")


def started(*arguments, **options):
    """The installed command, or the same entry point where there is none, in a process of its own."""
    script = Path(sys.executable).with_name("specdial")
    start = [str(script)] if script.exists() else [sys.executable, "-c", "from specdial.conf.cli import main; main()"]
    return subprocess.run([*start, *arguments], capture_output=True, text=True, timeout=120, check=False, **options)


def test_the_command_starts_and_prints_its_usage(tmp_path):
    found = started("--help", cwd=tmp_path)
    assert (found.returncode, found.stderr) == (0, "")
    assert all(f"  {verb}" in found.stdout for verb in VERBS)
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_is_one_line_and_exit_code_2(tmp_path):
    found = started("replay", "trace=nowhere", cwd=tmp_path)
    assert found.returncode == 2
    assert found.stderr == "specdial: nowhere is not a trace: it has no meta.json; check the path\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", ["help", "run"])
def test_a_closed_pipe_ends_the_command_quietly(tmp_path, tiny_checkpoint, verb):
    """As in `specdial replay --help | head -1`, with the reader gone before the first line."""
    model = f"model={tiny_checkpoint('llama')}"
    arguments = ("replay", "--help") if verb == "help" else ("run", model, "hardware=cpu", "prompt=Hi", "new_tokens=2")
    reader, writer = os.pipe()
    os.close(reader)
    code = "from specdial.conf.cli import main; main()"
    found = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
        cwd=tmp_path,
    )
    os.close(writer)
    assert (found.returncode, found.stderr) == (0, "")


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",), ("help",)])
def test_usage_names_every_verb(cli, arguments):
    result = cli(*arguments)
    assert (result.code, result.err) == (0, "")
    assert all(f"  {verb}" in result.out for verb in VERBS)


def test_version(cli):
    assert cli("--version").out.startswith("specdial ")


@pytest.mark.parametrize("verb", VERBS)
def test_help_says_what_the_verb_does(cli, verb, tmp_path):
    result = cli(verb, "--help")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith(f"specdial {verb}: ")
    assert f"  specdial {verb} " in result.out  # an example to copy
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", VERBS)
def test_cfg_prints_the_settings(cli, verb, tmp_path):
    result = cli(verb, "--cfg", "job")
    assert (result.code, result.err) == (0, "")
    assert isinstance(yaml.safe_load(result.out), dict)
    assert list(tmp_path.iterdir()) == []


MISSING = {
    "record": ["out=o"],
    "calibrate": ["out=o"],
    "heads": ["out=o"],
    "replay": ["trace=t"],
    "tune": ["trace=t", "out=o"],
    "tune_heads": ["trace=t", "out=o"],
    "refine": ["trace=t", "costs=c", "out=o"],
    "train_eagle": ["out=o"],
    "run": ["prompt=p"],
    "validate": ["out=o"],
    "import": ["format=vllm", "source=s", "out=o"],
    "drift": ["policy=p", "trace=t"],
    "export": ["out=o"],
    "report": [],
    "doctor": [],
    "demo": [],
}


def settings_of(verb, *overrides):
    """What a verb's run() receives for these overrides."""
    received = []
    module = import_module(VERBS[verb][0])
    before, module.run = module.run, lambda settings: received.append(settings) or {"seen": verb}
    try:
        with initialize_config_module("specdial.conf", version_base="1.3"):
            arguments = [part for override in overrides for part in rewrite(override)]
            assert task(verb)(compose(verb, overrides=[*MISSING[verb], *arguments])) == {"seen": verb}
    finally:
        module.run = before
    return received[0]


@pytest.mark.parametrize("verb", VERBS)
def test_every_setting_of_a_verb_can_be_given_and_no_other(verb):
    settings = settings_of(verb)
    known = import_module(VERBS[verb][0]).Settings
    assert set(settings) == {field.name for field in fields(known)}


def test_the_machine_of_imported_step_times_is_named_on_the_command_line(cli, tmp_path):
    (tmp_path / "times.csv").write_text("op,context_tokens,batch,k,us\nround,512,1,0,900\nround,512,1,2,1200\n")
    given = ("import", "format=step_times", "source=times.csv", "model_name=m", "out=o")
    assert cli(*given, "hardware_name=their box").code == 0
    meta = json.loads((tmp_path / "o" / "meta.json").read_text())
    assert meta["hardware"] == {"device": "unknown", "name": "their box"}


@pytest.mark.parametrize("verb", ["record", "calibrate", "replay", "run", "validate", "export"])
def test_every_part_of_a_selection_can_be_overridden(verb):
    config = yaml.safe_load((Path(command.__file__).parent / f"{verb}.yaml").read_text())
    assert set(config["draft_kv"]) == {field.name for field in fields(DraftKV)}


def test_what_a_verb_finds_goes_back_to_sweepers():
    assert settings_of("replay")["trace"] == "t"  # settings_of checks the value that `task` returns


def test_a_model_can_be_a_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my, model={1}").mkdir()
    assert settings_of("run", "model=my, model={1}")["model"]["source"] == "my, model={1}"
    assert settings_of("run", f"model={tmp_path}")["model"]["source"] == str(tmp_path)
    assert settings_of("run", "model=here.gguf")["model"]["source"] == "here.gguf"
    assert settings_of("run", "model=owner/name")["model"] == {
        "name": "owner/name",
        "source": "owner/name",
        "device": "auto",
        "dtype": "auto",
    }
    assert settings_of("run", "model=random", "model.shape=qwen2.5-7b")["model"]["source"] == "shape:qwen2.5-7b"
    assert settings_of("run", "hardware=cpu")["model"]["dtype"] == "float32"


PROMPTS = ["Hello, world", "[1, {a: b}", "it's ${x} \\", "a=b", "3", "null", "two\nlines", " x "]


@pytest.mark.parametrize("text", PROMPTS)
def test_a_prompt_is_taken_as_it_stands(text):
    assert settings_of("run", f"prompt={text}")["prompt"] == text


def test_a_quoted_prompt_may_still_be_quoted():
    assert settings_of("run", "prompt='Hello, world'")["prompt"] == "Hello, world"


def test_context_is_short_for_the_workload_s():
    assert settings_of("record", "context=100")["workload"]["context_tokens"] == 100
    assert settings_of("record", "workload=needle", "workload.needles=3")["workload"]["needles"] == 3


def test_a_policy_can_be_a_name_a_file_or_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("b", "a"):
        policy = policy_from_mapping({"name": name, "controller": {"kind": "fixed"}, "expected": {"speedup": 2.0}})
        save_policy(policy, tmp_path / "found" / f"{name}.yaml")
    assert settings_of("run", "policy=sparse_self")["policy"]["name"] == "sparse_self"
    assert settings_of("run", "policy=found/a.yaml")["policy"]["name"] == "a"
    assert settings_of("run", "policy=found/a.yaml")["policy_file"] == "found/a.yaml"
    assert settings_of("run", "policy=found/a.yaml", "controller=fixed", "controller.k=7")["policy_file"] is None
    assert [p["name"] for p in settings_of("validate", "policy=found")["policies"]] == ["a", "b"]
    assert settings_of("validate", "policy=found")["policies"][0]["expected"] == {"speedup": 2.0}


def test_overrides_change_parts_of_a_policy_and_drop_what_was_expected_of_the_old(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    whole = {"controller": {"kind": "rate", "gamma": 0.9}, "expected": {"speedup": 2.0}, "measured": {"speedup": 1.9}}
    save_policy(policy_from_mapping({"name": "p", **whole, "provenance": {"model_digest": "0"}}), tmp_path / "p.yaml")
    same = settings_of("run", "policy=p.yaml", "draft_kv.budget=512")["policy"]
    assert (same["name"], same["expected"]) == ("p", {"speedup": 2.0})
    other = settings_of("run", "policy=p.yaml", "draft_kv.budget=300")["policy"]
    assert (other["draft_kv"]["budget"], other["draft_kv"]["sink"]) == (300, 4)
    assert (other["name"], other["controller"]["gamma"]) == ("rate-k8-b300", 0.9)
    assert [other[part] for part in ("expected", "measured", "provenance")] == [None] * 3
    fixed = settings_of("run", "policy=p.yaml", "controller=fixed", "controller.k=7")["policy"]
    assert fixed["controller"] == {"kind": "fixed", "k": 7}
    drawn = settings_of("run", "policy=plain", "controller=fixed")["policy"]
    assert drawn["drafter"] == {"kind": "sparse_self"}  # plain drafts with nothing
    cells = [{"overrides": {"controller": {"kind": "fixed", "k": 2}}}]
    save_policy(policy_from_mapping({"name": "c", **whole, "cells": cells}), tmp_path / "c.yaml")
    with pytest.raises(SystemExit):
        settings_of("run", "policy=c.yaml", "controller=none")
    assert "controller is given, and policy c overrides it in cells[0]" in capsys.readouterr().err
    assert settings_of("run", "policy=c.yaml", "draft_kv.budget=300")["policy"]["draft_kv"]["budget"] == 300


def test_export_writes_a_policy_that_loads(cli, tmp_path):
    result = cli("export", "policy=sparse_self", "controller=fixed", "controller.k=6", "out=mine.yaml")
    assert (result.code, result.err) == (0, "")
    assert load_policy(tmp_path / "mine.yaml").controller.k == 6


def outcomes(tmp_path, names):
    return [json.loads((tmp_path / name / "replay.json").read_text())["outcomes"][0] for name in names]


def test_a_sweep_over_policies(cli, replayed, tmp_path):
    result = cli("replay", "-m", *replayed, *SWEEP, "out=swept-${policy}")
    assert (result.code, result.err) == (0, "")
    plain, drafting = outcomes(tmp_path, ["swept-plain", "swept-sparse_self"])
    assert (plain["k"], drafting["k"]) == (0.0, 4.0) or drafting["k"] > plain["k"] == 0.0


def test_a_sweep_over_controllers_and_budgets(cli, replayed, tmp_path):
    sweep = (
        "controller=fixed",
        "controller.k=1,2",
        "draft_kv.budget=128,256",
        "out=s-${controller.k}-${draft_kv.budget}",
    )
    result = cli("replay", "-m", *replayed, *sweep)
    assert (result.code, result.err) == (0, "")
    found = outcomes(tmp_path, ["s-1-128", "s-1-256", "s-2-128", "s-2-256"])
    assert [outcome["budget"] for outcome in found] == [128, 256, 128, 256]
    assert {outcome["level"] for outcome in found} == {"exact"}
    assert found[2]["tokens_per_round"] > found[0]["tokens_per_round"] > 1.0


def test_a_sweep_over_workloads(cli, synthetic, replayed, monkeypatch):
    """`workload=NAME` stands for the trace runs/NAME."""
    monkeypatch.chdir(synthetic)
    result = cli("replay", "-m", *replayed[1:], *SWEEP, "workload=book,stdlib")
    assert (result.code, result.err) == (0, "")
    assert [result.out.count(f"replay of {kind}") for kind in ("book", "stdlib")] == [2, 2]


def test_a_trace_is_held_to_its_workload(refused, cli, replayed, synthetic):
    place = f"trace='{synthetic}/runs/${{workload.kind}}'"
    assert cli("replay", *replayed[1:], place, "workload=stdlib", "draft_kv.budget=256").code == 0
    refused("replay", *replayed, "workload=stdlib", says="is of workload book, not stdlib; give another")
    refused("replay", "workload=needle", says="runs/needle is not a trace")


def test_a_sweep_leaves_no_trace_of_hydra_but_its_own_folder(cli, replayed, tmp_path):
    assert cli("replay", "-m", *replayed, *SWEEP).code == 0
    assert {path.name for path in tmp_path.iterdir()} <= {"multirun"}


def test_a_fault_of_the_program_is_not_called_a_mistake(cli, monkeypatch):
    def broken(settings):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(import_module("specdial.policies.export"), "run", broken)
    with pytest.raises(ZeroDivisionError):
        cli("export", "out=a.yaml")


def test_an_interrupt_says_that_finished_parts_are_kept(cli, monkeypatch):
    def interrupted(settings):
        raise KeyboardInterrupt

    monkeypatch.setattr(import_module("specdial.policies.export"), "run", interrupted)
    result = cli("export", "out=a.yaml")
    assert (result.code, result.err) == (130, "interrupted; finished parts are on disk\n")


def test_verbs_and_their_configs_are_the_same():
    primary = {path.stem for path in Path(command.__file__).parent.glob("*.yaml")} - {"base"}
    assert primary == set(VERBS)
