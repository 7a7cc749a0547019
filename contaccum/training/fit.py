"""Adaptive accumulation: what a step does when memory runs out, alone and among several processes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from contaccum.batch import MicroBatch, RowIds
from contaccum.config import TrainConfig
from contaccum.engine import Engine, out_of_memory
from contaccum.errors import InputError
from contaccum.methods.bank import Bank
from contaccum.methods.loss import InfoNCE, LossValue
from contaccum.methods.step import Loss, Method

GROW_AFTER = 50
"""Steps after which a larger micro-batch is tried again; twice as many after each time that it did not fit."""


@dataclass
class MicroBatchSize:
    """The size of micro-batches, in pairs or in tokens: one of a row of sizes from what was configured down to the least."""

    sizes: list[int]
    unit: str
    grow: bool
    level: int = 0
    wait: int = GROW_AFTER // 2
    changed: int = 0
    """The step of the last change."""
    before: list[tuple[int, int]] = field(default_factory=list)
    """Earlier sizes, each with the number of steps that had been taken when it was left."""

    def __str__(self) -> str:
        return f"micro-batches of {self.now} {self.unit}"

    @property
    def now(self) -> int:
        return self.sizes[self.level]

    def shrink(self, step: int) -> bool:
        """To the next smaller size; False where there is none."""
        if self.level + 1 == len(self.sizes):
            return False
        self._go_to(self.level + 1, step)
        self.wait *= 2
        return True

    def grow_again(self, step: int) -> bool:
        """To the next larger size, where that is wanted and due after step ``step``."""
        if not self.grow or self.level == 0 or step - self.changed < self.wait:
            return False
        self._go_to(self.level - 1, step)
        return True

    def _go_to(self, level: int, step: int) -> None:
        self.before.append((step, self.now))
        self.level, self.changed = level, step

    def at(self, step: int) -> int:
        """The size that optimizer step ``step``, counted from 0, was cut to."""
        return next((size for end, size in self.before if step < end), self.now)

    def state(self) -> dict[str, Any]:
        return {"size": self.now, "wait": self.wait, "changed": self.changed, "before": self.before}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on with the size that was saved, or the next smaller one of the configuration's row, where memory had run out."""
        fitting = [level for level, size in enumerate(self.sizes) if size <= state["size"]]
        self.level = min(fitting, default=len(self.sizes) - 1) if state["before"] else 0
        self.wait, self.changed = state["wait"], state["changed"]
        self.before = [(end, size) for end, size in state["before"]]


def halved_pairs(size: int, pairs: int) -> list[int]:
    """``size`` and its halves down to 1, each the largest number at most half of the one before that divides ``pairs``."""
    sizes = [size]
    while sizes[-1] > 1:
        sizes.append(next(half for half in range(sizes[-1] // 2, 0, -1) if pairs % half == 0))
    return sizes


def halved_tokens(size: int, least: int) -> list[int]:
    """``size`` and its halves, the last one ``least``."""
    sizes = [size]
    while sizes[-1] > least:
        sizes.append(max(sizes[-1] // 2, least))
    return sizes


def shrink(size: MicroBatchSize, config: TrainConfig, step: int, last_good: Callable[[], str]) -> str:
    """Go over to smaller micro-batches after ``step`` steps; returns what to tell the user.

    last_good: saves the state before the step where that is needed, and says where it is.

    Raises InputError where the user does not want it, or where none are left.
    """
    before = f"step {step + 1}: out of memory with {size}"
    if config.traits.whole:
        raise InputError(
            f"{before}, expected them to fit: {config.method} cannot cut its step; grad_cache gives the same gradients at the"
            f" memory of one micro-batch; {last_good()}"
        )
    if config.batch.on_out_of_memory == "stop":
        raise InputError(
            f"{before}, expected them to fit, since batch.on_out_of_memory is stop; --resume with another value of it goes on"
            f" with smaller ones; {last_good()}"
        )
    if not size.shrink(step):
        raise InputError(
            f"{before}, the smallest there are, expected them to fit; a lower model.max_passage_length, data.hard_negatives or"
            f" bank.size, or model.gradient_checkpointing, takes less memory; {last_good()}"
        )
    meaning = "the gradients stay the same" if config.traits.two_pass else "queries meet fewer others of their own step"
    return f"{before}; the step is taken again with {size} ({meaning})"


def try_step(
    engine: Engine, method: Method, micro_batches: list[MicroBatch], bank: Bank, loss: Loss
) -> list[LossValue] | None:
    """The step's gradients, by the method; None where memory ran out in any process: then they and the bank are as before.

    All processes learn of it at the step's end. What runs out of memory elsewhere (in the optimizer, in an evaluation) ends
    the run, and so does a process that has no memory left for the vectors that the others wait for, once its own pass is let go.
    """
    losses: list[LossValue] | None = None
    try:
        losses = method(engine, micro_batches, bank, loss)
    except Exception as error:
        if not out_of_memory(error):
            raise
    # only behind the except clause has the error, and with it every tensor of the failed pass, been let go
    if losses is None and engine.world > 1:
        engine.drop_step()
        engine.free_memory()
        nothing = NoLoss(1.0)
        method(StandIn(engine), micro_batches, Bank(0, engine.encoder.dim, nothing, push=1), nothing)
    if not engine.largest(int(losses is None)):
        return losses
    losses = None
    engine.drop_step()
    engine.free_memory()
    bank.rollback()
    return None


class StandIn:
    """Implements contaccum.methods.step.Engine for a process whose memory ran out in the middle of a step.

    The other processes know nothing of it and wait for its rows. It goes through the method once more with zeros for rows,
    passes over the gathers that were done before, and takes part in the remaining ones; nothing of it reaches the model.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.done = engine, engine.gathers
        self.ahead, self.join = engine.ahead, engine.join

    def micro_steps(self, micro_batches: list[MicroBatch]) -> Iterator[MicroBatch]:
        yield from micro_batches

    def encode(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        b, dim = len(batch.query_ids), self.engine.encoder.dim
        return self._gather(b, dim), self._gather(b, len(batch.passages.input_ids) // b, dim)

    def backward(self, value: Tensor) -> None:
        pass

    def _gather(self, b: int, *shape: int) -> Tensor:
        if self.done:
            self.done -= 1
            return torch.zeros(self.engine.world * b, *shape, device=self.engine.device)
        return self.engine.all_rows(torch.zeros(b, *shape, device=self.engine.device))


class NoLoss(InfoNCE):
    """The loss of a stand-in's rows: 0, at no memory."""

    def __call__(self, queries: Tensor, passages: Tensor, ids: RowIds, **bank: Any) -> LossValue:
        nothing = queries.new_zeros(())
        return LossValue(0 * (queries.sum() + passages.sum()), nothing, nothing, nothing)
