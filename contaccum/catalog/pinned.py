"""Download MTEB and MIRACL sets at fixed commits of the Hub, and convert them to BEIR folders.

The file mteb.tsv lists the MTEB tasks. The data set of a task has a configuration ``corpus``, a
configuration ``queries``, and a configuration ``default`` or ``qrels`` for the judgements. If a
task has subsets, the configurations of the subset NAME are ``NAME-corpus``, ``NAME-queries`` and
``NAME-qrels``. The MIRACL repositories contain scripts, and ``datasets`` no longer runs scripts.
This module therefore reads the MIRACL files itself.
"""

import re
from collections.abc import Iterator
from difflib import get_close_matches
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import constants, snapshot_download

from contaccum.catalog import table
from contaccum.catalog.hub_sets import (
    HubName,
    judged_splits,
    retrieval_files,
    write_retrieval_set,
)
from contaccum.errors import InputError
from contaccum.formats.json_records import json_records
from contaccum.formats.readers import read_qrels
from contaccum.formats.records import READER_VERSION, numbered_lines, write_beir_folder
from contaccum.formats.training import PassageRecord
from contaccum.runtime.cache import cached_folder
from contaccum.runtime.files import read_json, write_json
from contaccum.runtime.hub import hub_errors

SPLITS = "splits.json"
KNOWN = (
    *("ar", "bn", "en", "es", "fa", "fi", "fr", "hi"),
    *("id", "ja", "ko", "ru", "sw", "te", "th", "zh"),
)
"""MIRACL languages with a train split and a dev split."""
SURPRISE = ("de", "yo")
"""MIRACL languages without a train split."""


class Repository(NamedTuple):
    """Data set repository on the Hub at a fixed commit."""

    name: str  # owner/name
    commit: str

    def snapshot(self, *patterns: str) -> Path:
        """Download the files of the repository that match a pattern, and return their folder.

        patterns: file names, in which ``*`` stands for any text. Without a network, the folder has
        the files that the cache of the Hub has. Raises InputError if the download fails, or if the
        cache lacks the repository.
        """
        with hub_errors(
            f"{self.name}: cannot be downloaded from the Hub", Exception, fix=f". {self.hint}"
        ):
            folder = snapshot_download(
                self.name,
                repo_type="dataset",
                revision=self.commit,
                allow_patterns=list(patterns),
                # offline, some versions of huggingface_hub still ask for the list of files
                local_files_only=constants.is_offline_mode(),
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
    # the column of the subsets may be missing
    for name, repository, commit, *subsets in table("mteb.tsv"):
        languages = tuple(subsets[0].split(",")) if subsets else ()
        found[name.casefold()] = Task(name, Repository(repository, commit), languages)
    return found


def mteb_folder(task: Task, subset: str, split: str) -> Path:
    """Return the BEIR folder of an MTEB task; download the data set if necessary.

    split: needed if each split has a separate corpus; the folder then has only this split.
    Otherwise, the folder has the judgements of all splits.

    Raises InputError if a needed split is unknown, or if a file cannot be downloaded or read.
    """
    key = [READER_VERSION, *task.repository, subset]
    folder = cached_folder("mteb", key, partial(_write, task, subset, None))
    if not (folder / SPLITS).is_file():
        return folder
    splits = read_json(folder / SPLITS, list[str])
    if split not in splits:
        raise InputError(
            f"mteb/{task.name}: split {split!r} not found; available: {', '.join(splits)}"
        )
    return cached_folder("mteb", [*key, split], partial(_write, task, subset, split))


def task_and_subset(member: str) -> tuple[Task, str]:
    """Return an MTEB task and the name of its subset. Raise InputError if there is no such task.

    member: a task such as NFCorpus, or a task and a subset such as MIRACLRetrieval/sw. The case of
    the task name does not matter.
    """
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


def _write(task: Task, subset: str, split: str | None, folder: Path) -> None:
    """Write a BEIR folder with one split, or with all splits (None).

    If each split has a separate corpus, write only a list of the split names instead of all splits.
    """
    repository = task.repository
    card = repository.snapshot("README.md") / "README.md"
    name = HubName(f"mteb/{task.name}", repository.name, repository.commit)
    if constants.is_offline_mode():  # use the copy in the cache of the Hub
        name = HubName(name.text, str(card.parent))
    try:
        parts = retrieval_files(name, f"{subset}-" if subset not in ("", "default") else "")
    except InputError as error:
        raise InputError(f"{error}. {repository.hint}") from error
    if split is not None:
        write_retrieval_set(name, parts, {split: split}, folder)
    elif len(parts["corpus"]) > 1:
        write_json(folder / SPLITS, list(parts["grades"]))
    else:
        write_retrieval_set(name, parts, judged_splits(name, parts), folder)


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
    pattern = f"miracl-corpus-v1.0-{language}/docs-[0-9]*.jsonl.gz"
    numbered = {
        int(re.findall(r"\d+", part.name)[0]): part
        for part in CORPUS.snapshot(pattern).glob(pattern)
    }
    parts = [numbered[number] for number in sorted(numbered)]
    if not parts or len(parts) != max(numbered) + 1:
        raise InputError(
            f"{CORPUS.name}: some of the files {pattern} are missing; found {len(parts)}. "
            f"{CORPUS.hint}"
        )
    queries = (
        {"_id": key, "text": text.strip()}
        for file in topics.values()
        for _, line in numbered_lines(judged / file)
        for key, _, text in [line.partition("\t")]
    )
    grades = {
        split: (row[1:] for row in read_qrels(judged / file)) for split, file in qrels.items()
    }
    write_beir_folder(folder, _passages(parts), queries, grades)


def _passages(files: list[Path]) -> Iterator[dict[str, str]]:
    for file in files:
        for _, record in json_records(file, PassageRecord, "a passage (docid, title and text)"):
            passage = record.passage()
            yield {"_id": passage.id, "title": passage.title, "text": passage.text}
