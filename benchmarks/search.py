"""Q1: a thousand trials over the full space in a minute. Q2: workers killed at random lose nothing. Q1 unless --kill N.

Q1 runs the whole verb, from reading the trace to writing the policies, by one process and by two; its records say what
processor time that took and how loaded the machine was. Q2 lets four workers share a study, in a journal file and in
PostgreSQL, kills one of them every now and then, N times, and then counts: every trial done, once, and no other. Traces
are synthetic unless --trace says otherwise. The last line of output is one JSON document; --save merges it into
benchmarks/results/search.json.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import optuna
import yaml

from simulator import cpu_name, result
from specdial.engine.trace.reader import read_trace
from specdial.policies.artifact import write_json_atomic
from specdial.simulator.axes import Search
from specdial.simulator.lanes import read_record
from specdial.simulator.load import load_costs
from specdial.simulator.objectives import Goal
from specdial.simulator.replay import replay
from specdial.simulator.search import Plan, search
from specdial.simulator.space import Space
from specdial.simulator.study import Shared, is_done, open_storage, root_of
from specdial.simulator.synthetic import Shape, write_synthetic_costs, write_trace
from specdial.simulator.verbs import tune

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "search.json"
TRIALS = 1000
WORKERS = 4
SHAPE = Shape(documents=12, prompt_tokens=31_000, new_tokens=512, budgets=(64, 128, 256, 512, 1024))


def search_settings(name: str) -> dict[str, object]:
    """A group of conf/search as the verb takes it."""
    chosen = yaml.safe_load((ROOT / "conf" / "search" / f"{name}.yaml").read_text())
    base = yaml.safe_load((ROOT / "conf" / "search" / "default.yaml").read_text())
    chosen.pop("defaults", None)
    return {k: {**v, **chosen[k]} if isinstance(v, dict) and k in chosen else chosen.get(k, v) for k, v in base.items()}


def throughput(trace: Path, costs: Path, scratch: Path) -> list[dict[str, object]]:
    """Seconds of whole runs of `tune`."""
    records = []
    for name in ("between", "full"):
        for workers in (1, 2):
            out = scratch / f"{name}-{workers}"
            given = {"trace": str(trace), "costs": str(costs), "out": str(out), "trials": TRIALS, "workers": workers}
            begin, spent = time.perf_counter(), cpu_s()
            with contextlib.redirect_stdout(sys.stderr):
                found = tune.run({**given, "search": search_settings(name)})
            seconds, load = time.perf_counter() - begin, round(os.getloadavg()[0], 1)
            refused = sum(found["refused"].values())
            case = f"tune search={name}, {TRIALS} trials, {workers} process{'es' if workers > 1 else ''}: "
            case += f"{found['distinct']} distinct policies, {refused} trials refused"
            records.append(
                result(f"Q1-{name}-w{workers}", case, seconds, "s", bar=60, cpu_s=round(cpu_s() - spent, 1), load=load)
            )
    return records


def cpu_s() -> float:
    """Processor time of this process and of those it waited for."""
    return sum(os.times()[:4])


def survive(trace: Path, costs: Path, where: str, kills: int) -> dict[str, object]:
    """Counts of what is left after so many kills, and how long the search took in all."""
    record = read_record(read_trace(trace))
    model = load_costs(str(costs), record.trace)
    space = Space.of(Search(between=True), record, gamma=0.3)
    goal = Goal()
    plan = Plan("nsga2", TRIALS, 0, goal, tuple(space.suggestions()))

    def work() -> Shared:
        shared = Shared(open_storage(where), goal, {"seed": 0})
        search(shared, space, lambda p, batch: replay(record, model, p, "train", batch, bootstrap=0), plan)
        return shared

    def start() -> int:
        child = os.fork()
        if child:
            return child
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)

    chance, killed = random.Random(0), 0
    begin = time.perf_counter()
    workers = [start() for _ in range(WORKERS)]
    while killed < kills:
        time.sleep(chance.uniform(0.2, 1.5))
        victim = workers.pop(chance.randrange(WORKERS))
        os.kill(victim, signal.SIGKILL)
        _, status = os.waitpid(victim, 0)
        killed += os.WIFSIGNALED(status)
        if not os.WIFSIGNALED(status):
            sys.exit(f"only {killed} kills fell into the search: ask for more trials")
        workers.append(start())
    failed = sum(os.waitpid(worker, 0)[1] != 0 for worker in workers)
    seconds = time.perf_counter() - begin
    trials = work().trials()
    done = [trial for trial in trials if is_done(trial)]
    roots = {root_of(trial) for trial in done}
    return {
        "seconds": seconds,
        "done": len(done),
        "unique": len(roots),
        "given_lost": len({f"given-{i}" for i in range(len(plan.given))} - roots),
        "unfinished": sum(not trial.state.is_finished() for trial in trials),
        "run_again": sum(trial.state == optuna.trial.TrialState.FAIL and not is_done(trial) for trial in trials),
        "workers_failed": failed,
    }


@contextlib.contextmanager
def postgres(folder: Path) -> Iterator[str | None]:
    """URL of a server of our own on a socket in `folder`; None where the programs are missing or none may run them."""
    if not all(shutil.which(name) for name in ("initdb", "pg_ctl")):
        yield None
        return
    user = {"user": "nobody", "group": "nogroup", "extra_groups": []} if os.getuid() == 0 else {}
    folder.mkdir(mode=0o700)
    if user:
        shutil.chown(folder, "nobody", "nogroup")
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.STDOUT, "cwd": folder, **user}
    data = str(folder / "data")
    subprocess.run(["initdb", "-D", data, "-A", "trust", "-U", "tune"], check=True, **quiet)
    options = f"-k {folder} -c listen_addresses="
    subprocess.run(["pg_ctl", "-D", data, "-w", "-l", f"{data}/log", "-o", options, "start"], check=True, **quiet)
    try:
        yield f"postgresql+psycopg://tune@/postgres?host={folder}"
    finally:
        subprocess.run(["pg_ctl", "-D", data, "-m", "immediate", "stop"], check=True, **quiet)


def kill_records(trace: Path, costs: Path, scratch: Path, kills: int) -> list[dict[str, object]]:
    """Q2 on a journal and on PostgreSQL. Ends the program when a trial is lost or counted twice."""
    records = []
    with postgres(scratch / "pg") as url:
        if url is None:
            print("Q2-postgres skipped: initdb and pg_ctl are not on PATH", file=sys.stderr)
        for name, where in (("journal", str(scratch / "study.journal")), ("postgres", url)):
            if where is None:
                continue
            left = survive(trace, costs, where, kills)
            case = f"{TRIALS} trials by {WORKERS} workers on {name}, {kills} of them killed: wrong counts"
            wrong = abs(left["done"] - TRIALS) + abs(left["unique"] - TRIALS)
            wrong += left["given_lost"] + left["unfinished"] + left["workers_failed"]
            records.append(result(f"Q2-{name}", case, wrong, "trials", **left))
            if wrong:
                sys.exit(json.dumps(records))
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, help="a recorded trace; needs --costs")
    parser.add_argument("--costs", type=Path, help="its cost table")
    parser.add_argument("--kill", type=int, default=0, metavar="N", help="Q2 with N kills instead of Q1")
    parser.add_argument("--save", action="store_true", help="merge into benchmarks/results/search.json")
    given = parser.parse_args()
    if (given.trace is None) != (given.costs is None):
        parser.error("--trace and --costs go together")
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        scratch.chmod(0o755)  # the database server is another user
        trace, costs = given.trace or scratch / "trace", given.costs or scratch / "costs"
        if given.trace is None:
            write_trace(trace, SHAPE)
            write_synthetic_costs(costs, (8_000, 16_000, 32_000, 64_000), (1, 4, 16), SHAPE)
        records = kill_records(trace, costs, scratch, given.kill) if given.kill else throughput(trace, costs, scratch)
    named = f"trace {given.trace.name}" if given.trace else "synthetic trace, 31k tokens"
    for row in records:
        command = f"python3 benchmarks/search.py{f' --kill {given.kill}' if given.kill else ''}"
        command += " --trace TRACE --costs COSTS" if given.trace else ""
        hardware = f"{cpu_name().removesuffix(', one core')}, {os.cpu_count()} cores"
        row |= {"case": f"{row['case']} ({named})", "command": command, "hardware": hardware}
        print(f"{row['id']:<16}{row['value']:>10} {row['unit']:<7}{row['case']}")
    if given.save:
        kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
        fresh = {row["id"] for row in records}
        write_json_atomic(RESULTS, [row for row in kept if row["id"] not in fresh] + records)
    print(json.dumps(records, ensure_ascii=False))


if __name__ == "__main__":
    main()
