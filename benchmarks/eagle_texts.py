"""Writes the texts that an EAGLE head is trained on: code, novels, and requests to summarise parts of novels.

One JSON object a line, `text` or `messages`, for workload=file. Code is whole files of a folder, joined until a line is
long enough; parts of novels overlap where there are many. Give other texts than those that engine/prompts.py makes
benchmark prompts of.

    python3 benchmarks/eagle_texts.py --code FOLDER --novel A.txt --chars 40000 --lines 300 60 60 --out texts.jsonl
"""

import argparse
import json
import random
from pathlib import Path

from specdial.engine.workloads.sources import source_tree, stdlib
from specdial.engine.workloads.summary import REQUEST


def code_lines(folder, chars, count):
    """`count` texts of at least `chars` characters of source, cut there. Fewer where the folder holds no more."""
    files = source_tree(folder) if folder else stdlib()
    random.Random(0).shuffle(files)
    made, text = [], ""
    for file in files:
        text += file.text
        if len(text) >= chars:
            made.append(text[:chars])
            text = ""
        if len(made) == count:
            break
    return made


def novel_lines(novels, chars, count, shift):
    """`count` parts of novels, evenly apart, each from the start of a line; they may overlap, but none comes twice.

    shift: of a part's distance from the next, where the first one begins.
    """
    made = []
    for number in range(count):
        novel = novels[number % len(novels)]
        place = (number // len(novels) + shift) / -(-count // len(novels))  # a fraction
        start = novel.find("\n", int(max(len(novel) - chars, 0) * place)) + 1
        made.append(novel[start : start + chars])
    return list(dict.fromkeys(made))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--code", help="a folder of Python source; default: the running Python's library")
    parser.add_argument("--novel", nargs="+", required=True, help="text files")
    parser.add_argument("--chars", type=int, default=40000, help="of a text; a token is three to four")
    parser.add_argument("--lines", nargs=3, type=int, default=[300, 60, 60], metavar=("CODE", "NOVEL", "SUMMARY"))
    parser.add_argument("--out", type=Path, required=True)
    a = parser.parse_args(argv)
    novels = [Path(name).read_text(encoding="utf-8") for name in a.novel]
    code, novel, summary = a.lines
    rows = [{"text": text} for text in code_lines(a.code, a.chars, code)]
    rows += [{"text": text} for text in novel_lines(novels, a.chars, novel, shift=0.0)]
    asked = [text + REQUEST for text in novel_lines(novels, a.chars, summary, shift=0.5)]
    rows += [{"messages": [{"role": "user", "content": text}]} for text in asked]
    a.out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(json.dumps({"out": str(a.out), "lines": len(rows), "bytes": a.out.stat().st_size}))


if __name__ == "__main__":
    main()
