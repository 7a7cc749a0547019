"""Rules that mask (row, column) pairs of the loss, in addition to the masking of known positives.

A row is a query, and a column is a passage. In the passage-to-query direction of the symmetric loss, a row is a positive and a
column is a query. The rules change one block of logits at a time, without waiting for the device. The rules never mask a row's
own positive.

Similarity rule: let s+ be the score of a row and its own positive. A column with a score above s+ - margin is masked. With a
relative margin, the bound is s+ - margin |s+|. The score of a stored row and a stored column never changes, so the cached
log-sum-exps of the bank stay valid.
Source: Solatorio 2024 (GISTEmbed, arXiv 2402.16829), here with a margin.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from contaccum.batch import MISSING

CHUNK = 4096  # number of guide vectors to read at once, for the rows and for the columns of a block
# relative difference below which scores count as equal, because products of equal vectors are rounded in different ways
TOLERANCE = 1e-5


class PairRows(NamedTuple):
    """Training pairs of the rows in an (r, c) block of logits, one pair per row.

    In the query-to-passage direction, a row is the query of its pair. In the passage-to-query direction of the symmetric loss, a
    row is the positive of its pair.
    """

    queries: Tensor | None
    """For each pair, the row number of its query in the training set, (r,) int64 on the CPU. None if no rule uses the numbers."""
    positives: Tensor
    """Passage id of each positive, (r,) int64 on the CPU."""
    scores: Tensor
    """Logit of each query and its positive, (r,)."""
    scale: float
    """Logit of a pair with similarity 1."""


class Vectors(Protocol):
    """Vectors of n texts. A call with k row numbers, (k,) int64 on the CPU, returns their vectors, (k, d) on the CPU."""

    name: str

    def __call__(self, rows: Tensor) -> Tensor: ...


class Guide(NamedTuple):
    """Vectors of the training queries and passages from a fixed encoder. Their inner products decide which pairs are masked."""

    queries: Vectors
    passages: Vectors


@dataclass(frozen=True, eq=False)
class PairRules:
    """Rules that mask (row, column) pairs of the micro-batch and the bank. With the default values, no pair is masked."""

    missing: bool = False
    """Whether columns can be empty, that is, have the id MISSING. Empty columns are masked for every row."""
    separate: Tensor | None = None
    """For each training query, whether it is compared only with its own positive and hard negatives: (n,) bool on the CPU."""
    margin: float | None = None
    """Margin of the similarity rule. None: no similarity rule."""
    relative: bool = False
    """Whether the margin is relative to the score of the positive."""
    guide: Guide | None = None
    """Source of the scores in the similarity rule. None: the similarities of the trained model."""
    key: str = ""
    """Text with the values of all fields except ``missing``. Cached log-sum-exps are valid only for rules with the same key."""

    def __bool__(self) -> bool:
        return self.missing or self.separate is not None or self.margin is not None

    @property
    def by_query(self) -> bool:
        """Whether a rule needs the row numbers of the queries."""
        return self.separate is not None or self.guide is not None

    def leave_out(
        self,
        logits: Tensor,
        rows: PairRows,
        columns: Tensor | None,
        pairs: tuple[slice, slice] | None = None,
        *,
        of_queries: bool = False,
        counts: Tensor | None = None,
    ) -> None:
        """Apply the rules to logits (r, c): each masked logit becomes minus infinity.

        columns: passage id of each column, (c,) on the CPU. of_queries: whether the columns are queries. ``columns`` then has
        each query's row number in the training set, or is None if no rule uses these numbers.
        pairs: the training pairs of the rows and those of the columns, each as a slice. Each training pair has one row, and all
        have the same number of columns. ``pairs`` is None if no row belongs to the same training pair as a column.
        counts: (2,) int64. The number of unmasked logits is added to the first element. The number of logits that are masked
        because of a high score is added to the second.
        """
        own = None if pairs is None else _own_columns(logits, *pairs)
        self._mask_by_id(logits, rows, None if of_queries else columns, own)
        if self.margin is None:
            if counts is not None:
                counts[0] += (logits > -torch.inf).sum()
            return
        if counts is not None:
            counts[1] += (logits > -torch.inf).sum()
        kept = None if own is None else own[0].clone()
        if self.guide is None or columns is None or rows.queries is None:
            logits.masked_fill_(logits > self._bounds(rows.scores, rows.scale), -torch.inf)
        else:
            for top in range(0, len(logits), CHUNK):
                part = slice(top, top + CHUNK)
                queries, positives = self.guide.queries(rows.queries[part]), self.guide.passages(rows.positives[part])
                queries, positives = (each.to(logits.device).float() for each in (queries, positives))
                bounds = self._bounds((queries * positives).sum(1), 1.0)
                vectors, source = (positives, self.guide.queries) if of_queries else (queries, self.guide.passages)
                for left in range(0, len(columns), CHUNK):
                    others = source(columns[left : left + CHUNK].clamp(min=0))  # a missing column has no vector
                    scores = vectors @ others.to(logits.device).float().T
                    logits[part, left : left + CHUNK].masked_fill_(scores > bounds, -torch.inf)
        if own is not None and kept is not None:
            own[0].copy_(kept)
        if counts is not None:
            remaining = (logits > -torch.inf).sum()
            counts[0] += remaining
            counts[1] -= remaining

    def _mask_by_id(self, logits: Tensor, rows: PairRows, passages: Tensor | None, own: Tensor | None) -> None:
        """Mask empty columns. For rows whose query is compared only with its own pair, mask all columns of other pairs.

        passages: passage id of each column, or None if the columns are queries. own: result of ``_own_columns``.
        """
        device = logits.device
        if self.missing and passages is not None:
            logits.masked_fill_((passages == MISSING).to(device, non_blocking=True), -torch.inf)
        if self.separate is not None and (alone := self.separate[rows.queries]).any():
            kept = None if own is None else own.clone()
            logits.masked_fill_(alone.to(device, non_blocking=True).unsqueeze(1), -torch.inf)
            if own is not None and kept is not None:
                own.copy_(kept)

    def _bounds(self, scores: Tensor, scale: float) -> Tensor:
        """Return one bound per row, (r, 1). A column whose score is above the bound of the row is masked.

        scores: for each row, its score with its own positive, (r,). scale: score of a pair with similarity 1.
        """
        assert self.margin is not None
        drop = scores.abs() * self.margin if self.relative else self.margin * scale
        return (scores - drop + TOLERANCE * scores.abs().clamp(min=scale)).unsqueeze(1)


def _own_columns(logits: Tensor, rows: slice, columns: slice) -> Tensor | None:
    """Return a view of the logits between each row and the columns of its own training pair: (columns per pair, pairs).

    logits: (r, c). rows: slice of the training pairs that the rows belong to. columns: slice of the training pairs that the
    columns belong to. If no pair is in both slices, the result is None.
    """
    first, end = max(rows.start, columns.start), min(rows.stop, columns.stop)
    if first >= end:
        return None
    per_pair = logits.shape[1] // (columns.stop - columns.start)
    part = logits[first - rows.start : end - rows.start].unflatten(1, (-1, per_pair))
    return part[:, first - columns.start : end - columns.start].diagonal(dim1=0, dim2=1)


NO_RULES = PairRules()
