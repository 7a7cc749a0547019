"""Download data sets of the Hugging Face Hub into the cache, and read the rows of their files.

The name of a data set is
``hub:owner/name[@revision][:configuration][:split][?query=COLUMN&pos=COLUMN&neg=COLUMN,COLUMN]``.
The part after the question mark names the columns to read as query, pos, neg and query_id; a column
name contains %26 for & and %2C for a comma. A local folder or file may replace ``owner/name``.

The library ``datasets`` finds the files of a configuration. contaccum reads JSON files itself,
because ``datasets`` converts texts such as 2020-01-01 to dates.
"""

import json
import os
import re
import warnings
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, starmap
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from datasets import (
    DatasetBuilder,
    Features,
    Value,
    get_dataset_config_names,
    load_dataset,
    load_dataset_builder,
)
from datasets.exceptions import DatasetsError
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError
from yaml import YAMLError

from contaccum.catalog import HUB_PREFIX
from contaccum.errors import InputError, in_one_line, library_errors
from contaccum.formats.json_records import Record, id_field, json_records, string_field, title_field
from contaccum.formats.readers import grade_of, kind_of_record, quoted_column
from contaccum.formats.records import (
    READER_VERSION,
    RowLocation,
    SourceLocation,
    numbered_lines,
    write_beir_folder,
)
from contaccum.formats.training import known_fields
from contaccum.runtime.cache import cached_folder, file_key
from contaccum.runtime.files import read_json, write_json
from contaccum.runtime.hub import hub_errors

FIELDS = ("query", "pos", "neg", "query_id")
FAILURES: tuple[Any, ...] = (
    *(
        OSError,
        ValueError,
        RuntimeError,
        TypeError,
        KeyError,
        AttributeError,
        YAMLError,
        DatasetsError,
    ),
    *HfHubHTTPError.__bases__,  # without a connection, the error is one of these
)
"""Errors that can occur while a data set is loaded. ``datasets`` raises RuntimeError if the data
set has a loading script."""
LABELS = "labelled_0.json"  # number of rows with label 0, next to examples.jsonl
Rows = Iterable[tuple[SourceLocation, Record]]
"""Rows of a file: pairs of the location (for error messages) and the record."""
_UNREADABLE = (OSError, ValueError, RuntimeError, DatasetsError, EOFError, TypeError, zlib.error)
"""Errors that a damaged file causes. EOFError and zlib.error come from a damaged gzip file."""
_FORMATS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv", ".tsv": "csv"}
"""File ending -> format. The file may also be gzipped (such as .jsonl.gz)."""
_NAME = re.compile(
    r"(?P<repository>[^:?@]*)(@(?P<revision>[^:?]+))?"
    r"(:(?P<configuration>[^:?]*))?(:(?P<split>[^:?]+))?"
)
_REMOTE = re.compile(r"hf://datasets/(?P<repository>[^@]+)@(?P<commit>[^/]+)/(?P<path>.+)")


@dataclass(frozen=True)
class HubName:
    """Parts of the name of a Hub data set, and methods that find and download its files."""

    text: str  # the complete name
    repository: str  # owner/name, or the path of a local folder or file
    revision: str | None = None
    configuration: str | None = None
    split: str | None = None
    # our field -> columns; empty: the name maps no columns
    columns: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, text: str) -> "HubName":
        """Divide a name into parts. Raise InputError if the name is invalid."""
        name, question_mark, mapping = text.removeprefix(HUB_PREFIX).partition("?")
        columns: dict[str, list[str]] = {}
        for pair in mapping.split("&") if question_mark else []:
            key, _, value = pair.partition("=")
            if key not in FIELDS or key in columns or not value:
                raise InputError(
                    f"{text}: found {pair!r}; expected FIELD=COLUMN with each field at most once, "
                    f"where FIELD is one of {', '.join(FIELDS)} (in a column name, write %26 for & "
                    "and %2C for a comma)"
                )
            columns[key] = [unquote(column) for column in value.split(",")]
        # the longest beginning that is a path, which may contain @ and :, such as
        # /home/user@domain
        path = ""
        for end in re.finditer("[@:]|$", name):
            if os.path.exists(name[: end.start()]):
                path = name[: end.start()]
        parts = _NAME.fullmatch(name, len(path))
        repository = path or (parts["repository"] if parts else "")
        lacks_columns = question_mark and not {"query", "pos"} <= columns.keys()
        if parts is None or not repository or lacks_columns:
            raise InputError(
                f"{text}: not the name of a Hub data set, a local folder or a file; expected "
                "hub:owner/name[@revision][:configuration][:split][?query=COLUMN&pos=COLUMN]"
            )
        # an empty one, as in hub:owner/name::split, is the default
        configuration = parts["configuration"] or None
        return cls(text, repository, parts["revision"], configuration, parts["split"], columns)

    def builder(self, configuration: str | None) -> DatasetBuilder:
        """Return the ``datasets`` builder of a configuration. The builder lists the files."""
        try:
            with self.available():
                return load_dataset_builder(self.repository, configuration, revision=self.revision)
        except InputError as error:
            # without a name, datasets raises ValueError if there are several
            found = []
            if configuration is None and isinstance(error.__cause__, ValueError):
                found = self.configurations()
            if len(found) < 2:
                raise
            raise InputError(
                f"{self.text}: has the configurations {', '.join(found)}; choose one, such as "
                f"{HUB_PREFIX}{self.repository}:{found[0]}"
            ) from error

    def rows(self, files: Iterable[str]) -> Rows:
        """Read the rows of files. A file that is an address on the Hub is downloaded first."""
        return chain.from_iterable(file_rows(self._fetch(file)) for file in files)

    def _fetch(self, file: str) -> str:
        if not (remote := _REMOTE.fullmatch(file)):
            return file
        repository, commit, path = remote.groups()
        with self.available():
            return str(hf_hub_download(repository, path, repo_type="dataset", revision=commit))

    def configurations(self) -> list[str]:
        with self.available():
            return get_dataset_config_names(self.repository, revision=self.revision)

    def local_files(self) -> list[str]:
        """Return the file, or the files of a folder whose endings are in capitals.

        ``datasets`` finds the files of other folders; it knows only endings such as .csv.
        """
        if os.path.isfile(self.repository):
            return [self.repository]
        names = os.listdir(self.repository) if os.path.isdir(self.repository) else []
        endings = {name: Path(name.removesuffix(".gz")).suffix for name in sorted(names)}
        if any(ending in _FORMATS for ending in endings.values()):
            return []
        return [
            str(Path(self.repository, name))
            for name, ending in endings.items()
            if ending.lower() in _FORMATS
        ]

    def is_retrieval_set(self) -> bool:
        """Return True for a corpus with queries, False for training examples."""
        if self.configuration is not None or self.columns or self.local_files():
            return False
        found = set(self.configurations())
        return set(retrieval_parts(found)[:2]) <= found

    def available(self) -> AbstractContextManager[None]:
        """Return a context that converts errors of loading the data set to InputError."""
        if os.path.isdir(self.repository):
            return library_errors(f"{self.text}: cannot be loaded", *FAILURES)
        return hub_errors(f"{self.text}: cannot be loaded from the Hub", *FAILURES)


def files_by_split(builder: DatasetBuilder) -> dict[str, list[str]]:
    """Return the files of each split.

    A file is a local path, or an address on the Hub that names a commit.
    """
    return {str(split): list(paths) for split, paths in (builder.config.data_files or {}).items()}


def split_files(
    name: HubName, builder: DatasetBuilder, split: str, only: bool = False
) -> list[str]:
    """Return the files of a split. Raise InputError if there is no such split.

    only: if True and the data set has only one split, return the files of that split, whatever its
    name.
    """
    found = files_by_split(builder)
    if split not in found and not (only and len(found) == 1):
        raise InputError(f"{name.text}: split {split!r} not found; available: {', '.join(found)}")
    return found[split] if split in found else next(iter(found.values()))


def _key(files: list[str]) -> list[Any]:
    """Return a cache key that changes if a file changes.

    It has the address of a Hub file, or path, size and time of a local file.
    """
    return [file if _REMOTE.fullmatch(file) else file_key(Path(file)) for file in files]


def fetch_hub(text: str, split: str) -> Path:
    """Download a Hub data set, and return the path of a local copy in one of our formats.

    A data set with the configurations ``corpus`` and ``queries`` (as in NanoBEIR and MTEB) becomes
    a BEIR folder. The judgements come from the configuration ``default`` or ``qrels``. Any other
    data set becomes a file of training examples. If ``text`` names a configuration or columns
    (``?query=...``), the result is always a file of training examples. If ``text`` names no
    columns, the columns of the data set must have the field names of one of our formats.

    text: ``hub:`` name of the data set. split: split of the examples or judgements, used if
    ``text`` names no split.
    """
    name = HubName.of(text)
    if name.is_retrieval_set():
        return _retrieval_folder(name, split)
    files = name.local_files()
    if not files:
        files = split_files(name, name.builder(name.configuration), name.split or split)

    def write(folder: Path) -> None:
        labelled_0 = 0
        with open(folder / "examples.jsonl", "w", encoding="utf-8", newline="\n") as file:
            for number, (_, row) in enumerate(name.rows(files), 1):
                if number == 1 and not name.columns:
                    # raises an error if no format has these fields
                    kind_of_record(row, RowLocation(Path(text), 1))
                labelled_0 += str(row.get("label")) in ("0", "0.0", "False")
                record = _mapped(name, row, number) if name.columns else known_fields(row)
                try:
                    line = json.dumps(record, ensure_ascii=False)
                except TypeError as error:
                    raise InputError(
                        f"{text}, row {number}: {error}; only texts and numbers are allowed"
                    ) from error
                file.write(f"{line}\n")
        write_json(folder / LABELS, labelled_0)

    key = [READER_VERSION, name.repository, name.configuration, name.columns, _key(files)]
    folder = cached_folder("hub", key, write)
    if labelled_0 := read_json(folder / LABELS, int):
        warnings.warn(
            f"{text}: {labelled_0} rows have label 0, but the column label is not read, and every "
            "row is a positive pair. If 0 means not relevant, remove these rows.",
            stacklevel=2,
        )
    return folder / "examples.jsonl"


def _mapped(name: HubName, row: Record, number: int) -> Record:
    """Return a row as a record with our field names. number: number of the row, for error messages.

    A column has a text or a list of texts; empty texts are removed.
    """
    where = f"{name.text}, row {number}"
    record: Record = {"neg": []}
    for key, columns in name.columns.items():
        texts: list[str] = []
        for column in columns:
            if column not in row:
                raise InputError(
                    f"{where}: column {column!r} not found; available: "
                    f"{', '.join(map(quoted_column, row))}"
                )
            value = row[column]
            for text in value if isinstance(value, list) else [value]:
                if text is None or text == "":
                    continue
                if type(text) is int:  # not bool
                    text = str(text)
                if not isinstance(text, str):
                    raise InputError(
                        f"{where}: column {column!r} has a {type(text).__name__}; expected a text "
                        "or a list of texts"
                    )
                texts.append(text)
        if key in ("query", "query_id"):
            if len(texts) > 1:
                raise InputError(
                    f"{where}: found {len(texts)} values for {key}; expected exactly one"
                )
            record[key] = "".join(texts)  # the reader rejects an empty text
        else:
            record[key] = texts
    return record


def retrieval_parts(found: Collection[str], prefix: str = "") -> tuple[str, str, str]:
    """Return the configurations of the corpus, the queries and the judgements, chosen as in MTEB.

    found: names of all configurations of the data set. prefix: for a subset, the start of its
    configuration names, such as ``sw-``. A returned name may be missing in ``found``; the caller
    must check. Source: ``_load_qrels`` and ``_load_queries`` of
    mteb/abstasks/retrieval_dataset_loaders.py, mteb 2.26.24.
    """
    queries = "query" if "query" in found else f"{prefix}queries"
    judgements = "default" if not prefix and "default" in found else f"{prefix}qrels"
    return f"{prefix}corpus", queries, judgements


def _retrieval_folder(name: HubName, split: str) -> Path:
    configurations = name.configurations()
    wanted = retrieval_parts(configurations)
    if wanted[-1] not in configurations:
        raise InputError(
            f"{name.text}: has a corpus and queries, but no judgements; expected a configuration "
            "named default or qrels"
        )
    corpus = split_files(name, name.builder(wanted[0]), name.split or "corpus", True)
    queries = split_files(name, name.builder(wanted[1]), name.split or "queries", True)
    grades = split_files(name, name.builder(wanted[2]), name.split or split, True)

    def write(folder: Path) -> None:
        beir_from_rows(
            folder, name.text, name.rows(corpus), name.rows(queries), {split: name.rows(grades)}
        )

    return cached_folder(
        "hub",
        [READER_VERSION, name.repository, split, _key(corpus), _key(queries), _key(grades)],
        write,
    )


def file_rows(file: str) -> Rows:
    """Read the rows of a local file."""
    ending = Path(file.lower().removesuffix(".gz")).suffix
    if ending not in _FORMATS:
        raise InputError(f"{file}: unknown file ending; expected one of {', '.join(_FORMATS)}")
    if _FORMATS[ending] == "json":
        return json_records(Path(file), "a row (an object)", lambda record, *_: record)
    return numbered(Path(file), _table_rows(file, ending))


def _table_rows(file: str, ending: str) -> Iterator[Record]:
    load = partial(load_dataset, _FORMATS[ending], data_files=[file], split="train", streaming=True)
    if _FORMATS[ending] == "parquet":
        load = partial(load, batch_size=256)  # rows in memory; the default is a whole row group
    else:  # with these options, pandas reads 007 and NA as texts
        load = partial(load, sep="\t" if ending == ".tsv" else ",", na_filter=False)
        first: Record = next(iter(load()), {})
        if (
            "__index_level_0__" in first
        ):  # for pandas, the first of three cells under two names is an index
            raise ValueError(
                "row 1 has more cells than the header; a cell that contains the separator needs "
                "quotes"
            )
        load = partial(load, features=Features(dict.fromkeys(first, Value("string"))))
    yield from load()


def numbered(path: Path, rows: Iterable[Record]) -> Iterator[tuple[SourceLocation, Record]]:
    """Yield each row with its location; row numbers start at 1.

    Raise InputError if a row cannot be read.
    """
    number = 0
    try:
        for number, row in enumerate(rows, 1):
            yield RowLocation(path, number), row
    except _UNREADABLE as error:
        if isinstance(error, UnicodeDecodeError):
            for _ in numbered_lines(path):  # raises an error with the line and the encoding
                pass
        raise InputError(
            f"{path}: cannot be read after row {number} ({in_one_line(error)}); the file is "
            "probably damaged"
        ) from error


def beir_from_rows(
    folder: Path, name: str, corpus: Rows, queries: Rows, grades: Mapping[str, Rows]
) -> None:
    """Write rows with the column names of MTEB to a BEIR folder.

    name: name of the data set, for error messages. grades: split -> rows of the judgements.
    """
    judged = {split: starmap(_judgement, rows) for split, rows in grades.items()}
    try:
        write_beir_folder(folder, starmap(_passage, corpus), starmap(_query, queries), judged)
    except InputError as error:
        raise InputError(f"{name}: {error}") from error


def _passage(location: SourceLocation, row: Record) -> dict[str, str]:
    return {**_query(location, row), "title": title_field(row, location)}


def _query(location: SourceLocation, row: Record) -> dict[str, str]:
    """Return the id and text of a row.

    In some data sets the column of the id is named ``id`` and contains numbers.
    """
    key = "id" if "id" in row and "_id" not in row else "_id"
    return {"_id": id_field(row, key, location), "text": string_field(row, "text", location)}


def _judgement(location: SourceLocation, row: Record) -> tuple[str, str, int]:
    score = row.get("score", 1)
    text = re.sub(r"\.0+$", "", score if isinstance(score, str) else json.dumps(score, default=str))
    return (
        id_field(row, "query-id", location),
        id_field(row, "corpus-id", location),
        grade_of(text, location),
    )
