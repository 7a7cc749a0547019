"""Started by test_processes.py, alone or under torchrun: three steps of every method on real batches, gradients to a file.

Under ``tokens-METHOD`` the same with micro-batches cut by tokens; one process then takes those that two have together.

usage: gradient_worker.py DATA OUTPUT
"""

import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import torch
from helpers import gradients, train_config
from safetensors.torch import save_file

from contaccum.batch import MicroBatch, Tokens
from contaccum.config import TRAITS, TrainConfig
from contaccum.data.dataset import TrainSet, load_train_set
from contaccum.encoder import DualEncoder
from contaccum.engine import Engine
from contaccum.methods import METHODS
from contaccum.training import setup

BY_TOKENS = {"batch.micro_batch_tokens": 250, "batch.micro_batch_size": 8, "model.max_passage_length": 48}


def main(data: str, output: str) -> None:
    found = {}
    for name in (*TRAITS, *(f"tokens-{method}" for method, traits in TRAITS.items() if not traits.whole)):
        method = name.removeprefix("tokens-")
        engine = Engine(device="cpu")
        changes = {"data.hard_negatives": 1, "batch.micro_batch_size": 4 // engine.world, "bank.size": 24}
        config = train_config(Path(data), Path(output), method, **{**changes, **(BY_TOKENS if name != method else {})})
        config.validate(engine.world)
        train_set = load_train_set(data if name == method else f"{data}-uneven", "train", 1)
        encoder = setup.build_encoder(config.model, train_set, config.seed).train()
        encoder.set_dropout(0.0)
        batches = setup.build_batches(config, engine, encoder, train_set)
        if name != method and engine.world == 1:
            batches = Together(config, encoder, train_set)
        loss = setup.build_loss(config)
        bank = setup.build_bank(config, engine, encoder, loss)
        engine.prepare(encoder, torch.optim.SGD(encoder.parameters(), lr=0.5))
        engine.ahead = 2  # as on a GPU
        for step in range(3):
            engine.step = step
            values = METHODS[method](engine, batches.step(step), bank, loss)
            engine.reduce_gradients()
            for parameter, gradient in gradients(encoder).items():
                found[f"{name}/{step}/{parameter}"] = gradient
            found[f"{name}/{step}/loss"] = torch.stack([value.value for value in values]).mean()
            engine.update()
            bank.end_step()
        tensors, numbers = bank.state()
        found |= {f"{name}/bank/{tensor_name}": tensor for tensor_name, tensor in tensors.items()}
        found[f"{name}/bank/pointer"] = torch.tensor(numbers["pointer"])
    save_file(found, f"{output}.{engine.rank}.safetensors")


class Together:
    """The micro-batches of both of two processes as one process's."""

    def __init__(self, config: TrainConfig, encoder: DualEncoder, train_set: TrainSet) -> None:
        places = [SimpleNamespace(rank=rank, world=2, main_first=nullcontext) for rank in range(2)]
        self.sources = [setup.build_batches(config, place, encoder, train_set) for place in places]

    def step(self, step: int) -> list[MicroBatch]:
        return [
            MicroBatch(
                Tokens.join([first.queries, second.queries], 0, "right"),
                Tokens.join([first.passages, second.passages], 0, "right"),
                first.ids,
                first.query_ids + second.query_ids,
            )
            for first, second in zip(*(source.step(step) for source in self.sources), strict=True)
        ]


if __name__ == "__main__":
    main(*sys.argv[1:])
