"""Make, write, read and print runs.

A run contains the ranked passages of each query, sorted by score, highest first.

A search returns passages with equal scores in the order of the corpus. trec_eval sorts such
passages by id, so ``read_run`` does it too.
"""

import math
import re
import warnings
from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
from datasets import Dataset

from contaccum.data.corpus import find_rows
from contaccum.errors import InputError
from contaccum.formats.readers import refuse_json
from contaccum.formats.records import numbered_lines, whole_records
from contaccum.runtime.units import counted

Run = dict[str, list[tuple[str, float]]]
"""Query id -> list of (passage id, score), best first."""

_COLUMNS = "six columns: query id, Q0, passage id, rank, score, tag"


class Ranking(NamedTuple):
    """Best passages of a query, best first."""

    rows: np.ndarray
    """Row numbers of m passages in the corpus, (m,) int64."""
    scores: np.ndarray  # (m,) float32
    positive_scores: np.ndarray  # of the query's P positives, (P,) float32


def make_run(query_ids: Iterable[str], rankings: Iterable[Ranking], corpus: Dataset) -> Run:
    """Make a run from the rankings of the queries, with the ids of the corpus."""
    rankings = list(rankings)
    found = sorted({row for ranking in rankings for row in ranking.rows.tolist()})
    passage_ids = corpus.select_columns(["id"])[found]["id"] if found else []
    id_of = dict(zip(found, passage_ids, strict=True))
    run: Run = {}
    for query_id, ranking in zip(query_ids, rankings, strict=True):
        hits = zip(ranking.rows.tolist(), ranking.scores.tolist(), strict=True)
        run[query_id] = [(id_of[row], score) for row, score in hits]
    return run


def ranked(pairs: Iterable[tuple[str, float]]) -> list[tuple[str, float]]:
    """Sort (passage id, score) pairs as trec_eval does.

    Highest scores first, and equal scores by id, greatest first.
    """
    # Python compares strings by code point, which gives the same order as trec_eval's comparison of
    # UTF-8 bytes
    return sorted(pairs, key=lambda pair: (pair[1], pair[0]), reverse=True)


def write_run(path: str | Path, run: Run) -> None:
    """Write a TREC run file. Ranks start at 1, and scores are not rounded.

    The file appears only when it is complete. Raises InputError for ids that the format does not
    allow, see ``require_run_ids``.
    """
    passage_ids = (passage_id for hits in run.values() for passage_id, _ in hits)
    require_run_ids(path, chain(run, passage_ids))
    with whole_records(path) as file:
        for query_id, hits in run.items():
            for rank, (passage_id, score) in enumerate(hits, 1):
                file.write(
                    f"{query_id} Q0 {passage_id} {rank} {float(score)!r} contaccum\n".encode()
                )


def require_run_ids(path: str | Path, ids: Iterable[str]) -> None:
    """Raise InputError if an id is empty or contains white space.

    A TREC run file does not allow this.
    """
    for key in ids:
        if key.split() != [key]:
            raise InputError(
                f"{path}: id {key!r} is empty or contains white space, which a TREC run file does "
                "not allow"
            )


def read_run(path: str | Path) -> Run:
    """Read a TREC run file, plain or gzipped.

    The passages are sorted by score, not by rank, as in trec_eval. A warning says if the scores
    rise with the ranks.

    Raises InputError with the line number if the number of columns is wrong, if a score is not
    finite, or if a query has the same passage twice.
    """
    path = Path(path)
    scores: dict[str, dict[str, float]] = {}
    before = ("", 0, 0.0)  # query id, rank and score of the line before
    rising = falling = 0  # number of pairs of lines whose scores rise or fall with the rank
    for location, line in numbered_lines(path):
        columns = line.split()
        if len(columns) != 6:
            refuse_json(path, f"a TREC run with {_COLUMNS}")
            raise location.error(f"found {counted(len(columns), 'column')}; expected {_COLUMNS}")
        query_id, _, passage_id, rank, score, _ = columns
        hits = scores.setdefault(query_id, {})
        if passage_id in hits:
            raise location.error(
                f"passage {passage_id!r} is listed twice for query {query_id!r}; expected it once"
            )
        try:
            hits[passage_id] = float(score)
        except ValueError:
            hits[passage_id] = math.nan
        if not math.isfinite(hits[passage_id]):
            raise location.error(f"score is {score!r}; expected a finite number")
        place = int(rank) if rank.isdecimal() else 0  # trec_eval does not read it
        if before[0] == query_id and before[1] < place:
            rising += hits[passage_id] > before[2]
            falling += hits[passage_id] < before[2]
        before = (query_id, place, hits[passage_id])
    if rising > falling:
        warnings.warn(
            f"{path}: most scores rise with the ranks, so the last ranks count as the best, as in "
            "trec_eval; expected higher scores for better passages",
            stacklevel=2,
        )
    if not scores:
        raise InputError(f"{path}: is empty; expected a TREC run with {_COLUMNS}")
    return {query_id: ranked(hits.items()) for query_id, hits in scores.items()}


class RankedPassage(NamedTuple):
    """Passage found for a query, with its score, title and text."""

    id: str
    score: float
    title: str
    text: str


def read_passages(corpus: Dataset, ranking: Sequence[tuple[str, float]]) -> list[RankedPassage]:
    """Return the passages of a ranking in its order, with title and text."""
    rows = find_rows(corpus, {passage_id for passage_id, _ in ranking})
    read = corpus[[rows[passage_id] for passage_id, _ in ranking]]
    texts = zip(ranking, read["title"], read["text"], strict=True)
    return [RankedPassage(*hit, title, text) for hit, title, text in texts]


def render_passages(
    passages: Sequence[RankedPassage], words: Collection[str] = (), mark: bool = False
) -> str:
    """Format each passage as two lines: rank, score, id and title; then the best part of its text.

    Control characters become spaces. words: words of the query. mark: whether to print them bold.
    """
    # a word does not match inside a longer one, but Chinese or Thai text has no spaces
    choices = "|".join(
        rf"\b{re.escape(word)}\b" if word.isascii() else re.escape(word) for word in words
    )
    pattern = re.compile(choices or r"(?!)", re.IGNORECASE)
    lines = []
    for rank, passage in enumerate(passages, start=1):
        lines.append(f"{rank:3d}   {passage.score:7.4f}  {passage.id}  {passage.title}".rstrip())
        lines.append(f"      {best_part(passage.text, pattern)}")
    lines = ["".join(letter if letter.isprintable() else " " for letter in line) for line in lines]
    if mark:
        lines = [pattern.sub(lambda word: f"\x1b[1m{word[0]}\x1b[0m", line) for line in lines]
    return "\n".join(lines)


def best_part(text: str, words: re.Pattern[str]) -> str:
    """Return the part of a text with the most different words of the query.

    The part has at most 200 characters, without the "…" that shows what is missing. The first such
    part is taken.
    """
    length = 200
    if len(text) <= length:
        return text
    starts = [0]
    for match in words.finditer(text):  # with some words before the word of the query
        starts.append(text.rfind(" ", 0, max(0, match.start() - length // 5)) + 1)
    parts = [text[start : start + length] for start in starts]
    # max returns the first of several parts
    best = max(range(len(parts)), key=lambda n: len(set(words.findall(parts[n].lower()))))
    part = parts[best]
    if starts[best] + length < len(text):
        part = (part.rpartition(" ")[0] or part) + " …"
    return ("… " if starts[best] else "") + part
