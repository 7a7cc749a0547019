"""Every text tokenised once, into the cache: training reads token ids from mapped files, never a tokenizer."""

import copy
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
from datasets import Dataset
from tqdm import tqdm

from contaccum.data.arrow import cached_folder, column_batches
from contaccum.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_OFFSETS = 1 << 20  # offsets looked at together
_BATCH = 2000  # texts handed to the tokenizer at a time; it splits them between its threads


class TokenTable:
    """Token ids of n texts, special tokens included, in two memory-mapped files."""

    def __init__(self, folder: Path) -> None:
        self._tokens = np.load(folder / "tokens.npy", mmap_mode="r", allow_pickle=False)  # (all tokens,) int32
        self._offsets = np.load(folder / "offsets.npy", mmap_mode="r", allow_pickle=False)  # (n + 1,) int64

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def rows(self, indices: Sequence[int] | np.ndarray) -> list[np.ndarray]:
        """The token ids of these texts, an int32 array each."""
        return [self._tokens[self._offsets[index] : self._offsets[index + 1]] for index in indices]

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        """How many tokens these texts have; in the shape of ``indices``."""
        return self._offsets[indices + 1] - self._offsets[indices]

    def longest(self) -> int:
        """Most tokens that a text has; read in pieces, since a table may be larger than memory."""
        starts = range(0, len(self), _OFFSETS)
        return max(int(np.diff(self._offsets[start : start + _OFFSETS + 1]).max()) for start in starts)


class TextTokens:
    """Tokenises texts as they come, as ``build_token_table`` does, with a tokenizer of its own: one serves one thread."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", max_length: int, prefix: str) -> None:
        """InputError for a tokenizer that is not a fast one."""
        _require_fast(tokenizer)
        self._tokenizer, self._prefix = copy.deepcopy(tokenizer), prefix
        self.max_length = max_length
        """In tokens, the special ones included; no row has more."""

    def rows(self, texts: Iterable[tuple[str, ...]]) -> list[np.ndarray]:
        """The token ids of these texts, each in columns, an int32 array each."""
        return _encoded(texts, self._tokenizer, self.max_length, self._prefix)

    def twin(self) -> "TextTokens":
        """The same for another thread."""
        return TextTokens(self._tokenizer, self.max_length, self._prefix)


class JoinedTokens:
    """Token tables one behind the other, as one."""

    def __init__(self, tables: Sequence[TokenTable]) -> None:
        self._tables = tables
        self._starts = np.cumsum([0, *map(len, tables)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def rows(self, indices: Sequence[int] | np.ndarray) -> list[np.ndarray]:
        """As TokenTable's."""
        places = np.searchsorted(self._starts, indices, side="right") - 1
        return [
            self._tables[place].rows([index - self._starts[place]])[0]
            for index, place in zip(indices, places, strict=True)
        ]

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        """As TokenTable's."""
        places = np.searchsorted(self._starts, indices, side="right") - 1
        found = np.zeros(indices.shape, dtype=np.int64)
        for number, table in enumerate(self._tables):
            own = places == number
            found[own] = table.lengths(indices[own] - self._starts[number])
        return found

    def longest(self) -> int:
        """As TokenTable's."""
        return max(table.longest() for table in self._tables)


def build_token_table(
    texts: Dataset,
    columns: Sequence[str],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    max_length: int,
    prefix: str = "",
    fingerprint: str,
) -> TokenTable:
    """Open the tokens of a table's texts, tokenising them where the cache has none.

    A text is ``prefix`` and then the columns, joined by a space and stripped (title and text give ``Passage.content``),
    cut at ``max_length`` tokens with the special tokens. ``fingerprint`` tells this table from any other.

    Raises InputError for a tokenizer that is not a fast one.
    """
    _require_fast(tokenizer)
    key = [fingerprint, list(columns), tokenizer_hash(tokenizer), max_length, prefix]

    def build(folder: Path) -> None:
        with open(folder / "tokens.npy", "wb") as file:
            offsets = _write_tokens(file, texts, columns, tokenizer, max_length, prefix)
        np.save(folder / "offsets.npy", offsets, allow_pickle=False)

    return TokenTable(cached_folder("tokens", key, build))


def _require_fast(tokenizer: "PreTrainedTokenizerBase") -> None:
    if not tokenizer.is_fast:
        raise InputError(f"the tokenizer of {tokenizer.name_or_path!r} is a slow one, expected a fast tokenizer")


def _encoded(
    texts: Iterable[tuple[str, ...]], tokenizer: "PreTrainedTokenizerBase", max_length: int, prefix: str
) -> list[np.ndarray]:
    contents = [prefix + " ".join(columns).strip() for columns in texts]
    encoded = tokenizer(contents, truncation=True, max_length=max_length, return_attention_mask=False)
    return [np.array(row, dtype="<i4") for row in encoded["input_ids"]]


def tokenizer_hash(tokenizer: "PreTrainedTokenizerBase") -> str:
    """What tells one fast tokenizer from another."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    # calls leave their truncation and padding behind in the tokenizer; neither tells one tokenizer from another
    state.pop("truncation", None)
    state.pop("padding", None)
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def _write_tokens(
    file: BinaryIO,
    texts: Dataset,
    columns: Sequence[str],
    tokenizer: "PreTrainedTokenizerBase",
    max_length: int,
    prefix: str,
) -> np.ndarray:
    """Write a .npy of all token ids without ever holding them all; returns the offsets, (n + 1,) int64."""
    _write_header(file, 0)
    data_start = file.tell()
    lengths = [np.zeros(1, dtype=np.int64)]
    with tqdm(total=len(texts), desc=f"tokenising {columns[-1]}", unit=" texts", disable=None) as progress:
        for batch in column_batches(texts, columns, _BATCH):
            rows = zip(*(batch[column] for column in columns), strict=True)
            ids = _encoded(rows, tokenizer, max_length, prefix)
            file.write(np.concatenate(ids).tobytes())
            lengths.append(np.array([len(row) for row in ids], dtype=np.int64))
            progress.update(len(ids))
    offsets = np.cumsum(np.concatenate(lengths))
    file.seek(0)
    _write_header(file, int(offsets[-1]))
    assert file.tell() == data_start, "numpy leaves room in a header for its length to grow"
    return offsets


def _write_header(file: BinaryIO, count: int) -> None:
    header = {"descr": "<i4", "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(file, header)
