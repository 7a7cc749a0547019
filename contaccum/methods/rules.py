"""Rules that remove negatives, in addition to the known positives.

Each rule is a boolean matrix (queries, passages).

Similarity rule: let s+ be the score of a query and its own positive. A passage with a score above
s+ - margin is no negative. With a relative margin, the bound is s+ - margin |s+|. The score of two
stored vectors never changes, so the cached log-sum-exps of the bank stay valid. Source: Solatorio
2024 (GISTEmbed, arXiv 2402.16829), here with a margin.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from contaccum.batch import MISSING
from contaccum.methods.pairs import Pairs, same_pairs

CHUNK = 4096  # number of guide vectors to read at once
# relative difference below which scores count as equal, because products of equal vectors are
# rounded differently
TOLERANCE = 1e-5


class Vectors(Protocol):
    """Vectors of n texts.

    A call with k row numbers, (k,) int64 on the CPU, returns their vectors, (k, d) on the CPU.
    """

    name: str

    def __call__(self, rows: Tensor) -> Tensor: ...


class Guide(NamedTuple):
    """Vectors of the training queries and passages from a fixed encoder, the guide."""

    queries: Vectors
    passages: Vectors

    def scores(self, rows: Pairs, columns: Pairs, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the scores of queries and passages, (r, c), and of the positives, (r,)."""

        def read(source: Vectors, numbers: Tensor) -> Tensor:
            # a missing passage has no vector; another rule removes it, so the vector of passage 0
            # can stand for it
            numbers = numbers.clamp(min=0)
            return torch.cat([source(part).to(device).float() for part in numbers.split(CHUNK)])

        assert rows.ids.queries is not None
        queries = read(self.queries, rows.ids.queries)  # (r, d)
        positives = read(self.passages, rows.ids.columns[:, 0])  # (r, d)
        passages = read(self.passages, columns.ids.columns.flatten())  # (c, d)
        return queries @ passages.T, (queries * positives).sum(1)


@dataclass(frozen=True, eq=False)
class PairRules:
    """Rules that remove negatives. With the default values, none is removed."""

    missing: bool = False
    """Whether columns can be empty, that is, have the id MISSING."""
    separate: Tensor | None = None
    """For each training query, whether it has only its own hard negatives: (n,) bool on the CPU.
    None: no query."""
    margin: float | None = None
    """Margin of the similarity rule. None: no similarity rule."""
    relative: bool = False
    """Whether the margin is relative to the score of the positive."""
    guide: Guide | None = None
    """Source of the scores in the similarity rule. None: the similarities of the trained model."""
    key: str = ""
    """Text with the values of all fields except ``missing``. Cached log-sum-exps are valid only for
    the same key."""

    def __bool__(self) -> bool:
        return self.missing or self.separate is not None or self.margin is not None

    @property
    def by_query(self) -> bool:
        """Whether a rule needs the row numbers of the queries."""
        return self.separate is not None or self.guide is not None

    def removed_by_id(self, rows: Pairs, columns: Pairs) -> Tensor:
        """Return which (query, passage) are no negatives by id: bool (r, c) or (1, c), on CPU."""
        empty = (columns.ids.columns.flatten() == MISSING).unsqueeze(0)  # (1, c)
        if self.separate is None:
            return empty
        assert rows.ids.queries is not None
        alone = self.separate[rows.ids.queries].unsqueeze(1).repeat(1, len(columns))  # (r, pairs)
        for row, pair in same_pairs(rows, columns):
            alone[row, pair] = False
        return empty | alone.repeat_interleave(columns.passages.shape[1], 1)

    def removed_by_score(self, logits: Tensor, rows: Pairs, columns: Pairs, unit: float) -> Tensor:
        """Return which (query, passage) are no negatives because of a high score: bool (r, c).

        logits: (r, c), before the age penalty. unit: logit of two equal vectors of length 1.
        """
        assert self.margin is not None
        if self.guide is None:
            return too_similar(logits, rows.positive_logits, self.margin, self.relative, unit)
        scores, positive_scores = self.guide.scores(rows, columns, logits.device)
        return too_similar(scores, positive_scores, self.margin, self.relative)


def too_similar(
    scores: Tensor, positive_scores: Tensor, margin: float, relative: bool, unit: float = 1.0
) -> Tensor:
    """Return whether a score (r, c) exceeds the row's positive (r,) less the margin: bool.

    unit: score of two equal vectors of length 1.
    """
    drop = positive_scores.abs() * margin if relative else margin * unit
    bounds = positive_scores - drop + TOLERANCE * positive_scores.abs().clamp(min=unit)  # (r,)
    return scores > bounds.unsqueeze(1)


NO_RULES = PairRules()
