"""One part of a data set, opened by ``open_dataset`` with the policy's fields as keywords; records without their locations."""

from collections.abc import Iterator
from pathlib import Path

from datasets import Dataset

from contaccum.config import DataPolicy
from contaccum.data import examples, retrieval_set
from contaccum.data.dataset import open_dataset
from contaccum.data.examples import ExampleTable
from contaccum.data.retrieval_set import JudgedSplit, RetrievalSet
from contaccum.data.train_set import TrainSet
from contaccum.formats.readers import numbered_corpus, numbered_examples, numbered_queries
from contaccum.formats.records import Example, Passage, Query


def open_train_set(
    path: str | Path, split: str = "train", hard_negatives: int = 0, scores: bool = False, **policy: int
) -> TrainSet:
    return open_dataset(path, split, DataPolicy(**policy)).train_set(hard_negatives, scores)  # type: ignore[arg-type]


def open_retrieval_set(path: str | Path, split: str = "test", **policy: int) -> RetrievalSet:
    return open_dataset(path, split, DataPolicy(**policy)).retrieval_set  # type: ignore[arg-type]


def open_searchable_set(path: str | Path, split: str = "test", **policy: int) -> RetrievalSet:
    return open_dataset(path, split, DataPolicy(**policy)).searchable_set  # type: ignore[arg-type]


def open_corpus(path: str | Path, **policy: int) -> Dataset:
    return open_dataset(path, policy=DataPolicy(**policy)).corpus  # type: ignore[arg-type]


def open_queries(path: str | Path, **policy: int) -> dict[str, str]:
    return open_dataset(path, policy=DataPolicy(**policy)).queries  # type: ignore[arg-type]


def open_examples(path: str | Path, split: str = "train", **policy: int) -> ExampleTable:
    return open_dataset(path, split, DataPolicy(**policy)).examples()  # type: ignore[arg-type]


def load_examples(path: Path, scores: bool = False, **policy: int) -> ExampleTable:
    return examples.load_examples(path, DataPolicy(**policy), scores)  # type: ignore[arg-type]


def judged_split(path: Path, split: str, **policy: int) -> JudgedSplit:
    return retrieval_set.judged_split(path, split, DataPolicy(**policy))  # type: ignore[arg-type]


def read_corpus(path: Path) -> Iterator[Passage]:
    return (passage for _, passage in numbered_corpus(path))


def read_queries(path: Path) -> Iterator[Query]:
    return (query for _, query in numbered_queries(path))


def read_examples(path: Path) -> Iterator[Example]:
    return (example for _, example in numbered_examples(path))
