"""Convert training examples from and to JSON records: DPR, JSONL with query, pos and neg, and Tevatron."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

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
from contaccum.formats.records import Example, Passage, Query, SourceLocation, TeacherScores, content_id

TrainingKind = Literal["dpr", "jsonl", "tevatron"]
Form = Literal["beir", TrainingKind]
RECORDS: dict[TrainingKind, str] = {
    "jsonl": "an object with query, pos and neg",
    "tevatron": "an object with query_id, query, positive_passages and negative_passages",
    "dpr": "a DPR record (an object with question, positive_ctxs and hard_negative_ctxs)",
}
"""Description of a record of each format, for error messages."""
MAX_SCORE = 3e38  # maximum absolute value of a teacher score, because scores become float32


def reader_of(kind: TrainingKind, scores: bool = False) -> Read[Example]:
    """Return the function that converts a record of the format ``kind``. scores: whether teacher scores are read too."""
    return partial(_example, kind, scores and kind in _SCORES)


def _example(kind: TrainingKind, scored: bool, record: Record, location: SourceLocation, number: int) -> Example:
    """Convert a record to an example. A query without an id gets the id ``unnamed-query-NUMBER``.

    A number alone would not be safe, because it could also be the id of a passage. Evaluation skips a passage that has the
    same id as the query.
    """
    unnamed = record.get("query_id") is None
    key = f"unnamed-query-{number}" if unnamed else id_field(record, "query_id", location)
    query = Query(key, string_field(record, "question" if kind == "dpr" else "query", location))
    positives, negatives, *others = _passages(kind, record, location)
    example = Example(query, positives, negatives, others[0] if others else ())
    return _with_scores(example, kind, record, location) if scored else example


def _passages(kind: TrainingKind, record: Record, location: SourceLocation) -> Iterator[Sequence[Passage]]:
    """Yield the list of positives, the list of hard negatives and, only for DPR, the list ``negative_ctxs``."""
    if kind == "jsonl":
        yield from (_texts(record, name, location) for name in ("pos", "neg"))
    elif kind == "tevatron":
        yield list_field(record, "positive_passages", location, _document, required=True)
        yield list_field(record, "negative_passages", location, _document)
    else:
        yield list_field(record, "positive_ctxs", location, _context, required=True)
        yield from (list_field(record, name, location, _context) for name in ("hard_negative_ctxs", "negative_ctxs"))


def _texts(record: Record, name: str, location: SourceLocation) -> list[Passage]:
    """Convert the field ``pos`` or ``neg`` to passages. The field is a list of strings or one string.

    The ids of the passages are in ``pos_id`` or ``neg_id``. If this field is missing, the id of a passage is a hash of its text.
    """
    if isinstance(record.get(name), str):
        record = {**record, name: [record[name]]}
    texts = list_field(record, name, location, _string, required=name == "pos")
    ids = list_field(record, f"{name}_id", location, _id) or [content_id("", text) for text in texts]
    if len(ids) != len(texts):
        raise location.error(
            f"found {len(ids)} ids in '{name}_id' but {len(texts)} texts in {name!r}; each text needs one id"
        )
    return [Passage(key, "", text) for key, text in zip(ids, texts, strict=True)]


def _string(value: Any, location: SourceLocation) -> str:
    if isinstance(value, str):
        return value
    raise location.error(f"found {kind_of(value)}; it must be a string")


def _id(value: Any, location: SourceLocation) -> str:
    return id_field({"id": value}, "id", location)


def _document(value: Any, location: SourceLocation) -> Passage:
    return _passage(record_of(value, location, "a passage (an object with docid, title and text)"), location, "docid")


def _context(value: Any, location: SourceLocation) -> Passage:
    record = record_of(value, location, "a context (an object with title, text and optionally passage_id)")
    return _passage(record, location, "passage_id" if record.get("passage_id") is not None else "psg_id")


def _passage(record: Record, location: SourceLocation, id_name: str) -> Passage:
    """Convert a JSON object to a passage. If the id is missing, it is a hash of the title and the text."""
    title, text = title_field(record, location), string_field(record, "text", location)
    key = content_id(title, text) if record.get(id_name) is None else id_field(record, id_name, location)
    return Passage(key, title, text)


def _with_scores(example: Example, kind: TrainingKind, record: Record, location: SourceLocation) -> Example:
    """Add the teacher scores to an example. Raise InputError if only some of its positives and negatives have a score."""
    names, read_score = _SCORES[kind]
    scores = [list_field(record, name, location, read_score) for name in names]
    given = [sum(score is not None for score in part) for part in scores]
    passages = [len(example.positives), len(example.negatives)]
    if not any(given):
        return example
    if given != passages:
        raise location.error(
            f"found scores for {given[0]} of {passages[0]} positives and {given[1]} of {passages[1]} negatives; give every "
            "passage one score, or give none"
        )
    return example._replace(scores=TeacherScores(*scores))


def _score(value: Any, location: SourceLocation) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_SCORE:
        return value
    raise location.error(f"found {kind_of(value)}; a score must be a finite number")


def _passage_score(passage: Any, location: SourceLocation) -> float | None:
    return None if passage.get("score") is None else _score(passage["score"], location)


_SCORES: dict[TrainingKind, tuple[tuple[str, str], Callable[[Any, SourceLocation], Any]]] = {
    "jsonl": (("pos_scores", "neg_scores"), _score),
    "tevatron": (("positive_passages", "negative_passages"), _passage_score),
}
"""Format -> the fields with the scores of positives and of negatives, and the function that reads a score.

DPR is missing, because the ``score`` of a DPR record is a search score.
"""


_LISTS: dict[Form, dict[str, str]] = {
    "dpr": {"positive_ctxs": "positives", "negative_ctxs": "others", "hard_negative_ctxs": "negatives"},
    "tevatron": {"positive_passages": "positives", "negative_passages": "negatives"},
    "jsonl": {"pos": "positives", "neg": "negatives"},
}
"""For each format: name of a field of the file -> attribute of Example that has the passages of this field."""


def example_record(example: Example, to: Form) -> dict[str, Any]:
    """Convert an example and its teacher scores to a JSON object in the format ``to``: DPR, JSONL or Tevatron."""
    key, text = example.query
    record: dict[str, Any] = {"query_id": key, "question" if to == "dpr" else "query": text}
    record |= {"answers": []} if to == "dpr" else {}
    given: dict[str, Any] = {}
    for name, part in _LISTS[to].items():
        passages, scores = getattr(example, part), getattr(example.scores, part, None)
        if to == "jsonl":
            record |= {
                name: [passage.content for passage in passages],
                f"{name}_id": [passage.id for passage in passages],
            }
            given |= {} if scores is None else {f"{name}_scores": list(scores)}
            continue
        dpr = [{"title": title, "text": text, "passage_id": key} for key, title, text in passages]
        record[name] = (
            dpr if to == "dpr" else [{"docid": key, "title": title, "text": text} for key, title, text in passages]
        )
        for passage, score in zip(record[name], scores or (), strict=scores is not None):
            passage["score"] = score
    return record | given


def framed(lines: Iterable[bytes], to: Form) -> Iterator[bytes]:
    """Yield the lines of a file in the format ``to``. ``lines`` are the records as JSON.

    For DPR, brackets and commas are added, because a DPR file is one JSON list.
    """
    start = b"[\n" if to == "dpr" else b""
    for line in lines:
        yield start + line
        start = start and b","
    if start:
        yield b"]\n" if start == b"," else b"[]\n"
