"""Passages and queries that are in memory, checked like those of files."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc  # type: ignore[import-untyped]
from datasets import Dataset, Value

from contaccum.data.dataset import open_dataset
from contaccum.data.tables import PASSAGE_COLUMNS
from contaccum.errors import InputError
from contaccum.runtime.checks import require_utf8


def passage_table(corpus: Any) -> Dataset:
    """Return passages as a table with the columns id, title and text. See ``Retriever.open``."""
    if isinstance(corpus, str | Path):
        return open_dataset(corpus).corpus
    if isinstance(corpus, Dataset):
        if corpus.format["type"] or corpus.format["columns"] != corpus.column_names:
            corpus = corpus.with_format(None)  # plain texts, all columns
        if _is_complete(corpus):
            return corpus  # it can be larger than memory
    return Dataset.from_dict(dict(zip(PASSAGE_COLUMNS, columns_of(corpus, "passage"), strict=True)))


def _is_complete(corpus: Dataset) -> bool:
    """Return whether a table has ids, titles and texts, none missing, and no id twice."""
    if any(corpus.features.get(name) != Value("string") for name in PASSAGE_COLUMNS):
        return False
    rows = corpus._indices  # of ``Dataset.select``; None: all rows
    if rows is not None and pc.count_distinct(rows.column(0)).as_py() < len(corpus):
        return False
    columns = [corpus.data.column(name) for name in PASSAGE_COLUMNS]  # also of unselected rows
    unique = pc.count_distinct(columns[0]).as_py() == len(columns[0])
    return unique and not any(column.null_count for column in columns)


def texts_by_id(queries: Any) -> dict[str, str]:
    """Return queries as texts by id. See ``Retriever.search``."""
    ids, _, texts = columns_of(queries, "query")
    return dict(zip(ids, texts, strict=True))


def columns_of(texts: Any, what: str) -> tuple[list[str], list[str], list[str]]:
    """Return the ids, titles and texts of a table, a Series, a mapping or a list of texts.

    A missing title is empty. The ids of a list are 0, 1, ... what: kind of the texts in error
    messages, such as query. Raises InputError if a value is no text, or if two ids are equal.
    """
    keys, titles, contents = _columns(texts)
    ids = [_id_text(key, f"{what} {number}") for number, key in enumerate(keys)]
    if len(set(ids)) < len(ids):
        key, count = Counter(ids).most_common(1)[0]
        raise InputError(f"{what} id {key!r} is used {count} times; ids must be unique")
    titles = [
        "" if title is None else _text(title, f"title of {what} {key!r}")
        for key, title in zip(ids, titles, strict=True)
    ]
    contents = [_text(text, f"{what} {key!r}") for key, text in zip(ids, contents, strict=True)]
    return ids, titles, contents


def _columns(texts: Any) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    is_pandas = hasattr(texts, "notna")
    if isinstance(texts, Dataset) or (is_pandas and hasattr(texts, "columns")):
        if isinstance(texts, Dataset):
            columns = texts[:]
        else:  # in a DataFrame, a missing value can be NaN
            columns = texts.astype(object).where(texts.notna(), None).to_dict("list")
        key = "id" if "id" in columns else "_id"
        if not {key, "text"} <= columns.keys():
            raise InputError(
                f"the table has the columns {', '.join(map(str, columns))}; expected id (or _id), "
                "text and, if there are any, title"
            )
        return columns[key], columns.get("title", [None] * len(columns[key])), columns["text"]
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        raise InputError(
            f"found a {type(texts).__name__}; expected a list of texts, or texts by id"
        )
    if isinstance(texts, Mapping) and all(isinstance(each, Mapping) for each in texts.values()):
        # as BEIR's GenericDataLoader reads a corpus
        passages = texts.values()
        titles, contents = ([each.get(key) for each in passages] for key in ("title", "text"))
        return list(texts), titles, contents
    if is_pandas or isinstance(texts, Mapping):
        items = list(texts.items())  # type: ignore[attr-defined]
    else:
        items = list(enumerate(texts))
    return [key for key, _ in items], [None] * len(items), [text for _, text in items]


def _id_text(key: Any, where: str) -> str:
    if isinstance(key, bool) or not isinstance(key, str | int | np.integer) or key == "":
        raise InputError(f"{where}: the id is {key!r}, expected a text or a whole number")
    return _text(str(key), f"id of {where}")


def _text(text: Any, where: str) -> str:
    return str(require_utf8(text, where))  # numpy.str_ becomes str
