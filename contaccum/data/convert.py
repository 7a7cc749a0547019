"""Turns a data set into another format: BEIR folder, DPR JSON, JSONL of query, pos and neg, or Tevatron JSONL.

Ids go along: formats that have no place for them get extra fields (``query_id``, ``pos_id``, ``neg_id``) that our
readers know and others skip. JSONL has no titles: a passage there is its title and text in one. Negatives that are
not hard (DPR's ``negative_ctxs``) go into a BEIR corpus and another DPR file; JSONL and Tevatron have no place for them.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from datasets import Dataset
from tqdm import tqdm

from contaccum.data.arrow import PASSAGE_COLUMNS, QUERY_COLUMNS, Ragged, column_batches
from contaccum.data.examples import load_examples
from contaccum.data.formats import Example, Passage, Query, kind_of_data
from contaccum.data.hub import local_path
from contaccum.data.tables import answerable_split
from contaccum.errors import InputError
from contaccum.files import whole_file, whole_folder

Form = Literal["beir", "dpr", "jsonl", "tevatron"]


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
    ``load_train_set``.

    Raises InputError where ``target`` exists already (an empty folder may), or an id cannot stand in the new format.
    """
    if to not in get_args(Form):
        raise InputError(f"format {to!r} is not known, expected one of {', '.join(get_args(Form))}")
    if to == "beir" and (not split or split != Path(split).name):
        raise InputError(f"split {split!r} is to name a file, expected a plain name such as train")
    target = Path(target)
    if target.exists() and not (to == "beir" and target.is_dir() and not any(target.iterdir())):
        raise InputError(f"{target}: exists already, expected a new path")
    corpus, examples = _open(source, split, strict, repair, max_bad_records)
    if to == "beir":
        with whole_folder(target) as folder:
            _write_beir(folder, corpus, examples, split)
    else:
        with whole_file(target) as file:
            file.writelines(_WRITERS[to](examples))


def _open(
    source: str | Path, split: str, strict: bool, repair: bool, max_bad_records: int
) -> tuple[Dataset, Iterator[Example]]:
    """The corpus and the examples that have a positive."""
    source = local_path(source, split)
    if kind_of_data(source, max_bad_records) != "beir":
        table = load_examples(source, strict, repair, max_bad_records)
        queries = map(Query._make, _rows(table.queries, QUERY_COLUMNS))
        return table.passages, _examples(queries, table.passages, table.positives, table.negatives, table.further)
    judged = answerable_split(source, split, strict, repair, max_bad_records)
    none: list[list[int]] = [[] for _ in judged.queries]
    lists = [Ragged.of(rows) for rows in (*judged.graded_rows(), none)]
    return judged.corpus, _examples(map(Query._make, judged.queries.items()), judged.corpus, *lists)


def _rows(table: Dataset, columns: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for batch in column_batches(table, columns):
        yield from zip(*(batch[column] for column in columns), strict=True)


def _examples(queries: Iterable[Query], corpus: Dataset, *lists: Ragged) -> Iterator[Example]:
    for number, query in enumerate(tqdm(queries, desc="converting", unit=" examples", disable=None)):
        positives, negatives, further = (_passages(corpus, ragged.row(number)) for ragged in lists)
        if positives:
            yield Example(query, positives, negatives, further)


def _passages(corpus: Dataset, rows: np.ndarray) -> list[Passage]:
    batch = corpus[rows.tolist()]
    return [Passage(*row) for row in zip(*(batch[column] for column in PASSAGE_COLUMNS), strict=True)]


def _write_beir(folder: Path, corpus: Dataset, examples: Iterable[Example], split: str) -> None:
    (folder / "qrels").mkdir()
    with open(folder / "corpus.jsonl", "wb") as file:
        for key, title, text in _rows(corpus, PASSAGE_COLUMNS):
            file.write(_line({"_id": _plain(key), "title": title, "text": text}))
    with open(folder / "queries.jsonl", "wb") as queries, open(folder / "qrels" / f"{split}.tsv", "wb") as qrels:
        qrels.write(b"query-id\tcorpus-id\tscore\n")
        for (key, text), positives, negatives, _ in examples:
            queries.write(_line({"_id": _plain(key), "text": text}))
            for grade, passages in ((1, positives), (0, negatives)):
                for passage in passages:
                    qrels.write(f"{key}\t{passage.id}\t{grade}\n".encode())


def _plain(key: str) -> str:
    if any(character in key for character in "\t\r\n\0"):
        raise InputError(f"id {key!r} holds a tab, a line break or a NUL, expected one that a qrels file can hold")
    return key


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, ensure_ascii=False).encode("utf-8") + b"\n"


def _dpr(examples: Iterable[Example]) -> Iterator[bytes]:
    def contexts(passages: Iterable[Passage]) -> list[dict[str, str]]:
        return [{"title": title, "text": text, "passage_id": key} for key, title, text in passages]

    start = b"[\n"
    for (key, text), positives, negatives, further in examples:
        record = {"query_id": key, "question": text, "answers": [], "positive_ctxs": contexts(positives)}
        record |= {"negative_ctxs": contexts(further), "hard_negative_ctxs": contexts(negatives)}
        yield start + _line(record)
        start = b","
    yield b"]\n"


def _jsonl(examples: Iterable[Example]) -> Iterator[bytes]:
    for (key, text), positives, negatives, _ in examples:
        record: dict[str, Any] = {"query_id": key, "query": text}
        for name, passages in (("pos", positives), ("neg", negatives)):
            record[name] = [passage.content for passage in passages]
            record[f"{name}_id"] = [passage.id for passage in passages]
        yield _line(record)


def _tevatron(examples: Iterable[Example]) -> Iterator[bytes]:
    for (key, text), positives, negatives, _ in examples:
        record: dict[str, Any] = {"query_id": key, "query": text}
        for name, passages in (("positive_passages", positives), ("negative_passages", negatives)):
            record[name] = [{"docid": key, "title": title, "text": text} for key, title, text in passages]
        yield _line(record)


_WRITERS: dict[Form, Callable[[Iterable[Example]], Iterator[bytes]]] = {
    "dpr": _dpr,
    "jsonl": _jsonl,
    "tevatron": _tevatron,
}
