"""The transformers target, held to the real library: the settings validate, and generation runs with them."""

import json

import pytest

from specdial.policies.errors import UserError
from specdial.policies.exporters import EXPORTERS, Options
from specdial.policies.schema import policy_from_mapping

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

LOOKUP = {"drafter": {"kind": "lookup", "ngram": 3}, "controller": {"kind": "fixed", "k": 4}}
MODEL = {"drafter": {"kind": "model", "model": "owner/small"}, "controller": {"kind": "fixed", "k": 3}}
SURE = {**MODEL, "controller": {"kind": "confidence", "k_max": 5, "threshold": 0.3}}
CELLS = {
    **MODEL,
    "cells": [{"from_batch": 2, "overrides": {"controller": {"k": 7}}}],
}


def exported(mapping):
    lowered = EXPORTERS["transformers"](policy_from_mapping(mapping), Options(), "mine")
    return json.loads(lowered.files[".json"]), lowered


def tiny(seed):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def plain():
    """(model, prompt, plain greedy output)."""
    model = tiny(0)
    prompt = torch.tensor([[5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6]])
    return model, prompt, model.generate(prompt, do_sample=False, max_new_tokens=12)


@pytest.mark.parametrize("mapping", [LOOKUP, MODEL, SURE, CELLS], ids=["lookup", "model", "confidence", "cells"])
def test_the_settings_validate_and_are_the_librarys_own(mapping):
    content, _ = exported(mapping)
    found = [content[name] for name in ("generation_config", "assistant_generation_config") if name in content]
    assert len(found) == 1
    known = vars(transformers.GenerationConfig())
    for fields in found:
        assert set(fields) <= set(known)
        config = transformers.GenerationConfig(**fields)
        config.validate(strict=True)
        assert {name: getattr(config, name) for name in fields} == fields


def test_prompt_lookup_generates_the_plain_output(plain):
    model, prompt, expected = plain
    content, _ = exported(LOOKUP)
    found = model.generate(prompt, do_sample=False, max_new_tokens=12, **content["generation_config"])
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("mapping", [MODEL, SURE], ids=["fixed", "confidence"])
def test_an_assistant_drafts_as_told_and_the_output_stays(plain, mapping, monkeypatch):
    model, prompt, expected = plain
    content, _ = exported(mapping)
    assistant = tiny(0)  # drafts what the target says, so that only the settings end a draft
    assistant.generation_config.update(**content["assistant_generation_config"])
    drafted = []
    generator = transformers.generation.candidate_generator.AssistedCandidateGenerator
    candidates = generator.get_candidates

    def watched(self, input_ids, *arguments, **named):
        found = candidates(self, input_ids, *arguments, **named)
        drafted.append(found[0].shape[1] - input_ids.shape[1])
        return found

    monkeypatch.setattr(generator, "get_candidates", watched)
    found = model.generate(prompt, do_sample=False, max_new_tokens=12, assistant_model=assistant)
    assert found.tolist() == expected.tolist()
    longest = content["assistant_generation_config"]["num_assistant_tokens"]
    assert max(drafted) <= longest
    if mapping is MODEL:
        assert set(drafted[:-1]) == {longest}  # constant, no threshold: every round but the last is full


def test_the_cell_of_batch_one_speaks():
    content, lowered = exported(CELLS)
    assert content["assistant_generation_config"]["num_assistant_tokens"] == 3
    assert [row.fate for row in lowered.rows if row.axis == "batch"] == ["dropped"]
    assert any("batch 1 only" in note for note in lowered.notes)


def test_an_eagle_head_cannot_stand_in():
    with pytest.raises(UserError, match="this target has no eagle3 drafter"):
        EXPORTERS["transformers"](policy_from_mapping(MODEL), Options(stand_in="eagle3", stand_in_model="h"), "mine")
