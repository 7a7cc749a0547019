"""A job of test_processes.py: three steps of every method on real batches; gradients, losses and
banks go to a file.

arguments: DATA OUTPUT [REFERENCE]. Each step starts from the weights that it had in REFERENCE, the
output of one process; else rounding, which weights take over from step to step, would be measured
with the gradients.
"""

from pathlib import Path

import torch
from datasets import Dataset
from helpers import gradients, open_train_set, train_config
from safetensors.torch import load_file, save_file

from contaccum.batch import MicroBatch, RowIds
from contaccum.config import METHOD_SPECS, validate
from contaccum.methods import METHODS
from contaccum.retrieval.retriever import Retriever
from contaccum.runtime import processes
from contaccum.runtime.engine import Engine
from contaccum.training import parts

REPLAYED = {
    "grad_cache replay": ("grad_cache", 0.4),
    "cont_cache replay": ("cont_cache", 0.4),
    "grad_cache, few texts": ("grad_cache", 0.1),
}
"""Partial replay: label of its gradients -> method and share. Of few texts, some processes have
none."""
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
    for method in METHOD_SPECS:
        found |= three_steps(method, Engine(device="cpu"), data, weights)
    for label, (method, share) in REPLAYED.items():
        found |= three_steps(method, Engine(device="cpu", replay_share=share), data, weights, label)
    for method in ("in_batch", "cont_accum"):
        lonely = three_steps(method, LonelyEngine(device="cpu"), data, weights)
        found |= {
            f"{LONELY}/{name}": tensor for name, tensor in lonely.items() if "/bank/" not in name
        }
    engine = Engine(device="cpu")
    found |= uneven_evaluation(engine, data) | sums(engine)
    save_file(found, f"{output}.{engine.rank}.safetensors")


def three_steps(
    method: str, engine: Engine, data: str, weights: dict[str, torch.Tensor], label: str = ""
) -> dict[str, torch.Tensor]:
    found, label = {}, label or method
    changes = {
        "data.hard_negatives": 1,
        "batch.micro_batch_size": 4 // engine.world,
        "bank.size": 24,
    }
    config = train_config(Path(data), Path("unused"), method, **changes)
    validate(config, engine.world)
    train_set = open_train_set(data, "train", 1)
    encoder = parts.build_encoder(config, train_set).train()
    encoder.set_dropout(0.0)
    batches = parts.build_batches(config, engine, encoder, train_set)
    loss = parts.build_loss(config, encoder)
    bank = parts.build_bank(config, engine, encoder, loss)
    engine.prepare(encoder, torch.optim.SGD(encoder.parameters(), lr=0.1))
    for step in range(3):
        engine.step = step
        for name, parameter in encoder.named_parameters():
            parameter.data.copy_(weights.get(f"{label}/{step}/start/{name}", parameter.data))
            found[f"{label}/{step}/start/{name}"] = parameter.detach().clone()
        micro_batches = batches.step(step)
        if isinstance(engine, LonelyEngine):
            micro_batches = [own_ids(batch, engine) for batch in micro_batches]
        values = METHODS[method](engine, micro_batches, bank, loss)
        engine.reduce_gradients()
        for name, gradient in gradients(encoder).items():
            found[f"{label}/{step}/gradient/{name}"] = gradient
        found[f"{label}/{step}/loss"] = torch.stack([value.value for value in values]).mean()
        found[f"{label}/{step}/masked"] = torch.tensor(
            sum(value.statistics["masked"] for value in values)
        )
        engine.update()
        bank.end_step()
    tensors, numbers = bank.state()
    found |= {f"{label}/bank/{name}": tensor for name, tensor in tensors.items()}
    found[f"{label}/bank/pointer"] = torch.tensor(numbers["pointer"])
    return found


def own_ids(batch: MicroBatch, engine: Engine) -> MicroBatch:
    own = slice(engine.rank * len(batch.query_ids), (engine.rank + 1) * len(batch.query_ids))
    ids = RowIds(batch.ids.columns[own], batch.ids.positives[own])
    return MicroBatch(batch.queries, batch.passages, ids, batch.query_ids)


def uneven_evaluation(engine: Engine, data: str) -> dict[str, torch.Tensor]:
    """Scores of 1 to 5 passages, which no number of processes above 1 divides evenly every time."""
    config = train_config(Path(data), Path("unused"))
    encoder = parts.build_encoder(config, open_train_set(data, "train"))
    engine.prepare(encoder, torch.optim.SGD(encoder.parameters()))
    texts = [f"the fox of valley {number}" for number in range(5)]
    found = {}
    for count in range(1, 6):
        corpus = Dataset.from_dict(
            {"id": texts[:count], "title": [""] * count, "text": texts[:count]}
        )
        run = Retriever.open(encoder, corpus, group=engine).search({"q": texts[0]}, count)
        found[f"passages/{count}"] = torch.tensor([dict(run["q"])[text] for text in texts[:count]])
    return found


def sums(engine: Engine) -> dict[str, torch.Tensor]:
    """Sums of tensors that need several messages, and sums of the gathered tensors.

    All numbers are whole: no rounding.
    """
    random = torch.Generator().manual_seed(engine.rank)
    shapes = [(3, 4), (40,), (), (7,), (0, 3), (2, 2), (5, 2), (30, 2)]
    tensors = [torch.randint(-999, 999, shape, generator=random).float() for shape in shapes]
    tensors[5:7] = [tensor.double() for tensor in tensors[5:7]]
    tensors[7] = tensors[7].T  # not contiguous
    right = [torch.stack(engine.gather(tensor)).sum(0) for tensor in tensors]
    own = [tensor.clone() for tensor in tensors]
    processes.MESSAGE_BYTES = 64
    engine.sum(tensors)
    named = {"sum": tensors, "right": right, "own": own}
    return {
        f"{name}/{number}": each.contiguous()
        for name, group in named.items()
        for number, each in enumerate(group)
    }
