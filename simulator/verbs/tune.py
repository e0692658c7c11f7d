"""`tune`: search policies by replay, choose on validation documents, report on test documents, write what was found.

Workers of one study run this verb with the same settings: `workers` of them from one command, and as many commands, on
as many machines, as share `storage`. A command that was killed goes on when it is run again.
"""

import hashlib
import itertools
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import BaseStorage

from specdial.engine.trace.reader import read_trace
from specdial.policies.artifact import claim_directory, digest_of
from specdial.policies.errors import UserError
from specdial.policies.fields import parse, setting, to_plain
from specdial.policies.file import policy_digest
from specdial.policies.progress import progress
from specdial.policies.schema import Policy
from specdial.simulator.axes import Search
from specdial.simulator.check import check_acceptance
from specdial.simulator.choice import CALIBRATE, Choice, candidates, choose, lacks, plain_policy
from specdial.simulator.corrections import corrected, read_corrections
from specdial.simulator.costs import CostModel
from specdial.simulator.lanes import Record, read_record
from specdial.simulator.load import caveats, load_costs, marked, trace_digest
from specdial.simulator.objectives import FULL_BATCH_SPEEDUP, Goal
from specdial.simulator.outcome import Outcome
from specdial.simulator.replay import replay
from specdial.simulator.samplers import Sampler, sampler_for
from specdial.simulator.search import Evaluate, Found, Plan, fixed_points, search
from specdial.simulator.search_tables import print_refused, print_surface_cells, print_test
from specdial.simulator.space import Space
from specdial.simulator.study import NAME, Shared, away, open_storage, quiet
from specdial.simulator.surface import Grid, Surface, SurfaceSettings, find_surface
from specdial.simulator.tables import print_acceptance, print_choice, print_costs
from specdial.simulator.tuned_files import Tuned, write_tuned

MOST_CONTEXTS = 8  # rows of a surface where none are named
MOST_GRID_POINTS = 10_000  # that `auto` tries all of
CONTINUES = ("out", "trials", "workers")  # settings that may differ when a search goes on


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of `tune`.

    costs: a cost table, None for the trace's own rounds. batch: at which the best policy is chosen. objectives, and
    bounds on any metric in constraints: see simulator.objectives. stall: generations without growth of the front's
    hypervolume after which to stop, 0 for none. bootstrap: resamples of intervals. storage: of the study, None for a
    journal in `out`, else another journal file, a database URL or grpc://HOST:PORT. workers: processes of this command.
    corrections: directories of `validate`, whose measurements correct the costs one after another. keep_refused: so
    many refused policies are written too, for the engine to measure.
    """

    trace: str
    out: str
    costs: str | None = None
    trials: int = setting(500, low=1, high=1_000_000)
    seed: int = setting(0, low=0, high=2**32 - 1)
    sampler: Sampler = "auto"
    batch: int = setting(1, low=1)
    objectives: tuple[str, ...] = ("speedup", "kv_bytes_per_token")
    constraints: dict[str, Any] = field(default_factory=dict)
    stall: int = setting(0, low=0)
    bootstrap: int = setting(1000, low=1, high=100_000)
    storage: str | None = None
    workers: int = setting(1, low=1, high=256)
    corrections: tuple[str, ...] = ()
    keep_refused: int = setting(0, low=0, high=1000)
    search: Search = field(default_factory=Search)
    surface: SurfaceSettings = field(default_factory=SurfaceSettings)


@dataclass(frozen=True, slots=True)
class _Run:
    """What one tuning run works on. select_split: validation, or train where the trace has no validation documents.

    batch: at which the best policy is chosen.
    """

    settings: Settings
    record: Record
    costs: CostModel
    space: Space
    goal: Goal
    batch: int
    select_split: str

    def evaluate(self, split: str, bootstrap: int) -> Evaluate:
        """Replay on one split. bootstrap: 0 in a search, which needs no more than what its goal looks at."""

        full_batch = bootstrap > 0 or FULL_BATCH_SPEEDUP in self.goal.metrics

        def run(policies: Any, batch: int) -> list[Outcome]:
            seed = self.settings.seed
            return replay(
                self.record, self.costs, policies, split, batch, bootstrap=bootstrap, seed=seed, full_batch=full_batch
            )

        return run


def run(settings: dict[str, Any]) -> dict[str, Any]:
    """Tune, print, write `out`; returns the best policy's numbers on the selection split, and where the files are."""
    s = parse(Settings, settings)
    job = _prepare(s)
    storage = None if s.storage is None else open_storage(s.storage)  # before `out` is touched
    config = to_plain(s)
    own = {name: value for name, value in config.items() if name not in CONTINUES}
    claim_directory(Path(s.out), "tune", own, shared=True)
    with _assistants(s):
        found = _search(job, storage)
    choice = choose(job.space, found, job.evaluate(job.select_split, s.bootstrap), job.goal, job.batch)
    surface = _surface(job, found)
    tuned = Tuned(
        settings=to_plain(s),
        record=job.record,
        costs=job.costs,
        goal=job.goal,
        found=found,
        choice=choice,
        surface=surface,
        beside=_beside(job, surface),
        test=_test(job, choice, surface),
        refused=_refused(job, found),
        select_split=job.select_split,
        check=check_acceptance(job.record, "train", job.select_split, s.seed),
    )
    expected = write_tuned(Path(s.out), tuned)
    _print(tuned)
    return {
        **choice.best.plain(),
        "pays": choice.pays,
        "feasible": choice.feasible,
        "trials": found.trials,
        "distinct": len(found.tried),
        "refused": found.refused,
        "stopped": found.stopped,
        "policies": str(Path(s.out) / "policies"),
        "best_fixed": choice.best_fixed.plain(),
        "crossover": to_plain(choice.crossover),
        "surface": tuned.surface_plain(),
        "test": tuned.test_plain(),
        "expected": expected,
    }


def _prepare(s: Settings) -> _Run:
    goal = Goal.of(s.objectives, s.constraints)
    record = read_record(read_trace(s.trace))
    costs = load_costs(s.costs, record.trace)
    for folder in s.corrections:
        costs = corrected(costs, read_corrections(folder))
    splits = set(record.documents.split.tolist())
    select = "validation" if "validation" in splits else "train"
    batch = s.search.batches[0] if s.search.batches else s.batch
    probe = Space.of(s.search, record, gamma=0.3)
    fixed = [probe.policy(point) for point in fixed_points(probe)]
    priced = {split: _priced(record, costs, fixed, split, batch, goal) for split in dict.fromkeys(("train", select))}
    gamma = max(priced["train"], key=lambda outcome: outcome.speedup or 0.0).gamma or 0.3
    space = Space.of(s.search, record, gamma)
    return _Run(s, record, costs, space, goal, batch, select)


def _priced(
    record: Record, costs: CostModel, policies: list[Policy], split: str, batch: int, goal: Goal
) -> list[Outcome]:
    """Those of a split's replays that have a speedup and every objective. Raises UserError where none has."""
    outcomes = replay(record, costs, policies, split, batch, bootstrap=0, full_batch=FULL_BATCH_SPEEDUP in goal.metrics)
    known = [outcome for outcome in outcomes if lacks(outcome, goal, record) is None]
    if not known:
        cause = f"no speedup can be predicted on {split} documents: {lacks(outcomes[0], goal, record)}"
        raise UserError(cause, CALIBRATE)
    return known


def _plan(job: _Run, begun: str | None) -> Plan:
    """What to search, and by what. begun: the sampler of a study that goes on, which `auto` keeps; None for a new one.

    Where that one draws, and the whole grid fits by now, the grid comes before further draws.
    """
    s, space = job.settings, job.space
    limit = s.trials if s.sampler == "brute" else min(s.trials, MOST_GRID_POINTS)
    grid = space.grid(limit) if s.sampler in ("auto", "brute") else None
    fitting = begun or sampler_for(space, s.trials, len(job.goal.objectives), grid is not None)
    name = fitting if s.sampler == "auto" else s.sampler
    if name == "brute":
        points = grid if grid is not None else list(itertools.islice(space.grid_points(), s.trials))
        return Plan(name, len(points), s.seed, job.goal, tuple(points), 0, job.batch)
    given = space.suggestions()[: s.trials]
    given += [point for point in grid or () if point not in given]
    return Plan(name, s.trials, s.seed, job.goal, tuple(given), s.stall, job.batch)


def _begun(storage: BaseStorage) -> str | None:
    """The sampler of the study that a storage holds; None where it holds none."""
    try:
        with quiet():
            study = optuna.load_study(study_name=NAME, storage=storage)
    except KeyError:
        return None
    sampler: str | None = study.user_attrs.get("identity", {}).get("sampler")
    return sampler


def _search(job: _Run, storage: BaseStorage | None = None) -> Found:
    """storage: where the study lies, None for what the settings say."""
    s = job.settings
    storage = storage or open_storage(s.storage or str(Path(s.out) / "study.journal"))
    plan = _plan(job, _begun(storage))
    identity = {
        "trace": trace_digest(job.record.trace),
        "costs": _costs_digest(job.costs),
        "search": digest_of(to_plain(s.search)),
        "goal": digest_of(to_plain(plan.goal)),
        "sampler": plan.sampler,
        "seed": s.seed,
        "batch": plan.batch,
    }
    shared = Shared(storage, plan.goal, identity)
    try:
        with progress("tune", plan.trials) as bar:
            return search(shared, job.space, job.evaluate("train", 0), plan, bar.advance)
    except away() as error:
        said = error.details() if hasattr(error, "details") else str(error)  # of gRPC, whose text is a page
        cause = f"the study's storage is away: {said.splitlines()[0]}"
        raise UserError(cause, "give the command again when it is back: the search goes on") from None
    finally:
        shared.close()


def _costs_digest(costs: CostModel) -> str:
    """sha256 of what was measured, whatever made it."""
    hashed = hashlib.sha256()
    for name, found in sorted(costs.measured.items()):
        hashed.update(name.encode() + found.points.tobytes() + found.values_us.tobytes())
    return hashed.hexdigest()


def _assist(settings: dict[str, Any]) -> None:
    """What the other processes of `workers` do."""
    _search(_prepare(parse(Settings, settings)))


@contextmanager
def _assistants(s: Settings) -> Iterator[None]:
    """Other processes at the same study; what one of them leaves undone, this one does."""
    context = multiprocessing.get_context("spawn")
    others = [context.Process(target=_assist, args=(to_plain(s),), daemon=True) for _ in range(s.workers - 1)]
    for other in others:
        other.start()
    try:
        yield
    finally:
        for other in others:
            other.terminate()
            other.join()


def _surface(job: _Run, found: Found) -> Surface | None:
    """The surface over what was found, or None where there is a single cell or costs know a single context."""
    wanted, batches = job.settings.surface, job.settings.search.batches or (job.batch,)
    contexts = wanted.contexts or _spread([round(c) for c in job.costs.contexts()], MOST_CONTEXTS)
    grid = Grid(tuple(sorted(set(contexts))), tuple(sorted(set(wanted.batches or batches))))
    if job.costs.own_rounds or len(grid.contexts) * len(grid.batches) < 2:
        return None
    tried = [t for batch in batches for pair in candidates(found, job.goal, batch) for t in pair]
    policies = [job.space.policy(point) for point in (*fixed_points(job.space), *(t.point for t in tried))]
    distinct: dict[str, Policy] = {policy_digest(policy): policy for policy in policies}
    known = [plain_policy(job.space), *distinct.values()]
    return find_surface(job.record, job.costs, known, grid, ("train", job.select_split), wanted.switch_frac)


def _spread(values: list[int], most: int) -> list[int]:
    """At most so many of some values, the first and the last among them."""
    if len(values) <= most:
        return values
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]


def _refused(job: _Run, found: Found) -> list[Policy]:
    """The first so many distinct policies that replay refuses, and that are no contradiction."""
    kept: dict[str, Policy] = {}
    for tried in found.tried:
        if len(kept) == job.settings.keep_refused:
            break
        if tried.level == "refused":
            with suppress(UserError):
                kept[tried.digest] = job.space.policy(tried.point)
    return list(kept.values())


def _beside(job: _Run, surface: Surface | None) -> dict[str, Outcome]:
    """A surface that pays and the single policy that it beats, so that both can be measured."""
    if surface is None or not surface.pays:
        return {}
    policies = {"surface": surface.policy, "single": surface.single}
    outcomes = job.evaluate(job.select_split, job.settings.bootstrap)(list(policies.values()), job.batch)
    return dict(zip(policies, outcomes, strict=True))


def _test(job: _Run, choice: Choice, surface: Surface | None) -> dict[str, Outcome]:
    """What was chosen, on the documents that nothing was tuned or selected on; empty where the trace has none."""
    if "test" not in job.record.documents.split:
        return {}
    named = {"best": choice.best, "best_lossless": choice.best_lossless, "best_fixed": choice.best_fixed}
    policies = {name: outcome.policy for name, outcome in named.items()}
    if surface is not None and surface.pays:
        policies["surface"] = surface.policy
    outcomes = job.evaluate("test", job.settings.bootstrap)(list(policies.values()), job.batch)
    return dict(zip(policies, outcomes, strict=True))


def _print(tuned: Tuned) -> None:
    found, record = tuned.found, tuned.record
    title = f"tuned on train, selected on {tuned.select_split}: {found.trials} trials, {found.sampler}"
    title += ", stopped as the front no longer grew" if found.stopped else ""
    print_choice(tuned.choice, marked(title, caveats(record.trace, tuned.costs)))
    print_refused(found)
    print_test(tuned.test)
    print_surface_cells(tuned.surface)
    print_acceptance(tuned.check)
    print_costs(tuned.costs)
