"""The one error a user is meant to read: what is wrong, and what to change."""


class UserError(Exception):
    """A mistake in input, printed as one line with exit code 2.

    cause: what is wrong, naming the offending value. remedy: what to change, in the imperative. field: the dotted path
    of the setting at fault, where there is one; a reader of files turns it into a line number. Line breaks and control
    characters, which names inside a file may hold, do not reach the message.
    """

    def __init__(self, cause: str, remedy: str, *, field: str | None = None) -> None:
        self.cause = _line(cause)
        self.remedy = _line(remedy)
        self.field = field
        super().__init__(f"{self.cause}; {self.remedy}")


def _line(text: str) -> str:
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in " ".join(text.split()))
