"""Data sets of the Hugging Face Hub by name: fetched once, and from then on a file of examples like any other."""

import json
from pathlib import Path

from datasets import load_dataset
from datasets.exceptions import DatasetsError

from contaccum.data.arrow import cached_folder
from contaccum.errors import InputError

PREFIX = "hub:"


def local_path(path: str | Path, split: str) -> Path:
    """The path itself, or where the examples of ``hub:owner/name`` (or ``hub:owner/name:configuration``) now lie.

    The set's columns must be those of one of our files of examples: query, pos, neg; or Tevatron's; or DPR's. Raises
    InputError where the set or the split cannot be had.
    """
    if not str(path).startswith(PREFIX):
        return Path(path)
    name, _, configuration = str(path).removeprefix(PREFIX).partition(":")
    try:
        rows = load_dataset(name, configuration or None, split=split)
    except (OSError, ValueError, DatasetsError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{path}: split {split!r} could not be loaded from the Hub ({reason})") from error

    def write(folder: Path) -> None:
        with open(folder / "examples.jsonl", "w", encoding="utf-8", newline="\n") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)

    # the fingerprint of a loaded set follows its content's version
    return cached_folder("hub", [name, configuration, split, rows._fingerprint], write) / "examples.jsonl"
