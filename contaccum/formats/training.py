"""Training examples as JSON records: JSONL with query, pos and neg; Tevatron; DPR.

Each format is one class, whose fields are those of a record. A new format is one more class in
``FORMATS``, and one more choice of ``data convert --to`` in ``config/commands.py``.
"""

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import UNSET, Struct, UnsetType

from contaccum.config.commands import TrainingKind
from contaccum.formats.records import (
    Example,
    Passage,
    Query,
    TeacherScores,
    content_id,
    record_line,
)
from contaccum.runtime.units import counted

Id = str | int | UnsetType | None  # missing, null and "" are no id
Scores = list[Annotated[float, msgspec.Meta(ge=-3e38, le=3e38)]]  # they become float32


class PassageRecord(Struct):
    text: str
    title: str | UnsetType | None = UNSET
    docid: Id = UNSET  # in Tevatron
    passage_id: Id = UNSET  # in DPR
    psg_id: Id = UNSET  # in some files of DPR
    score: Any = UNSET  # of a teacher in Tevatron, of a search in DPR

    def passage(self) -> Passage:
        """Return the passage. If it has no id, its id is a hash of title and text."""
        title = self.title or ""
        for key in (self.docid, self.passage_id, self.psg_id):
            if key not in (UNSET, None, ""):
                return Passage(str(key), title, self.text)
        return Passage(content_id(title, self.text), title, self.text)


Passages = list[PassageRecord] | UnsetType | None


def make_example(
    query: str,
    key: Id,
    positives: list[PassageRecord],
    negatives: Passages,
    others: Passages = None,
    scored: bool = True,
) -> Example:
    """Return an example. It has teacher scores if ``scored`` and if all its passages have one.

    A query without an id gets the id ``unnamed-query-HASH``, with a hash of its text. The hash
    alone would not be safe, because it could also be the id of a passage. Evaluation skips a
    passage that has the same id as the query.
    """
    negatives = negatives or []
    scores = [record.score for record in (*positives, *negatives)]
    teacher = None
    if scored and not any(score in (UNSET, None) for score in scores):
        try:
            scores = msgspec.convert(scores, Scores)
        except msgspec.ValidationError as error:
            raise ValueError(f"field score of the passages: {error}") from error
        teacher = TeacherScores(scores[: len(positives)], scores[len(positives) :])
    if key in (UNSET, None, ""):
        key = f"unnamed-query-{content_id('', query)}"
    return Example(
        Query(str(key), query),
        [record.passage() for record in positives],
        [record.passage() for record in negatives],
        [record.passage() for record in others or []],
        teacher,
    )


class JsonlRecord(Struct):
    """Texts, and lists of their ids and of teacher scores (FlagEmbedding's names)."""

    description: ClassVar = "an object with query, pos and neg"
    field: ClassVar = "pos"  # no other format has it
    query: str
    pos: list[str] | str
    query_id: Id = UNSET
    pos_id: list[Id] | UnsetType | None = UNSET
    pos_scores: Scores | UnsetType | None = UNSET
    neg: list[str] | str | None = None
    neg_id: list[Id] | UnsetType | None = UNSET
    neg_scores: Scores | UnsetType | None = UNSET

    def example(self) -> Example:
        lists = []
        for name in ("pos", "neg"):
            texts = getattr(self, name) or []
            texts = [texts] if isinstance(texts, str) else texts
            columns = []
            for column in (f"{name}_id", f"{name}_scores"):
                values = getattr(self, column) or [UNSET] * len(texts)
                if len(values) != len(texts):
                    raise ValueError(
                        f"found {counted(len(values), 'value')} in {column!r} but "
                        f"{counted(len(texts), 'text')} in {name!r}; each text needs one"
                    )
                columns.append(values)
            lists.append(
                [
                    PassageRecord(text, docid=key, score=score)
                    for text, key, score in zip(texts, *columns, strict=True)
                ]
            )
        return make_example(self.query, self.query_id, lists[0], lists[1])

    @classmethod
    def of(cls, example: Example) -> "JsonlRecord":
        record = cls(
            example.query.text,
            [passage.content for passage in example.positives],
            example.query.id,
            [passage.id for passage in example.positives],
            neg=[passage.content for passage in example.negatives],
            neg_id=[passage.id for passage in example.negatives],
        )
        if example.scores is not None:
            record.pos_scores, record.neg_scores = map(list, example.scores)
        return record


def passage_records(example: Example, id_name: str) -> list[list[PassageRecord]]:
    """Return the positives, hard negatives and other negatives as records.

    id_name: field of the id.
    """
    positives, negatives, others = (
        [PassageRecord(text, title, **{id_name: key}) for key, title, text in passages]
        for passages in (example.positives, example.negatives, example.others)
    )
    if example.scores is not None:
        scores = (*example.scores.positives, *example.scores.negatives)
        for record, score in zip((*positives, *negatives), scores, strict=True):
            record.score = score
    return [positives, negatives, others]


class TevatronRecord(Struct):
    description: ClassVar = "an object with query, positive_passages and negative_passages"
    field: ClassVar = "positive_passages"
    query: str
    positive_passages: list[PassageRecord]
    negative_passages: Passages = None
    query_id: Id = UNSET

    def example(self) -> Example:
        lists = (self.positive_passages, self.negative_passages)
        return make_example(self.query, self.query_id, *lists)

    @classmethod
    def of(cls, example: Example) -> "TevatronRecord":
        positives, negatives, _ = passage_records(example, "docid")
        return cls(example.query.text, positives, negatives, example.query.id)


class DprRecord(Struct):
    description: ClassVar = (
        "a DPR record (an object with question, positive_ctxs and hard_negative_ctxs)"
    )
    field: ClassVar = "positive_ctxs"
    question: str
    positive_ctxs: list[PassageRecord]
    hard_negative_ctxs: Passages = None
    negative_ctxs: Passages = None
    query_id: Id = UNSET
    answers: Any = ()

    def example(self) -> Example:
        lists = (self.positive_ctxs, self.hard_negative_ctxs, self.negative_ctxs)
        return make_example(self.question, self.query_id, *lists, scored=False)

    @classmethod
    def of(cls, example: Example) -> "DprRecord":
        positives, negatives, others = passage_records(example, "passage_id")
        return cls(example.query.text, positives, negatives, others, example.query.id)


FORMATS: dict[TrainingKind, type[JsonlRecord] | type[TevatronRecord] | type[DprRecord]] = {
    "jsonl": JsonlRecord,
    "tevatron": TevatronRecord,
    "dpr": DprRecord,
}


def example_line(example: Example, kind: TrainingKind) -> bytes:
    """Return an example with its teacher scores as one line of JSON."""
    return record_line(FORMATS[kind].of(example))


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
