"""Train the methods with towers so small that an update takes milliseconds: a residual layer over frozen embeddings.

    python benchmarks/study/heads.py --data CUT --model DIR --out RUNS [--seeds 5] [PART...]

CUT is the output of cut.py. Bank, loss, methods, order of the pairs, schedule and metrics are those
of the package. The encoder embeds all texts once before training, and each tower learns v + W2
gelu(W1 v) on top. Drift, banks and learning rates behave as in training, but the scores do not
predict those of a fully trained encoder. Every run is a file RUNS/NAME/runs/RUN.json in the form of
pack.py's lines; existing runs are skipped.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import yaml
from ideas import Idea, Variant
from pack import METRIC, PLACES, short
from torch import Tensor, nn

from contaccum.batch import MicroBatch, RowIds, Tokens
from contaccum.config import TrainConfig, from_mapping
from contaccum.data.dataset import open_dataset
from contaccum.data.sampler import StepSampler
from contaccum.data.train_set import TrainSet
from contaccum.encoder import DualEncoder
from contaccum.evaluation.metrics import evaluate_run
from contaccum.methods import METHODS
from contaccum.methods.bank import Bank, BankOptions
from contaccum.methods.loss import InfoNCE
from contaccum.runtime.engine import mix
from contaccum.runtime.files import write_json
from contaccum.training.parts import learning_rate_factor, set_learning_rate, warmup_steps
from contaccum.training.run_folder import flat

RATES = ("3e-5", "1e-4", "3e-4", "1e-3")
Case = tuple[str, dict[str, Any], Idea]
"""A run's name without its seed, the settings that it changes, and the idea that it tries."""


def order() -> Iterator[Case]:
    """Yield all combinations of methods, bank sizes and learning rates."""
    for rate in RATES:
        for method in ("grad_accum", "grad_cache"):
            yield (
                f"{method}-learning_rate={rate}",
                {"method": method, "optim.learning_rate": float(rate)},
                Idea(),
            )
        for method in ("passage_bank", "cont_accum", "cont_cache"):
            for size in (64, 256, 512, 2048):
                changed = {"method": method, "bank.size": size, "optim.learning_rate": float(rate)}
                yield f"{method}-size={size}-learning_rate={rate}", changed, Idea()


def switches() -> Iterator[Case]:
    """Yield the bank's other settings one at a time, at each bank size."""
    for size in (64, 512):
        for name, value in (
            ("bank.row_weight", "current"), ("bank.keep", False), ("bank.warmup_steps", 3),
            ("bank.warmup_steps", 8), ("loss.mask_false_negatives", False),
        ):  # fmt: skip
            changed = {"method": "cont_accum", "bank.size": size, name: value}
            yield f"cont_accum-size={size}-{name.partition('.')[2]}={value}", changed, Idea()
        yield (
            f"cont_accum-size={size}-queries=False",
            {"method": "passage_bank", "bank.size": size},
            Idea(),
        )
    for value in (True, False):
        changed = {"method": "grad_cache", "loss.mask_false_negatives": value}
        yield f"grad_cache-mask_false_negatives={value}", changed, Idea()


def age() -> Iterator[Case]:
    """Yield age decays and row weights at two bank sizes and all learning rates."""
    for rate in RATES[1:]:
        for size in (64, 512):
            for changes in (
                {"age_decay": 0.3}, {"age_decay": 1.0}, {"age_decay": 3.0}, {"row_weight": "current"},
                {"age_decay": 1.0, "row_weight": "current"}, {"age_decay": 3.0, "row_weight": "current"},
            ):  # fmt: skip
                named = "-".join(
                    f"{name}={value:g}" if name == "age_decay" else f"{name}={value}"
                    for name, value in changes.items()
                )
                bank = {f"bank.{name}": value for name, value in changes.items()}
                changed = {
                    "method": "cont_accum",
                    "bank.size": size,
                    "optim.learning_rate": float(rate),
                    **bank,
                }
                yield f"cont_accum-size={size}-{named}-learning_rate={rate}", changed, Idea()


IDEAS = {
    "decay=1 rate_clock": Idea(decay=1.0, rate_clock=True),
    "row_decay=0.3": Idea(row_decay=0.3),
    "centre=0.8": Idea(centre=0.8),
    "centre=0.8 decay=1": Idea(centre=0.8, decay=1.0),
    "follow=0.8": Idea(follow=0.8),
    "rotate=0.1": Idea(rotate=0.1),
    "refresh=1": Idea(refresh=1),
    "refresh=1 hardest": Idea(refresh=1, refresh_hardest=True),
    "slow=0.9": Idea(slow=0.9),
    "rate_limit=1": Idea(rate_limit=1.0),
    "queries_every=2": Idea(queries_every=2),
}


def ideas() -> Iterator[Case]:
    """Yield changes of cont_accum against stale rows (ideas.py), at two bank sizes and learning rates."""
    for rate in ("3e-4", "1e-3"):
        for size in (64, 512):
            for name, idea in IDEAS.items():
                changed = {
                    "method": "cont_accum",
                    "bank.size": size,
                    "optim.learning_rate": float(rate),
                }
                yield f"idea-{name}-size={size}-learning_rate={rate}", changed, idea


def longer() -> Iterator[Case]:
    """Yield runs with four times the updates."""
    aged = {"bank.age_decay": 1.0, "bank.row_weight": "current"}
    for rate in RATES[1:3]:
        base = {"optim.max_steps": 96, "optim.learning_rate": float(rate)}
        for method in ("grad_accum", "grad_cache"):
            yield f"{method}-max_steps=96-learning_rate={rate}", {**base, "method": method}, Idea()
        for size in (64, 512):
            changed = {**base, "method": "cont_accum", "bank.size": size}
            yield f"cont_accum-max_steps=96-size={size}-learning_rate={rate}", changed, Idea()
            name = f"cont_accum-max_steps=96-size={size}-age_decay=1-row_weight=current-learning_rate={rate}"
            yield name, {**changed, **aged}, Idea()


def drift() -> Iterator[Case]:
    """Yield the runs of the drift table."""
    for rate in RATES[2:]:
        for method, size in (
            ("grad_cache", 64),
            ("cont_accum", 64),
            ("cont_accum", 512),
            ("passage_bank", 512),
        ):
            changed = {"method": method, "bank.size": size, "optim.learning_rate": float(rate)}
            yield f"drift-{method}-size={size}-learning_rate={rate}", changed, Idea()


PARTS = {
    "order": order,
    "switches": switches,
    "age": age,
    "ideas": ideas,
    "longer": longer,
    "drift": drift,
}
APART = 4
"""Steps between two encodings of the micro-batches whose movement is logged."""


class Towers(nn.Module):
    """Two residual layers, (n, d) unit vectors -> (n, d) unit vectors; the identity before training."""

    def __init__(self, dim: int, dropout: float) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(dim, dim) for _ in range(2))
        self.outer = nn.ModuleList(nn.Linear(dim, dim) for _ in range(2))
        for layer in self.outer:
            nn.init.normal_(layer.weight, std=1e-3)
            nn.init.zeros_(layer.bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, side: int, vectors: Tensor) -> Tensor:
        vectors = self.dropout(vectors)
        scaled = vectors * vectors.shape[1] ** 0.5  # numbers near 1, as a layer expects them
        return F.normalize(vectors + self.outer[side](F.gelu(self.inner[side](scaled / 2))), dim=1)


class Engine:
    """Engine over rows of frozen embeddings; the token of a text is its row number."""

    no_grad_group_size = 1
    replay_share = 1.0

    def __init__(self, towers: Towers, vectors: tuple[Tensor, Tensor], seed: int) -> None:
        self.towers, self.vectors, self.seed, self.step = towers, vectors, seed, 0

    def join(self, micro_batches: list[MicroBatch]) -> MicroBatch:
        (only,) = micro_batches
        return only

    def micro_steps(self, micro_batches: list[MicroBatch]) -> Iterator[MicroBatch]:
        for number, batch in enumerate(micro_batches):
            torch.manual_seed(mix(self.seed, self.step, number, 0))
            yield batch

    def encode_with(self, towers: Towers, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        parts = (batch.queries, batch.passages)
        queries, passages = (
            towers(i, self.vectors[i][part.input_ids[:, 0]]) for i, part in enumerate(parts)
        )
        return queries, passages

    def encode(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        queries, passages = self.encode_with(self.towers, batch)
        return queries, passages.unflatten(0, (len(queries), -1))

    def encode_again(self, batch: MicroBatch, step: int, number: int) -> tuple[Tensor, Tensor]:
        with torch.random.fork_rng([]), torch.no_grad():
            torch.manual_seed(mix(self.seed, step, number, 0))
            return self.encode_with(self.towers, batch)

    def backward(self, value: Tensor) -> None:
        value.backward()


class Place:
    """Reduced data set with its embeddings."""

    def __init__(self, data: Path, model: str, config: TrainConfig, cache: Path) -> None:
        self.train: TrainSet = open_dataset(data / "train", "train", config.data.policy).train_set()
        self.sets = {
            split: open_dataset(data / split, split, config.data.policy).retrieval_set
            for split in ("dev", "test")
        }
        lengths = {
            "max_query_length": config.model.max_query_length,
            "max_passage_length": config.model.max_passage_length,
        }
        encoder: list[DualEncoder] = []

        def vectors(name: str, texts: list[str]) -> Tensor:
            file = cache / f"{name}.npy"
            if not file.is_file():
                if not encoder:
                    encoder.append(DualEncoder.load(model, **lengths))
                cache.mkdir(parents=True, exist_ok=True)
                np.save(file, getattr(encoder[0], f"encode_{name.rpartition('-')[2]}")(texts))
            return torch.from_numpy(np.load(file))

        def contents(table: Any) -> list[str]:
            return [
                f"{title} {text}".strip()
                for title, text in zip(table["title"], table["text"], strict=True)
            ]

        self.vectors = (
            vectors("train-queries", list(self.train.queries["text"])),
            vectors("train-passages", contents(self.train.passages)),
        )
        self.scored = {
            split: (
                vectors(f"{split}-queries", list(found.queries.values())),
                vectors(f"{split}-passages", contents(found.corpus)),
            )
            for split, found in self.sets.items()
        }

    def micro_batches(self, sampler: StepSampler, step: int, size: int) -> list[MicroBatch]:
        rows = sampler(step)

        def tokens(numbers: np.ndarray) -> Tokens:
            ids = torch.from_numpy(numbers).reshape(-1, 1)
            return Tokens(ids, torch.ones_like(ids))

        return [
            MicroBatch(
                tokens(rows.queries[part]), tokens(rows.passages[part]),
                RowIds(torch.from_numpy(rows.passages[part]), torch.from_numpy(rows.positives[part])),
                [str(query) for query in rows.queries[part]],
            )
            for part in (slice(start, start + size) for start in range(0, len(rows.queries), size))
        ]  # fmt: skip

    @torch.no_grad()
    def score(self, towers: Towers, split: str) -> dict[str, dict[str, float]]:
        """Return the metrics of every query."""
        towers.eval()
        queries, passages = (
            towers(side, vectors) for side, vectors in enumerate(self.scored[split])
        )
        best, places = (queries @ passages.T).topk(min(100, len(passages)))
        ids, names = self.sets[split].corpus["id"][:], list(self.sets[split].queries)
        run = {
            name: [
                (ids[place], value)
                for place, value in zip(row.tolist(), values.tolist(), strict=True)
            ]
            for name, row, values in zip(names, places, best, strict=True)
        }
        towers.train()
        return evaluate_run(self.sets[split].qrels, run, cutoffs=(1, 10, 20, 100))["per_query"]


def train(place: Place, config: TrainConfig, idea: Idea) -> tuple[Towers, dict[str, list]]:
    """Train towers with a config; return them and the log as columns."""
    torch.manual_seed(config.seed)
    towers = Towers(place.vectors[0].shape[1], config.model.dropout or 0.0)
    engine = Engine(towers, place.vectors, config.seed)
    loss = InfoNCE(config.model.temperature, config.loss.mask_false_negatives)
    options = BankOptions(
        columns_only=config.spec.bank != "pairs", row_weight=config.bank.row_weight, keep=config.bank.keep,
        warmup_steps=config.bank.warmup_steps, age_decay=config.bank.age_decay,
    )  # fmt: skip
    dim = place.vectors[0].shape[1]
    bank = Bank(config.bank_size(), dim, loss.similarity, options, push=config.bank_push(1))
    variant = None if idea == Idea() else Variant(idea, config.bank.size, config.bank.row_weight)
    method = variant or METHODS[config.method]
    total = config.optim.max_steps or 1
    optimizer = torch.optim.AdamW(
        towers.parameters(),
        lr=1.0,
        weight_decay=config.optim.weight_decay,
        eps=config.optim.adam_eps,
    )
    sampler = StepSampler(place.train, config.seed, config.batch.global_batch_size, 0)
    log: dict[str, list] = {}
    past: list[tuple[int, MicroBatch, tuple[Tensor, Tensor]]] = []
    for step in range(total):
        share = learning_rate_factor(
            step, total, warmup_steps(config.optim, total), config.optim.schedule
        )
        if variant is not None:
            variant.share = share
        engine.step = step
        batches = place.micro_batches(sampler, step, config.batch.micro_batch_size)
        past = [*past[-APART:], (step, batches[0], engine.encode_again(batches[0], step, 0))]
        losses = method(engine, batches, bank, loss)
        norms = [side_norm(towers, side) for side in (0, 1)]
        torch.nn.utils.clip_grad_norm_(towers.parameters(), config.optim.max_grad_norm)
        set_learning_rate(optimizer, config.learning_rate() * share)
        optimizer.step()
        optimizer.zero_grad()
        bank.end_step()
        line = {
            "step": step + 1,
            "loss": float(torch.stack([one.value for one in losses]).mean()),
            "query_grad_norm": norms[0],
            "passage_grad_norm": norms[1],
        }
        line |= movement(engine, *past[0])
        for name, value in line.items():
            log.setdefault(name, []).append(short(value))
    return towers, log


def movement(
    engine: Engine, step: int, batch: MicroBatch, then: tuple[Tensor, Tensor]
) -> dict[str, float]:
    """Return mean cosine between old and current embeddings of passages, and the share of their shift that is common."""
    now = engine.encode_again(batch, step, 0)[1]
    moved = now - then[1]
    whole = moved.square().sum(1).mean()
    share = moved.mean(0).square().sum() / whole if whole > 0 else whole
    return {
        "drift_passage_cosine": float((now * then[1]).sum(1).mean()),
        "drift_common_share": float(share),
    }


def side_norm(towers: Towers, side: int) -> float:
    parts = [
        p.grad
        for layers in (towers.inner, towers.outer)
        for p in layers[side].parameters()
        if p.grad is not None
    ]
    return float(torch.nn.utils.get_total_norm(parts))


def configured(base: dict[str, Any], changes: dict[str, Any]) -> TrainConfig:
    values = json.loads(json.dumps(base))
    for name, value in changes.items():
        group, _, field = name.rpartition(".")
        (values.setdefault(group, {}) if group else values)[field] = value
    return from_mapping(values)


def one_run(place: Place, config: TrainConfig, idea: Idea, name: str, study: str) -> dict[str, Any]:
    towers, log = train(place, config, idea)
    dev, test = (place.score(towers, split) for split in ("dev", "test"))
    default = flat(asdict(TrainConfig()))
    changed = {
        k: v for k, v in flat(asdict(config)).items() if k not in PLACES and v != default.get(k)
    }
    tried = {f"idea.{k}": v for k, v in asdict(idea).items() if v != getattr(Idea(), k)}
    return {
        "study": study,
        "run": name,
        "config": {
            "method": config.method,
            "seed": config.seed,
            **changed,
            **tried,
            "model.name": "heads",
        },
        "environment": {},
        "test": f"{study.partition('-')[2]}/test",
        "mean": {
            measure: float(np.mean([values[measure] for values in test.values()]))
            for measure in next(iter(test.values()))
        },
        "per_query": {query: round(values[METRIC], 4) for query, values in test.items()},
        "log": log,
        "dev": [
            {
                "step": len(log["step"]),
                METRIC: round(float(np.mean([values[METRIC] for values in dev.values()])), 4),
            }
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all when none is named"
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    base = yaml.safe_load(Path("configs/study/heads.yaml").read_text(encoding="utf-8"))
    base["data"]["train"] = str(chosen.data / "train")
    study = f"heads-{chosen.data.name}"
    runs = chosen.out / study / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    place = Place(chosen.data, chosen.model, from_mapping(base), chosen.out / study / "vectors")
    for seed in range(chosen.seeds):
        for part in chosen.parts or PARTS:
            for label, changes, idea in PARTS[part]():
                name = f"{label}-seed{seed}"
                file = runs / f"{name}.json"
                if not file.is_file():
                    config = replace(configured(base, changes), seed=seed)
                    found = one_run(place, config, idea, name, study)
                    write_json(file, found)
                    print(
                        name, found["dev"][0][METRIC], round(found["mean"][METRIC], 4), flush=True
                    )


if __name__ == "__main__":
    main()
