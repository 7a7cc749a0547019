"""DPR's own formats: the training JSON, the corpus TSV (id, text, title) and the question CSV."""

import ast
import csv
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from contaccum.data.bad_records import STRICT, BadRecords, Place
from contaccum.data.json_records import (
    Record,
    id_field,
    json_list,
    list_field,
    record_of,
    refuse_half_characters,
    string_field,
    title_field,
)
from contaccum.data.lines import numbered_lines
from contaccum.data.records import Example, Passage, Query, Question, content_id
from contaccum.errors import InputError

Element = TypeVar("Element")

DPR_RECORD = "DPR records (objects with question, positive_ctxs and hard_negative_ctxs)"
_CONTEXT = "a context (an object with title, text and, where it has one, passage_id)"
_CORPUS_ROW = "three columns separated by tabs: id, text, title"
_HEADER = ["id", "text", "title"]
_HEADER_WORDS = {
    "_id", "id", "docid", "doc_id", "doc-id", "pid", "passage_id", "passage-id", "corpus-id", "corpus_id", "query-id", "query_id",
    "title", "text", "contents", "content", "passage", "document", "doc", "body", "sentence", "abstract", "url", "score", "grade",
    "label", "rel", "relevance",
}  # fmt: skip
"""What columns are called in the headers of other tables; two of these words are no passage and its title."""
_QUESTION_ROW = "two columns separated by a tab: a question, and a list of answers such as ['a', 'b']"


def dpr_list(path: Path, bad: BadRecords) -> Iterator[tuple[Place, Example]]:
    """The records of a DPR training file that is one JSON list, streamed."""
    return json_list(path, "a list of " + DPR_RECORD, dpr_example, bad)


def dpr_example(record: Record, place: Place, number: int) -> Example:
    """One record of a DPR training file."""
    query = Query(query_id(record, place, number), string_field(record, "question", place))
    positives = list_field(record, "positive_ctxs", place, _context, required=True)
    negatives = list_field(record, "hard_negative_ctxs", place, _context)
    return Example(query, positives, negatives, list_field(record, "negative_ctxs", place, _context))


def query_id(record: Record, place: Place, number: int) -> str:
    """The record's ``query_id`` where it has one, else one made of its number in the file.

    It says that it was made up, as no passage's id does: evaluation takes a passage of the same id for the query itself.
    """
    return f"unnamed-query-{number}" if record.get("query_id") is None else id_field(record, "query_id", place)


def _context(value: Any, place: Place) -> Passage:
    record = record_of(value, place, _CONTEXT)
    title, text = title_field(record, place), string_field(record, "text", place)
    for name in ("passage_id", "psg_id"):
        if record.get(name) is not None:
            return Passage(id_field(record, name, place), title, text)
    return Passage(content_id(title, text), title, text)


def dpr_corpus(path: Path, bad: BadRecords = STRICT) -> Iterator[tuple[int, Passage]]:
    """Line numbers and passages of a TSV quoted as the csv module does (DPR's psgs_w100.tsv); a header is skipped."""
    return _tab_rows(path, _CORPUS_ROW, _passage, bad, _is_header)


def _passage(row: list[str], place: Place) -> Passage:
    if len(row) != 3:
        raise place.error(f"found {len(row)} columns, expected {_CORPUS_ROW}")
    if not row[0]:
        raise place.error(f"the id is empty, expected {_CORPUS_ROW}")
    return Passage(row[0], row[2], row[1])


def _is_header(row: list[str], place: Place) -> bool:
    cells = [cell.strip().lower() for cell in row]
    named = set(cells[1:]) <= _HEADER_WORDS and not cells[0].isdecimal()  # a number is an id
    if len(row) != 3 or not (cells[0] == _HEADER[0] or named):
        return False
    if cells != _HEADER:
        raise place.error(f"the header is {', '.join(map(repr, row))}, expected {', '.join(_HEADER)}")
    return True


def dpr_questions(path: Path, bad: BadRecords = STRICT) -> Iterator[tuple[int, Question]]:
    """Line numbers and questions of a DPR question file."""
    return _tab_rows(path, _QUESTION_ROW, _question, bad)


def _question(row: list[str], place: Place) -> Question:
    if len(row) != 2:
        raise place.error(f"found {len(row)} columns, expected {_QUESTION_ROW}")
    if not row[0].strip():
        raise place.error(f"the question is empty, expected {_QUESTION_ROW}")
    return Question(row[0], _answers(row[1], place))


def _answers(column: str, place: Place) -> list[str]:
    try:
        with warnings.catch_warnings():  # a pattern such as '\d' is meant as it stands; the parser remarks on it
            warnings.simplefilter("ignore")
            answers = ast.literal_eval(column)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise place.error(f"the answers column is {column[:80]!r}, expected {_QUESTION_ROW}") from error
    if not isinstance(answers, list) or not answers or not all(isinstance(answer, str) for answer in answers):
        raise place.error(f"the answers column is {column[:80]!r}, expected {_QUESTION_ROW}")
    if "\\" in column:
        refuse_half_characters(answers, place)
    return answers


def _tab_rows(
    path: Path,
    expected: str,
    read: Callable[[list[str], Place], Element],
    bad: BadRecords,
    is_header: Callable[[list[str], Place], bool] = lambda row, place: False,
) -> Iterator[tuple[int, Element]]:
    """Rows as ``read`` reads them, with the line that each starts at; a quoted field may span lines.

    ``is_header`` is asked of the first row, which follows what was left out before it.
    """
    rows, first = _Rows(path, expected, bad), True
    for place, row in rows:
        if first and place.line == 1 + len(bad.found) and is_header(row, place):
            first = False
            continue
        try:
            element = read(row, place)
        except InputError as error:
            bad.leave_out(error)
        else:
            first = False
            yield place.line, element


class _Rows:
    """The rows of a file as the csv module reads them, each with its place.

    A row that the module refuses costs its first line alone: where a quote is left open, the lines behind it may be rows.
    """

    def __init__(self, path: Path, expected: str, bad: BadRecords) -> None:
        self._path, self._expected, self._bad = path, expected, bad
        self._source = numbered_lines(path, blank=True, bad=bad)  # a quoted field may hold empty lines
        self._again: deque[tuple[int, str]] = deque()
        self._taken: list[tuple[int, str]] = []

    def __iter__(self) -> Iterator[tuple[Place, list[str]]]:
        rows = self._reader()
        while True:
            self._taken = []
            try:
                row = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                self._refuse(error)
                rows = self._reader()
                continue
            if "".join(row).strip():
                place = Place(self._path, self._taken[0][0])
                self._bad.reading(place, "\n".join(line for _, line in self._taken))
                yield place, row

    def _reader(self) -> Iterator[list[str]]:
        return csv.reader(self._lines(), delimiter="\t", strict=True)

    def _lines(self) -> Iterator[str]:
        while self._again:
            yield self._take(self._again.popleft())
        for line in self._source:
            yield self._take(line)

    def _take(self, line: tuple[int, str]) -> str:
        self._taken.append(line)
        return line[1] + "\n"

    def _refuse(self, error: csv.Error) -> None:
        (number, line), *others = self._taken
        place = Place(self._path, number)
        self._bad.reading(place, line)
        self._bad.leave_out(place.error(f"{error} (is a quote left open?), expected {self._expected}"))
        self._again.extendleft(reversed(others))
