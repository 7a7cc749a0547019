"""Recover from out-of-memory errors: undo the failed step in every process, and repeat it with smaller micro-batches."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from contaccum.batch import MicroBatch, RowIds, Tokens
from contaccum.config import TrainConfig
from contaccum.data.batches import Batches
from contaccum.errors import InputError
from contaccum.methods import Method
from contaccum.methods.bank import Bank
from contaccum.methods.loss import InfoNCE, LossValue
from contaccum.runtime.engine import Engine

_SIGNS = (
    "out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED", "PT_DEVMEM Allocation failed", "could not create a primitive",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED",
)  # fmt: skip
"""Texts that show that an error of torch or of a library is an out-of-memory error.

If cuDNN has too little memory for its workspace, it may report "not supported".
"""


def out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` is an out-of-memory error of the GPU or the CPU, but not of NCCL (see ``between_processes``)."""
    words = isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)
    return isinstance(error, MemoryError) or (words and not between_processes(error))


def between_processes(error: BaseException) -> bool:
    """Return whether NCCL ran out of memory for its buffers. NCCL then closes the process group: no retry is possible."""
    return isinstance(error, RuntimeError) and "NCCL" in str(error) and "out of memory" in str(error)


_OUT_OF_MEMORY = (
    "out of memory outside the forward and backward passes (weights, bank, optimizer or evaluation); smaller micro-batches do "
    "not help there. Start a new run with optim.name adamw_8bit, lora.rank, model.tie_towers or a smaller model. If an "
    "evaluation failed, continue with --resume and a smaller run.eval_batch_tokens."
)
_SHARDED_OUT_OF_MEMORY = (
    "out of memory with run.sharding fsdp; the step cannot be retried, because the other processes wait for this one. "
    "Continue with --resume --allow_changes true. Also set a smaller batch.micro_batch_size or run.eval_batch_tokens, or use "
    "more processes."
)
_NCCL_OUT_OF_MEMORY = (
    "out of memory in NCCL, which sends messages between GPUs; the step cannot be retried, because the connection is lost. "
    "NCCL needs more free memory for its buffers. Continue with --resume and a smaller run.memory_budget, which leaves more "
    "memory for NCCL. Or continue with --resume --allow_changes true and a smaller batch.micro_batch_size."
)


def advice(error: BaseException, config: TrainConfig) -> str:
    """Return what the user can do about an out-of-memory error that ended the run, or an empty text for another error."""
    if between_processes(error):
        return _NCCL_OUT_OF_MEMORY
    if not out_of_memory(error):
        return ""
    return _OUT_OF_MEMORY if config.run.sharding == "none" else _SHARDED_OUT_OF_MEMORY


@dataclass
class MicroBatchSize:
    """Micro-batch size of one process, in pairs or tokens. It becomes smaller when memory runs out."""

    sizes: list[int]  # the configured size, then smaller ones in descending order
    unit: str
    level: int = 0
    earlier: list[tuple[int, int]] = field(default_factory=list)
    """Previous sizes, as tuples: (optimizer steps finished when memory ran out, size used until then)."""

    def __str__(self) -> str:
        return f"micro-batches of {self.now} {self.unit}"

    @property
    def now(self) -> int:
        return self.sizes[self.level]

    def shrink(self, step: int) -> bool:
        """Switch to the next smaller size. Return False if there is none. step: number of finished optimizer steps."""
        if self.level + 1 == len(self.sizes):
            return False
        self.earlier.append((step, self.now))
        self.level += 1
        return True

    def at(self, step: int) -> int:
        """Return the micro-batch size of optimizer step ``step``. The first step is step 0."""
        return next((size for end, size in self.earlier if step < end), self.now)

    def state(self) -> dict[str, Any]:
        return {"size": self.now, "before": self.earlier}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the state that a checkpoint contains.

        If memory never ran out before the checkpoint, continue with the configured size. Otherwise, continue with the largest
        possible size that is not above the saved size. If all sizes are above it, continue with the smallest.
        """
        if not state:
            return
        fitting = [level for level, size in enumerate(self.sizes) if size <= state["size"]]
        self.level = min(fitting, default=len(self.sizes) - 1) if state["before"] else 0
        self.earlier = [(end, size) for end, size in state["before"]]


def halved(size: int, smallest: int = 1, pairs: int = 0) -> list[int]:
    """Return a list that starts with ``size``. Each next number is half of the number before, and the last is ``smallest``.

    Each half is rounded down to a divisor of ``pairs``, or to an integer if ``pairs`` is 0.
    """
    sizes = [size]
    while sizes[-1] > smallest:
        half = max(sizes[-1] // 2, smallest)
        sizes.append(next(divisor for divisor in range(half, 0, -1) if pairs % divisor == 0))
    return sizes


def build_size(config: TrainConfig, engine: Engine, batches: Batches) -> MicroBatchSize:
    """Build a MicroBatchSize: the configured micro-batch size, and the smaller sizes to try when memory runs out."""
    if config.micro_batch_tokens is not None:
        return MicroBatchSize(halved(batches.size, batches.smallest), "tokens")
    pairs = config.batch.global_batch_size // engine.world
    return MicroBatchSize([batches.size] if config.spec.whole else halved(batches.size, pairs=pairs), "pairs")


def shrink(size: MicroBatchSize, config: TrainConfig, step: int, last_good: Callable[[], str]) -> str:
    """Choose smaller micro-batches for the failed step, and return a message about it.

    Raises InputError if smaller micro-batches are impossible or not allowed. step: number of optimizer steps before the failed
    step. last_good: function that writes a checkpoint of the last good state (before the failed step), and returns a sentence
    with the name of the checkpoint.
    """
    where = f"step {step + 1}: out of memory with {size}"
    if config.spec.whole:
        problem = f"{config.method} cannot split its step into micro-batches"
        advice = "Use grad_cache, which computes the same gradients in the memory of one micro-batch."
    elif config.batch.on_out_of_memory == "stop":
        problem = "batch.on_out_of_memory is stop"
        advice = "To continue with smaller micro-batches, add --resume --batch.on_out_of_memory shrink."
    elif not size.shrink(step):
        problem = "smaller micro-batches are impossible"
        advice = (
            "Lower model.max_passage_length, data.hard_negatives or bank.size, or set model.gradient_checkpointing."
        )
    else:
        effect = "gradients do not change" if config.spec.two_pass else "queries have fewer in-batch negatives"
        return f"{where}; retrying the step with {size} ({effect})"
    raise InputError(f"{where}; {problem}; {last_good()}. {advice}")


def undo_failed_step(engine: Engine, method: Method, micro_batches: list[MicroBatch], bank: Bank, failed: bool) -> bool:
    """Undo the step if memory ran out in any process. Return whether the step was undone.

    failed: whether memory ran out in this process. All processes must call this function in each step, after the backward pass,
    to exchange ``failed``. Before this exchange, a failed process sends zeros to the processes that wait for its rows (see
    ``DummyEngine``). If sending fails, the run ends. The run also ends if memory runs out later, in the optimizer or in an
    evaluation.
    """
    if failed and engine.world > 1:
        engine.drop_step()
        engine.free_memory()
        zero = ZeroLoss(1.0)
        method(DummyEngine(engine), micro_batches, Bank(0, engine.encoder.dim, zero.similarity, push=1), zero)
    if not engine.largest(int(failed)):
        return False
    engine.drop_step()
    engine.free_memory()
    bank.rollback()
    return True


class DummyEngine:
    """Engine that sends zeros instead of embeddings. A process uses it if its memory ran out in the middle of a step.

    The other processes of the step still wait for the rows of this process. With this engine, the process takes part in all
    gathers that it had not finished before the error. No model is used.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.done = engine, engine.gathers
        self.no_grad_group_size, self.join = engine.no_grad_group_size, engine.join
        self.replay_share = engine.replay_share
        self.own_rows, self.uniform, self.equalized = engine.own_rows, engine.uniform, list

    def micro_steps(self, micro_batches: list[MicroBatch]) -> Iterator[MicroBatch]:
        yield from micro_batches

    def encode(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Take part in the gathers of a micro-batch, with zeros instead of the embeddings of this process.

        Return the gathered queries (W * b, d) and passages (W * b, 1 + H, d): b pairs of each of W processes. If this
        process already took part in a gather before the error, it returns zeros for this gather and exchanges nothing.
        """
        b, dim = len(batch.query_ids), self.engine.encoder.dim
        return self._gather(b, dim), self._gather(b, len(batch.passages.input_ids) // b, dim)

    def encode_texts(self, side: int, texts: Tokens, index: int) -> Tensor:
        """Return zeros (n, d), without a gather. Partial replay calls this in its second pass, which gathers no embeddings."""
        return torch.zeros(len(texts.input_ids), self.engine.encoder.dim, device=self.engine.device)

    def backward(self, value: Tensor) -> None:
        """Do nothing, because zeros need no gradient."""

    def _gather(self, b: int, *shape: int) -> Tensor:
        if self.done:
            self.done -= 1
            return torch.zeros(self.engine.world * b, *shape, device=self.engine.device)
        return self.engine.all_rows(torch.zeros(b, *shape, device=self.engine.device))


class ZeroLoss(InfoNCE):
    """Loss of 0 for use with a DummyEngine. It has a graph, so that two-pass methods can compute its (zero) gradients."""

    def __call__(self, queries: Tensor, passages: Tensor, ids: RowIds, **bank: Any) -> LossValue:
        zero = queries.new_zeros(())
        return LossValue(0 * (queries.sum() + passages.sum()), zero, zero, zero)
