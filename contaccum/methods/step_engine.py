"""Interface of the engine, as training methods see it."""

from collections.abc import Iterable, Iterator
from typing import Protocol

from torch import Tensor

from contaccum.batch import MicroBatch, Pass


class StepEngine(Protocol):
    """Attributes and functions of ``contaccum.runtime.engine.Engine`` that training methods use.

    For docstrings, see Engine.
    """

    no_grad_group_size: int
    replay_share: float

    def backward(self, value: Tensor) -> None: ...

    # methods with one loss per micro-batch
    def micro_steps(self, micro_batches: list[MicroBatch]) -> Iterator[MicroBatch]: ...
    def encode(self, batch: MicroBatch) -> tuple[Tensor, Tensor]: ...

    # methods with one loss per step
    def passes(
        self, micro_batches: list[MicroBatch], text_numbers: Tensor | None = None, size: int = 1
    ) -> list[Pass]: ...
    def encoded(self, passes: Iterable[Pass]) -> Iterator[Tensor]: ...
    def gather_pairs(
        self, micro_batches: list[MicroBatch], passes: list[Pass], vectors: list[Tensor]
    ) -> tuple[Tensor, Tensor]: ...
    def own_texts(
        self, micro_batches: list[MicroBatch], queries: Tensor, passages: Tensor
    ) -> Tensor: ...
    def of_passes(
        self, micro_batches: list[MicroBatch], passes: list[Pass], queries: Tensor, passages: Tensor
    ) -> list[Tensor]: ...
    def uniform(self, index: int) -> float: ...
