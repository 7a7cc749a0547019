"""Training pairs that are in memory, as a file that ``open_dataset`` can read."""

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from contaccum.errors import InputError
from contaccum.formats.readers import USUAL_NAMES
from contaccum.formats.records import record_line
from contaccum.formats.training import JsonlRecord
from contaccum.runtime.cache import cached_folder
from contaccum.runtime.files import write_text


def pairs_file(pairs: Iterable[Sequence[Any] | Mapping[str, Any]]) -> Path:
    """Write pairs to a JSONL file in the cache, and return its path. Equal pairs get one file.

    pairs: tuples or dicts, a ``datasets.Dataset``, or a pandas DataFrame. A dict may be an object
    of a JSONL file (query, pos, neg), or have usual names such as anchor, positive and negative_1.
    Otherwise, as in a tuple, the first value is the query, the second the positive, and the others
    are hard negatives, as the columns in sentence-transformers. Instead of one text, positives and
    negatives may be lists of texts. Raises InputError for anything else.
    """
    if hasattr(pairs, "to_dict") and hasattr(pairs, "columns"):
        pairs = rows_of_frame(pairs)
    lines = []
    for number, pair in enumerate(pairs):
        try:
            lines.append(record_line(record_of(pair)))
        except (ValueError, TypeError, msgspec.ValidationError) as error:
            raise InputError(
                f"pairs[{number}] is {str(pair)[:100]}, expected a query, a positive and, if there "
                "are any, hard negatives, all of them texts"
            ) from error
    if not lines:
        raise InputError("pairs is empty, expected at least one query with a positive")
    content = b"".join(lines).decode()
    key = hashlib.sha256(content.encode()).hexdigest()
    folder = cached_folder("pairs", key, lambda folder: write_text(folder / "pairs.jsonl", content))
    return folder / "pairs.jsonl"


def rows_of_frame(frame: Any) -> list[dict[Any, Any]]:
    """Return the rows of a pandas DataFrame without missing values (NaN), and arrays as lists."""
    return [
        {
            name: value.tolist() if hasattr(value, "tolist") else value
            for name, value in row.items()
            if not (isinstance(value, float) and math.isnan(value))
        }
        for row in frame.to_dict("records")
    ]


_NEGATIVES = re.compile(r"(neg|negative)s?(_\d+)?", re.IGNORECASE)
"""Names of fields with hard negatives."""


def record_of(pair: Sequence[Any] | Mapping[str, Any]) -> JsonlRecord:
    """Return a pair as a record of a JSONL file, see ``pairs_file``."""
    if isinstance(pair, str):
        raise TypeError("a text is no pair")
    if isinstance(pair, Mapping):
        other_negatives = "neg" not in pair and any(map(_NEGATIVES.fullmatch, map(str, pair)))
        if {"query", "pos"} <= pair.keys() and not other_negatives:
            return msgspec.convert(dict(pair), JsonlRecord)
        pair = by_name(pair) or list(pair.values())
    query, positives, *others = pair
    lists = [[each] if isinstance(each, str) else each or [] for each in others]
    negatives = [text for texts in lists for text in texts]
    return msgspec.convert({"query": query, "pos": positives, "neg": negatives}, JsonlRecord)


def by_name(pair: Mapping[str, Any]) -> list[Any] | None:
    """Return query, positive and negatives, or None if the names of query or positive are unusual.

    Raises ValueError if another field is left.
    """
    query, positive = (
        next((name for name in pair if str(name).lower() in USUAL_NAMES[key]), None)
        for key in ("query", "pos")
    )
    if query is None or positive is None:
        return None
    negatives = [name for name in pair if _NEGATIVES.fullmatch(str(name))]
    if len(pair) > 2 + len(negatives):
        raise ValueError("a field is neither a query nor a positive nor a negative")
    return [pair[name] for name in (query, positive, *negatives)]
