"""Training sets, from one data set or several: queries, their passages, and teacher scores."""

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from datasets import Dataset, concatenate_datasets

from contaccum.data.examples import ExampleTable
from contaccum.data.identity import first_with_same_text, text_hash
from contaccum.data.tables import Ragged
from contaccum.errors import InputError
from contaccum.formats.records import record_line
from contaccum.runtime.units import counted


@dataclass(frozen=True)
class TrainSet:
    """Queries and passages for training.

    ``positives[i]`` is the list of the positives of query i, and ``negatives[i]`` is the list of
    its hard negatives. Both lists have row numbers of the table ``passages``.
    """

    queries: Dataset  # n rows, columns id and text
    passages: Dataset  # m rows, columns id, title, text
    query_hashes: np.ndarray  # (n,) int64, hash of each query's text
    passage_hashes: np.ndarray  # (m,) int64, hash of each passage's text
    positives: Ragged  # n lists, none empty
    negatives: Ragged  # n lists; all are empty if no hard negatives were requested
    fingerprint: str  # hash of all content (not of paths), in hexadecimal
    parts: "tuple[Member, ...]" = ()  # the sets of a mixture, in the order of their rows
    unused: int = 0  # number of queries whose hard negatives were not requested

    @property
    def members(self) -> "tuple[Member, ...]":
        """The sets of a mixture. A set that is not a mixture has one member: itself."""
        return self.parts or (Member(self),)

    def shared_queries(self, queries: Mapping[str, str]) -> list[str]:
        """Return the ids of the queries (id -> text) that have the text of a training query."""
        hashes = [text_hash(text) for text in queries.values()]
        ids = list(queries)
        return [ids[row] for row in np.flatnonzero(np.isin(hashes, self.query_hashes))]

    @cached_property
    def passage_numbers(self) -> np.ndarray:
        """Number of each passage, (m,) int64: the row number of the first passage with its text."""
        return first_with_same_text(self.passage_hashes)

    def relevant(self, model_prefix: str = "") -> Ragged:
        """Numbers of all passages known to be relevant for each query, n lists.

        These are the positives of all queries with the same prefix and text, also in other sets of
        a mixture. model_prefix: prefix of the queries of sets without an own one.
        """
        hashes = []
        for member in self.members:
            prefix = model_prefix if member.query_prefix is None else member.query_prefix
            hashes.append(member.set.query_hashes ^ text_hash(prefix))
        _, same = np.unique(np.concatenate(hashes), return_inverse=True)
        numbers = self.passage_numbers[self.positives.values]
        return Ragged.grouped(same[self.positives.owners], numbers, int(same.max()) + 1).take(same)

    def texts(self) -> list[str]:
        """Return the texts of all queries and passages, with titles, to learn a vocabulary from."""
        return [*self.queries["text"][:], *self.passages["title"][:], *self.passages["text"][:]]


class Member(NamedTuple):
    """One training set of a mixture."""

    set: TrainSet
    weight: float = 1.0
    query_prefix: str | None = None  # None: the model's prefix is used
    passage_prefix: str | None = None
    in_batch_negatives: bool = True  # False: each query is compared only with its own passages


def check_scores(names: Sequence[str], sets: Sequence[TrainSet]) -> None:
    """Raise InputError if no set has teacher scores.

    Warn about each set in which some queries have none.
    """
    # for each set: whether each query has the scores of a positive and a negative, (n,) bool
    scored = [_has_scores(part.positives) & _has_scores(part.negatives) for part in sets]
    if not any(queries.any() for queries in scored):
        raise InputError(
            f"{', '.join(names)}: no teacher scores found; loss.distillation needs them. In JSONL "
            "with query, pos and neg, add pos_scores and neg_scores. In Tevatron JSONL, add a "
            "score to each passage."
        )
    for name, queries in zip(names, scored, strict=True):
        without = int((~queries).sum())
        if without:
            warnings.warn(
                f"{name}: distillation needs the teacher scores of a positive and a negative, "
                f"which are missing for {without} of {counted(len(queries), 'query')}. Without "
                "them, the loss of a query is InfoNCE only.",
                stacklevel=3,
            )


def check_hard_negatives(name: str, examples: TrainSet) -> None:
    """Check the hard negatives of a set with ``in_batch_negatives`` false.

    Warn if some queries lack them, raise InputError if all do.
    """
    without, count = int(np.count_nonzero(examples.negatives.lengths == 0)), len(examples.queries)
    found = (
        f"{name}: no hard negative for {without} of {counted(count, 'query')}, and "
        "in_batch_negatives is false"
    )
    if without == count:
        raise InputError(
            f"{found}. So the set has no negatives. Set in_batch_negatives to true, or mine "
            "negatives."
        )
    if without:
        warnings.warn(f"{found}. Without negatives, the loss of a query is 0.", stacklevel=3)


def _has_scores(lists: Ragged) -> np.ndarray:
    """Return for each list whether at least one passage has a teacher score, (n,) bool."""
    known = np.concatenate([[0], np.cumsum(~np.isnan(lists.scores))])
    return np.diff(known[lists.offsets]) > 0


def mixture_of(members: Sequence[Member]) -> TrainSet:
    """Concatenate sets.

    A passage that is in two sets is stored twice, because each set can have its own prefix for
    texts.
    """
    sets = [member.set for member in members]
    sizes = [len(part.passages) for part in sets]
    fingerprints = " ".join(part.fingerprint for part in sets)
    return TrainSet(
        queries=concatenate_datasets([part.queries for part in sets]),
        passages=concatenate_datasets([part.passages for part in sets]),
        query_hashes=np.concatenate([part.query_hashes for part in sets]),
        passage_hashes=np.concatenate([part.passage_hashes for part in sets]),
        positives=Ragged.concatenated([part.positives for part in sets], sizes),
        negatives=Ragged.concatenated([part.negatives for part in sets], sizes),
        fingerprint=hashlib.blake2b(fingerprints.encode(), digest_size=16).hexdigest(),
        parts=tuple(members),
        unused=sum(part.unused for part in sets),
    )


def from_examples(examples: ExampleTable, hard_negatives: int, with_scores: bool) -> TrainSet:
    """Make a training set of the examples that have a positive.

    If a query has fewer than ``hard_negatives`` hard negatives, its other negatives fill the gap,
    in file order. If ``hard_negatives`` is 0, the set has no negatives.
    """
    kept = np.flatnonzero(examples.positives.lengths)
    positives = examples.positives.take(kept)
    hard = examples.negatives.take(kept, None if hard_negatives else 0)
    others = examples.others.take(kept, np.maximum(hard_negatives - hard.lengths, 0))
    negatives = Ragged.grouped(
        np.concatenate([hard.owners, others.owners]),
        np.concatenate([hard.values, others.values]),
        len(kept),
        np.concatenate([hard.scores, others.scores]),
    )
    if not with_scores:
        for lists in (positives, negatives):
            lists.scores.fill(np.nan)
    unused = 0 if hard_negatives else int(np.count_nonzero(examples.negatives.lengths[kept]))
    return replace(_train_set(examples, kept, positives, negatives), unused=unused)


def _train_set(
    source: ExampleTable | TrainSet,
    rows: np.ndarray,
    positives: Ragged,
    negatives: Ragged,
    first: int = 0,
) -> TrainSet:
    """Make a training set from some queries of ``source``.

    rows: row numbers of these queries. positives, negatives: one list for each of these queries,
    with row numbers of passages in ``source``. Passages that are neither in a list nor among the
    ``first`` ones of ``source`` are dropped, so the row numbers change. The fingerprint is computed
    from the new content.
    """
    queries = source.queries.select(rows)
    used = np.unique(np.concatenate([positives.values, negatives.values, np.arange(first)]))
    positives, negatives = positives.renumbered(used), negatives.renumbered(used)
    content = [source.fingerprint, queries["id"][:], queries["text"][:], used.tobytes()]
    for lists in (positives, negatives):
        content += [lists.offsets.tobytes(), lists.values.tobytes(), lists.scores.tobytes()]
    digest = hashlib.blake2b(record_line(content), digest_size=16)
    return TrainSet(
        queries,
        source.passages.select(used),
        source.query_hashes[rows],
        source.passage_hashes[used],
        positives,
        negatives,
        digest.hexdigest(),
    )


def subset(train_set: TrainSet, queries: np.ndarray, first: int = 0) -> TrainSet:
    """Make a training set from some queries and their passages.

    queries: row numbers of these queries, in the new order. first: the result has also the first
    passages of ``train_set``, this many.
    """
    positives, negatives = train_set.positives.take(queries), train_set.negatives.take(queries)
    return _train_set(train_set, queries, positives, negatives, first)
