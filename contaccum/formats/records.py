"""Records of every file format, source locations for error messages, and functions that read text files.

Text files are UTF-8, plain or gzipped. A line ends at ``\\n`` or ``\\r\\n`` only, so U+2028 stays inside a text. A byte order
mark is dropped. Blank lines are skipped.
"""

import gzip
import hashlib
import io
import json
import os
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from contaccum.config import DataPolicy
from contaccum.errors import InputError
from contaccum.runtime.files import refuse_url, whole_file

CHUNK = 1 << 20  # number of bytes that are read at a time
LONGEST = 2000  # maximum number of characters of a rejected record that are saved
MAX_LINE = 1 << 24  # maximum number of bytes of one line or record
_BOM = b"\xef\xbb\xbf"
_SPACE = " \t\r\v\f"  # other white space, such as U+2028, is text
_GZIP = b"\x1f\x8b"
MIN_UNPACKED = 500_000_000  # number of bytes that every gzip file may unpack to, however small the file is
MAX_RATIO = 100  # maximum number of unpacked bytes for each packed byte; text has 3 to 10, a file of zeros has 1000


class Passage(NamedTuple):
    """One passage of a corpus. ``title`` may be empty."""

    id: str
    title: str
    text: str

    @property
    def content(self) -> str:
        """Text that an encoder or BM25 reads: title and text joined by a space, stripped."""
        return f"{self.title} {self.text}".strip()

    @classmethod
    def of_columns(cls, columns: Mapping[str, Sequence[str]]) -> "Iterator[Passage]":
        """Yield the passages of a part of a table. Keys of ``columns``: id, title and text."""
        return map(cls, columns["id"], columns["title"], columns["text"])  # a list would cost garbage collections


class Query(NamedTuple):
    id: str
    text: str


class Question(NamedTuple):
    """A question and its accepted answers. An answer is a string, or a regular expression in CuratedTREC."""

    text: str
    answers: list[str]


class Judgement(NamedTuple):
    """One line of a qrels file. ``line`` is the line number, counted from 1."""

    query_id: str
    passage_id: str
    grade: int
    line: int


class TeacherScores(NamedTuple):
    """Scores that a teacher model gave to the positives and to the negatives of one example."""

    positives: Sequence[float]
    negatives: Sequence[float]


class Example(NamedTuple):
    """A query with its positives and its hard negatives (``negatives``).

    ``others`` are DPR's ``negative_ctxs``: passages of the corpus that become negatives if a query has too few hard negatives.
    ``scores`` is None if the data has no teacher scores, or if scores were not requested.
    """

    query: Query
    positives: Sequence[Passage]
    negatives: Sequence[Passage]
    others: Sequence[Passage] = ()
    scores: TeacherScores | None = None


def is_blank(text: str) -> bool:
    """Return whether a text is empty or contains only white space."""
    return not text or text.isspace()


def content_id(title: str, text: str) -> str:
    """Return a 96-bit hash of title and text in hexadecimal. A passage without an id gets this hash as its id."""
    return hashlib.blake2b(f"{title}\n{text}".encode(), digest_size=12).hexdigest()


class SourceLocation(NamedTuple):
    """Location of a record or a field in an input file. Lines and records are numbered from 1.

    In a file with one record per line, ``line`` identifies the record, and ``record`` is 0.
    """

    path: Path
    line: int
    record: int = 0
    field: str = ""

    def __str__(self) -> str:
        record = f" (record {self.record})" if self.record else ""
        return f"{self.path}:{self.line}{record}" + (f", {self.field}" if self.field else "")

    def error(self, message: str) -> InputError:
        """Return an InputError with this location before ``message``."""
        return InputError(f"{self}: {message}")


class RowLocation(SourceLocation):
    """Location of a row in a Parquet or CSV file, for error messages."""

    def __str__(self) -> str:
        return f"{self.path}, row {self.line}"


class RejectedRecords:
    """Invalid records of one file. The first ``limit`` invalid records are skipped; the error of the next one is raised.

    A reader calls ``start`` for each record before it checks the record. If the record is invalid, the reader calls ``reject``.
    A block ``with rejected:`` calls ``reject`` for an InputError that is raised inside the block.
    """

    def __init__(self, limit: int = 0, max_unpacked: float | None = None) -> None:
        """Start without rejected records. ``max_unpacked`` is the maximum size of an unpacked gzip file in GB."""
        if limit < 0:
            raise InputError(f"max_bad_records is {limit}; it must be at least 0")
        self.limit, self.max_unpacked = limit, max_unpacked
        self.entries: list[dict[str, Any]] = []
        """One JSON object for each rejected record: file, line, error and text."""
        self.undecodable = 0
        """Number of rejected lines that are too long, are not UTF-8 or contain NUL, so that no record could be read."""
        self._location, self._text = SourceLocation(Path(), 0), ""

    @classmethod
    def of(cls, policy: DataPolicy) -> "RejectedRecords":
        """Return a RejectedRecords that is empty and has the limits of ``policy``."""
        return cls(policy.max_bad_records, policy.max_unpacked)

    def start(self, location: SourceLocation, text: str) -> None:
        """Set the current record. The next call of ``reject`` rejects this record."""
        self._location, self._text = location, text

    def reject(self, error: InputError) -> None:
        """Reject the current record. If ``limit`` records are already rejected, raise ``error`` instead."""
        if len(self.entries) >= self.limit:
            raise error
        path, line, record, _ = self._location
        where = {"file": str(path), "line": line} | ({"record": record} if record else {})
        text = {"text": self._text[:LONGEST], "cut": len(self._text) > LONGEST}
        self.entries.append({**where, "error": str(error), **text})

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if isinstance(error, InputError):
            self.reject(error)
        return isinstance(error, InputError)


STRICT = RejectedRecords()
"""Skip no record: the first invalid record raises an error."""


def unpacked_limit(packed: int, gigabytes: float | None = None) -> int:
    """Return the maximum number of bytes that a gzip file of ``packed`` bytes may unpack to.

    gigabytes: maximum that the user set, in GB. None: ``MIN_UNPACKED + MAX_RATIO * packed`` bytes.
    """
    return MIN_UNPACKED + MAX_RATIO * packed if gigabytes is None else int(gigabytes * 1e9)


class _Unpacked(io.RawIOBase):
    """Unpacked content of a gzip file. Reading more than ``limit`` bytes raises InputError."""

    def __init__(self, raw: io.BufferedReader, limit: int) -> None:
        self._file, self._limit, self._left = gzip.GzipFile(fileobj=raw), limit, limit

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._left -= (count := self._file.readinto(buffer))
        if self._left < 0:
            raise above_limit(os.fsdecode(self._file.name), self._limit)
        return count


def above_limit(name: str, limit: int) -> InputError:
    """Return the InputError for a file that unpacks to more than ``limit`` bytes."""
    advice = "Raise --max_unpacked (data.max_unpacked, in GB) if the file is correct."
    return InputError(f"{name}: unpacks to more than {limit} bytes, which is the limit. {advice}")


@contextmanager
def open_bytes(path: Path, max_unpacked: float | None = None) -> Iterator[io.BufferedReader]:
    """Open a file to read bytes. A gzip file is unpacked, and a byte order mark is skipped.

    The first bytes of the file tell whether it is gzipped. A gzip file may unpack to at most ``max_unpacked`` GB.
    """
    refuse_url(path)
    if "\0" in str(path):
        raise InputError(f"{str(path)!r}: no such file; a path cannot contain NUL")
    try:
        if not stat.S_ISREG(os.stat(path).st_mode) and not os.path.isdir(path):
            raise InputError(f"{path}: is a pipe or device; it must be a file, because it is read more than once")
        with open(path, "rb") as raw, decoded(raw, unpacked_limit(path.stat().st_size, max_unpacked)) as file:
            yield file
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file") from error
    except IsADirectoryError as error:
        raise InputError(f"{path}: is a folder; it must be a file") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path}: the gzip stream is damaged or truncated ({error})") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error


@contextmanager
def decoded(raw: io.BufferedReader, limit: int) -> Iterator[io.BufferedReader]:
    """Unpack an open file if it is gzipped, and skip a byte order mark. ``limit`` is the maximum number of unpacked bytes."""
    zipped = raw.read(2) == _GZIP
    raw.seek(0)
    with io.BufferedReader(cast(Any, _Unpacked(raw, limit)), CHUNK) if zipped else raw as file:
        if file.peek(3)[:3] == _BOM:
            file.read(3)
        yield file


def first_character(path: Path) -> str:
    """Return the first character that is not white space in a file, or "" if there is none."""
    with open_bytes(path) as file:
        for _ in range(0, MAX_LINE, CHUNK):  # a gzip file can unpack to endless spaces, so stop after MAX_LINE
            if text := file.read(CHUNK).decode("utf-8", errors="replace").lstrip():
                return text[0]
    return ""


def numbered_lines(
    path: Path, blank: bool = False, rejected: RejectedRecords = STRICT
) -> Iterator[tuple[SourceLocation, str]]:
    """Yield the location and the text of each line of a file. The text has no line end.

    Blank lines are skipped, unless ``blank`` is true.
    """
    with open_bytes(path, rejected.max_unpacked) as file:
        yield from lines_of(file, path, blank, rejected)


def lines_of(
    file: BinaryIO, path: Path, blank: bool = False, rejected: RejectedRecords = STRICT
) -> Iterator[tuple[SourceLocation, str]]:
    """Yield the lines of an open file, as ``numbered_lines`` does. path: name of the file, for error messages."""
    for number, raw in enumerate(iter(lambda: file.readline(MAX_LINE + 1), b""), 1):
        location = SourceLocation(path, number)
        try:
            line = _text_of(raw, location)
        except InputError as error:
            rejected.start(location, raw[: 4 * LONGEST].decode("utf-8", errors="backslashreplace"))
            rejected.reject(error)
            rejected.undecodable += 1
            while len(raw) > MAX_LINE and not raw.endswith(b"\n"):  # skip the rest of a long line
                raw = file.readline(MAX_LINE + 1)
            continue
        if blank or line.strip(_SPACE):
            rejected.start(location, line)
            yield location, line


def _text_of(raw: bytes, location: SourceLocation) -> str:
    if len(raw) > MAX_LINE:
        raise location.error(f"the line has more than {MAX_LINE} bytes; longer lines are not read")
    try:
        line = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise location.error(not_utf8(error)) from error
    if "\0" in line:
        raise location.error("found a NUL byte; text must not contain NUL")
    return line.removesuffix("\n").removesuffix("\r")


def not_utf8(error: UnicodeDecodeError) -> str:
    return f"byte 0x{error.object[error.start]:02x} is not UTF-8; the text must be valid UTF-8"


@contextmanager
def whole_records(path: str | Path) -> Iterator[BinaryIO]:
    """Yield a temporary file, as ``whole_file`` does. If the name ends with .gz, the content of the file is gzipped."""
    with whole_file(path) as file:
        zipped = str(path).endswith(".gz")
        with gzip.GzipFile("", "wb", 6, file, mtime=0) if zipped else nullcontext(file) as records:
            yield cast(Any, records)


def record_line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, ensure_ascii=False).encode("utf-8") + b"\n"


def write_beir_folder(
    folder: Path,
    corpus: Iterable[Mapping[str, Any]],
    queries: Iterable[Mapping[str, Any]],
    grades: Mapping[str, Iterable[tuple[str, str, int]]],
) -> None:
    """Write corpus.jsonl, queries.jsonl and one qrels file for each split into ``folder``.

    A record of ``corpus`` has _id, title and text. A record of ``queries`` has _id and text. ``grades`` maps the name of each
    split to tuples (query id, passage id, grade). Raises InputError if the name of a split cannot be a file name, or if an id
    contains a tab or a line break.
    """
    for split in grades:
        plain_split(split)
    (folder / "qrels").mkdir()
    for split, rows in grades.items():
        with open(folder / "qrels" / f"{split}.tsv", "w", encoding="utf-8", newline="\n") as file:
            file.write("query-id\tcorpus-id\tscore\n")
            file.writelines(f"{plain_id(query)}\t{plain_id(passage)}\t{grade}\n" for query, passage, grade in rows)
    for name, records in (("queries", queries), ("corpus", corpus)):
        with open(folder / f"{name}.jsonl", "wb") as lines:
            lines.writelines(map(record_line, records))


def plain_split(split: str) -> str:
    """Return the name of a split. Raise InputError if the name cannot be a file name."""
    if split in ("", ".", "..") or "/" in split or not split.isprintable():  # lone surrogates are not printable
        raise InputError(f"split {split!r} cannot be a file name; use a plain name such as train")
    return split


def plain_id(key: str) -> str:
    """Return the id ``key``. Raise InputError if it contains a tab, a line break or NUL."""
    if any(character in key for character in "\t\r\n\0"):
        raise InputError(f"id {key!r} contains a tab, a line break or a NUL, which a qrels file cannot contain")
    return key
