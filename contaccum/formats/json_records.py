"""Read JSON objects from a file, one per line or in one list, and check their fields."""

import codecs
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from contaccum.errors import InputError
from contaccum.formats.records import (
    CHUNK,
    MAX_LINE,
    OnError,
    SourceLocation,
    first_character,
    not_utf8,
    numbered_lines,
    open_bytes,
    stop,
)

Element = TypeVar("Element")
Record = dict[str, Any]
Read = Callable[[Record, SourceLocation, int], Element]
"""Convert a record. Arguments: record, location, number of the record (from 1).

An invalid record raises InputError.
"""

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_SPACE = re.compile(r"[ \t\r\n]*")


def json_records(
    path: Path, expected: str, read: Read[Element], on_error: OnError = stop
) -> Iterator[tuple[SourceLocation, Element]]:
    """Yield the location of each JSON object of a file, and the object converted by ``read``.

    A file that starts with ``[`` is one JSON list; any other file has one object per line.
    expected: description of a valid record, for error messages.
    """
    if first_character(path) == "[":
        yield from _json_list(path, expected, read, on_error)
        return
    for number, (location, line) in enumerate(numbered_lines(path, on_error=on_error), 1):
        try:
            element = read(_object_of(line, location, expected), location, number)
        except InputError as error:
            on_error(error)
        else:
            yield location, element


def _object_of(line: str, location: SourceLocation, expected: str) -> Record:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise location.error(
            f"not JSON ({error.msg} at column {error.colno}); each line must be {expected}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise location.error(f"not usable JSON ({error}); each line must be {expected}") from error
    if "\\u" in line and _SURROGATE.search(line):
        refuse_lone_surrogates(value, location)
    return record_of(value, location, expected)


def _json_list(
    path: Path, expected: str, read: Read[Element], on_error: OnError
) -> Iterator[tuple[SourceLocation, Element]]:
    """Read a file that is one JSON list, piece by piece, so that a large list needs little memory.

    A syntax error is always raised, because the start of the next record is unknown.
    """
    with open_bytes(path) as file:
        window = _Window(file, path)
        window.expect("[")
        number = 0
        while window.next_character() != "]":
            if number:
                window.expect(",")
                window.next_character()
            number += 1
            location = SourceLocation(path, window.line, number)
            value, text = window.value(location, expected)
            try:
                if _SURROGATE.search(text):
                    refuse_lone_surrogates(value, location)
                element = read(record_of(value, location, expected), location, number)
            except InputError as error:
                on_error(error)
            else:
                yield location, element
        window.expect("]")
        if window.next_character():
            raise window.error("text follows the end of the list; the file must end there")


class _Window:
    """Part of a JSON file that is in memory, and the position of the next character."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.line = 1  # line number of the next character
        self._file = file
        self._path = path
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._json = json.JSONDecoder()
        self._text = ""
        self._position = 0

    def error(self, message: str) -> InputError:
        return SourceLocation(self._path, self.line).error(message)

    def next_character(self) -> str:
        """Skip white space and return the next character, or "" at the end of the file."""
        while True:
            match = _SPACE.match(self._text, self._position)
            assert match is not None, "the pattern matches the empty string"
            self._advance(match.end())
            if self._position < len(self._text):
                return self._text[self._position]
            if not self._read_more():
                return ""

    def expect(self, character: str) -> None:
        """Skip white space and ``character``. Raise InputError if another character follows."""
        found = self.next_character()
        if found != character:
            what = repr(found) if found else "the end of the file"
            raise self.error(
                f"found {what} instead of {character!r}; the file must be one JSON list"
            )
        self._advance(self._position + 1)

    def value(self, location: SourceLocation, expected: str) -> tuple[Any, str]:
        """Return the JSON value at the position, and its text."""
        while True:
            try:
                value, end = self._json.raw_decode(self._text, self._position)
                break
            except json.JSONDecodeError as error:
                # If the window ends inside a literal or an escape, the reported position is up to
                # 12 characters before the end.
                truncated = error.pos >= len(self._text) - 12
                truncated = truncated or error.msg.startswith("Unterminated string")
                if truncated and self._read_more():
                    continue
                self._advance(error.pos)
                location = location._replace(line=self.line)
                raise location.error(
                    f"not JSON ({error.msg}); each element must be {expected}"
                ) from error
            except (ValueError, RecursionError) as error:
                raise location.error(
                    f"not usable JSON ({error}); each element must be {expected}"
                ) from error
        text = self._text[self._position : end]
        self._advance(end)
        return value, text

    def _advance(self, position: int) -> None:
        self.line += self._text.count("\n", self._position, position)
        self._position = position

    def _read_more(self) -> bool:
        """Drop the text before the position, and read more text.

        Return False at the end of the file.
        """
        kept = self._text[self._position :]
        if len(kept) > MAX_LINE:
            raise self.error(
                f"the record has more than {MAX_LINE} characters; longer records are not read"
            )
        # Doubling the number of bytes keeps the time for a very long record linear.
        data = self._file.read(max(CHUNK, len(self._text)))
        try:
            chunk = self._utf8.decode(data, final=not data)
        except UnicodeDecodeError as error:
            lines = kept.count("\n") + error.object.count(b"\n", 0, error.start)
            location = SourceLocation(self._path, self.line + lines)
            raise location.error(not_utf8(error)) from error
        if chunk:
            self._text = kept + chunk
            self._position = 0
        return bool(chunk)


def refuse_lone_surrogates(value: Any, location: SourceLocation) -> None:
    """Raise InputError for half of a surrogate pair, such as "\\ud800", which is not UTF-8."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise location.error(
            "found half a character (a lone surrogate escape); text must be valid Unicode"
        ) from error


def kind_of(value: Any) -> str:
    """Describe the type of a JSON value in words."""
    names = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "true or false",
        type(None): "null",
    }
    if isinstance(value, int | float) or type(value) in names:
        return names.get(type(value), f"the number {value!r}")
    return f"a {type(value).__name__}"  # Parquet has more types than JSON


def record_of(value: Any, location: SourceLocation, expected: str) -> Record:
    if isinstance(value, dict):
        return value
    raise location.error(f"found {kind_of(value)}; it must be {expected}")


def string_field(record: Record, name: str, location: SourceLocation) -> str:
    """Return the required string field ``name`` of a record. The string may be empty."""
    value = record.get(name)
    if isinstance(value, str):
        return value
    raise _field_error(record, name, location, "a string")


def title_field(record: Record, location: SourceLocation) -> str:
    """Return the field ``title`` of a record. Return "" if the field is missing or null."""
    return "" if record.get("title") is None else string_field(record, "title", location)


def id_field(record: Record, name: str, location: SourceLocation) -> str:
    """Return the required id field ``name`` as a string.

    The id is a non-empty string or an integer.
    """
    value = record.get(name)
    if isinstance(value, str) and value:
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise _field_error(record, name, location, "an id (a non-empty string or an integer)")


def list_field(
    record: Record,
    name: str,
    location: SourceLocation,
    read: Callable[[Any, SourceLocation], Element],
    required: bool = False,
) -> Sequence[Element]:
    """Convert the elements of the list field ``name`` with ``read``.

    A missing or null field gives () unless ``required``.
    """
    value = record.get(name)
    if value is None and not required:
        return ()
    if not isinstance(value, list):
        raise _field_error(record, name, location, "a list")
    return [
        read(element, location._replace(field=f"{name}[{number}]"))
        for number, element in enumerate(value)
    ]


def _field_error(record: Record, name: str, location: SourceLocation, expected: str) -> InputError:
    if name not in record:
        found = ", ".join(map(repr, list(record)[:8])) or "none"
        return location.error(
            f"field {name!r} is missing (other fields: {found}); it is required and must be "
            f"{expected}"
        )
    value = record[name]
    return location.error(
        f"field {name!r} is {'empty' if value == '' else kind_of(value)}; it must be {expected}"
    )
