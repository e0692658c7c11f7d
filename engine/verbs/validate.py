"""specdial validate: what predicted policies do on the clock, on documents they were not tuned on.

Protocol, fixed before any number is seen: every document is prefilled once; all policies and plain decode run from that
state in every repeat, their order rotated, plain decode twice, since every speedup is measured by it; before the first
document all run once to warm up, and a run that still had to capture a graph is repeated; a policy's time on a document
is the median of its runs; speedup is the ratio of sums over documents, plain over policy. Its interval comes from
resampling documents. Of batches the same is said as if they were kept full (full_batch, see `kept_full`): a whole run
ends with its slowest sequence, a server would refill the batch. Greedy lossless outputs are compared with the plain
output token by token, unless acceptance is synthetic. What a lossy policy's output is worth is measured too, in a
decoding of its own that is not timed (fidelity), and stands beside what was predicted of it. Lossy policies are ranked
among themselves. Python's collector rests while rounds are timed (garbage). A killed run goes on with the groups of
documents that it had not measured, after warming up again (resumed_groups).
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from specdial.engine import timed
from specdial.engine.acceptance import JUDGED, Acceptance, said_of
from specdial.engine.batches import Batches
from specdial.engine.fidelity import Fidelity, error_of, intervals, measure_fidelity, summary
from specdial.engine.job import Job, ModelSettings, describe, hardware, history_spec, load_job
from specdial.engine.progress import Bar, progress
from specdial.engine.round import Round
from specdial.engine.sampling import Sampling
from specdial.engine.sequences import Sequences
from specdial.engine.verbs.validate_groups import Group, KeptGroup, KeptGroups, total_us
from specdial.engine.verbs.validate_table import print_validation
from specdial.engine.workloads import Document
from specdial.policies.artifact import claim_directory, digest_of, provenance, write_json_atomic
from specdial.policies.errors import UserError
from specdial.policies.fields import parse, setting, to_plain
from specdial.policies.file import policy_digest, save_policy
from specdial.policies.schema import Policy, plain_policy, policy_from_mapping

SCHEMA = "specdial/validation/1"
PLAIN = plain_policy()
FULL_BATCH = "full_batch"


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of `validate`. policies: policy mappings, with their `expected` blocks. split: documents to use.

    fidelity: judge the greedy output of lossy policies by full verification.
    """

    model: ModelSettings
    workload: dict[str, Any]
    policies: tuple[dict[str, Any], ...]
    out: str
    split: str = "test"
    batch: int = setting(1, low=1, high=1024)
    repeats: int = setting(3, low=1, high=100)
    bootstrap: int = setting(1000, low=1, high=100_000)
    seed: int = setting(0, low=0, high=(1 << 32) - 1)
    sampling: Sampling = field(default_factory=Sampling)
    acceptance: Acceptance = field(default=JUDGED, metadata={"later": True})
    fidelity: bool = setting(True, later=True)


@dataclass
class Measured:
    """What one policy did. batch: of the largest group."""

    policy: Policy
    batch: int
    synthetic: tuple[float, ...]  # see Acceptance.of
    groups: list[Group] = field(default_factory=list)

    def sum_of(self, name: str) -> int:
        """Of one count over all groups."""
        return sum(getattr(group, name) for group in self.groups)

    @property
    def tokens(self) -> int:
        return self.sum_of("tokens")

    @property
    def fidelity(self) -> list[Fidelity]:
        """Of each document, where it was measured."""
        return [found for group in self.groups for found in group.fidelity]

    def document_us(self) -> np.ndarray:
        """Median time of each document group, [D]."""
        return np.array([np.median(group.times_us) for group in self.groups])

    @property
    def full_us_per_token(self) -> float:
        """As if batches were kept full."""
        return float(sum(np.median(group.full_us) for group in self.groups) / self.sum_of("full_tokens"))


def run(settings: Mapping[str, Any], job: Job | None = None) -> dict[str, Any]:
    """Measure, compare with the predictions, write validation.json and policies with `measured` filled in.

    job: a loaded model and its documents, instead of those that the settings name.
    """
    s = parse(Settings, settings)
    policies = [policy_from_mapping(p, f"policies[{i}]") for i, p in enumerate(s.policies)]
    if not policies:
        raise UserError("no policy to validate", "give policy=FILE or a directory of policy files")
    for policy in policies:
        _check_prediction(policy)
        s.acceptance.of(policy)
    if all(policy.k_max == 0 for policy in policies):
        s.acceptance.of_one(policies[0])
    history_spec(policies)
    job = job or load_job(s.model, s.workload, s.split)
    job.drafting(policies)
    for policy in policies:
        _check_model(policy, job)
    out = Path(s.out)
    asides = {"measured": None, "provenance": None}  # when and from what a policy came changes no measurement
    claim_directory(out, "validate", {**to_plain(s), "policies": [{**p, **asides} for p in to_plain(s.policies)]})
    here, about = hardware(job.model.decoder.device), describe(job, s.sampling, policies)
    models = {"model": job.model.digest, "draft_models": about.get("draft_models")}
    software = {name: provenance()[name] for name in ("python", "versions")}
    prompts = digest_of([d.prompt_ids for d in job.documents])
    kept = KeptGroups(out, {"hardware": here, **software, **models, "prompts": prompts})
    results, went = _measure(job, [PLAIN, *[p for p in policies if p.k_max > 0]], s, kept)
    by_digest = {policy_digest(r.policy): r for r in results}
    plain = results[0]
    rows = [_row(p, by_digest.get(policy_digest(p), plain) if p.k_max else plain, plain, s) for p in policies]
    ranked = [row for row in rows if row["lossless"]] or rows
    mixed = len(ranked) < len(rows)
    plain_us_per_token = float(plain.document_us().sum() / plain.tokens)
    content = {
        "schema": SCHEMA,
        **about,
        "hardware": here,
        "split": s.split,
        "batch": s.batch,
        "repeats": s.repeats,
        **went,
        **({"acceptance": to_plain(s.acceptance)} if s.acceptance else {}),
        "plain_us_per_token": plain_us_per_token,
        **_parts(ranked, plain_us_per_token),
        "policies": rows,
        **_ranking(ranked),
        **({"lossy_ranking": _ranking([row for row in rows if not row["lossless"]])} if mixed else {}),
        **({"full_batch_ranking": _ranking(ranked, FULL_BATCH)} if FULL_BATCH in ranked[0]["measured"] else {}),
        "config": to_plain(s),
        "provenance": provenance(),
    }
    for policy, row, name in zip(policies, rows, _file_names(policies)):
        measured = {**row["measured"], "split": s.split, "hardware": content["hardware"]}
        measured |= {"random_weights": True} if job.model.random else {}
        save_policy(replace(policy, measured=measured), out / "policies" / f"{name}.yaml")
    write_json_atomic(out / "validation.json", content)  # last: all is there once it is
    kept.forget()
    print_validation(out, job, rows, content)
    return {
        "out": str(out),
        "policies": rows,
        "regret": content["regret"],
        "rank_correlation": content["rank_correlation"],
        **went,
    }


def _measure(
    job: Job, policies: list[Policy], s: Settings, kept: KeptGroups
) -> tuple[list[Measured], dict[str, float]]:
    """What each policy did, and how measuring went: its seconds, and how many groups an earlier call of this run had
    measured. kept: where those are, and where this call keeps its own meanwhile."""
    groups = [job.documents[i : i + s.batch] for i in range(0, len(job.documents), s.batch)]
    results = [Measured(p, len(groups[0]), s.acceptance.of(p)) for p in policies]
    batches = Batches(job, policies)
    known = kept.load()
    resumed = len(known)
    left = [group for number, group in enumerate(groups) if number not in known]
    if resumed:
        print(f"{resumed} of {len(groups)} groups of documents were measured before")
    repeats, warming = len(left) * s.repeats, len({len(group) for group in left})
    warm: set[int] = set()  # sizes of groups; new sequences' graphs are still to be captured
    with progress("validate", repeats * (len(policies) + 1) + warming * len(policies)) as bar:
        for number, group in enumerate(groups):
            if number in known:
                continue
            started_s = time.monotonic()
            found = _measure_group(batches.prefilled(group), group, results, s, bar, cold=len(group) not in warm)
            known[number] = KeptGroup(found, time.monotonic() - started_s)
            kept.save(number, known[number])
            warm.add(len(group))
    for number in range(len(groups)):
        for result, group_found in zip(results, known[number].groups, strict=True):
            result.groups.append(group_found)
    return results, {"resumed_groups": resumed, "engine_s": sum(group.spent_s for group in known.values())}


def _measure_group(
    sequences: Sequences, group: list[Document], results: list[Measured], s: Settings, bar: Bar, *, cold: bool
) -> list[Group]:
    """What each policy did on one group. cold: every policy runs once before it is timed."""
    numbers = [d.index for d in group]
    found = [Group() for _ in results]
    last: list[tuple[list[Round], list[list[int]]]] = [([], [])] * len(results)
    for repeat in range(0 if cold else 1, s.repeats + 1):
        for place in _order(len(results), repeat):
            result = results[place]
            run = timed.decode_captured if repeat else timed.decode
            rounds = run(sequences, result.policy, s.sampling, numbers, synthetic=result.synthetic)
            if repeat:
                found[place].add_run(rounds, result.batch)
            last[place] = rounds, sequences.outputs
            bar.advance(1, result.policy.name)
    reference = last[0][1] if s.sampling.greedy else None  # plain comes first
    for result, ours, (rounds, tokens) in zip(results, found, last):
        ours.count(rounds, result.batch)
        if reference and not result.synthetic:  # synthetic acceptance makes no text to compare
            ours.differing = sum(a != b for a, b in zip(tokens, reference))
            if s.fidelity and not result.policy.lossless:
                ours.fidelity = measure_fidelity(sequences, result.policy, numbers, reference)
    return found


def _order(count: int, repeat: int) -> list[int]:
    """Places of `count` results in one repeat: all in turn, plain (0) once more half of them away from its turn."""
    order = [(step + repeat) % count for step in range(count)]
    if repeat:
        first, half = order.index(0), count // 2
        order.insert(first + half + 1 if first + half < count else first - half, 0)
    return order


def _row(policy: Policy, result: Measured, plain: Measured, s: Settings) -> dict[str, Any]:
    ours, theirs = result.document_us(), plain.document_us()
    speedup = float(theirs.sum() / ours.sum() * result.tokens / plain.tokens)
    low, high = _interval(result, plain, s) if result is not plain else (1.0, 1.0)
    expected = policy.expected or {}
    told = {"batch": expected["batch"]} if "batch" in expected else {}
    if expected.get("documents"):
        told["documents"] = len(expected["documents"])
    if told.get("batch", s.batch) != s.batch:  # nothing to compare with
        expected = {}
    predicted = expected.get("speedup")
    judged = result.fidelity
    strayed = {**summary(judged), **intervals(judged, s.bootstrap, s.seed)} if judged else None
    rounds, drafted = result.sum_of("rounds"), result.sum_of("drafted")
    longest_us = max((group.longest_us for group in result.groups), key=total_us)
    shown = ("speedup", "low", "high", "level", "tokens_per_round", "baseline_us_per_token", "fidelity", FULL_BATCH)
    return {
        "name": policy.name,
        "policy_digest": policy_digest(policy),
        "lossless": policy.lossless,
        "controller": policy.controller.kind,
        "k_max": policy.k_max,
        "budget": policy.draft_kv.budget if policy.k_max else None,
        "predicted": {**{k: expected[k] for k in shown if expected.get(k) is not None}, **told},
        "measured": {
            "speedup": speedup,
            "low": low,
            "high": high,
            "us_per_token": float(ours.sum() / result.tokens),
            "tokens": result.tokens,
            "tokens_per_round": result.tokens / rounds,
            "alpha": result.sum_of("accepted") / drafted if drafted else None,
            "k": drafted / rounds,
            "documents_differing_from_plain": None if result.synthetic else result.sum_of("differing"),
            **({"fidelity": strayed} if strayed else {}),
            **({FULL_BATCH: _full_batch(result, plain)} if plain.batch == s.batch > 1 else {}),
            "repeat_spread_frac": float(
                max((max(g.times_us) - min(g.times_us)) / np.median(g.times_us) for g in result.groups)
            ),
            "longest_round": {f"{part}_us": us for part, us in longest_us.items()},
            **said_of(result.synthetic),
        },
        "error_frac": None if predicted is None else float(predicted / speedup - 1.0),
        **({"fidelity_error": error_of(expected.get("fidelity"), strayed)} if strayed else {}),
    }


def _parts(rows: list[dict[str, Any]], plain_us_per_token: float) -> dict[str, float | None]:
    """Where errors come from, None where nothing was predicted.

    Medians over drafting policies of how far off tokens a round were, and the speedup had those been known; and by how
    much too slow plain decoding was predicted. Of batches as if they were kept full, where that was predicted.
    """
    tokens, costs, baselines = [], [], []
    for row in rows:
        predicted, measured = row["predicted"], row["measured"]
        if FULL_BATCH in measured and (predicted.get(FULL_BATCH) or {}).get("us_per_token"):
            predicted, measured = predicted[FULL_BATCH], measured[FULL_BATCH]
            baselines.append(
                predicted["us_per_token"] * predicted["speedup"] / (measured["us_per_token"] * measured["speedup"])
            )
        elif predicted.get("baseline_us_per_token"):
            baselines.append(predicted["baseline_us_per_token"] / plain_us_per_token)
        if row["k_max"] and predicted.get("speedup") and predicted.get("tokens_per_round"):
            tokens.append(predicted["tokens_per_round"] / measured["tokens_per_round"])
            costs.append(predicted["speedup"] / measured["speedup"] / tokens[-1])
    return {
        "tokens_error_frac": float(np.median(np.abs(np.array(tokens) - 1.0))) if tokens else None,
        "cost_error_frac": float(np.median(np.abs(np.array(costs) - 1.0))) if costs else None,
        "plain_error_frac": float(np.median(baselines)) - 1.0 if baselines else None,
    }


def _full_batch(result: Measured, plain: Measured) -> dict[str, float]:
    return {
        "speedup": plain.full_us_per_token / result.full_us_per_token,
        "us_per_token": result.full_us_per_token,
        "tokens": result.sum_of("full_tokens"),
        "tokens_per_round": result.sum_of("full_tokens") / result.sum_of("full_rounds"),
    }


def _interval(result: Measured, plain: Measured, s: Settings) -> tuple[float, float]:
    """95 % bootstrap interval over groups of documents of the speedup, a ratio of sums."""
    random, groups = np.random.default_rng(s.seed), len(result.groups)
    draws = random.integers(0, groups, (s.bootstrap, groups))
    ours, theirs = (
        r.document_us()[draws].sum(axis=1) / np.array([g.tokens for g in r.groups])[draws].sum(axis=1)
        for r in (result, plain)
    )
    return float(np.percentile(theirs / ours, 2.5)), float(np.percentile(theirs / ours, 97.5))


def _ranking(rows: list[dict[str, Any]], of: str | None = None) -> dict[str, Any]:
    """Rank correlation of predicted and measured, and regret: how much slower the best-predicted policy really is.

    of: where in `predicted` and `measured` the speedups are, None for those of whole runs.
    """
    if of is not None:
        rows = [{**r, "predicted": r["predicted"].get(of) or {}, "measured": r["measured"][of]} for r in rows]
    known = [r for r in rows if r["predicted"].get("speedup") is not None]
    if len(known) < 2:
        return {"rank_correlation": None, "regret": None, "median_error_frac": None, "worst_error_frac": None}
    predicted = np.array([r["predicted"]["speedup"] for r in known])
    measured = np.array([r["measured"]["speedup"] for r in known])
    drafting = np.array([r["k_max"] > 0 for r in known])  # plain decoding's speedup is 1 by definition
    errors = np.abs(predicted / measured - 1.0)[drafting]
    distinct = len(set(predicted)) > 1 and len(set(measured)) > 1
    return {
        "rank_correlation": float(spearmanr(predicted, measured).statistic) if distinct else None,
        "regret": float(1.0 - measured[predicted.argmax()] / measured.max()),
        "median_error_frac": float(np.median(errors)) if len(errors) else None,
        "worst_error_frac": float(errors.max()) if len(errors) else None,
    }


def _file_names(policies: list[Policy]) -> list[str]:
    """The policies' names, numbered where several share one."""
    names = [p.name for p in policies]
    return [
        n if names.count(n) == 1 else f"{n}-{names[: i + 1].count(n)}-of-{names.count(n)}" for i, n in enumerate(names)
    ]


def _check_prediction(policy: Policy) -> None:
    predicted = (policy.expected or {}).get("speedup")
    number = isinstance(predicted, (int, float)) and not isinstance(predicted, bool)
    if predicted is not None and not (number and predicted > 0):
        raise UserError(f"policy {policy.name}: expected.speedup is {predicted!r}", "give a positive number or null")


def _check_model(policy: Policy, job: Job) -> None:
    tuned_on = (policy.provenance or {}).get("model_digest")
    if tuned_on is not None and tuned_on != job.model.digest:
        raise UserError(f"policy {policy.name} was tuned on another model", "give the model it was tuned on")
