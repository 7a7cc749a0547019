"""Read JSON objects from a file, one per line or in one list, and check the types of their fields.

The type of a record is declared as a ``msgspec.Struct``. Other fields are skipped. ``msgspec``
refuses text that is not valid Unicode, such as half a surrogate pair, and numbers that are not
finite.
"""

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from contaccum.errors import InputError
from contaccum.formats.records import (
    CHUNK,
    OnError,
    SourceLocation,
    first_character,
    numbered_lines,
    open_bytes,
    stop,
)

Element = TypeVar("Element")
_SEPARATORS = re.compile(r"[\s,]*")


def json_records(
    path: Path, type_: type[Element], expected: str, on_error: OnError = stop
) -> Iterator[tuple[SourceLocation, Element]]:
    """Yield the location of each JSON object of a file, and the object as ``type_``.

    A file that starts with ``[`` is one JSON list; any other file has one object per line.
    expected: description of a valid record, for error messages.
    """
    decoder = msgspec.json.Decoder(type_)
    is_list = first_character(path) == "["
    texts = _list_elements(path) if is_list else numbered_lines(path, on_error=on_error)
    for location, text in texts:
        try:
            record = decoder.decode(text)
        except msgspec.ValidationError as error:
            found = ""
            if re.search(r"missing required field `\w+`$", str(error)):  # not of an inner object
                found = f"; found {', '.join(msgspec.json.decode(text)) or 'no field'}"
            on_error(location.error(f"{error}; the record must be {expected}{found}"))
        except (msgspec.DecodeError, RecursionError) as error:
            on_error(location.error(f"not usable JSON ({error}); the record must be {expected}"))
        else:
            yield location, record


def _list_elements(path: Path) -> Iterator[tuple[SourceLocation, str]]:
    """Yield the location and the text of each element of a file that is one JSON list.

    The file is read piece by piece, so that a large list needs little memory. A syntax error is
    always raised, because the start of the next element is unknown.
    """
    decoder = json.JSONDecoder()
    with open_bytes(path) as file:
        reader = io.TextIOWrapper(file, encoding="utf-8", newline="")
        try:
            text = reader.read(CHUNK)
            start = text.index("[") + 1
            line = 1 + text.count("\n", 0, start)
            number = 1
            while True:
                skipped = _SEPARATORS.match(text, start)
                assert skipped is not None, "the pattern matches the empty string"
                line += text.count("\n", start, skipped.end())
                start = skipped.end()
                if text[start : start + 1] == "]":
                    break
                location = SourceLocation(path, line, number)
                try:
                    end = decoder.raw_decode(text, start)[1]
                except (ValueError, RecursionError) as error:
                    # If the text ends inside a literal or an escape, the reported position is up
                    # to 12 characters before the end.
                    unfinished = isinstance(error, json.JSONDecodeError) and (
                        error.pos >= len(text) - 12 or error.msg.startswith("Unterminated string")
                    )
                    # Doubling the size keeps the time for a very long record linear.
                    more = reader.read(max(CHUNK, len(text))) if unfinished else ""
                    if not more:
                        raise location.error(f"not usable JSON ({error})") from error
                    text = text[start:] + more
                    start = 0
                    continue
                yield location, text[start:end]
                line += text.count("\n", start, end)
                start = end
                number += 1
            if (text[start + 1 :] + reader.read()).strip():
                raise InputError(
                    f"{path}:{line}: text follows the end of the list; the file must end there"
                )
        except UnicodeDecodeError:
            for _ in numbered_lines(path):  # raises an error with the line and the encoding
                pass
            raise
