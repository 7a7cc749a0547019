"""Runs: ranked passages for each query, and the TREC files that hold them.

The order is trec_eval's own: by score, highest first, and where scores are equal by id, greatest first (as UTF-8
bytes). So the list that a run holds is the list that the metrics see, and a run cut at k is the top of any longer
one.
"""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from contaccum.data.arrow import column_batches
from contaccum.data.bad_records import Place
from contaccum.data.lines import numbered_lines
from contaccum.errors import InputError
from contaccum.files import whole_file

if TYPE_CHECKING:
    from datasets import Dataset

Run = dict[str, list[tuple[str, float]]]
"""From query id to (passage id, score), best first."""

_COLUMNS = "six columns: query id, Q0, passage id, rank, score, tag"


def ranked(pairs: Iterable[tuple[str, float]], k: int | None = None) -> list[tuple[str, float]]:
    """(passage id, score) pairs in a run's order, cut at k."""
    # code points compare as UTF-8 bytes do, so plain string comparison is trec_eval's
    return sorted(pairs, key=lambda pair: (pair[1], pair[0]), reverse=True)[:k]


def write_run(path: str | Path, run: Run, tag: str = "contaccum") -> None:
    """Write a TREC run: ``query Q0 passage rank score tag`` a line, ranks from 1, scores with all their digits.

    Raises InputError when an id or the tag is empty or holds white space, which the format cannot carry; the file
    appears whole or not at all.
    """
    _refuse_white_space(tag, "tag", path)
    with whole_file(path) as file:
        for query_id, hits in run.items():
            _refuse_white_space(query_id, "query id", path)
            for rank, (passage_id, score) in enumerate(hits, 1):
                _refuse_white_space(passage_id, "passage id", path)
                file.write(f"{query_id} Q0 {passage_id} {rank} {float(score)!r} {tag}\n".encode())


def check_ids(path: str | Path, queries: Iterable[str], corpus: "Dataset") -> None:
    """Refuse ids that ``write_run`` would refuse, before anything is searched; of a corpus, all that it may find."""
    batches = (batch["id"] for batch in column_batches(corpus, ["id"]))
    for what, ids in [("query id", list(queries)), *(("passage id", ids) for ids in batches)]:
        if " ".join(ids).split() != ids:  # one by one it takes longer
            for key in ids:
                _refuse_white_space(key, what, path)


def _refuse_white_space(value: str, what: str, path: str | Path) -> None:
    if value.split() != [value]:
        raise InputError(
            f"{path}: {what} {value!r} is empty or holds white space, which separates the columns of a TREC run"
        )


def read_run(path: str | Path) -> Run:
    """Read a TREC run, plain or gzipped. As in trec_eval, the score decides the order and the rank column is not read.

    Raises InputError naming the line: wrong number of columns, a score that is no finite number, a passage listed
    twice.
    """
    path = Path(path)
    scores: dict[str, dict[str, float]] = {}
    for number, line in numbered_lines(path):
        place = Place(path, number)
        columns = line.split()
        if len(columns) != 6:
            raise place.error(f"{len(columns)} columns, expected {_COLUMNS}")
        query_id, _, passage_id, _, score, _ = columns
        hits = scores.setdefault(query_id, {})
        if passage_id in hits:
            raise place.error(f"passage {passage_id!r} comes a second time for query {query_id!r}, expected it once")
        hits[passage_id] = _score(score, place)
    if not scores:
        raise InputError(f"{path}: holds no line, expected a TREC run with {_COLUMNS}")
    return {query_id: ranked(hits.items()) for query_id, hits in scores.items()}


def _score(text: str, place: Place) -> float:
    try:
        score = float(text)
    except ValueError as error:
        raise place.error(f"score {text!r} is no number, expected a number") from error
    if not math.isfinite(score):
        raise place.error(f"score {text!r} is not finite, expected a finite number")
    return score
