"""The processes of one launch, and what they tell each other: the only file that imports torch.distributed.

torchrun and accelerate launch start the processes and end them all when one of them ends badly; nothing here watches over them.
"""

import contextlib
import datetime
import hashlib
import itertools
import math
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

from contaccum.errors import InputError, Interrupted
from contaccum.launch import process_place

SMALL = 2**20
"""Tensors of fewer bytes are summed in one message: each message has a fixed cost, and a copy of them takes little memory."""
_SAY_SECONDS = 10  # how long a process that failed looks for the launcher's store before it speaks unasked

Options = TypeVar("Options")


class Processes:
    """This process's place among W that were started together; alone when W is 1."""

    def __init__(self, rank: int = 0, world: int = 1, local_rank: int = 0, device: torch.device | None = None) -> None:
        """rank: 0 to world - 1; local_rank: the same among those of one machine; device: where messages stand (gloo: the CPU)."""
        self.rank = rank
        self.world = world
        """Number of processes."""
        self.local_rank = local_rank
        self.device = device or torch.device("cpu")

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        """Wait until every process has come here."""
        if self.world > 1:
            dist.barrier(device_ids=[self.device.index or 0] if self.device.type == "cuda" else None)

    @contextlib.contextmanager
    def main_first(self) -> Iterator[None]:
        """The main process runs the block, then the first process of every other machine, then the rest.

        So what the block leaves in a cache is made once in every cache, whether the machines share it or not.
        """
        turn = 0 if self.is_main else 1 if self.local_rank == 0 else 2
        for _ in range(turn):
            self.barrier()
        yield
        for _ in range(2 - turn):
            self.barrier()

    def gather(self, own: Tensor) -> list[Tensor]:
        """The tensors of all processes, of one shape, in rank order."""
        if self.world == 1:
            return [own]
        parts = [torch.empty_like(own) for _ in range(self.world)]
        dist.all_gather(parts, own.contiguous())
        return parts

    def all_rows(self, own: Tensor) -> Tensor:
        """Rows of all processes, of one shape, in rank order; only this process's rows carry gradient."""
        if self.world == 1:
            return own
        parts = self.gather(own.detach())
        parts[self.rank] = own
        return torch.cat(parts)

    def gather_bytes(self, own: bytes) -> list[bytes]:
        """The messages of all processes, of any length, in rank order."""
        lengths = [int(part) for part in self.gather(torch.tensor(len(own), device=self.device))]
        padded = np.zeros(max(lengths), dtype=np.uint8)
        padded[: len(own)] = np.frombuffer(own, dtype=np.uint8)
        parts = self.gather(torch.from_numpy(padded).to(self.device))
        return [part[:length].cpu().numpy().tobytes() for part, length in zip(parts, lengths, strict=True)]

    def differing(self, value: str) -> list[int]:
        """The processes whose value is another than the main process's, by one exchange of 32 bytes."""
        digest = np.frombuffer(hashlib.sha256(value.encode()).digest(), dtype=np.uint8)
        parts = self.gather(torch.from_numpy(digest.copy()).to(self.device))
        return [rank for rank, part in enumerate(parts) if not torch.equal(part, parts[0])]

    def largest(self, mine: int) -> int:
        """The largest of all processes' numbers."""
        return max(int(part) for part in self.gather(torch.tensor(mine, device=self.device)))

    def copy_from_main(self, tensors: list[Tensor]) -> None:
        """Overwrite the tensors with the main process's."""
        if self.world > 1:
            for tensor in tensors:
                dist.broadcast(tensor, src=0)

    def sum(self, tensors: list[Tensor]) -> None:
        """Replace each tensor by its sum over the processes."""
        if self.world == 1:
            return
        small = [tensor for tensor in tensors if tensor.nbytes < SMALL]
        together = [torch.cat([tensor.flatten() for tensor in small])] if small else []
        large = [tensor for tensor in tensors if tensor.nbytes >= SMALL]
        for wait in [dist.all_reduce(tensor, async_op=True) for tensor in (*large, *together)]:
            wait.wait()
        for flat in together:
            for tensor, part in zip(small, flat.split([tensor.numel() for tensor in small]), strict=True):
                tensor.copy_(part.view_as(tensor))


ALONE = Processes()


def started_elsewhere(device: torch.device) -> Processes:
    """The processes of a group that another library has started; alone where there is none."""
    if not dist.is_available() or not dist.is_initialized():
        return ALONE
    return Processes(dist.get_rank(), dist.get_world_size(), device=device)


def own_keys(timeout: datetime.timedelta) -> dict[str, Any]:
    """What to give ``init_process_group`` so that the new group has keys of its own in the launcher's store; nothing where one
    process was started, a group is there already, or the launcher (MPI) has another way.

    torch itself takes the same keys for every group that a process makes, and finds the addresses of an earlier one there.
    """
    if process_place()[1] == 1 or dist.is_initialized() or "MASTER_ADDR" not in os.environ:
        return {}
    store, rank, world = next(dist.rendezvous("env://", timeout=timeout))
    return {"store": dist.PrefixStore(f"contaccum/group/{next(_GROUPS)}", store), "rank": rank, "world_size": world}


_GROUPS = itertools.count()  # every process of a launch makes the same groups in the same order


@contextlib.contextmanager
def joined(timeout_minutes: float) -> Iterator[Processes]:
    """Inside the block the processes of a launch can exchange results, on the CPU; without a launcher there is one."""
    if not 0 < timeout_minutes < math.inf:
        raise InputError(f"timeout_minutes is {timeout_minutes}, expected a finite number above 0")
    rank, world = process_place()
    refuse_missing_processes(world)
    if world == 1:
        yield ALONE
        return
    timeout = datetime.timedelta(minutes=timeout_minutes)
    dist.init_process_group("gloo", timeout=timeout, **own_keys(timeout))
    yield Processes(rank, world, int(os.environ.get("LOCAL_RANK", rank)))
    dist.destroy_process_group()  # not after an error: the others, who then fail too, are to fail after this process


def refuse_missing_processes(world: int) -> None:
    """On CPUs, accelerate launch leaves it to MPI to start processes and without it starts one, silently."""
    # it sets the address of a first process only when it was asked for more than one
    asked_for_more = "ACCELERATE_USE_CPU" in os.environ and "MASTER_PORT" in os.environ
    if asked_for_more and world == 1 and "RANK" not in os.environ:
        raise InputError(
            "accelerate launch was asked for several processes and started one (on CPUs it needs MPI), "
            "expected torchrun --nproc_per_node N there"
        )


def recorded(verb: Callable[[Options], None], options: Options) -> None:
    """Run a verb so that torchrun's report of a failure shows the traceback of the process that failed first."""
    ended: list[InputError | Interrupted] = []

    def run() -> None:
        try:
            verb(options)
        except (InputError, Interrupted) as error:  # a sentence, not a traceback
            ended.append(error)

    record(run)()
    if ended:
        raise ended[0]


def first_to_say(sentence: str) -> bool:
    """Whether no other process of this launch has said this sentence before; also True where they cannot be asked."""
    _, world = process_place()
    if world == 1:
        return True
    key = f"contaccum/said/{hashlib.sha256(sentence.encode()).hexdigest()}"
    try:
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=datetime.timedelta(seconds=_SAY_SECONDS),
        )
        return store.add(key, 1) == 1
    except (KeyError, RuntimeError):  # no launcher's store, or it has gone with its process
        return True
