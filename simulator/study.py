"""One Optuna study shared by many workers, any of which may be killed at any time.

A journal file serves the workers of one machine, a database, or Optuna's gRPC proxy in front of one, those of many. A
trial is made in one write, with its parameters and its worker's name, and belongs to a root: itself, or the point or
lost trial it is another attempt at. A root counts once, however often it had to be run. A trial is stale when its
worker is gone: in a journal when the process no longer exists, in a database when the worker's pulse has stood still
for `GRACE_S`, by the watch of whoever looks. Stale trials are failed, and their points are run again. Leaves out what a
trial is (simulator.search).
"""

import fcntl
import json
import os
import secrets
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import optuna
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.storages import BaseStorage, GrpcStorageProxy, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from specdial.policies.errors import UserError
from specdial.simulator.objectives import Goal

NAME = "tune"
GRACE_S = 20.0
PULSE_S = 4.0
REACH_S = 10.0  # how long a proxy may take to answer at first
WORKER, ROOT, REPLAY, SURPLUS = "worker", "root", "replay", "surplus"  # user attributes of a trial


class Journal(JournalFileBackend):
    """Optuna's journal, kept by a lock that dies with its holder.

    Nothing is synced to the disk: a killed process loses nothing, a power cut the last moments. A line that a writer
    left unfinished is cut off by the next.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.path = path

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        text = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs)
        with self.path.open("r+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            end = file.seek(0, os.SEEK_END)
            while end:
                file.seek(end - 1)
                if file.read(1) == b"\n":
                    break
                end -= 1
            file.truncate(end)
            file.seek(end)
            left = memoryview(text.encode())
            try:
                while left:  # a full disk takes a part, and refuses the next
                    left = left[file.write(left) :]
            except OSError as error:
                cause = f"cannot write {self.path}: {error.strerror}"
                raise UserError(cause, "free space or choose another out=") from None


def open_storage(where: str) -> BaseStorage:
    """A journal at a path, a database at a URL, or a proxy at grpc://HOST:PORT.

    Raises UserError when it cannot be reached.
    """
    if where.startswith("grpc://"):
        return _open_proxy(where)
    if "://" not in where:
        try:
            Path(where).parent.mkdir(parents=True, exist_ok=True)
            return JournalStorage(Journal(Path(where)))
        except OSError as error:
            raise UserError(f"cannot use {where}: {error.strerror}", "choose another storage=") from None
    for last in (False, False, False, True):
        try:
            with quiet():
                return optuna.storages.get_storage(RDBStorage(where))
        except ImportError as error:
            raise UserError(f"storage {where.split('://')[0]}: {error}", "pip install specdial[postgres]") from None
        except Exception as error:  # whatever the driver raises; also when two workers make the tables at once
            if last:
                raise UserError(f"cannot open storage {where}: {error}".splitlines()[0], "check storage=") from None
            time.sleep(0.5)
    raise AssertionError("unreachable")


def _open_proxy(where: str) -> BaseStorage:
    """Optuna's gRPC proxy, which many workers share without a connection to the database each."""
    try:
        parts = urlsplit(where)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if host is None or port is None:
        raise UserError(f"storage {where} names no host and port", "write it as storage=grpc://HOST:PORT")
    try:
        with quiet():
            storage = GrpcStorageProxy(host=f"[{host}]" if ":" in host else host, port=port)
        storage.wait_server_ready(timeout=REACH_S)
    except ImportError as error:
        cause = f"storage {where}: {str(error).splitlines()[0]}"
        raise UserError(cause, "pip install specdial[grpc]") from None
    except ConnectionError:
        remedy = "start optuna.storages.run_grpc_proxy_server there, or check storage="
        raise UserError(f"no gRPC proxy answers at {host}:{port}", remedy) from None
    return storage


@contextmanager
def quiet() -> Iterator[None]:
    """Without Optuna's notes on what it is about to do and on what is experimental."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        yield


class Shared:
    """One worker's view of the study. grace_s: see the module."""

    def __init__(
        self,
        storage: BaseStorage,
        goal: Goal,
        identity: dict[str, Any],
        grace_s: float = GRACE_S,
    ) -> None:
        """identity: what makes results comparable. Raises UserError when the study holds another search."""
        self.storage, self.grace_s = storage, grace_s
        self.worker = f"{os.getpid()}:{_started(os.getpid())}:{secrets.token_hex(4)}"
        with quiet():
            self.study = optuna.create_study(
                storage=storage, study_name=NAME, directions=goal.directions, load_if_exists=True
            )
            if self.study.metric_names is None:
                self.study.set_metric_names(list(goal.objectives))  # what optuna-dashboard shows
        known = self.study.user_attrs.get("identity")
        if known is None:
            self.study.set_user_attr("identity", identity)
        elif known != identity:
            differs = sorted(name for name in identity if known.get(name) != identity[name])
            raise UserError(
                f"the study was searched with another {', '.join(differs)}", "choose another storage= or out="
            )
        self._seen: dict[str, tuple[Any, float]] = {}  # pulse of each worker, and since when it has stood there
        self._stop = threading.Event()
        self._pulses = not isinstance(storage, JournalStorage)
        if self._pulses:
            threading.Thread(target=self._beat, daemon=True).start()

    def trials(self) -> list[FrozenTrial]:
        """All trials so far, by number, not to be changed."""
        return self.study.get_trials(deepcopy=False)

    def take(self, trial: FrozenTrial, root: str | None) -> tuple[int, int]:
        """Make a trial of this worker's own from another's parameters; (its id, its number)."""
        made = optuna.trial.create_trial(
            state=TrialState.RUNNING,
            params=trial.params,
            distributions=trial.distributions,
            user_attrs={WORKER: self.worker, **({} if root is None else {ROOT: root})},
            system_attrs=trial.system_attrs,
        )
        trial_id = self.storage.create_new_trial(self.study._study_id, made)
        return trial_id, self.storage.get_trial_number_from_id(trial_id)

    def finish(self, trial_id: int, values: list[float] | None, attributes: dict[str, Any]) -> None:
        """Finish a trial; None for one that failed. One that others gave up on in the meantime is left to them."""
        with suppress(UpdateFinishedTrialError):
            for name, value in attributes.items():
                self.storage.set_trial_user_attr(trial_id, name, value)
            self.storage.set_trial_state_values(
                trial_id, TrialState.FAIL if values is None else TrialState.COMPLETE, values
            )

    def recover(self) -> None:
        """Fail trials whose worker is gone."""
        for trial in self.trials():
            if trial.state == TrialState.RUNNING and self._is_gone(trial.user_attrs[WORKER]):
                with suppress(UpdateFinishedTrialError):  # another worker was faster
                    self.storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)

    def _is_gone(self, worker: str) -> bool:
        if worker == self.worker:
            return False
        if not self._pulses:
            return not is_alive(worker)
        pulse, now = self.study.user_attrs.get(f"pulse {worker}"), time.monotonic()
        known, since = self._seen.setdefault(worker, (pulse, now))
        if known != pulse:
            self._seen[worker] = pulse, now
            return False
        return now - since > self.grace_s

    def _beat(self) -> None:
        beats = 0
        while not self._stop.wait(PULSE_S if beats else 0.0):
            beats += 1
            with suppress(*away()):  # for a moment: the next beat may reach it
                self.study.set_user_attr(f"pulse {self.worker}", beats)

    def close(self) -> None:
        """Stop this worker's pulse."""
        self._stop.set()


def away() -> tuple[type[Exception], ...]:
    """What a database or a proxy raises that cannot be reached."""
    grpc = sys.modules.get("grpc")  # nobody else can raise its errors
    return (StorageInternalError,) if grpc is None else (StorageInternalError, grpc.RpcError)


def root_of(trial: FrozenTrial) -> str:
    """The root that a trial counts for."""
    return str(trial.user_attrs.get(ROOT, trial.number))


def is_done(trial: FrozenTrial) -> bool:
    """Has a trial an answer, be it that the policy is refused?"""
    refused = trial.state == TrialState.FAIL and trial.user_attrs.get(REPLAY, {}).get("level") == "refused"
    return trial.state == TrialState.COMPLETE or refused


def is_lost(trial: FrozenTrial) -> bool:
    """Did a trial end without an answer, though one was wanted?"""
    return trial.state == TrialState.FAIL and not is_done(trial) and not trial.user_attrs.get(SURPLUS)


def lost(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """The last trial of every root that has neither an answer nor a trial that may yet give one."""
    last = {root_of(trial): trial for trial in trials if is_lost(trial)}
    alive = {root_of(trial) for trial in trials if not is_lost(trial) and not trial.user_attrs.get(SURPLUS)}
    return [trial for root, trial in last.items() if root not in alive]


def admitted(trials: Sequence[FrozenTrial], limit: int) -> set[int]:
    """Numbers of the trials to run: the first of each root that was not lost, of the first `limit` roots.

    Numbers are unique and grow, so every worker that sees a trial admits the same.
    """
    roots: set[str] = set()
    running: set[str] = set()
    found = set()
    for trial in trials:
        root = root_of(trial)
        if trial.user_attrs.get(SURPLUS):
            continue
        if root not in roots and len(roots) >= limit:
            continue
        roots.add(root)
        if not is_lost(trial) and root not in running:
            running.add(root)
            found.add(trial.number)
    return found


def is_alive(worker: str) -> bool:
    """Does another process of this machine, by its id and when it started, still exist? Ids are used again."""
    pid, started, _ = worker.split(":")
    if int(pid) == os.getpid():
        return False  # an earlier search of this process
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return _started(int(pid)) == started


def _started(pid: int) -> str:
    """Clock ticks from boot to the start of a process; empty where the system does not say, z for a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return ""
    return "z" if fields[0] == "Z" else fields[19]
