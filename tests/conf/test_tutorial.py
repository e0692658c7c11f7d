"""Every command of the tutorial, run in order as it stands, on a tiny model, with fewer trials and shorter answers."""

import json
import re
import shlex
from pathlib import Path

from specdial.policies.file import load_policy

TUTORIAL = Path(__file__).resolve().parents[2] / "docs" / "tutorial.md"


def commands():
    """The arguments of its `specdial` commands, in order."""
    blocks = "\n".join(re.findall(r"^```sh\n(.*?)^```", TUTORIAL.read_text("utf-8"), re.MULTILINE | re.DOTALL))
    lines = re.sub(r"\\\n\s*", " ", blocks).splitlines()
    return [shlex.split(line)[1:] for line in lines if line.startswith("specdial ")]


def test_the_tutorial_runs(tiny_checkpoint, cli):
    model = str(tiny_checkpoint("llama", max_position_embeddings=2048))
    smaller = {"model.gguf": model, "trials=200": "trials=10", "new_tokens=32": "new_tokens=8", "k=1,2,4": "k=1,4"}
    smaller["budget=64,128"] = "budget=64"
    Path("mine.txt").write_text("\n\n".join(f"Paragraph {i}, on {i * i} things that happened." for i in range(600)))
    Path("prompt.txt").write_text("Once upon a time")
    ran = []
    for verb, *arguments in commands():
        for what, by in smaller.items():
            arguments = [argument.replace(what, by) for argument in arguments]
        if verb == "doctor":  # tests/engine/test_doctor.py runs it
            continue
        result = cli(verb, *arguments)
        assert result.code == 0, (verb, result.err)
        ran.append(verb)
    assert set(ran) == {"record", "calibrate", "replay", "tune", "validate", "report", "export", "run"}
    assert load_policy(Path("best.yaml")).lossless
    assert json.loads(Path("metrics.json").read_text())["new_tokens"] == 8
    validation = json.loads(Path("runs/validation/validation.json").read_text())
    assert [row["measured"]["documents_differing_from_plain"] for row in validation["policies"]] == [0]
    assert Path("report.html").stat().st_size > 1_000_000
