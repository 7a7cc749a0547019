"""Save the results of mining, one block of queries at a time, so that a restart can continue.

Each block has hashes. A restart mines missing and damaged blocks again.
"""

import hashlib
import json
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from contaccum.errors import InputError
from contaccum.runtime.files import read_json, sha256_of, sweep, whole_file, write_json

JOB = "job.json"
SPREAD = ("mean", "min", "25%", "median", "75%", "max")


@dataclass
class Statistics:
    """Statistics of one mined block of queries, with hashes that reveal damaged files."""

    job: str  # SHA-256 of ``BlockFolder.job``
    block: int  # number of the block, from 0
    lines: str = ""  # SHA-256 of the block's lines
    short: int = 0  # number of queries that got fewer negatives than num_negatives
    removed: dict[str, int] = field(default_factory=dict)  # filter name -> number of candidates that it removed
    positives: list[float] = field(default_factory=list)  # lowest score of each query's positives
    negatives: list[float] = field(default_factory=list)  # score of each negative
    margins: list[float] = field(default_factory=list)  # lowest positive score of the query - score of each negative
    sha256: str = ""  # SHA-256 of all other fields

    def own_hash(self) -> str:
        """Return the SHA-256 of all fields except ``sha256``."""
        return _hash_of({**vars(self), "sha256": ""})


def _hash_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


class BlockFolder:
    """Folder with the blocks of one mining job. Several processes can write blocks at the same time."""

    def __init__(self, folder: Path, job: dict[str, Any], count: int) -> None:
        """job: settings and hashes that determine the content of the blocks. count: number of blocks."""
        self.folder, self.job, self.count = folder, job, count
        self.job_hash = _hash_of(job)

    def claim(self) -> None:
        """Raise InputError if the folder belongs to a different job. If the job file is missing or damaged, write it."""
        sweep(self.folder)
        try:
            found = read_json(self.folder / JOB, dict[str, Any])
        except InputError:  # missing or damaged; each block has the hash of its job, so the file can be written again
            found = self.job
            write_json(self.folder / JOB, self.job)
        if changed := [name for name in self.job if found.get(name) != self.job[name]]:
            raise InputError(
                f"{self.folder}: contains an unfinished mining job that differs in {', '.join(changed)}. Use the settings "
                "and data of that job, or delete the folder to start again."
            )

    def write(self, found: Statistics, lines: list[bytes]) -> None:
        """Write the lines of a block, then its statistics. A block without statistics is unfinished."""
        content = b"".join(lines)
        with whole_file(self._lines(found.block)) as file:
            file.write(content)
        found.lines = hashlib.sha256(content).hexdigest()
        found.sha256 = found.own_hash()
        write_json(self._statistics(found.block), vars(found))

    def is_finished(self, number: int) -> bool:
        """Return whether a block is finished. If the block is damaged or belongs to a different job, warn and return False."""
        path = self._statistics(number)
        if not path.exists():
            return False
        try:
            found: Statistics = read_json(path, Statistics)
            usable = (found.job, found.block, found.sha256) == (self.job_hash, number, found.own_hash())
            usable = usable and sha256_of(self._lines(number)) == found.lines
        except (InputError, OSError):
            usable = False
        if not usable:
            warnings.warn(
                f"{path}: block {number} is damaged or belongs to a different job; it is mined again", stacklevel=2
            )
        return usable

    def lines(self) -> Iterator[bytes]:
        """Yield the lines of all blocks in order."""
        for number in range(self.count):
            yield from self._lines(number).read_bytes().splitlines(True)

    def report(self) -> dict[str, Any]:
        """Combine the statistics of all blocks into one report."""
        blocks: list[Statistics] = [read_json(self._statistics(number), Statistics) for number in range(self.count)]
        removed: Counter[str] = Counter()
        for block in blocks:
            removed.update(block.removed)
        names = ("positives", "negatives", "margins")
        values = {name: np.array([value for block in blocks for value in getattr(block, name)]) for name in names}
        return {
            "queries": len(values["positives"]),
            "negatives": len(values["negatives"]),
            "queries_with_fewer": sum(block.short for block in blocks),
            "removed": dict(removed),
            "scores": {name: _spread(found) for name, found in values.items() if len(found)},
        }

    def _lines(self, number: int) -> Path:
        return self.folder / f"{number:05d}.lines"

    def _statistics(self, number: int) -> Path:
        return self.folder / f"{number:05d}.json"


def _spread(values: np.ndarray) -> dict[str, float]:
    numbers = values.mean(), *np.percentile(values, [0, 25, 50, 75, 100])
    return {name: float(value) for name, value in zip(SPREAD, numbers, strict=True)}
