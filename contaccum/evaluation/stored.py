"""Metrics as they are read back from a file; what is not what an evaluation writes is refused by file."""

import math
from pathlib import Path
from typing import Any

from contaccum.errors import InputError
from contaccum.files import read_json


def read_metrics(path: Path) -> dict[str, Any]:
    """A metrics.json: ``mean``, numbers by name, and where it is there ``per_query``, such numbers by query."""
    metrics = read_json(path)
    if not isinstance(metrics, dict) or not numbers(metrics.get("mean")):
        raise InputError(f"{path}: holds no means of metrics, expected what `contaccum evaluate --output` writes")
    per_query = metrics.get("per_query") or {}
    if not isinstance(per_query, dict):
        raise InputError(f"{path}: per_query is no mapping, expected the values of every query")
    for query, values in per_query.items():
        if not numbers(values):
            raise InputError(f"{path}: the values of query {query!r} are not numbers by metric, expected such")
    return metrics


def number(value: Any) -> bool:
    """Whether this is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def numbers(values: Any) -> bool:
    """Whether these are finite numbers by name."""
    return isinstance(values, dict) and all(number(value) for value in values.values())
