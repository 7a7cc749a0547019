"""What every data format is read into: passages, queries, questions, judgements and training examples."""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple


class Passage(NamedTuple):
    """One passage of a corpus; ``title`` may be empty."""

    id: str
    title: str
    text: str

    @property
    def content(self) -> str:
        """What an encoder or BM25 sees: title and text joined by a space, stripped."""
        return f"{self.title} {self.text}".strip()


class Query(NamedTuple):
    """One query."""

    id: str
    text: str


class Question(NamedTuple):
    """A question with the strings that count as its answer (patterns, in CuratedTREC)."""

    text: str
    answers: list[str]


class Judgement(NamedTuple):
    """One line of a qrels file; ``line`` counts from 1."""

    query_id: str
    passage_id: str
    grade: int
    line: int


class Scores(NamedTuple):
    """What a teacher, or a search, gave an example's passages."""

    positives: Sequence[float]
    negatives: Sequence[float]


class Example(NamedTuple):
    """A query with its positives and hard negatives.

    ``further`` are negatives that nobody called hard (DPR's ``negative_ctxs``): they belong to the corpus, and they
    fill up a query that has too few hard negatives. ``scores`` is None where the data has none, or nobody asked for them.
    """

    query: Query
    positives: Sequence[Passage]
    negatives: Sequence[Passage]
    further: Sequence[Passage] = ()
    scores: Scores | None = None


def is_blank(text: str) -> bool:
    """Whether a text has nothing but white space."""
    return not text or text.isspace()


def content_id(title: str, text: str) -> str:
    """The id of a passage that came without one: 96 bits of a hash of its title and text, in hex."""
    digest = hashlib.blake2b(title.encode(), digest_size=12)
    digest.update(b"\n")
    digest.update(text.encode())
    return digest.hexdigest()
