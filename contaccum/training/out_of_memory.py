"""Recover from an out-of-memory error in one process: repeat the step in smaller parts."""

from collections.abc import Callable
from dataclasses import dataclass

from contaccum.config import TrainConfig
from contaccum.data.batches import Batches
from contaccum.errors import InputError
from contaccum.runtime.engine import Engine

_SIGNS = (
    "out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED", "CUSOLVER_STATUS_ALLOC_FAILED",
    "PT_DEVMEM Allocation failed", "could not create a primitive",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED",
)  # fmt: skip
"""Texts that show that an error of torch or of a library is an out-of-memory error.

If cuDNN has too little memory for its workspace, it may report "not supported".
"""


def out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` is an out-of-memory error of the GPU or the CPU."""
    if isinstance(error, RuntimeError):
        return any(sign in str(error) for sign in _SIGNS)
    return isinstance(error, MemoryError)


_ONE_PROCESS = (
    "out of memory outside the forward and backward passes (weights, bank, optimizer or "
    "evaluation); smaller micro-batches do not help there. Start a new run with optim.name "
    "adamw_8bit, lora.rank, one encoder (model.tie_towers true) or a smaller model. If an "
    "evaluation failed, continue with --resume and a smaller run.eval_batch_tokens."
)
_SEVERAL_PROCESSES = (
    "out of memory in one of several processes; the step cannot be retried, because the other "
    "processes wait for this one. Continue with --resume --allow_changes true and a smaller "
    "batch.micro_batch_size, or with --resume and a smaller run.eval_batch_tokens if an evaluation "
    "failed. If NCCL, which sends messages between GPUs, ran out of memory, a smaller "
    "run.memory_budget leaves more for it."
)


def advice(error: BaseException, processes: int) -> str:
    """Return advice about an out-of-memory error that ended the run, or "" for another error."""
    if not out_of_memory(error):
        return ""
    return _ONE_PROCESS if processes == 1 else _SEVERAL_PROCESSES


@dataclass
class MicroBatchSize:
    """Micro-batch size of one process, in pairs or tokens.

    It becomes smaller when memory runs out.
    """

    sizes: list[int]  # the configured size, then smaller ones in descending order
    unit: str
    level: int = 0
    # number of optimizer steps before the first one with this size; the drift of pairs that were
    # encoded before is not measured
    since: int = 0

    def __str__(self) -> str:
        return f"micro-batches of {self.now} {self.unit}"

    @property
    def now(self) -> int:
        return self.sizes[self.level]

    def shrink(self, step: int) -> bool:
        """Switch to the next smaller size.

        Return False if there is none. step: number of finished optimizer steps.
        """
        if self.level + 1 == len(self.sizes):
            return False
        self.level += 1
        self.since = step
        return True

    def state(self) -> dict[str, int]:
        return {"configured": self.sizes[0], "size": self.now, "since": self.since}

    def load_state(self, state: dict[str, int], step: int) -> None:
        """Restore the state of a checkpoint.

        If the config has another size now, the run starts with that size, even if memory ran out
        with a smaller one.

        step: number of optimizer steps before the checkpoint.
        """
        self.since = step
        if state["configured"] == self.sizes[0]:
            self.since = state["since"]
            while self.level + 1 < len(self.sizes) and self.now > state["size"]:
                self.level += 1


def halved(size: int, smallest: int = 1, pairs: int = 0) -> list[int]:
    """Return a list that starts with ``size``.

    Each next number is half of the number before, and the last is ``smallest``.

    Each half is rounded down to a divisor of ``pairs``, or to an integer if ``pairs`` is 0.
    """
    sizes = [size]
    while sizes[-1] > smallest:
        half = max(sizes[-1] // 2, smallest)
        sizes.append(next(divisor for divisor in range(half, 0, -1) if pairs % divisor == 0))
    return sizes


def build_size(config: TrainConfig, engine: Engine, batches: Batches) -> MicroBatchSize:
    """Build a MicroBatchSize: the configured size, and smaller ones to try if memory runs out."""
    if config.micro_batch_tokens is not None:
        return MicroBatchSize(halved(batches.size, batches.smallest), "tokens")
    pairs = config.batch.global_batch_size // engine.world
    return MicroBatchSize(
        [batches.size] if config.spec.single_micro_batch else halved(batches.size, pairs=pairs),
        "pairs",
    )


def shrink(
    size: MicroBatchSize, config: TrainConfig, step: int, last_good: Callable[[], str]
) -> str:
    """Choose smaller micro-batches for the failed step, and return a message about it.

    Raises InputError if smaller micro-batches are impossible or not allowed. step: number of
    optimizer steps before the failed step. last_good: function that writes a checkpoint of the last
    good state (before the failed step), and returns a sentence with the name of the checkpoint.
    """
    where = f"step {step + 1}: out of memory with {size}"
    if config.spec.single_micro_batch:
        problem = f"{config.method} cannot split its step into micro-batches"
        advice = (
            "Continue with --resume --allow_changes true --method grad_cache, which computes the "
            "same gradients in the memory of one micro-batch."
        )
    elif not size.shrink(step):
        problem = "smaller micro-batches are impossible"
        # the checkpoints need the other settings unchanged
        advice = (
            "Continue with --resume --allow_changes true --model.gradient_checkpointing true, or "
            "start a new run with a lower model.max_passage_length, data.hard_negatives or "
            "bank.size."
        )
    else:
        effect = (
            "gradients do not change"
            if config.spec.two_pass
            else "queries have fewer in-batch negatives"
        )
        return f"{where}; retrying the step with {size} ({effect})"
    raise InputError(f"{where}; {problem}; {last_good()}. {advice}")
