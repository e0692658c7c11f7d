"""A policy that may be exchanged while it is in use: its file is read again whenever someone asks.

A file that is gone, or is no policy, changes nothing: the last good one stays in force, and what is wrong is told once.
Leaves out what an exchange means for whoever decodes (engine.deployment).
"""

from pathlib import Path

from specdial.policies.errors import UserError
from specdial.policies.file import MAX_BYTES, load_policy
from specdial.policies.schema import Policy


class WatchedPolicy:
    """The policy in force, and the file it follows; without a file it stays as it is."""

    def __init__(self, policy: Policy, path: Path | None) -> None:
        self.policy, self.path = policy, path
        self._seen = self._content()

    def refresh(self) -> str | None:
        """Read the file again where it changed. What is wrong with it, or None; `policy` is the last good one."""
        if self.path is None:
            return None
        content = self._content()
        if content == self._seen:
            return None
        self._seen = content
        try:
            self.policy = load_policy(self.path)
        except UserError as error:
            return str(error)
        return None

    def _content(self) -> bytes | None:
        """A policy file is short: comparing it costs less than a round, and misses no change, unlike its time."""
        if self.path is None:
            return None
        try:
            with self.path.open("rb") as file:
                return file.read(MAX_BYTES + 1)
        except OSError:
            return None
