"""A job of test_processes.py: three steps of every method on real batches; gradients, losses and banks go to a file.

arguments: DATA OUTPUT [REFERENCE]. Each step starts from the weights that it had in REFERENCE, the output of one process;
else rounding, which weights take over from step to step, would be measured with the gradients.
"""

from pathlib import Path

import numpy as np
import torch
from helpers import gradients, train_config
from safetensors.torch import load_file, save_file

from contaccum.batch import MicroBatch, RowIds
from contaccum.config import TRAITS, validate
from contaccum.data.dataset import load_train_set
from contaccum.engine import Engine, SharedEncoder
from contaccum.methods import METHODS
from contaccum.training import setup

LONELY = "lonely"
"""Marks gradients of processes that compare only their own rows: the control."""


class LonelyEngine(Engine):
    """Gathers nothing."""

    def all_rows(self, own: torch.Tensor) -> torch.Tensor:
        return own


def main(arguments: list[str]) -> None:
    data, output, *reference = arguments
    weights = load_file(reference[0]) if reference else {}
    found: dict[str, torch.Tensor] = {}
    for method in TRAITS:
        found |= three_steps(method, Engine(device="cpu"), data, weights)
    for method in ("in_batch", "cont_accum"):
        lonely = three_steps(method, LonelyEngine(device="cpu"), data, weights)
        found |= {f"{LONELY}/{name}": tensor for name, tensor in lonely.items() if "/bank/" not in name}
    engine = Engine(device="cpu")
    found |= uneven_evaluation(engine, data)
    save_file(found, f"{output}.{engine.rank}.safetensors")


def three_steps(method: str, engine: Engine, data: str, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {}
    changes = {"data.hard_negatives": 1, "batch.micro_batch_size": 4 // engine.world, "bank.size": 24}
    config = train_config(Path(data), Path("unused"), method, **changes)
    validate(config, engine.world)
    train_set = load_train_set(data, "train", 1)
    encoder = setup.build_encoder(config, train_set).train()
    encoder.set_dropout(0.0)
    batches = setup.build_batches(config, engine, encoder, train_set)
    loss = setup.build_loss(config, encoder)
    bank = setup.build_bank(config, engine, encoder, loss)
    engine.prepare(encoder, torch.optim.SGD(encoder.parameters(), lr=0.1))
    for step in range(3):
        engine.step = step
        for name, parameter in encoder.named_parameters():
            parameter.data.copy_(weights.get(f"{method}/{step}/start/{name}", parameter.data))
            found[f"{method}/{step}/start/{name}"] = parameter.detach().clone()
        micro_batches = batches.step(step)
        if isinstance(engine, LonelyEngine):
            micro_batches = [own_ids(batch, engine) for batch in micro_batches]
        values = METHODS[method](engine, micro_batches, bank, loss)
        engine.reduce_gradients()
        for name, gradient in gradients(encoder).items():
            found[f"{method}/{step}/gradient/{name}"] = gradient
        found[f"{method}/{step}/loss"] = torch.stack([value.value for value in values]).mean()
        found[f"{method}/{step}/masked"] = torch.stack([value.masked.float() for value in values]).sum()
        engine.update()
        bank.end_step()
    tensors, numbers = bank.state()
    found |= {f"{method}/bank/{name}": tensor for name, tensor in tensors.items()}
    found[f"{method}/bank/pointer"] = torch.tensor(numbers["pointer"])
    return found


def own_ids(batch: MicroBatch, engine: Engine) -> MicroBatch:
    own = slice(engine.rank * len(batch.query_ids), (engine.rank + 1) * len(batch.query_ids))
    ids = RowIds(batch.ids.columns[own], batch.ids.positives[own])
    return MicroBatch(batch.queries, batch.passages, ids, batch.query_ids)


def uneven_evaluation(engine: Engine, data: str) -> dict[str, torch.Tensor]:
    """Vectors of 1 to 5 texts, which no number of processes above 1 divides evenly every time."""
    config = train_config(Path(data), Path("unused"))
    encoder = setup.build_encoder(config, load_train_set(data, "train"))
    engine.prepare(encoder, torch.optim.SGD(encoder.parameters()))
    texts = [f"the fox of valley {number}" for number in range(5)]
    shared = SharedEncoder(engine)
    return {
        f"texts/{count}": torch.from_numpy(np.array(shared.encode_passages(texts[:count]))) for count in range(1, 6)
    }
