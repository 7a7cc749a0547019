"""MIRACL's languages by name, as BEIR folders of its own files: topics, judgements and a corpus of Wikipedia's passages each.

The files are those of ``miracl/miracl`` (topics: query id, tab, query; judgements in TREC's form) and ``miracl/miracl-corpus``
(gzipped lines with docid, title and text), which are scripts for ``datasets``, so that it no longer reads them.
"""

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from contaccum.data.arrow import cached_folder
from contaccum.data.bad_records import STRICT, Place
from contaccum.data.beir_folder import write_beir_folder
from contaccum.data.formats import read_qrels
from contaccum.data.json_records import Record, id_field, json_lines, string_field, title_field
from contaccum.data.lines import numbered_lines
from contaccum.data.repositories import Repository
from contaccum.errors import InputError

JUDGED = Repository("miracl/miracl", "5be20db9509754dadad47689368639fcec739c00")
CORPUS = Repository("miracl/miracl-corpus", "d921ec7e349ce0d28daf30b2da9da5ee698bef0d")
KNOWN = ("ar", "bn", "en", "es", "fa", "fi", "fr", "hi", "id", "ja", "ko", "ru", "sw", "te", "th", "zh")
SURPRISE = ("de", "yo")
"""The languages without a train split."""
_DOCUMENT = "a passage (an object with docid, title and text)"


def miracl_folder(language: str) -> Path:
    """The BEIR folder of a language, with the judgements of dev and, but for the surprise languages, of train.

    The test splits have topics alone, and are left out. Raises InputError for another language, and where a file cannot be had.
    """
    if language not in KNOWN + SURPRISE:
        expected = ", ".join(sorted(KNOWN + SURPRISE))
        raise InputError(f"miracl/{language}: no language of MIRACL's, expected miracl/ and one of {expected}")
    return cached_folder("miracl", [JUDGED.revision, CORPUS.revision, language], partial(_write, language))


def _write(language: str, folder: Path) -> None:
    root = f"miracl-v1.0-{language}"
    splits = ("dev",) if language in SURPRISE else ("train", "dev")
    judged, corpus = JUDGED.open(), CORPUS.open()
    topics = judged.fetch(*(f"{root}/topics/topics.{root}-{split}.tsv" for split in splits))
    grades = judged.fetch(*(f"{root}/qrels/qrels.{root}-{split}.tsv" for split in splits))
    parts = corpus.fetch(f"miracl-corpus-v1.0-{language}/docs-[0-9]*.jsonl.gz")
    rows = {split: ((each.query_id, each.passage_id, each.grade) for each in read_qrels(file))
            for split, file in zip(splits, grades, strict=True)}  # fmt: skip
    write_beir_folder(folder, _passages(_all_of(parts)), _queries(topics), rows)


def _all_of(parts: list[Path]) -> list[Path]:
    """The parts of a corpus by their numbers; InputError where one between them is missing, as in a copy made by hand."""
    numbered = {int(re.findall(r"\d+", part.name)[0]): part for part in parts}
    for number in range(max(numbered)):
        if number not in numbered:
            raise InputError(f"{parts[0].parent}: holds no docs-{number}.jsonl.gz, expected all parts of the corpus")
    return [numbered[number] for number in sorted(numbered)]


def _passages(parts: list[Path]) -> Iterator[dict[str, str]]:
    for part in parts:
        yield from (row for _, row in json_lines(part, _DOCUMENT, _passage, STRICT))


def _passage(record: Record, place: Place, number: int) -> dict[str, str]:
    title, text = title_field(record, place), string_field(record, "text", place)
    return {"_id": id_field(record, "docid", place), "title": title, "text": text}


def _queries(files: list[Path]) -> Iterator[dict[str, Any]]:
    for file in files:
        for number, line in numbered_lines(file):
            key, tab, text = line.partition("\t")
            if not (key and tab and text.strip()):
                raise Place(file, number).error(f"found {line[:40]!r}, expected a query's id, a tab and the query")
            yield {"_id": key, "text": text.strip()}
