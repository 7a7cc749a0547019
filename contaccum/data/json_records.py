"""JSON objects of a file, one a line or as one long list, and their fields with checked types."""

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from contaccum.data.bad_records import STRICT, BadRecords, Place
from contaccum.data.lines import CHUNK, MAX_LINE, not_utf8, numbered_lines, open_bytes
from contaccum.errors import InputError

Element = TypeVar("Element")
Record = dict[str, Any]
Read = Callable[[Record, Place, int], Element]
"""From a record, its place and its number in the file (from 1) to what it holds; raises what place.error gives."""

_OF_PASSAGES = frozenset({"_id", "docid", "passage_id", "psg_id", "title", "text", "score"})
_OF_RECORDS = _OF_PASSAGES | {
    "query_id", "query", "question", "pos", "pos_id", "pos_scores", "neg", "neg_id", "neg_scores",
    "positive_passages", "negative_passages", "positive_ctxs", "hard_negative_ctxs", "negative_ctxs",
}  # fmt: skip
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_SPACE = re.compile(r"[ \t\r\n]*")


def json_lines(
    path: Path, expected: str, read: Read[Element], bad: BadRecords = STRICT
) -> Iterator[tuple[Place, Element]]:
    """The JSON object of every line, as ``read`` reads it; ``expected`` says in an error what a line should hold."""
    return json_objects(path, numbered_lines(path, bad=bad), expected, read, bad)


def json_objects(
    path: Path, lines: Iterable[tuple[int, str]], expected: str, read: Read[Element], bad: BadRecords
) -> Iterator[tuple[Place, Element]]:
    """As ``json_lines``, of lines from anywhere with their numbers; ``path`` is what errors name."""
    for count, (number, line) in enumerate(lines, 1):
        place = Place(path, number)
        try:
            element = read(_object_of(line, place, expected), place, count + bad.unread)
        except InputError as error:
            bad.leave_out(error)
        else:
            yield place, element


def _object_of(line: str, place: Place, expected: str) -> Record:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise place.error(f"not JSON ({error.msg} at column {error.colno}), expected {expected}") from error
    except (ValueError, RecursionError) as error:
        raise place.error(f"not usable JSON ({error}), expected {expected}") from error
    if "\\u" in line and _SURROGATE.search(line):
        refuse_half_characters(value, place)
    return record_of(value, place, expected)


def json_list(
    path: Path, expected: str, read: Read[Element], bad: BadRecords = STRICT
) -> Iterator[tuple[Place, Element]]:
    """The objects of one JSON list, read as they come: memory holds a window of the file, never the whole of it.

    What is no JSON list is refused whatever may be left out: behind such a place no record can be told from another.
    """
    with open_bytes(path) as file:
        yield from _ListReader(file, path, expected).objects(read, bad)


class _ListReader:
    def __init__(self, file: BinaryIO, path: Path, expected: str) -> None:
        self._file, self._path, self._expected = file, path, expected
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._json = json.JSONDecoder()
        self._window, self._position, self._line, self._record = "", 0, 1, 0

    def objects(self, read: Read[Element], bad: BadRecords) -> Iterator[tuple[Place, Element]]:
        self._take("[")
        while self._peek() != "]":
            if self._record:
                self._take(",")
                self._peek()
            self._record += 1
            place, (value, text) = self._place(), self._value()
            bad.reading(place, text)
            try:
                if _SURROGATE.search(text):
                    refuse_half_characters(value, place)
                element = read(record_of(value, place, self._expected), place, self._record)
            except InputError as error:
                bad.leave_out(error)
            else:
                yield place, element
        self._take("]")
        if self._peek():
            raise self._place().error("found something behind the list's end, expected the end of the file")

    def _place(self) -> Place:
        return Place(self._path, self._line, self._record)

    def _more(self) -> bool:
        """Drop what is used and read on; False at the end of the file."""
        if len(self._window) - self._position > MAX_LINE:
            raise self._place().error(f"the record has more than {MAX_LINE} characters, expected at most that")
        data = self._file.read(max(CHUNK, len(self._window)))  # doubling keeps a very long record's cost linear
        try:
            chunk = self._utf8.decode(data, final=not data)
        except UnicodeDecodeError as error:
            ahead = self._window.count("\n", self._position) + error.object.count(b"\n", 0, error.start)
            raise Place(self._path, self._line + ahead).error(not_utf8(error)) from error
        if chunk:
            self._window, self._position = self._window[self._position :] + chunk, 0
        return bool(chunk)

    def _advance(self, position: int) -> None:
        self._line += self._window.count("\n", self._position, position)
        self._position = position

    def _peek(self) -> str:
        """The next character that is no white space, "" at the end of the file."""
        while True:
            match = _SPACE.match(self._window, self._position)
            assert match is not None, "the pattern matches the empty string"
            self._advance(match.end())
            if self._position < len(self._window):
                return self._window[self._position]
            if not self._more():
                return ""

    def _take(self, character: str) -> None:
        if (found := self._peek()) != character:
            what = repr(found) if found else "the end of the file"
            raise self._place().error(f"found {what} where {character!r} should stand, expected {self._expected}")
        self._advance(self._position + 1)

    def _value(self) -> tuple[Any, str]:
        """The next value, and its text."""
        while True:
            try:
                value, end = self._json.raw_decode(self._window, self._position)
                break
            except json.JSONDecodeError as error:
                if self._is_cut(error) and self._more():
                    continue
                self._advance(error.pos)
                raise self._place().error(f"not JSON ({error.msg}), expected {self._expected}") from error
            except (ValueError, RecursionError) as error:
                raise self._place().error(f"not usable JSON ({error}), expected {self._expected}") from error
        text = self._window[self._position : end]
        self._advance(end)
        return value, text

    def _is_cut(self, error: json.JSONDecodeError) -> bool:
        # a literal or an escape broken at the window's edge is reported up to 12 characters before it
        return error.msg.startswith("Unterminated string") or error.pos >= len(self._window) - 12


def refuse_half_characters(value: Any, place: Place) -> None:
    """Refuse JSON such as "\\ud800": half of a surrogate pair, which no UTF-8 file can hold."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise place.error("found half a character (a lone surrogate escape), expected Unicode text") from error


def known_fields(record: Record) -> Record:
    """A record, and the passages in it, without the fields that no reader asks for."""
    return {
        name: [_known(part, _OF_PASSAGES) if isinstance(part, dict) else part for part in value]
        if isinstance(value, list)
        else value
        for name, value in _known(record, _OF_RECORDS).items()
    }


def _known(record: Record, names: frozenset[str]) -> Record:
    return {name: value for name, value in record.items() if name in names}


def kind_of(value: Any) -> str:
    """A JSON value's kind in words, for an error's sentence."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    if isinstance(value, int | float) or type(value) in names:
        return names.get(type(value), f"the number {value!r}")
    return f"of the kind {type(value).__name__}"  # of a table's row, which holds more kinds than JSON


def record_of(value: Any, place: Place, expected: str) -> Record:
    """The value itself, which must be an object."""
    if isinstance(value, dict):
        return value
    raise place.error(f"found {kind_of(value)}, expected {expected}")


def string_field(record: Record, name: str, place: Place) -> str:
    """A required string, which may be empty."""
    value = record.get(name)
    if isinstance(value, str):
        return value
    raise _wrong(record, name, place, "a string")


def title_field(record: Record, place: Place) -> str:
    """The field ``title``, "" where it is absent or null."""
    return "" if record.get("title") is None else string_field(record, "title", place)


def id_field(record: Record, name: str, place: Place) -> str:
    """A required id: a string that is not empty, or a whole number, which becomes a string."""
    value = record.get(name)
    if isinstance(value, str) and value:
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise _wrong(record, name, place, "an id (a string that is not empty, or a whole number)")


def list_field(
    record: Record, name: str, place: Place, read: Callable[[Any, Place], Element], required: bool = False
) -> Sequence[Element]:
    """A list, each element read by ``read(element, its place)``; absent or null is the empty list unless required."""
    value = record.get(name)
    if value is None and not required:
        return ()
    if not isinstance(value, list):
        raise _wrong(record, name, place, "a list")
    return [read(element, place._replace(inside=f"{name}[{number}]")) for number, element in enumerate(value)]


def _wrong(record: Record, name: str, place: Place, expected: str) -> InputError:
    if name not in record:
        found = ", ".join(map(repr, list(record)[:8])) or "an empty object"
        return place.error(f"field {name!r} is missing (found {found}), expected {expected}")
    value = record[name]
    return place.error(f"field {name!r} is {'empty' if value == '' else kind_of(value)}, expected {expected}")
