"""Tables of texts and of token ids in the cache. Each table is written once and then mapped into memory."""

import copy
import hashlib
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, SupportsIndex, TypeVar

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
from datasets import Dataset
from tqdm import tqdm

from contaccum.errors import InputError
from contaccum.formats.records import RejectedRecords
from contaccum.runtime.checks import require_fast, require_known_ids, require_utf8
from contaccum.runtime.files import read_json, remove_folder, sha256_of, write_json
from contaccum.runtime.locks import cached_folder, file_key

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PASSAGE_COLUMNS = ("id", "title", "text")
QUERY_COLUMNS = ("id", "text")
REJECTED_FILE = "quarantine.jsonl"
ABOUT_FILE, ABOUT_VERSION = "about.json", 1
_ROWS = 5000  # number of rows in one Arrow record batch: about 4 MB of passages
_OFFSETS = 1 << 20  # number of offsets or token ids that are read at a time
_TEXTS = 2000  # number of texts per tokenizer call; the tokenizer divides them between threads


@dataclass(frozen=True)
class Ragged:
    """n lists of row numbers, stored in one array. List i is ``values[offsets[i]:offsets[i + 1]]``."""

    offsets: np.ndarray  # (n + 1,) int64
    values: np.ndarray  # (offsets[n],) int64
    scores: np.ndarray | None = None  # (offsets[n],) float32, teacher scores or NaN; None: not requested, or none found

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, index: SupportsIndex) -> np.ndarray:
        """Return list number ``index``, a view of ``values``."""
        return self.values[self.span(index)]

    def span(self, index: SupportsIndex) -> slice:
        """Return the part of ``values`` and ``scores`` that belongs to list number ``index``, as a slice."""
        number = index.__index__()
        return slice(self.offsets[number], self.offsets[number + 1])

    @property
    def lengths(self) -> np.ndarray:
        """Length of every list, (n,) int64."""
        return np.diff(self.offsets)

    @property
    def scores_or_nan(self) -> np.ndarray:
        """Teacher scores, (offsets[n],) float32; all NaN if ``scores`` is None."""
        return np.full(len(self.values), np.nan, dtype=np.float32) if self.scores is None else self.scores

    def take(self, rows: np.ndarray) -> "Ragged":
        """Return the lists at the positions ``rows``."""
        lengths = self.lengths[rows]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        indices = np.arange(offsets[-1]) + np.repeat(self.offsets[rows] - offsets[:-1], lengths)
        return self.chosen(Ragged(offsets, indices))

    def chosen(self, indices: "Ragged") -> "Ragged":
        """Return ``indices`` with each number i replaced by ``self.values[i]``. The score of this value is ``self.scores[i]``."""
        scores = None if self.scores is None else self.scores[indices.values]
        return Ragged(indices.offsets, self.values[indices.values], scores)

    def renumbered(self, used: np.ndarray) -> "Ragged":
        """Replace each value by its index in ``used``, which is sorted and contains every value."""
        return replace(self, values=np.searchsorted(used, self.values))

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

        ``parts[i]`` has row numbers of table i, which has ``sizes[i]`` rows. The result has row numbers of the joined table.
        """
        starts = np.cumsum([0, *sizes])
        values = [part.values + start for part, start in zip(parts, starts, strict=False)]
        ends = np.cumsum(np.concatenate([[0], *(part.lengths for part in parts)]))
        scored = any(part.scores is not None for part in parts)
        scores = np.concatenate([part.scores_or_nan for part in parts]) if scored else None
        return cls(ends, np.concatenate(values), scores)


class TableWriter:
    """Writes an Arrow file of strings and computes a hash of all rows."""

    def __init__(self, path: Path, columns: tuple[str, ...]) -> None:
        self._schema = pa.schema([(name, pa.string()) for name in columns])
        self._sink = pa.OSFile(str(path), "wb")
        self._stream = pa.ipc.new_stream(self._sink, self._schema)
        self._digest = hashlib.blake2b(digest_size=16)
        self._rows: list[tuple[str, ...]] = []
        self.rows = 0

    def add(self, row: tuple[str, ...]) -> int:
        """Add a row with one string per column. Return the number of the row, counted from 0."""
        self._rows.append(row)
        self.rows += 1
        if len(self._rows) == _ROWS:
            self._flush()
        return self.rows - 1

    def _flush(self) -> None:
        columns = zip(*self._rows, strict=True)
        batch = pa.record_batch([pa.array(column, pa.string()) for column in columns], schema=self._schema)
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
        return self._digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class About:
    """Content of about.json in a cache folder with tables."""

    fingerprint: str
    bad: int  # number of rejected records
    bytes: dict[str, int] = field(default_factory=dict)  # size of each file; caches of older versions lack the sizes


AboutType = TypeVar("AboutType", bound=About)


def write_about(folder: Path, about: Mapping[str, Any]) -> None:
    """Write about.json into a finished cache folder. The file contains ``about`` and the size of each file in the folder."""
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    write_json(folder / ABOUT_FILE, {"format_version": ABOUT_VERSION, **about, "bytes": sizes})


def read_about(folder: Path, type_: type[AboutType]) -> AboutType:
    """Read about.json of a cache folder as ``type_``. Raise InputError if the size of a file is not the size in about.json."""
    about: AboutType = read_json(folder / ABOUT_FILE, type_, version=ABOUT_VERSION)
    for name, size in about.bytes.items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else 0
        if found != size:
            raise InputError(f"{path}: has {found} bytes instead of {size}. Delete {folder} and run the command again.")
    return about


def column_batches(table: Dataset, columns: Iterable[str], size: int = 10_000) -> Iterator[dict[str, list[str]]]:
    selected = table.select_columns(list(columns))
    for start in range(0, len(selected), size):
        yield selected[start : start + size]


def write_rejected(folder: Path, rejected: RejectedRecords) -> None:
    if rejected.entries:
        with open(folder / REJECTED_FILE, "w", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
            entries = sorted(rejected.entries, key=lambda entry: (entry["line"], entry.get("record", 0)))
            file.writelines(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)


def report_rejected(source: Path, rejected: RejectedRecords) -> None:
    """Save rejected records in the cache, and warn. Used for files that have no table in the cache, such as qrels."""
    if rejected.entries:
        key = [file_key(source), rejected.entries]
        folder = cached_folder("quarantine", key, lambda folder: write_rejected(folder, rejected))
        warn_of_rejected(source, len(rejected.entries), folder)


def warn_of_rejected(source: Path, count: int, folder: Path) -> None:
    if count:
        what = "1 invalid record is skipped" if count == 1 else f"{count} invalid records are skipped"
        warnings.warn(f"{source}: {what}, listed in {folder / REJECTED_FILE}", stacklevel=2)


def load_array(path: Path) -> np.memmap:
    """Map a .npy file of a cache folder into memory."""
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(
            f"{path}: cannot be read ({error}). Delete {path.parent} and run the command again."
        ) from error


class TokenTable:
    """Token ids of n texts, special tokens included, in two memory-mapped files.

    tokens.npy has the token ids of all texts, int32. offsets.npy has the start index of each text in tokens.npy, (n + 1,) int64.
    """

    def __init__(self, folder: Path) -> None:
        self._tokens, self._offsets = load_array(folder / "tokens.npy"), load_array(folder / "offsets.npy")
        if self._offsets[-1] != len(self._tokens):
            raise InputError(
                f"{folder}: token ids and offsets do not match. Delete this folder and run the command again."
            )

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def rows(self, indices: Sequence[int] | np.ndarray) -> list[np.ndarray]:
        """Return the token ids of the texts at ``indices``: one int32 array for each index."""
        return [self._tokens[self._offsets[index] : self._offsets[index + 1]] for index in indices]

    def largest_id(self) -> int:
        """Return the largest token id of all texts. The file is read in pieces, because it may not fit into memory."""
        file, first, total = str(self._tokens.filename), self._tokens.offset, len(self._tokens)
        pieces = (np.fromfile(file, "<i4", _OFFSETS, offset=first + 4 * start) for start in range(0, total, _OFFSETS))
        return max((int(piece.max()) for piece in pieces), default=0)

    def longest(self) -> int:
        """Return the number of tokens of the longest text. The offsets are read in pieces, as they may not fit into memory."""
        starts = range(0, len(self), _OFFSETS)
        return max(int(np.diff(self._offsets[start : start + _OFFSETS + 1]).max()) for start in starts)


class TextTokens:
    """Tokenizer for one thread, with a separate copy of the given tokenizer."""

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", max_length: int, prefix: str, vocabulary: int | None = None
    ) -> None:
        """Copy the tokenizer. Raise InputError if it is a slow tokenizer.

        max_length: maximum number of tokens of a text, including special tokens. A longer text is truncated. prefix: text to put
        before each text. vocabulary: number of word embeddings; ``rows`` raises InputError for a token id without a word
        embedding. None: token ids are not checked.
        """
        require_fast(tokenizer)
        self._tokenizer, self._prefix = copy.deepcopy(tokenizer), require_utf8(prefix, f"prefix {prefix!a}")
        self._vocabulary, self._max_length = vocabulary, max_length

    def rows(self, texts: Iterable[tuple[str, ...]]) -> list[np.ndarray]:
        """Return the token ids of each text as an int32 array. A text is a tuple of columns, such as title and text."""
        contents = [self._prefix + " ".join(columns).strip() for columns in texts]
        encoded = self._tokenizer(contents, truncation=True, max_length=self._max_length, return_attention_mask=False)
        largest = max((max(row, default=0) for row in encoded["input_ids"]), default=0)
        require_known_ids(largest, self._vocabulary, self._tokenizer)
        empty = [self._tokenizer.pad_token_id]  # as in encoding; without special tokens, an empty text has no tokens
        return [np.array(row or empty, dtype="<i4") for row in encoded["input_ids"]]

    def longest(self) -> int:
        """Return ``max_length``, because the texts are not known in advance."""
        return self._max_length


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

    A text is ``prefix``, then the columns joined by a space and stripped, as in ``Passage.content``. A text with
    more than ``max_length`` tokens, including special tokens, is truncated. fingerprint: hash of ``texts``. vocabulary: number
    of word embeddings. Raises InputError for a slow tokenizer and for a token id without a word embedding.
    """
    require_fast(tokenizer)
    # not in the hash of the tokenizer, because every call of the tokenizer sets it
    left = ["left"] if tokenizer.truncation_side == "left" else []
    key = [fingerprint, list(columns), tokenizer_hash(tokenizer), max_length, prefix, *left]

    def build(folder: Path) -> None:
        with open(folder / "tokens.npy", "wb") as file:
            offsets = _write_tokens(file, texts, columns, TextTokens(tokenizer, max_length, prefix, vocabulary))
        np.save(folder / "offsets.npy", offsets, allow_pickle=False)
        write_about(folder, {"sha256": {path.name: sha256_of(path) for path in sorted(folder.iterdir())}})

    folder = cached_folder("tokens", key, build)
    if _is_damaged(folder):
        warnings.warn(f"{folder}: the token ids are damaged; the texts are tokenized again", stacklevel=2)
        with suppress(OSError):  # another process may remove the folder at the same time
            remove_folder(folder)
        folder = cached_folder("tokens", key, build)
    table = TokenTable(folder)
    require_known_ids(table.largest_id(), vocabulary, tokenizer)  # another encoder may have built the table
    return table


def _is_damaged(folder: Path) -> bool:
    """Return whether a file of a token table is missing or differs from its saved hash.

    Tables of earlier versions have no hashes and count as undamaged.
    """
    if not (folder / ABOUT_FILE).is_file():
        return False
    hashes = read_json(folder / ABOUT_FILE, dict[str, Any], version=ABOUT_VERSION).get("sha256", {})
    if not isinstance(hashes, dict):
        return True
    return any(not (folder / name).is_file() or sha256_of(folder / name) != hashed for name, hashed in hashes.items())


def tokenizer_hash(tokenizer: "PreTrainedTokenizerBase") -> str:
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    # encoding changes the tokenizer's truncation and padding settings, so the hash does not include them
    state = {name: part for name, part in state.items() if name not in ("truncation", "padding")}
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def _write_tokens(file: BinaryIO, texts: Dataset, columns: Sequence[str], tokens: TextTokens) -> np.ndarray:
    """Tokenize the texts and write all token ids as a .npy file. Return the offsets of the texts, (n + 1,) int64."""
    _write_header(file, 0)
    data_start = file.tell()
    lengths = [np.zeros(1, dtype=np.int64)]
    with tqdm(total=len(texts), desc=f"tokenizing {columns[-1]}", unit=" texts", disable=None) as progress:
        for batch in column_batches(texts, columns, _TEXTS):
            ids = tokens.rows(zip(*(batch[column] for column in columns), strict=True))
            file.write(np.concatenate(ids).tobytes())
            lengths.append(np.array([len(row) for row in ids], dtype=np.int64))
            progress.update(len(ids))
    offsets = np.cumsum(np.concatenate(lengths))
    file.seek(0)
    _write_header(file, int(offsets[-1]))
    assert file.tell() == data_start, "the final .npy header must be as long as the first one, which it overwrites"
    return offsets


def _write_header(file: BinaryIO, count: int) -> None:
    header = {"descr": "<i4", "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(file, header)
