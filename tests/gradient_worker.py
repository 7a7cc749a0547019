"""Started by test_processes.py, alone or under torchrun: three steps of every method on real batches, gradients to a file.

usage: gradient_worker.py DATA OUTPUT
"""

import sys
from pathlib import Path

import torch
from helpers import gradients, train_config
from safetensors.torch import save_file

from contaccum.config import TRAITS
from contaccum.data.dataset import load_train_set
from contaccum.engine import Engine
from contaccum.methods import METHODS
from contaccum.training import setup


def main(data: str, output: str) -> None:
    found = {}
    for method in TRAITS:
        engine = Engine(device="cpu")
        changes = {"data.hard_negatives": 1, "batch.micro_batch_size": 4 // engine.world, "bank.size": 24}
        config = train_config(Path(data), Path(output), method, **changes)
        config.validate(engine.world)
        train_set = load_train_set(data, "train", 1)
        encoder = setup.build_encoder(config.model, train_set, config.seed).train()
        encoder.set_dropout(0.0)
        batches = setup.build_batches(config, engine, encoder, train_set)
        loss = setup.build_loss(config)
        bank = setup.build_bank(config, engine, encoder, loss)
        engine.prepare(encoder, torch.optim.SGD(encoder.parameters(), lr=0.5))
        for step in range(3):
            engine.step = step
            values = METHODS[method](engine, batches.step(step), bank, loss)
            engine.reduce_gradients()
            for name, gradient in gradients(encoder).items():
                found[f"{method}/{step}/{name}"] = gradient
            found[f"{method}/{step}/loss"] = torch.stack([value.value for value in values]).mean()
            engine.update()
            bank.end_step()
        tensors, numbers = bank.state()
        found |= {f"{method}/bank/{name}": tensor for name, tensor in tensors.items()}
        found[f"{method}/bank/pointer"] = torch.tensor(numbers["pointer"])
    save_file(found, f"{output}.{engine.rank}.safetensors")


if __name__ == "__main__":
    main(*sys.argv[1:])
