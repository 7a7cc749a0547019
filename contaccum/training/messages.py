"""Lines that a run prints at its start and at its end."""

import math
import shlex
from pathlib import Path
from statistics import mean
from typing import Any

from contaccum.config import TrainConfig
from contaccum.data.retrieval_set import RetrievalSet
from contaccum.data.train_set import TrainSet
from contaccum.encoder import TOWERS, EncoderSettings
from contaccum.runtime.files import read_json
from contaccum.runtime.units import counted
from contaccum.training import automatic, parts
from contaccum.training.log import read_log
from contaccum.training.run_folder import DEV_METRICS_FILE

NOTE = "note: "
HIGH_RATE = 1e-2  # learning rate above which a run prints a note
FEW_UPDATES = 10  # below, a run prints a note
MANY_TRUNCATED = 0.05  # share of the passages from which a run prints a note
LAST_STEPS = 5  # steps at the end of a run whose loss is compared with that of guessing


def first_lines(
    config: TrainConfig,
    train_set: TrainSet,
    dev_set: RetrievalSet | None,
    settings: EncoderSettings,
    truncated: float,
    total: int,
    done: int,
) -> list[str]:
    """Return lines for the start of a run: number of updates, doubtful settings, the encoder.

    Lines about doubtful settings start with NOTE. truncated: share of the passages with the maximum
    number of tokens. total, done: number of optimizer steps of the run, and of those that are
    finished.
    """
    pairs, queries = config.batch.global_batch_size, len(train_set.queries)
    updates = f"{counted(max(0, total - done), 'update')} of {counted(pairs, 'pair')}"
    lines = [f"training: {updates} with {config.method}"]
    doubts = []
    if pairs > queries:
        doubts.append(
            f"batch.global_batch_size is {pairs}, but the training set has only "
            f"{counted(queries, 'query')}, so an update has some of them several times; a smaller "
            "one makes more updates"
        )
    elif total < FEW_UPDATES and config.optim.max_steps is None:
        doubts.append(
            f"the run has only {counted(total, 'update')}; a smaller batch.global_batch_size or "
            "more optim.epochs make more"
        )
    if truncated >= MANY_TRUNCATED:
        doubts.append(
            f"{truncated:.0%} of the passages have {settings.max_passage_length} tokens or more, "
            "and the text after them is not read; divide long documents into passages, or raise "
            "model.max_passage_length"
        )
    if train_set.unused:
        doubts.append(
            f"the data has hard negatives for {train_set.unused} of {counted(queries, 'query')}; "
            "data.hard_negatives 1 would use them"
        )
    if dev_set and (shared := train_set.shared_queries(dev_set.queries)):
        doubts.append(
            f"{len(shared)} of {counted(len(dev_set.queries), 'dev query')} are also training "
            "queries, so the dev score is too high"
        )
    if config.optim.learning_rate > HIGH_RATE:
        doubts.append(
            f"optim.learning_rate is {config.optim.learning_rate:g}; encoders are usually trained "
            "with 1e-6 to 1e-3, and with more the loss often stays at that of guessing"
        )
    if config.bank_size() and config.bank.warmup_steps >= total:
        doubts.append(
            f"bank.warmup_steps is {config.bank.warmup_steps}, but the run has only "
            f"{counted(total, 'step')}, so the loss never uses the bank"
        )
    if parts.step_count(config.optim.warmup_steps, total) >= total > 1:
        doubts.append(
            f"optim.warmup_steps is {config.optim.warmup_steps:g}, but the run has only "
            f"{counted(total, 'step')}, so the learning rate hardly reaches optim.learning_rate"
        )
    lines += [f"{NOTE}{doubt}" for doubt in doubts]
    lines.append(
        f"{config.model.name}: {settings.pooling} pooling, {settings.similarity} similarity, "
        f"{'one encoder' if settings.tie_towers else 'two encoders'}, at most "
        f"{settings.max_query_length} tokens per query and {settings.max_passage_length} per "
        "passage"
    )
    lines.append(automatic.description(config))
    return lines


def next_steps(config: TrainConfig, model: Path) -> list[str]:
    """Return lines for the end of a run: which model was kept, and the next command.

    model: folder of the trained model.
    """
    lines = []
    only_one_loss = not (config.loss.matryoshka_dims or config.distils)
    if only_one_loss and guesses(read_log(Path(config.output_dir))):
        lines.append(
            f"{NOTE}the loss of the last {LAST_STEPS} steps is that of guessing the positive among "
            "all passages, so the model has learned nothing, or has forgotten it; try a lower "
            "optim.learning_rate"
        )
    if (model / TOWERS[0]).is_dir():
        lines.append(
            "two encoders, for queries and passages: in sentence-transformers, use encode_query "
            "and encode_document (encode takes a text for a passage)"
        )
    scores = Path(config.output_dir) / DEV_METRICS_FILE
    if config.data.dev is not None and scores.is_file():
        metrics = read_json(scores)
        score = metrics["mean"][config.run.metric]
        lines.append(
            f"the model is from step {metrics['step']}, the one with the best dev "
            f"{metrics['label']}: {score:.4f}"
        )
    # training data that were mined have no test queries, but the folder of the dev queries may
    given = filter(None, (config.data.train, config.data.dev))
    tests = [name for name in given if (Path(name) / "qrels" / "test.tsv").is_file()]
    data = shlex.quote(tests[0]) if tests else "DATA"
    lines.append(f"next: contaccum evaluate --model {shlex.quote(str(model))} --data {data}")
    return lines


def guesses(log: list[dict[str, Any]]) -> bool:
    """Return whether the loss of a run ends at that of equal logits or above, and did not fall.

    The loss of n candidates with equal logits is log n. It may be above in the first steps, if hard
    negatives are very similar to the positive. Runs of fewer than twice ``LAST_STEPS`` steps may
    not have learned yet.
    """
    steps = [line for line in log if "loss" in line]
    if len(steps) < 2 * LAST_STEPS:
        return False
    guessing = [math.log1p(line["negatives"]) for line in steps[-LAST_STEPS:]]
    first, last = (
        mean(line["loss"] for line in part) for part in (steps[:LAST_STEPS], steps[-LAST_STEPS:])
    )
    return min(guessing) > 0 and last > 0.98 * max(first, mean(guessing))
