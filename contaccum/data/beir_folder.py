"""Writes rows from anywhere as a BEIR folder: corpus.jsonl, queries.jsonl, and a file of judgements for each split."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from contaccum.errors import InputError


def write_beir_folder(
    folder: Path,
    corpus: Iterable[Mapping[str, Any]],
    queries: Iterable[Mapping[str, Any]],
    grades: Mapping[str, Iterable[tuple[str, str, int]]],
) -> None:
    """Fill a folder. Rows of the corpus have _id, title and text, of queries _id and text; ``grades`` has by split the ids of a
    query and of a passage, and the passage's grade. InputError for a split that is no plain name, and for an id that a file of
    judgements cannot hold."""
    for split in grades:
        plain_split(split)
    (folder / "qrels").mkdir()
    for split, rows in grades.items():
        with open(folder / "qrels" / f"{split}.tsv", "w", encoding="utf-8", newline="\n") as file:
            file.write("query-id\tcorpus-id\tscore\n")
            file.writelines(f"{plain_id(query)}\t{plain_id(passage)}\t{grade}\n" for query, passage, grade in rows)
    write_lines(folder / "queries.jsonl", queries)
    write_lines(folder / "corpus.jsonl", corpus)


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """A JSON object a line."""
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def plain_split(split: str) -> str:
    """A split that can name a file where it is meant to stand, or InputError."""
    if split in ("", ".", "..") or "/" in split or not split.isprintable():  # neither is half a character printable
        raise InputError(f"split {split!r} is to name a file, expected a plain name such as train")
    return split


def plain_id(key: str) -> str:
    """An id that stays one where tabs and line ends part cells, or InputError."""
    if any(character in key for character in "\t\r\n\0"):
        raise InputError(f"id {key!r} holds a tab, a line break or a NUL, expected one that a qrels file can hold")
    return key
