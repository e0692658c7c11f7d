"""Studies on servers: PostgreSQL and Optuna's gRPC proxy with workers that are killed, and what optuna-dashboard shows.

Every server is a real one, started here; where a program or package is missing, the test says so and is skipped.
"""

import importlib
import importlib.util
import io
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from wsgiref.util import setup_testing_defaults

import alembic.command  # noqa: F401  here, or every worker imports it for itself
import optuna
import pytest
import sqlalchemy.orm  # noqa: F401
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from specdial.policies.errors import UserError
from specdial.simulator.axes import Search
from specdial.simulator.lanes import read_record
from specdial.simulator.objectives import Goal
from specdial.simulator.outcome import Outcome
from specdial.simulator.search import Plan, search
from specdial.simulator.space import Space
from specdial.simulator.study import NAME, Shared, is_done, open_storage, root_of

TRIALS = 20


@pytest.fixture
def postgres(monkeypatch):
    """URL of a server of our own, started as the benchmark of searches starts it."""
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    with tempfile.TemporaryDirectory(prefix="pg") as name:  # short: a socket's path has a limit
        Path(name).chmod(0o755)  # the server is another user
        with importlib.import_module("search").postgres(Path(name) / "pg") as url:
            if url is None:
                pytest.skip("initdb and pg_ctl are not on PATH")
            yield url


@pytest.fixture
def proxy(tmp_path):
    """URL of Optuna's proxy in front of an SQLite file: a process of its own, as gRPC and forks do not mix."""
    if importlib.util.find_spec("grpc") is None:
        pytest.skip("grpcio is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve = "import optuna, sys; optuna.storages.run_grpc_proxy_server("
    serve += "optuna.storages.get_storage(sys.argv[1]), host='127.0.0.1', port=int(sys.argv[2]))"
    command = [sys.executable, "-W", "ignore", "-c", serve, f"sqlite:///{tmp_path}/study.db", str(port)]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        yield f"grpc://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def evaluate(policies, batch):
    time.sleep(0.01)
    return [Outcome(p, "exact", None, True, (), 1, 0, speedup=float(p.k_max), kv_bytes_per_token=1.0) for p in policies]


def work(where, space, plan):
    shared = Shared(open_storage(where), Goal(), {"seed": 0}, grace_s=0.5)
    search(shared, space, evaluate, plan)
    return shared


def start(where, space, plan):
    child = os.fork()
    if not child:
        code = 1
        try:
            work(where, space, plan)
            code = 0
        finally:
            os._exit(code)
    return child


@pytest.mark.parametrize("server", ["postgres", "proxy"])
def test_workers_of_a_server_are_killed_and_lose_nothing(server, request, trace, tmp_path, monkeypatch):
    """Two workers at a time, of which two die and are replaced; then every trial is done, once, and no other."""
    monkeypatch.setattr("specdial.simulator.study.PULSE_S", 0.1)
    where = request.getfixturevalue(server)
    space = Space.of(Search(), read_record(trace), gamma=0.2)
    plan = Plan("nsga2", TRIALS, 0, Goal(), tuple(space.suggestions()))
    chance = random.Random(0)
    workers = [start(where, space, plan) for _ in range(2)]
    for _ in range(2):
        time.sleep(chance.uniform(0.1, 0.6))
        victim = workers.pop(0)
        os.kill(victim, signal.SIGKILL)
        os.waitpid(victim, 0)
        workers.append(start(where, space, plan))
    assert [os.waitpid(worker, 0)[1] for worker in workers] == [0, 0]
    database = f"sqlite:///{tmp_path}/study.db" if server == "proxy" else where
    trials = optuna.load_study(study_name=NAME, storage=open_storage(database)).trials
    done = [trial for trial in trials if is_done(trial)]
    assert len(done) == len({root_of(trial) for trial in done}) == TRIALS
    assert {f"given-{i}" for i in range(len(plan.given))} <= {root_of(trial) for trial in done}
    assert all(trial.state.is_finished() for trial in trials)


def test_the_dashboard_shows_trials_with_named_objectives(trace, tmp_path):
    """Through its own web interface, over the journal as any program that knows Optuna reads it."""
    dashboard = pytest.importorskip("optuna_dashboard", reason="optuna-dashboard is not installed")
    space = Space.of(Search(), read_record(trace), gamma=0.2)
    work(str(tmp_path / "study.journal"), space, Plan("random", 20, 0, Goal(), tuple(space.suggestions())))
    app = dashboard.wsgi(JournalStorage(JournalFileBackend(str(tmp_path / "study.journal"))))

    def get(path):
        environ, said = {"PATH_INFO": path, "QUERY_STRING": "after=0", "wsgi.input": io.BytesIO()}, []
        setup_testing_defaults(environ)
        body = b"".join(app(environ, lambda status, headers, *_: said.append(status)))
        assert said == ["200 OK"]
        return json.loads(body)

    (study,) = get("/api/studies")["study_summaries"]
    assert (study["study_name"], study["directions"]) == (NAME, ["maximize", "minimize"])
    detail = get(f"/api/studies/{study['study_id']}")
    assert detail["objective_names"] == list(Goal().objectives)
    assert len(detail["trials"]) == 20
    for trial in detail["trials"]:
        assert trial["state"] == "Complete"
        assert len(trial["values"]) == 2
        assert {"controller", "k"} <= {parameter["name"] for parameter in trial["params"]}


@pytest.mark.parametrize("where", ["grpc://", "grpc://host", "grpc://host:port", "grpc://:13000"])
def test_a_proxy_is_named_by_host_and_port(where):
    with pytest.raises(UserError, match="names no host and port; write it as storage=grpc://HOST:PORT"):
        open_storage(where)


def test_a_proxy_that_is_not_there_is_told(monkeypatch):
    pytest.importorskip("grpc", reason="grpcio is not installed")
    monkeypatch.setattr("specdial.simulator.study.REACH_S", 0.2)
    with pytest.raises(UserError, match=r"no gRPC proxy answers at 127\.0\.0\.1:1; start "):
        open_storage("grpc://127.0.0.1:1")


def test_without_grpcio_the_extra_is_named(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "grpc" or "_grpc" in name]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "grpc", None)
    with pytest.raises(UserError, match=r"pip install specdial\[grpc\]"):
        open_storage("grpc://127.0.0.1:1")
