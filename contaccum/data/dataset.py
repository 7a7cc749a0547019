"""What training trains on: one data set or several, as queries, passages and lists of their numbers."""

import hashlib
import json
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from datasets import Dataset, concatenate_datasets

from contaccum.config import DataConfig
from contaccum.data.arrow import Ragged
from contaccum.data.examples import ExampleTable, Teacher, load_examples
from contaccum.data.formats import kind_of_data
from contaccum.data.sources import resolve
from contaccum.data.tables import JudgedSplit, answerable_split
from contaccum.errors import InputError


@dataclass(frozen=True)
class TrainSet:
    """n queries and the passages that training can meet; the numbers in the lists are rows of ``passages``."""

    queries: Dataset  # n rows, columns id and text
    passages: Dataset  # columns id, title, text
    positives: Ragged  # n lists, none empty
    negatives: Ragged  # n lists of hard negatives; all empty where none were asked for
    fingerprint: str  # of everything here, in hex; the same wherever the files lie
    teacher: Teacher | None = (
        None  # scores of positives and of negatives; None where none were asked for, or there are none
    )

    @property
    def members(self) -> "tuple[Member, ...]":
        """The sets that it consists of, in the order of its rows."""
        return (Member(self),)

    def texts(self) -> list[str]:
        """All queries, titles and texts, from which a vocabulary can be learned."""
        return [*self.queries["text"], *self.passages["title"], *self.passages["text"]]

    def scores(self) -> Teacher:
        """The teacher's scores, all NaN where there are none."""
        lists = self.positives, self.negatives
        return self.teacher or Teacher(*(np.full(len(part.values), np.nan, dtype=np.float32) for part in lists))


class Member(NamedTuple):
    """One set of a mixture."""

    set: TrainSet
    weight: float = 1.0
    query_prefix: str | None = None  # None: the model's
    passage_prefix: str | None = None


@dataclass(frozen=True)
class Mixture(TrainSet):
    """Several sets as one: their queries and passages one behind the other, none merged."""

    parts: tuple[Member, ...] = ()

    @property
    def members(self) -> tuple[Member, ...]:
        return self.parts


def load_training(data: DataConfig, scores: bool = False) -> TrainSet:
    """What a config says to train on: one data set, or a mixture; with ``scores``, those of a teacher too.

    Raises InputError as ``load_train_set``, where scores are asked for and no set has any, and for data that is to be streamed.
    """
    if data.streaming:
        raise InputError("data.streaming is true, expected false: only training reads its data as a stream")
    how = data.hard_negatives, data.strict, data.repair, data.max_bad_records, scores
    named = [(each.train, each.split) for each in data.mixture] or [(data.train, data.split)]
    sets = [load_train_set(path, split, *how) for path, split in named]
    if scores:
        _check_scores([name for name, _ in named], sets)
    if not data.mixture:
        return sets[0]
    only = data.mixture[0]
    if len(sets) == 1 and only.query_prefix is None and only.passage_prefix is None:
        return sets[0]
    return mixture_of(
        [
            Member(loaded, each.weight or len(loaded.queries), each.query_prefix, each.passage_prefix)
            for loaded, each in zip(sets, data.mixture, strict=True)
        ]
    )


def _check_scores(names: Sequence[str], sets: Sequence[TrainSet]) -> None:
    """InputError where no query has scores to compare; a warning for each set of which some have none."""
    compared = [_compared(each) for each in sets]
    if not any(found.any() for found in compared):
        raise no_scores(", ".join(names))
    for name, found in zip(names, compared, strict=True):
        if without := int((~found).sum()):
            warnings.warn(
                f"{name}: {without} of {len(found)} queries have no scores of a teacher for a positive and a negative; they "
                "learn by InfoNCE alone",
                stacklevel=3,
            )


def no_scores(names: str, where: str = "") -> InputError:
    """What is said where distillation finds no scores; ``where`` begins with a space."""
    return InputError(
        f"{names}: no scores of a teacher were found{where}, which loss.distillation learns, expected pos_scores and "
        "neg_scores in lines of query, pos and neg, or a score with each of Tevatron's passages"
    )


def _compared(examples: TrainSet) -> np.ndarray:
    """Which queries have a teacher's score for a positive and for a hard negative, (n,) bool."""
    scores = examples.scores()
    return _any_known(scores.positives, examples.positives) & _any_known(scores.negatives, examples.negatives)


def _any_known(values: np.ndarray, lists: Ragged) -> np.ndarray:
    known = np.concatenate([[0], np.cumsum(~np.isnan(values))])
    return known[lists.offsets[1:]] > known[lists.offsets[:-1]]


def mixture_of(members: Sequence[Member]) -> Mixture:
    """Several sets as one; a passage that stands in two of them stays two, since its prefix may differ."""
    sets = [member.set for member in members]
    starts = np.cumsum([0, *(len(each.passages) for each in sets)])
    positives, negatives = (
        Ragged.of(
            row + start for each, start in zip(sets, starts, strict=False) for row in _rows_of(getattr(each, name))
        )
        for name in ("positives", "negatives")
    )
    queries, passages = (
        concatenate_datasets([getattr(each, name) for each in sets]) for name in ("queries", "passages")
    )
    digest = hashlib.blake2b(" ".join(each.fingerprint for each in sets).encode(), digest_size=16).hexdigest()
    teacher = None
    if any(each.teacher is not None for each in sets):
        teacher = Teacher(*(np.concatenate(parts) for parts in zip(*(each.scores() for each in sets), strict=True)))
    return Mixture(queries, passages, positives, negatives, digest, teacher, tuple(members))


def _rows_of(lists: Ragged) -> Iterator[np.ndarray]:
    return (lists.row(number) for number in range(len(lists)))


def load_train_set(
    path: str | Path,
    split: str = "train",
    hard_negatives: int = 0,
    strict: bool = False,
    repair: bool = False,
    max_bad_records: int = 0,
    scores: bool = False,
) -> TrainSet:
    """Open a BEIR folder's split, a file of training examples, which has no splits, or a set by its name (sources.py).

    In a BEIR folder a grade above 0 makes a positive, any other a hard negative. Hard negatives are kept where
    ``hard_negatives``, the number a step will draw per query, is above 0; a query with fewer is filled up from its
    ``further`` negatives, first come first taken. A passage that is a positive of a query is never its negative.

    Queries without a positive are left out with a warning that counts them, and refused when ``strict``; ``repair`` as
    in ``load_corpus``; ``max_bad_records`` as in ``judged_split`` and ``load_examples``; ``scores`` as in the latter, without
    effect on a BEIR folder. Raises InputError for whatever else is wrong with the files.
    """
    path, repair = resolve(path, split, repair)
    if kind_of_data(path, max_bad_records) == "beir":
        return _from_judgements(answerable_split(path, split, strict, repair, max_bad_records), hard_negatives)
    return _from_examples(load_examples(path, strict, repair, max_bad_records, scores), hard_negatives)


def _from_judgements(judged: JudgedSplit, hard_negatives: int) -> TrainSet:
    positives, negatives = judged.graded_rows()
    queries = Dataset.from_dict({"id": list(judged.queries), "text": list(judged.queries.values())})
    kept = negatives if hard_negatives else [[] for _ in negatives]
    return _train_set(queries, judged.corpus, positives, kept, judged.fingerprint)


def _from_examples(examples: ExampleTable, hard_negatives: int) -> TrainSet:
    kept = np.flatnonzero(examples.positives.lengths)
    positives = [examples.positives.row(number).tolist() for number in kept]
    negatives: list[list[int]] = [[] for _ in kept]
    sources: list[np.ndarray] = [
        np.empty(0, dtype=np.int64)
    ]  # which of the table's negatives each is, -1 for a further one
    if hard_negatives:
        for number, hard in zip(kept, negatives, strict=True):
            hard += examples.negatives.row(number).tolist()
            further = examples.further.row(number)[: max(0, hard_negatives - len(hard))].tolist()
            sources += [np.arange(*examples.negatives.offsets[number : number + 2]), np.full(len(further), -1)]
            hard += further
    teacher = None
    if examples.teacher is not None:
        places = np.concatenate(sources)
        given = np.append(examples.teacher.negatives, np.float32(np.nan))[places]
        teacher = Teacher(np.array(examples.teacher.positives), given)  # queries left out have no positives
    return _train_set(
        examples.queries.select(kept), examples.passages, positives, negatives, examples.fingerprint, teacher
    )


def _train_set(
    queries: Dataset,
    corpus: Dataset,
    positives: list[list[int]],
    negatives: list[list[int]],
    source: str,
    teacher: Teacher | None = None,
) -> TrainSet:
    """Keep the passages that occur, renumber the lists, and take the fingerprint."""
    lists = Ragged.of(positives), Ragged.of(negatives)
    used = np.unique(np.concatenate([ragged.values for ragged in lists]))
    lists = lists[0].renumbered(used), lists[1].renumbered(used)
    digest = hashlib.blake2b(json.dumps([source, queries["id"][:], queries["text"][:]]).encode(), digest_size=16)
    for numbers in (used, *(part for ragged in lists for part in (ragged.offsets, ragged.values)), *(teacher or ())):
        digest.update(np.array(len(numbers)).tobytes())
        digest.update(numbers.tobytes())
    return TrainSet(queries, corpus.select(used), *lists, fingerprint=digest.hexdigest(), teacher=teacher)


def narrowed(train_set: TrainSet, queries: np.ndarray) -> TrainSet:
    """The training set of some of its queries, given as rows, in that order; passages that no longer occur are left out."""
    lists = train_set.positives, train_set.negatives
    positives, negatives = ([ragged.row(query).tolist() for query in queries] for ragged in lists)
    teacher = None
    if train_set.teacher is not None:
        places = [np.concatenate([np.arange(*part.offsets[query : query + 2]) for query in queries]) for part in lists]
        teacher = Teacher(*(scores[own] for scores, own in zip(train_set.teacher, places, strict=True)))
    return _train_set(
        train_set.queries.select(queries), train_set.passages, positives, negatives, train_set.fingerprint, teacher
    )
