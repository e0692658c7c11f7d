"""One Optuna study shared by many workers, any of which may be killed at any time.

A journal file serves the workers of one machine, a database those of many. Every trial belongs to a root: itself, or
the trial whose place it takes after that one's worker died. A root counts once, however often it had to be run.
A trial is stale when its worker is gone: in a journal when the process no longer exists, in a database when Optuna's
heartbeat stops, in both when no worker put its name to it within `GRACE_S`.
Leaves out what a trial is (simulator.search).
"""

import datetime
import fcntl
import json
import os
import secrets
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from specdial.policies.errors import UserError
from specdial.simulator.objectives import Direction

NAME = "tune"
GRACE_S = 20
HEARTBEAT_S = 5
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
    """A journal at a path, or a database at a URL. Raises UserError when it cannot be reached."""
    if "://" not in where:
        try:
            Path(where).parent.mkdir(parents=True, exist_ok=True)
            return JournalStorage(Journal(Path(where)))
        except OSError as error:
            raise UserError(f"cannot use {where}: {error.strerror}", "choose another storage=") from None
    for last in (False, False, False, True):
        try:
            with quiet():
                return RDBStorage(where, heartbeat_interval=HEARTBEAT_S, grace_period=GRACE_S)
        except ImportError as error:
            raise UserError(f"storage {where.split('://')[0]}: {error}", "pip install specdial[postgres]") from None
        except Exception as error:  # whatever the driver raises; also when two workers make the tables at once
            if last:
                raise UserError(f"cannot open storage {where}: {error}".splitlines()[0], "check storage=") from None
            time.sleep(0.5)
    raise AssertionError("unreachable")


@contextmanager
def quiet() -> Iterator[None]:
    """Without Optuna's notes on what it is about to do and on what is experimental."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        warnings.filterwarnings("ignore", message="Heartbeat of storage")  # ours beats without Study.optimize
        yield


class Shared:
    """One worker's view of the study."""

    def __init__(
        self,
        storage: BaseStorage,
        directions: Sequence[Direction],
        identity: dict[str, Any],
        grace_s: float = GRACE_S,
    ) -> None:
        """identity: what makes results comparable. Raises UserError when the study holds another search."""
        self.storage, self.grace_s = storage, grace_s
        self.worker = f"{os.getpid()}:{_started(os.getpid())}:{secrets.token_hex(4)}"
        with quiet():
            self.study = optuna.create_study(
                storage=storage, study_name=NAME, directions=directions, load_if_exists=True
            )
        known = self.study.user_attrs.get("identity")
        if known is None:
            self.study.set_user_attr("identity", identity)
        elif known != identity:
            differs = sorted(name for name in identity if known.get(name) != identity[name])
            raise UserError(
                f"the study was searched with another {', '.join(differs)}", "choose another storage= or out="
            )
        self._heart = _Heart(storage) if isinstance(storage, RDBStorage) else None

    def trials(self) -> list[FrozenTrial]:
        """All trials so far, by number, not to be changed."""
        return self.study.get_trials(deepcopy=False)

    def queue(self, points: Sequence[dict[str, Any]]) -> None:
        """Line up given points once, whoever comes first; those that two workers line up at once count once."""
        if self.study.user_attrs.get("queued", 0) >= len(points):
            return
        known = {root_of(trial) for trial in self.trials()}
        for i, point in enumerate(points):
            if f"given-{i}" not in known:
                self.study.enqueue_trial(point, user_attrs={ROOT: f"given-{i}"})
        self.study.set_user_attr("queued", len(points))

    def ask(self) -> optuna.Trial:
        """A trial of this worker's own, from the queue if there is one."""
        while True:
            with quiet():
                trial = self.study.ask()
            if self._heart is not None:
                self._heart.add(trial._trial_id)
            with suppress(UpdateFinishedTrialError):  # given up on before it had a name
                trial.set_user_attr(WORKER, self.worker)
                return trial

    def tell(self, trial: optuna.Trial, values: list[float] | None, attributes: dict[str, Any]) -> None:
        """Finish a trial; None for one that failed. One that others gave up on in the meantime is left to them."""
        try:
            for name, value in attributes.items():
                trial.set_user_attr(name, value)
            state = TrialState.FAIL if values is None else None
            self.study.tell(trial, values, state=state, skip_if_finished=True)
        except UpdateFinishedTrialError:
            pass
        finally:
            if self._heart is not None:
                self._heart.remove(trial._trial_id)

    def recover(self) -> None:
        """Fail trials whose worker is gone and line up others in their place."""
        trials = self.trials()
        for trial in trials:
            if trial.state == TrialState.RUNNING and self._is_stale(trial):
                self._fail(trial)
        if isinstance(self.storage, RDBStorage):
            with quiet():
                optuna.storages.fail_stale_trials(self.study)
        for trial in lost(self.trials()):
            point = {**trial.system_attrs.get("fixed_params", {}), **trial.params}
            self.study.enqueue_trial(point, user_attrs={ROOT: root_of(trial)})

    def _is_stale(self, trial: FrozenTrial) -> bool:
        worker = trial.user_attrs.get(WORKER)
        if worker is None:
            started = trial.datetime_start
            return started is not None and (datetime.datetime.now() - started).total_seconds() > self.grace_s
        return self._heart is None and worker != self.worker and not is_alive(worker)

    def _fail(self, trial: FrozenTrial) -> None:
        with suppress(UpdateFinishedTrialError):  # another worker was faster
            self.storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)

    def close(self) -> None:
        """Stop this worker's heartbeat."""
        if self._heart is not None:
            self._heart.stop()


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


class _Heart:
    """Beats for every trial under way, from a thread of its own, until it is stopped."""

    def __init__(self, storage: RDBStorage) -> None:
        self._storage, self._trials, self._stop = storage, set[int](), threading.Event()
        self._lock = threading.Lock()
        threading.Thread(target=self._beat, daemon=True).start()

    def add(self, trial_id: int) -> None:
        self._storage.record_heartbeat(trial_id)
        with self._lock:
            self._trials.add(trial_id)

    def remove(self, trial_id: int) -> None:
        with self._lock:
            self._trials.discard(trial_id)

    def stop(self) -> None:
        self._stop.set()

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_S):
            with self._lock:
                trials = list(self._trials)
            for trial_id in trials:
                self._storage.record_heartbeat(trial_id)
