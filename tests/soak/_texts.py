"""Small whole files of other tools and of the user's own texts, and what reads each: for the fuzzer to damage."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _edits import edited, reshaped

from specdial.engine.requests import documents, read_requests
from specdial.engine.tokenizer import Tokenizer
from specdial.engine.workloads import WorkloadSpec, build
from specdial.policies.schema import Drafter
from specdial.simulator.importers import IMPORTERS
from specdial.simulator.importers.lengths import mix_of
from specdial.simulator.importers.prompts import write_prompts
from specdial.simulator.importers.step_times import cost_rows
from specdial.simulator.importers.traces import About, write_requests

STEPS = {"num_spec_steps": 3, "num_accepted_draft_tokens": 3, "num_draft_tokens": 6, "num_spec_tokens": 2}
COUNTS = {**STEPS, "acceptance_histogram": [1, 1, 1], "per_step_accepted": [0, 1, 2], "per_step_drafted": [2, 2, 2]}
LENGTHS = {"input_sequence_length": {"value": 550}, "output_sequence_length": {"value": 7}}
TURNS = [{"from": "human", "value": "How far?"}, {"from": "gpt", "value": "Far."}, {"from": "human", "value": "And?"}]
SCRAPE = """vllm:spec_decode_num_drafts_total{engine="0"} 100.0
vllm:spec_decode_num_draft_tokens_total{engine="0"} 200.0
vllm:prompt_tokens_total{engine="0"} 4000.0
vllm:request_success_total{engine="0",finished_reason="stop"} 4.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 60.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 30.0
"""
# format: the file's text, a JSON object where its only line is one
FILES: dict[str, Any] = {
    "vllm": {"usage": {"prompt_tokens": 90, "completion_tokens": 7}, "metrics": {"speculative_decoding": COUNTS}},
    "vllm_metrics": SCRAPE,
    "aiperf": {"metrics": LENGTHS, "spec_decode_acceptance": {**COUNTS, "engine": "sglang"}, "error": None},
    "mooncake": {"timestamp": 27, "input_length": 500, "output_length": 30, "hash_ids": [0]},
    "azure": 'TIMESTAMP,ContextTokens,GeneratedTokens\n"2023-11-16 18:15:46",4808,10\n',
    "step_times": "op,context_tokens,batch,k,us\nround,512,1,0,900.5\nround,512,1,2,1200\nplain,512,1,0,880\n",
    "sharegpt": {"id": "a", "conversations": TURNS},
    "longbench": {"context": "The box is red.", "input": "Which?", "answers": ["red"], "_id": "0"},
    "pg19": {"short_book_title": "T", "publication_date": 1900, "url": "u", "text": "A book."},
}
OWN = {"prompt": "How far is the moon, and what of the sun then?", "answer": "Far.", "new_tokens": 9}
Parts = tuple[Path, Callable[[bytes, bytes], bytes], Callable[[], object], int]


def text_targets(folder: Path) -> dict[str, Parts]:
    """By name: path, edit, reader and share, of files made in `folder`."""
    folder.mkdir()
    found: dict[str, Parts] = {}
    for format_, content in FILES.items():
        path = folder / f"{format_}.txt"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        edit = edited if isinstance(content, str) else reshaped
        found[f"import {format_}"] = (path, edit, _importer(format_, path, folder / f"{format_}-out"), 3)
    own = folder / "own.jsonl"
    own.write_text(json.dumps(OWN))
    spec = WorkloadSpec("file", context_tokens=20, documents=1, new_tokens=4, path=str(own), keep_short=True)
    tokenizer = Tokenizer.of_bytes()
    found["workload"] = (own, reshaped, lambda: build(spec, tokenizer), 3)
    found["workload text"] = (own, edited, lambda: build(spec, tokenizer), 3)
    found["prompts"] = (
        own,
        reshaped,
        lambda: documents(read_requests(None, str(own)), tokenizer, chat=False, new_tokens=4),
        6,
    )
    return found


def _importer(format_: str, path: Path, out: Path) -> Callable[[], object]:
    """The reader, and what makes of what it read a file of ours."""
    kind, read = IMPORTERS[format_]
    about = About(format_, path.name, "m", Drafter("model", model="draft"), 1, 0.0, "h")
    write: dict[str, Callable[[Any], object]] = {
        "trace": lambda found: write_requests(out, found, about, 2),
        "costs": lambda found: cost_rows(found, about.drafter.label),
        "mix": mix_of,
        "prompts": lambda found: write_prompts(out.with_suffix(".jsonl"), found),
    }
    return lambda: write[kind](read(path))
