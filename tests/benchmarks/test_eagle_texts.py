"""The texts for training a head: they are what workload=file takes, long enough, and no line comes twice."""

from specdial.engine.tokenizer import Tokenizer
from specdial.engine.workloads import WorkloadSpec, build


def test_lines_make_a_workload(script, tmp_path, capsys):
    (tmp_path / "source").mkdir()
    for number in range(8):
        (tmp_path / "source" / f"m{number}.py").write_text(f"x{number} = 1\n" * 100)
    (tmp_path / "novel.txt").write_text(
        "\n".join(f"Line {i} of a story in which {i * i} things happen." for i in range(400))
    )
    out = tmp_path / "texts.jsonl"
    command = ["--code", str(tmp_path / "source"), "--novel", str(tmp_path / "novel.txt"), "--chars", "900"]
    script("eagle_texts").main([*command, "--lines", "4", "3", "2", "--out", str(out)])
    tokenizer = Tokenizer.of_bytes()
    tokenizer._backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    documents = build(WorkloadSpec("file", 600, 9, path=str(out)), tokenizer)
    assert sorted(d.meta["field"] for d in documents) == ["messages"] * 2 + ["text"] * 7
    assert all(len(d.prompt_ids) == 600 for d in documents)
    assert '"lines": 9' in capsys.readouterr().out
