"""Run the jobs of a comparison.

Each job has its own process, and several jobs can run at the same time.

``python -m contaccum.experiments.jobs JOB.json`` is the process of one job, called a worker. It
trains and evaluates a model, or it evaluates a baseline. It does not repeat finished training. If
the parent process dies, the standard input of the worker closes. The worker then saves a checkpoint
and exits.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict

import torch

from contaccum.config import TrainConfig, affects, from_mapping
from contaccum.config.commands import EncoderConfig, SearchConfig
from contaccum.data.dataset import load_training, open_dataset
from contaccum.encoder import DualEncoder, model_folder
from contaccum.errors import InputError, Interrupted
from contaccum.evaluation.evaluate import evaluate
from contaccum.evaluation.metrics import read_metrics
from contaccum.experiments.run_records import METRICS_FILE, TUNED_FILE
from contaccum.retrieval.retriever import BM25_NAME
from contaccum.runtime.files import read_json, remove_folder, write_json
from contaccum.runtime.launch import StopSignals
from contaccum.runtime.locks import waiting_lock
from contaccum.runtime.processes import encoding_device
from contaccum.training.loop import Training, train
from contaccum.training.parts import build_encoder
from contaccum.training.run_folder import DEV_METRICS_FILE, files_hash, flat

POLL_SECONDS = 0.1
# settings that can name the folder of an encoder
ENCODERS = (
    "model.name",
    "model.passage_name",
    "loss.guide",
)


class Job(TypedDict):
    """Content of a job file."""

    kind: Literal["run", "bm25", "untrained"]
    config: dict[str, Any]
    test: dict[str, str] | None  # data and split of the test data; None: evaluate only on dev
    keep_weights: bool


class RunJob(NamedTuple):
    """Name of a job, and path of its job file."""

    name: str
    file: Path  # contains a Job as JSON

    @property
    def log(self) -> Path:
        """File for the output of the worker."""
        return self.file.with_suffix(".log")


class Outcome(NamedTuple):
    """Result of a worker that has ended."""

    job: RunJob
    exit_code: int
    seconds: float
    last_line: str  # last line of the log


class Worker:
    """Worker process of one job."""

    def __init__(self, job: RunJob, environment: dict[str, str]) -> None:
        self.job, self.began = job, time.monotonic()
        command = [sys.executable, "-m", "contaccum.experiments.jobs", str(job.file)]
        variables = {**os.environ, **environment}
        # The worker gets a new session. Ctrl-C in the terminal then reaches only the parent, and
        # the parent stops the workers.
        with open(job.log, "ab") as log:
            # earlier calls of the command may have written lines to the log
            self.start = log.tell()
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=variables,
                start_new_session=True,
            )

    def wait(self) -> Outcome:
        code = self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()
        lines = (
            self.job.log.read_bytes()[self.start :].decode("utf-8", "replace").strip().splitlines()
        )
        return Outcome(
            self.job, code, time.monotonic() - self.began, lines[-1] if lines else "no message"
        )


def device_slots(device: str, parallel: int | None) -> list[dict[str, str]]:
    """Return the environment variables of each slot. A slot runs one job at a time.

    There are ``parallel`` slots. Default: one slot per GPU, or one slot on a CPU. If there are more
    slots than GPUs, several slots use the same GPU. On a CPU, each slot gets the same number of
    cores, unless OMP_NUM_THREADS is set.
    """
    names = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(
        map(str, range(torch.cuda.device_count()))
    )
    gpus = names.split(",")[: torch.cuda.device_count()] if device == "auto" else []
    count = parallel or max(1, len(gpus))
    if gpus:
        return [{"CUDA_VISIBLE_DEVICES": gpus[number % len(gpus)]} for number in range(count)]
    shared = count > 1 and "OMP_NUM_THREADS" not in os.environ
    return [
        {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // count))} if shared else {}
    ] * count


def run_jobs(
    jobs: list[RunJob], slots: list[dict[str, str]], signals: StopSignals
) -> list[Outcome]:
    """Run all jobs, print a line at the end of each job, and return the outcomes of failed jobs.

    After a signal, the workers save checkpoints and stop. This function then raises Interrupted.
    """
    waiting, failed = deque(jobs), []
    running: dict[int, Worker] = {}  # slot number -> worker
    try:
        while waiting or running:
            for number, environment in enumerate(slots):
                if number not in running and waiting:
                    running[number] = Worker(waiting.popleft(), environment)
                elif number in running and running[number].process.poll() is not None:
                    outcome = running.pop(number).wait()
                    result = "done"
                    if outcome.exit_code:
                        failed.append(outcome)
                        result = f"exit code {outcome.exit_code}, {outcome.last_line}"
                    ended = (
                        f"[{len(jobs) - len(waiting) - len(running)}/{len(jobs)}] "
                        f"{outcome.job.name}"
                    )
                    print(f"{ended}: {result} ({outcome.seconds:.0f} s)", file=sys.stderr)
            if signals.received:
                raise Interrupted(
                    signals.received, "stopped; run the same command again to continue"
                )
            time.sleep(POLL_SECONDS)
    finally:
        for worker in running.values():
            worker.process.terminate()
        for worker in running.values():
            worker.wait()
    return failed


def main(file: str) -> int:
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    try:
        job = read_json(file, Job)
        # wait for the worker of a killed comparison, which may still be saving a checkpoint
        with waiting_lock(Path(file).with_suffix(".lock")):
            run_job(job["kind"], from_mapping(job["config"]), job["test"], job["keep_weights"])
    except (InputError, Interrupted) as error:
        print(f"contaccum: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _exit_with_parent() -> None:
    while os.read(0, 1):  # not sys.stdin: this thread would hold its lock when Python exits
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def run_job(
    kind: str,
    config: TrainConfig,
    test: dict[str, str] | None,
    keep_weights: bool = True,
    after_step: Callable[[Training], None] | None = None,
) -> None:
    """Train and evaluate a model, or evaluate a baseline. Save the metrics on the test data.

    kind: ``run`` trains a model; ``bm25`` and ``untrained`` are baselines. test: data and split.
    None: save only the dev metric. keep_weights: False deletes checkpoints and model at the end.
    after_step: see ``train``.
    """
    run = Path(config.output_dir)
    if kind == "run":
        train(config, after_step=after_step)
    if test is None:
        mean = read_metrics(run / DEV_METRICS_FILE)["mean"]
        score = {"metric": config.run.metric, "score": mean[config.run.metric]}
        write_json(run / TUNED_FILE, {**score, **data_hashes(kind, config)})
    else:
        settings = SearchConfig(batch_tokens=config.run.eval_batch_tokens)
        judged = open_dataset(test["data"], test["split"], config.data.policy).retrieval_set
        content = {"test_content": judged.fingerprint(), **data_hashes(kind, config)}
        metrics = evaluate(_model(kind, config), judged, settings=settings)
        write_json(
            run / METRICS_FILE, {**test, **content, **baseline_identity(kind, config), **metrics}
        )
    if not keep_weights:
        delete_weights(run)


def delete_weights(run: Path) -> None:
    """Delete the checkpoints and the model. run: folder of the run."""
    for folder in (run / "checkpoints", run / "model"):
        if folder.is_dir():
            remove_folder(folder)


def data_hashes(kind: str, config: TrainConfig) -> dict[str, str]:
    """Return hashes of the data and of encoders in local folders, to notice later changes.

    Return {} for ``bm25``, which uses none of them.
    """
    if kind == "bm25":
        return {}
    data = config.data
    hashes = {"train_content": load_training(data, config.distils).fingerprint}
    if kind == "run" and data.dev:
        hashes["dev_content"] = open_dataset(
            data.dev, data.dev_split, data.policy
        ).retrieval_set.fingerprint()
    for name in ENCODERS if kind == "run" else ENCODERS[:2]:  # the untrained encoder needs no guide
        if (path := flat(asdict(config))[name]) and os.path.isdir(
            path
        ):  # false for a name on the Hub
            hashes[f"{name}_content"] = str(files_hash(Path(model_folder(path))))
    return hashes


def refuse_changed(
    folder: Path, saved: Mapping[str, str], hashes: Mapping[str, str], config: TrainConfig
) -> None:
    """Raise InputError if one of the ``hashes`` differs from the saved one in ``folder``.

    saved: the hashes of the earlier call. Empty for the first call.
    """
    for name, now in hashes.items() if saved else ():
        if saved.get(name) != now:
            raise InputError(
                f"{folder}: contains results of an earlier call, but {content_of(name, config)} "
                "changed since then. Undo the change, or use another output_dir."
            )


def content_of(name: str, config: TrainConfig) -> str:
    """Return words for what a hash in ``data_hashes`` covers."""
    kind = name.removesuffix("_content")
    return (
        f"the folder {flat(asdict(config))[kind]} ({kind})"
        if kind in ENCODERS
        else f"the {kind} data"
    )


def baseline_identity(kind: str, config: TrainConfig) -> dict[str, Any]:
    """Return the settings that affect the untrained encoder, to notice later changes.

    Return {} for ``run``, whose folder already contains the config, and for ``bm25``, which has no
    settings.
    """
    if kind != "untrained":
        return {}
    settings = {name: value for name, value in flat(asdict(config)).items() if affects(name, None)}
    data: dict[str, Any] = {"data.train": config.data.train}
    if config.data.mixture:
        data["data.mixture"] = [[each.train, each.split] for each in config.data.mixture]
    return {"settings": {**settings, **data, "seed": config.seed}}


def _model(kind: str, config: TrainConfig) -> EncoderConfig | DualEncoder:
    device, trust = config.run.device, config.model.trust_remote_code
    if kind == "untrained":
        return build_encoder(config, load_training(config.data), encoding_device(device))
    folder = Path(config.output_dir) / "model"
    return EncoderConfig(
        BM25_NAME if kind == "bm25" else str(folder), device=device, trust_remote_code=trust
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
