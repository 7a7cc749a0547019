"""Download MTEB and MIRACL sets at fixed commits of the Hub, and convert them to BEIR folders.

The file mteb.tsv lists the MTEB tasks. The data set of a task has a configuration ``corpus``, a
configuration ``queries``, and a configuration ``default`` or ``qrels`` for the judgements. If a
task has subsets, the configurations of the subset NAME are ``NAME-corpus``, ``NAME-queries`` and
``NAME-qrels``. The MIRACL repositories contain scripts, and ``datasets`` no longer runs scripts.
This module therefore reads the MIRACL files itself.
"""

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import constants, metadata_load, snapshot_download

from contaccum.catalog import table
from contaccum.catalog.hub_sets import (
    FAILURES,
    HubName,
    Rows,
    beir_from_rows,
    files_by_split,
    retrieval_parts,
)
from contaccum.errors import InputError, library_errors
from contaccum.formats.json_records import Record, id_field, json_records, string_field, title_field
from contaccum.formats.readers import read_qrels
from contaccum.formats.records import (
    READER_VERSION,
    SourceLocation,
    numbered_lines,
    write_beir_folder,
)
from contaccum.runtime.cache import cached_folder
from contaccum.runtime.files import read_json, read_text, write_json
from contaccum.runtime.hub import hub_errors

SPLITS = "splits.json"
KNOWN = (
    "ar",
    "bn",
    "en",
    "es",
    "fa",
    "fi",
    "fr",
    "hi",
    "id",
    "ja",
    "ko",
    "ru",
    "sw",
    "te",
    "th",
    "zh",
)
"""MIRACL languages with a train split and a dev split."""
SURPRISE = ("de", "yo")
"""MIRACL languages without a train split."""
# maximum number of values in the metadata of a README; YAML aliases can produce billions
_MAX_NODES = 1 << 20


class Repository(NamedTuple):
    """Data set repository on the Hub at a fixed commit."""

    name: str  # owner/name
    commit: str

    def snapshot(self, *patterns: str, local: bool = False) -> Path:
        """Download the files of the repository that match a pattern, and return their folder.

        patterns: file names, in which ``*`` stands for any text. Without patterns, all files are
        downloaded. local: use only the files in the cache of the Hub. Raises InputError if the
        download fails, or if the cache lacks the repository.
        """
        with hub_errors(
            f"{self.name}: cannot be downloaded from the Hub", *FAILURES, fix=f". {self.hint}"
        ):
            folder = snapshot_download(
                self.name,
                repo_type="dataset",
                revision=self.commit,
                allow_patterns=list(patterns) or None,
                # offline, some versions of huggingface_hub still ask for the list of files
                local_files_only=local or constants.is_offline_mode(),
            )
            return Path(folder)

    @property
    def hint(self) -> str:
        command = f"hf download --repo-type dataset {self.name} --revision {self.commit}"
        return f"To work without a network, download the repository first: {command}"


JUDGED = Repository("miracl/miracl", "5be20db9509754dadad47689368639fcec739c00")
CORPUS = Repository("miracl/miracl-corpus", "d921ec7e349ce0d28daf30b2da9da5ee698bef0d")


class Task(NamedTuple):
    """MTEB retrieval task and the repository of its data set."""

    name: str
    repository: Repository
    # names of the subsets, such as languages; empty: the task has no subsets
    subsets: tuple[str, ...]


@cache
def tasks() -> dict[str, Task]:
    """Return all MTEB tasks: name of the task in lower case -> task."""
    found = {}
    for name, repository, commit, *subsets in table(
        "mteb.tsv"
    ):  # the column of the subsets may be missing
        languages = tuple(subsets[0].split(",")) if subsets else ()
        found[name.casefold()] = Task(name, Repository(repository, commit), languages)
    return found


def mteb_folder(member: str, split: str) -> Path:
    """Return the BEIR folder of an MTEB task; download the data set if necessary.

    member: a task such as NFCorpus, or a task and a subset such as MIRACLRetrieval/sw. The case of
    the task name does not matter. split: needed if each split has a separate corpus; the folder
    then has only this split. Otherwise, the folder has the judgements of all splits.

    Raises InputError if the task, the subset or a needed split is unknown, or if a file cannot be
    downloaded or read.
    """
    task, subset = task_and_subset(member)
    key = [READER_VERSION, *task.repository, subset]
    folder = cached_folder("mteb", key, partial(_write, task, subset))
    if not (folder / SPLITS).is_file():
        return folder
    splits = read_json(folder / SPLITS, list[str])
    if split not in splits:
        raise InputError(
            f"mteb/{member}: split {split!r} not found; available: {', '.join(splits)}"
        )
    return cached_folder("mteb", [*key, split], partial(_write_split, task, subset, split))


def task_and_subset(member: str) -> tuple[Task, str]:
    """Return an MTEB task and the name of its subset. Raise InputError if there is no such task."""
    name, _, subset = member.partition("/")
    task = tasks().get(name.casefold())
    if task is None:
        close = [tasks()[key].name for key in get_close_matches(name.casefold(), tasks(), 5, 0.5)]
        similar = f"; similar names are {', '.join(close)}" if close else ""
        raise InputError(f"mteb/{member}: no MTEB retrieval task has this name{similar}")
    if subset not in (task.subsets or ("",)):
        expected = f"mteb/{task.name}"
        if task.subsets:
            expected += f"/ and one of {', '.join(task.subsets)}"
        raise InputError(f"mteb/{member}: not a data set; expected {expected}")
    return task, subset


class _TaskFiles:
    """Files of a task or subset.

    ``corpus``, ``queries`` and ``grades`` (judgements) each map a split to its files.
    """

    def __init__(self, task: Task, subset: str) -> None:
        self.text = f"mteb/{task.name}"
        _check_size(task.repository.snapshot("README.md") / "README.md")
        try:
            self._find(HubName(self.text, task.repository.name, task.repository.commit), subset)
        except InputError as error:
            # without a network, use the complete copy in the cache of the Hub, if there is one
            try:
                copy = task.repository.snapshot(local=True)
            except InputError:
                raise InputError(f"{error}. {task.repository.hint}") from error
            self._find(HubName(self.text, str(copy)), subset)

    def _find(self, name: HubName, subset: str) -> None:
        """Set the files of the three parts. name: the repository on the Hub, or its copy."""
        configurations = name.configurations()
        prefix = f"{subset}-" if subset not in ("", "default") else ""
        corpus, queries, grades = retrieval_parts(configurations, prefix)
        for part in (corpus, queries, grades):
            if part not in configurations:
                raise InputError(
                    f"{self.text}: configuration {part!r} not found; available: "
                    f"{', '.join(configurations)}"
                )
        self._name = name
        self.corpus = files_by_split(name.builder(corpus))
        self.queries = files_by_split(name.builder(queries))
        self.grades = files_by_split(name.builder(grades))

    def rows(self, part: Mapping[str, list[str]], split: str) -> Rows:
        """Read the rows of ``split``.

        If ``part`` (split -> files) has only one split, read that split, as MTEB does.
        """
        if split in part:
            return self._name.rows(part[split])
        if len(part) > 1:
            raise InputError(
                f"{self.text}: split {split!r} has judgements, but the corpus or the queries have "
                f"only the splits {', '.join(part)}"
            )
        (files,) = part.values()
        return self._name.rows(files)


def _check_size(readme: Path) -> None:
    """Raise InputError if the metadata of a README has too many values.

    With YAML aliases, a small file can have billions.
    """
    sizes: dict[int, int] = {}

    def size(node: Any) -> int:
        if id(node) not in sizes:
            inner = (
                node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
            )
            sizes[id(node)] = 1 + sum(map(size, inner))
        return sizes[id(node)]

    fix = "; it must be the card of an MTEB task"
    with library_errors(f"{readme}: its metadata cannot be read", *FAILURES, fix=fix):
        read_text(readme, "the card of a data set")
        nodes = size(metadata_load(readme))
    if nodes > _MAX_NODES:
        raise InputError(
            f"{readme}: its metadata has {nodes} values; at most {_MAX_NODES} are allowed"
        )


def _write(task: Task, subset: str, folder: Path) -> None:
    """Write a BEIR folder with all splits.

    If each split has a separate corpus, write only a list of the split names.
    """
    parts = _TaskFiles(task, subset)
    if len(parts.corpus) > 1:
        write_json(folder / SPLITS, list(parts.grades))
        return
    if len(parts.queries) == 1:
        splits = list(parts.grades)
        queries = parts.rows(parts.queries, "")
    else:
        splits = [split for split in parts.grades if split in parts.queries]
        if not splits:
            raise InputError(
                f"{parts.text}: no split has both queries and judgements. Splits with only "
                f"queries: {', '.join(parts.queries)}. Splits with only judgements: "
                f"{', '.join(parts.grades)}."
            )
        queries = _distinct(parts.rows(parts.queries, split) for split in splits)
    grades = {split: parts.rows(parts.grades, split) for split in splits}
    beir_from_rows(folder, parts.text, parts.rows(parts.corpus, ""), queries, grades)


def _write_split(task: Task, subset: str, split: str, folder: Path) -> None:
    parts = _TaskFiles(task, subset)
    corpus = parts.rows(parts.corpus, split)
    queries = parts.rows(parts.queries, split)
    beir_from_rows(folder, parts.text, corpus, queries, {split: parts.rows(parts.grades, split)})


def _distinct(parts: Iterator[Rows]) -> Rows:
    seen = set()
    for location, row in chain.from_iterable(parts):
        key = str(row.get("_id", row.get("id")))
        if key not in seen:
            seen.add(key)
            yield location, row


def check_language(language: str) -> None:
    """Raise InputError unless MIRACL has this language."""
    if language not in KNOWN + SURPRISE:
        expected = ", ".join(sorted(KNOWN + SURPRISE))
        raise InputError(
            f"miracl/{language}: not a MIRACL language; expected miracl/LANGUAGE with LANGUAGE one "
            f"of {expected}"
        )


def miracl_folder(language: str) -> Path:
    """Return the BEIR folder of a MIRACL language; download the data set if necessary.

    language: a code such as ``sw``. The folder has the judgements of the split dev, and of the
    split train if the language has one. The test splits are left out, because MIRACL publishes no
    judgements for them. Raises InputError if the language is unknown or the download fails.
    """
    check_language(language)
    return cached_folder(
        "miracl",
        [READER_VERSION, JUDGED.commit, CORPUS.commit, language],
        partial(_write_miracl, language),
    )


def _write_miracl(language: str, folder: Path) -> None:
    """Download a MIRACL language, and write it to ``folder`` as a BEIR folder."""
    root = f"miracl-v1.0-{language}"
    splits = ("dev",) if language in SURPRISE else ("train", "dev")
    topics = {split: f"{root}/topics/topics.{root}-{split}.tsv" for split in splits}
    qrels = {split: f"{root}/qrels/qrels.{root}-{split}.tsv" for split in splits}
    judged = JUDGED.snapshot(*topics.values(), *qrels.values())
    for file in (*topics.values(), *qrels.values()):
        if not (judged / file).is_file():
            raise InputError(
                f"{JUDGED.name}: file {file} not found in commit {JUDGED.commit}. {JUDGED.hint}"
            )
    pattern = f"miracl-corpus-v1.0-{language}/docs-[0-9]*.jsonl.gz"
    files = _sorted_parts(list(CORPUS.snapshot(pattern).glob(pattern)), language)
    queries = _queries([judged / file for file in topics.values()])
    grades = {split: _grades(judged / file) for split, file in qrels.items()}
    write_beir_folder(folder, _passages(files), queries, grades)


def _sorted_parts(parts: list[Path], language: str) -> list[Path]:
    """Sort the files of a corpus by the number in the file name.

    Raise InputError if a number is missing.
    """
    numbered = {int(re.findall(r"\d+", part.name)[0]): part for part in parts}
    for number in range(max(numbered, default=0) + 1):
        if number not in numbered:
            raise InputError(
                f"{CORPUS.name}: docs-{number}.jsonl.gz of {language} not found. {CORPUS.hint}"
            )
    return [numbered[number] for number in sorted(numbered)]


def _passages(files: list[Path]) -> Iterator[dict[str, str]]:
    def passage(record: Record, location: SourceLocation, number: int) -> dict[str, str]:
        return {
            "_id": id_field(record, "docid", location),
            "title": title_field(record, location),
            "text": string_field(record, "text", location),
        }

    for file in files:
        for _, found in json_records(
            file, "a passage (an object with docid, title and text)", passage
        ):
            yield found


def _grades(file: Path) -> Iterator[tuple[str, str, int]]:
    for judgement in read_qrels(file):
        yield judgement.query_id, judgement.passage_id, judgement.grade


def _queries(files: list[Path]) -> Iterator[dict[str, Any]]:
    for file in files:
        for location, line in numbered_lines(file):
            key, tab, text = line.partition("\t")
            if not (key and tab and text.strip()):
                raise location.error(
                    f"found {line[:40]!r}; expected a query id, a tab and the query"
                )
            yield {"_id": key, "text": text.strip()}
