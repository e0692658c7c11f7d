"""Files of other tools, line by line: every fault names the file and the line. Leaves out what the lines mean."""

import csv
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdial.policies.errors import UserError
from specdial.policies.fields import shown

MOST = 1 << 50  # of any count or time
MOST_TOKENS = 1 << 24


@dataclass(frozen=True, slots=True)
class Line:
    """One record of a file: an object with named fields. number: from 1."""

    path: Path
    number: int
    fields: Mapping[str, Any]

    @property
    def name(self) -> str:
        return f"{self.path.name}:{self.number}"

    def error(self, cause: str) -> UserError:
        """What to raise on a fault in this line."""
        return UserError(f"{self.path} line {self.number}: {cause}", "mend or remove that line")

    def get(self, dotted: str) -> Any:
        """A nested field, None where any part of the way is missing or null."""
        value: Any = self.fields
        for part in dotted.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def whole(self, dotted: str, *, low: int = 0, high: int = MOST) -> int:
        """A whole number in bounds; text of one where the file is CSV."""
        value = self.number_at(dotted, low=low, high=high)
        if value != int(value):
            raise self.error(f"{dotted} is {value:g}, not a whole number")
        return int(value)

    def number_at(self, dotted: str, *, low: float = 0.0, high: float = float(MOST)) -> float:
        """A finite number in bounds; text of one where the file is CSV."""
        value = self.get(dotted)
        if value is None:
            raise self.error(f"{dotted} is missing")
        try:
            found = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            found = math.nan
        if not low <= found <= high:  # NaN is in no bounds
            raise self.error(f"{dotted} is {shown(value)}, not a number from {low:g} to {high:g}")
        return found

    def counts(self, dotted: str, *, high: int = MOST) -> list[int]:
        """A list of whole numbers from 0."""
        value = self.get(dotted)
        if not isinstance(value, list):
            raise self.error(f"{dotted} is {shown(value)}, not a list")
        for item in value:
            if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item <= high:
                raise self.error(f"{dotted} holds {shown(item)}, not a whole number from 0 to {high}")
        return value

    def text(self, dotted: str) -> str:
        """Text that is not empty."""
        value = self.get(dotted)
        if not isinstance(value, str) or not value.strip():
            raise self.error(f"{dotted} is {shown(value)}, not text")
        return value


def json_lines(path: Path) -> Iterator[Line]:
    """The objects of a JSON lines file; blank lines are passed over. Raises UserError on the first that is none."""
    for number, text in text_lines(path):
        if text.strip():
            yield Line(path, number, _object(path, number, text))


def csv_lines(path: Path, needed: tuple[str, ...]) -> Iterator[Line]:
    """The rows of a CSV file with a header that has at least these names, quotes included."""
    reader = csv.reader(text for _, text in text_lines(path))
    try:
        header = [name.strip().removeprefix("\ufeff") for name in next(reader, [])]
        missing = [name for name in needed if name not in header]
        if missing:
            raise UserError(f"{path} line 1: the header lacks {missing[0]}", f"name the columns {', '.join(needed)}")
        for row in reader:
            if any(cell.strip() for cell in row):
                line = Line(path, reader.line_num, dict(zip(header, row, strict=False)))
                if len(row) != len(header):
                    raise line.error(f"{len(row)} values under {len(header)} columns")
                yield line
    except csv.Error as error:
        raise UserError(f"{path} line {reader.line_num}: {error}", "mend or remove that line") from None


def text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number, text) of every line. Raises UserError for a file that cannot be read or is not UTF-8."""
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                try:
                    yield number, raw.decode("utf-8")
                except UnicodeDecodeError:
                    raise UserError(f"{path} line {number} is not UTF-8", "mend or remove that line") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}", "check source=") from None


def _object(path: Path, number: int, text: str) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise UserError(f"{path} line {number} is not JSON", "mend or remove that line") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} line {number} is no object", "mend or remove that line")
    return found
