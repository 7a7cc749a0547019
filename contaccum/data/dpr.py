"""DPR's own formats: the training JSON, the corpus TSV (id, text, title) and the question CSV."""

import ast
import csv
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from contaccum.data.json_records import (
    Record,
    id_field,
    json_lines,
    json_list,
    list_field,
    record_of,
    refuse_half_characters,
    string_field,
    title_field,
)
from contaccum.data.lines import Place, first_character, numbered_lines
from contaccum.data.records import Example, Passage, Query, Question, content_id

DPR_RECORD = "DPR records (objects with question, positive_ctxs and hard_negative_ctxs)"
_CONTEXT = "a context (an object with title, text and, where it has one, passage_id)"
_CORPUS_ROW = "three columns separated by tabs: id, text, title"
_HEADER = ["id", "text", "title"]
_QUESTION_ROW = "two columns separated by a tab: a question, and a list of answers such as ['a', 'b']"


def dpr_examples(path: Path) -> Iterator[tuple[Place, Example]]:
    """The records of a DPR training file: one JSON list, streamed, or one object a line."""
    as_list = first_character(path) == "["
    records = json_list(path, "a list of " + DPR_RECORD) if as_list else json_lines(path, DPR_RECORD)
    for number, (place, record) in enumerate(records, 1):
        query = Query(query_id(record, place, number), string_field(record, "question", place))
        positives = list_field(record, "positive_ctxs", place, _context, required=True)
        negatives = list_field(record, "hard_negative_ctxs", place, _context)
        yield place, Example(query, positives, negatives, list_field(record, "negative_ctxs", place, _context))


def query_id(record: Record, place: Place, number: int) -> str:
    """The record's ``query_id`` where it has one, else its number in the file."""
    return str(number) if record.get("query_id") is None else id_field(record, "query_id", place)


def _context(value: Any, place: Place) -> Passage:
    record = record_of(value, place, _CONTEXT)
    title, text = title_field(record, place), string_field(record, "text", place)
    for name in ("passage_id", "psg_id"):
        if record.get(name) is not None:
            return Passage(id_field(record, name, place), title, text)
    return Passage(content_id(title, text), title, text)


def dpr_corpus(path: Path) -> Iterator[tuple[int, Passage]]:
    """Line numbers and passages of a TSV quoted as the csv module does (DPR's psgs_w100.tsv); a header is skipped."""
    for line, row in _tab_rows(path, _CORPUS_ROW):
        if len(row) != 3:
            raise Place(path, line).error(f"found {len(row)} columns, expected {_CORPUS_ROW}")
        if line == 1 and row[0].lower() == _HEADER[0]:
            if row != _HEADER:
                raise Place(path, 1).error(f"the header is {', '.join(map(repr, row))}, expected {', '.join(_HEADER)}")
            continue
        if not row[0]:
            raise Place(path, line).error(f"the id is empty, expected {_CORPUS_ROW}")
        yield line, Passage(row[0], row[2], row[1])


def dpr_questions(path: Path) -> Iterator[tuple[int, Question]]:
    """Line numbers and questions of a DPR question file."""
    for line, row in _tab_rows(path, _QUESTION_ROW):
        if len(row) != 2:
            raise Place(path, line).error(f"found {len(row)} columns, expected {_QUESTION_ROW}")
        if not row[0].strip():
            raise Place(path, line).error(f"the question is empty, expected {_QUESTION_ROW}")
        yield line, Question(row[0], _answers(row[1], Place(path, line)))


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


def _tab_rows(path: Path, expected: str) -> Iterator[tuple[int, list[str]]]:
    """Rows with the line each starts at; a quoted field may span lines."""
    line = 0

    def lines() -> Iterator[str]:
        nonlocal line
        for number, text in numbered_lines(path, blank=True):  # a quoted field may hold empty lines
            line = line or number
            yield text + "\n"

    rows = csv.reader(lines(), delimiter="\t", strict=True)
    while True:
        line = 0
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            raise Place(path, line).error(f"{error} (is a quote left open?), expected {expected}") from error
        if "".join(row).strip():
            yield line, row
