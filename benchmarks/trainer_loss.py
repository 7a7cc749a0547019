"""ContAccumLoss in SentenceTransformerTrainer against `contaccum train`: loss of every step, on the same pairs in the same order.

    python benchmarks/trainer_loss.py --data BEIR_DIR [--model DIR] [--json OUT] [--quick]

Dropout is off, because the two draw their noise differently; other settings are the defaults. A
third run without the bank shows how much other rows in the loss change the curve. The plot is saved
next to the JSON, as .svg.
"""

import sys
import tempfile
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from common import make_parser, model_folder, publish, table
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.base.sampler import DefaultBatchSampler
from torch.utils.data import SequentialSampler

from contaccum import DualEncoder, train
from contaccum.config import TrainConfig
from contaccum.config.commands import DataPolicy
from contaccum.data.dataset import open_dataset
from contaccum.integrations.sentence_transformers import ContAccumCallback, ContAccumLoss
from contaccum.runtime.engine import Engine
from contaccum.training import parts
from contaccum.training.log import read_log

N, B, RATE = 32, 8, 5e-5


class InOrder(DefaultBatchSampler):
    """Sampler that keeps the order of the rows."""

    def __init__(self, dataset: Any, **options: Any) -> None:
        super().__init__(SequentialSampler(dataset), **options)


def own_config(
    model: Path, data: str, output: Path, steps: int, lengths: dict[str, int]
) -> TrainConfig:
    config = TrainConfig(method="cont_accum", output_dir=str(output))
    config.model.name, config.data.train, config.data.repair = str(model), data, True
    config.model.max_query_length, config.model.max_passage_length = lengths.values()
    config.batch.global_batch_size, config.batch.micro_batch_size = N, B
    config.optim.max_steps, config.optim.learning_rate = steps, RATE
    config.optim.max_grad_norm = 1.0
    config.run.save_steps, config.run.device = 0, "cpu"
    return config


def pairs_of(config: TrainConfig) -> list[dict[str, str]]:
    """Return the texts of our loop's micro-batches in order."""
    train_set = open_dataset(config.data.train, "train", DataPolicy(repair=True)).train_set()
    engine = Engine(device="cpu", seed=config.seed)
    batches = parts.build_batches(config, engine, DualEncoder.load(config.model.name), train_set)
    texts = dict(zip(train_set.queries["id"], train_set.queries["text"], strict=True))
    passages = train_set.passages
    found = []
    for step in range(config.optim.max_steps or 0):
        for batch in batches.step(step):
            for query, (own, *_) in zip(batch.query_ids, batch.ids.columns.tolist(), strict=True):
                row = passages[own]
                found.append(
                    {"query": texts[query], "positive": f"{row['title']} {row['text']}".strip()}
                )
    engine.close()
    return found


def trainers_losses(
    model: Path, pairs: list[dict[str, str]], output: Path, steps: int, **bank: Any
) -> list[float]:
    """Return the losses that the trainer logs, step by step."""
    encoder = SentenceTransformer(str(model), device="cpu")
    loss = ContAccumLoss(encoder, **bank)
    args = SentenceTransformerTrainingArguments(
        output_dir=str(output), use_cpu=True, max_steps=steps, per_device_train_batch_size=B,
        gradient_accumulation_steps=N // B, learning_rate=RATE, max_grad_norm=1.0, optim="adamw_torch", batch_sampler=InOrder,
        router_mapping={"query": "query", "positive": "document"}, save_strategy="no", report_to="none", logging_steps=1,
        disable_tqdm=True,
    )  # fmt: skip
    trainer = SentenceTransformerTrainer(
        model=encoder,
        args=args,
        train_dataset=Dataset.from_list(pairs),
        loss=loss,
        callbacks=[ContAccumCallback(loss)],
    )
    with redirect_stdout(sys.stderr):  # it prints what it logs
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def plot(curves: dict[str, list[float]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.4), layout="constrained")
    axes = figure.subplots()
    for (name, losses), style in zip(curves.items(), ("-", ":", "--"), strict=True):
        axes.plot(
            range(1, len(losses) + 1),
            losses,
            style,
            label=name,
            linewidth=3 if style == ":" else 1.5,
        )
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.legend(frameon=False)
    figure.savefig(path)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--data", required=True, help="BEIR folder with a train split")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    steps = 2 if args.quick else args.steps
    lengths = {
        "max_query_length": 16 if args.quick else 32,
        "max_passage_length": 32 if args.quick else 64,
    }
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        encoder = DualEncoder.load(model_folder(args.model), tie_towers=False, **lengths)
        for tower in encoder.towers:
            for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
                setattr(tower.backbone.config, name, 0.0)
        encoder.save(folder / "start")
        config = own_config(folder / "start", args.data, folder / "own", steps, lengths)
        pairs = pairs_of(config)
        train(config)
        start = folder / "start"
        curves = {
            "contaccum train": [line["loss"] for line in read_log(folder / "own")],
            "SentenceTransformerTrainer": trainers_losses(start, pairs, folder / "theirs", steps),
            "the same without the bank": trainers_losses(
                start, pairs, folder / "without", steps, bank_size=0
            ),
        }
    own, theirs, without = curves.values()
    apart = max(abs(a - b) for a, b in zip(own, theirs, strict=True))
    rows = [
        [str(step + 1), *(f"{losses[step]:.5f}" for losses in curves.values())]
        for step in range(steps)
    ]
    about = (
        f"N = {N}, B = {B}, a bank of {N} rows, {steps} steps. Largest difference of the first two "
        f"curves {apart:.1e}; of the first and the last "
        f"{max(abs(a - b) for a, b in zip(own, without, strict=True)):.2f}."
    )
    publish(
        args,
        "ContAccumLoss over our own loop",
        [about, table(["step", *curves], rows)],
        {"losses": curves},
    )
    if args.json:
        plot(curves, args.json.with_suffix(".svg"))


if __name__ == "__main__":
    main()
