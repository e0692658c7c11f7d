"""`tune_heads`: choose scoring heads and the share of lookahead on an attention trace: tables, JSON, a policy file.

Chosen on the documents of one split and shown on those of another, so that the tables do not flatter the choice.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from specdial.engine.trace.attention import DRAFT, TARGET, AttentionMeta
from specdial.engine.trace.attention_file import read_attention
from specdial.policies.artifact import claim_directory, digest_of, provenance, write_json_atomic
from specdial.policies.fields import parse, setting, to_plain
from specdial.policies.file import save_policy
from specdial.policies.progress import progress
from specdial.policies.schema import Policy, policy_from_mapping
from specdial.simulator.arr_report import DELTAS, Row, budget_rows, delta_rows, layer_rows, print_arr
from specdial.simulator.heads import FoundHeads, HeadSearch, search_heads
from specdial.simulator.load import marked

SCHEMA = "specdial/heads/1"
SHOWN_LAYERS = 5  # of each model, in the printed table


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of `tune_heads`.

    split, shown: documents to choose on, and to report on; "all" for every one. budgets: of the tables, beside the
    search's own. k: drafts a round in the policy that is written.
    """

    trace: str
    out: str
    split: str = "train"
    shown: str = "test"
    budgets: tuple[int, ...] = setting((128, 256), low=1)
    k: int = setting(4, low=1, high=64)
    search: HeadSearch = field(default_factory=HeadSearch)


def run(settings: dict[str, Any]) -> dict[str, Any]:
    """Search, print, write `out`; returns the choice, what it recalls at each budget, and where the policy is."""
    s = parse(Settings, settings)
    split, shown = (None if name == "all" else name for name in (s.split, s.shown))
    frames = [s.search.frame(budget) for budget in sorted({*s.budgets, s.search.budget})]
    trace = read_attention(s.trace)
    with progress("tune_heads", 2) as bar:
        bar.say("searching heads", now=True)
        found = search_heads(trace, s.search, split)
        bar.advance(note="making tables")
        tables = {
            "by_distance": delta_rows(trace, found, DELTAS, frames, shown),
            "by_layer": layer_rows(trace, s.search, [s.search.frame()], shown),
            "by_budget": budget_rows(trace, found, s.search, frames, shown),
        }
    stamp = {
        **provenance(),
        "model_digest": trace.meta.model.get("digest"),
        "attention_digest": digest_of(to_plain(trace.meta)),
    }
    policy = replace(_policy(trace.meta, found, s.k), provenance=stamp)
    choice = _choice(found)
    out = Path(s.out)
    claim_directory(out, "tune_heads", to_plain(s))
    save_policy(policy, out / "policy.yaml")
    said = ["random weights"] if any(m and m.get("random") for m in (trace.meta.model, trace.meta.draft)) else []
    document = {"model": trace.meta.model, "draft": trace.meta.draft, "caveats": said}
    document |= {"settings": to_plain(s), "choice": choice}
    write_json_atomic(out / "heads.json", {"schema": SCHEMA, **document, **tables, "provenance": stamp})
    _print(s, choice, tables, said)
    return {**choice, "by_budget": tables["by_budget"], "policy": str(out / "policy.yaml")}


def _policy(meta: AttentionMeta, found: FoundHeads, k: int) -> Policy:
    """A policy that verifies by these heads. Where no lookahead is read, the target drafts for itself."""
    parts = found.policy_parts()
    drafter = {"kind": "model", "model": meta.draft["name"]} if meta.draft and found.m else {"kind": "sparse_self"}
    name = f"{parts['verify_kv']['source']}-b{found.frame.budget}-k{k}"
    return policy_from_mapping({"name": name, "drafter": drafter, "controller": {"kind": "fixed", "k": k}, **parts})


def _choice(found: FoundHeads) -> dict[str, Any]:
    """What was chosen, and the ARR behind it, as plain data."""
    return {
        "target": [list(head) for head in found.target],
        "draft": [list(head) for head in found.draft],
        "m": found.m,
        "arr": found.arr,
        "target_layers": [{"layer": layer, "arr": arr} for layer, arr in found.layer_arr.items()],
        "draft_layers": [{"layer": layer, "arr": arr} for layer, arr in found.draft_arr],
        "m_tried": [{"m": m, "arr": arr} for m, arr in found.m_arr.items()],
    }


def _print(s: Settings, choice: dict[str, Any], tables: dict[str, list[Row]], said: list[str]) -> None:
    """said: caveats."""
    documents = marked(f"documents: {s.shown}", said)
    print_arr(tables["by_distance"], f"ARR of one row, its keys chosen by the row delta before it, {documents}")
    best = sorted(tables["by_layer"], key=lambda row: -row["arr"])
    shown = [row for source in (TARGET, DRAFT) for row in [r for r in best if r["source"] == source][:SHOWN_LAYERS]]
    print_arr(shown, f"ARR of a window of {s.search.window} rows, best layers alone, {documents}")
    print_arr(tables["by_budget"], f"ARR of a window of {s.search.window} rows by budget, {documents}")
    heads = {name: " ".join(f"{layer}.{head}" for layer, head in choice[name]) or "-" for name in (TARGET, DRAFT)}
    line = {
        "target layer.head": heads[TARGET],
        "draft layer.head": heads[DRAFT],
        "m": choice["m"],
        "arr": choice["arr"],
    }
    print_arr([line], marked(f"chosen for budget {s.search.budget}, documents: {s.split}", said))
