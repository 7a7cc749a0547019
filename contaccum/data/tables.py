"""Tables of texts and of token ids in the cache.

Each table is written once and then mapped into memory.
"""

import copy
import hashlib
import json
import os
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
from datasets import Dataset

from contaccum.formats.records import READER_VERSION, content_id, record_line
from contaccum.runtime.cache import cached_folder
from contaccum.runtime.checks import require_known_ids, require_utf8
from contaccum.runtime.files import read_json, write_json
from contaccum.runtime.progress import progress_bar

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
    scores: np.ndarray  # (offsets[n],) float32, teacher scores or NaN

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
    def scored(self) -> bool:
        """Whether any value has a teacher score."""
        return not np.isnan(self.scores).all()

    def take(self, rows: np.ndarray, most: np.ndarray | int | None = None) -> "Ragged":
        """Return the lists at the positions ``rows``. most: keep at most this many values of each.

        ``most`` is one number, or one for each of ``rows``.
        """
        lengths = self.lengths[rows]
        if most is not None:
            lengths = np.minimum(lengths, most)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        indices = np.arange(offsets[-1]) + np.repeat(self.offsets[rows] - offsets[:-1], lengths)
        return Ragged(offsets, self.values[indices], self.scores[indices])

    def renumbered(self, used: np.ndarray) -> "Ragged":
        """Replace each value by its index in ``used``, which is sorted and contains every value."""
        return replace(self, values=np.searchsorted(used, self.values))

    @property
    def owners(self) -> np.ndarray:
        """Number of the list of each value, (offsets[n],) int64."""
        return np.repeat(np.arange(len(self)), self.lengths)

    def save(self, path: Path) -> None:
        np.savez(path, offsets=self.offsets, values=self.values, scores=self.scores)

    @classmethod
    def load(cls, path: Path) -> "Ragged":
        stored = np.load(path, allow_pickle=False)
        return cls(stored["offsets"], stored["values"], stored["scores"])

    @classmethod
    def grouped(
        cls,
        owners: np.ndarray,
        values: np.ndarray,
        count: int,
        scores: np.ndarray | None = None,
    ) -> "Ragged":
        """Return ``count`` lists from k values in any order.

        owners: number of the list of each value, (k,). values: (k,). scores: (k,). Each list has
        its values in the given order, and of equal values only the first.
        """
        _, numbers = np.unique(values, return_inverse=True)
        keys = owners * (int(numbers.max(initial=0)) + 1) + numbers
        kept = np.sort(np.unique(keys, return_index=True)[1])
        kept = kept[np.argsort(owners[kept], kind="stable")]
        offsets = np.searchsorted(owners[kept], np.arange(count + 1))
        if scores is None:
            scores = np.full(len(values), np.nan, dtype=np.float32)
        return cls(offsets, values[kept], scores[kept])

    @classmethod
    def concatenated(cls, parts: Sequence["Ragged"], sizes: Sequence[int]) -> "Ragged":
        """Concatenate lists of row numbers, and shift the numbers to fit the concatenated tables.

        ``parts[i]`` has row numbers of table i, which has ``sizes[i]`` rows. The result has row
        numbers of the joined table.
        """
        starts = np.cumsum([0, *sizes])
        values = [part.values + start for part, start in zip(parts, starts, strict=False)]
        ends = np.cumsum(np.concatenate([[0], *(part.lengths for part in parts)]))
        scores = np.concatenate([part.scores for part in parts])
        return cls(ends, np.concatenate(values), scores)


class TableWriter:
    """Writes an Arrow file of strings, and computes a hash of all rows.

    The hash of each row's text (see ``text_hash``) goes to a second file, which ``text_hashes``
    reads.
    """

    def __init__(self, path: Path, columns: tuple[str, ...]) -> None:
        self._schema = pa.schema([(name, pa.string()) for name in columns])
        self._stream = pa.ipc.new_stream(str(path), self._schema)
        self._digest = hashlib.blake2b(digest_size=16)
        self._rows: list[tuple[str, ...]] = []
        self.path = path
        self.columns = columns
        self._text_hashes = array("q")

    @property
    def rows(self) -> int:
        """Number of rows that were added."""
        return len(self._text_hashes)

    def add(self, row: tuple[str, ...], text_hash: int) -> int:
        """Add a row with one string per column. Return the number of the row, counted from 0."""
        self._rows.append(row)
        self._text_hashes.append(text_hash)
        self._digest.update(record_line(row))
        if len(self._rows) == _ROWS:
            self._flush()
        return self.rows - 1

    def _flush(self) -> None:
        columns = [pa.array(column, pa.string()) for column in zip(*self._rows, strict=True)]
        self._stream.write_batch(pa.record_batch(columns, schema=self._schema))
        self._rows.clear()

    def close(self) -> str:
        """Finish the file. Return the hash of all rows in hexadecimal."""
        if self._rows:
            self._flush()
        self._stream.close()
        hashes = np.array(self._text_hashes, dtype=np.int64)  # (rows,)
        np.save(hashes_file(self.path), hashes, allow_pickle=False)
        return self._digest.hexdigest()


def hashes_file(table: Path) -> Path:
    """Return the file with the hashes of the texts of a table."""
    return table.with_suffix(".hashes.npy")


def text_hashes(table: Path) -> np.ndarray:
    """Return the hash of each row's text in a file of ``TableWriter``, (rows,) int64."""
    hashes: np.ndarray = np.load(hashes_file(table), mmap_mode="r", allow_pickle=False)
    return hashes


def rewrite(written: TableWriter, rows: np.ndarray, not_ids: Collection[str] = ()) -> str:
    """Write a closed table again with only ``rows``. Return the hash of all rows.

    not_ids: ids that are replaced by a hash of the text.
    """
    path = written.path
    columns = written.columns
    table = Dataset.from_file(str(path))
    hashes = np.array(text_hashes(path))
    new = path.with_name(f"new-{path.name}")
    writer = TableWriter(new, columns)
    for start in range(0, len(rows), _ROWS):
        part = rows[start : start + _ROWS]
        read = table[part]
        texts = zip(*(read[column] for column in columns), strict=True)
        for (key, *text), text_hash in zip(texts, hashes[part].tolist(), strict=True):
            if key in not_ids:
                key = f"unnamed-{content_id(text[0] if len(text) > 1 else '', text[-1])}"
            writer.add((key, *text), text_hash)
    digest = writer.close()
    os.replace(new, path)
    os.replace(hashes_file(new), hashes_file(path))
    return digest


def cached_tables(
    kind: str, key: object, build: Callable[[Path], dict[str, Any]]
) -> tuple[Path, dict[str, Any]]:
    """Return the cache folder with the tables for ``key``, and the content of its about.json.

    If the tables are not in the cache, ``build`` writes them into an empty folder, and returns what
    about.json is to contain.
    """

    def build_with_about(folder: Path) -> None:
        write_json(folder / ABOUT_FILE, build(folder))

    folder = cached_folder(kind, [READER_VERSION, key], build_with_about)
    return folder, read_json(folder / ABOUT_FILE, dict[str, Any])


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
        # as plain arrays, because a slice of numpy's memmap class takes ten times as long
        self._tokens = np.asarray(np.memmap(folder / "tokens.bin", dtype="<i4", mode="r"))
        self._offsets = np.asarray(
            np.load(folder / "offsets.npy", mmap_mode="r", allow_pickle=False)
        )

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def rows(self, indices: np.ndarray) -> list[np.ndarray]:
        """Return the token ids of the texts at ``indices`` (k,): k int32 arrays."""
        starts, ends = self._offsets[indices].tolist(), self._offsets[indices + 1].tolist()
        return [self._tokens[start:end] for start, end in zip(starts, ends, strict=True)]

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        """Return the number of tokens of the texts at ``indices`` (k,): (k,) int64."""
        lengths: np.ndarray = self._offsets[indices + 1] - self._offsets[indices]
        return lengths

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
            progress_bar(len(texts), f"tokenizing {columns[-1]}", "texts") as progress,
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
                progress.update(len(contents))
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])  # (n + 1,)
        np.save(folder / "offsets.npy", offsets, allow_pickle=False)
        return {"largest_id": largest_id}

    # not in the hash of the tokenizer, because every call of the tokenizer sets it
    side = tokenizer.truncation_side
    key = [fingerprint, list(columns), tokenizer_hash(tokenizer), max_length, prefix, side]
    folder, about = cached_tables("tokens", key, build)
    require_known_ids(about["largest_id"], vocabulary, tokenizer)
    return TokenTable(folder)


def tokenizer_hash(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return a hash of everything that decides how the tokenizer divides a text."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    for name in ("truncation", "padding"):  # encoding changes these settings
        state.pop(name, None)
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
