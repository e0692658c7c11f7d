"""Exporters: what is written obeys each engine's documented rules, and the report says what became of every axis."""

import itertools
import json
import shlex

import pytest
import yaml

from specdial.policies.errors import UserError
from specdial.policies.exporters import EXPORTERS, Options
from specdial.policies.exporters.lowering import plan
from specdial.policies.exporters.options import ENGINES
from specdial.policies.schema import plain_policy, policy_from_mapping

LOOKUP = {"name": "l", "drafter": {"kind": "lookup", "ngram": 4}, "controller": {"kind": "fixed", "k": 6}}
MODEL = {"name": "m", "drafter": {"kind": "model", "model": "owner/small"}, "controller": {"kind": "fixed", "k": 5}}
SPARSE = {"name": "s", "controller": {"kind": "fixed", "k": 8}}
RATE = {"name": "r", "drafter": {"kind": "model", "model": "d.gguf"}, "controller": {"kind": "rate", "k_max": 8}}
SURE = {
    "name": "c",
    "drafter": {"kind": "model", "model": "d.gguf"},
    "controller": {"kind": "confidence", "k_max": 7, "threshold": 0.6},
}


def fixed(k):
    return {"controller": {"kind": "fixed", "k": k} if k else {"kind": "none"}}


def celled(base, *cells):
    """cells: (from_context, to_context, from_batch, to_batch, k)."""
    names = ("from_context_tokens", "to_context_tokens", "from_batch", "to_batch")
    return {**base, "cells": [{**dict(zip(names, c)), "overrides": fixed(c[4])} for c in cells]}


# k 8 below batch 16, 3 to 63, none from 64 on; 2 more at long contexts of small batches.
BATCHED = celled(MODEL, (0, None, 1, 16, 8), (0, None, 16, 64, 3), (0, None, 64, None, 0))
GRID = celled(LOOKUP, (8192, None, 1, 16, 10), (0, None, 1, 16, 8), (0, None, 16, None, 0))


def lower(target, mapping, **options):
    return EXPORTERS[target](policy_from_mapping(mapping), Options(**options), "mine")


def parsed(target, lowered):
    """The main file as its engine reads it."""
    text = next(iter(lowered.files.values()))
    if target == "llama_cpp":
        return shlex.split(text)
    return json.loads(text) if next(iter(lowered.files)) == ".json" else yaml.safe_load(text)


def fates(lowered, axis):
    return [row.fate for row in lowered.rows if row.axis == axis]


# The engines' rules, as their documentation and sources give them (cited in each exporter).


def check_vllm(config, five=False):
    if config is None:
        return
    keys = {"method", "model", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"}
    assert set(config) <= {*keys, "num_speculative_tokens_per_batch_size"}
    assert config["method"] in ("ngram", "draft_model", "eagle", "eagle3")
    assert config["num_speculative_tokens"] > 0
    assert ("model" in config) == (config["method"] != "ngram")
    if config["method"] == "ngram":
        assert 1 <= config["prompt_lookup_min"] <= config["prompt_lookup_max"]
    entries = config.get("num_speculative_tokens_per_batch_size", [])
    assert all(len(e) == (5 if five else 3) for e in entries)
    assert all(0 <= e[-1] <= config["num_speculative_tokens"] for e in entries)
    for at in (0, 2) if five else (0,):
        ranges = sorted({(e[at], e[at + 1]) for e in entries})
        assert all(low <= high for low, high in ranges)
        assert not ranges or ranges[0][0] == 1
        assert all(b[0] == a[1] + 1 for a, b in itertools.pairwise(ranges))
    if five:
        assert len(entries) == len({tuple(e[:2]) for e in entries}) * len({tuple(e[2:4]) for e in entries})


def check_sglang(arguments, adaptive=None):
    if not arguments:
        return
    assert arguments["speculative-algorithm"] in ("NGRAM", "STANDALONE", "EAGLE", "EAGLE3")
    chained = arguments["speculative-algorithm"] != "NGRAM"
    assert ("speculative-draft-model-path" in arguments) == chained
    if chained:  # "leave all three unset, or set all three"; topk 1 makes them num_steps + 1
        assert arguments["speculative-eagle-topk"] == 1
        assert arguments["speculative-num-draft-tokens"] == arguments["speculative-num-steps"] + 1
    assert ("speculative-adaptive" in arguments) == (adaptive is not None)
    if adaptive is not None:
        assert arguments["speculative-algorithm"] in ("EAGLE", "EAGLE3")
        steps = [entry["candidate_steps"] for entry in adaptive.values()]
        assert all(key.isdigit() for key in adaptive)
        assert all(s and all(isinstance(k, int) and k >= 0 for k in s) for s in steps)
        assert arguments["speculative-num-steps"] in {k for s in steps for k in s}


def check_tensorrt_llm(content):
    config = content["speculative_config"]
    if config is None:
        return
    assert config["decoding_type"] in ("NGram", "Draft_Target", "Eagle3")
    assert config["max_draft_len"] > 0
    assert ("speculative_model" in config) == (config["decoding_type"] != "NGram")
    assert config.get("max_matching_ngram_size", 1) > 0
    schedule = config.get("draft_len_schedule")
    if schedule is not None:
        assert all(b >= 1 and 0 <= k <= config["max_draft_len"] for b, k in schedule.items())
        assert schedule[min(schedule)] == config["max_draft_len"]


def check_transformers(content):
    assert set(content) <= {"generation_config", "assistant_model", "assistant_generation_config"}


def check_llama_cpp(arguments):
    assert arguments[0] == "--spec-type"
    assert arguments[1] in ("none", "draft-simple", "draft-eagle3", "ngram-simple")
    assert all(flag.startswith("--spec-") for flag in arguments[::2])
    assert len(arguments) % 2 == 0


CHECKS = {
    "vllm": check_vllm,
    "sglang": check_sglang,
    "tensorrt_llm": check_tensorrt_llm,
    "transformers": check_transformers,
    "llama_cpp": check_llama_cpp,
}
BASES = {"lookup": LOOKUP, "model": MODEL, "rate": RATE, "sure": SURE, "batched": BATCHED, "grid": GRID}
HEAD = {"name": "h", "drafter": {"kind": "eagle", "model": "owner/head"}, "controller": {"kind": "fixed", "k": 4}}


@pytest.mark.parametrize("target", ENGINES)
@pytest.mark.parametrize("base", BASES)
def test_every_engine_takes_what_is_written(target, base):
    lowered = lower(target, BASES[base])
    CHECKS[target](parsed(target, lowered))
    assert {row.axis for row in lowered.rows} >= {"drafter", "k"}
    assert {row.fate for row in lowered.rows} <= {"kept", "approximated", "dropped"}
    assert all(row.note and row.cell for row in lowered.rows)


def test_our_eagle_heads_are_eagle_3s():
    assert parsed("vllm", lower("vllm", HEAD))["method"] == "eagle3"
    assert parsed("sglang", lower("sglang", HEAD))["speculative-algorithm"] == "EAGLE3"
    assert parsed("tensorrt_llm", lower("tensorrt_llm", HEAD))["speculative_config"]["decoding_type"] == "Eagle3"
    assert parsed("llama_cpp", lower("llama_cpp", HEAD))[1] == "draft-eagle3"
    assert {row.fate for row in lower("vllm", HEAD).rows} == {"kept"}
    tree = {**HEAD, "drafter": {**HEAD["drafter"], "tree": {"width": 4, "nodes": 20}}}
    arguments = parsed("sglang", lower("sglang", tree))
    assert [arguments[f"speculative-{name}"] for name in ("num-steps", "eagle-topk", "num-draft-tokens")] == [4, 4, 21]
    assert {row.fate for row in lower("sglang", tree).rows} == {"kept"}
    assert ("drafter.tree", "dropped") in {(row.axis, row.fate) for row in lower("vllm", tree).rows}
    assert lower("vllm", tree).effective.drafter.tree is None
    silent = {**tree, "cells": [{"from_batch": 9, "overrides": {"controller": {"kind": "none"}}}]}
    varying = lower("sglang", silent)
    assert parsed("sglang", varying)["speculative-eagle-topk"] == 1, "its adaptive lengths know no trees"
    assert ("drafter.tree", "dropped") in {(row.axis, row.fate) for row in varying.rows}
    with pytest.raises(UserError, match="drafts by eagle, which this target has not"):
        lower("transformers", HEAD)
    rate = {**HEAD, "controller": {"kind": "rate", "k_max": 8, "k_set": [2, 5]}}
    lowered = lower("sglang", rate)
    check_sglang(parsed("sglang", lowered), json.loads(lowered.files[".adaptive.json"]))
    assert fates(lowered, "k") == ["approximated"]


@pytest.mark.parametrize("target", ENGINES)
def test_a_plain_policy_is_exported_as_no_speculation(target):
    lowered = EXPORTERS[target](plain_policy(), Options(), "mine")
    content = parsed(target, lowered)
    assert content in (None, {}, {"speculative_config": None}, ["--spec-type", "none"])
    assert {row.fate for row in lowered.rows} == {"kept"}


@pytest.mark.parametrize("target", ENGINES)
def test_a_drafter_no_engine_has_is_refused_until_another_stands_in(target):
    with pytest.raises(UserError, match=r"policy s drafts by sparse_self.* nothing of it would remain; add stand_in"):
        lower(target, SPARSE)
    lowered = lower(target, SPARSE, stand_in="lookup")
    CHECKS[target](parsed(target, lowered))
    assert fates(lowered, "drafter")[0] == "approximated"
    assert fates(lowered, "draft_kv") == ["dropped"]
    assert lowered.effective is None
    assert ("9" if target == "sglang" else "8") in next(iter(lowered.files.values()))


def test_where_some_cells_can_be_said_the_others_are_plain_and_reported():
    mixed = {
        **SPARSE,
        "cells": [{"from_batch": 8, "overrides": {"drafter": {"kind": "lookup"}, "controller": {"k": 4}}}],
    }
    lowered = lower("vllm", mixed)
    assert parsed("vllm", lowered)["num_speculative_tokens_per_batch_size"] == [[1, 7, 0], [8, 512, 4]]
    dropped = [row for row in lowered.rows if row.axis == "drafter" and row.fate == "dropped"]
    assert [row.cell for row in dropped] == ["elsewhere"]


def test_partial_verification_and_scoring_heads_are_reported():
    lossy = {
        **MODEL,
        "verify_kv": {"mode": "partial", "full_period": 8, "source": "history", "scope": "model"},
        "scoring_heads": {"target": [[1, 2]]},
    }
    lowered = lower("vllm", lossy)
    assert fates(lowered, "verify_kv") == ["dropped"]
    assert fates(lowered, "scoring_heads") == ["dropped"]


def test_every_cell_says_what_the_engine_does_where_it_speaks():
    def of(target, **options):
        return [(row.cell[:9], row.fate, row.note) for row in lower(target, GRID, **options).rows if row.axis == "k"]

    long, short, none, rest = of("vllm", vllm_context_ranges=True)
    assert [row[1] for row in (long, short, none, rest)] == ["kept"] * 4
    assert rest[2] == "never speaks: cells before it cover it"
    long, short, none, rest = of("vllm")
    assert (long[1], short[1:], none[1]) == ("kept", ("approximated", "k 8: 10 here"), "kept")
    long, short, none, rest = of("llama_cpp")
    assert (long[1], short[1:]) == ("kept", ("approximated", "k 8: 10 here"))
    assert none[1:] == ("dropped", "no speculation: 10 here")
    long, short, none, rest = of("llama_cpp", batch=16)
    assert long[1:] == ("dropped", "k 10: no speculation here")


class TestVllm:
    def test_lookup(self):
        assert parsed("vllm", lower("vllm", LOOKUP)) == {
            "method": "ngram",
            "num_speculative_tokens": 6,
            "prompt_lookup_max": 4,
            "prompt_lookup_min": 1,
        }

    def test_k_by_batch(self):
        config = parsed("vllm", lower("vllm", BATCHED, max_batch=256))
        assert config["method"] == "draft_model"
        assert config["num_speculative_tokens"] == 8
        assert config["num_speculative_tokens_per_batch_size"] == [[1, 15, 8], [16, 63, 3], [64, 256, 0]]

    def test_context_ranges_only_when_asked(self):
        lowered = lower("vllm", GRID)
        check_vllm(parsed("vllm", lowered))
        assert parsed("vllm", lowered)["num_speculative_tokens_per_batch_size"] == [[1, 15, 10], [16, 512, 0]]
        assert fates(lowered, "context") == ["dropped"]
        short = lower("vllm", GRID, context_tokens=100)
        assert parsed("vllm", short)["num_speculative_tokens_per_batch_size"] == [[1, 15, 8], [16, 512, 0]]

        ranged = lower("vllm", GRID, vllm_context_ranges=True)
        config = parsed("vllm", ranged)
        check_vllm(config, five=True)
        assert [1, 15, 1, 8191, 8] in config["num_speculative_tokens_per_batch_size"]
        assert [1, 15, 8192, 2**31 - 1, 10] in config["num_speculative_tokens_per_batch_size"]
        assert fates(ranged, "context") == ["kept"]
        assert any("no release" in note for note in ranged.notes)

    def test_stand_ins(self):
        config = parsed("vllm", lower("vllm", SPARSE, stand_in="eagle3", stand_in_model="owner/head"))
        assert config == {"method": "eagle3", "num_speculative_tokens": 8, "model": "owner/head"}


class TestSglang:
    def test_models_and_lookup(self):
        assert parsed("sglang", lower("sglang", MODEL)) == {
            "speculative-algorithm": "STANDALONE",
            "speculative-draft-model-path": "owner/small",
            "speculative-num-steps": 5,
            "speculative-eagle-topk": 1,
            "speculative-num-draft-tokens": 6,
        }
        assert parsed("sglang", lower("sglang", LOOKUP))["speculative-num-draft-tokens"] == 7

    def test_without_eagle_k_cannot_vary(self):
        lowered = lower("sglang", BATCHED, batch=20)
        assert parsed("sglang", lowered)["speculative-num-steps"] == 3
        assert fates(lowered, "batch") == ["dropped"]

    def test_eagle_heads_take_steps_by_batch(self):
        lowered = lower("sglang", BATCHED, stand_in="eagle", stand_in_model="owner/head")
        arguments = parsed("sglang", lowered)
        adaptive = json.loads(lowered.files[".adaptive.json"])
        assert adaptive == {f"{b}": {"candidate_steps": [k]} for b, k in ((1, 8), (16, 3), (64, 0))}
        assert arguments["speculative-adaptive-config"] == "mine.adaptive.json"
        check_sglang(arguments, adaptive)
        assert fates(lowered, "batch") == ["kept"]

    def test_a_rate_controllers_lengths_are_candidates(self):
        rate = {**RATE, "controller": {"kind": "rate", "k_max": 8, "k_set": [1, 4]}}
        lowered = lower("sglang", rate, stand_in="eagle3", stand_in_model="owner/head")
        adaptive = json.loads(lowered.files[".adaptive.json"])
        check_sglang(parsed("sglang", lowered), adaptive)
        assert adaptive["1"]["candidate_steps"] == [1, 4]  # the set bounds k_max


class TestTensorrtLlm:
    def test_lookup_and_models(self):
        assert parsed("tensorrt_llm", lower("tensorrt_llm", LOOKUP)) == {
            "speculative_config": {"decoding_type": "NGram", "max_draft_len": 6, "max_matching_ngram_size": 4}
        }
        config = parsed("tensorrt_llm", lower("tensorrt_llm", MODEL))["speculative_config"]
        assert config == {"decoding_type": "Draft_Target", "max_draft_len": 5, "speculative_model": "owner/small"}

    def test_both_meanings_of_a_schedule(self):
        def schedule(**options):
            content = parsed("tensorrt_llm", lower("tensorrt_llm", BATCHED, **options))
            check_tensorrt_llm(content)
            return content["speculative_config"]["draft_len_schedule"]

        assert schedule() == {15: 8, 63: 3}  # above the last key nothing is drafted
        assert schedule(trtllm_schedule="from") == {1: 8, 16: 3, 64: 0}

    def test_no_draft_is_longer_than_the_smallest_batchs(self):
        rising = celled(MODEL, (0, None, 1, 4, 2), (0, None, 4, None, 6))
        lowered = lower("tensorrt_llm", rising)
        config = parsed("tensorrt_llm", lowered)["speculative_config"]
        assert config["max_draft_len"] == 2
        assert "draft_len_schedule" not in config
        assert "approximated" in fates(lowered, "k")


class TestLlamaCpp:
    def test_models(self):
        lowered = lower("llama_cpp", SURE)
        text = "--spec-type draft-simple --spec-draft-model d.gguf --spec-draft-n-max 7 --spec-draft-n-min 0"
        assert parsed("llama_cpp", lowered) == [*text.split(), "--spec-draft-p-min", "0.6"]
        older = "-md d.gguf --draft-max 7 --draft-min 0 --draft-p-min 0.6"
        assert any(older in note for note in lowered.notes)
        assert fates(lowered, "k") == ["approximated"]

    def test_lookup(self):
        text = "--spec-type ngram-simple --spec-ngram-simple-size-n 4 --spec-ngram-simple-size-m 6"
        assert parsed("llama_cpp", lower("llama_cpp", LOOKUP)) == text.split()

    def test_a_model_name_stays_one_argument(self):
        name = "a b; $(touch x)'.gguf"
        lowered = lower("llama_cpp", {**MODEL, "drafter": {"kind": "model", "model": name}})
        assert parsed("llama_cpp", lowered)[3] == name


@pytest.mark.parametrize("name", ["--tools", "-md", "a\nb", "a\x1bb", "a\u2028b"])
@pytest.mark.parametrize("target", ENGINES)
def test_model_names_that_could_be_options_are_refused(target, name):
    with pytest.raises(UserError, match=r"drafter.model is .*; use printable characters"):
        lower(target, {**MODEL, "drafter": {"kind": "model", "model": name}})
    with pytest.raises(UserError, match="stand_in_model is"):
        lower(target, SPARSE, stand_in="model", stand_in_model=name)


@pytest.mark.parametrize(
    ("expected", "k"),
    [({"k": 3.4}, 3), ({"k": 0.2}, 1), ({"k": 99.0}, 8), ({"k": True}, 8), ({"k": None}, 8), (None, 8)],
)
def test_an_adaptive_controller_becomes_the_k_it_is_predicted_to_draft(expected, k):
    lowered = lower("vllm", {**RATE, "expected": expected})
    assert parsed("vllm", lowered)["num_speculative_tokens"] == k
    assert "approximated" in fates(lowered, "k")


def test_every_engine_has_a_check():
    assert set(ENGINES) == set(CHECKS)


def test_which_cell_speaks_and_which_neighbours_are_joined():
    """Contexts from 0 and 8192, batches from 1, 16 and 64; the last two draft alike."""
    mapping = celled(MODEL, (8192, None, 1, 16, 10), (0, None, 1, 16, 8), (0, None, 16, 64, 5))

    def made(**options):
        return plan(policy_from_mapping(mapping), Options(**options), ["model"])

    found = made()
    assert (found.contexts, found.batches) == (((0, 8192), (8192, None)), ((1, 16), (16, 64), (64, None)))
    assert (found.k, found.kind) == (((8, 5, 5), (10, 5, 5)), "model")
    assert (found.at_context, found.at_batch, found.fixed_k) == (1, 0, 10)  # no batch is given: 1
    assert [made(context_tokens=n).at_context for n in (0, 8191, 8192, 99999)] == [0, 0, 1, 1]
    assert [made(batch=n).at_batch for n in (1, 15, 16, 63, 64, 900)] == [0, 0, 1, 1, 2, 2]
    assert found.by_batch(0) == ((1, 16, 8), (16, None, 5))
    assert (found.varies_by_context, found.varies_by_batch) == (True, True)
    predicted = plan(policy_from_mapping({**mapping, "expected": {"batch": 32}}), Options(), ["model"])
    assert predicted.at_batch == 1
    same = plan(policy_from_mapping(MODEL), Options(), ["model"])
    assert (same.varies_by_context, same.varies_by_batch, same.fixed_k) == (False, False, 5)
    assert same.effective(0) == plain_policy()
    assert same.effective(1).k_max == 1
    assert (same.effective(3).k_max, same.effective(3).drafter.model) == (3, "owner/small")
    stand_in = plan(policy_from_mapping(SPARSE), Options(stand_in="lookup"), ["lookup"])
    assert (stand_in.kind, stand_in.effective(4)) == ("lookup", None)
