"""Job of test_partition.py: two steps of every method that partitions its step, by tokens; saves
gradients and losses.

arguments: DATA OUTPUT. One process takes the joined micro-batches of two.
"""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import torch
from helpers import gradients, train_config
from safetensors.torch import save_file

from contaccum.batch import MicroBatch, Tokens
from contaccum.config import METHOD_SPECS, validate
from contaccum.data.batches import Batches
from contaccum.data.dataset import load_training
from contaccum.methods import METHODS
from contaccum.runtime.engine import Engine
from contaccum.training import parts

CHANGES = {
    "batch.micro_batch_tokens": 250, "batch.micro_batch_size": "auto", "data.hard_negatives": 1,
    "model.max_passage_length": 48, "loss.matryoshka_dims": [8, 20], "loss.distillation": "kl",
    "loss.teacher_temperature": 2.0,
}  # fmt: skip


def main(arguments: list[str]) -> None:
    data, output = arguments
    found = {}
    for method in (name for name, spec in METHOD_SPECS.items() if not spec.single_micro_batch):
        engine = Engine(device="cpu")
        config = train_config(Path(data), Path(output), method, **CHANGES)
        validate(config, engine.world)
        train_set = load_training(config.data, config.distils)
        encoder = parts.build_encoder(config, train_set).train()
        encoder.set_dropout(0.0)
        places = [SimpleNamespace(rank=rank, world=2, main_first=nullcontext) for rank in range(2)]
        sources = [parts.build_batches(config, place, encoder, train_set) for place in places]
        loss = parts.build_loss(config, encoder)
        bank = parts.build_bank(config, engine, encoder, loss)
        engine.prepare(encoder, torch.optim.SGD(encoder.parameters(), lr=0.1))
        engine.no_grad_group_size = 2  # as on a GPU
        for step in range(2):
            engine.begin_step(step)
            batches = (
                together(sources, step) if engine.world == 1 else sources[engine.rank].step(step)
            )
            values = METHODS[method](engine, batches, bank, loss)
            engine.reduce_gradients()
            found |= {
                f"{method}/{step}/{name}": gradient for name, gradient in gradients(encoder).items()
            }
            found[f"{method}/{step}/loss"] = torch.stack([value.value for value in values]).mean()
            found[f"{method}/{step}/sizes"] = torch.tensor(
                [len(batch.ids.columns) for batch in batches]
            )
            engine.update()
            bank.end_step()
    save_file(found, f"{output}.{engine.rank}.safetensors")


def together(sources: list[Batches], step: int) -> list[MicroBatch]:
    return [
        MicroBatch(
            Tokens.join([first.queries, second.queries], 0),
            Tokens.join([first.passages, second.passages], 0),
            first.ids,
            first.query_ids + second.query_ids,
        )
        for first, second in zip(*(source.step(step) for source in sources), strict=True)
    ]
