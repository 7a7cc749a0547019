"""Where a record stands in a file, and what is left out of a reading where that was asked for."""

from pathlib import Path
from typing import Any, NamedTuple

from contaccum.errors import InputError

LONGEST = 2000  # characters of a record's text that the quarantine keeps


class Place(NamedTuple):
    """Where something stands in a file; ``line`` and ``record`` count from 1, ``record`` is 0 in line formats."""

    path: Path
    line: int
    record: int = 0
    inside: str = ""

    def __str__(self) -> str:
        record = f" (record {self.record})" if self.record else ""
        return f"{self.path}, line {self.line}{record}" + (f", {self.inside}" if self.inside else "")

    def error(self, found_and_expected: str) -> InputError:
        """An InputError that starts with this place."""
        return InputError(f"{self}: {found_and_expected}")


class BadRecords:
    """What one reading of a file leaves out: at most ``limit`` records; the error of the next one is raised.

    A reader says what it is reading; whoever finds it bad, the reader or one above it that knows more of the data set, has
    it left out.
    """

    def __init__(self, limit: int = 0) -> None:
        if limit < 0:
            raise InputError(f"max_bad_records is {limit}, expected at least 0")
        self.limit = limit
        self.found: list[dict[str, Any]] = []
        """Entries of the quarantine, in the order in which they were found bad."""
        self.unread = 0
        """Lines among them that are not even text, so that no reader of records met them."""
        self._place, self._text = Place(Path(), 0), ""

    def reading(self, place: Place, text: str) -> None:
        """The record that whatever is found bad from now on belongs to; ``text`` as it stands in the file."""
        self._place, self._text = place, text

    def leave_out(self, error: InputError) -> None:
        """Put the record that is being read into quarantine; raises its error where there are as many as may be."""
        if len(self.found) >= self.limit:
            raise error
        place = {"file": str(self._place.path), "line": self._place.line}
        if self._place.record:
            place["record"] = self._place.record
        text = {"text": self._text[:LONGEST], "cut": len(self._text) > LONGEST}
        self.found.append({**place, "error": str(error), **text})


STRICT = BadRecords()
"""Nothing is left out."""
