"""Readers of files with columns: CSV and TSV, DPR's corpus and questions, and MS MARCO's files."""

import ast
import csv
import warnings
from collections.abc import Iterator
from pathlib import Path

from contaccum.formats.records import (
    OnError,
    Passage,
    Question,
    SourceLocation,
    numbered_lines,
    stop,
)
from contaccum.runtime.checks import require_utf8
from contaccum.runtime.units import counted

MAX_CELL = 131_072  # default limit of the csv module: number of characters of a cell
_HEADER = ["id", "text", "title"]
_ID_COLUMNS = {"_id", "id", "docid", "doc_id", "pid", "passage_id", "query-id", "query_id", "qid"}
"""Usual names of the first column. A table that starts with one of them has a header."""


def dpr_corpus(path: Path, on_error: OnError = stop) -> Iterator[tuple[SourceLocation, Passage]]:
    """Yield the location and the passage of each row of a DPR corpus TSV such as psgs_w100.tsv.

    The columns are id, text and title. A cell may be in quotes. A header (id, text, title) is
    skipped.
    """
    for number, (location, row) in enumerate(rows_of_cells(path, "\t", on_error)):
        if number == 0 and row[0].strip().lower() in _ID_COLUMNS:
            if [cell.strip().lower() for cell in row] != _HEADER:
                found = ", ".join(map(repr, row))
                on_error(location.error(f"the header is {found}; it must be {', '.join(_HEADER)}"))
        elif len(row) != 3:
            on_error(
                location.error(
                    f"found {counted(len(row), 'column')}; each row needs three columns "
                    "separated by tabs: id, text, title"
                )
            )
        elif not row[0]:
            on_error(location.error("the id is empty; every passage needs an id"))
        else:
            yield location, Passage(id=row[0], title=row[2], text=row[1])


def id_text_lines(
    path: Path, on_error: OnError = stop
) -> Iterator[tuple[SourceLocation, str, str]]:
    """Yield the location, the id and the text of each line of a file of MS MARCO.

    These files have no header, but one is skipped. Quotation marks are part of the text.
    """
    for number, (location, line) in enumerate(numbered_lines(path, on_error=on_error)):
        cells = line.split("\t")
        if number == 0 and cells[0].strip().lower() in _ID_COLUMNS:
            continue
        if len(cells) != 2 or cells[0].split() != [cells[0]]:
            on_error(
                location.error(
                    f"found {line[:40]!r}; each line must be an id without spaces, a tab and a text"
                )
            )
        else:
            yield location, cells[0], cells[1]


def read_questions(path: Path, on_error: OnError = stop) -> Iterator[Question]:
    """Yield the questions of a DPR question CSV, with their answers."""
    for location, row in rows_of_cells(path, "\t", on_error):
        if len(row) != 2 or not row[0].strip():
            on_error(
                location.error(
                    f"found {row}; each row needs two columns separated by a tab: a question, and "
                    "a list of answers such as ['a', 'b']"
                )
            )
            continue
        try:
            # Python warns about strings such as '\d', but an answer may be a pattern
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                answers = ast.literal_eval(row[1])
            if not isinstance(answers, list) or not answers:
                raise ValueError(row[1])
            yield Question(row[0], [require_utf8(answer, "") for answer in answers])
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            on_error(
                location.error(
                    f"the answers are {row[1][:80]!r}; they must be a list of strings such as "
                    "['a', 'b']"
                )
            )


def rows_of_cells(
    path: Path, delimiter: str, on_error: OnError = stop
) -> Iterator[tuple[SourceLocation, list[str]]]:
    """Yield the location (the first line) and the cells of each row of a CSV or TSV file.

    A cell in quotes may have several lines. An unclosed quote ends the reading of the file. A cell
    of a TSV file with a line break and a tab is refused: two stray quotes have hidden whole rows.
    """
    locations: list[SourceLocation] = []  # of the lines of the current row

    def lines() -> Iterator[str]:
        # a cell in quotes may have empty lines
        for location, line in numbered_lines(path, blank=True, on_error=on_error):
            # a cell in one line may be long, but two stray quotes must not hide the rows between
            # them
            if not locations:
                csv.field_size_limit(max(MAX_CELL, len(line)))
            locations.append(location)
            yield line + "\n"

    rows = csv.reader(lines(), delimiter=delimiter, strict=True)
    while True:
        locations.clear()
        try:
            row = next(rows, None)
        except csv.Error as error:
            on_error(locations[0].error(f"{error}; perhaps a quote is not closed"))
            return
        if row is None:
            return
        if delimiter == "\t" and any("\n" in cell and "\t" in cell for cell in row):
            on_error(
                locations[0].error(
                    "a cell in quotes contains a line break and a tab, so it may hide other rows; "
                    "double each quote inside a cell, or replace these tabs by spaces"
                )
            )
        elif "".join(row).strip():
            yield locations[0], row
