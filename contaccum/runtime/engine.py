"""Device, precision and gradients of a training process.

Gradients are summed over all processes once per optimizer step. DistributedDataParallel is not
used, for two reasons: it expects a backward pass after each forward pass, but GradCache runs all
forward passes first; and it averages gradients, but the loss needs their sum.
"""

import contextlib
import ctypes
import gc
import hashlib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from contaccum.batch import ONE_TOKEN, MicroBatch, Pass
from contaccum.errors import InputError
from contaccum.runtime import sharding
from contaccum.runtime.half_weights import HalfWeights
from contaccum.runtime.launch import local_place, process_place
from contaccum.runtime.processes import (
    Processes,
    encoding_device,
    leave_group,
    start_group,
    torch_dtype,
)
from contaccum.runtime.step_texts import StepTexts

if TYPE_CHECKING:
    from contaccum.encoder import DualEncoder


class Engine(Processes):
    """Training operations of one process on its device.

    Training methods and the training loop call these operations.
    """

    def __init__(
        self,
        *,
        device: str = "auto",
        precision: str = "fp32",
        tf32: bool = False,
        seed: int = 0,
        replay_share: float = 1.0,
        timeout_minutes: float = 30,
    ) -> None:
        """Initialize the device. If there are several processes, also initialize the process group.

        device: ``auto`` (CUDA, else MPS, else CPU) or ``cpu``. precision: ``fp32``, ``bf16`` or
        ``fp16``. bf16 and fp16 use autocast; the weights and the loss stay in fp32. tf32: whether
        to multiply fp32 matrices in TF32 on CUDA. ``close`` restores the previous setting of torch.
        replay_share: share of the texts in the second pass. timeout_minutes: maximum time to wait
        for other processes.
        """
        rank, world = process_place()
        super().__init__(rank, world, local_place()[0], encoding_device(device))
        # torch's CPU kernels for fp16 are incomplete
        if precision == "fp16" and self.device.type == "cpu":
            raise InputError("run.precision is fp16, but the device is cpu; use fp32 or bf16")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # NCCL uses the current device
        self.started_group = start_group(self.device.type, timeout_minutes)
        # since torch 2.9, code that sets this by several of torch's names ends with an error
        self.matmul_precision_before = torch.get_float32_matmul_precision()
        if tf32 and self.device.type == "cuda" and self.matmul_precision_before == "highest":
            torch.set_float32_matmul_precision("high")
        self.precision, self.seed, self.replay_share = precision, seed, replay_share
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=precision == "fp16")
        """Loss scaler of fp16. With another precision, it is disabled: its scale is 1 and its state
        is empty."""
        self.memory_limited = False
        # number of finished optimizer steps; seed and step determine all random numbers
        self.step = 0
        self.before_pass: Callable[[int, bool], None] | None = None
        """Called before each pass of a training method, with its number of tokens (without
        padding) and whether a backward pass follows."""
        # query ids of each micro-batch, and whether its vectors are finite: one flag or one of each
        # pair
        self.finite_flags: list[tuple[list[str], Tensor]] = []
        self._separate = sharding.SeparateBackward()  # only for sharded weights
        self.half_weights: HalfWeights | None = None  # only for bf16 and fp16 without sharding

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which the encoders compute in the precision of the run."""
        if self.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, torch_dtype(self.precision))

    def shard(self, encoder: "DualEncoder", offload: bool = False) -> None:
        """Divide the weights of ``encoder``, which is on the CPU, among all processes.

        Build the optimizer after this call.
        """
        sharding.shard(self, encoder.units(), torch_dtype(self.precision), offload)
        encoder.shard_group = self

    @property
    def sharded(self) -> bool:
        """Whether the weights are divided among the processes."""
        return self.encoder.shard_group is not None

    def prepare(self, encoder: "DualEncoder", optimizer: torch.optim.Optimizer) -> None:
        """Prepare encoder and optimizer for training, and copy the weights of process 0 to all."""
        self.encoder = encoder
        self.parameters_of_towers = [
            [parameter for parameter in tower.parameters() if parameter.requires_grad]
            for tower in encoder.towers
        ]
        # towers may share weights
        self.parameters = list(dict.fromkeys(chain(*self.parameters_of_towers)))
        if not self.sharded:
            self.copy_from_main([parameter.data for parameter in encoder.parameters()])
        if self.copies_weights(encoder):
            self.half_weights = HalfWeights(encoder, torch_dtype(self.precision))
        self.optimizer = optimizer
        self.padded = not encoder.query_tower.unpad
        self.no_grad_group_size = 1
        if self.device.type != "cpu":
            self.no_grad_group_size = encoder.no_grad_group_size()

    def copies_weights(self, encoder: "DualEncoder") -> bool:
        """Return whether passes use copies of the weights in half precision."""
        # FSDP gathers sharded weights in half precision
        return self.precision != "fp32" and encoder.shard_group is None

    def limit_memory(self, budget: int) -> None:
        """Limit the memory that torch allocates on the GPU to ``budget`` bytes.

        Memory of CUDA itself does not count.
        """
        if self.device.type != "cuda":
            warnings.warn(
                f"run.memory_budget has no effect on {self.device.type}; it needs CUDA",
                stacklevel=2,
            )
            return
        total = torch.cuda.get_device_properties(self.device).total_memory
        if budget > total:
            raise InputError(
                f"run.memory_budget is {budget} bytes, but the GPU has {total}. Set a smaller "
                "budget."
            )
        torch.cuda.set_per_process_memory_fraction(budget / total, self.device.index)
        self.memory_limited = True

    def begin_step(self, step: int) -> None:
        """Begin the next optimizer step. step: number of optimizer steps that are finished."""
        self.step = step
        if self.half_weights is not None:
            self.half_weights.drop()

    def micro_steps(self, micro_batches: list[MicroBatch]) -> Iterator[MicroBatch]:
        """Yield each micro-batch on the device, after seeding its dropout."""
        for index, batch in enumerate(micro_batches):
            # a resumed run repeats the noise, without reading a random state from the device
            self._seed(self.step, index)
            yield batch.to(self.device)

    def _seed(self, step: int, number: int) -> None:
        """Seed the dropout of a pass, or of a micro-batch.

        ``torch.manual_seed`` takes up to 0.6 ms, because it also seeds devices that do not exist.
        """
        seed = mix(self.seed, step, number, self.rank)
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)
        elif self.device.type == "mps":
            torch.mps.manual_seed(seed)

    def encode(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Encode this process's part of a micro-batch, and gather all vectors in order of rank.

        Returns the gathered queries (b, d) and passages (b, 1 + H, d). Only the vectors of this
        process have gradients.
        """
        with self._pass(batch.tokens), self.autocast():
            queries, passages = self.encoder(batch)
        if self.sharded and torch.is_grad_enabled():
            if self.encoder.one_pass:
                queries, passages = self._separate.cut(queries, passages)
            else:
                (queries,), (passages,) = self._separate.cut(queries), self._separate.cut(passages)
        queries, passages = self.all_rows(queries), self.all_rows(passages)
        # the flags are read once per step, so that no pass waits for the device
        finite = torch.isfinite(queries).all() & torch.isfinite(passages).all()
        self.finite_flags.append((batch.query_ids, finite.view(1)))
        return queries, passages

    def _pass(self, tokens: int) -> contextlib.AbstractContextManager[None]:
        """Announce a pass of a step, and return a context for it, see ``_weights_of_pass``."""
        if self.before_pass is not None:
            self.before_pass(tokens, torch.is_grad_enabled())
        return self._weights_of_pass()

    def _weights_of_pass(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the encoder has its weights of the precision of the run."""
        return contextlib.nullcontext() if self.half_weights is None else self.half_weights.used()

    def texts(self, micro_batches: list[MicroBatch]) -> StepTexts:
        """Return this process's texts of a step, divided into passes."""
        return StepTexts(self, micro_batches)

    def equalized(self, batches: Iterable[Tensor]) -> list[Tensor]:
        """Return the batches as a list.

        With sharded weights, add empty batches until all processes have equally many.
        """
        equalized = list(batches)
        if self.sharded:
            most = self.largest(len(equalized))
            while len(equalized) < most:
                equalized.append(torch.zeros(0, dtype=torch.long))
        return equalized

    def encoded(self, passes: Iterable[Pass]) -> Iterator[Tensor]:
        """Yield the vectors of the texts of each pass, (t, d).

        A pass that is encoded twice in a step has the same dropout noise both times.
        """
        for each in passes:
            with self._pass(each.texts.count(padded=False)):
                vectors = self._encode_pass(each, self.step)
            yield vectors

    def _encode_pass(self, each: Pass, step: int) -> Tensor:
        self._seed(step, each.number)
        tower = (self.encoder.query_tower, self.encoder.passage_tower)[each.side]
        count = len(each.text_numbers)
        texts = each.texts if count else ONE_TOKEN
        with self.autocast():
            vectors = self.encoder.embed(tower, texts.to(self.device))[:count]
        if self.sharded and torch.is_grad_enabled():
            (vectors,) = self._separate.cut(vectors)
        return vectors

    def uniform(self, index: int) -> float:
        """Return a random number in [0, 1) that depends only on seed, step and ``index``."""
        return mix(self.seed, self.step, index) / 2**63

    def backward(self, value: Tensor) -> None:
        """Compute the gradients of ``value`` in this process.

        ``reduce_gradients`` later sums them over all processes.
        """
        scaled = self.scaler.scale(value)
        if self.half_weights is None:
            scaled.backward()
        else:
            self.half_weights.backward(scaled)
        self._separate.run()

    def encode_again(
        self, micro_batches: list[MicroBatch], number: int, step: int, two_pass: bool
    ) -> tuple[Tensor, Tensor]:
        """Encode a micro-batch of a past step with the current weights and its dropout noise.

        micro_batches: all of the step. two_pass: whether the method of the run has two passes.
        Returns the query vectors (B, d) and the passage vectors (B, 1 + H, d) of this process,
        without gradients. The random state does not change.
        """
        devices = [self.device] if self.device.type == "cuda" else []
        batch = micro_batches[number]
        with torch.random.fork_rng(devices), torch.no_grad(), self._weights_of_pass():
            if not two_pass or self.replay_share < 1:
                self._seed(step, number)
                with self.autocast():
                    return self.encoder(batch.to(self.device))
            # the noise belongs to passes, which have texts of several micro-batches
            b, per_query = len(batch.query_ids), batch.ids.columns.shape[1]
            first = sum(len(each.query_ids) for each in micro_batches[:number])
            pairs = sum(len(each.query_ids) for each in micro_batches)
            queries = torch.arange(first, first + b)
            passages = torch.arange(pairs + first * per_query, pairs + (first + b) * per_query)
            numbers = torch.cat([queries, passages])  # of the micro-batch's texts, see ``Pass``
            vectors = torch.zeros(len(numbers), self.encoder.dim, device=self.device)
            for each in self.texts(micro_batches).passes:
                wanted = torch.isin(each.text_numbers, numbers)
                if self.sharded or wanted.any():
                    places = torch.searchsorted(numbers, each.text_numbers[wanted]).to(self.device)
                    vectors[places] = self._encode_pass(each, step)[wanted.to(self.device)]
            return vectors[:b], vectors[b:].view(b, per_query, -1)

    def finite_weights(self) -> bool:
        """Return whether all weights in all processes are finite."""
        finite = all(
            bool(torch.isfinite(sharding.local(weight)).all())
            for weight in self.encoder.parameters()
        )
        return not self.largest(int(not finite))

    def not_finite(self) -> list[str]:
        """Return the query ids of the first micro-batch with NaN or infinite embeddings.

        Return [] if there is none.
        """
        if not self.finite_flags:
            return []
        # one transfer from the device
        finite = iter(torch.cat([flags for _, flags in self.finite_flags]).tolist())
        for query_ids, flags in self.finite_flags:
            if not all(next(finite) for _ in flags):
                return query_ids
        return []

    def drop_step(self) -> None:
        """Discard the gradients that were computed since the last update of the weights."""
        self.optimizer.zero_grad()
        self.finite_flags = []
        self._separate.passes = []
        if self.half_weights is not None:
            self.half_weights.drop()

    def reduce_gradients(self) -> None:
        """Sum the gradients over all processes. Each optimizer step does this once."""
        if self.replay_share < 1:  # a process that replayed no text of a tower sends zeros
            self.scaler.scale(torch.zeros((), device=self.device))  # else it could not unscale
            for parameter in self.parameters:
                parameter.grad = (
                    torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                )
        if not self.sharded:  # with sharded weights, each backward pass has summed them
            self.sum([p.grad for p in self.parameters if p.grad is not None])

    def gradient_norms(self) -> tuple[float, float, float]:
        """Return the gradient norms of query tower, passage tower and encoder, without loss scale.

        Tied towers have one norm.
        """
        self.scaler.unscale_(self.optimizer)
        norms = []
        for parameters in self.parameters_of_towers:
            gradients = [sharding.local(p.grad) for p in parameters if p.grad is not None]
            norms.append(torch.nn.utils.get_total_norm(gradients))
        stacked = torch.stack(norms)  # (towers,)
        if self.sharded:
            squares = stacked.to(self.device).double().square()
            self.sum([squares])
            stacked = squares.sqrt()
        found = stacked.tolist()
        return found[0], found[-1], math.hypot(*found)

    def clip(self, norm: float, limit: float) -> float:
        """Scale all gradients down if ``norm``, the encoder's gradient norm, is above ``limit``.

        Return the scale factor, at most 1.
        """
        torch.nn.utils.clip_grads_with_norm_(
            self.parameters, limit, torch.tensor(norm, device=self.device)
        )
        return min(1.0, limit / norm) if norm else 1.0

    def update(self) -> None:
        """Update the weights and clear the gradients.

        With fp16, weights stay unchanged if a gradient overflowed.
        """
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.drop_step()

    @staticmethod
    def free_memory() -> None:
        """Give the memory of deleted objects back to the device and to the operating system."""
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        elif torch.backends.mps.is_available():
            torch.mps.empty_cache()
        with contextlib.suppress(AttributeError):  # only glibc has this function
            ctypes.CDLL(None).malloc_trim(0)

    def load_scaler_state(self, state: dict[str, Any]) -> None:
        """Restore the state of the loss scaler from a checkpoint.

        An empty state, of a run without fp16, changes nothing.
        """
        if state:
            self.scaler.load_state_dict(state)

    def close(self) -> None:
        """End the process group, and reset torch's global settings for another run."""
        self.before_pass = None  # a method of the run: the cycle would keep the encoder in memory
        torch.set_float32_matmul_precision(self.matmul_precision_before)
        if self.memory_limited:
            torch.cuda.set_per_process_memory_fraction(1.0, self.device.index)
        if self.started_group:
            leave_group()


def mix(*numbers: int) -> int:
    """Hash several numbers to one 63-bit number, which is used as a random seed."""
    digest = hashlib.sha256(",".join(map(str, numbers)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
