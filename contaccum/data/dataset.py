"""Open data sets of every format, by path or by name.

Other packages open data only through this module.
"""

import os
import warnings
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from datasets import Dataset

from contaccum.catalog import fetch, find, source_of
from contaccum.config import DataConfig, DataPolicy, MixtureConfig
from contaccum.data.corpus import open_corpus, queries_file, read_query_texts
from contaccum.data.examples import ExampleTable, load_examples
from contaccum.data.retrieval_set import (
    JudgedSplit,
    Qrels,
    RetrievalSet,
    examples_as_retrieval,
    judged_split,
    keep_answerable,
    qrels_file,
    read_grades,
    require_other_ids,
    splits_of,
    warn_of_own_ids,
)
from contaccum.data.train_set import (
    Member,
    TrainSet,
    check_hard_negatives,
    check_scores,
    from_examples,
    mixture_of,
)
from contaccum.errors import InputError
from contaccum.formats.dpr import read_questions
from contaccum.formats.readers import Kind, kind_of_data
from contaccum.formats.records import Question
from contaccum.formats.training import FORMATS
from contaccum.runtime.units import counted

DEFAULT_POLICY = DataPolicy()


class RetrievalDataset:
    """Data set of any format.

    Each property reads and checks its files at first use. Invalid files raise InputError.
    """

    def __init__(self, name: str | Path, split: str, policy: DataPolicy) -> None:
        self.name = os.path.expanduser(name)
        self.split = split
        self._policy = policy

    @cached_property
    def path(self) -> Path:
        """Local path of the folder or file.

        A data set that is opened by name is downloaded into the cache.
        """
        return fetch(self.name, self.split)

    @cached_property
    def policy(self) -> DataPolicy:
        """Policy for invalid records.

        ``repair`` is always on for a BEIR folder that was downloaded by name.

        Published data sets (BEIR, MTEB, MIRACL, Hub) have duplicate ids and passages without text.
        """
        if self.path.is_dir() and not os.path.exists(self.name):
            return replace(self._policy, repair=True)
        return self._policy

    @cached_property
    def kind(self) -> Kind:
        """Format of the data set, detected from the content of the files."""
        return kind_of_data(self.path)

    def check(self) -> None:
        """Raise InputError if no data set has this name, or if a local data set lacks the split.

        Download nothing, and read only the first records of a file.
        """
        find(self.name)
        if os.path.exists(self.name) and self.kind == "beir":
            qrels_file(self.path, self.split)

    @cached_property
    def corpus(self) -> Dataset:
        """Table of passages with columns id, title and text.

        It is read from a BEIR folder, a corpus.jsonl, a passage TSV, or training examples.
        """
        if self.kind in FORMATS:
            return self.examples().passages
        return open_corpus(self.path, self.policy).table

    @cached_property
    def queries(self) -> dict[str, str]:
        """Query id -> text, from a BEIR folder, a file of queries, or training examples."""
        if self.kind in FORMATS:
            table = self.examples().queries
            return dict(zip(table["id"], table["text"], strict=True))
        return read_query_texts(queries_file(self.path), self.policy.repair)

    @cached_property
    def questions(self) -> list[Question]:
        """Questions and answers of a DPR question file."""
        questions = list(read_questions(self.path))
        if not questions:
            raise InputError(f"{self.path}: has no valid question; it needs at least one")
        return questions

    @cached_property
    def qrels(self) -> Qrels:
        """Judgements of the queries that have a positive, if ``name`` is a qrels file.

        The form is query id -> passage id -> grade.
        """
        source = Path(self.name)
        return keep_answerable(source, read_grades(source), self._policy.strict)

    @cached_property
    def retrieval_set(self) -> RetrievalSet:
        """Corpus, judged queries and qrels of a BEIR split or of training examples.

        Positives of examples have grade 1. As in trec_eval, a positive that is not in the corpus
        counts as not found; a warning gives the number of such judgements.
        """
        if self.kind != "beir":
            return examples_as_retrieval(self.examples())
        judged = self._judged
        require_other_ids(judged.source, judged.qrels)
        warn_of_own_ids(self.path, judged.qrels)
        if judged.unknown:
            warnings.warn(
                f"{judged.unknown_judgements()}; such passages count as not found", stacklevel=3
            )
        return judged

    @cached_property
    def search_set(self) -> RetrievalSet:
        """Corpus and queries of a search, which needs no positives.

        The queries are those that the split judges, or all queries of a BEIR folder without qrels.
        """
        if self.kind == "corpus":
            raise InputError(
                f"{self.name}: has passages and no queries; expected a BEIR folder, or --query for "
                "a search with one query"
            )
        if self.kind != "beir":
            return self.retrieval_set
        if not splits_of(self.path):
            return RetrievalSet(self.corpus, self.queries, {})
        judged = judged_split(self.path, self.split, self.policy)
        warn_of_own_ids(self.path, judged.qrels)
        return judged

    @cached_property
    def _judged(self) -> JudgedSplit:
        judged = judged_split(self.path, self.split, self.policy)
        kept = keep_answerable(judged.source, judged.qrels, self.policy.strict)
        return replace(judged, queries={query: judged.queries[query] for query in kept}, qrels=kept)

    def examples(self, merge: bool = True) -> ExampleTable:
        """Return the data set as training examples.

        merge: whether queries of a BEIR folder with the same text become one, as in a file.
        """
        if self.kind == "beir":
            return self._judged.examples(self.policy.repair, merge)
        return load_examples(self.path, self.policy, str(self.name))

    def train_set(self, hard_negatives: int = 0, scores: bool = False) -> TrainSet:
        """Return the queries and passages for training.

        In a BEIR folder, a passage with a grade above 0 is a positive; any other judged passage is
        a hard negative. If a query has fewer than ``hard_negatives`` hard negatives, other
        negatives (DPR's ``negative_ctxs``) fill the gap, in file order. scores: with the teacher
        scores of the examples, if there are any.
        """
        return from_examples(self.examples(), hard_negatives, scores)


def is_trained_on(data: DataConfig, name: str, split: str) -> bool:
    """Return whether ``data`` trains on the split ``split`` of the data set ``name``."""
    sources = data.mixture or [MixtureConfig(data.train, data.split)]
    read = source_of(name, split)
    return any(source_of(source.train, source.split) == read for source in sources)


def warn_of_shared_queries(
    kind: str, source: str, judged: RetrievalSet, same: list[str], other: str
) -> None:
    """Warn if queries also have a part in choosing the model.

    kind: ``test`` or ``dev``. same: ids of the queries of ``judged`` whose texts are also in the
    ``other`` data (``training`` or ``dev``, on which a run keeps its best model).
    """
    if same:
        warnings.warn(
            f"{source}: {len(same)} of {counted(len(judged.queries), f'{kind} query')} also occur "
            f"in the {other} data (first: {same[0]!r}), so the scores on the {kind} data are too "
            f"high; {kind} queries must have other texts than {other} queries",
            stacklevel=2,
        )


def require_other_dev(data: DataConfig) -> None:
    """Raise InputError if the dev data is training data."""
    if data.dev and is_trained_on(data, data.dev, data.dev_split):
        raise InputError(
            f"data.dev is the training data ({data.dev} {data.dev_split}), but a run keeps its "
            "best model on data.dev. Name other queries, such as a split that contaccum data "
            "convert --splits makes."
        )


def open_dataset(
    name: str | Path, split: str = "test", policy: DataPolicy = DEFAULT_POLICY
) -> RetrievalDataset:
    """Open a data set by its path or by its name.

    Examples of names: scifact, nanobeir/scifact, mteb/NFCorpus, miracl/sw, dpr/nq-train,
    hub:owner/name. ``split`` is the split of a BEIR folder or of a Hub set. Files are downloaded
    and read only when a property of the result is used.
    """
    return RetrievalDataset(name, split, policy)


def load_training(data: DataConfig, scores: bool = False) -> TrainSet:
    """Load the training data of a config as tables.

    The data is one data set or a mixture of several.

    Raises InputError if ``scores`` is true and no data set has teacher scores, or if a data set
    without in-batch negatives has no hard negatives.
    """
    sets = data.mixture or [MixtureConfig(data.train, data.split)]
    members = []
    for config in sets:
        train_set = open_dataset(config.train, config.split, data.policy).train_set(
            data.hard_negatives, scores
        )
        if not config.in_batch_negatives:
            check_hard_negatives(config.train, train_set)
        members.append(
            Member(
                train_set,
                config.weight or len(train_set.queries),
                config.query_prefix,
                config.passage_prefix,
                config.in_batch_negatives,
            )
        )
    if scores:
        check_scores([config.train for config in sets], [member.set for member in members])
    only = members[0]
    prefixes = (only.query_prefix, only.passage_prefix)
    if len(members) == 1 and prefixes == (None, None) and only.in_batch_negatives:
        return only.set  # the same run as with data.train
    return mixture_of(members)
