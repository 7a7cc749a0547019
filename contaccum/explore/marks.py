"""What is to be seen of rankings: judged passages, the words shared with the query, and the queries that lost most."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from contaccum.errors import InputError
from contaccum.retrieval.bm25 import shared_words
from contaccum.retrieval.search import Hit

Grades = Mapping[str, int]
"""From passage id to grade; above 0 is relevant."""


class Loss(NamedTuple):
    """A query's metric under two rankings, or under one."""

    query_id: str
    left: float
    right: float | None
    """None where there is one ranking alone."""

    @property
    def difference(self) -> float:
        """What the left one has more; of one alone its value."""
        return self.left - (self.right or 0.0)


class JudgedPassage(NamedTuple):
    """A judged passage, and where each ranking has it."""

    id: str
    grade: int
    ranks: list[int | None]
    """From 1; None where it is not among the passages of that ranking."""


class Piece(NamedTuple):
    """A part of a text, all of whose letters are marked or not."""

    text: str
    marked: bool


def grades_of_text(text: str, queries: Mapping[str, str], qrels: Mapping[str, Grades]) -> dict[str, int]:
    """The grades of a judged query that reads like ``text``, white space and case aside; empty where there is none.

    Of several such queries a passage has its highest grade.
    """
    wanted, grades = _plain(text), dict[str, int]()
    for query_id, other in queries.items():
        if _plain(other) == wanted:
            for passage_id, grade in qrels[query_id].items():
                grades[passage_id] = max(grade, grades.get(passage_id, grade))
    return grades


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold()


def losses(
    left: Mapping[str, Mapping[str, float]], right: Mapping[str, Mapping[str, float]] | None, metric: str
) -> list[Loss]:
    """Every query's values, what the left ranking lost most first; with one ranking its own worst first.

    left, right: query id to metric to value, of the same queries. Equal ones stay in their order. Raises InputError for a metric
    that was not computed.
    """
    known = next(iter(left.values()), {metric: 0.0})
    if metric not in known:
        raise InputError(f"metric is {metric!r}, expected one of {', '.join(known)}")
    found = [Loss(query, own[metric], right[query][metric] if right else None) for query, own in left.items()]
    return sorted(found, key=lambda loss: loss.difference)


def judged_passages(grades: Grades, rankings: Sequence[Sequence[tuple[str, float]]]) -> list[JudgedPassage]:
    """The judged passages of a query, highest grade first and then by id, with their ranks in each ranking."""
    ranks = [{passage_id: rank for rank, (passage_id, _) in enumerate(ranking, 1)} for ranking in rankings]
    found = [JudgedPassage(key, grade, [each.get(key) for each in ranks]) for key, grade in grades.items()]
    return sorted(found, key=lambda passage: (-passage.grade, passage.id))


def relevant_among(grades: Grades, hits: Sequence[Hit]) -> tuple[int, int]:
    """How many relevant passages are among the hits, and how many there are."""
    relevant = {passage_id for passage_id, grade in grades.items() if grade > 0}
    return len(relevant & {hit.id for hit in hits}), len(relevant)


def pieces(query: str, text: str) -> list[Piece]:
    """A text cut where the words begin and end that BM25 would match with the query; joined they are the text."""
    found, end = [], 0
    for start, stop in shared_words(query, text):
        found += [Piece(text[end:start], False), Piece(text[start:stop], True)]
        end = stop
    return [piece for piece in (*found, Piece(text[end:], False)) if piece.text]
