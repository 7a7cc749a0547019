"""The readers of every data format, told apart by what a file holds; each error names the file and line or record.

Formats: BEIR (corpus.jsonl, queries.jsonl, qrels TSV), DPR (JSON, corpus TSV, question CSV), JSONL of query, pos and
neg, and Tevatron JSONL; each plain or gzipped. Readers stream, and check the form of what they read; that ids are
unique and known, and passages not empty, is for those who see the whole data set.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeVar

from contaccum.data.bad_records import STRICT, BadRecords, Place
from contaccum.data.dpr import DPR_RECORD, dpr_corpus, dpr_example, dpr_list, dpr_questions, query_id
from contaccum.data.json_records import (
    Read,
    Record,
    id_field,
    json_lines,
    json_objects,
    kind_of,
    list_field,
    record_of,
    string_field,
    title_field,
)
from contaccum.data.lines import first_character, numbered_lines
from contaccum.data.records import Example, Judgement, Passage, Query, Question, Scores, content_id
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
    "kind_of_record",
    "line_examples",
    "numbered_corpus",
    "numbered_examples",
    "numbered_queries",
    "read_corpus",
    "read_examples",
    "read_qrels",
    "read_queries",
    "read_questions",
]

Value = TypeVar("Value")
Kind = Literal["beir", "dpr", "jsonl", "tevatron", "corpus", "queries", "questions"]

_PASSAGE = "a passage (an object with _id, title and text)"
_QUERY = "a query (an object with _id and text)"
_PAIR = "an object with query, pos and neg"
_TEVATRON = "an object with query_id, query, positive_passages and negative_passages"
_DOCUMENT = "a passage (an object with docid, title and text)"
_RECORDS = f"{_PAIR}, or {_TEVATRON}, or {DPR_RECORD}, or {_PASSAGE}"
_MARKS: dict[str, Kind] = {
    "positive_ctxs": "dpr",
    "positive_passages": "tevatron",
    "pos": "jsonl",
    "title": "corpus",
    "_id": "queries",
}
"""The field that tells what a record is."""
_NAMES: dict[str, Kind] = {"corpus.jsonl": "corpus", "queries.jsonl": "queries"}
_LOOKED_AT = 100  # records, or bad ones among them, that telling the formats apart reckons with
MAX_GRADE = 99_999  # trec_eval keeps a count for every grade up to the largest
MAX_SCORE = 3e38  # of a teacher, either way
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


def numbered_corpus(path: str | Path, bad: BadRecords = STRICT) -> Iterator[tuple[int, Passage]]:
    """As ``read_corpus``, with the line of each passage."""
    path = Path(path)
    if not _is_json(path, bad.limit):
        return dpr_corpus(path, bad)
    return ((place.line, passage) for place, passage in json_lines(path, _PASSAGE, _passage, bad))


def _passage(record: Record, place: Place, number: int) -> Passage:
    title, text = title_field(record, place), string_field(record, "text", place)
    return Passage(id_field(record, "_id", place), title, text)


def read_queries(path: str | Path) -> Iterator[Query]:
    """The queries of a BEIR queries.jsonl."""
    return (query for _, query in numbered_queries(path))


def numbered_queries(path: str | Path, bad: BadRecords = STRICT) -> Iterator[tuple[int, Query]]:
    """As ``read_queries``, with the line of each query; an empty text is refused."""
    return ((place.line, query) for place, query in json_lines(Path(path), _QUERY, _query, bad))


def _query(record: Record, place: Place, number: int) -> Query:
    query = Query(id_field(record, "_id", place), string_field(record, "text", place))
    if not query.text.strip():
        raise place.error(f"the text of query {query.id!r} is empty, expected a query")
    return query


def read_qrels(path: str | Path, bad: BadRecords = STRICT) -> Iterator[Judgement]:
    """The judgements of a BEIR TSV, with or without its header, or of a TREC qrels file."""
    path = Path(path)
    separator, columns = _qrels_form(path, bad.limit)
    first = True
    for number, line in numbered_lines(path, bad=bad):
        cells = line.split(separator)
        try:
            if not cells or len(cells) != columns:
                raise Place(path, number).error(f"found {len(cells)} columns, expected {_GRADES if first else columns}")
            named = cells[0].lower().replace("_", "-") in ("query-id", "qid", "query")
            if first and named and not _GRADE.fullmatch(cells[-1]):
                first = False
                continue
            judgement = _judgement(cells, Place(path, number))
        except InputError as error:
            bad.leave_out(error)
        else:
            first = False
            yield judgement


def _judgement(cells: list[str], place: Place) -> Judgement:
    query, passage, grade = cells[0], cells[-2], cells[-1]
    if not query or not passage:
        raise place.error(f"found an empty id, expected {_GRADES}")
    return Judgement(query, passage, grade_of(grade, place), place.line)


def grade_of(text: str, place: Place) -> int:
    """A judgement's grade, or InputError."""
    if not _GRADE.fullmatch(text):
        expected = f"a whole number from -{MAX_GRADE} to {MAX_GRADE}"
        raise place.error(f"the grade is {text[:40]!r}, expected {expected}")
    return int(text)


def read_questions(path: str | Path, bad: BadRecords = STRICT) -> Iterator[Question]:
    """The questions of a DPR question CSV."""
    return (question for _, question in dpr_questions(Path(path), bad))


def read_examples(path: str | Path) -> Iterator[Example]:
    """The training examples of a DPR JSON, a JSONL of query, pos and neg, or a Tevatron JSONL.

    A query without an id gets ``unnamed-query-`` and its record's number, a passage without one a hash of its title and text.
    """
    return (example for _, example in numbered_examples(path))


def numbered_examples(
    path: str | Path, bad: BadRecords = STRICT, scores: bool = False
) -> Iterator[tuple[Place, Example]]:
    """As ``read_examples``, with the place of each example; with ``scores``, those of its passages are read too, and checked.

    They stand in ``pos_scores`` and ``neg_scores`` (FlagEmbedding's form) or as ``score`` of each passage (Tevatron's). DPR's
    files are never asked: their ``score`` is what a search gave, and for a gold passage a mark.
    """
    path = Path(path)
    kind = kind_of_data(path, bad.limit)
    if kind == "dpr" and _is_list(path, bad.limit):
        return dpr_list(path, bad)
    return line_examples(path, numbered_lines(path, bad=bad), kind, bad, scores)


def line_examples(
    path: Path, lines: Iterable[tuple[int, str]], kind: Kind, bad: BadRecords, scores: bool = False
) -> Iterator[tuple[Place, Example]]:
    """As ``numbered_examples``, of numbered lines from anywhere, of a known kind; ``path`` is what errors name."""
    readers: dict[Kind, tuple[str, Read[Example]]] = {
        "dpr": (DPR_RECORD, dpr_example),
        "jsonl": (_PAIR, _scored(_pair, _pair_scores) if scores else _pair),
        "tevatron": (_TEVATRON, _scored(_tevatron, _tevatron_scores) if scores else _tevatron),
    }
    if kind not in readers:
        raise InputError(
            f"{path}: found a {kind} file, expected training examples (DPR JSON, query/pos/neg or Tevatron)"
        )
    return json_objects(path, lines, *readers[kind], bad)


def _pair(record: Record, place: Place, number: int) -> Example:
    query = Query(query_id(record, place, number), string_field(record, "query", place))
    return Example(query, _texts(record, "pos", place), _texts(record, "neg", place))


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


def _tevatron(record: Record, place: Place, number: int) -> Example:
    query = Query(query_id(record, place, number), string_field(record, "query", place))
    positives = list_field(record, "positive_passages", place, _document, required=True)
    return Example(query, positives, list_field(record, "negative_passages", place, _document))


def _document(value: Any, place: Place) -> Passage:
    record = record_of(value, place, _DOCUMENT)
    title, text = title_field(record, place), string_field(record, "text", place)
    key = content_id(title, text) if record.get("docid") is None else id_field(record, "docid", place)
    return Passage(key, title, text)


def _scored(read: Read[Example], scores: Callable[[Record, Place], list[Sequence[float | None]]]) -> Read[Example]:
    """As ``read``, with what ``scores`` finds: for positives and for negatives a list, one number for each passage or none."""

    def both(record: Record, place: Place, number: int) -> Example:
        example = read(record, place, number)
        found = scores(record, place)
        given = [sum(score is not None for score in part) for part in found]
        passages = [len(example.positives), len(example.negatives)]
        if not any(given):
            return example
        if given != passages:
            of = "{} of positives and {} of negatives".format
            raise place.error(f"found the scores {of(*given)}, expected one for each passage: {of(*passages)}")
        return example._replace(scores=Scores(*found))  # type: ignore[arg-type]

    return both


def _pair_scores(record: Record, place: Place) -> list[Sequence[float | None]]:
    return [list_field(record, name, place, _score) for name in ("pos_scores", "neg_scores")]


def _tevatron_scores(record: Record, place: Place) -> list[Sequence[float | None]]:
    def of(passage: Any, place: Place) -> float | None:
        return None if passage.get("score") is None else _score(passage["score"], place)

    return [list_field(record, name, place, of) for name in ("positive_passages", "negative_passages")]


def _score(value: Any, place: Place) -> float:
    # training holds it in four bytes, in which a number beyond 3e38 is infinite
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_SCORE:
        return value
    raise place.error(f"found {kind_of(value)}, expected a score, a finite number")


def kind_of_data(path: str | Path, max_bad_records: int = 0) -> Kind:
    """What a folder or file holds, told from its first record; InputError where it is none of our formats.

    With ``max_bad_records`` the first record that tells counts.
    """
    path = Path(path)
    if os.path.isdir(path):
        beir_file(path, "corpus.jsonl")
        return "beir"
    if _is_list(path, max_bad_records):
        return "dpr"
    if _is_json(path, max_bad_records):
        return _kind_of_lines(path, max_bad_records)
    columns = [line.count("\t") + 1 for _, line in _first_lines(path, max_bad_records)]
    if not columns:
        raise InputError(f"{path}: is empty, expected JSON, a DPR corpus TSV or a question CSV")
    if told := _most_common([count for count in columns if count in (2, 3)]):
        return "questions" if told == 2 else "corpus"
    raise InputError(f"{path}, line 1: found {columns[0]} columns, expected JSON, a DPR corpus TSV or a question CSV")


def _first_lines(path: Path, max_bad_records: int) -> list[tuple[int, str]]:
    """Lines enough that few bad ones among them cannot outvote the good ones."""
    enough = 2 * min(max_bad_records, _LOOKED_AT) + 1
    return list(islice(numbered_lines(path, bad=BadRecords(enough - 1)), enough))


def _most_common(found: Iterable[Value]) -> Value | None:
    """What is found most often, of equals the first; None where there is nothing."""
    return next((value for value, _ in Counter(found).most_common(1)), None)


def _is_list(path: Path, max_bad_records: int) -> bool:
    """Whether a file holds one JSON list. A first line that is a whole list, with lines behind it, may be a bad record."""
    if first_character(path) != "[" or not max_bad_records:
        return first_character(path) == "["
    first, *others = [line for _, line in _first_lines(path, max_bad_records)] or [""]
    try:
        return not (others and isinstance(json.loads(first), list))
    except (ValueError, RecursionError):
        return True


def _is_json(path: Path, max_bad_records: int) -> bool:
    """Whether a file holds a JSON object a line, rather than columns."""
    first = first_character(path)
    if not max_bad_records:
        return first == "{"
    lines = [line for _, line in _first_lines(path, max_bad_records)]
    starts = [(line.lstrip().startswith("{"), line.count("\t") in (1, 2)) for line in lines]
    return bool(_most_common([json for json, columns in starts if json or columns] or [first == "{"]))


def _qrels_form(path: Path, max_bad_records: int) -> tuple[str | None, int]:
    """What separates the columns (None: any white space), and how many there are; 0 where no line tells."""
    forms = []
    for _, line in _first_lines(path, max_bad_records):
        separator = "\t" if line.count("\t") == 2 else None
        forms.append((separator, len(line.split(separator))))
    return _most_common([form for form in forms if form[1] in (3, 4)]) or (None, 0)


def kind_of_record(record: Record, place: Place, number: int = 1) -> Kind:
    """What the fields of a record say that its file holds; InputError where they are those of none of our formats."""
    for field, kind in _MARKS.items():
        if field in record:
            return kind
    found = f"the fields {', '.join(map(repr, list(record)[:8]))}" if record else "an empty object"
    raise place.error(f"found {found}, expected {_RECORDS}")


def _kind_of_lines(path: Path, max_bad_records: int) -> Kind:
    """Records with _id and text are what a BEIR file of that name holds; of other names passages where one has a title."""
    kind = _kind_of_first_lines(path, max_bad_records)
    if kind not in ("corpus", "queries"):
        return kind
    if (name := path.name.removesuffix(".gz")) in _NAMES:
        return _NAMES[name]
    first = islice(json_lines(path, _RECORDS, kind_of_record, BadRecords(_LOOKED_AT)), _LOOKED_AT)
    return "corpus" if any(each == "corpus" for _, each in first) else kind


def _kind_of_first_lines(path: Path, max_bad_records: int) -> Kind:
    enough = min(max_bad_records, _LOOKED_AT) + 1
    kinds = json_lines(path, _RECORDS, kind_of_record, BadRecords(2 * (enough - 1)))
    return (
        _most_common(kind for _, kind in islice(kinds, enough)) or next(json_lines(path, _RECORDS, kind_of_record))[1]
    )
