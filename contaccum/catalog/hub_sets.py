"""Download data sets of the Hugging Face Hub into the cache, and read the rows of their files.

The name of a data set is
``hub:owner/name[@revision][:configuration][:split][?query=COLUMN&pos=COLUMN&neg=COLUMN,COLUMN]``.
The part after the question mark names the columns to read as one of FIELDS; a column name contains
%26 for & and %2C for a comma. A local folder or file may replace ``owner/name``.

The library ``datasets`` finds the files of a configuration. contaccum reads JSON files itself,
because ``datasets`` converts texts such as 2020-01-01 to dates.
"""

import os
import re
import warnings
from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, starmap
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

import msgspec
from datasets import get_dataset_config_names, load_dataset_builder
from datasets.data_files import FILES_TO_IGNORE
from huggingface_hub import hf_hub_download
from pyarrow.parquet import ParquetFile  # type: ignore[import-untyped]

from contaccum.catalog import HUB_PREFIX
from contaccum.errors import MOST_ERRORS, InputError, joined_errors, library_errors
from contaccum.formats.dpr import rows_of_cells
from contaccum.formats.json_records import json_records
from contaccum.formats.readers import (
    FIRST_RECORDS,
    LABEL_NAMES,
    Key,
    TextRecord,
    grade_of,
    is_low,
    kind_of_record,
    label_of,
    unread_negatives,
)
from contaccum.formats.records import (
    READER_VERSION,
    SourceLocation,
    is_blank,
    record_line,
    write_beir_folder,
)
from contaccum.formats.training import FORMATS
from contaccum.runtime.cache import cached_folder, file_key
from contaccum.runtime.files import read_json, write_json
from contaccum.runtime.hub import hub_errors
from contaccum.runtime.units import counted

# pos_id and title: ids and titles of the passages of pos
FIELDS = ("query", "pos", "neg", "query_id", "pos_id", "title", "label")
PROBLEMS = "problems.json"  # sentences about columns that are not read, next to examples.jsonl
Row = dict[str, Any]
Rows = Iterable[tuple[SourceLocation, Row]]
"""Rows of a file: pairs of the location (for error messages) and the row."""
Typed = TypeVar("Typed")
_ENDINGS = (".parquet", ".jsonl", ".json", ".csv", ".tsv")  # also gzipped (such as .jsonl.gz)
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
        name = os.path.expanduser(name)
        columns: dict[str, list[str]] = {}
        for pair in mapping.split("&") if question_mark else []:
            key, _, value = pair.partition("=")
            several = key in columns or (key == "label" and "," in value)
            if key not in FIELDS or not value or several:
                raise InputError(
                    f"{text}: found {pair!r}; expected FIELD=COLUMN, where FIELD is one of "
                    f"{', '.join(FIELDS)}, each once (in a column name, write %26 for & and %2C "
                    "for a comma)"
                )
            columns[key] = [unquote(column) for column in value.split(",")]
        if {"title", "neg"} <= columns.keys():
            raise InputError(
                f"{text}: title names the titles of pos only, so positives would have a title and "
                "negatives none; leave out title or neg"
            )
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
        # a name on the Hub may end like a file, but is not in a local folder
        in_folder = _ending(repository.lower()) in _ENDINGS and Path(repository).parent.is_dir()
        if not path and (repository.startswith((".", "/")) or in_folder):
            raise InputError(f"{text}: {repository} not found; expected a file or a folder")
        if path and parts["revision"]:
            raise InputError(
                f"{text}: {path} is a path and has no revision; leave out @{parts['revision']}"
            )
        # an empty one, as in hub:owner/name::split, is the default
        configuration = parts["configuration"] or None
        return cls(text, repository, parts["revision"], configuration, parts["split"], columns)

    def files(self, configuration: str | None) -> dict[str, list[str]]:
        """Return the files of each split, which the ``datasets`` builder lists.

        A file is a local path, or an address on the Hub that names a commit.
        """
        with self.available():
            builder = load_dataset_builder(self.repository, configuration, revision=self.revision)
        files = builder.config.data_files or {}
        return {str(split): list(paths) for split, paths in files.items()}

    def refuse_unread_files(self, splits: Mapping[str, list[str]]) -> None:
        """Raise InputError if a local folder has a data file that is in none of ``splits``.

        ``datasets`` reads files of only one format, and skips faq.csv next to faq_test.csv. A
        README.md with configurations may leave out files.
        """
        folder = Path(self.repository)
        if not folder.is_dir():
            return
        readme = folder / "README.md"
        if readme.is_file() and "configs:" in readme.read_text("utf-8", errors="replace"):
            return
        files = [os.path.realpath(file) for file in chain.from_iterable(splits.values())]
        folders = {os.path.realpath(folder), *map(os.path.dirname, files)}
        read_endings = {_ending(file.lower()) for file in files}
        for path in sorted(folder.rglob("*")):
            hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
            # other folders may have other files, such as the log of a run
            beside = os.path.dirname(os.path.realpath(path)) in folders
            is_data = _ending(path.name.lower()) in (_ENDINGS if beside else read_endings)
            ignored = path.name in FILES_TO_IGNORE or os.path.realpath(path) in files
            if is_data and not hidden and not ignored:
                read = ", ".join(sorted(map(os.path.basename, files)))
                raise InputError(
                    f"{self.text}: {path} would not be read, only {read}; the files of a folder "
                    "need one format, endings in lower case and, for several splits, names such as "
                    "train.csv and test.csv. Move the file, or give one file after hub:."
                )

    def rows(self, files: Iterable[str]) -> Rows:
        """Read the rows of files. A file that is an address on the Hub is downloaded first."""
        for file in files:
            if remote := _REMOTE.fullmatch(file):
                name, commit, path = remote.groups()
                with self.available():
                    file = hf_hub_download(name, path, repo_type="dataset", revision=commit)
            yield from file_rows(Path(file))

    def configurations(self) -> list[str]:
        with self.available():
            return get_dataset_config_names(self.repository, revision=self.revision)

    def is_retrieval_set(self) -> bool:
        """Return True for a corpus with queries, False for training examples."""
        if self.configuration is not None or self.columns or os.path.isfile(self.repository):
            return False
        found = set(self.configurations())
        return set(retrieval_parts(found)[:2]) <= found

    def unread_splits(self, split: str) -> list[str]:
        """Return the splits of training examples that are not read if the name has no split.

        split: split that is read.
        """
        if self.split or os.path.isfile(self.repository) or self.is_retrieval_set():
            return []
        return [other for other in self.files(self.configuration) if other != split]

    def available(self) -> AbstractContextManager[None]:
        """Return a context that converts errors of loading the data set to InputError."""
        if os.path.isdir(self.repository):
            return library_errors(f"{self.text}: cannot be loaded", Exception)
        return hub_errors(f"{self.text}: cannot be loaded from the Hub", Exception)


def _ending(name: str) -> str:
    return Path(name.removesuffix(".gz")).suffix


def _key(files: Iterable[str]) -> list[Any]:
    """Return a cache key that changes if a file changes.

    It has the address of a Hub file, or path, size and time of a local file.
    """
    return [file if _REMOTE.fullmatch(file) else file_key(Path(file)) for file in files]


def fetch_hub(name: HubName, split: str) -> Path:
    """Download a Hub data set, and return the path of a local copy in one of our formats.

    A data set with the configurations ``corpus`` and ``queries`` (as in NanoBEIR and MTEB) becomes
    a BEIR folder. The judgements come from the configuration ``default`` or ``qrels``. Any other
    data set becomes a file of training examples. If the name has a configuration or columns
    (``?query=...``), the result is always a file of training examples. If it has no columns, the
    columns of the data set must have the field names of one of our formats.

    split: split of the examples or judgements, used if the name has none.
    """
    if name.is_retrieval_set():
        return _retrieval_folder(name, split)
    if os.path.isfile(name.repository):
        files = [name.repository]
    else:
        split = name.split or split
        found = name.files(name.configuration)
        name.refuse_unread_files(found)
        if split not in found:
            hint = ""
            if found:
                example = next((each for each in found if each != "train"), "train")
                hint = f". Name the split to use, as in hub:NAME::{example}?query=COLUMN"
            raise InputError(
                f"{name.text}: split {split!r} not found; available: {', '.join(found)}{hint}"
            )
        files = found[split]

    key = [READER_VERSION, name.repository, name.configuration, name.columns, _key(files)]
    folder = cached_folder("hub", key, partial(_write_examples, name, files))
    for problem in read_json(folder / PROBLEMS, list[str]):
        warnings.warn(f"{name.text}: {problem}", stacklevel=2)
    return folder / "examples.jsonl"


def _write_examples(name: HubName, files: list[str], folder: Path) -> None:
    """Write the rows of ``files`` to examples.jsonl, and sentences about them to PROBLEMS.

    Raises InputError with the first errors if rows are invalid.
    """
    number = 0  # of the current row
    irrelevant = 0  # number of rows with a low label or score
    without_query: list[SourceLocation] = []  # rows
    unread: dict[str, None] = {}  # columns of the first rows that look like hard negatives
    form = None
    wrong = 0  # number of invalid rows
    errors: list[InputError] = []  # of the first of them
    with open(folder / "examples.jsonl", "wb") as file:
        for number, (location, row) in enumerate(_located_rows(name, files), 1):
            if "label" not in name.columns:
                irrelevant += any(is_low(row.get(column)) for column in LABEL_NAMES)
            if not name.columns:
                form = form or FORMATS[kind_of_record(row, location) or "jsonl"]
            try:
                if form is None:
                    record: object = _mapped(name, row, location)
                    if record is None:
                        without_query.append(location)
                        continue
                else:
                    record = _typed(location, row, form)
                    if number <= FIRST_RECORDS:
                        unread |= dict.fromkeys(unread_negatives(row, form))
            except InputError as error:
                wrong += 1
                if wrong <= MOST_ERRORS:  # a table may have millions of them
                    errors.append(error.with_traceback(None))
            else:
                file.write(record_line(record))
    if errors:
        raise joined_errors(errors, name.text, wrong)
    if not number:
        raise InputError(f"{name.text}: has no rows; it needs at least one")
    problems = []
    if without_query:
        problems.append(
            f"skipped {counted(len(without_query), 'row')} without a query (the first: "
            f"{without_query[0]})"
        )
    if unread:
        columns = ",".join(unread)
        problems.append(
            f"column {columns} not read; to use hard negatives, name all columns, as in "
            f"hub:NAME?query=COLUMN&pos=COLUMN&neg={columns}"
        )
    if irrelevant:
        problems.append(
            f"{counted(irrelevant, 'row')} with a label or score below 0.5, which count as "
            "positive pairs. If a low value means not relevant, add &label=COLUMN to the "
            "name, which makes these passages hard negatives."
        )
    write_json(folder / PROBLEMS, problems)


def _located_rows(name: HubName, files: list[str]) -> Rows:
    """Yield the rows of ``files`` with locations for messages.

    A JSON object may lack a column. Raises InputError for one that all of the first FIRST_RECORDS
    rows lack.
    """
    is_local = os.path.exists(name.repository)
    lacking = dict.fromkeys(chain.from_iterable(name.columns.values()))
    available: dict[str, None] = {}
    first: SourceLocation | None = None
    for number, (place, row) in enumerate(name.rows(files), 1):
        # the rows of a Parquet file have no lines, and a file of the Hub is in a cache
        has_line = is_local and place.line > 0
        location = place if has_line else SourceLocation(Path(name.text), 0, number)
        if lacking:
            first = first or location
            available |= dict.fromkeys(row)
            lacking = {column: None for column in lacking if column not in row}
            if number == FIRST_RECORDS:
                break
        yield location, row
    if lacking and first:
        names = ", ".join(map(repr, available))
        raise first.error(f"column {next(iter(lacking))!r} not found; available: {names}")


def _mapped(name: HubName, row: Row, location: SourceLocation) -> Row | None:
    """Return a row as a record of Tevatron's form, or None if it has no query.

    A column has a text or a list of texts. A JSON object may lack it, which is an empty text; empty
    texts are removed. If the label is below 0.5, the passages of ``pos`` are negatives; the reader
    joins the rows of a query.
    """
    values = {
        key: [text for column in columns for text in _texts(column, row.get(column), location)]
        for key, columns in name.columns.items()
        if key != "label"
    }
    record: Row = {}
    for key in ("query", "query_id"):
        texts = list(filter(None, values.get(key, [])))
        if len(texts) == 1:
            record[key] = texts[0]
        elif texts:
            raise location.error(f"found {len(texts)} values for {key}; expected one")
        elif key == "query":
            return None
    positives = [{"text": text} for text in values["pos"]]
    for key, name_in_record in (("pos_id", "docid"), ("title", "title")):
        if key not in values or not positives:
            continue
        if len(values[key]) != len(positives):
            raise location.error(
                f"found {counted(len(values[key]), 'value')} for {key} but "
                f"{counted(len(positives), 'text')} for pos; each text needs one"
            )
        for passage, value in zip(positives, values[key], strict=True):
            passage[name_in_record] = value
    positives = [passage for passage in positives if passage["text"]]
    negatives = [{"text": text} for text in values.get("neg", []) if text]
    if labels := name.columns.get("label"):
        label = row.get(labels[0])
        try:
            is_positive = label_of(label) >= 0.5
        except (TypeError, ValueError):
            raise location.error(
                f"column {labels[0]!r} has {label!r}; expected a number: with at least 0.5, the "
                "passage is a positive, else a hard negative"
            ) from None
        if not is_positive:
            positives, negatives = [], [*positives, *negatives]
    return {**record, "positive_passages": positives, "negative_passages": negatives}


def _texts(column: str, value: object, location: SourceLocation) -> list[str]:
    """Return the text or texts of a cell. A missing text and white space are empty."""
    texts = value if isinstance(value, list) else [value]
    for text in texts:
        if type(text) not in (str, int, type(None)):  # bool is no int here
            raise location.error(
                f"column {column!r} has a {type(text).__name__}; expected a text or a list of texts"
            )
    return ["" if text is None or is_blank(str(text)) else str(text) for text in texts]


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


Parts = dict[str, dict[str, list[str]]]
"""Files of a retrieval set: corpus, queries or grades -> split -> files."""


def retrieval_files(name: HubName, prefix: str = "") -> Parts:
    """Return the files of a retrieval set. prefix: see ``retrieval_parts``."""
    found = name.configurations()
    parts = {}
    for part, configuration in zip(
        ("corpus", "queries", "grades"), retrieval_parts(found, prefix), strict=True
    ):
        if configuration not in found:
            raise InputError(
                f"{name.text}: configuration {configuration!r} not found; available: "
                f"{', '.join(found)}"
            )
        parts[part] = name.files(configuration)
    return parts


def _retrieval_folder(name: HubName, split: str) -> Path:
    parts = retrieval_files(name)
    splits = {split: name.split or split}
    if not name.split and len(parts["corpus"]) == 1:
        splits = judged_splits(name, parts)
    files = chain.from_iterable(chain.from_iterable(part.values()) for part in parts.values())
    return cached_folder(
        "hub",
        [READER_VERSION, name.repository, splits, _key(files)],
        partial(write_retrieval_set, name, parts, splits),
    )


def judged_splits(name: HubName, parts: Parts) -> dict[str, str]:
    """Return the splits that have judgements and queries, as ``write_retrieval_set`` needs them."""
    grades, queries = parts["grades"], parts["queries"]
    splits = {split: split for split in grades if len(queries) == 1 or split in queries}
    if not splits:
        raise InputError(
            f"{name.text}: no split has both queries and judgements. Splits with only queries: "
            f"{', '.join(queries)}. Splits with only judgements: {', '.join(grades)}."
        )
    return splits


def write_retrieval_set(
    name: HubName, parts: Parts, splits: Mapping[str, str], folder: Path
) -> None:
    """Write rows with the column names of MTEB to a BEIR folder.

    splits: name of each split in the folder -> its name in ``parts``. If the corpus or the queries
    have only one split, all judgements belong to it, as in MTEB.
    """

    def files_of(part: str, split: str) -> list[str]:
        files = parts[part]
        if split not in files and (len(files) > 1 or part == "grades"):
            raise InputError(
                f"{name.text}: split {split!r} not found; available: {', '.join(files)}"
            )
        return files.get(split) or next(iter(files.values()))

    sources = splits.values()
    corpus = name.rows(files_of("corpus", next(iter(sources))))
    queries: dict[str, Any] = {}
    for files in dict.fromkeys(tuple(files_of("queries", split)) for split in sources):
        # of several queries with the same id, the last is used, as in a BEIR folder
        found = {row["_id"]: row for row in starmap(_query, name.rows(files))}
        for key, row in found.items():
            if queries.setdefault(key, row)["text"] != row["text"]:
                raise InputError(
                    f"{name.text}: the query id {key!r} has different texts in two splits, so only "
                    f"one split can be read, such as hub:{name.repository}::test"
                )
        queries |= found
    judged = {
        split: starmap(_judgement, name.rows(files_of("grades", source)))
        for split, source in splits.items()
    }
    write_beir_folder(folder, starmap(_passage, corpus), queries.values(), judged)


def file_rows(path: Path) -> Rows:
    """Yield the location and the columns of each row of a local file.

    All cells of a CSV or TSV file are texts.
    """
    ending = _ending(path.name.lower())
    if ending in (".jsonl", ".json"):
        yield from json_records(path, Row, "a row (an object)")
    elif ending in (".csv", ".tsv"):
        separator = "," if ending == ".csv" else "\t"
        _, header = next(rows_of_cells(path, separator), (None, []))
        # spreadsheets in countries with a decimal comma
        if ending == ".csv" and len(header) == 1 and ";" in header[0]:
            separator = ";"
        rows = rows_of_cells(path, separator)
        _, header = next(rows, (None, []))
        if not header:
            raise InputError(f"{path}: is empty; the first line must have the names of the columns")
        repeated = [name for name in header if name and header.count(name) > 1]
        if repeated:
            raise InputError(
                f"{path}:1: found several columns named {repeated[0]!r}; give each a name of its "
                "own, and name them all, as in neg=COLUMN,COLUMN"
            )
        for location, cells in rows:
            if len(cells) != len(header):
                raise location.error(
                    f"found {len(cells)} cells, but the header has {len(header)}; a cell that "
                    "contains the separator needs quotes"
                )
            yield location, dict(zip(header, cells, strict=True))
    elif ending == ".parquet":
        # not by ``datasets``, which reads x1.parquet if the name is x[1].parquet
        with library_errors(f"{path}: cannot be read", Exception), ParquetFile(path) as file:
            batches = (batch.to_pylist() for batch in file.iter_batches(batch_size=256))
            for number, row in enumerate(chain.from_iterable(batches), 1):
                yield SourceLocation(path, 0, number), row
    else:
        raise InputError(f"{path}: unknown file ending; expected one of {', '.join(_ENDINGS)}")


def _typed(location: SourceLocation, row: Row, type_: type[Typed]) -> Typed:
    try:
        return msgspec.convert(row, type_)
    except msgspec.ValidationError as error:
        raise location.error(str(error)) from error


class JudgementRow(msgspec.Struct):
    query: Key = msgspec.field(name="query-id")
    passage: Key = msgspec.field(name="corpus-id")
    score: Any = 1


def _judgement(location: SourceLocation, row: Row) -> tuple[str, str, int]:
    judgement = _typed(location, row, JudgementRow)
    grade = grade_of(str(judgement.score), location)
    return str(judgement.query), str(judgement.passage), grade


def _passage(location: SourceLocation, row: Row) -> dict[str, str]:
    """Return a row as a record of a BEIR file. The column of the id is ``_id`` or ``id``."""
    passage = _typed(location, {"_id": row.get("id"), **row}, TextRecord).passage()
    return {"_id": passage.id, "title": passage.title, "text": passage.text}


def _query(location: SourceLocation, row: Row) -> dict[str, str]:
    record = _passage(location, row)
    return {"_id": record["_id"], "text": record["text"]}
