"""A run's files as a study reads them: what is not what training and evaluation write is refused by file, and line or name."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from contaccum.config import TRAITS
from contaccum.errors import InputError
from contaccum.evaluation.stored import number, numbers
from contaccum.files import read_json
from contaccum.training.log import LOG_FILE

STEP = ("seconds", "waited", "peak_memory", "bank_fill")
"""Figures that every logged step has."""


def check_log(run: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Refuse lines of a run's log that no run writes."""
    for line in lines:
        place = f"{run / LOG_FILE}: the line of step {line['step']}"
        if "dev" in line and not numbers(line["dev"]):
            raise InputError(f"{place} has no numbers under dev, expected metrics by name")
        if "loss" not in line:
            continue
        for name, value in {**dict.fromkeys(STEP), **line}.items():
            kind = isinstance(value, (int, float)) if name in STEP else value is None or isinstance(value, (int, float))
            if name != "drift" and not kind:
                raise InputError(f"{place} has {name} {value!r}, expected a number")
        if line["seconds"] <= 0:
            raise InputError(f"{place} has seconds {line['seconds']}, expected more than 0")
        drift = line.get("drift", [])
        if not isinstance(drift, list) or not all(_is_drift(one) for one in drift):
            raise InputError(f"{place} has drift {drift!r}, expected a list of ages and cosines")


def check_settings(run: Path, settings: dict[str, Any]) -> None:
    """Refuse settings by which runs are grouped where they are none."""
    if settings.get("method") not in TRAITS:
        raise InputError(f"{run}: method is {settings.get('method')!r}, expected one of {', '.join(TRAITS)}")
    for name in ("seed", "batch.global_batch_size", "batch.micro_batch_size", "bank.size"):
        value = settings.get(name)
        if not isinstance(value, int) and (name, value) != ("bank.size", None):
            raise InputError(f"{run}: {name} is {value!r}, expected a whole number")


def read_score(path: Path) -> float:
    """The dev metric of a finished run that is not scored on the test data."""
    found = read_json(path)
    if not isinstance(found, dict) or not number(found.get("score")):
        raise InputError(f"{path}: holds no score, expected what a comparison writes; delete it to have it made again")
    return found["score"]


def _is_drift(found: Any) -> bool:
    """Whether this is the drift of one micro-batch; a bank of passages alone has none of queries."""
    if not isinstance(found, dict) or not {"age", "passage"} <= found.keys():
        return False
    return numbers({name: value for name, value in found.items() if (name, value) != ("query", None)})
