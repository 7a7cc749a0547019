"""Training pairs that are in memory, as a file that ``open_dataset`` can read."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from contaccum.errors import InputError
from contaccum.formats.records import record_line
from contaccum.formats.training import JsonlRecord
from contaccum.runtime.cache import cached_folder
from contaccum.runtime.files import write_text


def pairs_file(pairs: Iterable[Sequence[Any] | Mapping[str, Any]]) -> Path:
    """Write pairs to a JSONL file in the cache, and return its path. Equal pairs get one file.

    pairs: tuples or dicts, or a ``datasets.Dataset``. The first value is the query, the second the
    positive, and the others are hard negatives, as the columns in sentence-transformers. Instead of
    one text, positives and negatives may be lists of texts. Raises InputError for anything else.
    """
    lines = []
    for number, pair in enumerate(pairs):
        try:
            query, positives, *others = pair.values() if isinstance(pair, Mapping) else pair
            lists = [[each] if isinstance(each, str) else each or [] for each in others]
            negatives = [text for texts in lists for text in texts]
            record = {"query": query, "pos": positives, "neg": negatives}
            lines.append(record_line(msgspec.convert(record, JsonlRecord)))
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
