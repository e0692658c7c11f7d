"""specdial export on the command line: files, report, and what is refused."""

import json
import os
import re

import pytest
import yaml

from specdial.policies.errors import UserError
from specdial.policies.file import policy_digest, save_policy
from specdial.policies.schema import policy_from_mapping

PREDICTED = {"speedup": 1.5, "k": 4.0, "trace_digest": "a" * 64, "batch": 1}
MODEL = {
    "name": "tuned",
    "drafter": {"kind": "model", "model": "owner/small"},
    "controller": {"kind": "fixed", "k": 4},
    "cells": [{"from_batch": 32, "overrides": {"controller": {"kind": "none"}}}],
    "expected": PREDICTED,
    "provenance": {"model_digest": "b" * 64},
}


@pytest.fixture
def tuned(tmp_path):
    save_policy(policy_from_mapping(MODEL), tmp_path / "tuned.yaml")
    return "policy=tuned.yaml"


def test_a_native_export_is_byte_identical_however_often(cli, tuned, tmp_path):
    for source, target in (("tuned", "b"), ("b", "c")):
        assert cli("export", f"policy={source}.yaml", f"out={target}.yaml").code == 0
    assert cli("export", "policy=c.yaml", "out=folder/").code == 0
    first = (tmp_path / "tuned.yaml").read_bytes()
    for name in ("b.yaml", "c.yaml", "folder/tuned.yaml"):
        assert (tmp_path / name).read_bytes() == first
    assert not list(tmp_path.glob("*.report.json"))


def test_a_directory_that_exists_gets_named_files(cli, tuned, tmp_path):
    (tmp_path / "out").mkdir()
    for target in ("vllm", "sglang", "tensorrt_llm", "transformers", "llama_cpp"):
        result = cli("export", tuned, f"target={target}", "out=out")
        assert (result.code, result.err) == (0, "")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    main = {"tuned.vllm.json", "tuned.sglang.yaml", "tuned.tensorrt_llm.yaml", "tuned.transformers.json"}
    reports = {f"tuned.{t}.report.json" for t in ("vllm", "sglang", "tensorrt_llm", "transformers", "llama_cpp")}
    assert names == main | reports | {"tuned.llama_cpp.args"}


def test_the_report_is_printed_and_written(cli, tuned, tmp_path):
    result = cli("export", tuned, "target=vllm", "out=a/spec.json")
    assert result.code == 0
    assert json.loads((tmp_path / "a/spec.json").read_text()) == {
        "method": "draft_model",
        "num_speculative_tokens": 4,
        "model": "owner/small",
        "num_speculative_tokens_per_batch_size": [[1, 31, 4], [32, 512, 0]],
    }
    report = json.loads((tmp_path / "a/spec.report.json").read_text())
    assert (report["schema"], report["target"], report["lossless"]) == ("specdial/lowering/1", "vllm", True)
    assert report["predicted_loss"] == {"policy": 1.5, "lowered": 1.5, "lost": 0.0, "reason": ""}
    assert {(row["axis"], row["fate"]) for row in report["axes"]} == {
        ("k", "kept"),
        ("batch", "kept"),
        ("drafter", "kept"),
    }
    for words in ("tuned (lossless) for vllm", "elsewhere", "predicted speedup lost: 0.000", "use: vllm serve MODEL"):
        assert words in result.out
    again = cli("export", tuned, "target=vllm", "out=b/spec.json")
    assert again.code == 0
    assert (tmp_path / "b/spec.report.json").read_bytes() == (tmp_path / "a/spec.report.json").read_bytes()


def test_alternatives_tell_what_a_dropped_axis_costs(cli, tuned, tmp_path):
    fixed = {**MODEL, "name": "fixed", "cells": [], "expected": {**PREDICTED, "speedup": 1.25}}
    save_policy(policy_from_mapping(fixed), tmp_path / "study" / "fixed.yaml")
    unknown = cli("export", tuned, "target=llama_cpp", "out=a.args")
    assert "predicted speedup lost: unknown, no alternative" in unknown.out
    # llama.cpp wants GGUF, which is a reason of its own to look: transformers keeps the drafter and drops the batch.
    known = cli("export", tuned, "target=transformers", "alternatives=study", "out=a.json")
    assert "predicted speedup lost: 0.250 (1.500x to 1.250x in this engine)" in known.out


def test_eagle_heads_for_sglang_come_in_two_files_that_name_each_other(cli, tuned, tmp_path):
    stand_in = ("stand_in=eagle3", "stand_in_model=owner/head")
    assert cli("export", tuned, "target=sglang", *stand_in, "out=spec.yaml").code == 0
    arguments = yaml.safe_load((tmp_path / "spec.yaml").read_text())
    named = json.loads((tmp_path / arguments["speculative-adaptive-config"]).read_text())
    assert named == {"1": {"candidate_steps": [4]}, "32": {"candidate_steps": [0]}}


def test_a_profile_of_a_trace(cli, synthetic, tmp_path):
    trace = synthetic / "runs" / "book"
    arm = json.loads((trace / "meta.json").read_text())["arms"][0]["draft_kv"]
    save_policy(
        policy_from_mapping({"name": "p", "controller": {"kind": "fixed", "k": 2}, "draft_kv": arm}),
        tmp_path / "p.yaml",
    )
    result = cli("export", "policy=p.yaml", "target=profile", f"trace={trace}", "out=profile.json")
    assert (result.code, result.err) == (0, "")
    content = json.loads((tmp_path / "profile.json").read_text())
    assert content["acceptance_length"] == pytest.approx(1 + sum(content["marginal"]))
    assert len(content["marginal"]) == 2


def test_help_lists_targets_with_examples(cli):
    result = cli("export", "--help")
    assert result.code == 0
    for words in ("target=vllm out=speculative.json", "target=profile trace=runs/book", "NAME.report.json"):
        assert words in result.out
    assert "target: vllm" in cli("export", "--cfg", "job", "target=vllm", "out=a").out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("target=eagle",), "target is 'eagle'; use one of specdial, vllm, sglang"),
        (("target=vllm", "policy=sparse_self", "controller=fixed"), "nothing of it would remain; add stand_in=lookup"),
        (("target=vllm", "stand_in=medusa"), "stand_in is 'medusa'; use one of lookup, model"),
        (("target=vllm", "max_batch=0"), "max_batch is 0; use at least 1"),
        (("target=vllm", "trace=t"), "trace is 't', which target vllm does not use"),
        (("stand_in=lookup",), "stand_in is 'lookup', which target specdial does not use"),
        (("alternatives=tuned.yaml",), "alternatives is 'tuned.yaml', which target specdial does not use"),
        (("target=profile", "alternatives=tuned.yaml"), "which target profile does not use; it is for vllm, sglang"),
        (("target=vllm", "alternatives=missing.yaml"), "cannot read policy missing.yaml"),
        (("target=profile", "policy=plain", "trace=t"), "t is not a trace"),
        (("target=profile", "policy=lookup"), "no measured or expected tokens per round"),
    ],
)
def test_refused(refused, tuned, arguments, says):
    given = arguments if any(a.startswith("policy=") for a in arguments) else (tuned, *arguments)
    refused("export", *given, "out=o.json", says=says)


def test_damaged_and_future_policies_are_refused_for_every_target(refused, tuned, tmp_path):
    text = re.sub("digest: .*\n", "", (tmp_path / "tuned.yaml").read_text(), count=1)
    for damage, says in (
        (text.replace("policy/1", "policy/9"), "policy schema is 'specdial/policy/9' at line 1"),
        (text.replace("owner/small", "!!python/name:os.system"), "anchor, alias or tag at line"),
        (text.replace("name: tuned", "name: ../../tuned"), "name is '../../tuned' (line 2)"),
        (text.replace("  k: 4\n", "  k: 1" + "0" * 400 + "\n"), "use at most 64"),
        (text[: text.index("  k: 4") + 3], "not valid YAML at line"),
        (text[: text.index("    controller:")], "cells[0].overrides must be a mapping, got None (line"),
    ):
        assert damage != text
        (tmp_path / "bad.yaml").write_text(damage)
        for target in ("specdial", "vllm"):
            refused("export", "policy=bad.yaml", f"target={target}", "out=o/", says=says)


def test_a_policy_edited_after_it_was_tuned_is_refused(cli, refused, tuned, tmp_path):
    plain = {**MODEL, "cells": []}
    stamped = {**plain, "provenance": {"policy_digest": policy_digest(policy_from_mapping(plain))}}
    save_policy(policy_from_mapping(stamped), tmp_path / "stamped.yaml")
    assert cli("export", "policy=stamped.yaml", "out=a.yaml").code == 0
    assert (tmp_path / "a.yaml").read_bytes() == (tmp_path / "stamped.yaml").read_bytes()
    text = (tmp_path / "stamped.yaml").read_text()
    (tmp_path / "edited.yaml").write_text(text.replace("  k: 4\n", "  k: 5\n"))
    for target in ("specdial", "vllm"):
        refused(
            "export", "policy=edited.yaml", f"target={target}", "out=o/", says="digest at line 2 is of other content"
        )
    (tmp_path / "edited.yaml").write_text(re.sub("digest: .*\n", "", text, count=1).replace("  k: 4\n", "  k: 5\n"))
    refused("export", "policy=edited.yaml", "out=o/", says="provenance.policy_digest is of other decisions")
    # Changing it on the command line is no forgery: the prediction goes with the change.
    assert cli("export", "policy=stamped.yaml", "controller=fixed", "controller.k=5", "out=b.yaml").code == 0


def test_a_write_that_fails_leaves_the_old_file(cli, tuned, tmp_path, monkeypatch):
    assert cli("export", tuned, "target=vllm", "out=spec.json").code == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    result = cli("export", tuned, "target=vllm", "max_batch=64", "out=spec.json")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_names_with_brackets_are_printed_as_they_are(cli, tmp_path):
    save_policy(policy_from_mapping({**MODEL, "name": "[red]a[bold]"}), tmp_path / "p.yaml")
    result = cli("export", "policy=p.yaml", "target=vllm", "out=o/")
    assert result.code == 0
    assert "[red]a[bold] (lossless) for vllm" in result.out
    assert (tmp_path / "o" / "[red]a[bold].vllm.json").exists()


def test_a_sweep_writes_one_set_of_files_a_target(cli, tuned, tmp_path):
    result = cli("export", "-m", tuned, "target=vllm,sglang", "out=o/")
    assert (result.code, result.err) == (0, "")
    names = {"tuned.vllm.json", "tuned.vllm.report.json", "tuned.sglang.yaml", "tuned.sglang.report.json"}
    assert {path.name for path in (tmp_path / "o").iterdir()} == names


@pytest.mark.parametrize("target", ["vllm", "sglang", "tensorrt_llm", "transformers", "llama_cpp", "profile"])
def test_numbers_beyond_reason_in_a_file_are_refused_or_not_used(cli, tmp_path, target):
    huge = 10**400
    rate = {**MODEL, "controller": {"kind": "rate"}, "cells": []}
    blocks = {"speedup": huge, "k": huge, "batch": huge, "tokens_per_round": huge}
    save_policy(policy_from_mapping({**rate, "expected": blocks}), tmp_path / "a.yaml")
    result = cli("export", "policy=a.yaml", f"target={target}", "out=o/")
    if target == "profile":
        assert (result.code, "has no measured or expected tokens per round" in result.err) == (2, True)
        return
    assert (result.code, result.err) == (0, "")
    assert "unknown, the policy has no predicted speedup" in result.out
    cells = [{"from_context_tokens": huge, "overrides": {"controller": {"kind": "none"}}}]
    with pytest.raises(UserError, match=r"cells\[0\]\.from_context_tokens is 1000"):  # as reading the file would
        policy_from_mapping({**MODEL, "cells": cells})
