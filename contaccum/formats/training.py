"""Training examples as JSON records: JSONL with query, pos and neg; Tevatron; DPR.

``FORMATS`` describes each format. A new format is one more entry, with a function that reads a
record and one that writes it, and one more choice of ``data convert --to`` in
``config/commands.py``.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from contaccum.formats.json_records import (
    Read,
    Record,
    id_field,
    kind_of,
    list_field,
    record_of,
    string_field,
    title_field,
)
from contaccum.formats.records import (
    Example,
    Passage,
    Query,
    SourceLocation,
    TeacherScores,
    content_id,
)

TrainingKind = Literal["dpr", "jsonl", "tevatron"]
Form = Literal["beir", TrainingKind]
MAX_SCORE = 3e38  # maximum absolute value of a teacher score, because scores become float32


class TrainingFormat(NamedTuple):
    """One format of training examples."""

    description: str  # of a record, for error messages
    field: str  # field that only records of this format have
    read: Callable[[Record, SourceLocation, int, bool], Example]
    """Convert a record. Arguments: record, location, number of the record, whether to read
    scores.
    """
    write: Callable[[Example], Record]


def reader_of(kind: TrainingKind, scores: bool = False) -> Read[Example]:
    """Return the function that converts a record of a format. scores: also read teacher scores."""

    def read(record: Record, location: SourceLocation, number: int) -> Example:
        return FORMATS[kind].read(record, location, number, scores)

    return read


def example_record(example: Example, kind: TrainingKind) -> Record:
    """Convert an example and its teacher scores to a JSON object."""
    return FORMATS[kind].write(example)


def known_fields(record: Record) -> Record:
    """Copy a record and its passages; keep only the fields that a reader of some format uses."""
    found = {name: record[name] for name in record if name in _RECORD_FIELDS}
    for name, value in found.items():
        if isinstance(value, list):
            found[name] = [
                _known_passage(part) if isinstance(part, dict) else part for part in value
            ]
    return found


def _known_passage(passage: Record) -> Record:
    return {name: value for name, value in passage.items() if name in _PASSAGE_FIELDS}


_PASSAGE_FIELDS = frozenset({"_id", "docid", "passage_id", "psg_id", "title", "text", "score"})
_RECORD_FIELDS = _PASSAGE_FIELDS | {
    "query_id", "query", "question", "pos", "pos_id", "pos_scores", "neg", "neg_id", "neg_scores",
    "positive_passages", "negative_passages", "positive_ctxs", "hard_negative_ctxs",
    "negative_ctxs",
}  # fmt: skip


def _query(record: Record, field: str, location: SourceLocation, number: int) -> Query:
    """Read the query. A query without an id gets the id ``unnamed-query-NUMBER``.

    A number alone would not be safe, because it could also be the id of a passage. Evaluation skips
    a passage that has the same id as the query.
    """
    text = string_field(record, field, location)
    if record.get("query_id") in (None, ""):
        return Query(f"unnamed-query-{number}", text)
    return Query(id_field(record, "query_id", location), text)


def _passage(record: Record, location: SourceLocation, id_name: str) -> Passage:
    """Read a passage. If it has no id, its id is a hash of title and text."""
    title = title_field(record, location)
    text = string_field(record, "text", location)
    if record.get(id_name) in (None, ""):
        return Passage(content_id(title, text), title, text)
    return Passage(id_field(record, id_name, location), title, text)


def _scored(
    example: Example,
    positives: Sequence[float | None],
    negatives: Sequence[float | None],
    location: SourceLocation,
) -> Example:
    """Add teacher scores. Raise InputError if only some of the positives and negatives have one."""
    scored = [sum(score is not None for score in scores) for scores in (positives, negatives)]
    passages = [len(example.positives), len(example.negatives)]
    if scored == [0, 0]:
        return example
    if scored != passages:
        raise location.error(
            f"found scores for {scored[0]} of {passages[0]} positives and {scored[1]} of "
            f"{passages[1]} negatives; give every passage one score, or give none"
        )
    return example._replace(scores=TeacherScores(positives, negatives))  # type: ignore[arg-type]


def _score(value: Any, location: SourceLocation) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and abs(value) <= MAX_SCORE:  # false for NaN
        return value
    raise location.error(f"found {kind_of(value)}; a score must be a finite number")


# JSONL with query, pos and neg


def _read_jsonl(record: Record, location: SourceLocation, number: int, scores: bool) -> Example:
    query = _query(record, "query", location, number)
    example = Example(query, _texts(record, "pos", location), _texts(record, "neg", location))
    if not scores:
        return example
    positives = list_field(record, "pos_scores", location, _score)
    negatives = list_field(record, "neg_scores", location, _score)
    return _scored(example, positives, negatives, location)


def _texts(record: Record, name: str, location: SourceLocation) -> list[Passage]:
    """Read the field ``pos`` or ``neg``: a list of strings, or one string.

    The ids of the passages are in ``pos_id`` or ``neg_id``. The id of a passage without an id is a
    hash of its text.
    """
    if isinstance(record.get(name), str):
        record = {**record, name: [record[name]]}
    texts = list_field(record, name, location, _string, required=name == "pos")
    ids = list_field(record, f"{name}_id", location, _id)
    if not ids:
        ids = [""] * len(texts)
    if len(ids) != len(texts):
        raise location.error(
            f"found {len(ids)} ids in '{name}_id' but {len(texts)} texts in {name!r}; each text "
            "needs one id"
        )
    return [
        Passage(key or content_id("", text), "", text) for key, text in zip(ids, texts, strict=True)
    ]


def _string(value: Any, location: SourceLocation) -> str:
    if isinstance(value, str):
        return value
    raise location.error(f"found {kind_of(value)}; it must be a string")


def _id(value: Any, location: SourceLocation) -> str:
    return "" if value in (None, "") else id_field({"id": value}, "id", location)


def _write_jsonl(example: Example) -> Record:
    record: Record = {"query_id": example.query.id, "query": example.query.text}
    record["pos"] = [passage.content for passage in example.positives]
    record["pos_id"] = [passage.id for passage in example.positives]
    record["neg"] = [passage.content for passage in example.negatives]
    record["neg_id"] = [passage.id for passage in example.negatives]
    if example.scores is not None:
        record["pos_scores"] = list(example.scores.positives)
        record["neg_scores"] = list(example.scores.negatives)
    return record


# Tevatron


def _read_tevatron(record: Record, location: SourceLocation, number: int, scores: bool) -> Example:
    query = _query(record, "query", location, number)
    positives = list_field(record, "positive_passages", location, _document, required=True)
    negatives = list_field(record, "negative_passages", location, _document)
    example = Example(query, positives, negatives)
    if not scores:
        return example
    return _scored(
        example,
        list_field(record, "positive_passages", location, _document_score),
        list_field(record, "negative_passages", location, _document_score),
        location,
    )


def _document(value: Any, location: SourceLocation) -> Passage:
    record = record_of(value, location, "a passage (an object with docid, title and text)")
    return _passage(record, location, "docid")


def _document_score(passage: Any, location: SourceLocation) -> float | None:
    return None if passage.get("score") is None else _score(passage["score"], location)


def _write_tevatron(example: Example) -> Record:
    positives = [_tevatron_passage(passage) for passage in example.positives]
    negatives = [_tevatron_passage(passage) for passage in example.negatives]
    _write_scores(positives, negatives, example.scores)
    return {
        "query_id": example.query.id,
        "query": example.query.text,
        "positive_passages": positives,
        "negative_passages": negatives,
    }


def _tevatron_passage(passage: Passage) -> Record:
    return {"docid": passage.id, "title": passage.title, "text": passage.text}


def _write_scores(
    positives: list[Record], negatives: list[Record], scores: TeacherScores | None
) -> None:
    if scores is None:
        return
    for passage, score in zip(positives, scores.positives, strict=True):
        passage["score"] = score
    for passage, score in zip(negatives, scores.negatives, strict=True):
        passage["score"] = score


# DPR. The score of a passage is a search score, so it is no teacher score.


def _read_dpr(record: Record, location: SourceLocation, number: int, scores: bool) -> Example:
    return Example(
        _query(record, "question", location, number),
        positives=list_field(record, "positive_ctxs", location, _context, required=True),
        negatives=list_field(record, "hard_negative_ctxs", location, _context),
        others=list_field(record, "negative_ctxs", location, _context),
    )


def _context(value: Any, location: SourceLocation) -> Passage:
    record = record_of(
        value, location, "a context (an object with title, text and optionally passage_id)"
    )
    has_passage_id = record.get("passage_id") not in (None, "")
    return _passage(record, location, "passage_id" if has_passage_id else "psg_id")


def _write_dpr(example: Example) -> Record:
    positives = [_dpr_passage(passage) for passage in example.positives]
    negatives = [_dpr_passage(passage) for passage in example.negatives]
    _write_scores(positives, negatives, example.scores)
    return {
        "query_id": example.query.id,
        "question": example.query.text,
        "answers": [],
        "positive_ctxs": positives,
        "negative_ctxs": [_dpr_passage(passage) for passage in example.others],
        "hard_negative_ctxs": negatives,
    }


def _dpr_passage(passage: Passage) -> Record:
    return {"title": passage.title, "text": passage.text, "passage_id": passage.id}


FORMATS: dict[TrainingKind, TrainingFormat] = {
    "dpr": TrainingFormat(
        "a DPR record (an object with question, positive_ctxs and hard_negative_ctxs)",
        "positive_ctxs",
        _read_dpr,
        _write_dpr,
    ),
    "tevatron": TrainingFormat(
        "an object with query_id, query, positive_passages and negative_passages",
        "positive_passages",
        _read_tevatron,
        _write_tevatron,
    ),
    "jsonl": TrainingFormat("an object with query, pos and neg", "pos", _read_jsonl, _write_jsonl),
}


def framed(lines: Iterable[bytes], kind: TrainingKind) -> Iterator[bytes]:
    """Yield the lines of a file. ``lines`` are the records as JSON.

    For DPR, brackets and commas are added, because a DPR file is one JSON list.
    """
    if kind != "dpr":
        yield from lines
        return
    separator = b"[\n"
    for line in lines:
        yield separator + line
        separator = b","
    yield b"]\n" if separator == b"," else b"[]\n"
