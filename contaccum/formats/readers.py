"""Readers of every data format. This module also detects the format of a file.

Formats: BEIR (corpus.jsonl, queries.jsonl, qrels TSV), DPR (JSON, corpus TSV, question CSV), MS
MARCO (collection.tsv, queries.tsv), JSONL of query, pos and neg, and Tevatron JSONL. Every file may
be gzipped. A reader checks each record separately. The package ``data`` checks that ids are unique,
that references to ids are valid, and that no passage is empty.
"""

import csv
import os
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Literal

from contaccum.errors import InputError
from contaccum.formats.dpr import dpr_corpus, id_text_lines
from contaccum.formats.json_records import Record, id_field, json_records, string_field, title_field
from contaccum.formats.records import (
    Example,
    Judgement,
    OnError,
    Passage,
    Query,
    SourceLocation,
    first_character,
    ignore,
    numbered_lines,
    require_content,
    stop,
)
from contaccum.formats.training import FORMATS, reader_of

Kind = Literal["beir", "dpr", "jsonl", "tevatron", "corpus", "queries", "questions"]

_PASSAGE = "a passage (an object with _id, title and text)"
_QUERY = "a query (an object with _id and text)"
_FILES = "JSON, a DPR corpus TSV, a question CSV, or lines with id, tab and text (MS MARCO)"
_MSMARCO_NAMES = {"corpus.jsonl": "collection.tsv", "queries.jsonl": "queries.tsv"}
_RECORDS = ", or ".join(
    [*(FORMATS[kind].description for kind in ("jsonl", "tevatron", "dpr")), _PASSAGE]
)
_SAMPLE = 100  # number of records that are read to tell passages from queries
MAX_GRADE = 99_999  # trec_eval needs memory for every grade up to the largest
_GRADE = re.compile(r" *[+-]?[0-9]{1,5} *")


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
    hint = ""
    if any(folder.glob("*.csv")) or any(folder.glob("*.parquet")):
        hint = f'. To read its tables, give "hub:{folder}?query=COLUMN&pos=COLUMN"'
    raise InputError(
        f"{folder}: {name} not found; a BEIR folder has corpus.jsonl, queries.jsonl and "
        f"qrels/<split>.tsv{hint}"
    )


def numbered_corpus(
    path: Path, on_error: OnError = stop
) -> Iterator[tuple[SourceLocation, Passage]]:
    """Yield the location and the passage of each record of a corpus.

    The file is a BEIR corpus.jsonl, a DPR TSV or MS MARCO's collection.tsv.
    """
    require_content(path, "a passage")
    if _is_json(path):
        yield from json_records(path, _PASSAGE, _passage, on_error)
        return
    refuse_id_table(path)
    if _columns(path) == 2:
        for location, key, text in id_text_lines(path, on_error):
            yield location, Passage(key, "", text)
    else:
        yield from dpr_corpus(path, on_error)


def _passage(record: Record, location: SourceLocation, number: int) -> Passage:
    title = title_field(record, location)
    text = string_field(record, "text", location)
    return Passage(id_field(record, "_id", location), title, text)


def numbered_queries(
    path: Path, on_error: OnError = stop
) -> Iterator[tuple[SourceLocation, Query]]:
    """Yield the location and the query of each record of queries.jsonl or queries.tsv."""
    require_content(path, "a query")
    queries: Iterator[tuple[SourceLocation, Query]]
    if not _is_json(path) and _columns(path) == 2:
        queries = (
            (location, Query(key, text)) for location, key, text in id_text_lines(path, on_error)
        )
    else:
        queries = json_records(path, _QUERY, _query, on_error)
    for location, query in queries:
        if query.text.strip():
            yield location, query
        else:
            message = f"the text of query {query.id!r} is empty; every query needs a text"
            on_error(location.error(message))


def _query(record: Record, location: SourceLocation, number: int) -> Query:
    return Query(id_field(record, "_id", location), string_field(record, "text", location))


def read_qrels(path: Path, on_error: OnError = stop) -> Iterator[Judgement]:
    """Yield the judgements of a qrels file: a BEIR TSV, with or without a header, or a TREC file.

    The first line decides about the number of columns and the separator: tabs or white space.
    """
    require_content(path, "a judgement")
    separator: str | None = None
    columns = 0
    for location, line in numbered_lines(path, on_error=on_error):
        is_first = not columns
        if is_first:
            separator = "\t" if line.count("\t") == 2 else None
            columns = len(line.split(separator))
            if columns not in (3, 4):
                on_error(
                    location.error(
                        f"found {columns} columns; a line must have 3 columns (query-id, "
                        "corpus-id, score), or TREC's 4 columns (query, iteration, passage, grade)"
                    )
                )
                columns = 0
                continue
        cells = line.split(separator)
        if len(cells) != columns:
            on_error(
                location.error(
                    f"found {len(cells)} columns; a line must have {columns} columns, as in the "
                    "previous lines"
                )
            )
            continue
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
        yield Judgement(cells[0], cells[-2], grade, location.line)


def grade_of(text: str, location: SourceLocation) -> int:
    if not _GRADE.fullmatch(text):
        raise location.error(
            f"the grade is {text[:40]!r}; it must be an integer from -{MAX_GRADE} to {MAX_GRADE}"
        )
    return int(text)


def numbered_examples(
    path: Path, on_error: OnError = stop, scores: bool = False
) -> Iterator[tuple[SourceLocation, Example]]:
    """Yield the location and the example of each record of a file of training examples.

    The file is a DPR JSON, a JSONL of query, pos and neg, or a Tevatron JSONL. A query without an
    id gets the id ``unnamed-query-N``; N is the number of the record. A passage without an id gets
    a hash of its content as its id. With ``scores``, teacher scores are read: ``pos_scores`` and
    ``neg_scores`` in JSONL (FlagEmbedding), or the ``score`` of each passage in Tevatron.
    """
    kind = kind_of_data(path)
    if kind not in FORMATS:
        raise InputError(
            f"{path}: is a {kind} file; training examples must be DPR JSON, Tevatron JSONL, or "
            "JSONL with query, pos and neg"
        )
    return json_records(path, FORMATS[kind].description, reader_of(kind, scores), on_error)


def kind_of_data(path: Path) -> Kind:
    """Detect the format of a folder or file. The first valid record or line of a file decides."""
    if os.path.isdir(path):
        beir_file(path, "corpus.jsonl")  # raises an error for other folders
        return "beir"
    if _is_json(path):
        return _kind_of_records(path)
    return _kind_of_table(path)


def refuse_id_table(path: Path) -> None:
    """Raise InputError if a table has only ids, such as triples for training, or judgements.

    A table of passages has texts. In a table of ids, every other cell of the first lines is one
    word with a digit.
    """
    lines = islice(numbered_lines(path, on_error=ignore), _SAMPLE)
    rows = [line.split("\t") for _, line in lines]
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


def column_form(source: str, fields: Sequence[str]) -> str:
    """Return the ``hub:`` name that reads a file whose fields have other names.

    source: path of the file, or a ``hub:`` name without columns.
    """
    usual = {
        "query": ("query", "anchor", "question", "sentence1"),
        "pos": ("pos", "positive", "answer", "sentence2", "passage", "document", "context"),
        "neg": ("neg", "negative", "negatives"),
    }
    found = {}
    for key, names in usual.items():
        found[key] = next((name for name in fields if name.lower() in names), "COLUMN")
    if found["neg"] == "COLUMN":
        del found["neg"]
    columns = "&".join(f"{key}={quoted_column(name)}" for key, name in found.items())
    prefix = "" if source.startswith("hub:") else "hub:"
    return f'"{prefix}{source}?{columns}"'


def quoted_column(name: str) -> str:
    """Return a column name as a ``hub:`` name contains it: %26 for &, %2C for a comma."""
    return re.sub("[%&,]", lambda found: f"%{ord(found[0]):02X}", name)


def _is_json(path: Path) -> bool:
    return first_character(path) in ("{", "[")


def kind_of_record(record: Record, location: SourceLocation, number: int = 1) -> Kind:
    """Detect the format of a file from the fields of one record."""
    for kind, form in FORMATS.items():
        if form.field in record:
            return kind
    if "title" in record:
        return "corpus"
    if "_id" in record:
        return "queries"
    if not record:
        raise location.error(f"found an empty object; a record must be {_RECORDS}")
    raise location.error(
        f"found fields {', '.join(map(repr, list(record)[:8]))}; a record must be {_RECORDS}. To "
        f"read other fields, give {column_form(str(location.path), list(record))}"
    )


def _kind_of_records(path: Path) -> Kind:
    """Detect the format of a file of JSON records.

    Records with _id and text can be passages or queries. If the file is named corpus.jsonl or
    queries.jsonl, the name decides. Under any other name, the records are passages if one of the
    first records has a title, otherwise queries.
    """
    errors = _FirstErrors()
    first = next(json_records(path, _RECORDS, kind_of_record, errors), None)
    if first is None:
        raise errors.first or InputError(f"{path}: is empty; a record must be {_RECORDS}")
    kind = first[1]
    if kind not in ("corpus", "queries"):
        return kind
    name = path.name.lower().removesuffix(".gz")
    if name == "corpus.jsonl":
        return "corpus"
    if name == "queries.jsonl":
        return "queries"
    sample = islice(json_records(path, _RECORDS, kind_of_record, ignore), _SAMPLE)
    return "corpus" if any(kind == "corpus" for _, kind in sample) else "queries"


def _kind_of_table(path: Path) -> Kind:
    """Detect the format of a file with columns from its first line.

    A file with three columns is a DPR corpus. A file with two columns has DPR questions if it is a
    .csv file, or if its first line looks like a question and its answers: the first cell is not an
    id (it is empty or contains white space), or the second cell starts like a list. Other files
    with two columns have ids and texts (MS MARCO): queries if the file name contains ``quer``,
    otherwise passages.
    """
    errors = _FirstErrors()
    cells = _first_cells(path, errors)
    if not cells:
        raise errors.first or InputError(f"{path}: is empty; it must contain {_FILES}")
    is_csv = ".csv" in path.name.lower()
    if len(cells) == 3:
        refuse_id_table(path)
        return "corpus"
    if len(cells) != 2:
        hint = ""
        if is_csv or path.name.lower().endswith(".tsv"):
            header = next(csv.reader(["\t".join(cells)], delimiter="," if is_csv else "\t"))
            hint = f". To read other columns, give {column_form(str(path), header)}"
        raise InputError(
            f"{path}:1: found {len(cells)} columns; the file must contain {_FILES}{hint}"
        )
    is_question = cells[0].split() != [cells[0]] or cells[1].startswith(("[", '"['))
    if is_question or is_csv:
        return "questions"
    refuse_id_table(path)
    return "queries" if "quer" in path.name.lower() else "corpus"


def _columns(path: Path) -> int:
    return len(_first_cells(path, _FirstErrors()))


def _first_cells(path: Path, on_error: OnError) -> list[str]:
    """Return the cells of the first valid line, or an empty list if the file has none."""
    for _, line in numbered_lines(path, on_error=on_error):
        return line.split("\t")
    return []


class _FirstErrors:
    """Skip up to 100 invalid records, which the reader of the format will report.

    Raise the next.
    """

    def __init__(self) -> None:
        self.first: InputError | None = None
        self._count = 0

    def __call__(self, error: InputError) -> None:
        self.first = self.first or error
        self._count += 1
        if self._count > _SAMPLE:
            raise self.first
