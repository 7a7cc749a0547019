"""Data sets of the Hugging Face Hub by name: fetched once, and from then on files like any other.

A name is ``hub:owner/name``, and behind it, each where it is needed: ``@revision``, ``:configuration``, ``:split``, and
``?query=COLUMN&pos=COLUMN&neg=COLUMN,COLUMN`` where the columns have names of their own. A folder on disk may stand in the place
of ``owner/name``: ``datasets`` reads both the same way (JSON, Parquet, CSV).
"""

import json
import re
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import starmap
from pathlib import Path
from typing import Any

from datasets import get_dataset_config_names, load_dataset, load_dataset_builder
from datasets.exceptions import DatasetsError

from contaccum.data.arrow import cached_folder
from contaccum.data.bad_records import BadRecords, Place
from contaccum.data.beir_folder import write_beir_folder
from contaccum.data.formats import grade_of, kind_of_record
from contaccum.data.json_records import Record, id_field, known_fields, string_field, title_field
from contaccum.errors import InputError

Splits = Mapping[str, Any]
"""Data sets of the library by their split, mapped from disk or streamed."""
Rows = Iterable[tuple[Place, Record]]
"""Each row behind its place."""
PREFIX = "hub:"
FIELDS = ("query", "pos", "neg", "query_id")
_FAILURES = (OSError, ValueError, RuntimeError, DatasetsError)
"""What ``datasets`` raises where it cannot give a set; RuntimeError for one that is a script."""
_UNREADABLE = (*_FAILURES, EOFError, TypeError, zlib.error)
"""What reading rows raises where their file is damaged; EOFError and zlib.error for one that is gzipped."""
_NAME = re.compile(r"(?P<repository>[^:?@]+)(@(?P<revision>[^:?]+))?(:(?P<configuration>[^:?]*))?(:(?P<split>[^:?]+))?")


@dataclass(frozen=True)
class HubName:
    """A name taken apart."""

    text: str
    repository: str
    revision: str | None = None
    configuration: str | None = None
    split: str | None = None
    columns: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, text: str) -> "HubName":
        """InputError where it is no such name."""
        name, mark, mapping = text.removeprefix(PREFIX).partition("?")
        found = _NAME.fullmatch(name)
        columns: dict[str, list[str]] = {}
        for pair in mapping.split("&") if mark else []:
            key, _, value = pair.partition("=")
            if key not in FIELDS or not value:
                raise InputError(f"{text}: found {pair!r}, expected FIELD=COLUMN, FIELD one of {', '.join(FIELDS)}")
            columns[key] = value.split(",")
        if found is None or (mark and not {"query", "pos"} <= columns.keys()):
            raise InputError(
                f"{text}: expected hub:owner/name[@revision][:configuration][:split][?query=COLUMN&pos=COLUMN]"
            )
        revision, configuration, split = (found[part] or None for part in ("revision", "configuration", "split"))
        return cls(text, found["repository"], revision, configuration, split, columns)

    def load(self, configuration: str | None, streaming: bool = False) -> Splits:
        """All splits of one configuration; InputError where they cannot be had."""
        try:
            return load_dataset(self.repository, configuration, revision=self.revision, streaming=streaming)
        except _FAILURES as error:
            raise self.unavailable(error) from error

    def version(self) -> str:
        """What tells one state of the set from another: the Hub's commit, or a hash of a folder's files."""
        try:
            builder = load_dataset_builder(self.repository, self.configuration, revision=self.revision)
        except _FAILURES as error:
            raise self.unavailable(error) from error
        return str(builder.hash)

    def configurations(self) -> list[str]:
        try:
            return get_dataset_config_names(self.repository, revision=self.revision)
        except _FAILURES as error:
            raise self.unavailable(error) from error

    def judged(self) -> bool:
        """Whether it is a set of corpus, queries and judgements."""
        if self.configuration is not None or self.columns:
            return False
        found = set(self.configurations())
        return set(retrieval_parts(found)[:2]) <= found

    def unavailable(self, error: Exception) -> InputError:
        reason = " ".join(str(error).split())[:200]
        return InputError(f"{self.text}: could not be loaded from the Hub ({reason})")


def fetch_hub(text: str, split: str) -> Path:
    """Where a set by its name now lies: a file of examples, or a BEIR folder with the judgements of ``split``.

    A set with the configurations ``corpus`` and ``queries``, and ``default`` or ``qrels`` for the judgements, is a BEIR folder
    (NanoBEIR, MTEB's retrieval sets). Any other holds examples: its columns are those of one of our files (query, pos, neg; or
    Tevatron's; or DPR's) or those that the name says. The name's own split goes before ``split``. Raises InputError.
    """
    name = HubName.of(text)
    if name.judged():
        return _retrieval_folder(name, split)
    rows = _split_of(name, name.load(name.configuration), name.split or split)
    key = [name.repository, name.configuration, name.columns, rows._fingerprint]  # it follows the content's version

    def write(folder: Path) -> None:
        with open(folder / "examples.jsonl", "w", encoding="utf-8", newline="\n") as file:
            file.writelines(f"{line}\n" for _, line in _lines(name, rows, rows.column_names))

    if not name.columns:
        kind_of_record(dict.fromkeys(rows.column_names), Place(Path(text), 1))
    return cached_folder("hub", key, write) / "examples.jsonl"


class HubLines:
    """The examples of a set of the Hub as the lines of a file, read over the network as they are asked for."""

    def __init__(self, text: str, split: str) -> None:
        """As ``fetch_hub``; InputError also for a set of corpus, queries and judgements, which have to be joined."""
        self._name = HubName.of(text)
        if self._name.judged():
            raise InputError(
                f"{text}: holds corpus, queries and judgements, expected examples: data.streaming joins nothing"
            )
        self._rows = _split_of(self._name, self._name.load(self._name.configuration, True), self._name.split or split)
        self.path = Path(text)
        """What errors name."""

    def version(self) -> str:
        """See HubName."""
        return self._name.version()

    def columns(self) -> list[str]:
        """The fields of each line's record; InputError where there is no line."""
        if self._name.columns:
            return list(self._name.columns)
        if first := self._first():
            return list(first)
        raise InputError(f"{self._name.text}: is empty, expected at least one example")

    def lines(self, bad: BadRecords) -> Iterator[tuple[int, str]]:
        """Every row, numbered from 1; InputError where one cannot be had."""
        try:
            found = list(self._first()) if self._name.columns else []
            for number, line in _lines(self._name, self._rows, found):
                bad.reading(Place(self.path, number), line)
                yield number, line
        except InputError:
            raise
        except _FAILURES as error:
            raise self._name.unavailable(error) from error

    def _first(self) -> Record:
        try:
            return next(iter(self._rows), {})
        except _FAILURES as error:
            raise self._name.unavailable(error) from error


def _lines(name: HubName, rows: Iterable[Record], found: list[str]) -> Iterator[tuple[int, str]]:
    """Rows, numbered from 1, as lines with the fields that readers know: others may hold what JSON cannot, dates and pictures."""
    records = _mapped(name, rows, found) if name.columns else map(known_fields, rows)
    for number, record in enumerate(records, 1):
        try:
            line = json.dumps(record, ensure_ascii=False)
        except TypeError as error:
            raise InputError(f"{name.text}, row {number}: {error}, expected texts and numbers") from error
        yield number, line


def _split_of(name: HubName, found: Splits, split: str, only: bool = False) -> Any:
    """A split; with ``only``, the one that there is where it has another name."""
    if split in found:
        return found[split]
    if only and len(found) == 1:
        return next(iter(found.values()))
    raise InputError(f"{name.text}: holds no split {split!r}, found {', '.join(map(str, found))}")


def _mapped(name: HubName, rows: Iterable[dict[str, Any]], found: list[str]) -> Iterator[dict[str, Any]]:
    """Rows with our fields; a text stands as it is or in a list, and an empty or absent negative is none."""
    wanted = [column for columns in name.columns.values() for column in columns]
    if missing := [column for column in wanted if column not in found]:
        raise InputError(f"{name.text}: holds no column {missing[0]!r}, found {', '.join(found)}")
    for number, row in enumerate(rows, 1):
        texts = {
            key: [t for column in columns for t in _texts(name, number, column, row[column])]
            for key, columns in name.columns.items()
        }
        record: dict[str, Any] = {"pos": texts["pos"], "neg": texts.get("neg", [])}
        for key in ("query", "query_id"):
            if key in texts:
                if len(texts[key]) != 1:
                    raise InputError(
                        f"{name.text}, row {number}: found {len(texts[key])} values for {key}, expected one"
                    )
                record[key] = texts[key][0]
        yield record


def _texts(name: HubName, number: int, column: str, value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    kept = [
        each if isinstance(each, str) else str(each) if isinstance(each, int) else each
        for each in values
        if each not in (None, "")
    ]
    if not all(isinstance(each, str) for each in kept):
        raise InputError(
            f"{name.text}, row {number}: column {column!r} holds {type(value).__name__}, expected text or texts"
        )
    return kept


def retrieval_parts(found: Collection[str], prefix: str = "") -> tuple[str, str, str]:
    """The names of the configurations with corpus, queries and judgements, of those ``found``, as MTEB's loader chooses.

    Judgements are in ``default``, or where there is none in ``qrels``; those of a subset, whose configurations begin with
    ``prefix``, in its own ``qrels``. A configuration ``query`` goes before any other with queries. What is chosen may be missing.
    (Source: ``_load_qrels`` and ``_load_queries`` of mteb/abstasks/retrieval_dataset_loaders.py, mteb 2.26.24.)
    """
    queries = "query" if "query" in found else f"{prefix}queries"
    judgements = "default" if not prefix and "default" in found else f"{prefix}qrels"
    return f"{prefix}corpus", queries, judgements


def _retrieval_folder(name: HubName, split: str) -> Path:
    configurations = name.configurations()
    wanted = retrieval_parts(configurations)
    if wanted[-1] not in configurations:
        raise InputError(f"{name.text}: holds corpus and queries, but no configuration default or qrels for judgements")
    parts = [name.load(each) for each in wanted]
    splits = (name.split or "corpus", name.split or "queries", name.split or split)
    corpus, queries, grades = (_split_of(name, part, each, only=True) for part, each in zip(parts, splits, strict=True))
    key = [name.repository, split, *(part._fingerprint for part in (corpus, queries, grades))]

    def write(folder: Path) -> None:
        read = [placed(Path(each), rows) for each, rows in zip(wanted, (corpus, queries, grades), strict=True)]
        write_retrieval_rows(folder, name.text, read[0], read[1], {split: read[2]})

    return cached_folder("hub", key, write)


class _Row(Place):
    """The place of a row of a table, ``path`` being what the table is called."""

    def __str__(self) -> str:
        return f"{self.path}, row {self.line}"


def placed(path: Path, rows: Iterable[Record]) -> Rows:
    """The rows of a table, from 1; InputError where one cannot be read."""
    number = 0
    try:
        for number, row in enumerate(rows, 1):
            yield _Row(path, number), row
    except _UNREADABLE as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise InputError(
            f"{path}: could not be read behind row {number} ({reason}), expected a table without damage"
        ) from error


def write_retrieval_rows(folder: Path, name: str, corpus: Rows, queries: Rows, grades: Mapping[str, Rows]) -> None:
    """A BEIR folder of rows in MTEB's layout, judgements by split; ``name`` stands before the sentence of an InputError."""
    judged = {split: starmap(_judgement, rows) for split, rows in grades.items()}
    try:
        write_beir_folder(folder, starmap(_passage, corpus), starmap(_query, queries), judged)
    except InputError as error:
        raise InputError(f"{name}: {error}") from error


def _passage(place: Place, row: Record) -> dict[str, str]:
    return {**_query(place, row), "title": title_field(row, place)}


def _query(place: Place, row: Record) -> dict[str, str]:
    """A row of queries, whose id some sets call ``id``, and give as a number."""
    key = "id" if "id" in row and "_id" not in row else "_id"
    return {"_id": id_field(row, key, place), "text": string_field(row, "text", place)}


def _judgement(place: Place, row: Record) -> tuple[str, str, int]:
    score = row.get("score", 1)
    if isinstance(score, float) and score.is_integer():
        score = int(score)
    text = score if isinstance(score, str) else json.dumps(score, default=str)
    return id_field(row, "query-id", place), id_field(row, "corpus-id", place), grade_of(text, place)
