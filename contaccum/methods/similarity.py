"""Logits of queries and passages, masked where no negative, and their log-sum-exp."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from contaccum.methods.pairs import Pairs, as_index, positive_columns, steps_between
from contaccum.methods.rules import NO_RULES, PairRules

# number of logits to compute at once on a CPU, where small matrices stay in the cache; 8 MiB
CPU_CHUNK = 1 << 21
# number of logits to compute at once on other devices, where large operations are faster; 64 MiB
CHUNK = 1 << 24


def full_precision(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which autocast is disabled.

    On a device without autocast, the context does nothing.
    """
    available = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if available else contextlib.nullcontext()


def chunks(count: int, height: int) -> Iterator[slice]:
    """Divide ``count`` rows into slices of ``height`` rows, at least 1.

    The last slice may be shorter.
    """
    height = max(1, height)
    for start in range(0, count, height):
        yield slice(start, min(start + height, count))


def masked_logit(dtype: torch.dtype) -> float:
    """Return the logit of a query and a passage that is no negative: the lowest finite number.

    Its exponential is 0, as that of minus infinity. But if a query had only logits of minus
    infinity, the gradient of its log-sum-exp would be NaN.
    """
    return torch.finfo(dtype).min


class Logits(NamedTuple):
    """Logits of r queries and c passages, and how many of them are negatives."""

    values: Tensor
    """Logits, (r, c). Where the passage is no negative of the query, the logit is
    ``masked_logit(dtype)``."""
    positives: int
    """Number of (query, passage) that are positives: the query's own, and its other known
    positives."""
    negatives: Tensor | int
    """Number of (query, passage) that are negatives. A scalar on the device if there are rules."""
    filtered: Tensor | int = 0
    """Number of (query, passage) that only the similarity rule removes. A scalar on the device if
    there is one."""


class LogSumExp(NamedTuple):
    """Log-sum-exp of r queries over their negatives among c passages, with counts."""

    values: Tensor
    """Log-sum-exps, (r,)."""
    positives: int
    negatives: Tensor | int
    filtered: Tensor | int
    logits: Tensor | None
    """Logits, (r, c), without graph. None if they were computed in chunks."""


@dataclass(frozen=True)
class Similarity:
    """Settings that turn similarities into logits. The loss and the bank use the same settings."""

    temperature: float
    """Number that divides every similarity."""
    mask_false_negatives: bool = True
    """Whether the known positives of a query are no negatives."""
    rules: PairRules = NO_RULES
    """Rules that remove more negatives."""
    chunk: int | None = None
    """Number of logits to compute at once. Default: CPU_CHUNK or CHUNK."""

    def chunk_on(self, device: torch.device) -> int:
        """Return the number of logits to compute at once on ``device``."""
        return self.chunk or (CPU_CHUNK if device.type == "cpu" else CHUNK)

    def positive_logits(self, queries: Tensor, passages: Tensor) -> Tensor:
        """Return the logit of each query (n, d) and its positive: (n,).

        The positive is the first of the query's passages (n, 1 + H, d).
        """
        return (queries * passages[:, 0]).sum(1) / self.temperature

    def logits(self, rows: Pairs, columns: Pairs) -> Logits:
        """Return the logits of the queries of ``rows`` and the passages of ``columns``.

        A logit is similarity / temperature - age penalty. It is ``masked_logit(dtype)`` where the
        passage is no negative of the query: it is the query's own positive or another known
        positive, or a rule removes it.
        """
        assert rows.queries is not None
        queries, passages = rows.queries, columns.passages.flatten(0, 1)  # (r, d), (c, d)
        # addmm multiplies and scales in one operation. On a CPU it is faster if the longer matrix
        # comes first.
        passages_first = len(queries) < len(passages)
        left, right = (passages, queries) if passages_first else (queries, passages)
        scale = 1 / self.temperature
        # (c, r) or (r, c)
        product = torch.addmm(queries.new_empty(()), left, right.T, beta=0, alpha=scale)
        # Autograd need not see the rest, and addmm does not need its result for the backward pass:
        # subtracting a constant does not change a gradient, and the gradient of a log-sum-exp is
        # zero for masked logits.
        with torch.no_grad():
            # (r, c); a view, so the writes below change ``product``
            logits = product.T if passages_first else product
            lowest = masked_logit(logits.dtype)
            positives = positive_columns(rows, columns)
            if positives:
                logits.index_put_(as_index(positives, logits.device), logits.new_full((), lowest))
            negatives: Tensor | int = logits.numel() - len(positives)
            filtered: Tensor | int = 0
            if self.rules:
                removed = self.rules.removed_by_id(rows, columns).to(
                    logits.device, non_blocking=True
                )
                if self.rules.margin is not None:
                    similar = self.rules.removed_by_score(logits, rows, columns, scale)
                    filtered = (similar & ~removed & (logits > lowest)).sum()
                    removed = removed | similar
                logits.masked_fill_(removed, lowest)
                negatives = (logits > lowest).sum()
            steps = steps_between(rows, columns) if rows.age_decay else None
            if steps is not None:
                by_pair = logits.unflatten(1, columns.passages.shape[:2])  # (r, pairs, 1 + H)
                by_pair.sub_(steps.unsqueeze(-1), alpha=rows.age_decay)
        return Logits(product.T if passages_first else product, len(positives), negatives, filtered)

    def logsumexp(self, rows: Pairs, columns: Pairs) -> LogSumExp:
        """Return the log-sum-exp of each query of ``rows`` over its negatives in ``columns``.

        A large matrix is computed in chunks of its longer side. The backward pass computes each
        chunk again, so that only one chunk is in memory at a time.
        """
        per_pair, chunk = columns.passages.shape[1], self.chunk_on(columns.passages.device)
        if len(rows) * len(columns) * per_pair <= chunk:
            logits = self.logits(rows, columns)
            values = logits.values.logsumexp(1)  # (r,)
            return LogSumExp(values, *logits[1:], logits=logits.values.detach())

        def of_chunk(rows: Pairs, columns: Pairs) -> LogSumExp:
            logits = self.logits(rows, columns)
            return LogSumExp(logits.values.logsumexp(1), *logits[1:], logits=None)

        by_rows = len(rows) >= len(columns)
        if by_rows:
            slices = chunks(len(rows), chunk // (len(columns) * per_pair))
            pairs = [(rows[part], columns) for part in slices]
        else:
            slices = chunks(len(columns), chunk // (len(rows) * per_pair))
            pairs = [(rows, columns[part]) for part in slices]
        parts: list[LogSumExp] = [
            checkpoint(of_chunk, *pair, use_reentrant=False, preserve_rng_state=False)
            for pair in pairs
        ]
        of_parts = [part.values for part in parts]
        return LogSumExp(
            torch.cat(of_parts) if by_rows else torch.stack(of_parts).logsumexp(0),  # (r,)
            positives=sum(part.positives for part in parts),
            negatives=sum(part.negatives for part in parts),
            filtered=sum(part.filtered for part in parts),
            logits=None,
        )

    def settings(self) -> dict[str, Any]:
        """Return the settings on which stored log-sum-exps depend."""
        return {
            "temperature": self.temperature,
            "mask_false_negatives": self.mask_false_negatives,
            "rules": self.rules.key,
        }
