"""Readers of every data format. This module also detects the format of a file.

Formats: BEIR (corpus.jsonl, queries.jsonl, qrels TSV), DPR (JSON, corpus TSV, question CSV), MS
MARCO (collection.tsv, queries.tsv), JSONL of query, pos and neg, and Tevatron JSONL. Every file may
be gzipped. A reader checks each record separately. The package ``data`` checks that ids are unique,
that references to ids are valid, and that no passage is empty.
"""

import math
import os
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from contaccum.config.commands import TrainingKind
from contaccum.errors import InputError
from contaccum.formats.dpr import dpr_corpus, id_text_lines
from contaccum.formats.json_records import json_records
from contaccum.formats.records import (
    Example,
    OnError,
    Passage,
    Query,
    SourceLocation,
    first_character,
    ignore,
    numbered_lines,
    stop,
)
from contaccum.formats.training import FORMATS
from contaccum.runtime.units import counted

Kind = Literal["beir", "dpr", "jsonl", "tevatron", "corpus", "queries", "questions"]
Key = Annotated[str, Meta(min_length=1)] | int

_PASSAGE = "a passage (an object with _id, title and text)"
_QUERY = "a query (an object with _id and text)"
_FILES = "JSON, a DPR corpus TSV, a question CSV, or lines with id, tab and text (MS MARCO)"
_MSMARCO_NAMES = {"corpus.jsonl": "collection.tsv", "queries.jsonl": "queries.tsv"}
_RECORDS = ", or ".join([*(form.description for form in FORMATS.values()), _PASSAGE])
_TABLE_HINT = 'To read other columns or fields, give "hub:NAME?query=COLUMN&pos=COLUMN"'
MAX_GRADE = 99_999  # trec_eval needs memory for every grade up to the largest
_GRADE = re.compile(r" *([+-]?[0-9]{1,5})(\.0+)? *")  # a table may have 1.0


def beir_file(folder: Path, name: str) -> Path:
    """Return the path of the file ``name`` in a BEIR folder.

    The file may be gzipped, or have MS MARCO's name (collection.tsv).
    """
    other = _MSMARCO_NAMES.get(name, name)
    for path in (folder / name, folder / f"{name}.gz", folder / other, folder / f"{other}.gz"):
        if path.is_file():
            return path
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    files = [path for path in folder.iterdir() if not path.name.startswith((".", "README"))]
    if files and all(path.suffix in (".md", ".txt") for path in files):
        raise InputError(
            f"{folder}: {name} not found. To use text files, write their passages to a "
            'corpus.jsonl ("A folder of text files" in docs/how-to/own-data.md)'
        )
    raise InputError(
        f"{folder}: {name} not found; a BEIR folder has corpus.jsonl, queries.jsonl and "
        f'qrels/<split>.tsv. To read CSV or Parquet files, give "hub:{folder}?query=COLUMN&'
        'pos=COLUMN"'
    )


class TextRecord(Struct):
    """Query of queries.jsonl, or passage of corpus.jsonl."""

    text: str
    key: Key = field(name="_id")
    title: str | None = ""

    def passage(self) -> Passage:
        return Passage(str(self.key), self.title or "", self.text)


def numbered_corpus(
    path: Path, on_error: OnError = stop
) -> Iterator[tuple[SourceLocation, Passage]]:
    """Yield the location and the passage of each record of a corpus.

    The file is a BEIR corpus.jsonl, a DPR TSV or MS MARCO's collection.tsv.
    """
    if not is_json(path):
        refuse_id_table(path)
    if is_json(path) or len(_first_cells(path)) == 2:
        return _texts(path, _PASSAGE, on_error)
    return dpr_corpus(path, on_error)


def numbered_queries(
    path: Path, on_error: OnError = stop
) -> Iterator[tuple[SourceLocation, Query]]:
    """Yield the location and the query of each record of queries.jsonl or queries.tsv."""
    for location, (key, _, text) in _texts(path, _QUERY, on_error):
        if text.strip():
            yield location, Query(key, text)
        else:
            message = f"the text of query {key!r} is empty; every query needs a text"
            on_error(location.error(message))


def _texts(
    path: Path, expected: str, on_error: OnError
) -> Iterator[tuple[SourceLocation, Passage]]:
    """Yield the location and the content of each record of a file of ids and texts."""
    if is_json(path):
        for location, record in json_records(path, TextRecord, expected, on_error):
            yield location, record.passage()
    else:
        for location, key, text in id_text_lines(path, on_error):
            yield location, Passage(key, "", text)


def read_qrels(
    path: Path, on_error: OnError = stop
) -> Iterator[tuple[SourceLocation, str, str, int]]:
    """Yield the location, query id, passage id and grade of each judgement of a qrels file.

    The file is a BEIR TSV, with or without a header, or a TREC file.

    The first line decides about the number of columns and the separator: tabs or white space.
    """
    separator: str | None = None
    columns = 0
    for location, line in numbered_lines(path, on_error=on_error):
        is_first = not columns
        if is_first:
            separator = "\t" if line.count("\t") == 2 else None
        cells = line.split(separator)
        if len(cells) not in ((3, 4) if is_first else (columns,)):
            refuse_json(path, "a table of query-id, corpus-id and score, or TREC qrels")
            on_error(
                location.error(
                    f"found {counted(len(cells), 'column')}; a line must have "
                    f"{columns or '3 or 4'}: query-id, corpus-id, score, or TREC's query, "
                    "iteration, passage, grade"
                )
            )
            continue
        columns = len(cells)
        named = cells[0].lower().replace("_", "-") in ("query-id", "qid", "query")
        if is_first and named and not _GRADE.fullmatch(cells[-1]):
            continue  # a header
        try:
            if not cells[0] or not cells[-2]:
                raise location.error("found an empty id; queries and passages need an id")
            grade = grade_of(cells[-1], location)
        except InputError as error:
            on_error(error)
            continue
        yield location, cells[0], cells[-2], grade


def grade_of(text: str, location: SourceLocation) -> int:
    grade = _GRADE.fullmatch(text)
    if grade is None:
        raise location.error(
            f"the grade is {text[:40]!r}; it must be an integer from -{MAX_GRADE} to {MAX_GRADE}"
        )
    return int(grade[1])


def numbered_examples(
    path: Path, on_error: OnError = stop
) -> Iterator[tuple[SourceLocation, Example]]:
    """Yield the location and the example of each record of a file of training examples.

    The file is a DPR JSON, a JSONL of query, pos and neg, or a Tevatron JSONL. A query without an
    id gets the id ``unnamed-query-`` and a hash of its text, and a passage without an id a hash of
    its content. Teacher scores are ``pos_scores`` and ``neg_scores`` in JSONL
    (FlagEmbedding), and the ``score`` of each passage in Tevatron.
    """
    kind = kind_of_data(path)
    if kind not in FORMATS:
        raise InputError(
            f"{path}: is a {kind} file; training examples must be DPR JSON, Tevatron JSONL, or "
            f"JSONL with query, pos and neg. {_TABLE_HINT}"
        )
    form = FORMATS[kind]
    for location, record in json_records(path, form, form.description, on_error):
        try:
            example = record.example()
        except ValueError as error:
            on_error(location.error(str(error)))
        else:
            yield location, example


def kind_of_data(path: Path) -> Kind:
    """Detect the format of a folder or file. The first record or line of a file decides.

    JSON records are examples if they have the fields of a format of examples. Other records, and
    lines with two columns (MS MARCO), are ids and texts: queries if the name of the file contains
    ``quer``, otherwise passages. Two columns are DPR's questions if the file is a .csv file, or if
    the first line looks like a question and its answers: the first cell is not an id (it is empty
    or contains white space), or the second cell starts like a list. Three columns are a DPR corpus.
    """
    if os.path.isdir(path):
        beir_file(path, "corpus.jsonl")  # raises an error for other folders
        return "beir"
    name = path.name.lower()
    texts: Kind = "queries" if "quer" in name else "corpus"
    if is_json(path):
        for location, record in json_records(path, dict[str, Any], _RECORDS):
            return kind_of_record(record, location) or texts
        raise InputError(f"{path}: is empty; a record must be {_RECORDS}")
    cells = _first_cells(path)
    if not cells:
        raise InputError(f"{path}: is empty; it must contain {_FILES}")
    if len(cells) not in (2, 3):
        raise InputError(
            f"{path}:1: found {counted(len(cells), 'column')} separated by tabs; the file must "
            f"contain {_FILES}. {_TABLE_HINT}"
        )
    if len(cells) == 2:
        is_id = cells[0].split() == [cells[0]] and not cells[1].startswith(("[", '"['))
        if not is_id or ".csv" in name:
            return "questions"
    refuse_id_table(path)
    return "corpus" if len(cells) == 3 else texts


def refuse_id_table(path: Path) -> None:
    """Raise InputError if a table has only ids, such as triples for training, or judgements.

    A table of passages has texts. In a table of ids, every other cell of the first lines is one
    word with a digit.
    """
    lines = islice(numbered_lines(path, on_error=ignore), 100)
    rows = [line.split("\t") for _, line in lines]
    if rows and rows[0][:2] == ["query-id", "corpus-id"]:
        raise InputError(
            f"{path}: is a file of judgements; give the BEIR folder with its passages and queries"
        )
    cells = [cell for row in rows for cell in row[1:]]
    if cells and all(re.fullmatch(r"\S*\d\S*", cell) for cell in cells):
        raise InputError(
            f"{path}:1: found only ids; a table of passages needs texts. Triples of ids are not "
            "read: write the texts of each query, its positives and its negatives to a JSONL file"
        )
    if rows and len(rows[0]) == 3 and " " in rows[0][0].strip():
        raise InputError(
            f"{path}:1: the first column has texts; a table of passages starts with an id. For "
            "triples of texts, add a header (query, pos, neg) and give "
            f'"hub:{path}?query=query&pos=pos&neg=neg"'
        )


NEGATIVE_NAMES = re.compile(r"(hard_?)?(neg|negative)s?(_?\d+)?", re.IGNORECASE)
"""Names of fields with hard negatives."""
LABEL_NAMES = ("label", "score")
"""Names of fields that may say whether the positives are relevant."""


FIRST_RECORDS = 1000
"""Number of records whose fields are checked: training reads the known fields much faster."""


def unread_fields(path: Path) -> list[str]:
    """Return a sentence about each field of a file of examples that is wrongly ignored.

    These are hard negatives with another name, and labels or scores that are low. Only the first
    records are checked.
    """
    form = FORMATS[kind_of_data(path)]  # type: ignore[index]
    sentences = {}
    for record in _first_records(path):
        for name in unread_negatives(record, form):
            sentences[name] = f"field {name!r} is not read, expected {form.description}"
        for name in LABEL_NAMES:
            if name not in form.__struct_fields__ and is_low(record.get(name)):
                sentences[name] = (
                    f"field {name!r} is not read, so rows with a low {name} count as positive "
                    "pairs. If a low value means not relevant, "
                    f'"hub:{path}?query=query&pos=pos&label={name}" makes these passages hard '
                    "negatives"
                )
    return list(sentences.values())


def has_answers(path: Path) -> bool:
    """Return whether one of the first records of a DPR file has answers."""
    return any(record.get("answers") for record in _first_records(path))


def _first_records(path: Path) -> Iterator[dict[str, Any]]:
    records = json_records(path, dict[str, Any], _RECORDS, ignore)
    return (record for _, record in islice(records, FIRST_RECORDS))


def unread_negatives(record: dict[str, Any], form: type[Struct]) -> list[str]:
    """Return the fields of a record that look like hard negatives, but are not read."""
    return [
        name
        for name, value in record.items()
        if NEGATIVE_NAMES.fullmatch(name) and value and name not in form.__struct_fields__
    ]


def label_of(value: Any) -> float:
    """Return a label as a number: 1 for True, 0 for False, also as texts.

    Raises TypeError or ValueError for another value, and for NaN and infinity.
    """
    number = float({"true": 1, "false": 0}.get(str(value).lower(), value))
    if not math.isfinite(number):
        raise ValueError(value)
    return number


def is_low(label: Any) -> bool:
    """Return whether a label, or a score from 0 to 1, is below 0.5."""
    if label is None:  # usually there is no such field
        return False
    try:
        return 0 <= label_of(label) < 0.5
    except (TypeError, ValueError):
        return False


def is_json(path: Path) -> bool:
    return first_character(path) in ("{", "[")


def refuse_json(path: Path, expected: str) -> None:
    """Raise InputError if a file is JSON, as runs and qrels that BEIR returns."""
    if is_json(path):
        raise InputError(f"{path}: is JSON; expected {expected}")


def kind_of_record(record: dict[str, Any], location: SourceLocation) -> TrainingKind | None:
    """Detect the format of training examples from the fields of one record.

    Return None for a passage or a query.
    """
    for kind, form in FORMATS.items():
        if form.field in record:
            return kind
    if "_id" in record or "title" in record:
        return None
    raise location.error(
        f"found fields {', '.join(map(repr, list(record)[:8])) or 'none'}; a record must be "
        f"{_RECORDS}. {_TABLE_HINT}"
    )


def _first_cells(path: Path) -> list[str]:
    """Return the cells of the first line, or an empty list if the file is empty."""
    for _, line in numbered_lines(path):
        return line.split("\t")
    return []
