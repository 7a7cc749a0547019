"""The readers of every data format, told apart by what a file holds; each error names the file and line or record.

Formats: BEIR (corpus.jsonl, queries.jsonl, qrels TSV), DPR (JSON, corpus TSV, question CSV), JSONL of query, pos and
neg, and Tevatron JSONL; each plain or gzipped. Readers stream, and check the form of what they read; that ids are
unique and known, and passages not empty, is for those who see the whole data set.
"""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from contaccum.data.dpr import DPR_RECORD, dpr_corpus, dpr_examples, dpr_questions, query_id
from contaccum.data.json_records import (
    Record,
    id_field,
    json_lines,
    kind_of,
    list_field,
    record_of,
    string_field,
    title_field,
)
from contaccum.data.lines import Place, first_character, numbered_lines
from contaccum.data.records import Example, Judgement, Passage, Query, Question, content_id
from contaccum.errors import InputError

__all__ = [
    "Example",
    "Judgement",
    "Kind",
    "Passage",
    "Query",
    "Question",
    "beir_file",
    "content_id",
    "kind_of_data",
    "numbered_corpus",
    "numbered_examples",
    "numbered_queries",
    "read_corpus",
    "read_examples",
    "read_qrels",
    "read_queries",
    "read_questions",
]

Kind = Literal["beir", "dpr", "jsonl", "tevatron", "corpus", "queries", "questions"]

_PASSAGE = "a passage (an object with _id, title and text)"
_QUERY = "a query (an object with _id and text)"
_PAIR = "an object with query, pos and neg"
_TEVATRON = "an object with query_id, query, positive_passages and negative_passages"
_DOCUMENT = "a passage (an object with docid, title and text)"
MAX_GRADE = 99_999  # trec_eval keeps a count for every grade up to the largest
_GRADE = re.compile(r" *[+-]?[0-9]{1,5} *")
_GRADES = "three columns (query-id, corpus-id, score) or TREC's four (query, iteration, passage, grade)"


def beir_file(folder: str | Path, name: str) -> Path:
    """The file ``name`` of a BEIR folder, or its gzipped form; InputError where there is neither."""
    folder = Path(folder)
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    raise InputError(
        f"{folder}: holds no {name}, expected a BEIR folder (corpus.jsonl, queries.jsonl, qrels/<split>.tsv)"
    )


def read_corpus(path: str | Path) -> Iterator[Passage]:
    """The passages of a BEIR corpus.jsonl or of a DPR TSV."""
    return (passage for _, passage in numbered_corpus(path))


def numbered_corpus(path: str | Path) -> Iterator[tuple[int, Passage]]:
    """As ``read_corpus``, with the line of each passage."""
    path = Path(path)
    return _beir_corpus(path) if first_character(path) == "{" else dpr_corpus(path)


def _beir_corpus(path: Path) -> Iterator[tuple[int, Passage]]:
    for place, record in json_lines(path, _PASSAGE):
        title, text = title_field(record, place), string_field(record, "text", place)
        yield place.line, Passage(id_field(record, "_id", place), title, text)


def read_queries(path: str | Path) -> Iterator[Query]:
    """The queries of a BEIR queries.jsonl."""
    return (query for _, query in numbered_queries(path))


def numbered_queries(path: str | Path) -> Iterator[tuple[int, Query]]:
    """As ``read_queries``, with the line of each query; an empty text is refused."""
    for place, record in json_lines(Path(path), _QUERY):
        query = Query(id_field(record, "_id", place), string_field(record, "text", place))
        if not query.text.strip():
            raise place.error(f"the text of query {query.id!r} is empty, expected a query")
        yield place.line, query


def read_qrels(path: str | Path) -> Iterator[Judgement]:
    """The judgements of a BEIR TSV, with or without its header, or of a TREC qrels file."""
    path = Path(path)
    columns, separator = 0, None
    for number, line in numbered_lines(path):
        if not columns and line.count("\t") == 2:
            separator = "\t"
        cells = line.split(separator)
        if not cells or len(cells) != columns:
            if columns or len(cells) not in (3, 4):
                raise Place(path, number).error(f"found {len(cells)} columns, expected {columns or _GRADES}")
            columns = len(cells)
            if cells[0].lower().replace("_", "-") in ("query-id", "qid", "query"):
                continue
        query, passage, grade = cells[0], cells[-2], cells[-1]
        if not query or not passage:
            raise Place(path, number).error(f"found an empty id, expected {_GRADES}")
        if not _GRADE.fullmatch(grade):
            expected = f"a whole number from -{MAX_GRADE} to {MAX_GRADE}"
            raise Place(path, number).error(f"the grade is {grade[:40]!r}, expected {expected}")
        yield Judgement(query, passage, int(grade), number)


def read_questions(path: str | Path) -> Iterator[Question]:
    """The questions of a DPR question CSV."""
    return (question for _, question in dpr_questions(Path(path)))


def read_examples(path: str | Path) -> Iterator[Example]:
    """The training examples of a DPR JSON, a JSONL of query, pos and neg, or a Tevatron JSONL.

    A query without an id gets its record's number, a passage without an id a hash of its title and text.
    """
    return (example for _, example in numbered_examples(path))


def numbered_examples(path: str | Path) -> Iterator[tuple[Place, Example]]:
    """As ``read_examples``, with the place of each example."""
    path = Path(path)
    kind = kind_of_data(path)
    if kind not in _EXAMPLES:
        raise InputError(
            f"{path}: found a {kind} file, expected training examples (DPR JSON, query/pos/neg or Tevatron)"
        )
    return _EXAMPLES[kind](path)


def _pairs(path: Path) -> Iterator[tuple[Place, Example]]:
    for number, (place, record) in enumerate(json_lines(path, _PAIR), 1):
        query = Query(query_id(record, place, number), string_field(record, "query", place))
        yield place, Example(query, _texts(record, "pos", place), _texts(record, "neg", place))


def _texts(record: Record, name: str, place: Place) -> list[Passage]:
    """The passages of ``pos`` or ``neg`` (strings, or one string), with the ids in ``pos_id`` or ``neg_id`` if any."""
    if isinstance(record.get(name), str):
        record = {**record, name: [record[name]]}
    texts = list_field(record, name, place, _string, required=name == "pos")
    ids = list_field(record, f"{name}_id", place, _id) or [content_id("", text) for text in texts]
    if len(ids) != len(texts):
        raise place.error(f"found {len(ids)} ids in '{name}_id', expected one for each of the {len(texts)} in {name!r}")
    return [Passage(key, "", text) for key, text in zip(ids, texts, strict=True)]


def _string(value: Any, place: Place) -> str:
    if isinstance(value, str):
        return value
    raise place.error(f"found {kind_of(value)}, expected a string")


def _id(value: Any, place: Place) -> str:
    return id_field({"id": value}, "id", place)


def _tevatron(path: Path) -> Iterator[tuple[Place, Example]]:
    for number, (place, record) in enumerate(json_lines(path, _TEVATRON), 1):
        query = Query(query_id(record, place, number), string_field(record, "query", place))
        positives = list_field(record, "positive_passages", place, _document, required=True)
        yield place, Example(query, positives, list_field(record, "negative_passages", place, _document))


def _document(value: Any, place: Place) -> Passage:
    record = record_of(value, place, _DOCUMENT)
    title, text = title_field(record, place), string_field(record, "text", place)
    key = content_id(title, text) if record.get("docid") is None else id_field(record, "docid", place)
    return Passage(key, title, text)


_EXAMPLES: dict[str, Callable[[Path], Iterator[tuple[Place, Example]]]] = {
    "dpr": dpr_examples,
    "jsonl": _pairs,
    "tevatron": _tevatron,
}


def kind_of_data(path: str | Path) -> Kind:
    """What a folder or file holds, told from its first record; InputError where it is none of our formats."""
    path = Path(path)
    if os.path.isdir(path):
        beir_file(path, "corpus.jsonl")
        return "beir"
    first = first_character(path)
    if first == "[":
        return "dpr"
    if first == "{":
        return _kind_of_lines(path)
    for _, line in numbered_lines(path):
        if (columns := line.count("\t") + 1) in (2, 3):
            return "questions" if columns == 2 else "corpus"
        raise InputError(f"{path}, line 1: found {columns} columns, expected JSON, a DPR corpus TSV or a question CSV")
    raise InputError(f"{path}: is empty, expected JSON, a DPR corpus TSV or a question CSV")


def _kind_of_lines(path: Path) -> Kind:
    expected = f"{_PAIR}, or {_TEVATRON}, or {DPR_RECORD}, or {_PASSAGE}"
    place, record = next(json_lines(path, expected))
    marks: dict[str, Kind] = {
        "positive_ctxs": "dpr",
        "positive_passages": "tevatron",
        "pos": "jsonl",
        "title": "corpus",
        "_id": "queries",
    }
    for field, kind in marks.items():
        if field in record:
            return kind
    found = f"the fields {', '.join(map(repr, list(record)[:8]))}" if record else "an empty object"
    raise place.error(f"found {found}, expected {expected}")
