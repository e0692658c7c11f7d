"""Kill -9 at random moments of record, calibrate, tune, validate and export, and see what is left.

After every kill each file is whole: as it was before, or as it became. A second call then completes the run, and what
it leaves equals an undisturbed run but for times. (A search that draws by chance draws other trials after one was lost;
here it goes through them all.) Half the kills fall on a run that was killed before, a quarter on one that rewrites the
files of a finished run. The last line on standard output is one JSON document with the counts.

    python tests/soak/kill.py --kills 100
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from _tiny import tiny_job, tiny_model, tiny_workload

from specdial.engine.verbs import calibrate, record, validate
from specdial.policies import export
from specdial.policies.fields import to_plain
from specdial.policies.file import load_policy
from specdial.simulator.verbs import tune

KV = {"budget": 40, "sink": 2, "recent": 8, "window": 8}
POLICY = {"controller": {"kind": "fixed", "k": 3}, "draft_kv": KV}
LOOKUP = {"name": "lookup", "drafter": {"kind": "lookup"}, "controller": {"kind": "fixed", "k": 3}}
# What the clock says, and what follows from it; names with a unit of us are times too.
TIMED = {"made_at", "low", "high", "speedup", "error_frac", "regret", "rank_correlation", "median_error_frac"}
TIMED |= {"worst_error_frac", "cost_error_frac", "plain_error_frac", "repeat_spread_frac", "leave_one_out"}
TIMED |= {"measured_at", "engine_s", "resumed_groups"}
TARGETS = ("specdial", "vllm", "sglang", "tensorrt_llm", "transformers", "llama_cpp")
Action = Callable[[Path], object]


def actions(folder: Path) -> dict[str, Action]:
    """By verb: what writes a run into a directory. Those that read another one's files find them under `folder`."""
    model, workload = tiny_model(), tiny_workload(folder)
    settings = {"model": {"source": "shape:tiny", "device": "cpu"}, "workload": workload}
    whole, tested = tiny_job(model, workload), tiny_job(model, workload, "test")
    dense = {**settings, "policy": POLICY, "dense": True, "budgets": [48], "k_max": 4}
    costs = {**settings, "contexts": [64, 80], "ks": [0, 2, 4], "budgets": [40, 48], "draft_kv": KV, "repeats": 3}
    trace, table = folder / "trace", folder / "costs"
    search = {"trace": str(trace), "costs": str(table), "trials": 20, "bootstrap": 10, "sampler": "brute"}
    record.run({**dense, "out": str(trace)}, whole)
    calibrate.run({**costs, "out": str(table)}, whole)
    tune.run({**search, "out": str(folder / "tune")})
    policies = [to_plain(load_policy(path)) for path in sorted((folder / "tune" / "policies").glob("*.yaml"))]

    def export_all(out: Path) -> None:
        for target in TARGETS:
            export.run({"policy": LOOKUP, "target": target, "out": f"{out}/"})

    return {
        "record": lambda out: record.run({**dense, "out": str(out)}, whole),
        "calibrate": lambda out: calibrate.run({**costs, "out": str(out)}, whole),
        "tune": lambda out: tune.run({**search, "out": str(out)}),
        "validate": lambda out: validate.run(
            {**settings, "policies": policies[:3], "repeats": 1, "bootstrap": 20, "out": str(out)}, tested
        ),
        "export": export_all,
    }


def silence() -> None:
    """Let this process print nothing from now on."""
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def start(action: Action, out: Path) -> int:
    """A process that runs the action quietly. It must be forked from one that uses a single thread."""
    child = os.fork()
    if child:
        return child
    try:
        silence()
        action(out)
        os._exit(0)
    except BaseException:
        os._exit(1)


def killed(action: Action, out: Path, after_s: float) -> bool:
    """Run and kill after so long; False when the run was done by then."""
    child = start(action, out)
    time.sleep(after_s)
    os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return True
    if os.WEXITSTATUS(status):
        raise AssertionError(f"a run in {out} failed by itself")
    return False


def completed(action: Action, out: Path) -> float:
    """Run to the end; returns how long it took, in seconds."""
    began_s = time.monotonic()
    if os.waitpid(start(action, out), 0)[1]:
        raise AssertionError(f"a run in {out} did not complete")
    return time.monotonic() - began_s


def contents(out: Path) -> dict[str, bytes]:
    """Every file by its name, temporary ones left out, and the journal, which is appended to."""
    files = (path for path in out.rglob("*") if path.is_file() and path.suffix not in (".tmp", ".journal"))
    return {str(path.relative_to(out)): path.read_bytes() for path in files}


def everything(out: Path) -> dict[str, Any]:
    """Every file by its name as `read` gives it; of a search's journal only that it is there.

    A temporary file counts too, but for those of `export`, which writes into directories that are not its own.
    """
    files = (path for path in out.rglob("*") if path.is_file())
    return {str(path.relative_to(out)): read(path) for path in files if path.suffix != ".tmp" or owned(out)}


def owned(out: Path) -> bool:
    return (out / "run.json").exists()


def read(path: Path) -> Any:
    """A file as plain data, without what depends on the clock. Raises where it is not whole."""
    if path.suffix == ".parquet":
        return untimed(pq.read_table(path, page_checksum_verification=True).to_pylist())
    if path.suffix == ".json":
        found = untimed(json.loads(path.read_text()))
        if "tried" in found:  # a trial whose worker was killed is run again at the end
            found["tried"].sort(key=lambda trial: trial["policy_digest"])
        return found
    if path.suffix in (".journal", ".tmp"):  # a journal says which worker did what, and when
        return path.suffix
    text = path.read_text()
    return untimed(to_plain(load_policy(path))) if "schema: specdial/policy" in text else text


def untimed(value: Any) -> Any:
    """Plain data without what the clock says, and without the directory it was written to."""

    def timed(name: str) -> bool:
        return name in (*TIMED, "out") or name.endswith("_us") or name.startswith("us_") or "_us_" in name

    if isinstance(value, dict):
        return {k: untimed(v) for k, v in value.items() if not timed(k)}
    return [untimed(v) for v in value] if isinstance(value, list) else value


def kill_one(action: Action, out: Path, undisturbed: dict[str, Any], duration_s: float, chance: random.Random) -> int:
    """Kill a run in `out`, perhaps twice, look at what is left, complete it, and compare. Returns the kills."""
    before = {}
    if chance.random() < 0.25:
        completed(action, out)
        before = contents(out)
    kills = 0
    for _ in range(chance.choice((1, 2))):
        kills += killed(action, out, chance.uniform(0, duration_s))
        for name, content in contents(out).items() if out.is_dir() else ():
            if before.get(name) != content:
                read(out / name)
    completed(action, out)
    found = everything(out)
    if places := differing(found, undisturbed):
        raise AssertionError(f"{out} differs from an undisturbed run in {', '.join(places[:8])}")
    return kills


def differing(found: Any, wanted: Any, where: str = "") -> list[str]:
    """Where two pieces of plain data are not the same, by dotted path."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        names = sorted(found.keys() | wanted.keys())
        return [place for name in names for place in differing(found.get(name), wanted.get(name), f"{where}.{name}")]
    if isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted):
        pairs = enumerate(zip(found, wanted))
        return [place for i, (a, b) in pairs for place in differing(a, b, f"{where}[{i}]")]
    return [] if found == wanted else [where.lstrip(".")]


@dataclass(frozen=True, slots=True)
class World:
    """Runs to disturb. undisturbed: what each leaves, file by file; durations_s: how long each takes."""

    folder: Path
    actions: dict[str, Action]
    undisturbed: dict[str, dict[str, Any]]
    durations_s: dict[str, float]


def prepared(folder: Path, disturbed: tuple[str, ...] = ()) -> World:
    """Inputs under `folder`, and the runs that will be disturbed, or all, once undisturbed."""
    world = World(folder, actions(folder), {}, {})
    for name, action in world.actions.items():
        if name not in (disturbed or (name,)):
            continue
        out = folder / f"{name}-undisturbed"
        world.durations_s[name] = completed(action, out)
        world.undisturbed[name] = everything(out)
    return world


def kill_many(world: World, wanted: int, seed: int) -> dict[str, int]:
    """Kill until every verb was killed its share of `wanted` times. Returns kills by verb."""
    chance, kills = random.Random(seed), dict.fromkeys(world.undisturbed, 0)
    for name in kills:
        action = world.actions[name]
        while kills[name] < -(-wanted // len(kills)):
            out = world.folder / f"{name}-killed"
            kills[name] += kill_one(action, out, world.undisturbed[name], world.durations_s[name], chance)
            shutil.rmtree(out)
    return kills


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        kills = kill_many(prepared(Path(folder)), options.kills, options.seed)
    print(json.dumps({"id": "kill", "kills": sum(kills.values()), "by_verb": kills, "seed": options.seed}))


if __name__ == "__main__":
    main()
