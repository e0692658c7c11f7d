"""The one error a user is meant to read: what is wrong, and what to change."""


class UserError(Exception):
    """A mistake in input, printed as one line with exit code 2.

    cause: what is wrong, naming the offending value. remedy: what to change, in the imperative. field: the dotted path
    of the setting at fault, where there is one; a reader of files turns it into a line number.
    """

    def __init__(self, cause: str, remedy: str, *, field: str | None = None) -> None:
        super().__init__(f"{cause}; {remedy}")
        self.cause = cause
        self.remedy = remedy
        self.field = field
