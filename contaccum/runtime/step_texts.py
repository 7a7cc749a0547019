"""Texts of a step for methods with one loss per step: their passes, and the order of their vectors.

Such a method divides the texts of all micro-batches into passes of its own. A text has a number:
all queries of the process in the step come first, then all its passages, pair by pair.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from contaccum.batch import MicroBatch, Pass, Tokens, token_batches

if TYPE_CHECKING:
    from contaccum.runtime.engine import Engine


class StepTexts:
    """Texts of one process in a step: n queries and n (1 + H) passages."""

    def __init__(self, engine: "Engine", micro_batches: list[MicroBatch]) -> None:
        self.engine = engine
        self.query_ids = [batch.query_ids for batch in micro_batches]
        self.pairs = [len(ids) for ids in self.query_ids]  # of each micro-batch, in this process
        query, passage = engine.encoder.query_tower, engine.encoder.passage_tower
        queries = [batch.queries for batch in micro_batches]
        passages = [batch.passages for batch in micro_batches]
        # texts of the query tower and of the passage tower, or all of one
        if query is passage:
            self.sides = [Tokens.join(queries + passages, query.tokenizer.pad_token_id)]
        else:
            self.sides = [
                Tokens.join(queries, query.tokenizer.pad_token_id),
                Tokens.join(passages, passage.tokenizer.pad_token_id),
            ]
        # micro-batches by tokens are as equal as possible, so the largest may be below the budget
        self.budget = max(
            batch.budget or batch.queries.count(engine.padded) + batch.passages.count(engine.padded)
            for batch in micro_batches
        )
        self.passes = self.passes_of()

    def passes_of(self, text_numbers: Tensor | None = None, size: int = 1) -> list[Pass]:
        """Divide texts into passes of each tower. text_numbers: (t,). Default: all texts.

        A pass has at most as many tokens as a micro-batch may have, times ``size``. The last pass
        is as full as any.
        """
        found: list[Pass] = []
        first = 0  # number of the first text of the side
        for side, texts in enumerate(self.sides):
            lengths = texts.attention_mask.sum(1)
            numbers = torch.arange(len(lengths))
            if text_numbers is not None:
                of_side = (text_numbers >= first) & (text_numbers < first + len(lengths))
                numbers = text_numbers[of_side] - first
            batches = token_batches(
                lengths[numbers].tolist(), size * self.budget, self.engine.padded
            )
            for chosen in reversed(self.engine.equalized(map(torch.tensor, batches))):
                own = numbers[chosen]
                found.append(Pass(len(found), side, first + own, texts.select(own)))
            first += len(lengths)
        return found

    def gather(self, passes: list[Pass], vectors: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Gather the vectors of all texts from all processes.

        Returns queries (N, d) and passages (N, 1 + H, d), micro-batch by micro-batch and in each by
        rank, as ``ids`` are. vectors: of each pass, (t, d). Vectors of other processes have no
        gradient.
        """
        order = torch.cat([each.text_numbers for each in passes]).argsort()
        in_passes = torch.cat(vectors)
        own = in_passes[order.to(in_passes.device, non_blocking=True)]
        by_rank = self.engine.all_rows(own).unflatten(0, (-1, len(own)))  # (W, texts, d)
        pairs = sum(self.pairs)

        def by_micro_batch(rows: Tensor) -> Tensor:
            return torch.cat([part.flatten(0, 1) for part in rows.split(self.pairs, dim=1)])

        queries = by_micro_batch(by_rank[:, :pairs])
        passages = by_micro_batch(by_rank[:, pairs:].unflatten(1, (pairs, -1)))
        finite = torch.isfinite(queries).all(1) & torch.isfinite(passages).flatten(1).all(1)
        flags = finite.split([len(by_rank) * size for size in self.pairs])
        self.engine.finite_flags += zip(self.query_ids, flags, strict=True)
        return queries, passages

    def own_rows(self, queries: Tensor, passages: Tensor) -> Tensor:
        """Select the rows of this process's texts, (n + n (1 + H), ...), in order of their numbers.

        queries, passages: rows of the N queries (N, ...) and their passages (N, 1 + H, ...), as
        ``gather`` returns them.
        """
        world, rank = self.engine.world, self.engine.rank
        sizes = [world * size for size in self.pairs]

        def own(rows: Tensor) -> Tensor:
            return torch.cat([part.unflatten(0, (world, -1))[rank] for part in rows.split(sizes)])

        return torch.cat([own(queries), own(passages).flatten(0, 1)])

    def rows_of(self, passes: list[Pass], queries: Tensor, passages: Tensor) -> list[Tensor]:
        """Return the rows of the texts of each pass, (t, d): the inverse of ``gather``."""
        if not passes:  # partial replay chose no text of this process
            return []
        order = torch.cat([each.text_numbers for each in passes])
        own = self.own_rows(queries, passages)
        in_passes = own[order.to(own.device, non_blocking=True)]
        return list(in_passes.split([len(each.text_numbers) for each in passes]))
