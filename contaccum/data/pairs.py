"""Training pairs that are in memory, as a file that ``open_dataset`` can read."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from contaccum.errors import InputError
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
        values = list(pair.values()) if isinstance(pair, Mapping) else list(pair)
        query, *others = values or [None]
        passages = [[each] if isinstance(each, str) else list(each or []) for each in others]
        texts = [text for each in passages for text in each]
        if not passages or not all(isinstance(text, str) for text in [query, *texts]):
            raise InputError(
                f"pairs[{number}] is {str(pair)[:100]}, expected a query, a positive and, if there "
                "are any, hard negatives, all of them texts"
            )
        negatives = [text for each in passages[1:] for text in each]
        lines.append(json.dumps({"query": query, "pos": passages[0], "neg": negatives}))
    content = "\n".join(lines) + "\n"
    key = hashlib.sha256(content.encode()).hexdigest()
    return (
        cached_folder("pairs", key, lambda folder: write_text(folder / "pairs.jsonl", content))
        / "pairs.jsonl"
    )
