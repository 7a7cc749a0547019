"""Read JSON objects from a file, one per line or all in one list, and check the types of their fields."""

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from contaccum.errors import InputError
from contaccum.formats.records import (
    CHUNK,
    MAX_LINE,
    STRICT,
    RejectedRecords,
    SourceLocation,
    lines_of,
    not_utf8,
    numbered_lines,
    open_bytes,
)

Element = TypeVar("Element")
Record = dict[str, Any]
Read = Callable[[Record, SourceLocation, int], Element]
"""Convert a record. Arguments: record, location, number of the record (from 1). An invalid record raises InputError."""

_PASSAGE_FIELDS = frozenset({"_id", "docid", "passage_id", "psg_id", "title", "text", "score"})
_RECORD_FIELDS = _PASSAGE_FIELDS | {
    "query_id", "query", "question", "pos", "pos_id", "pos_scores", "neg", "neg_id", "neg_scores",
    "positive_passages", "negative_passages", "positive_ctxs", "hard_negative_ctxs", "negative_ctxs",
}  # fmt: skip
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_SPACE = re.compile(r"[ \t\r\n]*")


def json_lines(
    path: Path, expected: str, read: Read[Element], rejected: RejectedRecords = STRICT
) -> Iterator[tuple[SourceLocation, Element]]:
    """Yield the location and the JSON object of each line, converted by ``read``.

    expected: description of a valid record, for error messages.
    """
    return json_objects(numbered_lines(path, rejected=rejected), expected, read, rejected)


def json_objects(
    lines: Iterable[tuple[SourceLocation, str]], expected: str, read: Read[Element], rejected: RejectedRecords
) -> Iterator[tuple[SourceLocation, Element]]:
    """Yield the location and the JSON object of each line in ``lines``, converted by ``read`` (see ``json_lines``)."""
    for count, (location, line) in enumerate(lines, 1):
        with rejected:
            yield location, read(_object_of(line, location, expected), location, count + rejected.undecodable)


def _object_of(line: str, location: SourceLocation, expected: str) -> Record:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise location.error(f"not JSON ({error.msg} at column {error.colno}); each line must be {expected}") from error
    except (ValueError, RecursionError) as error:
        raise location.error(f"not usable JSON ({error}); each line must be {expected}") from error
    if "\\u" in line and _SURROGATE.search(line):
        refuse_lone_surrogates(value, location)
    return record_of(value, location, expected)


def json_list(
    path: Path, expected: str, read: Read[Element], rejected: RejectedRecords = STRICT
) -> Iterator[tuple[SourceLocation, Element]]:
    """Read a file that is one JSON list. Yield the location of each object, and the object converted by ``read``.

    The file is read in parts. A syntax error raises InputError even if ``rejected`` allows invalid records, because the
    start of the next record is unknown. expected: see ``json_lines``.
    """
    with open_bytes(path, rejected.max_unpacked) as file:
        yield from _ListReader(file, path, expected).objects(read, rejected)


def json_stream(file: BufferedReader, path: Path, expected: str) -> Iterator[tuple[SourceLocation, Record]]:
    """Yield the location and the object of each record of an open file. The file has JSON lines or is one JSON list."""
    if file.peek(1)[:1] == b"[":
        yield from _ListReader(file, path, expected).objects(lambda record, *_: record, STRICT)
    else:
        yield from json_objects(lines_of(file, path), expected, lambda record, *_: record, STRICT)


class _ListReader:
    """Reads the elements of one JSON list, piece by piece."""

    def __init__(self, file: BinaryIO, path: Path, expected: str) -> None:
        self._file, self._path, self._expected = file, path, expected
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._json = json.JSONDecoder()
        self._window, self._position, self._line, self._record = "", 0, 1, 0

    def objects(self, read: Read[Element], rejected: RejectedRecords) -> Iterator[tuple[SourceLocation, Element]]:
        self._expect("[")
        while self._peek() != "]":
            if self._record:
                self._expect(",")
                self._peek()
            self._record += 1
            location, (value, text) = self._location(), self._value()
            rejected.start(location, text)
            with rejected:
                if _SURROGATE.search(text):
                    refuse_lone_surrogates(value, location)
                yield location, read(record_of(value, location, self._expected), location, self._record)
        self._expect("]")
        if self._peek():
            raise self._location().error("text follows the end of the list; the file must end there")

    def _location(self) -> SourceLocation:
        return SourceLocation(self._path, self._line, self._record)

    def _read_more(self) -> bool:
        """Drop the text that is already parsed, and read more text. Return False at the end of the file."""
        if len(self._window) - self._position > MAX_LINE:
            raise self._location().error(f"the record has more than {MAX_LINE} characters; longer records are not read")
        # Doubling the number of bytes keeps the time for a very long record linear.
        data = self._file.read(max(CHUNK, len(self._window)))
        try:
            chunk = self._utf8.decode(data, final=not data)
        except UnicodeDecodeError as error:
            lines = self._window.count("\n", self._position) + error.object.count(b"\n", 0, error.start)
            raise SourceLocation(self._path, self._line + lines).error(not_utf8(error)) from error
        if chunk:
            self._window, self._position = self._window[self._position :] + chunk, 0
        return bool(chunk)

    def _advance(self, position: int) -> None:
        self._line += self._window.count("\n", self._position, position)
        self._position = position

    def _peek(self) -> str:
        """Return the next character that is not white space. Return "" at the end of the file."""
        while True:
            match = _SPACE.match(self._window, self._position)
            assert match is not None, "the pattern matches the empty string"
            self._advance(match.end())
            if self._position < len(self._window):
                return self._window[self._position]
            if not self._read_more():
                return ""

    def _expect(self, character: str) -> None:
        if (found := self._peek()) != character:
            what = repr(found) if found else "the end of the file"
            raise self._location().error(f"found {what} instead of {character!r}; the file must be one JSON list")
        self._advance(self._position + 1)

    def _value(self) -> tuple[Any, str]:
        while True:
            try:
                value, end = self._json.raw_decode(self._window, self._position)
                break
            except json.JSONDecodeError as error:
                if self._is_truncated(error) and self._read_more():
                    continue
                self._advance(error.pos)
                raise self._location().error(
                    f"not JSON ({error.msg}); each element must be {self._expected}"
                ) from error
            except (ValueError, RecursionError) as error:
                raise self._location().error(
                    f"not usable JSON ({error}); each element must be {self._expected}"
                ) from error
        text = self._window[self._position : end]
        self._advance(end)
        return value, text

    def _is_truncated(self, error: json.JSONDecodeError) -> bool:
        # If the window ends inside a literal or an escape, the reported position is up to 12 characters before the end.
        return error.msg.startswith("Unterminated string") or error.pos >= len(self._window) - 12


def refuse_lone_surrogates(value: Any, location: SourceLocation) -> None:
    """Raise InputError if the value contains half of a surrogate pair, such as "\\ud800", which UTF-8 cannot encode."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise location.error("found half a character (a lone surrogate escape); text must be valid Unicode") from error


def known_fields(record: Record, known: frozenset[str] = _RECORD_FIELDS) -> Record:
    """Copy a record and its passages; keep only the fields that readers use."""
    found = {name: record[name] for name in record if name in known}
    for name, value in found.items():
        if isinstance(value, list):
            found[name] = [known_fields(part, _PASSAGE_FIELDS) if isinstance(part, dict) else part for part in value]
    return found


def kind_of(value: Any) -> str:
    """Describe the type of a JSON value in words."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
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
    """Return the required id field ``name`` as a string. The id is a non-empty string or an integer."""
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
    """Convert the elements of the list field ``name`` with ``read``. A missing or null field gives () unless ``required``."""
    value = record.get(name)
    if value is None and not required:
        return ()
    if not isinstance(value, list):
        raise _field_error(record, name, location, "a list")
    return [read(element, location._replace(field=f"{name}[{number}]")) for number, element in enumerate(value)]


def _field_error(record: Record, name: str, location: SourceLocation, expected: str) -> InputError:
    if name not in record:
        found = ", ".join(map(repr, list(record)[:8])) or "none"
        return location.error(
            f"field {name!r} is missing (other fields: {found}); it is required and must be {expected}"
        )
    value = record[name]
    return location.error(f"field {name!r} is {'empty' if value == '' else kind_of(value)}; it must be {expected}")
