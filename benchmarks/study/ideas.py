"""Changes of `cont_accum` against stale bank rows, run by benchmarks/study/heads.py and described in docs/log.md.

None of them is part of the package. Autograd computes the loss over the full matrix of current and
stored rows, without cached sums, so that anything may change between micro-batches. ``Idea()``
equals `cont_accum` (tests/experiments/test_study_scripts.py).
"""

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from contaccum.batch import MicroBatch, RowIds
from contaccum.methods.bank import Bank
from contaccum.methods.loss import InfoNCE, LossValue


@dataclass(frozen=True)
class Idea:
    """Options of a change; ages are in optimizer steps. Defaults change nothing."""

    decay: float = 0.0
    """Logits of a row and a column fall by this much for every step between their ages."""
    rate_clock: bool = False
    """Count ages in learning rate passed, over the highest, instead of steps."""
    row_decay: float = 0.0
    """A bank row weighs exp(-row_decay * age) in the mean."""
    centre: float | None = None
    """Stored vectors move along with the towers' mean vectors: less the mean of their own step's
    stored vectors, plus a running mean of the current ones that keeps this share at every
    micro-batch."""
    follow: float | None = None
    """The same, by the mean drift a step that the oldest micro-batch shows when it is encoded
    again, smoothed by this share."""
    rotate: float | None = None
    """Stored vectors are turned by the rotation that fits three micro-batches, encoded again, best
    (Procrustes; the number is added to the diagonal)."""
    refresh: int = 0
    """So many stored micro-batches, the oldest first, are encoded again at each step."""
    refresh_hardest: bool = False
    """Those with the highest logits against the last queries instead of the oldest."""
    slow: float | None = None
    """What is stored comes from copies of the towers that keep this share of themselves at every
    step."""
    rate_limit: float | None = None
    """Rows older than this number of steps over the learning rate's share of the highest are
    dropped."""
    queries_every: int = 1
    """Bank rows count in every so-manyth micro-batch only."""


@dataclass
class Stored:
    """One pushed micro-batch."""

    step: int
    number: int
    batch: MicroBatch
    queries: Tensor  # (b, d)
    passages: Tensor  # (b, d)
    age: float = 0.0


@dataclass
class Variant:
    """Method with a changed rule and its own bank. H = 0."""

    idea: Idea
    size: int
    """M, in rows."""
    row_weight: str = "all"
    rows: list[Stored] = field(default_factory=list)
    share: float = 1.0
    """Learning rate of the step over the highest; set from outside."""
    clock: float = 0.0
    mean: list[Tensor] = field(default_factory=list)
    velocity: list[Tensor] = field(default_factory=list)
    smoothed: float = 0.0
    turn: list[Tensor] = field(default_factory=list)
    copies: Any = None

    def __call__(
        self, engine: Any, micro_batches: list[MicroBatch], bank: Bank, loss: InfoNCE
    ) -> list[LossValue]:
        self._before(engine)
        values = []
        for number, batch in enumerate(engine.micro_steps(micro_batches)):
            queries, passages = engine.encode(batch)
            value = self._loss(queries, passages[:, 0], batch.ids, loss, number)
            engine.backward(value / len(micro_batches))
            kept = (queries.detach(), passages[:, 0].detach())
            if self.copies is not None:
                kept = tuple(part.detach() for part in engine.encode_with(self.copies, batch))
            self.rows.append(Stored(engine.step, number, batch, *kept, age=self.clock))
            self.rows = self.rows[-(self.size // len(queries)) :]
            values.append(LossValue(value.detach()))
        self.clock += self.share if self.idea.rate_clock else 1.0
        return values

    # once a step

    def _before(self, engine: Any) -> None:
        idea = self.idea
        if idea.slow is not None:
            if self.copies is None:
                self.copies = copy.deepcopy(engine.towers)
            with torch.no_grad():
                for old, new in zip(
                    self.copies.parameters(), engine.towers.parameters(), strict=True
                ):
                    old.lerp_(new, 1 - idea.slow)
        if idea.rate_limit is not None:
            self.rows = [
                row
                for row in self.rows
                if engine.step - row.step <= idea.rate_limit / max(self.share, 1e-6)
            ]
        if not self.rows:
            return
        if idea.follow is not None:
            self._measure_velocity(engine, idea.follow)
        if idea.rotate is not None:
            self._measure_turn(engine, idea.rotate)
        for row in self._chosen():
            row.queries, row.passages = engine.encode_again(row.batch, row.step, row.number)
            row.age = self.clock

    def _chosen(self) -> list[Stored]:
        by = (
            (lambda row: -float((self.rows[-1].queries @ row.passages.T).amax()))
            if self.idea.refresh_hardest
            else None
        )
        order = sorted(self.rows, key=by or (lambda row: row.age))
        return order[: self.idea.refresh]

    def _measure_velocity(self, engine: Any, keep: float) -> None:
        row = self.rows[0]
        if engine.step == row.step:
            return
        now = engine.encode_again(row.batch, row.step, row.number)
        moved = [
            (new - old).mean(0) / (engine.step - row.step)
            for new, old in zip(now, (row.queries, row.passages), strict=True)
        ]
        before = self.velocity or [torch.zeros_like(part) for part in moved]
        self.velocity = [
            keep * old + (1 - keep) * new for old, new in zip(before, moved, strict=True)
        ]
        self.smoothed = keep * self.smoothed + 1 - keep

    def _measure_turn(self, engine: Any, ridge: float) -> None:
        chosen = [self.rows[i] for i in sorted({0, len(self.rows) // 2, len(self.rows) - 1})]
        pairs = [(engine.encode_again(row.batch, row.step, row.number), row) for row in chosen]
        self.turn = []
        for side, name in enumerate(("queries", "passages")):
            new = torch.cat([now[side] for now, _ in pairs])
            old = torch.cat([getattr(row, name) for _, row in pairs])
            left, _, right = torch.linalg.svd(old.T @ new + ridge * torch.eye(old.shape[1]))
            self.turn.append(left @ right)

    # each micro-batch

    def _as_of_now(
        self, stored: Tensor, side: int, current: Tensor, steps: Tensor, now: int
    ) -> Tensor:
        """Extrapolate stored embeddings (n, d) of one tower to the current step."""
        if self.velocity:
            stored = stored + self.velocity[side] / self.smoothed * (now - steps).unsqueeze(1)
        if self.turn:
            stored = stored @ self.turn[side]
        if self.idea.centre is not None:
            _, group, count = steps.unique(return_inverse=True, return_counts=True)
            sums = stored.new_zeros(len(count), stored.shape[1]).index_add(0, group, stored)
            stored = stored - (sums / count.unsqueeze(1))[group] + self.mean[side]
        return stored

    def _loss(
        self, queries: Tensor, passages: Tensor, ids: RowIds, loss: InfoNCE, number: int
    ) -> Tensor:
        if self.idea.centre is not None:
            means = [queries.detach().mean(0), passages.detach().mean(0)]
            before, keep = self.mean or means, self.idea.centre
            self.mean = [
                keep * old + (1 - keep) * new for old, new in zip(before, means, strict=True)
            ]
        columns = ids.columns[:, 0]
        logits = self._logits(queries, passages, ids.positives, columns, loss, own=0)
        positive = logits.diagonal()
        if not self.rows:
            return (logits.logsumexp(1) - positive).mean()
        now = max(row.step for row in self.rows) if number else self.rows[-1].step + 1
        old_queries, old_passages = (
            torch.cat([getattr(row, n) for row in self.rows]) for n in ("queries", "passages")
        )
        lengths = torch.tensor([len(row.queries) for row in self.rows])
        steps = torch.tensor([row.step for row in self.rows]).repeat_interleave(lengths)
        ages = torch.tensor([row.age for row in self.rows]).repeat_interleave(lengths)
        old_columns = torch.cat([row.batch.ids.columns[:, 0] for row in self.rows])
        width = max(row.batch.ids.positives.shape[1] for row in self.rows)
        known = torch.cat(
            [
                F.pad(p := row.batch.ids.positives, (0, width - p.shape[1]), value=-1)
                for row in self.rows
            ]
        )
        fall = self.idea.decay * (self.clock - ages)
        moved = self._as_of_now(old_passages, 1, passages, steps, now)
        far = self._logits(queries, moved, ids.positives, old_columns, loss) - fall
        losses = torch.cat([logits, far], 1).logsumexp(1) - positive  # (b,)
        total, rows = losses.sum(), torch.tensor(float(len(losses)))
        if number % self.idea.queries_every == 0:
            moved = self._as_of_now(old_queries, 0, queries, steps, now)
            near = self._logits(moved, passages, known, columns, loss) - fall.unsqueeze(1)
            kept = self._logits(old_queries, old_passages, known, old_columns, loss, own=0)
            kept = kept - self.idea.decay * (ages.unsqueeze(1) - ages).abs()
            weights = torch.exp(-self.idea.row_decay * (self.clock - ages))
            losses = torch.logaddexp(near.logsumexp(1), kept.logsumexp(1)) - kept.diagonal()
            total = total + (losses * weights).sum()
            rows = rows + weights.sum() * (self.row_weight == "all")
        return total / rows

    @staticmethod
    def _logits(
        rows: Tensor,
        columns: Tensor,
        positives: Tensor,
        column_ids: Tensor,
        loss: InfoNCE,
        own: int | None = None,
    ) -> Tensor:
        """Return similarities over the temperature with known positives masked; own = 0 keeps the diagonal."""
        logits = rows @ columns.T / loss.similarity.temperature
        if not loss.similarity.mask_false_negatives:
            return logits
        hidden = (positives.unsqueeze(2) == column_ids).any(1)
        if own is not None:
            hidden = hidden & ~torch.eye(len(rows), dtype=torch.bool)
        return logits.masked_fill(hidden, -torch.inf)
