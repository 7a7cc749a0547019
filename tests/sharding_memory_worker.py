"""A job of test_sharding.py: bytes of weights, gradients and optimizer state in one process, and
the peak of a step.

arguments: DATA OUTPUT. Texts are short, so that activations need little memory. ``peak at once`` is
the peak of a step with one backward pass through both forward passes: the control.
"""

import weakref
from pathlib import Path
from typing import Any

import torch
from helpers import open_train_set, train_config
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from contaccum.methods import METHODS
from contaccum.runtime.engine import Engine
from contaccum.runtime.files import write_json
from contaccum.runtime.sharding import local
from contaccum.training import parts

LAYERS, WIDTH = 8, 256


class LiveTensors(TorchDispatchMode):
    """Peak of the bytes of the given tensors and of all tensors that operations return.

    torch's profiler would not do: it misses memory that a thread of gloo frees, and which thread
    frees is a matter of timing.
    """

    def __init__(self, tensors) -> None:
        super().__init__()
        self.storages: weakref.WeakValueDictionary = weakref.WeakValueDictionary()
        self.peak = 0
        self.add(tensors)

    def add(self, tensors) -> None:
        for tensor in tensors:
            storage = local(tensor.detach()).untyped_storage()
            self.storages[storage._cdata] = storage
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self.storages.values()))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        self.add(each for each in tree_leaves(found) if isinstance(each, torch.Tensor))
        return found


def main(arguments: list[str]) -> None:
    data, output = arguments
    found: dict[str, Any] = {}
    engine = Engine(device="cpu")
    sizes = {
        "model.tiny_layers": LAYERS,
        "model.tiny_width": WIDTH,
        "model.tie_towers": True,
        "model.max_passage_length": 4,
    }
    batch = {
        "batch.global_batch_size": 4,
        "batch.micro_batch_size": 4 // engine.world,
        "model.max_query_length": 4,
    }
    config = train_config(Path(data), Path("unused"), "grad_accum", **sizes, **batch)
    train_set = open_train_set(data, "train")
    encoder = parts.build_encoder(config, train_set)
    if engine.world > 1:
        engine.shard(encoder)
    encoder.train()
    batches = parts.build_batches(config, engine, encoder, train_set)
    loss = parts.build_loss(config, encoder)
    bank = parts.build_bank(config, engine, encoder, loss)
    optimizer = parts.make_optimizer(encoder, config.optim)
    engine.prepare(encoder, optimizer)

    def bytes_of(tensors) -> int:
        return sum(local(each).nbytes for each in tensors)

    def step(number: int) -> None:
        engine.begin_step(number)
        METHODS["grad_accum"](engine, batches.step(number), bank, loss)
        engine.reduce_gradients()
        found["gradients"] = bytes_of(
            each.grad for each in encoder.parameters() if each.grad is not None
        )
        engine.clip(engine.gradient_norms()[-1], 1.0)
        engine.update()

    step(0)
    found["weights"] = bytes_of(encoder.parameters())
    states = [value for state in optimizer.state.values() for value in state.values()]
    found["optimizer"] = bytes_of(each for each in states if torch.is_tensor(each))
    for number, name in enumerate(("peak", "peak at once"), start=1):
        with LiveTensors(
            [*encoder.parameters(), *(each for each in states if torch.is_tensor(each))]
        ) as tensors:
            step(number)
        found[name] = tensors.peak
        engine._separate.cut = lambda *outputs: outputs
    write_json(f"{output}.{engine.rank}.json", found)
