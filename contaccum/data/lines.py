"""Text files read line by line, plain or gzipped; every error names its file and line.

Files are UTF-8. Lines end at ``\\n`` alone, so that U+2028 and its like stay inside a text; ``\\r\\n`` is accepted,
a byte order mark is dropped, blank lines are skipped.
"""

import gzip
import io
import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from contaccum.data.bad_records import LONGEST, STRICT, BadRecords, Place
from contaccum.errors import InputError

CHUNK = 1 << 20  # bytes read at a time
MAX_LINE = 1 << 24  # bytes of one line or record; what is longer is no line of text
_BOM = b"\xef\xbb\xbf"
_SPACE = " \t\r\v\f"  # other white space, such as U+2028, is text
_GZIP = b"\x1f\x8b"


@contextmanager
def open_bytes(path: Path) -> Iterator[io.BufferedReader]:
    """Open a plain or gzipped file (told by its first bytes), behind its byte order mark."""
    if "\0" in str(path):
        raise InputError(f"{str(path)!r}: no such file, since no path can hold a NUL")
    try:
        if not stat.S_ISREG(os.stat(path).st_mode) and not os.path.isdir(path):
            raise InputError(f"{path}: is a pipe or device, expected a file, which can be read more than once")
        with open(path, "rb") as raw:
            zipped = raw.read(2) == _GZIP
            raw.seek(0)
            with _unzipped(raw) if zipped else raw as file:
                if file.peek(3)[:3] == _BOM:
                    file.read(3)
                yield file
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file") from error
    except IsADirectoryError as error:
        raise InputError(f"{path}: is a folder, expected a file") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path}: the gzip stream is damaged or cut short ({error})") from error
    except OSError as error:
        raise InputError(f"{path}: could not be read ({error.strerror or error})") from error


def _unzipped(raw: io.BufferedReader) -> io.BufferedReader:
    # GzipFile has all that a BufferedReader reads from, though its type does not say so
    return io.BufferedReader(cast(Any, gzip.GzipFile(fileobj=raw)), CHUNK)


def first_character(path: Path) -> str:
    """The first character of a file that is no white space, "" where there is none; tells the formats apart."""
    with open_bytes(path) as file:
        for _ in range(0, MAX_LINE, CHUNK):  # a zip bomb of spaces is not followed to its end
            if text := file.read(CHUNK).decode("utf-8", errors="replace").lstrip():
                return text[0]
    return ""


def numbered_lines(path: Path, blank: bool = False, bad: BadRecords = STRICT) -> Iterator[tuple[int, str]]:
    """Every line without its line end, and its number from 1; those of white space alone only when ``blank``."""
    with open_bytes(path) as file:
        for number, raw in enumerate(iter(lambda: file.readline(MAX_LINE + 1), b""), 1):
            place = Place(path, number)
            try:
                line = _text_of(raw, place)
            except InputError as error:
                bad.reading(place, raw[: 4 * LONGEST].decode("utf-8", errors="backslashreplace"))
                bad.leave_out(error)
                bad.unread += 1
                while len(raw) > MAX_LINE and not raw.endswith(b"\n"):  # the rest of an overlong line
                    raw = file.readline(MAX_LINE + 1)
                continue
            if blank or line.strip(_SPACE):
                bad.reading(place, line)
                yield number, line


def _text_of(raw: bytes, place: Place) -> str:
    if len(raw) > MAX_LINE:
        raise place.error(f"the line has more than {MAX_LINE} bytes, expected at most that")
    try:
        line = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise place.error(not_utf8(error)) from error
    if "\0" in line:
        raise place.error("found a NUL byte, expected text")
    return line.removesuffix("\n").removesuffix("\r")


def not_utf8(error: UnicodeDecodeError) -> str:
    """What was found and expected, for an error's sentence."""
    return f"byte 0x{error.object[error.start]:02x} is not UTF-8, expected UTF-8 text"
