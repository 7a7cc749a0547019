"""MTEB's retrieval sets by the names of its tasks, each at the commit that MTEB pins, as BEIR folders.

mteb.tsv has the tasks whose repositories are in the layout that MTEB's own loader reads: configurations ``corpus`` and
``queries``, and ``default`` or ``qrels`` for the judgements; of a subset ``NAME-corpus``, ``NAME-queries`` and ``NAME-qrels``.
JSON is read by our own reader, which has the line of an error and takes no text for a date as that of ``datasets`` does.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, partial
from importlib import resources
from pathlib import Path
from typing import Any

from datasets import load_dataset
from huggingface_hub import metadata_load
from yaml import YAMLError

from contaccum.data.arrow import cached_folder
from contaccum.data.beir_folder import plain_split
from contaccum.data.hub import Rows, placed, retrieval_parts, write_retrieval_rows
from contaccum.data.json_records import Record, json_lines, json_list
from contaccum.data.lines import first_character
from contaccum.data.repositories import Files, Repository
from contaccum.errors import InputError
from contaccum.files import read_json, write_json

Splits = Mapping[str, Sequence[str]]
"""By a split's name the patterns of its files."""
SPLITS = "splits.json"


@dataclass(frozen=True)
class Task:
    """A retrieval task of MTEB's."""

    name: str
    repository: Repository
    subsets: tuple[str, ...]  # languages or parts; none where the task is one set


@cache
def tasks() -> dict[str, Task]:
    """All tasks, by their names in small letters."""
    lines = resources.files("contaccum.data").joinpath("mteb.tsv").read_text(encoding="utf-8").splitlines()
    rows = (line.split("\t") for line in lines)
    return {
        name.casefold(): Task(name, Repository(repository, commit), tuple(subsets[0].split(",")) if subsets else ())
        for name, repository, commit, *subsets in rows
    }


def mteb_folder(member: str, split: str) -> Path:
    """The BEIR folder of a task such as NFCorpus, or MIRACLRetrieval/sw of one that has subsets, in small or capital letters.

    It has the judgements of every split; where each split has a corpus of its own, those of ``split`` alone. Raises InputError
    where there is no such task, subset or split, and where a file cannot be had or read.
    """
    task, subset = _named(member)
    key = [task.repository.name, task.repository.revision, subset]
    folder = cached_folder("mteb", key, partial(_write, task, subset))
    if not (folder / SPLITS).is_file():
        return folder
    if split not in (splits := read_json(folder / SPLITS)):
        raise InputError(f"mteb/{member}: holds no split {split!r}, found {', '.join(splits)}")
    return cached_folder("mteb", [*key, split], partial(_write_split, task, subset, split))


def _named(member: str) -> tuple[Task, str]:
    name, _, subset = member.partition("/")
    task = tasks().get(name.casefold())
    if task is None:
        close = [tasks()[each].name for each in get_close_matches(name.casefold(), tasks(), 5, 0.5)]
        like = f", such as {', '.join(close)}" if close else ""
        raise InputError(
            f"mteb/{member}: no retrieval task of MTEB's that can be fetched has that name, expected mteb/ and one{like}"
        )
    if subset not in (task.subsets or ("",)):
        expected = f"mteb/{task.name}" + (f"/ and one of {', '.join(task.subsets)}" if task.subsets else "")
        raise InputError(f"mteb/{member}: not one data set, expected {expected}")
    return task, subset


@dataclass(frozen=True)
class _Parts:
    """By split the patterns of a set's files."""

    name: str  # what errors name
    files: Files
    corpus: Splits
    queries: Splits
    grades: Splits

    @classmethod
    def of(cls, task: Task, subset: str) -> "_Parts":
        opened = task.repository.open()
        readme = opened.fetch("README.md")[0]
        found = _configurations(readme)
        wanted = retrieval_parts(found, f"{subset}-" if subset not in ("", "default") else "")
        if missing := [name for name in wanted if name not in found]:
            raise InputError(f"{readme}: names no configuration {missing[0]!r}, found {', '.join(map(str, found))}")
        return cls(f"mteb/{task.name}", opened, *(_splits(readme, name, found[name]) for name in wanted))

    def rows(self, part: Splits, split: str) -> Rows:
        """The rows of a split, or of the only one that there is, as MTEB's loader chooses."""
        if split not in part and len(part) > 1:
            raise InputError(
                f"{self.name}: holds judgements of {split!r}, and a corpus or queries of {', '.join(part)} alone"
            )
        return _rows(self.files.fetch(*part.get(split, next(iter(part.values())))))


def _write(task: Task, subset: str, folder: Path) -> None:
    """All splits, or where each has a corpus of its own, which there are."""
    parts = _Parts.of(task, subset)
    if len(parts.corpus) > 1:
        write_json(folder / SPLITS, list(parts.grades))
        return
    if len(parts.queries) == 1:
        splits, queries = list(parts.grades), parts.rows(parts.queries, "")
    else:
        splits = [split for split in parts.grades if split in parts.queries]
        if not splits:
            raise InputError(
                f"{parts.name}: holds queries of {', '.join(parts.queries)} and judgements of {', '.join(parts.grades)}, "
                "expected a split with both"
            )
        queries = _distinct(parts.rows(parts.queries, split) for split in splits)
    grades = {split: parts.rows(parts.grades, split) for split in splits}
    write_retrieval_rows(folder, parts.name, parts.rows(parts.corpus, ""), queries, grades)


def _write_split(task: Task, subset: str, split: str, folder: Path) -> None:
    parts = _Parts.of(task, subset)
    corpus, queries, grades = (parts.rows(part, split) for part in (parts.corpus, parts.queries, parts.grades))
    write_retrieval_rows(folder, parts.name, corpus, queries, {split: grades})


def _configurations(readme: Path) -> dict[str, Any]:
    """What the head of a repository's README says of the files of each configuration."""
    try:
        configurations = (metadata_load(readme) or {})["configs"]
        return {each["config_name"]: each["data_files"] for each in configurations if "data_files" in each}
    except (KeyError, TypeError, ValueError, OSError, RecursionError, YAMLError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"{readme}: names no configurations with data_files ({reason}), expected MTEB's layout"
        ) from error


def _splits(readme: Path, name: str, said: Any) -> Splits:
    """A configuration's files by their splits, in the three forms that the Hub takes; InputError for any other.

    What was found is not repeated in full: aliases of YAML can unfold without end.
    """
    if isinstance(said, list) and said and all(isinstance(each, dict) for each in said):
        pairs = [(each.get("split"), each.get("path")) for each in said]
    else:
        pairs = list(said.items()) if isinstance(said, dict) and said else [("train", said)]
    found: dict[str, list[str]] = {}
    for number, (split, paths) in enumerate(pairs, 1):
        patterns = paths if isinstance(paths, list) else [paths]
        named = isinstance(split, str | int) and str(split) not in found
        if not (named and patterns and all(isinstance(pattern, str) for pattern in patterns)):
            raise InputError(
                f"{readme}: entry {number} in the data_files of configuration {name!r} is no split with a name of its own and "
                "one path or more, expected MTEB's layout"
            )
        try:
            found[plain_split(str(split))] = patterns
        except InputError as error:
            raise InputError(f"{readme}: {error}") from error
    return found


def _rows(paths: list[Path]) -> Rows:
    """The rows of files, read as they are asked for, without a copy in the cache of ``datasets``."""
    for path in paths:
        reader = _READERS.get(Path(path.name.removesuffix(".gz")).suffix)
        if reader is None:
            raise InputError(f"{path}: ends in none of {', '.join(_READERS)}, expected a form that can be read")
        yield from reader(path)


def _objects(path: Path) -> Rows:
    read = json_list if first_character(path) == "[" else json_lines
    return read(path, "a row (an object)", lambda record, place, number: record)


def _table(form: str, path: Path, **options: Any) -> Rows:
    def rows() -> Iterator[Record]:
        yield from load_dataset(form, data_files=[str(path)], split="train", streaming=True, **options)

    return placed(path, rows())


_READERS: dict[str, Callable[[Path], Rows]] = {
    ".parquet": partial(_table, "parquet"), ".jsonl": _objects, ".json": _objects,
    ".csv": partial(_table, "csv"), ".tsv": partial(_table, "csv", sep="\t"),
}  # fmt: skip
"""What reads a file of that ending, which may be gzipped."""


def _distinct(parts: Iterator[Rows]) -> Rows:
    """Rows of several splits, in which a query may stand more than once."""
    seen = set()
    for rows in parts:
        for place, row in rows:
            key = str(row.get("_id", row.get("id")))
            if key not in seen:
                seen.add(key)
                yield place, row
