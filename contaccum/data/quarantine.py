"""What was left out of a data file: listed in the cache, counted in one warning."""

import json
import warnings
from pathlib import Path

from contaccum.data.arrow import cached_folder, file_key
from contaccum.data.bad_records import BadRecords

QUARANTINE_FILE = "quarantine.jsonl"


def write_quarantine(folder: Path, bad: BadRecords) -> None:
    """The records that were left out, one a line, in a folder that is being built."""
    if bad.found:
        with open(folder / QUARANTINE_FILE, "w", encoding="utf-8", newline="\n") as file:
            entries = sorted(bad.found, key=lambda entry: (entry["line"], entry.get("record", 0)))
            file.writelines(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)


def keep_quarantine(source: Path, bad: BadRecords) -> None:
    """List what a reading left out whose result is not cached, and warn of it."""
    if bad.found:
        key = [file_key(source), bad.found]
        warn_of(source, len(bad.found), cached_folder("quarantine", key, lambda folder: write_quarantine(folder, bad)))


def warn_of(source: Path, count: int, folder: Path) -> None:
    """The one warning for the records of a file that were left out, which are listed in the folder."""
    if count:
        what = "1 bad record is left out" if count == 1 else f"{count} bad records are left out"
        warnings.warn(f"{source}: {what}, listed in {folder / QUARANTINE_FILE}", stacklevel=2)
