"""Tables of texts and of token ids in the cache.

Each table is written once and then mapped into memory.
"""

import copy
import hashlib
import json
import warnings
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
from datasets import Dataset

from contaccum.errors import InputError
from contaccum.formats.records import READER_VERSION
from contaccum.runtime.cache import cached_folder
from contaccum.runtime.checks import require_known_ids, require_utf8
from contaccum.runtime.files import read_json, remove_folder, write_json
from contaccum.runtime.progress import Progress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PASSAGE_COLUMNS = ("id", "title", "text")
QUERY_COLUMNS = ("id", "text")
ABOUT_FILE = "about.json"
_ROWS = 5000  # number of rows in one Arrow record batch: about 4 MB of passages
_TEXTS = 2000  # number of texts per tokenizer call; the tokenizer divides them between threads


@dataclass(frozen=True)
class Ragged:
    """n lists of row numbers, stored in one array.

    List i is ``values[offsets[i]:offsets[i + 1]]``.
    """

    offsets: np.ndarray  # (n + 1,) int64
    values: np.ndarray  # (offsets[n],) int64
    scores: np.ndarray | None = (
        None  # (offsets[n],) float32, teacher scores or NaN; None: not requested, or none found
    )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, index: SupportsIndex) -> np.ndarray:
        """Return list number ``index``, a view of ``values``."""
        return self.values[self.span(index)]

    def span(self, index: SupportsIndex) -> slice:
        """Return the slice of ``values`` and ``scores`` that belongs to list number ``index``."""
        number = index.__index__()
        return slice(self.offsets[number], self.offsets[number + 1])

    @property
    def lengths(self) -> np.ndarray:
        """Length of every list, (n,) int64."""
        return np.diff(self.offsets)

    @property
    def scores_or_nan(self) -> np.ndarray:
        """Teacher scores, (offsets[n],) float32; all NaN if ``scores`` is None."""
        return (
            np.full(len(self.values), np.nan, dtype=np.float32)
            if self.scores is None
            else self.scores
        )

    def take(self, rows: np.ndarray) -> "Ragged":
        """Return the lists at the positions ``rows``."""
        lengths = self.lengths[rows]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        indices = np.arange(offsets[-1]) + np.repeat(self.offsets[rows] - offsets[:-1], lengths)
        return self.chosen(Ragged(offsets, indices))

    def chosen(self, indices: "Ragged") -> "Ragged":
        """Return ``indices`` with each number i replaced by ``self.values[i]``.

        The score of this value is ``self.scores[i]``.
        """
        scores = None if self.scores is None else self.scores[indices.values]
        return Ragged(indices.offsets, self.values[indices.values], scores)

    def renumbered(self, used: np.ndarray) -> "Ragged":
        """Replace each value by its index in ``used``, which is sorted and contains every value."""
        return replace(self, values=np.searchsorted(used, self.values))

    def where(self, kept: np.ndarray) -> "Ragged":
        """Return the lists without the values for which ``kept``, (offsets[n],) bool, is false."""
        offsets = np.concatenate([[0], np.cumsum(kept)])[self.offsets]
        return self.chosen(Ragged(offsets, np.flatnonzero(kept)))

    def contained_in(self, other: "Ragged") -> np.ndarray:
        """Return for each value whether the same list of ``other`` has it, (offsets[n],) bool."""
        _, numbers = np.unique(np.concatenate([self.values, other.values]), return_inverse=True)
        width = int(numbers.max(initial=0)) + 1
        owners = [np.repeat(np.arange(len(lists)), lists.lengths) for lists in (self, other)]
        keys = np.concatenate(owners) * width + numbers
        return np.isin(keys[: len(self.values)], keys[len(self.values) :])

    def merged(self, groups: np.ndarray) -> "Ragged":
        """Concatenate the lists that have the same number in ``groups``, (n,) int64.

        Returns one list for each different number, in ascending order of the numbers.
        """
        different, numbers = np.unique(groups, return_inverse=True)
        order = np.argsort(numbers, kind="stable")
        lists = self.take(order)
        ends = np.cumsum(np.bincount(numbers, minlength=len(different)))
        return replace(lists, offsets=lists.offsets[np.concatenate([[0], ends])])

    def distinct(self) -> "Ragged":
        """Keep only the first occurrence of each value in each list."""
        _, numbers = np.unique(self.values, return_inverse=True)
        width = int(numbers.max(initial=0)) + 1
        keys = np.repeat(np.arange(len(self)), self.lengths) * width + numbers
        kept = np.zeros(len(keys), dtype=bool)
        kept[np.unique(keys, return_index=True)[1]] = True
        return self.where(kept)

    @classmethod
    def of(cls, rows: Iterable[Iterable[int]]) -> "Ragged":
        values: list[int] = []
        ends = [0]
        for row in rows:
            values.extend(row)
            ends.append(len(values))
        return cls(np.array(ends, dtype=np.int64), np.array(values, dtype=np.int64))

    @classmethod
    def concatenated(cls, parts: Sequence["Ragged"], sizes: Sequence[int]) -> "Ragged":
        """Concatenate lists of row numbers, and shift the numbers to fit the concatenated tables.

        ``parts[i]`` has row numbers of table i, which has ``sizes[i]`` rows. The result has row
        numbers of the joined table.
        """
        starts = np.cumsum([0, *sizes])
        values = [part.values + start for part, start in zip(parts, starts, strict=False)]
        ends = np.cumsum(np.concatenate([[0], *(part.lengths for part in parts)]))
        scored = any(part.scores is not None for part in parts)
        scores = np.concatenate([part.scores_or_nan for part in parts]) if scored else None
        return cls(ends, np.concatenate(values), scores)


class TableWriter:
    """Writes an Arrow file of strings, and computes a hash of all rows.

    The hash of each row's text (see ``text_hash``) goes to a second file, which ``text_hashes``
    reads.
    """

    def __init__(self, path: Path, columns: tuple[str, ...]) -> None:
        self._schema = pa.schema([(name, pa.string()) for name in columns])
        self._sink = pa.OSFile(str(path), "wb")
        self._stream = pa.ipc.new_stream(self._sink, self._schema)
        self._digest = hashlib.blake2b(digest_size=16)
        self._rows: list[tuple[str, ...]] = []
        self._path = path
        self._text_hashes = array("q")
        self.rows = 0

    def add(self, row: tuple[str, ...], text_hash: int) -> int:
        """Add a row with one string per column. Return the number of the row, counted from 0."""
        self._rows.append(row)
        self._text_hashes.append(text_hash)
        self.rows += 1
        if len(self._rows) == _ROWS:
            self._flush()
        return self.rows - 1

    def _flush(self) -> None:
        columns = zip(*self._rows, strict=True)
        batch = pa.record_batch(
            [pa.array(column, pa.string()) for column in columns], schema=self._schema
        )
        for column in batch.columns:
            for buffer in column.buffers():
                if buffer is not None:
                    self._digest.update(buffer)
        self._stream.write_batch(batch)
        self._rows.clear()

    def close(self) -> str:
        """Finish the file. Return the hash of all rows in hexadecimal."""
        if self._rows:
            self._flush()
        self._stream.close()
        self._sink.close()
        hashes = np.array(self._text_hashes, dtype=np.int64)  # (rows,)
        np.save(hashes_file(self._path), hashes, allow_pickle=False)
        return self._digest.hexdigest()


def hashes_file(table: Path) -> Path:
    """Return the file with the hashes of the texts of a table."""
    return table.with_suffix(".hashes.npy")


def text_hashes(table: Path) -> np.ndarray:
    """Return the hash of each row's text in a file of ``TableWriter``, (rows,) int64."""
    hashes: np.ndarray = np.load(hashes_file(table), mmap_mode="r", allow_pickle=False)
    return hashes


class CachedTables(NamedTuple):
    """Cache folder with tables, and the content of its about.json."""

    folder: Path
    about: dict[str, Any]


def cached_tables(kind: str, key: object, build: Callable[[Path], dict[str, Any]]) -> CachedTables:
    """Return the cache folder with the tables for ``key``. Build them if they are not in the cache.

    ``build`` writes the tables into an empty folder and returns what about.json is to contain. If a
    file of the cached folder is missing or has another size, all tables are built again.
    """

    def build_with_about(folder: Path) -> None:
        about = build(folder)
        sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
        write_json(folder / ABOUT_FILE, {**about, "bytes": sizes})

    key = [READER_VERSION, key]
    folder = cached_folder(kind, key, build_with_about)
    about = _undamaged(folder)
    if about is None:
        warnings.warn(f"{folder}: the cached tables are damaged and are built again", stacklevel=4)
        with suppress(OSError):  # another process may remove the folder at the same time
            remove_folder(folder)
        folder = cached_folder(kind, key, build_with_about)
        about = read_json(folder / ABOUT_FILE, dict[str, Any])
    return CachedTables(folder, about)


def _undamaged(folder: Path) -> dict[str, Any] | None:
    """Return the content of about.json. Return None if a file is missing or has another size."""
    try:
        about: dict[str, Any] = read_json(folder / ABOUT_FILE, dict[str, Any])
        sizes = {
            path.name: path.stat().st_size for path in folder.iterdir() if path.name != ABOUT_FILE
        }
    except (InputError, OSError):
        return None
    return about if about.get("bytes") == sizes else None


def column_batches(
    table: Dataset, columns: Iterable[str], size: int = 10_000
) -> Iterator[dict[str, list[str]]]:
    """Yield some columns of a table, ``size`` rows at a time."""
    selected = table.select_columns(list(columns))
    for start in range(0, len(selected), size):
        yield selected[start : start + size]


class TokenTable:
    """Token ids of n texts, special tokens included, in two memory-mapped files.

    tokens.bin has the token ids of all texts, int32. offsets.npy has the start index of each text
    in tokens.bin, (n + 1,) int64.
    """

    def __init__(self, folder: Path) -> None:
        self._tokens = np.memmap(folder / "tokens.bin", dtype="<i4", mode="r")
        self._offsets = np.load(folder / "offsets.npy", mmap_mode="r", allow_pickle=False)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def rows(self, indices: Sequence[int] | np.ndarray) -> list[np.ndarray]:
        """Return the token ids of the texts at ``indices``: one int32 array for each index."""
        return [self._tokens[self._offsets[index] : self._offsets[index + 1]] for index in indices]

    def longest(self) -> int:
        """Return the number of tokens of the longest text."""
        return int(np.diff(self._offsets).max())


def build_token_table(
    texts: Dataset,
    columns: Sequence[str],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    max_length: int,
    prefix: str = "",
    fingerprint: str,
    vocabulary: int | None = None,
) -> TokenTable:
    """Open the token table of ``texts``. Build the token table if it is not in the cache.

    A text is ``prefix``, then the columns joined by a space and stripped, as in
    ``Passage.content``. A text with more than ``max_length`` tokens, including special tokens, is
    truncated. fingerprint: hash of ``texts``. vocabulary: number of word embeddings. Raises
    InputError for a token id without a word embedding.
    """
    require_utf8(prefix, f"prefix {prefix!a}")

    def build(folder: Path) -> dict[str, Any]:
        own_tokenizer = copy.deepcopy(tokenizer)  # a call changes the truncation of the tokenizer
        lengths = []
        largest_id = 0
        with (
            open(folder / "tokens.bin", "wb") as file,
            Progress(len(texts), f"tokenizing {columns[-1]}", "texts") as progress,
        ):
            for batch in column_batches(texts, columns, _TEXTS):
                rows = zip(*(batch[column] for column in columns), strict=True)
                contents = [prefix + " ".join(row).strip() for row in rows]
                encoded = own_tokenizer(
                    contents, truncation=True, max_length=max_length, return_attention_mask=False
                )
                for ids in encoded["input_ids"]:
                    # without special tokens, an empty text has no tokens; encoding pads it, too
                    array = np.array(ids or [tokenizer.pad_token_id], dtype="<i4")
                    largest_id = max(largest_id, int(array.max()))
                    lengths.append(len(array))
                    file.write(array.tobytes())
                require_known_ids(largest_id, vocabulary, tokenizer)
                progress.update(len(contents))
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])  # (n + 1,)
        np.save(folder / "offsets.npy", offsets, allow_pickle=False)
        return {"largest_id": largest_id}

    # not in the hash of the tokenizer, because every call of the tokenizer sets it
    side = tokenizer.truncation_side
    key = [fingerprint, list(columns), tokenizer_hash(tokenizer), max_length, prefix, side]
    folder, about = cached_tables("tokens", key, build)
    # another encoder with fewer word embeddings may have built the table
    require_known_ids(about["largest_id"], vocabulary, tokenizer)
    return TokenTable(folder)


def tokenizer_hash(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return a hash of everything that decides how the tokenizer divides a text."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    for name in ("truncation", "padding"):  # encoding changes these settings
        state.pop(name, None)
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
