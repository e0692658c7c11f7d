"""Training an EAGLE head: the loss is the plain one, it falls, held-out drafts get better, a killed run goes on."""

import json
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from specdial.engine import job as engine_job
from specdial.engine.eagle_lessons import in_order, lessons
from specdial.engine.eagle_memory import TrainingDemand, training_memory
from specdial.engine.eagle_training import (
    Unrolling,
    new_config,
    new_head,
    read_text,
    reduced_vocabulary,
    segment_loss,
    segments,
)
from specdial.engine.job import Job, empty_sequences
from specdial.engine.loop import Decoding
from specdial.engine.models.eagle import HeadWeights
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


@pytest.fixture(autouse=True)
def no_collecting(monkeypatch):
    """Free memory is asked for often, and each time Python's garbage is collected, which takes half a second here."""
    for module in (train_eagle, engine_job):
        monkeypatch.setattr(module, "free_bytes", lambda device: 1 << 40)


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
        "learning_rate": 3e-3, "k": 3, "short_tokens": 16, "segment_tokens": 40, "checkpoint_minutes": 0.01,
    }  # fmt: skip
    return {**given, **changes}


def test_the_most_frequent_tokens_make_the_reduced_vocabulary():
    assert reduced_vocabulary([[5, 5, 7], [7, 9, 5]], 12, 2).tolist() == [5, 7]
    assert reduced_vocabulary([[5, 5, 7]], 12, 4).tolist() == [0, 1, 5, 7]
    assert reduced_vocabulary([[1]], 3, 10).tolist() == [0, 1, 2]


def row_losses(decoder, head, tokens, steps, attend):
    """Loss tensors [n - 1, steps] of one text, None where a row carries none: row by row, as a round would draft."""
    n, at = len(tokens), torch.arange(len(tokens))[None]
    last, taps = decoder.forward_with_taps(torch.tensor([tokens]), at, attend(), head.config.taps)
    logits, losses = decoder.logits(last)[0], []
    for row in range(n - 1):
        rows, keep = row + 1, partial(attend(), 0)
        into = torch.tensor([tokens[1 : rows + 1]])
        output = head.forward(into, head.project(taps[:, :, :rows]), torch.arange(rows)[None], keep)[:, -1:]
        losses.append([None] * steps)
        for step in range(min(steps, n - 1 - row)):
            if step:
                token = torch.tensor([[tokens[row + 1 + step]]])
                output = head.forward(token, output, torch.tensor([[row + step]]), keep)
            target = logits[row + 1 + step]
            if int(target.argmax()) in head.token_ids:
                wanted = torch.softmax(target[head.token_ids], -1)
                losses[row][step] = -(wanted * torch.log_softmax(head.logits(output)[0, 0], -1)).sum()
    return losses


@pytest.mark.parametrize(("tokens", "segment_tokens"), [(21, 64), (21, 20), (30, 8)])
def test_the_loss_is_that_of_drafting_from_every_row(model, make_attend, tokens, segment_tokens):
    """Of two texts at once. Its gradients too, where a text is one segment: attention and loss make their own."""
    decoder, u = model.decoder, Unrolling(steps=4, segment_tokens=segment_tokens)
    texts = [text_of(tokens, 3), text_of(tokens, 4)]
    head = new_head(decoder, torch.arange(0, 288, 2), seed=1)
    trained = [getattr(head.weights, name).requires_grad_() for name in HeadWeights.__slots__]
    rows = [row_losses(decoder, head, text, u.steps, make_attend) for text in texts]
    text = read_text(decoder, texts, head)
    for first, stop in segments(tokens - 1, u):
        expected = 0.0
        for step in range(u.steps):
            found = [row[step] for losses in rows for row in losses[first:stop] if row[step] is not None]
            expected = expected + u.decay**step * torch.stack(found).mean() if found else expected
        loss = segment_loss(head, text, (first, stop), u)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
        if stop - first == tokens - 1:
            for got, wanted in zip(torch.autograd.grad(loss, trained), torch.autograd.grad(expected, trained)):
                torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-5)


def test_long_texts_are_learned_whole_and_in_parts():
    texts = [list(range(70)), list(range(30)), list(range(32))]
    made = lessons(texts, short_tokens=16, segment_tokens=40)
    assert [(lesson.text, lesson.starts, lesson.tokens) for lesson in made] == [
        (0, (0,), 70), (0, (6, 22), 16), (0, (38, 54), 16), (1, (0,), 30), (2, (0,), 32), (2, (0, 16), 16),
    ]  # fmt: skip
    assert made[2].of(texts) == [list(range(38, 54)), list(range(54, 70))]
    order = [next_ for next_, _ in zip(in_order(made, 1, 0), range(12))]
    assert all(sorted(epoch, key=made.index) == made for epoch in (order[:6], order[6:]))
    assert order[:6] != order[6:]
    assert [next_ for next_, _ in zip(in_order(made, 1, 8), range(4))] == order[8:]


def test_memory_is_predicted_before_it_is_taken(model, job, tmp_path, monkeypatch):
    """What an update keeps for its gradients is within the prediction; a byte less than that is refused in a line."""
    config = model.config
    demand = TrainingDemand(config, new_config(config, 200), torch.float32, False, 48, 40, 7)
    needed = training_memory(demand)
    head = new_head(model.decoder, torch.arange(200), seed=0)
    text = read_text(model.decoder, [text_of(41)], head)
    for name in HeadWeights.__slots__:
        getattr(head.weights, name).requires_grad_()
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        segment_loss(head, text, (0, 40), Unrolling(steps=7))
    held = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    assert 0.3 * needed.update < held < needed.update + needed.text + needed.optimiser
    monkeypatch.setattr(train_eagle, "free_bytes", lambda device: needed.total - 1)
    with pytest.raises(UserError, match=r"training on texts of 48 tokens needs .* lower segment_tokens to \d+ or"):
        train_eagle.run(settings(tmp_path / "out"), job)
    assert not (tmp_path / "out").exists()


def test_loss_falls_and_held_out_drafts_get_better(job, tmp_path, capsys):
    result = train_eagle.run(settings(tmp_path / "out", own_documents=5, batch=2, int8=True), job)
    training = json.loads((tmp_path / "out" / "training.json").read_text())
    losses = [epoch["loss"] for epoch in training["epochs"]]
    assert len(losses) == 4
    assert losses[-1] < 0.8 * losses[0]
    accepted = training["accepted"]
    assert accepted["trained"]["short"] > accepted["untrained"]["short"] + 0.2
    assert accepted["trained"] == result["accepted"]
    assert accepted["trained"]["full"] > accepted["untrained"]["full"]
    assert accepted["in 8 bits"]["full"] == pytest.approx(accepted["trained"]["full"], abs=0.2)
    # Whole texts of 47 rows in two segments each, and their three short parts two at a time; one is but a prompt.
    assert training["updates"] == 4 * (5 * (2 + 2) + 1) == result["updates"]
    assert (training["texts"], training["own_texts"]) == (6, 5)
    assert "held-out mean accepted" in capsys.readouterr().out


def test_minutes_end_a_training_and_what_is_left_of_them_is_learned_by_the_next(job, tmp_path, monkeypatch):
    """Of 6 s, a second a lesson: killed in the third, which is learned again."""
    seconds = iter(range(10_000))
    monkeypatch.setattr(train_eagle, "time", SimpleNamespace(monotonic=lambda: next(seconds) / 10))
    learned = []

    def learn(trainer, text, done_frac, learn=train_eagle.Trainer.learn):
        learned.append(done_frac)
        if len(learned) == 3:
            raise KeyboardInterrupt
        return learn(trainer, text, done_frac)

    monkeypatch.setattr(train_eagle.Trainer, "learn", learn)
    with pytest.raises(KeyboardInterrupt):
        train_eagle.run(settings(tmp_path / "out", minutes=0.025, checkpoint_minutes=0.0), job)
    train_eagle.run(settings(tmp_path / "out", minutes=0.025, checkpoint_minutes=0.0), job)
    assert learned == sorted(learned)
    assert learned[2] == learned[3] < 1
    training = json.loads((tmp_path / "out" / "training.json").read_text())
    assert 1.5 <= training["seconds"] < 2
    assert training["epochs"] == []
    assert len(training["losses"]) == len(learned) - 1


def test_the_saved_head_drafts_as_it_was_judged(job, tmp_path):
    result = train_eagle.run(settings(tmp_path / "out", epochs=1), job)
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

    def learn(trainer, text, done_frac, learn=train_eagle.Trainer.learn):
        nonlocal learned
        learned += 1
        if learned in (4, 30):  # a lesson past a checkpoint, the second time in another epoch
            raise KeyboardInterrupt
        return learn(trainer, text, done_frac)

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
    train_eagle.run(settings(tmp_path / "out", minutes=0.0), job)
    (tmp_path / "out" / "state.safetensors").write_bytes(b"short")
    with pytest.raises(UserError, match=r"state\.safetensors is damaged"):
        train_eagle.run(settings(tmp_path / "out", minutes=0.0), job)
