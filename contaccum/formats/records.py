"""Records of every file format, source locations for error messages, and reading of text files.

Text files are UTF-8, plain or gzipped. A line ends at ``\\n`` or ``\\r\\n`` only, so U+2028 stays
inside a text. A byte order mark is dropped. Blank lines are skipped.

A reader reports each invalid record to a function ``on_error``. The default is ``stop``, which
raises the error. ``contaccum data check`` collects the errors instead; the reader then skips the
record.
"""

import gzip
import hashlib
import io
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import compress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import msgspec

from contaccum.errors import InputError
from contaccum.runtime.files import refuse_url, whole_file

READER_VERSION = 19
"""Part of the key of every cached table. Increase it if a reader changes what it reads from a file:
the tables are then built again."""

CHUNK = 1 << 20  # number of bytes that are read at a time
_BOM = b"\xef\xbb\xbf"
_SPACE = " \t\r\v\f"  # other white space, such as U+2028, is text
_GZIP = b"\x1f\x8b"

OnError = Callable[[InputError], None]


def stop(error: InputError) -> None:
    """Raise the error of an invalid record."""
    raise error


def ignore(error: InputError) -> None:
    """Skip an invalid record, which the reader of the format reports."""


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
        # a list would cost garbage collections
        return map(cls, columns["id"], columns["title"], columns["text"])


class Query(NamedTuple):
    id: str
    text: str


class Question(NamedTuple):
    """A question and its accepted answers.

    An answer is a string, or a regular expression in CuratedTREC.
    """

    text: str
    answers: list[str]


class TeacherScores(NamedTuple):
    """Scores that a teacher model gave to the positives and to the negatives of one example."""

    positives: Sequence[float]
    negatives: Sequence[float]


class Example(NamedTuple):
    """A query with its positives and its hard negatives (``negatives``).

    ``others`` are DPR's ``negative_ctxs``: passages of the corpus that become negatives if a query
    has too few hard negatives. ``scores`` is None if the data has no teacher scores, or if scores
    were not requested.
    """

    query: Query
    positives: Sequence[Passage]
    negatives: Sequence[Passage]
    others: Sequence[Passage] = ()
    scores: TeacherScores | None = None


def is_blank(text: str) -> bool:
    """Return whether a text is empty or contains only white space."""
    return not text or text.isspace()


def without_blanks(example: Example) -> Example:
    """Return an example without the passages that have neither a title nor a text.

    A corpus may have such passages, but a file of examples may not.
    """
    lists = (example.positives, example.negatives, example.others)
    kept = [[not is_blank(passage.content) for passage in passages] for passages in lists]
    positives, negatives, others = (
        list(compress(passages, keep)) for passages, keep in zip(lists, kept, strict=True)
    )
    scores = example.scores
    if scores is not None:
        scores = TeacherScores(
            list(compress(scores.positives, kept[0])), list(compress(scores.negatives, kept[1]))
        )
    return Example(example.query, positives, negatives, others, scores)


def content_id(title: str, text: str) -> str:
    """Return a 96-bit hash of title and text in hexadecimal.

    A passage without an id gets this hash as its id.
    """
    return hashlib.blake2b(f"{title}\n{text}".encode(), digest_size=12).hexdigest()


class SourceLocation(NamedTuple):
    """Location of a record in an input file. Lines and records are numbered from 1.

    In a file with one record per line, ``line`` identifies the record, and ``record`` is 0. In a
    Parquet file, ``record`` is the number of the row, and ``line`` is 0.
    """

    path: Path
    line: int
    record: int = 0

    def __str__(self) -> str:
        if not self.line:
            return f"{self.path}, row {self.record}"
        return f"{self.path}:{self.line}" + (f" (record {self.record})" if self.record else "")

    def error(self, message: str) -> InputError:
        """Return an InputError with this location before ``message``."""
        return InputError(f"{self}: {message}")


@contextmanager
def open_bytes(path: Path) -> Iterator[io.BufferedReader]:
    """Open a plain or gzipped file after its byte order mark.

    Raise InputError if it cannot be read.

    The first bytes of the file tell whether it is gzipped.
    """
    refuse_url(path)
    try:
        if not stat.S_ISREG(os.stat(path).st_mode) and not os.path.isdir(path):
            raise InputError(
                f"{path}: is a pipe or device; it must be a file, because it is read more than once"
            )
        with open(path, "rb") as raw:
            zipped = raw.peek(2)[:2] == _GZIP
            unpacked = (
                io.BufferedReader(cast(Any, gzip.GzipFile(fileobj=raw)), CHUNK) if zipped else raw
            )
            with unpacked as file:
                if file.peek(3)[:3] == _BOM:
                    file.read(3)
                yield file
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file") from error
    except IsADirectoryError as error:
        raise InputError(f"{path}: is a folder; it must be a file") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path}: the gzip stream is damaged or truncated ({error})") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error


def first_character(path: Path) -> str:
    """Return the first character that is not white space in a file, or "" if there is none."""
    with open_bytes(path) as file:
        return file.read(CHUNK).decode("utf-8", errors="replace").lstrip(_SPACE + "\n")[:1]


def numbered_lines(
    path: Path, blank: bool = False, on_error: OnError = stop
) -> Iterator[tuple[SourceLocation, str]]:
    """Yield the location and the text of each line of a file. The text has no line end.

    Blank lines are skipped, unless ``blank`` is true.
    """
    with open_bytes(path) as file:
        for number, raw in enumerate(file, 1):
            location = SourceLocation(path, number)
            try:
                line = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                on_error(location.error(not_utf8(error)))
                continue
            if "\0" in line:
                on_error(location.error("found a NUL byte; text must not contain NUL"))
                continue
            line = line.removesuffix("\n").removesuffix("\r")
            if blank or line.strip(_SPACE):
                yield location, line


def not_utf8(error: UnicodeDecodeError) -> str:
    """Return the message for a byte that is not UTF-8."""
    if error.object.startswith(b"PAR1"):
        return 'the file is in the format Parquet; name it as "hub:FILE?query=COLUMN&pos=COLUMN"'
    if error.object.startswith(b"PK\x03\x04"):
        return "the file is a zip archive, such as an Excel file; save the table as CSV (UTF-8)"
    return (
        f"byte 0x{error.object[error.start]:02x} is not UTF-8. Convert the file: iconv -f ENCODING "
        "-t UTF-8 FILE > NEW (ENCODING is often CP1252 or UTF-16 for a file of Windows)"
    )


@contextmanager
def whole_records(path: str | Path) -> Iterator[BinaryIO]:
    """Yield a temporary file, as ``whole_file`` does.

    If the name ends with .gz, the content of the file is gzipped.
    """
    with whole_file(path) as file:
        zipped = str(path).lower().endswith(".gz")
        with gzip.GzipFile("", "wb", 6, file, mtime=0) if zipped else nullcontext(file) as records:
            yield cast(Any, records)


def record_line(record: object) -> bytes:
    """Return a mapping or a struct as one line of JSON."""
    return msgspec.json.encode(record) + b"\n"


def write_beir_folder(
    folder: Path,
    corpus: Iterable[Mapping[str, Any]],
    queries: Iterable[Mapping[str, Any]],
    grades: Mapping[str, Iterable[tuple[str, str, int]]],
) -> None:
    """Write corpus.jsonl, queries.jsonl and one qrels file for each split into ``folder``.

    A record of ``corpus`` has _id, title and text. A record of ``queries`` has _id and text.
    ``grades`` maps the name of each split to tuples (query id, passage id, grade). Raises
    InputError if the name of a split cannot be a file name, or if an id contains a tab or a line
    break.
    """
    for split in grades:
        plain_split(split)
    (folder / "qrels").mkdir()
    for split, rows in grades.items():
        with open(folder / "qrels" / f"{split}.tsv", "w", encoding="utf-8", newline="\n") as file:
            file.write("query-id\tcorpus-id\tscore\n")
            file.writelines(
                f"{plain_id(query)}\t{plain_id(passage)}\t{grade}\n"
                for query, passage, grade in rows
            )
    for name, records in (("queries", queries), ("corpus", corpus)):
        with open(folder / f"{name}.jsonl", "wb") as lines:
            lines.writelines(map(record_line, records))


def plain_split(split: str) -> str:
    """Return the name of a split. Raise InputError if the name cannot be a file name."""
    # lone surrogates are not printable
    if split in ("", ".", "..") or "/" in split or not split.isprintable():
        raise InputError(f"split {split!r} cannot be a file name; use a plain name such as train")
    return split


def plain_id(key: str) -> str:
    """Return the id ``key``. Raise InputError if it contains a tab, a line break or NUL."""
    if any(character in key for character in "\t\r\n\0"):
        raise InputError(
            f"id {key!r} contains a tab, a line break or a NUL, which a qrels file cannot contain"
        )
    return key
