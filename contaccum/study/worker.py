"""One run of a comparison in a process of its own: train, then score on the test data; or score a baseline.

usage: python -m contaccum.study.worker JOB.json, which `contaccum compare` writes. What is finished is not done again. The
process ends, saving a checkpoint, when the one that started it is gone, which it sees by the end of its standard input.
"""

import os
import signal
import sys
import threading
from pathlib import Path

from contaccum import api
from contaccum.config import TrainConfig, from_mapping
from contaccum.data.stream import open_training
from contaccum.encoder import DualEncoder
from contaccum.engine import encoding_device
from contaccum.errors import InputError, Interrupted
from contaccum.files import read_json, write_json
from contaccum.options import ModelChoice, SearchSettings
from contaccum.study.grid import identity
from contaccum.study.runs import METRICS_FILE, TUNED_FILE
from contaccum.training.loop import DEV_METRICS_FILE, train
from contaccum.training.setup import build_encoder


def main(file: str) -> int:
    threading.Thread(target=_leave_with_the_parent, daemon=True).start()
    try:
        job = read_json(file)
        do(job["kind"], from_mapping(job["config"]), job["test"])
    except (InputError, Interrupted) as error:
        print(f"contaccum: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _leave_with_the_parent() -> None:
    while os.read(0, 1):  # not through sys.stdin, whose lock a waiting thread would hold when the interpreter ends
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def do(kind: str, config: TrainConfig, test: dict[str, str] | None) -> None:
    """Train where there is something to train; score on the test data, or without any keep what dev says."""
    run = Path(config.output_dir)
    if kind == "run":
        train(config)
    if test is None:
        mean = read_json(run / DEV_METRICS_FILE)["mean"]
        write_json(run / TUNED_FILE, {"metric": config.run.metric, "score": mean[config.run.metric]})
        return
    metrics = api.evaluate(
        _model(kind, config),
        test["data"],
        test["split"],
        settings=SearchSettings(batch_tokens=config.run.eval_batch_tokens),
        strict=config.data.strict,
        repair=config.data.repair,
        max_bad_records=config.data.max_bad_records,
    )
    write_json(run / METRICS_FILE, {**test, **identity(kind, config), **metrics})


def _model(kind: str, config: TrainConfig) -> ModelChoice | DualEncoder:
    if kind == "bm25":
        return ModelChoice(api.BM25)
    if kind == "untrained":
        train_set = open_training(config.data)
        return build_encoder(config, train_set, encoding_device(config.run.device))
    choice = ModelChoice(
        str(Path(config.output_dir) / "model"),
        device=config.run.device,
        trust_remote_code=config.model.trust_remote_code,
    )
    return api.load_encoder(choice)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
