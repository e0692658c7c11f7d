"""Importers of lengths and of texts: a mix that a recording is put in, and prompts that the file workload takes."""

import json

import numpy as np
import pytest

from specdial.engine.trace.reader import read_trace
from specdial.engine.workloads import WorkloadSpec, build
from specdial.policies.errors import UserError
from specdial.simulator.lanes import read_record
from specdial.simulator.load import trace_caveats
from specdial.simulator.synthetic import Shape, write_trace
from specdial.simulator.verbs import import_logs


def write_lines(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def test_traffic_becomes_a_mix_and_puts_a_recording_in_it(tmp_path, capsys):
    lengths = [(500, 30)] * 6 + [(300, 30)] * 2 + [(9000, 80)]
    rows = [
        {"timestamp": 27 * i, "input_length": c, "output_length": n, "hash_ids": [0, i]}
        for i, (c, n) in enumerate(lengths)
    ]
    rows.append({"timestamp": 999, "input_length": 70, "output_length": 0, "hash_ids": []})
    source = write_lines(tmp_path / "trace.jsonl", rows)
    with (tmp_path / "trace.csv").open("w") as file:
        file.write("TIMESTAMP,ContextTokens,GeneratedTokens\n")
        file.writelines(f'"2023-11-16 18:15:{i:02d}.9930000",{c},{n}\n' for i, (c, n) in enumerate(lengths))
    mooncake = import_logs.run({"format": "mooncake", "source": source, "out": str(tmp_path / "m")})
    azure = import_logs.run({"format": "azure", "source": str(tmp_path / "trace.csv"), "out": str(tmp_path / "a")})
    assert mooncake["mix"] == azure["mix"]
    assert [row["from_context_tokens"] for row in azure["mix"]] == [256, 8192]
    assert azure["mix"][0]["tokens_frac"] == pytest.approx(240 / 320)
    assert azure["mix"][0]["mean_context_tokens"] == pytest.approx(450.0)
    assert json.loads((tmp_path / "m" / "mix.json").read_text())["mix"] == azure["mix"]
    write_trace(tmp_path / "book", Shape(documents=3))
    again = {"format": "mooncake", "source": source, "trace": str(tmp_path / "book"), "documents": 7}
    told = import_logs.run({**again, "out": str(tmp_path / "mixed")})
    assert told["mixed"] == {"documents": 7, "distinct": 3, "covered_frac": pytest.approx(0.75)}
    mixed, book = read_record(read_trace(tmp_path / "mixed" / "trace")), read_record(read_trace(tmp_path / "book"))
    assert trace_caveats(mixed.trace)[-1] == "documents repeated, intervals too narrow"
    assert trace_caveats(mixed.trace)[:-1] == trace_caveats(book.trace)
    assert np.array_equal(mixed.run[-len(book.run) // 3 :], book.run[: len(book.run) // 3])  # the seventh is the first
    rows[0]["input_length"] = 70_000
    source = write_lines(tmp_path / "long.jsonl", rows[:1])
    with pytest.raises(UserError, match=r"has contexts of 256\.\.511, the requests have others"):
        import_logs.run({**again, "source": source, "out": str(tmp_path / "none")})


class Words:
    """A tokenizer of a token a character."""

    def encode(self, text, *, add_special=False):
        return [ord(c) for c in text]

    def chat(self, messages):
        return self.encode("".join(f"{m['role']}: {m['content']}\n" for m in messages))


@pytest.mark.parametrize("form", ["array", "lines", "longbench", "pg19", "books"])
def test_texts_become_prompts_that_the_file_workload_takes(tmp_path, form):
    turns = [{"from": "human", "value": "How far is the moon?"}, {"from": "gpt", "value": "Far."}]
    chats = [{"id": "a", "conversations": [*turns, {"from": "human", "value": "And the sun?"}, turns[1]]}]
    chats += [
        {"id": "b", "conversations": turns},
        {"id": "c", "conversations": turns},
        {"id": "d", "conversations": turns[1:]},
    ]
    bench = [{"context": f"The box {i} is red.", "input": "Which?", "answers": ["red"], "_id": i} for i in range(2)]
    books = [
        {"short_book_title": "T", "publication_date": 1900, "url": "u", "text": f"Book {i} of two."} for i in range(2)
    ]
    source = tmp_path / "in.jsonl"
    if form == "array":
        source.write_text(json.dumps(chats, indent=1))
    elif form == "books":
        source = tmp_path / "train"
        source.mkdir()
        for i, book in enumerate(books):
            (source / f"{i}.txt").write_text(book["text"])
    else:
        write_lines(source, {"lines": chats, "longbench": bench, "pg19": books}[form])
    name = {"array": "sharegpt", "lines": "sharegpt", "books": "pg19"}.get(form, form)
    told = import_logs.run({"format": name, "source": str(source), "out": str(tmp_path / "out.jsonl")})
    assert told["prompts"] == 2
    spec = WorkloadSpec("file", context_tokens=500, documents=2, path=str(tmp_path / "out.jsonl"), keep_short=True)
    texts = {"".join(map(chr, d.prompt_ids)) for d in build(spec, Words())}
    first = {
        "sharegpt": "user: How far is the moon?\nassistant: Far.\nuser: And the sun?\n",
        "longbench": "The box 0 is red.\n\nWhich?",
        "pg19": "Book 0 of two.",
    }[name]
    assert first in texts


@pytest.mark.parametrize(
    ("format_", "given", "says"),
    [
        ("step_times", {"batch": 16}, "batch is given, which format step_times does not use; it is for vllm, vllm_met"),
        ("step_times", {"documents": 3}, "documents is given, which format step_times does not use"),
        ("step_times", {"trace": "t"}, "trace is given, which format step_times does not use; it is for mooncake, az"),
        ("sharegpt", {"batch": 7}, "batch is given, which format sharegpt does not use"),
        ("sharegpt", {"model_name": "foo"}, "model_name is given, which format sharegpt does not use"),
        ("sharegpt", {"drafter": {"kind": "lookup"}}, "drafter is given, which format sharegpt does not use"),
        ("azure", {"hardware_name": "theirs"}, "hardware_name is given, which format azure does not use"),
        ("azure", {"documents": 7}, "documents is given, and nothing is recorded in this mix; add trace=DIRECTORY"),
    ],
)
def test_settings_that_a_format_does_not_use_are_refused(tmp_path, format_, given, says):
    text = {
        "step_times": "op,context_tokens,batch,k,us\nplain,9,1,0,5\n",
        "sharegpt": json.dumps({"conversations": [{"from": "human", "value": "Hi"}]}),
        "azure": "ContextTokens,GeneratedTokens\n4,2\n",
    }[format_]
    (tmp_path / "in").write_text(text)
    settings = {"format": format_, "source": str(tmp_path / "in"), "out": str(tmp_path / "o")}
    with pytest.raises(UserError) as caught:
        import_logs.run({**settings, **given})
    assert says in str(caught.value)
    assert not (tmp_path / "o").exists()
    drafter = {"kind": None, "model": None, "ngram": None}
    defaults = {"model_name": "imported", "drafter": drafter, "batch": 1, "documents": 256, "kv_bytes_per_token": 0.0}
    import_logs.run({**settings, **defaults, "hardware_name": "another engine", "trace": None})
