"""Readers of every data format. This module also detects the format of a file.

Formats: BEIR (corpus.jsonl, queries.jsonl, qrels TSV), DPR (JSON, corpus TSV, question CSV), MS MARCO (collection.tsv,
queries.tsv), JSONL of query, pos and neg, and Tevatron JSONL. Every file may be gzipped. A reader checks each record separately.
The package ``data`` checks that ids are unique, that references to ids are valid, and that no passage is empty.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeVar

from contaccum.errors import InputError
from contaccum.formats.dpr import HEADER, dpr_corpus, id_text_lines
from contaccum.formats.json_records import (
    Record,
    id_field,
    json_lines,
    json_list,
    json_objects,
    string_field,
    title_field,
)
from contaccum.formats.records import (
    STRICT,
    Example,
    Judgement,
    Passage,
    Query,
    RejectedRecords,
    SourceLocation,
    above_limit,
    first_character,
    numbered_lines,
    unpacked_limit,
)
from contaccum.formats.training import RECORDS, reader_of

Value = TypeVar("Value")
Kind = Literal["beir", "dpr", "jsonl", "tevatron", "corpus", "queries", "questions"]

_PASSAGE = "a passage (an object with _id, title and text)"
_QUERY = "a query (an object with _id and text)"
_FILES = "JSON, a DPR corpus TSV, a question CSV, or lines with id, tab and text (MS MARCO)"
_MSMARCO_NAMES = {"corpus.jsonl": "collection.tsv", "queries.jsonl": "queries.tsv"}
_RECORDS = ", or ".join([*RECORDS.values(), _PASSAGE])
_TYPICAL_FIELDS: dict[str, Kind] = {
    "positive_ctxs": "dpr",
    "positive_passages": "tevatron",
    "pos": "jsonl",
    "title": "corpus",
    "_id": "queries",
}
"""Field -> format of the records that have this field. If a record has several of these fields, the first one here decides."""
_NAMES: dict[str, Kind] = {"corpus.jsonl": "corpus", "queries.jsonl": "queries"}
_SAMPLE = 100  # maximum number of valid records, and of invalid records, that are read to detect a format
MAX_GRADE = 99_999  # trec_eval needs memory for every grade up to the largest
_GRADE = re.compile(r" *[+-]?[0-9]{1,5} *")
_GRADES = "3 columns (query-id, corpus-id, score), or TREC's 4 columns (query, iteration, passage, grade)"


def beir_file(folder: Path, name: str) -> Path:
    """Return the path of the file ``name`` in a BEIR folder: gzipped or not, or with MS MARCO's name (collection.tsv)."""
    other = _MSMARCO_NAMES.get(name, name)
    for path in (folder / name, folder / f"{name}.gz", folder / other, folder / f"{other}.gz"):
        if path.is_file():
            return path
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    raise InputError(f"{folder}: {name} not found; a BEIR folder has corpus.jsonl, queries.jsonl and qrels/<split>.tsv")


def numbered_corpus(path: Path, rejected: RejectedRecords = STRICT) -> Iterator[tuple[SourceLocation, Passage]]:
    """Yield the location and the passage of each record of a corpus.

    The file is a BEIR corpus.jsonl, a DPR TSV or MS MARCO's collection.tsv.
    """
    if _layout(path, rejected.limit) != "lines":
        if _columns(path, rejected.limit) == 2:
            return ((location, Passage(key, "", text)) for location, key, text in id_text_lines(path, rejected))
        return dpr_corpus(path, rejected)
    return json_lines(path, _PASSAGE, _passage, rejected)


def _passage(record: Record, location: SourceLocation, number: int) -> Passage:
    title, text = title_field(record, location), string_field(record, "text", location)
    return Passage(id_field(record, "_id", location), title, text)


def numbered_queries(path: Path, rejected: RejectedRecords = STRICT) -> Iterator[tuple[SourceLocation, Query]]:
    """Yield the location and the query of each record of a BEIR queries.jsonl or MS MARCO's queries.tsv.

    A query without text is rejected.
    """
    if _layout(path, rejected.limit) != "columns" or _columns(path, rejected.limit) != 2:
        yield from json_lines(path, _QUERY, _query, rejected)
        return
    for location, key, text in id_text_lines(path, rejected):
        if text.strip():
            yield location, Query(key, text)
        else:
            rejected.reject(_empty_query(key, location))


def _empty_query(key: str, location: SourceLocation) -> InputError:
    return location.error(f"the text of query {key!r} is empty; every query needs a text")


def _query(record: Record, location: SourceLocation, number: int) -> Query:
    query = Query(id_field(record, "_id", location), string_field(record, "text", location))
    if not query.text.strip():
        raise _empty_query(query.id, location)
    return query


def read_qrels(path: Path, rejected: RejectedRecords = STRICT) -> Iterator[Judgement]:
    """Yield the judgements of a qrels file. The file is a BEIR TSV, with or without a header, or a TREC file."""
    separator, columns = _qrels_form(path, rejected.limit)
    first = True
    for location, line in numbered_lines(path, rejected=rejected):
        cells = line.split(separator)
        with rejected:
            if not cells or len(cells) != columns:
                needed = _GRADES if first else f"{columns} columns, as in the previous lines"
                raise location.error(f"found {len(cells)} columns; a line must have {needed}")
            named = cells[0].lower().replace("_", "-") in ("query-id", "qid", "query")
            if first and named and not _GRADE.fullmatch(cells[-1]):
                first = False
                continue
            if not cells[0] or not cells[-2]:
                raise location.error("found an empty id; queries and passages need an id")
            judgement = Judgement(cells[0], cells[-2], grade_of(cells[-1], location), location.line)
            first = False
            yield judgement


def grade_of(text: str, location: SourceLocation) -> int:
    if not _GRADE.fullmatch(text):
        raise location.error(f"the grade is {text[:40]!r}; it must be an integer from -{MAX_GRADE} to {MAX_GRADE}")
    return int(text)


def numbered_examples(
    path: Path, rejected: RejectedRecords = STRICT, scores: bool = False
) -> Iterator[tuple[SourceLocation, Example]]:
    """Yield the location and the example of each record of a file of training examples.

    The file is a DPR JSON, a JSONL of query, pos and neg, or a Tevatron JSONL. A query without an id gets the id
    ``unnamed-query-N``; N is the number of the record. A passage without an id gets a hash of its content as its id. With
    ``scores``, teacher scores are read: ``pos_scores`` and ``neg_scores`` in JSONL (FlagEmbedding), or the ``score`` of each
    passage in Tevatron. The ``score`` in a DPR file is a search score and is ignored.
    """
    kind = kind_of_data(path, rejected.limit)
    if kind == "dpr" and _layout(path, rejected.limit) == "list":
        return json_list(path, RECORDS["dpr"], reader_of("dpr"), rejected)
    return line_examples(path, numbered_lines(path, rejected=rejected), kind, rejected, scores)


def line_examples(
    path: Path, lines: Iterable[tuple[SourceLocation, str]], kind: Kind, rejected: RejectedRecords, scores: bool = False
) -> Iterator[tuple[SourceLocation, Example]]:
    """Convert lines in the format ``kind``; yield the location and the example of each. path: for error messages."""
    if kind not in RECORDS:
        raise InputError(
            f"{path}: is a {kind} file; training examples must be DPR JSON, Tevatron JSONL, or JSONL with query, pos and neg"
        )
    return json_objects(lines, RECORDS[kind], reader_of(kind, scores), rejected)


def kind_of_data(path: Path, max_bad_records: int = 0) -> Kind:
    """Detect the format of a folder or file from the first records. Skip up to ``max_bad_records`` invalid records."""
    if os.path.isdir(path):
        beir_file(path, "corpus.jsonl")  # raises an error for other folders
        return "beir"
    layout = _layout(path, max_bad_records)
    if layout == "list":
        return "dpr"
    return (_kind_of_lines if layout == "lines" else _kind_of_table)(path, max_bad_records)


def _kind_of_table(path: Path, max_bad_records: int) -> Kind:
    """Detect the format of a file with columns. A file with three columns is a DPR corpus.

    A file with two columns has DPR questions if it is a .csv file, or if most of the first lines look like a question and its
    answers. In such a line, the first cell is not an id (it is empty or contains white space), or the second cell starts like
    a list. Other files with two columns have ids and texts (MS MARCO). Their format is ``queries`` if the file name contains
    ``quer``, otherwise ``corpus``.
    """
    rows = [line.split("\t") for line in _first_lines(path, max_bad_records)]
    if not rows:
        raise InputError(f"{path}: is empty; it must contain {_FILES}")
    columns = _columns(path, max_bad_records)
    if columns is None:
        other = '. For another CSV, use "hub:FOLDER?query=COLUMN&pos=COLUMN"' if ".csv" in path.suffixes else ""
        raise InputError(f"{path}:1: found {len(rows[0])} columns; the file must contain {_FILES}{other}")
    if columns == 3:
        return "corpus"
    answers = _most_common(
        [key.split() != [key] or rest[0].startswith(("[", '"[')) for key, *rest in rows if len(rest) == 1]
    )
    if answers or ".csv" in path.suffixes:
        return "questions"
    return "queries" if "quer" in path.name.lower() else "corpus"


def _columns(path: Path, max_bad_records: int) -> int | None:
    """Return the number of columns, 2 or 3. Return None if no line has 2 or 3 columns.

    A file with the header of a DPR corpus has 3 columns. In other files, the majority of the first lines decides.
    """
    rows = [line.split("\t") for line in _first_lines(path, max_bad_records)]
    if rows and [cell.strip().lower() for cell in rows[0]] == HEADER:
        return 3  # a cell in quotes can have several lines, each with fewer columns
    counts = [len(row) for row in rows]
    return _most_common([count for count in counts if count in (2, 3)])


def _first_lines(path: Path, max_bad_records: int) -> list[str]:
    """Return the first 2 n + 1 lines, where n is min(max_bad_records, 100). Even with n invalid lines, most lines are valid."""
    enough = 2 * min(max_bad_records, _SAMPLE) + 1
    return [line for _, line in islice(numbered_lines(path, rejected=RejectedRecords(enough - 1)), enough)]


def _most_common(found: Iterable[Value]) -> Value | None:
    """Return the most common value. If several values are equally common, return the first. Without values, return None."""
    return next((value for value, _ in Counter(found).most_common(1)), None)


def _layout(path: Path, max_bad_records: int) -> Literal["list", "lines", "columns"]:
    """Return whether a file is one JSON list, lines of JSON objects, or a table with columns.

    Without ``max_bad_records``, the first character decides. With ``max_bad_records``, the first line may be invalid, so the
    majority of the first lines decides. Exception: a file that starts with [ is one JSON list if its first line is not a
    complete list, or if the file has only one line.
    """
    first = first_character(path)
    if not max_bad_records:
        return "list" if first == "[" else "lines" if first == "{" else "columns"
    lines = _first_lines(path, max_bad_records) or [""]
    if first == "[" and not (len(lines) > 1 and _is_whole_list(lines[0])):
        return "list"
    starts = [(line.lstrip().startswith("{"), line.count("\t") in (1, 2)) for line in lines]
    json_lines = _most_common([is_json for is_json, columns in starts if is_json or columns] or [first == "{"])
    return "lines" if json_lines else "columns"


def _is_whole_list(line: str) -> bool:
    try:
        return isinstance(json.loads(line), list)
    except (ValueError, RecursionError):
        return False


def _qrels_form(path: Path, max_bad_records: int) -> tuple[str | None, int]:
    """Return the separator of a qrels file (None: white space), and the number of columns: 3, 4 or 0 (neither 3 nor 4)."""
    forms = []
    for line in _first_lines(path, max_bad_records):
        separator = "\t" if line.count("\t") == 2 else None
        forms.append((separator, len(line.split(separator))))
    return _most_common([form for form in forms if form[1] in (3, 4)]) or (None, 0)


def kind_of_record(record: Record, location: SourceLocation, number: int = 1) -> Kind:
    """Detect the format of a file from the fields of one record."""
    for field, kind in _TYPICAL_FIELDS.items():
        if field in record:
            return kind
    found = f"fields {', '.join(map(repr, list(record)[:8]))}" if record else "an empty object"
    raise location.error(f"found {found}; a record must be {_RECORDS}")


def within_limit(
    rows: Iterable[tuple[SourceLocation, Record]], path: Path, max_unpacked: float | None
) -> Iterator[tuple[SourceLocation, Record]]:
    """Yield the rows of a table. Raise InputError if they are larger than ``unpacked_limit`` allows for the file ``path``.

    A Parquet file stores equal texts once, so a small file can have very large rows. The rows of a plain CSV file always fit.
    """
    size = path.stat().st_size
    left = limit = max(size, unpacked_limit(size, max_unpacked))
    for location, row in rows:
        left -= _size(row)
        if left < 0:
            raise above_limit(str(path), limit)
        yield location, row


def _size(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    parts = list(value.values()) if isinstance(value, Mapping) else value
    if not isinstance(parts, list):
        return 8
    return 8 * len(parts) if parts and isinstance(parts[0], float) else sum(map(_size, parts))


def _kind_of_lines(path: Path, max_bad_records: int) -> Kind:
    """Detect the format of a file of JSON lines.

    Records with _id and text can be passages or queries. If the file is named corpus.jsonl or queries.jsonl, the name decides.
    Under any other name, the records are passages if one of the first records has a title, otherwise queries.
    """
    enough = min(max_bad_records, _SAMPLE) + 1
    kinds = json_lines(path, _RECORDS, kind_of_record, RejectedRecords(2 * (enough - 1)))
    kind = (
        _most_common(kind for _, kind in islice(kinds, enough)) or next(json_lines(path, _RECORDS, kind_of_record))[1]
    )
    if kind not in ("corpus", "queries"):
        return kind
    if (name := path.name.removesuffix(".gz")) in _NAMES:
        return _NAMES[name]
    first = islice(json_lines(path, _RECORDS, kind_of_record, RejectedRecords(_SAMPLE)), _SAMPLE)
    return "corpus" if any(each == "corpus" for _, each in first) else kind
