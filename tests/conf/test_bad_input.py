"""Bad input, from the command line: exit code 2, one line with cause and remedy, nothing half-written.

`refused` compares every file under the working directory before and after.
"""

import json
import re
import shutil

import pytest

from specdial.engine.weights.hf import SafetensorsWeights, read_config
from specdial.policies.artifact import claim_directory
from specdial.policies.file import load_policy, save_policy
from specdial.policies.schema import policy_from_mapping

PLACE = ("hardware=cpu", "workload=file", "workload.path=text.txt", "workload.documents=2", "workload.new_tokens=8")
RECORD = ("record", *PLACE, "context=64", "out=o", "draft_kv.budget=40", "draft_kv.sink=2", "draft_kv.recent=8")
VALIDATE = ("validate", *PLACE, "context=64", "out=o")
CALIBRATE = ("calibrate", *PLACE, "contexts=[64]", "budgets=[40]", "draft_kv.sink=2", "draft_kv.recent=8", "out=o")
RUN = ("run", "hardware=cpu", "prompt=Hello", "new_tokens=4")


@pytest.fixture
def model(tiny_checkpoint, tmp_path):
    """A copy of a tiny Llama folder, to be damaged, and a text beside it."""
    (tmp_path / "text.txt").write_text("\n\n".join(f"The {i}th paragraph of a text." for i in range(200)))
    return shutil.copytree(tiny_checkpoint("llama"), tmp_path / "model")


@pytest.fixture
def gguf_model(tiny_checkpoint, write_gguf, tmp_path):
    checkpoint = tiny_checkpoint("llama")
    return write_gguf(tmp_path / "tiny.gguf", read_config(checkpoint, "tiny"), dict(SafetensorsWeights(checkpoint)))


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


class TestModels:
    def test_missing(self, refused, model):
        refused(*RUN, "model=model/nothing.gguf", says="no model file model/nothing.gguf; give the path")
        refused(*RUN, "model=path", "model.source=nowhere", says="no model at 'nowhere'; give a .gguf file")
        refused(*RUN, "model=path", says="model.source is missing; add model.source=VALUE")
        refused(*RUN, "model=nowhere", says="Could not find 'model/nowhere'")
        refused(*RUN, "model=random", "model.shape=gpt-5", says="unknown shape 'gpt-5'; use one of")

    def test_truncated_gguf(self, refused, gguf_model):
        cut(gguf_model)
        refused(*RUN, "model=tiny.gguf", says="tiny.gguf is truncated or damaged")

    def test_truncated_safetensors(self, refused, model):
        cut(model / "model.safetensors")
        refused(*RUN, "model=model", says="model.safetensors")
        refused(*RECORD, "model=model", says="truncated or damaged")
        refused(*CALIBRATE, "model=model", says="truncated or damaged")
        refused(*VALIDATE, "model=model", says="truncated or damaged")

    def test_unknown_architecture(self, refused, model):
        edit(model / "config.json", architectures=["MambaForCausalLM"])
        refused(*RUN, "model=model", says="unknown architecture MambaForCausalLM")

    def test_tokenizer_missing(self, refused, model):
        (model / "tokenizer.json").unlink()
        refused(*RUN, "model=model", says="no tokenizer at model/tokenizer.json; add tokenizer.json beside config.json")

    def test_a_context_longer_than_the_model_allows(self, refused, model):
        refused(*RECORD, "model=model", "context=510", says="518 tokens exceed model's context of 512; ")
        refused(*VALIDATE, "model=model", "context=600", says="608 tokens exceed model's context of 512; ")
        refused(*CALIBRATE, "model=model", "contexts=[510]", says="exceed model's context of 512; ")
        refused(*RUN, "model=model", f"prompt={'x' * 510}", says="514 tokens exceed model's context of 512; ")


class TestSettings:
    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            ((*RUN, "prompt="), "the prompt is empty; give prompt=TEXT or prompt=@FILE"),
            ((*RUN, "prompt=  "), "the prompt is empty"),
            ((*RUN, "prompt=@nowhere.txt"), "cannot read the prompt nowhere.txt"),
            ((*RUN, "prompt=@model"), "cannot read the prompt model"),
            ((*RUN, "out=model"), "model is a directory; give out=FILE.json"),
            ((*RUN, "new_tokens=0"), "new_tokens is 0; use at least 1"),
            ((*RUN, "sampling.temperature=-1"), "sampling.temperature is -1.0; use at least 0.0"),
            ((*RUN, "sampling.temperature=nan"), "sampling.temperature is nan; give a finite number"),
            ((*RUN, "sampling.top_p=2"), "sampling.top_p is 2.0; use at most 1.0"),
            ((*RUN, "hardware.device=tpu"), "model.device is 'tpu'; use one of auto, cpu, cuda"),
            ((*RUN, "policy=model"), "no policy file (*.yaml) in model"),
            ((*RUN, "policy=nothing"), "no policy 'nothing'; give a policy file, a directory, or one of plain"),
            ((*RUN, "policy=3"), "policy is 3; give policy=NAME"),
            ((*RUN, "policy="), "policy is ''; give policy=NAME"),
            ((*RUN, f"policy={'x' * 300}"), "File name too long; check the path and its permissions"),
            ((*RECORD, f"out={'x' * 300}"), "File name too long; "),
            ((*VALIDATE, "bootstrap=100000000000"), "bootstrap is 100000000000; use at most 100000"),
            ((*RUN, "controller=entropy", "controller.threshold=nan"), "controller.threshold is nan"),
            ((*RUN, "controller=magic"), "Could not find 'controller/magic'"),
            ((*RUN, "controller.k=3"), "controller.k is set without a controller; add controller=KIND"),
            ((*RECORD, "draft_kv.budget=-1"), "draft_kv.budget is -1; use at least 1"),
            ((*RECORD, "draft_kv.budget=99999999999999999999"), "use at most 16777216"),
            ((*RECORD, "draft_kv.budget=9"), "draft_kv.budget is 9, smaller than sink + recent = 10"),
            ((*RECORD, "context=0"), "workload.context_tokens is 0; give a whole number of at least 1"),
            ((*RECORD, "context=-5"), "workload.context_tokens is -5"),
            ((*RECORD, "workload.train_frac=nan"), "workload.train_frac is nan"),
            ((*RECORD, "workload.path=nowhere.txt"), "cannot read nowhere.txt"),
            ((*RECORD, "workload.documents=100000"), "lower the context"),
            ((*RECORD, "batch=0"), "batch is 0; use at least 1"),
            ((*RECORD, "split=dev"), "unknown split 'dev'; use one of"),
            ((*RECORD, "dense=true", "batch=2"), "dense=true records one document at a time"),
            ((*RECORD, "dense=true", "sampling.temperature=1"), "dense=true needs greedy decoding"),
            ((*RECORD, "dense=true", "budgets=[5]"), "budgets.budget is 5, smaller than sink + recent"),
            ((*RECORD, "dense=true", "budgets=[64]", "k_max=2"), "the policy drafts up to 4 tokens, k_max is 2"),
            ((*VALIDATE, "repeats=0"), "repeats is 0; use at least 1"),
            ((*CALIBRATE, "repeats=0"), "repeats is 0; use at least 3"),
            ((*CALIBRATE, "ks=[]"), "must not be empty"),
            ((*CALIBRATE, "ks=[-1]"), "ks is -1; use at least 0"),
            ((*CALIBRATE, "budgets=[9]"), "draft_kv.budget is 9, smaller than sink + recent = 10"),
            (("record", "context=64"), "out is missing; add out=VALUE"),
            (("tune", "out=o"), "trace is missing; add trace=VALUE"),
            (("replay",), "trace is missing; add trace=DIR, or workload=NAME"),
            (("replay", "trace=model"), "model is not a trace: it has no meta.json; check the path"),
            (("replay", "trace=text.txt"), "text.txt is not a trace"),
            (("simulate",), "unknown verb 'simulate'; use one of record, calibrate, "),
            (("run", "promt=x"), "run has no setting promt; did you mean prompt"),
            (("run", "prompt"), "missing EQUAL"),
            (("run", "--verbose", "prompt=x"), "unknown option --verbose; use setting=value"),
            (("export", "out=text.txt/a.yaml"), "cannot write text.txt/a.yaml"),
        ],
    )
    def test_refused(self, refused, model, arguments, says):
        if arguments[0] in ("run", "record", "validate", "calibrate"):
            arguments = (arguments[0], "model=model", *arguments[1:])
        refused(*arguments, says=says)

    def test_an_unknown_field_in_a_policy_file(self, refused, model, tmp_path):
        save_policy(policy_from_mapping({"name": "p"}), tmp_path / "p.yaml")
        text = re.sub("digest: .*\n", "", (tmp_path / "p.yaml").read_text())
        (tmp_path / "p.yaml").write_text(text.replace("  budget: 512", "  budget: 512\n  bugdet: 512"))
        for verb in (RUN, RECORD, VALIDATE, ("export", "out=a.yaml"), ("replay", "trace=t")):
            refused(*verb, "policy=p.yaml", says="p.yaml: unknown field draft_kv.bugdet (line 9); use one of budget")

    def test_policies_that_cannot_be_run_together(self, refused, model, tmp_path):
        for window in (8, 16):
            policy = {"name": f"w{window}", "controller": {"kind": "fixed"}, "draft_kv": {"window": window}}
            save_policy(policy_from_mapping(policy), tmp_path / "policies" / f"{window}.yaml")
        refused(*VALIDATE, "model=model", "policy=policies", says="; run them separately")
        refused(*RUN, "model=model", "policy=policies", says="2 policies given where one is needed; name one")

    def test_a_prediction_that_is_no_number(self, refused, model, tmp_path):
        save_policy(policy_from_mapping({"name": "p", "expected": {"speedup": "fast"}}), tmp_path / "p.yaml")
        refused(*VALIDATE, "model=model", "policy=p.yaml", says="expected.speedup is 'fast'; give a positive number")


class TestTraces:
    """A trace and costs on disk, damaged in one place each."""

    @pytest.fixture
    def replay(self, synthetic, tmp_path):
        for name in ("runs/book", "costs"):
            shutil.copytree(synthetic / name, tmp_path / name)
        save_policy(
            policy_from_mapping({"controller": {"kind": "fixed"}, "draft_kv": {"budget": 128}}), tmp_path / "p.yaml"
        )
        return ("replay", "trace=runs/book", "costs=costs", "policy=p.yaml", "out=o")

    @pytest.fixture
    def both(self, replay, refused):
        """both(says=...): replay and tune refuse alike."""

        def check(*, says):
            refused(*replay, says=says)
            refused("tune", "trace=runs/book", "costs=costs", "out=o", "trials=2", says=says)

        return check

    @pytest.mark.parametrize("table", ["rounds", "drafts", "outputs"])
    def test_a_truncated_part(self, both, tmp_path, table):
        cut(tmp_path / "runs" / "book" / f"{table}-00001.parquet")
        both(says=f"runs/book/{table}-00001.parquet is damaged; delete that part and record it again")

    @pytest.mark.parametrize("table", ["rounds", "drafts", "outputs"])
    def test_a_flipped_bit(self, both, tmp_path, table):
        path = tmp_path / "runs" / "book" / f"{table}-00000.parquet"
        data = bytearray(path.read_bytes())
        data[len(data) // 4] ^= 0x04
        path.write_bytes(data)
        both(says=f"runs/book/{table}-00000.parquet is damaged")

    def test_damaged_costs(self, both, tmp_path):
        cut(tmp_path / "costs" / "costs.parquet")
        both(says="costs/costs.parquet is damaged")

    def test_costs_of_another_model(self, both, tmp_path):
        other = {"name": "other", "digest": "1" * 64}
        edit(tmp_path / "costs" / "meta.json", model=other)
        both(says="costs of another model: costs timed other, runs/book recorded synthetic; calibrate that model")

    @pytest.mark.parametrize("part", ["model", "documents", "arms", "sampling", "k_max"])
    def test_meta_without_a_part(self, both, tmp_path, part):
        edit(tmp_path / "runs" / "book" / "meta.json", **{part: None})
        both(says=f"runs/book/meta.json lacks a usable {part}")

    def test_costs_in_the_place_of_a_trace(self, refused, replay):
        refused(*replay, "trace=costs", says="costs has schema 'specdial/costs/1'; this version reads")

    def test_an_output_directory_that_holds_another_run(self, refused, replay, tmp_path):
        claim_directory(tmp_path / "o", "tune", {"seed": 1})
        refused(*replay, says="o holds another run (tune); choose another out= or delete that directory")
        refused("tune", *replay[1:3], "out=o", "trials=2", says="o holds another run (tune); choose another out=")

    def test_an_output_directory_with_foreign_files(self, refused, replay):
        refused(*replay, "out=runs", says="runs exists and is not a run of specdial; choose another out=")


class TestOutputDirectories:
    @pytest.mark.parametrize("verb", [RECORD, VALIDATE, CALIBRATE], ids=lambda verb: verb[0])
    def test_another_run(self, refused, model, tmp_path, verb):
        claim_directory(tmp_path / "o", verb[0], {"seed": 1})
        refused(*verb, "model=model", says=f"o holds another run ({verb[0]}); choose another out=")

    @pytest.mark.parametrize("verb", [RECORD, VALIDATE, CALIBRATE], ids=lambda verb: verb[0])
    def test_foreign_files(self, refused, model, verb):
        refused(*verb, "model=model", "out=model", says="model exists and is not a run of specdial; choose another")


def test_a_policy_tuned_on_another_model(refused, cli, model, synthetic, tmp_path):
    """`tune` says in the policy's provenance which model it was; `validate` holds the model to it."""
    tuned = cli(
        "tune",
        f"trace={synthetic / 'runs' / 'book'}",
        "out=tuned",
        "trials=4",
        "bootstrap=10",
        "search=fixed",
        f"costs={synthetic / 'costs'}",
    )
    assert tuned.code == 0, tuned.err
    assert load_policy(tmp_path / "tuned" / "policies" / "best.yaml").provenance["model_digest"] == "0" * 64
    refused(
        *VALIDATE, "model=model", "policy=tuned/policies/best.yaml", says="was tuned on another model; give the model"
    )
