"""Devices, precision and what a method asks of them: the only file that imports accelerate.

Gradients are summed over the processes once, at the end of an optimizer step. DistributedDataParallel is not used:
its hooks expect one forward and one backward pass at a time, which GradCache's kept graphs do not keep to, and it averages
where a sum over the global rows is meant.
"""

import contextlib
import datetime
import hashlib
import os
import resource
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, DistributedType
from accelerate.state import AcceleratorState
from accelerate.utils import GradientAccumulationPlugin, InitProcessGroupKwargs
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from torch import Tensor

from contaccum.batch import MicroBatch, RowIds, Tokens
from contaccum.encoder import DualEncoder
from contaccum.errors import InputError
from contaccum.launch import local_place
from contaccum.processes import Processes, own_keys, refuse_missing_processes

ACCELERATE_PRECISION = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}
TENSORBOARD_HINT = "pip install 'contaccum[tensorboard]'"
PLAIN = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
SHARDED = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism config",
}
"""How accelerate launch tells its processes that each is to hold a part of the model."""


class Engine(Processes):
    """One process of a training run. Implements contaccum.methods.step.Engine."""

    def __init__(
        self,
        *,
        device: str = "auto",
        precision: str = "fp32",
        tf32: bool = False,
        seed: int = 0,
        trackers: list[str] | None = None,
        tracker_dir: str | None = None,
        timeout_minutes: float = 30,
    ) -> None:
        """
        device: ``auto`` (CUDA, else MPS, else CPU) or ``cpu``. precision: ``fp32``, ``bf16`` or ``fp16`` (autocast; weights and
        loss stay in fp32). tf32: until ``close``, CUDA multiplies fp32 matrices in TF32. trackers: names that accelerate knows,
        e.g. tensorboard. timeout_minutes: how long a process waits for the others before it gives up.
        """
        self.accelerator = _accelerator(device, precision, trackers or [], tracker_dir, timeout_minutes)
        # a trainer of another library that broke off in this process may have left updates switched off
        self.accelerator.gradient_state._set_sync_gradients(True)
        place = self.accelerator
        super().__init__(place.process_index, place.num_processes, place.local_process_index, place.device)
        refuse_missing_processes(self.world)
        if precision == "fp16" and self.device.type == "cpu":  # accelerate would run in fp32 and not say so
            self._forget_choices(group=self.world == 1)
            raise InputError("run.precision is fp16 on cpu, expected fp32 or bf16")
        if tf32 and self.device.type != "cuda":
            warnings.warn(f"run.tf32 has no effect on {self.device.type}", stacklevel=2)
        self.tf32 = tf32 and not torch.backends.cuda.matmul.allow_tf32
        if self.tf32:
            torch.backends.cuda.matmul.allow_tf32 = True
        self.limited = False
        self.seed = seed
        self.step = 0
        """Optimizer steps taken; with the seed it decides every random draw."""
        self.gathers = 0
        """Gathers done since ``begin_step``."""
        self.peak_before = 0
        self._encoded: list[tuple[list[str], Tensor]] = []

    def prepare(self, encoder: DualEncoder, optimizer: torch.optim.Optimizer) -> None:
        """Take over model and optimizer: device, autocast, loss scaling; every process starts from the weights of the first."""
        self.encoder = encoder
        self.parameters = [parameter for parameter in encoder.parameters() if parameter.requires_grad]
        self.copy_from_main([parameter.data for parameter in encoder.parameters()])
        if (
            encoder.graphs
        ):  # a graph's outputs are overwritten at its next replay, so gradients need memory of their own
            for parameter in self.parameters:
                parameter.grad = torch.zeros_like(parameter)
        self.optimizer = self.accelerator.prepare_optimizer(optimizer)
        self.ahead = 1 if self.device.type == "cpu" or encoder.graphs else first_pass_width(encoder)

    def limit_memory(self, budget: int) -> None:
        """Let torch allocate at most ``budget`` bytes on the GPU; what CUDA itself takes comes on top. No effect on a CPU."""
        if self.device.type != "cuda":
            warnings.warn(
                f"run.memory_budget has no effect on {self.device.type}: it caps CUDA's allocator", stacklevel=2
            )
            return
        whole = torch.cuda.get_device_properties(self.device).total_memory
        if budget > whole:
            raise InputError(f"run.memory_budget is {budget} bytes, expected at most the GPU's {whole}")
        torch.cuda.set_per_process_memory_fraction(budget / whole, self.device.index)  # none: the only GPU
        self.limited = True

    def begin_step(self, step: int) -> None:
        """``step``: optimizer steps taken before."""
        self.step, self.gathers = step, 0

    # the three verbs of a method

    def micro_steps(self, micro_batches: list[MicroBatch]) -> Iterator[MicroBatch]:
        for index, batch in enumerate(micro_batches):
            # dropout noise is a function of (seed, step, micro-batch, process), so a second pass replays it exactly, a resumed
            # run continues it, and no random state is ever read back from the device
            torch.manual_seed(mix(self.seed, self.step, index, self.rank))
            yield batch.to(self.device)

    def join(self, micro_batches: list[MicroBatch]) -> MicroBatch:
        """Several micro-batches as one, padded to the longest text; the rows of each process stay together."""
        if len(micro_batches) == 1:
            return micro_batches[0]
        query, passage = self.encoder.query_tower.tokenizer, self.encoder.passage_tower.tokenizer

        def joined(rows: list[Tensor]) -> Tensor:
            return torch.cat([part.unflatten(0, (self.world, -1)) for part in rows], dim=1).flatten(0, 1)

        return MicroBatch(
            Tokens.join([batch.queries for batch in micro_batches], query.pad_token_id, query.padding_side),
            Tokens.join([batch.passages for batch in micro_batches], passage.pad_token_id, passage.padding_side),
            RowIds.merge([batch.ids for batch in micro_batches], joined),
            [name for batch in micro_batches for name in batch.query_ids],
        )

    def encode(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        if self.encoder.graphs:
            torch.compiler.cudagraph_mark_step_begin()
        with self.accelerator.autocast():
            queries, passages = self.encoder(batch)
        queries, passages = self.all_rows(queries), self.all_rows(passages)
        # looked at once a step, so that the device never waits for the answer
        self._encoded.append((batch.query_ids, torch.isfinite(queries).all() & torch.isfinite(passages).all()))
        return queries, passages

    def backward(self, value: Tensor) -> None:
        self.accelerator.backward(value)

    def encode_again(self, batch: MicroBatch, step: int, index: int) -> tuple[Tensor, Tensor]:
        """What ``encode`` gave this process for micro-batch ``index`` of a past step, were it encoded by the weights of now.

        The dropout noise is that of the first time, so that nothing but the weights can make a difference. Leaves no graph and
        no change of random state. Returns this process's queries (B, d) and passages (B, 1 + H, d).
        """
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices), torch.no_grad(), self.accelerator.autocast():
            torch.manual_seed(mix(self.seed, step, index, self.rank))
            return self.encoder(batch.to(self.device))

    # the rest of a step

    def not_finite(self) -> list[str]:
        """Query ids of the step's first micro-batch with an embedding that is NaN or infinite; none when all are finite."""
        finite = torch.stack([flag for _, flag in self._encoded]).tolist()
        return next((names for (names, _), fine in zip(self._encoded, finite, strict=True) if not fine), [])

    def drop_step(self) -> None:
        """Leave no trace of the step since the last update."""
        self.optimizer.zero_grad(set_to_none=not self.encoder.graphs)
        self._encoded = []

    def gather(self, own: Tensor) -> list[Tensor]:
        """As for any processes, and counted once it is done: memory may run out before."""
        parts = super().gather(own)
        self.gathers += self.world > 1
        return parts

    def reduce_gradients(self) -> None:
        """Sum the gradients over the processes, once a step."""
        self.sum([p.grad for p in self.parameters if p.grad is not None])

    def gradient_norms(self) -> tuple[float, float]:
        """L2 norms of the query and passage towers' gradients (equal when the towers are tied), loss scaling undone."""
        self.accelerator.unscale_gradients(self.optimizer)
        norms = []
        for tower in (self.encoder.query_tower, self.encoder.passage_tower):
            gradients = [p.grad for p in tower.parameters() if p.grad is not None]
            norms.append(torch.nn.utils.get_total_norm(gradients))
        query, passage = torch.stack(norms).tolist()
        return query, passage

    def clip(self, norm: float, limit: float) -> float:
        """Scale all gradients, whose L2 norm together is ``norm``, down to the norm ``limit`` where they exceed it.

        Returns what they were multiplied by, to rounding.
        """
        torch.nn.utils.clip_grads_with_norm_(self.parameters, limit, torch.tensor(norm, device=self.device))
        return min(1.0, limit / norm) if norm else 1.0

    def update(self) -> None:
        """Take the optimizer step (fp16's scaler skips it when gradients overflowed) and clear the gradients."""
        self.optimizer.step()
        self.encoder.weights_changed()
        self.drop_step()

    def free_memory(self) -> None:
        """Give back what a step took that was broken off."""
        clear_device_cache(garbage_collection=True)

    def scaler_state(self) -> dict[str, Any]:
        return self.accelerator.scaler.state_dict() if self.accelerator.scaler is not None else {}

    def loss_scale(self) -> float:
        """What fp16's scaler multiplies the loss by; 1 without one."""
        return float(self.accelerator.scaler.get_scale()) if self.accelerator.scaler is not None else 1.0

    def load_scaler_state(self, state: dict[str, Any]) -> None:
        """Go on from what ``scaler_state`` gave; an empty one, of a run without a scaler, leaves the scaler new."""
        if self.accelerator.scaler is not None and state:
            self.accelerator.scaler.load_state_dict(state)

    # trackers

    def start_trackers(self, config: dict[str, Any]) -> None:
        if self.accelerator.log_with:
            self.accelerator.init_trackers("contaccum", config={k: v for k, v in config.items() if v is not None})

    def track(self, values: dict[str, float], step: int) -> None:
        self.accelerator.log(values, step=step)

    def close(self) -> None:
        """End trackers and the process group, and let a later run in this process choose its own device, precision and memory."""
        if self.tf32:
            torch.backends.cuda.matmul.allow_tf32 = False
        if self.limited:
            torch.cuda.set_per_process_memory_fraction(1.0, self.device.index)
        self.accelerator.end_training()
        self._forget_choices(group=True)  # it has ended the group, which a next run would take for alive

    def _forget_choices(self, group: bool) -> None:
        # accelerate keeps device and precision for the whole process
        AcceleratorState._reset_state(reset_partial_state=group)

    def peak_memory(self) -> int:
        """Most memory held since the engine was made, in bytes, what ``unmeasured`` blocks held left out: allocated on a GPU,
        resident on a CPU."""
        now = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else peak_resident()
        return max(self.peak_before, now)

    @contextlib.contextmanager
    def unmeasured(self) -> Iterator[None]:
        """What the block holds does not count in ``peak_memory``."""
        before = self.peak_memory()
        try:
            yield
        finally:
            self.reset_peak_memory()
            self.peak_before = before

    def reset_peak_memory(self) -> None:
        """Let the peak begin anew with what is held now."""
        self.peak_before = 0
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            reset_peak_resident()


def _accelerator(
    device: str, precision: str, trackers: list[str], tracker_dir: str | None, timeout_minutes: float
) -> Accelerator:
    """accelerate's own object for one process, or one of several that hold the whole model; else InputError."""
    _refuse_sharding()
    wait = datetime.timedelta(minutes=timeout_minutes)
    group = InitProcessGroupKwargs(timeout=wait)
    # the class has no field for a store, and accelerate takes no class derived from it
    group.to_kwargs = partial(dict, timeout=wait, **own_keys(wait))
    try:
        accelerator = Accelerator(
            mixed_precision=ACCELERATE_PRECISION[precision],
            cpu=encoding_device(device).type == "cpu",  # else several processes without a GPU would each be alone
            log_with=trackers or None,
            project_dir=tracker_dir,
            kwargs_handlers=[group],
            # else a number in the environment would divide every gradient
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        )
    except (ValueError, ImportError) as error:
        raise InputError(
            f"run.precision {precision} and run.trackers {trackers} cannot be had here: {error}"
        ) from error
    if len(accelerator.log_with) < len(trackers):  # accelerate leaves out what is not installed
        raise InputError(
            f"run.trackers is {trackers}, expected names whose packages are installed: {TENSORBOARD_HINT} for tensorboard"
        )
    if accelerator.distributed_type not in PLAIN:
        raise InputError(
            f"launched for {accelerator.distributed_type.value}, expected one process or data-parallel processes"
        )
    return accelerator


def _refuse_sharding() -> None:
    for variable, name in SHARDED.items():
        if os.environ.get(variable, "false").lower() == "true":
            raise InputError(
                f"launched for {name}, expected one process or data-parallel processes, each with the whole model; where that "
                "does not fit, a smaller batch.micro_batch_size and model.gradient_checkpointing take less memory"
            )


class SharedEncoder:
    """The model in training, as evaluation wants it: each process encodes every W-th text, all get all vectors."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.dim = engine.encoder.dim
        self.device = engine.device

    def encode_queries(self, texts: list[str], batch_tokens: int | None = None, progress: bool = False) -> np.ndarray:
        return self._encode(self.engine.encoder.encode_queries, texts, batch_tokens, progress)

    def encode_passages(self, texts: list[str], batch_tokens: int | None = None, progress: bool = False) -> np.ndarray:
        return self._encode(self.engine.encoder.encode_passages, texts, batch_tokens, progress)

    def fingerprint(self, kind: str) -> str:
        return self.engine.encoder.fingerprint(kind)

    def _encode(
        self, encode: Callable[..., np.ndarray], texts: list[str], batch_tokens: int | None, progress: bool
    ) -> np.ndarray:
        world, rank = self.engine.world, self.engine.rank
        own = texts[rank::world]
        with self.engine.accelerator.autocast():
            vectors = encode(own, batch_tokens, progress and rank == 0)
        if world == 1:
            return vectors
        rows = torch.zeros(-(-len(texts) // world), self.dim, device=self.engine.device)  # the same height everywhere
        rows[: len(own)] = torch.from_numpy(vectors)
        parts = torch.stack(self.engine.gather(rows))  # (W, height, d)
        return parts.transpose(0, 1).reshape(-1, self.dim)[: len(texts)].cpu().numpy()


def peak_resident() -> int:
    """Most bytes of memory that this process has held."""
    status = Path("/proc/self/status")
    if status.exists():  # ru_maxrss on Linux also knows the peak of the program that started this one
        found = [line for line in status.read_text().splitlines() if line.startswith("VmHWM:")]
        if found:
            return int(found[0].split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


def first_pass_width(encoder: DualEncoder) -> int:
    """How many micro-batches GradCache's first pass may encode at once within the memory of the second.

    A forward pass without graph holds the working set of one layer; the graph of the second pass holds about 1.5 times that
    for each layer, so as many micro-batches as layers fit. One where dropout has to be replayed, whose noise is drawn per
    micro-batch, and where activations are recomputed, which leaves the graph little more than one layer.
    """
    backbones = [tower.backbone for tower in (encoder.query_tower, encoder.passage_tower)]
    if encoder.has_dropout() or encoder.recomputes:
        return 1
    return max(1, min(backbone.config.num_hidden_layers for backbone in backbones))


def reset_peak_resident() -> None:
    """Let ``peak_resident`` begin anew; where the system does not allow it, the peak stays that of the whole process."""
    with contextlib.suppress(OSError):  # 5 resets VmHWM: proc_pid_clear_refs(5)
        Path("/proc/self/clear_refs").write_text("5")


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out: on a GPU, or on a CPU where a limit (ulimit -v) stands before the system's."""
    return isinstance(error, MemoryError) or (isinstance(error, Exception) and should_reduce_batch_size(error))


def mix(*numbers: int) -> int:
    """One 63-bit seed from several numbers."""
    return int.from_bytes(hashlib.sha256(",".join(map(str, numbers)).encode()).digest()[:8], "little") >> 1


def encoding_device(device: str) -> torch.device:
    """Where one process encodes: ``auto`` takes its own GPU, else MPS, else the CPU."""
    if device == "auto" and torch.cuda.is_available():
        return torch.device("cuda", local_place()[0] % torch.cuda.device_count())
    if device == "auto" and torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")


def torch_dtype(precision: str) -> torch.dtype:
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
