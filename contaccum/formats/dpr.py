"""Readers of files with columns: DPR's TSV and question CSV, and MS MARCO's files."""

import ast
import csv
import warnings
from collections.abc import Iterator
from pathlib import Path

from contaccum.errors import InputError
from contaccum.formats.json_records import refuse_lone_surrogates
from contaccum.formats.records import (
    OnError,
    Passage,
    Question,
    SourceLocation,
    numbered_lines,
    require_content,
    stop,
)

MAX_CELL = 131_072  # default limit of the csv module: number of characters of a cell
_CORPUS_ROW = "three columns separated by tabs: id, text, title"
HEADER = ["id", "text", "title"]
_HEADER_WORDS = {
    "_id", "id", "docid", "doc_id", "doc-id", "pid", "passage_id", "passage-id", "corpus-id",
    "corpus_id", "query-id", "query_id", "title", "text", "contents", "content", "passage",
    "document", "doc", "body", "sentence", "abstract", "url", "score", "grade", "label", "rel",
    "relevance", "qid", "query", "question", "anchor", "positive", "pos", "negative", "neg",
    "answer", "answers",
}  # fmt: skip
"""Usual column names, to recognize a header."""
_QUESTION_ROW = (
    "two columns separated by a tab: a question, and a list of answers such as ['a', 'b']"
)


def dpr_corpus(path: Path, on_error: OnError = stop) -> Iterator[tuple[SourceLocation, Passage]]:
    """Yield the location and the passage of each row of a DPR corpus TSV such as psgs_w100.tsv.

    The columns are id, text and title. A cell may be in quotes. A header (id, text, title) is
    skipped.
    """
    first = True
    for location, row in _rows(path, _CORPUS_ROW, on_error):
        try:
            if first and _is_header(row, location):
                first = False
                continue
            if len(row) != 3:
                raise location.error(f"found {len(row)} columns; each row needs {_CORPUS_ROW}")
            if not row[0]:
                raise location.error("the id is empty; every passage needs an id")
        except InputError as error:
            on_error(error)
            continue
        first = False
        yield location, Passage(id=row[0], title=row[2], text=row[1])


def _is_header(row: list[str], location: SourceLocation) -> bool:
    """Return whether a row is a header. Raise InputError if its columns have another order."""
    cells = [cell.strip().lower() for cell in row]
    # a number in the first cell is an id
    named = set(cells[1:]) <= _HEADER_WORDS and not cells[0].isdecimal()
    if len(row) != 3 or not (cells[0] == HEADER[0] or named):
        return False
    if cells != HEADER:
        found = ", ".join(map(repr, row))
        raise location.error(f"the header is {found}; it must be {', '.join(HEADER)}")
    return True


def id_text_lines(
    path: Path, on_error: OnError = stop
) -> Iterator[tuple[SourceLocation, str, str]]:
    """Yield the location, the id and the text of each line of a file of MS MARCO.

    These files have no header, and quotation marks are part of the text.
    """
    first = True
    for location, line in numbered_lines(path, on_error=on_error):
        cells = line.split("\t")
        key = cells[0]
        expected = "each line must be an id without spaces, then a tab, then a text"
        if first and {cell.strip().lower() for cell in cells} <= _HEADER_WORDS:
            on_error(
                location.error(
                    f"found the header {line!r}; a file of ids and texts must have no header. "
                    "Delete the line"
                )
            )
        elif len(cells) != 2:
            on_error(location.error(f"found {len(cells)} columns; {expected}"))
        elif key.split() != [key]:
            on_error(location.error(f"the id is {key!r}; {expected}"))
        else:
            yield location, key, cells[1]
        first = False


def read_questions(path: Path, on_error: OnError = stop) -> Iterator[Question]:
    """Yield the questions of a DPR question CSV, with their answers."""
    require_content(path, "a question")
    for location, row in _rows(path, _QUESTION_ROW, on_error):
        try:
            if len(row) != 2:
                raise location.error(f"found {len(row)} columns; each row needs {_QUESTION_ROW}")
            if not row[0].strip():
                raise location.error(f"the question is empty; each row needs {_QUESTION_ROW}")
            question = Question(row[0], _answers(row[1], location))
        except InputError as error:
            on_error(error)
            continue
        yield question


def _answers(column: str, location: SourceLocation) -> list[str]:
    try:
        # Python warns about strings such as '\d', but an answer may be a pattern
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            answers = ast.literal_eval(column)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        answers = None
    if (
        not isinstance(answers, list)
        or not answers
        or not all(isinstance(each, str) for each in answers)
    ):
        raise location.error(
            f"the answers are {column[:80]!r}; they must be a list of strings such as ['a', 'b']"
        )
    if "\\" in column:
        refuse_lone_surrogates(answers, location)
    return answers


def _rows(
    path: Path, expected: str, on_error: OnError
) -> Iterator[tuple[SourceLocation, list[str]]]:
    """Yield the location (the first line) and the cells of each row of a file.

    A cell in quotes may have several lines. An unclosed quote ends the reading of the file.
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

    rows = csv.reader(lines(), delimiter="\t", strict=True)
    while True:
        locations.clear()
        try:
            row = next(rows, None)
        except csv.Error as error:
            on_error(
                locations[0].error(
                    f"{error} (perhaps a quote is not closed); each row needs {expected}"
                )
            )
            return
        if row is None:
            return
        if "".join(row).strip():
            yield locations[0], row
