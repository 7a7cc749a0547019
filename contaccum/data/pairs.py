"""Training pairs that are in memory, as a file that ``open_dataset`` can read."""

import hashlib
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from contaccum.errors import InputError
from contaccum.formats.readers import LABEL_NAMES, NEGATIVE_NAMES
from contaccum.formats.records import is_blank, record_line
from contaccum.formats.training import JsonlRecord
from contaccum.runtime.cache import cached_folder
from contaccum.runtime.checks import require_utf8
from contaccum.runtime.files import write_text
from contaccum.runtime.units import counted

_QUERY_NAMES = ("query", "anchor", "question", "sentence1")
_POSITIVE_NAMES = ("pos", "positive", "answer", "sentence2", "passage", "document", "context")
_ID_NAMES = re.compile(r"_?id|[pq]id|doc_?id|idx|index")
"""Names of fields with ids, which are no queries or positives because of their position."""


def pairs_file(pairs: Any) -> Path:
    """Write pairs to a JSONL file in the cache, and return its path. Equal pairs get one file.

    pairs: tuples or dicts, a ``datasets.Dataset``, or a pandas DataFrame. A dict may be an object
    of a JSONL file (query, pos, neg), or have usual names such as anchor, positive and negative_1.
    If neither the query nor the positive has a usual name, and in a tuple, the first value is the
    query, the second the positive, and the others are hard negatives, as the columns in
    sentence-transformers. Instead of one text, positives and negatives may be lists of texts. None,
    white space and a missing value of a DataFrame mean that there is no positive or no negative;
    pairs without a query are left out, with a warning. Raises InputError for anything else, and
    for fields that are not read.
    """
    if isinstance(pairs, str | Path | Mapping) or not isinstance(pairs, Iterable):
        raise InputError(
            f"pairs is {_shown(pairs)}, expected a list of tuples or dicts, a datasets.Dataset or "
            "a DataFrame"
        )
    if hasattr(pairs, "notna") and hasattr(pairs, "columns"):  # a DataFrame
        frame: Any = pairs
        if not frame.columns.is_unique:
            raise InputError(
                f"pairs has columns with equal names ({', '.join(map(str, frame.columns))}); give "
                "each a name of its own, such as negative_1"
            )
        # pandas marks missing values in several ways
        pairs = frame.astype(object).where(frame.notna(), None).to_dict("records")
    names: list[Any] = []  # of the first dict; their order may decide what they are
    records: list[JsonlRecord] = []
    without_query: list[int] = []
    for number, pair in enumerate(pairs):
        if isinstance(pair, Mapping):
            names = names or list(pair)
            pair = {name: pair[name] for name in (*names, *pair) if name in pair}
        record = record_of(pair, f"pairs[{number}]")
        if is_blank(record.query):
            without_query.append(number)
        else:
            records.append(record)
    if not any(record.pos for record in records):
        found = f"has {counted(len(records), 'query')}, none with a positive"
        if not records:
            found = "has no query" if without_query else "is empty"
        raise InputError(f"pairs {found}, expected at least one query with a positive")
    if without_query:
        warnings.warn(
            f"skipped {counted(len(without_query), 'pair')} without a query (the first: "
            f"pairs[{without_query[0]}])",
            stacklevel=3,
        )
    content = b"".join(map(record_line, records)).decode()
    key = hashlib.sha256(content.encode()).hexdigest()
    folder = cached_folder("pairs", key, lambda folder: write_text(folder / "pairs.jsonl", content))
    return folder / "pairs.jsonl"


def record_of(pair: Any, where: str) -> JsonlRecord:
    """Return a pair as a record of a JSONL file, see ``pairs_file``.

    where: the pair's place in ``pairs``, for error messages.
    """
    values = _without_numpy(pair)
    if isinstance(values, list | tuple) and len(values) > 1:
        values = dict(enumerate(values))
    if not isinstance(values, Mapping):
        raise InputError(
            f"{where} is {_shown(pair)}, expected a query, a positive and, if there are any, hard "
            "negatives"
        )
    record: dict[str, Any] = {"pos": [], "neg": []}
    for name, field in fields_of(list(values), where).items():
        value, place = _without_numpy(values[name]), f"{where}[{name!r}]"
        if field == "query":
            value = _text(value, place)
        elif field in ("pos", "neg"):
            if isinstance(value, list | tuple):
                texts = [_text(text, place) for text in value]
                if "" in texts:
                    raise InputError(f"{place}: has an empty or missing text, expected texts")
            else:
                texts = [text] if (text := _text(value, place)) else []
            value = record[field] + texts
        record[field] = value
    try:
        found = msgspec.convert(record, JsonlRecord)
        found.example()  # counts the ids and scores
    except ValueError as error:
        raise InputError(f"{where}: {error}") from error
    return found


def fields_of(names: Sequence[Any], where: str) -> dict[Any, str]:
    """Return the field of JsonlRecord that each name means, see ``pairs_file``.

    Raises InputError unless exactly one is the query and one the positive, and each has a meaning.
    """
    fields = {}
    for name in names:
        lower = str(name).lower()
        if lower in JsonlRecord.__struct_fields__:
            fields[name] = lower
        elif NEGATIVE_NAMES.fullmatch(lower):
            fields[name] = "neg"
        elif lower in _QUERY_NAMES:
            fields[name] = "query"
        elif lower in _POSITIVE_NAMES:
            fields[name] = "pos"
    others = [name for name in names if name not in fields]
    missing = [field for field in ("query", "pos") if field not in fields.values()]
    if len(missing) == 1 and len(others) == 1 and not _is_no_text(others[0]):
        fields[others.pop()] = missing.pop()
    elif len(missing) == 2 and len(others) >= 2 and not any(map(_is_no_text, others)):
        fields |= {name: missing.pop(0) if missing else "neg" for name in others}
        others = []
    meanings = list(fields.values())
    if missing or meanings.count("query") != 1 or meanings.count("pos") != 1:
        raise InputError(
            f"{where}: found the fields {', '.join(map(str, names))}; expected one query, one "
            "positive and, if there are any, hard negatives, named query, pos and neg"
        )
    if others:
        raise InputError(
            f"{where}: field {others[0]!r} is not read, expected only "
            f"{', '.join(JsonlRecord.__struct_fields__)}; remove it, and give passages that are "
            "not relevant as neg"
        )
    return fields


def _is_no_text(name: Any) -> bool:
    return str(name).lower() in LABEL_NAMES or bool(_ID_NAMES.fullmatch(str(name).lower()))


def _text(value: Any, where: str) -> str:
    """Return a text, which is empty for None and white space."""
    if value is None:
        return ""
    text = require_utf8(value, where)
    return "" if is_blank(text) else str(text)  # JSON knows no numpy.str_


def _without_numpy(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:100]!r}"
