"""Training sets, from one data set or several: queries, the passages of the queries, and teacher scores."""

import hashlib
import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from datasets import Dataset, concatenate_datasets

from contaccum.data.examples import ExampleTable, FlatTeacherScores
from contaccum.data.tables import Ragged
from contaccum.errors import InputError


@dataclass(frozen=True)
class TrainSet:
    """Queries and passages for training.

    Lists ``positives[i]`` and ``negatives[i]`` have the positives and the hard negatives of query i, as row numbers in the table
    ``passages``.
    """

    queries: Dataset  # n rows, columns id and text
    passages: Dataset  # columns id, title, text
    positives: Ragged  # n lists, none empty
    negatives: Ragged  # n lists; all are empty if no hard negatives were requested
    fingerprint: str  # hash of all content (not of paths), in hexadecimal
    teacher: FlatTeacherScores | None = None  # None: scores were not requested, or the data has none

    @property
    def members(self) -> "tuple[Member, ...]":
        """The sets of a mixture, in the order of their rows. A set that is not a mixture has one member: itself."""
        return (Member(self),)

    def texts(self) -> list[str]:
        """Return the texts of all queries, and the titles and texts of all passages, to learn a vocabulary from."""
        return [*self.queries["text"][:], *self.passages["title"][:], *self.passages["text"][:]]

    def scores(self) -> FlatTeacherScores:
        """Return the teacher scores. If the set has no teacher scores, all values are NaN."""
        lists = self.positives, self.negatives
        return self.teacher or FlatTeacherScores(
            *(np.full(len(part.values), np.nan, dtype=np.float32) for part in lists)
        )


class Member(NamedTuple):
    """One training set of a mixture."""

    set: TrainSet
    weight: float = 1.0
    query_prefix: str | None = None  # None: the model's prefix is used
    passage_prefix: str | None = None
    in_batch_negatives: bool = True  # False: each query is compared only with its own passages


@dataclass(frozen=True)
class Mixture(TrainSet):
    """Training set that is the concatenation of several training sets."""

    parts: tuple[Member, ...] = ()

    @property
    def members(self) -> tuple[Member, ...]:
        return self.parts


def check_scores(names: Sequence[str], sets: Sequence[TrainSet]) -> None:
    """Raise InputError if no set has teacher scores. Warn about each set in which some queries have none."""
    scored = [_has_scores(each) for each in sets]
    if not any(found.any() for found in scored):
        raise no_scores(", ".join(names))
    for name, found in zip(names, scored, strict=True):
        if without := int((~found).sum()):
            warnings.warn(
                f"{name}: distillation needs the teacher scores of a positive and a negative, but {without} of {len(found)} "
                "queries lack them. For these queries, the loss is InfoNCE only.",
                stacklevel=3,
            )


def check_hard_negatives(name: str, examples: TrainSet) -> None:
    """Check a set without in-batch negatives: warn if some queries have no hard negative, raise InputError if all have none."""
    without, count = int(np.count_nonzero(examples.negatives.lengths == 0)), len(examples.queries)
    found = f"{name}: {without} of {count} queries have no hard negative, and in_batch_negatives is false"
    if without == count:
        raise InputError(f"{found}, so they have no negatives. Set in_batch_negatives to true, or mine negatives.")
    if without:
        warnings.warn(f"{found}, so they have no negatives and their loss is 0", stacklevel=3)


def no_scores(names: str, where: str = "") -> InputError:
    """Return the InputError for data without teacher scores. where: words to add to the message, with a leading space."""
    return InputError(
        f"{names}: no teacher scores found{where}; loss.distillation needs them. In JSONL with query, pos and neg, add "
        "pos_scores and neg_scores. In Tevatron JSONL, add a score to each passage."
    )


def _has_scores(examples: TrainSet) -> np.ndarray:
    """Return for each query whether at least one positive and one hard negative have teacher scores, (n,) bool."""
    scores = examples.scores()
    found = np.ones(len(examples.queries), dtype=bool)
    for values, lists in ((scores.positives, examples.positives), (scores.negatives, examples.negatives)):
        known = np.concatenate([[0], np.cumsum(~np.isnan(values))])
        found &= known[lists.offsets[1:]] > known[lists.offsets[:-1]]
    return found


def mixture_of(members: Sequence[Member]) -> Mixture:
    """Concatenate sets. A passage of two sets is stored twice, because the sets can have different prefixes."""
    sets = [member.set for member in members]
    sizes = [len(each.passages) for each in sets]
    positives = Ragged.concatenated([each.positives for each in sets], sizes)
    negatives = Ragged.concatenated([each.negatives for each in sets], sizes)
    queries, passages = (
        concatenate_datasets([getattr(each, name) for each in sets]) for name in ("queries", "passages")
    )
    digest = hashlib.blake2b(" ".join(each.fingerprint for each in sets).encode(), digest_size=16).hexdigest()
    teacher = None
    if any(each.teacher is not None for each in sets):
        teacher = FlatTeacherScores(
            *(np.concatenate(parts) for parts in zip(*(each.scores() for each in sets), strict=True))
        )
    return Mixture(queries, passages, positives, negatives, digest, teacher, tuple(members))


def from_examples(examples: ExampleTable, hard_negatives: int) -> TrainSet:
    """Make a training set of the examples that have a positive.

    If a query has fewer than ``hard_negatives`` hard negatives, its other negatives (``others``) fill the gap, in file order. If
    ``hard_negatives`` is 0, the training set has no negatives.
    """
    kept = np.flatnonzero(examples.positives.lengths)
    negatives: list[list[int]] = [[] for _ in kept]
    sources = [np.empty(0, dtype=np.int64)]  # index in ``examples.negatives.values``; -1: from ``examples.others``
    if hard_negatives:
        for number, hard in zip(kept, negatives, strict=True):
            hard += examples.negatives.row(number).tolist()
            others = examples.others.row(number)[: max(0, hard_negatives - len(hard))].tolist()
            sources += [np.arange(*examples.negatives.offsets[number : number + 2]), np.full(len(others), -1)]
            hard += others
    teacher = None
    if examples.teacher is not None:
        indices = np.concatenate(sources)
        given = np.append(examples.teacher.negatives, np.float32(np.nan))[indices]
        teacher = FlatTeacherScores(np.array(examples.teacher.positives), given)  # skipped queries have no positives
    lists = examples.positives.take(kept)[0], Ragged.of(negatives)
    return _train_set(examples, kept, lists, teacher)


def _train_set(
    source: ExampleTable | TrainSet, rows: np.ndarray, lists: tuple[Ragged, Ragged], teacher: FlatTeacherScores | None
) -> TrainSet:
    """Make a training set from the rows ``rows`` of the queries in ``source``.

    ``lists`` are the positives and the negatives of these queries, as row numbers of passages in ``source``. Passages that are in
    no list are dropped, so the row numbers change. The fingerprint is computed from the new content.
    """
    queries = source.queries.select(rows)
    used = np.unique(np.concatenate([ragged.values for ragged in lists]))
    positives, negatives = (ragged.renumbered(used) for ragged in lists)
    content = json.dumps([source.fingerprint, queries["id"][:], queries["text"][:]])
    digest = hashlib.blake2b(content.encode(), digest_size=16)
    arrays = positives.offsets, positives.values, negatives.offsets, negatives.values
    for numbers in (used, *arrays, *(teacher or ())):
        digest.update(np.array(len(numbers)).tobytes())
        digest.update(numbers.tobytes())
    return TrainSet(queries, source.passages.select(used), positives, negatives, digest.hexdigest(), teacher)


def subset(train_set: TrainSet, queries: np.ndarray) -> TrainSet:
    """Make a training set of the queries at the rows ``queries``, in this order, and of their passages."""
    (positives, of_positives), (negatives, of_negatives) = (
        ragged.take(queries) for ragged in (train_set.positives, train_set.negatives)
    )
    teacher = train_set.teacher
    if teacher is not None:
        teacher = FlatTeacherScores(teacher.positives[of_positives], teacher.negatives[of_negatives])
    return _train_set(train_set, queries, (positives, negatives), teacher)
