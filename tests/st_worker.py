"""Trains with SentenceTransformerTrainer and ContAccumLoss; run by itself, or by processes.py in
several processes."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.base.sampler import DefaultBatchSampler
from torch.utils.data import SequentialSampler

from contaccum.integrations.sentence_transformers import ContAccumCallback, ContAccumLoss


class InOrder(DefaultBatchSampler):
    """The rows as they lie."""

    def __init__(self, dataset: Any, **options: Any) -> None:
        super().__init__(SequentialSampler(dataset), **options)


def make_trainer(
    model: str, rows: list[dict[str, str]], output: str, *, batch: int = 4, accumulate: int = 4,
    steps: int = 20, loss: dict[str, Any] | None = None, callback: bool = True,
    eval_rows: list | None = None, **changes: Any,
) -> tuple[SentenceTransformerTrainer, list[float]]:  # fmt: skip
    """A trainer that meets the rows in their order with plain AdamW at a falling rate, and the
    losses that it will see."""
    encoder = SentenceTransformer(model, device="cpu")
    found: list[float] = []
    taken = ContAccumLoss(encoder, **{"bank_size": 24, **(loss or {})})
    taken.register_forward_hook(lambda module, inputs, value: found.append(value.item()))
    settings = {
        "output_dir": output,
        "use_cpu": True,
        "per_device_train_batch_size": batch,
        "per_device_eval_batch_size": batch,
        "gradient_accumulation_steps": accumulate,
        "max_steps": steps,
        "learning_rate": 1e-3,
        "optim": "adamw_torch",
        "max_grad_norm": 1.0,
        "batch_sampler": InOrder,
        "router_mapping": {"query": "query", "positive": "document", "negative": "document"},
        "dataloader_drop_last": True,
        "save_strategy": "no",
        "report_to": "none",
        "logging_steps": 1,
        "disable_tqdm": True,
    }
    trainer = SentenceTransformerTrainer(
        model=encoder,
        args=SentenceTransformerTrainingArguments(**settings | changes),
        train_dataset=Dataset.from_list(rows),
        eval_dataset=None if eval_rows is None else Dataset.from_list(eval_rows),
        loss=taken,
        callbacks=[ContAccumCallback(taken)] * callback,
    )
    return trainer, found


def main(arguments: list[str]) -> None:
    """One process of a launch: arguments are a JSON file of make_trainer's options."""
    options = json.loads(Path(arguments[0]).read_text())
    torch.set_num_threads(1)
    trainer, losses = make_trainer(**options)
    trainer.train()
    bank, output = trainer.loss.bank_loss.bank, Path(options["output"])
    output.mkdir(exist_ok=True)
    (output / f"bank-{trainer.args.process_index}.json").write_text(
        json.dumps([bank.fingerprint(), bank.fill])
    )
    if trainer.is_world_process_zero():
        trainer.model.save(str(output / "model"), create_model_card=False)
        (output / "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main(sys.argv[1:])
