"""Turns a data set into another format: BEIR folder, DPR JSON, JSONL of query, pos and neg, or Tevatron JSONL.

Ids go along: formats that have no place for them get extra fields (``query_id``, ``pos_id``, ``neg_id``) that our
readers know and others skip. JSONL has no titles: a passage there is its title and text in one. Negatives that are
not hard (DPR's ``negative_ctxs``) go into a BEIR corpus and another DPR file; JSONL and Tevatron have no place for them.
A teacher's scores stay with their passages in JSONL and Tevatron; BEIR has no place for them, and DPR's is a search's.
"""

import json
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from datasets import Dataset
from tqdm import tqdm

from contaccum.data.arrow import PASSAGE_COLUMNS, Ragged, column_batches
from contaccum.data.beir_folder import plain_id, plain_split
from contaccum.data.examples import Teacher, load_examples
from contaccum.data.formats import Example, Passage, Query, kind_of_data
from contaccum.data.records import Scores
from contaccum.data.sources import resolve
from contaccum.data.tables import answerable_split
from contaccum.errors import InputError
from contaccum.files import whole_file, whole_folder

Form = Literal["beir", "dpr", "jsonl", "tevatron"]
_BATCH = 1000  # queries read at a time


def convert(
    source: str | Path,
    target: str | Path,
    to: Form,
    split: str = "train",
    strict: bool = False,
    repair: bool = False,
    max_bad_records: int = 0,
) -> None:
    """Read ``source``, a BEIR folder or a file of examples, and write it to ``target`` in the format ``to``.

    ``split`` is the split of a BEIR folder that is read or written; a folder that is written holds the passages of the
    examples alone, one that is read gives its whole corpus only to another BEIR folder. Grades above 0 become
    positives and others negatives; written, they are 1 and 0. ``strict``, ``repair`` and ``max_bad_records`` as in
    ``load_train_set``. A teacher's scores, where the source has any, are checked and kept, or lost with a warning where the new
    format has no place for them.

    Raises InputError where ``target`` exists already (an empty folder may), or an id cannot stand in the new format.
    """
    if to not in get_args(Form):
        raise InputError(f"format {to!r} is not known, expected one of {', '.join(get_args(Form))}")
    if to == "beir":
        plain_split(split)
    target = Path(target)
    if target.exists() and not (to == "beir" and target.is_dir() and not any(target.iterdir())):
        raise InputError(f"{target}: exists already, expected a new path")
    found = open_examples(source, split, strict, repair, max_bad_records, scores=True)
    if found.teacher is not None and to in ("beir", "dpr"):
        warnings.warn(f"{source}: a teacher's scores are lost, for which {to} has no place", stacklevel=2)
        found = replace(found, teacher=None)
    examples = tqdm(found, desc="converting", unit=" examples", disable=None)
    if to == "beir":
        with whole_folder(target) as folder:
            _write_beir(folder, found.corpus, examples, split)
    else:
        with whole_file(target) as file:
            file.writelines(framed((record_line(example_record(example, to)) for example in examples), to))


@dataclass(frozen=True)
class Examples:
    """Those examples of a data set that have a positive, in its order; read anew, with their passages, at each iteration."""

    corpus: Dataset  # columns id, title, text
    queries: Dataset  # columns id, text
    positives: Ragged  # rows of the corpus, a list a query, as the next two
    negatives: Ragged
    further: Ragged
    teacher: Teacher | None = None  # scores of positives and of negatives

    def __len__(self) -> int:
        return int(np.count_nonzero(self.positives.lengths))

    def __iter__(self) -> Iterator[Example]:
        return self.part(0, len(self))

    def part(self, start: int, stop: int) -> Iterator[Example]:
        """The examples from ``start`` to before ``stop``."""
        kept = np.flatnonzero(self.positives.lengths)[start:stop]
        for first in range(0, len(kept), _BATCH):
            numbers = kept[first : first + _BATCH]
            batch = self.queries[numbers]
            for number, *query in zip(numbers, batch["id"], batch["text"], strict=True):
                lists = (self.positives, self.negatives, self.further)
                positives, negatives, further = (_passages(self.corpus, ragged.row(number)) for ragged in lists)
                yield Example(Query(*query), positives, negatives, further, self._scores(number))

    def _scores(self, number: int) -> Scores | None:
        """What the teacher gave an example's passages, each the shortest number that is the same in four bytes."""
        if self.teacher is None:
            return None
        lists = zip((self.positives, self.negatives), self.teacher, strict=True)
        found = [scores[ragged.offsets[number] : ragged.offsets[number + 1]] for ragged, scores in lists]
        return None if np.isnan(found[0][0]) else Scores(*([float(str(score)) for score in part] for part in found))


def open_examples(
    source: str | Path,
    split: str = "train",
    strict: bool = False,
    repair: bool = False,
    max_bad_records: int = 0,
    scores: bool = False,
) -> Examples:
    """The examples of a data set in any form, ``split`` being one of a BEIR folder; the rest as in ``load_train_set``."""
    source, repair = resolve(source, split, repair)
    if kind_of_data(source, max_bad_records) != "beir":
        table = load_examples(source, strict, repair, max_bad_records, scores)
        return Examples(table.passages, table.queries, table.positives, table.negatives, table.further, table.teacher)
    judged = answerable_split(source, split, strict, repair, max_bad_records)
    none: list[list[int]] = [[] for _ in judged.queries]
    lists = [Ragged.of(rows) for rows in (*judged.graded_rows(), none)]
    queries = Dataset.from_dict({"id": list(judged.queries), "text": list(judged.queries.values())})
    return Examples(judged.corpus, queries, lists[0], lists[1], lists[2])


def _rows(table: Dataset, columns: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for batch in column_batches(table, columns):
        yield from zip(*(batch[column] for column in columns), strict=True)


def _passages(corpus: Dataset, rows: np.ndarray) -> list[Passage]:
    batch = corpus[rows.tolist()]
    return [Passage(*row) for row in zip(*(batch[column] for column in PASSAGE_COLUMNS), strict=True)]


def _write_beir(folder: Path, corpus: Dataset, examples: Iterable[Example], split: str) -> None:
    (folder / "qrels").mkdir()
    with open(folder / "corpus.jsonl", "wb") as file:
        for key, title, text in _rows(corpus, PASSAGE_COLUMNS):
            file.write(record_line({"_id": plain_id(key), "title": title, "text": text}))
    with open(folder / "queries.jsonl", "wb") as queries, open(folder / "qrels" / f"{split}.tsv", "wb") as qrels:
        qrels.write(b"query-id\tcorpus-id\tscore\n")
        for (key, text), positives, negatives, *_ in examples:
            queries.write(record_line({"_id": plain_id(key), "text": text}))
            for grade, passages in ((1, positives), (0, negatives)):
                for passage in passages:
                    qrels.write(f"{key}\t{passage.id}\t{grade}\n".encode())


def record_line(record: dict[str, Any]) -> bytes:
    """A JSON object as one line."""
    return json.dumps(record, ensure_ascii=False).encode("utf-8") + b"\n"


def example_record(example: Example, to: Form) -> dict[str, Any]:
    """An example as a JSON object of DPR, JSONL or Tevatron; scores of its passages stand where peers look for them."""
    (key, text), positives, negatives, further, scores = example
    record: dict[str, Any] = {"query_id": key, "question" if to == "dpr" else "query": text}
    if to == "dpr":
        record |= {"answers": [], "positive_ctxs": _contexts(positives), "negative_ctxs": _contexts(further)}
        record["hard_negative_ctxs"] = _contexts(negatives)
        names = "positive_ctxs", "hard_negative_ctxs"
    elif to == "tevatron":
        names = "positive_passages", "negative_passages"
        for name, passages in zip(names, (positives, negatives), strict=True):
            record[name] = [{"docid": key, "title": title, "text": text} for key, title, text in passages]
    else:
        names = "pos", "neg"
        for name, passages in zip(names, (positives, negatives), strict=True):
            record[name] = [passage.content for passage in passages]
            record[f"{name}_id"] = [passage.id for passage in passages]
    for name, values in zip(names, scores or (), strict=scores is not None):
        if to == "jsonl":
            record[f"{name}_scores"] = list(values)
        else:
            record[name] = [{**passage, "score": value} for passage, value in zip(record[name], values, strict=True)]
    return record


def _contexts(passages: Iterable[Passage]) -> list[dict[str, str]]:
    return [{"title": title, "text": text, "passage_id": key} for key, title, text in passages]


def framed(lines: Iterable[bytes], to: Form) -> Iterator[bytes]:
    """Records, a line each, as the lines of a file: DPR's is one JSON list."""
    if to != "dpr":
        yield from lines
        return
    start = b"[\n"
    for line in lines:
        yield start + line
        start = b","
    yield b"]\n" if start == b"," else b"[]\n"
