"""Processes of one launch: messages between them, device and memory.

Only this file and sharding.py import torch.distributed.

A launcher (torchrun or accelerate launch) starts the processes. If one process fails, the launcher
stops all processes.
"""

import contextlib
import datetime
import hashlib
import itertools
import os
import re
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors
from torch.distributed.elastic.multiprocessing.errors import record

from contaccum.errors import InputError, Interrupted
from contaccum.runtime.launch import local_place, process_place

# size of a message with gradients; DistributedDataParallel has the same default
MESSAGE_BYTES = 25 * 2**20


class Processes:
    """Rank of this process among ``world`` (W) processes, and exchange of data with the others."""

    def __init__(
        self, rank: int = 0, world: int = 1, local_rank: int = 0, device: torch.device | None = None
    ) -> None:
        """rank: 0 to world - 1. local_rank: rank on this machine.

        device: device for messages; the backend gloo needs the CPU.
        """
        self.rank, self.world, self.local_rank = rank, world, local_rank
        self.device = device or torch.device("cpu")
        self.peak_before = 0  # peak memory before the last ``unmeasured`` block

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        """Wait until all processes have called this function."""
        if self.world > 1:
            dist.barrier(
                device_ids=[self.device.index or 0] if self.device.type == "cuda" else None
            )

    @contextlib.contextmanager
    def main_first(self) -> Iterator[None]:
        """Run the ``with`` block in process 0, then once on each other machine, then in the others.

        So each cache is filled only once, even if several machines share it.
        """
        turn = 0 if self.is_main else 1 if self.local_rank == 0 else 2
        for _ in range(turn):
            self.barrier()
        yield
        for _ in range(2 - turn):
            self.barrier()

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return ``tensor`` of every process, in the order of the ranks.

        All must have the same shape.
        """
        if self.world == 1:
            return [tensor]
        gathered = [torch.empty_like(tensor) for _ in range(self.world)]
        dist.all_gather(gathered, tensor.contiguous())
        return gathered

    def all_rows(self, rows: Tensor) -> Tensor:
        """Concatenate the ``rows`` of all processes, by rank.

        Only those of this process have a gradient.
        """
        if self.world == 1:
            return rows
        gathered = self.gather(rows.detach())
        gathered[self.rank] = rows
        return torch.cat(gathered)

    def gather_bytes(self, content: bytes) -> list[bytes]:
        """Return ``content`` of every process, in the order of the ranks.

        The lengths may differ.
        """
        lengths = [
            int(length) for length in self.gather(torch.tensor(len(content), device=self.device))
        ]
        padded = np.zeros(max(lengths), dtype=np.uint8)
        padded[: len(content)] = np.frombuffer(content, dtype=np.uint8)
        gathered = self.gather(torch.from_numpy(padded).to(self.device))
        return [
            row[:length].cpu().numpy().tobytes()
            for row, length in zip(gathered, lengths, strict=True)
        ]

    def from_main(self, value: str) -> str:
        """Return in every process the ``value`` that process 0 passed to this function."""
        return self.gather_bytes(value.encode())[0].decode()

    def differing(self, value: str) -> str:
        """Return a text that names the ranks whose ``value`` differs from that of rank 0.

        Return "" if all are equal.
        """
        digests = self.gather_bytes(hashlib.sha256(value.encode()).digest())
        others = ", ".join(
            f"rank {rank}" for rank, digest in enumerate(digests) if digest != digests[0]
        )
        return f"different from rank 0: {others}" if others else ""

    def largest(self, value: int) -> int:
        """Return the maximum of ``value`` over all processes."""
        if self.world == 1:  # a single process needs no message
            return value
        found = torch.tensor(value, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)

    def copy_from_main(self, tensors: list[Tensor]) -> None:
        """Copy the values of the tensors from process 0 to all other processes."""
        if self.world > 1:
            for tensor in tensors:
                dist.broadcast(tensor, src=0)

    def sum(self, tensors: list[Tensor]) -> None:
        """Replace each tensor by its sum over all processes.

        Each message has a fixed cost, so tensors of the same data type share messages of at most
        ``MESSAGE_BYTES``. A larger tensor is sent by itself, without a copy.
        """
        if self.world == 1:
            return
        # empty tensors have no sum, and torch before 2.7 cannot unflatten them
        for group in _take_tensors([tensor for tensor in tensors if tensor.numel()], MESSAGE_BYTES):
            message = _flatten_dense_tensors(group)  # a view, if the group is one contiguous tensor
            dist.all_reduce(message)
            if message.data_ptr() != group[0].data_ptr():
                torch._foreach_copy_(group, _unflatten_dense_tensors(message, group))

    def peak_memory(self) -> int:
        """Return the peak memory in bytes, outside ``unmeasured`` blocks.

        GPU: allocated memory. CPU: resident memory.
        """
        now = (
            torch.cuda.max_memory_allocated(self.device)
            if self.device.type == "cuda"
            else peak_resident()
        )
        return max(self.peak_before, now)

    @contextlib.contextmanager
    def unmeasured(self) -> Iterator[None]:
        """Exclude the memory of the ``with`` block from ``peak_memory``."""
        before = self.peak_memory()
        try:
            yield
        finally:
            self.reset_peak_memory()
            self.peak_before = before

    def reset_peak_memory(self) -> None:
        """Measure the peak memory from now on."""
        self.peak_before = 0
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            # writing 5 resets VmHWM, see man proc_pid_clear_refs
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")


ALONE = Processes()


def started_elsewhere(device: torch.device) -> Processes:
    """Return the processes of the process group that another library started.

    Without a group, return a single process.
    """
    if not dist.is_available() or not dist.is_initialized():
        return ALONE
    return Processes(dist.get_rank(), dist.get_world_size(), device=device)


def start_group(device_type: str, timeout_minutes: float) -> bool:
    """Connect the processes of a launch, unless they are connected already.

    Return whether this call connected them.

    device_type: GPUs exchange messages with NCCL, other devices with gloo. timeout_minutes: maximum
    time to wait for other processes.
    """
    if process_place()[1] == 1 or dist.is_initialized():
        return False
    timeout = datetime.timedelta(minutes=timeout_minutes)
    try:
        store, rank, world = next(dist.rendezvous("env://", timeout=timeout))
    except dist.DistStoreError as error:
        _NOT_CONNECTED.append(True)
        place = ":".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
        raise InputError(
            f"not all {process_place()[1]} processes connected to {place} (MASTER_ADDR, "
            f"MASTER_PORT) within {timeout_minutes:g} minutes; start all of them, or raise "
            "run.timeout_minutes"
        ) from error
    # torch would use the same keys for every group, so a second group would read the addresses of
    # the first one
    store = dist.PrefixStore(f"contaccum/group/{next(_GROUPS)}", store)
    backend = "nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    return True


def leave_group() -> None:
    """Disconnect the processes that ``start_group`` connected, and end the group's threads."""
    if _TORCH < (2, 8):
        _LEFT.append(dist.group.WORLD)
    dist.destroy_process_group()


_NOT_CONNECTED: list[bool] = []  # not empty after a failed ``start_group``
_GROUPS = itertools.count()  # all processes of a launch create the same groups in the same order
_TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
# Before torch 2.8, freeing a group of gloo hangs if one of its threads is just freeing a tensor of
# the last message (pytorch pull request 154976), so groups are kept until the process ends. Then a
# thread that still frees such a tensor when Python ends can abort the process, so newer versions do
# not keep them.
_LEFT: "list[dist.ProcessGroup | None]" = []


@contextlib.contextmanager
def joined(timeout_minutes: float) -> Iterator[Processes]:
    """Create a process group on the CPU for the ``with`` block, to exchange results.

    Without a launcher, the block gets a single process. timeout_minutes: maximum time to wait for
    other processes.
    """
    rank, world = process_place()
    if world == 1:
        yield ALONE
        return
    start_group("cpu", timeout_minutes)
    yield Processes(rank, world, local_place()[0])
    # not called after an error: the other processes could fail before this process reports it
    leave_group()


def run_with_error_file(command: Callable[[], None]) -> None:
    """Run a command.

    Write the traceback of any error except InputError and Interrupted to torchrun's error file.
    """

    def run() -> InputError | Interrupted | None:
        try:
            command()
        except (InputError, Interrupted) as error:
            return error  # ``record`` writes the file for every exception that leaves this function
        return None

    if error := record(run)():
        raise error


def first_to_say(sentence: str) -> bool:
    """Return whether this is the first call with ``sentence`` among all processes of the launch.

    Also returns True if there is only one process, or if the launcher's key-value store cannot be
    used.
    """
    _, world = process_place()
    if world == 1 or _NOT_CONNECTED:  # another attempt would wait again
        return True
    key = f"contaccum/said/{hashlib.sha256(sentence.encode()).hexdigest()}"
    try:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(
            address, port, is_master=False, timeout=datetime.timedelta(seconds=10)
        )
        return store.add(key, 1) == 1
    except (KeyError, RuntimeError):  # there is no store, or the process with the store has ended
        return True


def encoding_device(device: str) -> torch.device:
    """Return the device of this process.

    ``auto`` means the GPU for this process if there is one, else MPS, else the CPU.
    """
    if device == "auto" and torch.cuda.is_available():
        return torch.device("cuda", local_place()[0] % torch.cuda.device_count())
    if device == "auto" and torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")


@contextlib.contextmanager
def tensor_defaults() -> Iterator[None]:
    """Create float32 tensors on the CPU by default in the ``with`` block.

    The program may have set other defaults in torch.
    """
    dtype = torch.get_default_dtype()
    # torch.get_default_device of torch 2.6 does not know of `with torch.device(...)`.
    on_cpu = torch.empty(0).device.type == "cpu"
    torch.set_default_dtype(torch.float32)
    try:
        # torch.device as a context slows down every call of torch
        with contextlib.nullcontext() if on_cpu else torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)


@contextlib.contextmanager
def training_defaults() -> Iterator[None]:
    """Like ``tensor_defaults``, and also record gradients, whatever the program set in torch.

    Afterwards, torch's random number generators have their earlier states again. Raises InputError
    inside torch.autocast, which would compute parts of the loss in half precision.
    """
    if any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
        raise InputError(
            "train was called inside torch.autocast; call it outside, and set run.precision"
        )
    gpus = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)
    with (
        torch.random.fork_rng(gpus),
        tensor_defaults(),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        yield


PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def torch_dtype(precision: str) -> torch.dtype:
    return PRECISIONS[precision]


def peak_resident() -> int:
    """Return the peak resident memory of this process in bytes.

    On Linux: the peak since ``Engine.reset_peak_memory``.
    """
    status = Path("/proc/self/status")  # on Linux, ru_maxrss also contains the peak of the parent
    if status.exists() and (
        found := re.search(r"^VmHWM:\s+(\d+)", status.read_text(), re.MULTILINE)
    ):
        return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS
