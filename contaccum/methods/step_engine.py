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
    def texts(self, micro_batches: list[MicroBatch]) -> "StepTexts": ...
    def encoded(self, passes: Iterable[Pass]) -> Iterator[Tensor]: ...
    def uniform(self, index: int) -> float: ...


class StepTexts(Protocol):
    """See ``runtime.step_texts.StepTexts``."""

    pairs: list[int]
    passes: list[Pass]

    def passes_of(self, text_numbers: Tensor | None = None, size: int = 1) -> list[Pass]: ...
    def gather(self, passes: list[Pass], vectors: list[Tensor]) -> tuple[Tensor, Tensor]: ...
    def own_rows(self, queries: Tensor, passages: Tensor) -> Tensor: ...
    def rows_of(self, passes: list[Pass], queries: Tensor, passages: Tensor) -> list[Tensor]: ...
