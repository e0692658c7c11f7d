"""Training an EAGLE head: the loss is the plain one, it falls, held-out drafts get better, a killed run goes on."""

import json
from functools import partial

import numpy as np
import pytest
import torch

from specdial.engine.eagle_training import (
    Unrolling,
    new_head,
    read_text,
    reduced_vocabulary,
    segment_loss,
    segments,
)
from specdial.engine.job import Job, empty_sequences
from specdial.engine.loop import Decoding
from specdial.engine.sampling import Sampling
from specdial.engine.verbs import train_eagle
from specdial.engine.weights.eagle import load_head
from specdial.engine.workloads import Document, WorkloadSpec
from specdial.policies.errors import UserError
from specdial.policies.schema import policy_from_mapping


def text_of(tokens, seed=0):
    return np.random.default_rng(seed).integers(0, 256, tokens).tolist()


@pytest.fixture(scope="module")
def model(tiny_model):
    """It writes after each token much the same one wherever it stands, and is sure of it: something can be learned."""
    model = tiny_model("llama", num_hidden_layers=4)
    for layer in model.decoder.layers:
        layer.out.mul_(0.2)
        layer.down.mul_(0.2)
    model.decoder.head.mul_(6)
    return model


@pytest.fixture(scope="module")
def job(model):
    """A target whose greedy text the head can learn: prompts share a beginning, so texts resemble each other."""
    spec = WorkloadSpec(kind="book", context_tokens=24, new_tokens=24)
    documents = [
        Document(i, f"d{i}", "validation" if i % 4 == 3 else "train", text_of(16) + text_of(8, i), 24) for i in range(8)
    ]
    return Job(model, "tiny", spec, documents)


def settings(out, **changes):
    given = {
        "model": {"source": "unused"}, "workload": {}, "out": str(out), "draft_vocab": 200, "epochs": 4,
        "learning_rate": 3e-3, "k": 3, "short_tokens": 16, "segment_tokens": 40, "checkpoint_documents": 2,
    }  # fmt: skip
    return {**given, **changes}


def test_the_most_frequent_tokens_make_the_reduced_vocabulary():
    assert reduced_vocabulary([[5, 5, 7], [7, 9, 5]], 12, 2).tolist() == [5, 7]
    assert reduced_vocabulary([[5, 5, 7]], 12, 4).tolist() == [0, 1, 5, 7]
    assert reduced_vocabulary([[1]], 3, 10).tolist() == [0, 1, 2]


@pytest.mark.parametrize(("tokens", "segment_tokens"), [(21, 64), (21, 20), (30, 8)])
def test_the_loss_is_that_of_drafting_from_every_row(model, make_attend, tokens, segment_tokens):
    """Row by row: keys of the rows up to it, then teacher-forced steps, as a round would draft them."""
    decoder, tokens, u = model.decoder, text_of(tokens, 3), Unrolling(steps=4, segment_tokens=segment_tokens)
    head = new_head(decoder, torch.arange(0, 288, 2), seed=1)
    text = read_text(decoder, tokens, head)
    at = torch.arange(len(tokens))[None]
    last, taps = decoder.forward_with_taps(torch.tensor([tokens]), at, make_attend(), head.config.taps)
    logits = decoder.logits(last)[0].double()
    n = len(tokens)
    cells = np.full((n - 1, u.steps), np.nan)
    for row in range(n - 1):
        rows, keep = row + 1, partial(make_attend(), 0)
        into = torch.tensor([tokens[1 : rows + 1]])
        output = head.forward(into, head.project(taps[:, :, :rows]), torch.arange(rows)[None], keep)[:, -1:]
        for step in range(u.steps):
            if row + 1 + step >= n:
                break
            if step:
                token = torch.tensor([[tokens[row + 1 + step]]])
                output = head.forward(token, output, torch.tensor([[row + step]]), keep)
            target = logits[row + 1 + step]
            if int(target.argmax()) % 2 == 0:
                wanted = torch.softmax(target[head.token_ids], -1)
                cells[row, step] = -(wanted * torch.log_softmax(head.logits(output)[0, 0].double(), -1)).sum()
    assert np.isfinite(cells).any(0).all()
    for first, stop in segments(n - 1, u):
        counted = np.isfinite(cells[first:stop]).sum(0)
        means = np.nansum(cells[first:stop], 0) / np.maximum(counted, 1)
        expected = (means * 0.8 ** np.arange(u.steps)).sum()
        loss = segment_loss(head, decoder.head[head.token_ids], text, (first, stop), u)
        assert float(loss) == pytest.approx(expected, rel=1e-4)


def test_loss_falls_and_held_out_drafts_get_better(job, tmp_path, capsys):
    result = train_eagle.run(settings(tmp_path / "out"), job)
    training = json.loads((tmp_path / "out" / "training.json").read_text())
    losses = [epoch["loss"] for epoch in training["epochs"]]
    assert len(losses) == 4
    assert losses[-1] < 0.8 * losses[0]
    accepted = training["accepted"]
    assert accepted["short"] > accepted["untrained_short"] + 0.2
    assert accepted["full"] == result["accepted"]["full"] > 0
    assert training["updates"] == 4 * 6 * 2 == result["updates"]
    assert "held-out mean accepted" in capsys.readouterr().out


def test_the_saved_head_drafts_as_it_was_judged(job, tmp_path):
    result = train_eagle.run(settings(tmp_path / "out", epochs=2), job)
    policy = policy_from_mapping(
        {"drafter": {"kind": "eagle", "model": result["head"]}, "controller": {"kind": "fixed", "k": 3}}
    )
    s = empty_sequences(job.model, 24 + 24, 1, [policy])
    accepted, rounds = 0, 0
    for document in job.documents[3::4]:
        s.prefill([document.prompt_ids], [document.new_tokens])
        for round_ in Decoding(s, policy, Sampling(), [0]).rounds():
            accepted, rounds = accepted + int(round_.accepted[0]), rounds + 1
    assert accepted / rounds == result["accepted"]["full"]


def test_a_killed_run_ends_as_if_it_had_not_been_killed(job, tmp_path, monkeypatch):
    whole = train_eagle.run(settings(tmp_path / "whole", epochs=2), job)
    learned = 0

    def learn(trainer, text, learn=train_eagle.Trainer.learn):
        nonlocal learned
        learned += 1
        if learned in (4, 10):  # a document past a checkpoint, the second time in another epoch
            raise KeyboardInterrupt
        return learn(trainer, text)

    monkeypatch.setattr(train_eagle.Trainer, "learn", learn)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            train_eagle.run(settings(tmp_path / "killed", epochs=2), job)
    killed = train_eagle.run(settings(tmp_path / "killed", epochs=2), job)
    files = [json.loads((tmp_path / name / "training.json").read_text()) for name in ("whole", "killed")]
    for name in ("losses", "epochs", "accepted"):
        assert files[0][name] == files[1][name]
    heads = [load_head(result["head"], job.model.decoder) for result in (whole, killed)]
    assert all(
        torch.equal(getattr(heads[0].weights, n), getattr(heads[1].weights, n)) for n in ("fc", "qkv", "lm_head")
    )


def test_a_damaged_checkpoint_is_refused(job, tmp_path):
    train_eagle.run(settings(tmp_path / "out", epochs=1), job)
    (tmp_path / "out" / "state.safetensors").write_bytes(b"short")
    with pytest.raises(UserError, match=r"state\.safetensors is damaged"):
        train_eagle.run(settings(tmp_path / "out", epochs=1), job)
