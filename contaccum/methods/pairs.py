"""Training pairs, and which of their (query, passage) combinations are positives.

The loss compares every query with every passage of two sets of pairs: the current micro-batch and
the bank. Both have the type ``Pairs``, so one function computes the logits of all four blocks of
the matrix (current or stored queries, current or stored passages). Ids are always on the CPU, and
nothing here waits for the device.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from contaccum.batch import RowIds


class IdIndex:
    """Map from each passage id to its entries, so that a lookup does not search all entries."""

    def __init__(self) -> None:
        self._entries: dict[int, list[int]] = {}

    def add(self, first: int, ids: Tensor) -> None:
        """Add n entries with the numbers ``first``, ``first + 1`` and so on.

        ids: (n, P), the passage ids of each entry. Negative numbers are padding.
        """
        for entry, ids_of_entry in enumerate(ids.tolist(), first):
            for passage in set(ids_of_entry):
                if passage >= 0:
                    self._entries.setdefault(passage, []).append(entry)

    def remove(self, first: int, ids: Tensor) -> None:
        """Remove n entries.

        ``first`` and ``ids`` must be those with which the entries were added.
        """
        for entry, ids_of_entry in enumerate(ids.tolist(), first):
            for passage in set(ids_of_entry):
                if passage >= 0:
                    # fast, because the bank removes the oldest entry first, which is at the front
                    # of the list
                    self._entries[passage].remove(entry)
                    if not self._entries[passage]:
                        del self._entries[passage]

    def find(self, ids: Tensor, entries: range) -> set[tuple[int, int]]:
        """Return all (i, j) for which row i of ``ids`` (r, P) and ``entries[j]`` share an id."""
        found = set()
        for row, ids_of_row in enumerate(ids.tolist()):
            for passage in ids_of_row:
                for entry in self._entries.get(passage, ()):
                    if entry in entries:
                        found.add((row, entry - entries.start))
        return found


@dataclass(frozen=True)
class Pairs:
    """n training pairs: queries, each with its positive and H hard negatives.

    A micro-batch, or slots of the bank.
    """

    queries: Tensor | None
    """Embeddings of the queries, (n, d). None in a bank that stores only passages."""
    passages: Tensor
    """Embeddings of the passages, (n, 1 + H, d). The positive is the first passage of its pair."""
    positive_logits: Tensor
    """Logit of each query and its own positive, (n,)."""
    ids: RowIds
    """Passage ids of the n pairs, on the CPU."""
    first: int
    """Number of the first pair; the others follow. A pair of the bank has the number of its slot.
    Current pairs have negative numbers, so they never equal a pair of the bank."""
    columns_by_id: IdIndex
    """Index of the passages. Entry ``(1 + H) * pair + i`` is passage i of a pair. Empty without
    masking."""
    rows_by_id: IdIndex | None = None
    """Index of the known positives of each query. None for current pairs."""
    ages: Tensor | None = None
    """Number of optimizer steps since each pair was encoded, (n,) int64. None for current pairs,
    whose age is 0."""
    age_decay: float = 0.0
    """What a logit loses for each step between the ages of its query and its passage."""

    def __len__(self) -> int:
        return len(self.passages)

    @property
    def numbers(self) -> range:
        """Numbers of the n pairs."""
        return range(self.first, self.first + len(self))

    def __getitem__(self, part: slice) -> "Pairs":
        """Return the pairs ``part.start`` to ``part.stop`` - 1, counted from the first pair."""
        return replace(
            self,
            queries=None if self.queries is None else self.queries[part],
            passages=self.passages[part],
            positive_logits=self.positive_logits[part],
            ids=self.ids[part],
            first=self.first + part.start,
            ages=None if self.ages is None else self.ages[part],
        )


def same_pairs(rows: Pairs, columns: Pairs) -> list[tuple[int, int]]:
    """Return (i, j) for each pair that is pair i of ``rows`` and pair j of ``columns``."""
    start = max(rows.numbers.start, columns.numbers.start)
    stop = min(rows.numbers.stop, columns.numbers.stop)
    return [(number - rows.first, number - columns.first) for number in range(start, stop)]


def steps_between(rows: Pairs, columns: Pairs) -> Tensor | None:
    """Return the age difference of each pair of ``rows`` and each pair of ``columns``, int64.

    The shape is (r, pairs). It is (r, 1) or (pairs,) if all pairs of one side are current. None if
    all pairs are current.
    """
    if rows.ages is None:
        return columns.ages
    if columns.ages is None:
        return rows.ages.unsqueeze(1)
    return (rows.ages.unsqueeze(1) - columns.ages).abs()


def positive_columns(rows: Pairs, columns: Pairs) -> set[tuple[int, int]]:
    """Return all (query i, passage j) that are positives: the query's own, or known by id."""
    per_pair = columns.passages.shape[1]
    own = {(row, pair * per_pair) for row, pair in same_pairs(rows, columns)}
    if rows.rows_by_id is not None and len(rows) > len(columns):
        # Both indexes find the same combinations, and looking up the side with fewer ids is faster.
        # Here these are the passages, so the first number that ``find`` returns is the column.
        found = rows.rows_by_id.find(columns.ids.columns.reshape(-1, 1), rows.numbers)
        return own | {(row, column) for column, row in found}
    entries = range(columns.numbers.start * per_pair, columns.numbers.stop * per_pair)
    return own | columns.columns_by_id.find(rows.ids.positives, entries)


def as_index(elements: set[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the row numbers and the column numbers of ``elements`` as tensors on ``device``."""
    index = torch.tensor([*elements], dtype=torch.long).reshape(-1, 2).T.contiguous()  # (2, n)
    rows, columns = index.to(device, non_blocking=True)
    return rows, columns
