"""Readers of files with columns: DPR's corpus TSV and question CSV, and MS MARCO's collection.tsv and queries.tsv."""

import ast
import csv
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from contaccum.formats.json_records import refuse_lone_surrogates
from contaccum.formats.records import (
    STRICT,
    Passage,
    Question,
    RejectedRecords,
    SourceLocation,
    numbered_lines,
)

Element = TypeVar("Element")

MAX_CELL = 131_072  # default limit of the csv module: number of characters of a cell
_CORPUS_ROW = "three columns separated by tabs: id, text, title"
HEADER = ["id", "text", "title"]
_HEADER_WORDS = {
    "_id", "id", "docid", "doc_id", "doc-id", "pid", "passage_id", "passage-id", "corpus-id", "corpus_id", "query-id", "query_id",
    "title", "text", "contents", "content", "passage", "document", "doc", "body", "sentence", "abstract", "url", "score", "grade",
    "label", "rel", "relevance", "qid", "query",
}  # fmt: skip
"""Usual column names, to recognize a header."""
_QUESTION_ROW = "two columns separated by a tab: a question, and a list of answers such as ['a', 'b']"


def dpr_corpus(path: Path, rejected: RejectedRecords = STRICT) -> Iterator[tuple[SourceLocation, Passage]]:
    """Yield the location and the passage of each row of a DPR corpus TSV such as psgs_w100.tsv.

    The columns are id, text and title. A cell may be in quotes. A header (id, text, title) is skipped.
    """
    return _tab_rows(path, _CORPUS_ROW, _passage, rejected, _is_header)


def _passage(row: list[str], location: SourceLocation) -> Passage:
    if len(row) != 3:
        raise location.error(f"found {len(row)} columns; each row needs {_CORPUS_ROW}")
    if not row[0]:
        raise location.error("the id is empty; every passage needs an id")
    return Passage(row[0], row[2], row[1])


def _is_header(row: list[str], location: SourceLocation) -> bool:
    cells = [cell.strip().lower() for cell in row]
    named = set(cells[1:]) <= _HEADER_WORDS and not cells[0].isdecimal()  # a number in the first cell is an id
    if len(row) != 3 or not (cells[0] == HEADER[0] or named):
        return False
    if cells != HEADER:
        raise location.error(f"the header is {', '.join(map(repr, row))}; it must be {', '.join(HEADER)}")
    return True


def id_text_lines(path: Path, rejected: RejectedRecords = STRICT) -> Iterator[tuple[SourceLocation, str, str]]:
    """Yield the location, the id and the text of each line of MS MARCO's collection.tsv or queries.tsv.

    These files have no header, and quotation marks are part of the text.
    """
    for number, (location, line) in enumerate(numbered_lines(path, rejected=rejected)):
        key, *texts = line.split("\t")
        fault = ""
        if number == 0 and {cell.strip().lower() for cell in (key, *texts)} <= _HEADER_WORDS:
            fault = f"found the header {line!r}; a file of ids and texts must have no header. Delete the line"
        elif len(texts) != 1 or key.split() != [key]:
            found = f"found {len(texts) + 1} columns" if len(texts) != 1 else f"the id is {key!r}"
            fault = f"{found}; each line must be an id without spaces, then a tab, then a text"
        if fault:
            rejected.reject(location.error(fault))
        else:
            yield location, key, texts[0]


def read_questions(path: Path, rejected: RejectedRecords = STRICT) -> Iterator[Question]:
    """Yield the questions of a DPR question CSV, with their answers."""
    return (question for _, question in _tab_rows(path, _QUESTION_ROW, _question, rejected))


def _question(row: list[str], location: SourceLocation) -> Question:
    if len(row) != 2:
        raise location.error(f"found {len(row)} columns; each row needs {_QUESTION_ROW}")
    if not row[0].strip():
        raise location.error(f"the question is empty; each row needs {_QUESTION_ROW}")
    return Question(row[0], _answers(row[1], location))


def _answers(column: str, location: SourceLocation) -> list[str]:
    try:
        with warnings.catch_warnings():  # Python warns about strings such as '\d', but an answer may be a pattern
            warnings.simplefilter("ignore")
            answers = ast.literal_eval(column)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        answers = None
    if not isinstance(answers, list) or not answers or not all(isinstance(answer, str) for answer in answers):
        raise location.error(f"the answers are {column[:80]!r}; they must be a list of strings such as ['a', 'b']")
    if "\\" in column:
        refuse_lone_surrogates(answers, location)
    return answers


def _tab_rows(
    path: Path,
    expected: str,
    read: Callable[[list[str], SourceLocation], Element],
    rejected: RejectedRecords,
    is_header: Callable[[list[str], SourceLocation], bool] = lambda row, location: False,
) -> Iterator[tuple[SourceLocation, Element]]:
    """Convert each row with ``read``. Yield the location of the row (its first line), and the converted row.

    A cell in quotes may have several lines. If the first valid row is a header, it is skipped.
    """
    first = True
    for location, row in _rows(path, expected, rejected):
        if first and is_header(row, location):
            first = False
            continue
        with rejected:
            element = read(row, location)
            first = False
            yield location, element


def _rows(path: Path, expected: str, rejected: RejectedRecords) -> Iterator[tuple[SourceLocation, list[str]]]:
    """Yield the location and the cells of each row of a file.

    If a quote is not closed, only the first line of that row is rejected, because the next lines may be valid rows.
    """
    source = numbered_lines(path, blank=True, rejected=rejected)  # a cell in quotes may have empty lines
    again: list[tuple[SourceLocation, str]] = []
    taken: list[tuple[SourceLocation, str]] = []

    def lines() -> Iterator[str]:
        while line := again.pop() if again else next(source, None):
            # a cell in one line may be long, but an unclosed quote must not take in more lines than by default
            if not taken:
                csv.field_size_limit(max(MAX_CELL, len(line[1])))
            taken.append(line)
            yield line[1] + "\n"

    rows = csv.reader(lines(), delimiter="\t", strict=True)
    while True:
        taken.clear()
        try:
            row = next(rows, None)
        except csv.Error as error:
            (location, line), *others = taken
            rejected.start(location, line)
            rejected.reject(location.error(f"{error} (perhaps a quote is not closed); each row needs {expected}"))
            again += reversed(others)
            rows = csv.reader(lines(), delimiter="\t", strict=True)
            continue
        if row is None:
            return
        if "".join(row).strip():
            location = taken[0][0]
            rejected.start(location, "\n".join(line for _, line in taken))
            yield location, row
