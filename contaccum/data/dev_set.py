"""Small dev sets: a sample of another one in memory, or written as a BEIR folder.

A written dev set has a sample of the judged queries, all judged passages of these queries, and a
sample of the other passages. The corpus is small because training often computes the dev score, and
encoding the passages takes most of that time. A score on a sampled corpus is higher than a score on
the whole corpus, so compare only scores on the same corpus.
"""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
from datasets import Dataset

from contaccum.data.commands import grades_of
from contaccum.data.corpus import beir_query_ids, beir_records, find_rows
from contaccum.data.dataset import RetrievalDataset
from contaccum.data.retrieval_set import Qrels, RetrievalSet
from contaccum.errors import InputError
from contaccum.formats.records import Example, write_beir_folder
from contaccum.runtime.files import whole_folder
from contaccum.runtime.units import counted

SHARE = 10
"""``hold_out`` puts at most one tenth (1 / SHARE) of the training queries into the dev set."""


def write_dev_set(
    source: RetrievalSet, folder: Path, most_queries: int, most_passages: int, seed: int
) -> None:
    """Write a BEIR folder with the split ``dev``. Queries and passages are a sample of ``source``.

    The dev set has at most ``most_queries`` queries and all judged passages of these queries.
    Random other passages are added until there are ``most_passages`` passages.
    """
    names = sorted(source.queries)
    kept = sorted(random.Random(seed).sample(names, min(most_queries, len(names))))
    queries = {name: source.queries[name] for name in kept}
    dev = sample_passages(replace(source, queries=queries), most_passages, seed)
    ids = kept if source.skips_own_id else beir_query_ids(kept, dev.corpus)
    named = list(zip(ids, kept, strict=True))
    grades = ((key, *judged) for key, name in named for judged in source.qrels[name].items())
    with whole_folder(folder) as part:
        records = ({"_id": key, "text": queries[name]} for key, name in named)
        write_beir_folder(part, beir_records(dev.corpus), records, {"dev": grades})


def sample_passages(source: RetrievalSet, most_passages: int, seed: int) -> RetrievalSet:
    """Return ``source`` with the passages judged for its queries and a random sample of the others.

    It has at most ``most_passages`` passages, or the judged ones if they are more.
    """
    if len(source.corpus) <= most_passages:
        return source
    judged = {passage for query in source.queries for passage in source.qrels[query]}
    rows = sorted(find_rows(source.corpus, judged).values())
    others = np.delete(np.arange(len(source.corpus)), rows).tolist()
    rows += random.Random(seed).sample(others, max(0, most_passages - len(rows)))
    # in memory, because datasets would write a selection next to the tables in the cache
    corpus = Dataset(source.corpus.with_format("arrow")[sorted(rows)])
    # the sample follows from the corpus, the qrels and these two numbers
    corpus_hash = f"{source.corpus_hash} {most_passages} {seed}"
    return replace(source, corpus=corpus, corpus_hash=corpus_hash)


def hold_out(
    source: RetrievalDataset,
    folder: Path,
    most_queries: int,
    most_passages: int,
    seed: int,
    hard_negatives: int = 0,
) -> None:
    """Divide training queries into a dev set, ``folder/dev``, and a training set, ``folder/train``.

    The dev set has at most ``most_queries`` queries and at most a tenth of all queries. Its
    passages are a sample, as in ``write_dev_set``. The training set has the other queries and all
    passages. Raises InputError if the dev set would have no query.

    hard_negatives: number of hard negatives per query in training. If a query has fewer, its other
    negatives fill the gap, as in ``RetrievalDataset.train_set``.
    """
    examples = source.examples().with_beir_ids()
    numbers = np.flatnonzero(examples.positives.lengths).tolist()
    random.Random(seed).shuffle(numbers)
    count = min(most_queries, len(numbers) // SHARE)
    if not count:
        raise InputError(
            f"{source.path}: has {counted(len(numbers), 'training query')}; to hold out a dev set, "
            f"at least {SHARE} are needed. Set data.dev to a dev set."
        )
    texts, ids = (examples.queries[column][:] for column in ("text", "id"))
    held = {ids[number]: texts[number] for number in sorted(numbers[:count])}
    passages: list[str] = examples.passages["id"]  # datasets 4.0 has no numpy.int64 as a row
    qrels: Qrels = {}
    for number in numbers[:count]:
        grades = examples.qrels[ids[number]] if examples.qrels is not None else {}
        positives = [passages[row] for row in examples.positives.row(number).tolist()]
        qrels[ids[number]] = {passage: grades.get(passage, 1) for passage in positives}
    trained = (_filled(each, hard_negatives) for each in examples if each.query.id not in held)
    with whole_folder(folder) as part:
        dev = RetrievalSet(examples.passages, held, qrels)
        write_dev_set(dev, part / "dev", count, most_passages, seed)
        (part / "train").mkdir()
        others = beir_records(examples.queries.select(sorted(numbers[count:])))
        write_beir_folder(
            part / "train",
            beir_records(examples.passages),
            others,
            {"train": grades_of(trained, examples.qrels)},
        )


def _filled(example: Example, hard_negatives: int) -> Example:
    others = example.others[: max(0, hard_negatives - len(example.negatives))]
    return example._replace(negatives=[*example.negatives, *others])
