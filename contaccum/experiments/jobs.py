"""Training runs and baselines of a comparison, each in its own process.

``python -m contaccum.experiments.jobs JOB.json`` is the process of one job, called a worker. It
trains and evaluates a model, or it evaluates a baseline. It does not repeat finished training. The
parent stops a worker by closing its standard input, which also happens if the parent dies. The
worker then saves a checkpoint and exits.
"""

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from contaccum.config import TrainConfig, affects, from_mapping
from contaccum.config.commands import EncoderConfig, SearchConfig
from contaccum.config.load import flat
from contaccum.data.dataset import load_training, open_dataset, warn_of_shared_queries
from contaccum.data.identity import text_hash
from contaccum.encoder import DualEncoder, model_folder
from contaccum.encoder.folders import MODEL_FILES
from contaccum.errors import InputError, Interrupted
from contaccum.evaluation.evaluate import evaluate
from contaccum.evaluation.metrics import read_metrics
from contaccum.experiments.run_records import TUNED_FILE
from contaccum.retrieval.retriever import BM25_NAME
from contaccum.runtime.files import read_json, remove_folder, write_json
from contaccum.runtime.hub import optional_file
from contaccum.runtime.launch import StopSignals
from contaccum.runtime.locks import waiting_lock
from contaccum.runtime.processes import encoding_device
from contaccum.runtime.progress import LINE_SECONDS
from contaccum.runtime.units import counted
from contaccum.training.loop import Training, train
from contaccum.training.messages import NOTE
from contaccum.training.parts import build_encoder
from contaccum.training.run_folder import (
    DEV_METRICS_FILE,
    METRICS_FILE,
    config_differences,
    files_hash,
)

POLL_SECONDS = 0.1
ENCODERS = ("model.name", "model.passage_name", "loss.guide")  # may name folders of encoders
JobKind = Literal["run", "bm25", "untrained"]


@dataclass(frozen=True)
class Job:
    """Training run or baseline, and its evaluation."""

    name: str
    kind: JobKind
    config: TrainConfig
    contents: dict[str, str]  # see ``contents_of``
    test: dict[str, str] | None = None  # data and split of the test data; None: only the dev score
    keep_weights: bool = True

    @property
    def folder(self) -> Path:
        return Path(self.config.output_dir)

    @property
    def file(self) -> Path:
        """File with the job for the worker, next to the log of the worker."""
        return self.folder.parent.parent / "jobs" / f"{self.folder.name}.json"

    @property
    def log(self) -> Path:
        """What the worker prints."""
        return self.file.with_suffix(".log")

    @property
    def done(self) -> bool:
        return (self.folder / (TUNED_FILE if self.test is None else METRICS_FILE)).is_file()

    @property
    def made_of(self) -> dict[str, Any]:
        """What the result depends on: settings and data."""
        settings = flat(asdict(self.config))
        if self.kind == "bm25":
            settings = {}
        elif self.kind == "untrained":
            # the vocabulary of the encoder `tiny` comes from the training data
            others = ("seed", "data.train", "data.mixture")
            settings = {
                name: value
                for name, value in settings.items()
                if affects(name, None) or name in others
            }
        test = {f"test {name}": value for name, value in (self.test or {}).items()}
        return {**settings, **self.contents, **test}

    def refuse_changes(self) -> None:
        """Raise InputError if the folder has a result of other settings or other data."""
        old, new = self.old_made_of(), self.made_of
        names = old.keys() & new.keys()  # a tuning run has no test data
        changes = config_differences({n: old[n] for n in names}, {n: new[n] for n in names})
        if changes:
            raise InputError(
                f"{self.folder}: was made with other settings or data: {'; '.join(changes)}. Undo "
                "the changes, or use another output_dir."
            )

    def old_made_of(self) -> dict[str, Any]:
        """Return what the result in the folder depends on, {} if there is no folder."""
        if not self.folder.is_dir():
            return {}
        if not self.file.is_file():
            raise InputError(
                f"{self.folder}: exists, but not {self.file}, which says how it was made; use "
                "another output_dir"
            )
        return read_json(self.file, dict[str, Any])["made_of"]

    def write(self) -> None:
        # a tuning run has no test data, but the folder may have a result on test data already
        made_of = self.old_made_of() | self.made_of
        write_json(self.file, {**asdict(self), "made_of": made_of})


def contents_of(kind: JobKind, config: TrainConfig, test: dict[str, str] | None) -> dict[str, str]:
    """Return hashes of the data and of encoders in local folders, to notice later changes."""
    data, contents = config.data, {}
    if test is not None:
        judged = open_dataset(test["data"], test["split"], data.policy).retrieval_set
        contents["content of the test data"] = judged.fingerprint()
    if kind == "bm25":
        return contents
    train_set = load_training(data, config.distils)
    contents["content of the training data"] = train_set.fingerprint
    if test is not None:
        of_test = "test", f"{test['data']} {test['split']}", judged
        warn_of_shared_queries(*of_test, train_set.shared_queries(judged.queries), "training")
    if kind == "run" and data.dev:
        dev = open_dataset(data.dev, data.dev_split, data.policy).retrieval_set
        contents["content of the dev data"] = dev.fingerprint()
        of_dev = "dev", f"{data.dev} {data.dev_split}", dev
        warn_of_shared_queries(*of_dev, train_set.shared_queries(dev.queries), "training")
        if test is not None:
            known = {text_hash(text) for text in dev.queries.values()}
            same = [key for key, text in judged.queries.items() if text_hash(text) in known]
            warn_of_shared_queries(*of_test, same, "dev")
    settings = flat(asdict(config))
    for name in ENCODERS if kind == "run" else ENCODERS[:2]:  # the untrained encoder needs no guide
        encoder = settings[name]
        if encoder and encoder != "tiny":
            folder = model_folder(encoder)
            if os.path.isdir(folder):  # not a name on the Hub
                contents[f"content of {name}"] = str(files_hash(Path(folder)))
            elif not any(optional_file(folder, file) for file in MODEL_FILES):
                raise InputError(  # each run would find it, one after the other
                    f"{name} is {encoder!r}: no folder has this name, and the Hub or its cache has "
                    f"none of {', '.join(MODEL_FILES)}"
                )
    return contents


def device_slots(device: str, parallel: int | None) -> list[dict[str, str]]:
    """Return the environment variables of each slot. A slot runs one job at a time.

    There are ``parallel`` slots. Default: one slot per GPU, or one slot on a CPU. If there are more
    slots than GPUs, several slots use the same GPU. On a CPU, each slot gets the same number of
    cores, unless OMP_NUM_THREADS is set.
    """
    gpus = torch.cuda.device_count() if device == "auto" else 0
    count = parallel or max(1, gpus)
    if gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
        names = visible.split(",")
        return [{"CUDA_VISIBLE_DEVICES": names[number % gpus]} for number in range(count)]
    if count == 1 or "OMP_NUM_THREADS" in os.environ:
        return [{}] * count
    return [{"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // count))}] * count


class Worker(NamedTuple):
    """Process of a job."""

    job: Job
    process: subprocess.Popen[bytes]
    began: float
    log_before: int  # bytes of the log that earlier workers of the job have written

    def lines(self) -> list[str]:
        """Return what the worker has printed so far."""
        with open(self.job.log, "rb") as log:
            log.seek(self.log_before)
            return log.read().decode(errors="replace").strip().splitlines()

    def last_line(self, empty: str = "no message") -> str:
        """Return the last line that the worker has printed, or ``empty`` if there is none."""
        return (self.lines() or [empty])[-1].removeprefix("contaccum: ")

    def warnings(self) -> list[str]:
        """Return the warnings of this package and the notes on doubtful settings, in their order.

        Both concern the results of the run.
        """
        package = str(Path(__file__).parents[1])
        found = []
        for line in self.lines():
            place, _, text = line.partition(" UserWarning: ")
            if text and place.startswith(package):
                found.append(text)
            elif line.startswith(NOTE):
                found.append(line.removeprefix(NOTE))
        return found


def start(job: Job, environment: dict[str, str]) -> Worker:
    job.write()
    before = job.log.stat().st_size if job.log.is_file() else 0
    with open(job.log, "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "contaccum.experiments.jobs", str(job.file)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env={**os.environ, **environment},
            # Ctrl-C in the terminal then reaches only the parent, which stops the workers
            start_new_session=True,
        )
    return Worker(job, process, time.monotonic(), before)


def run_jobs(
    jobs: Iterable[Job], slots: list[dict[str, str]], signals: StopSignals, warned: set[str]
) -> dict[str, str]:
    """Run the jobs that are not done.

    Print a line at the end of each job, the warnings of the workers, and each minute the last line
    of the log of each worker. Return the failed jobs: name -> exit code and last line of the log.
    After a signal, the workers save checkpoints and stop. This function then raises Interrupted.

    warned: warnings that were printed before, and are not printed again. New ones are added.
    """
    waiting = deque(job for job in jobs if not job.done)
    count = len(waiting)
    failed: dict[str, str] = {}
    running: dict[int, Worker] = {}  # slot number -> worker
    if waiting:
        print(
            f"{counted(count, 'run')}, {len(slots)} at a time; logs in {waiting[0].log.parent}",
            file=sys.stderr,
        )
    next_lines = time.monotonic() + LINE_SECONDS
    try:
        while waiting or running:
            for number, environment in enumerate(slots):
                if number not in running and waiting:
                    running[number] = start(waiting.popleft(), environment)
                elif number in running and running[number].process.poll() is not None:
                    worker = running.pop(number)
                    name, process = worker.job.name, worker.process
                    process.communicate()  # closes its standard input
                    result = "done"
                    if process.returncode:
                        result = f"exit code {process.returncode}, {worker.last_line()}"
                        failed[name] = result
                    for text in worker.warnings():
                        if text not in warned:
                            print(f"{name}: warning: {text}", file=sys.stderr)
                            warned.add(text)
                    ended = count - len(waiting) - len(running)
                    seconds = time.monotonic() - worker.began
                    print(f"[{ended}/{count}] {name}: {result} ({seconds:.0f} s)", file=sys.stderr)
            if time.monotonic() >= next_lines:
                next_lines = time.monotonic() + LINE_SECONDS
                for worker in running.values():
                    print(f"{worker.job.name}: {worker.last_line('starting')}", file=sys.stderr)
            if signals.received:
                raise Interrupted(
                    signals.received, "stopped; run the same command again to continue"
                )
            time.sleep(POLL_SECONDS)
    finally:
        for worker in running.values():
            assert worker.process.stdin is not None
            worker.process.stdin.close()
        for worker in running.values():
            worker.process.wait()
    return failed


def main(file: str) -> int:
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    try:
        job = read_json(file, dict[str, Any])
        # wait for the worker of a killed comparison, which may still be saving a checkpoint
        with waiting_lock(Path(file).with_suffix(".lock")):
            run_job(
                job["kind"],
                from_mapping(TrainConfig, job["config"]),
                job["test"],
                job["keep_weights"],
                contents=job["contents"],
            )
    except (InputError, Interrupted) as error:
        print(f"contaccum: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _stop_with_parent() -> None:
    while os.read(0, 1):  # not sys.stdin: this thread would hold its lock when Python exits
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def run_job(
    kind: JobKind,
    config: TrainConfig,
    test: dict[str, str] | None,
    keep_weights: bool = True,
    after_step: Callable[[Training], None] | None = None,
    contents: Mapping[str, str] | None = None,
) -> None:
    """Train and evaluate a model, or evaluate a baseline. Save the metrics on the test data.

    test: data and split. None: save only the dev metric. keep_weights: False deletes checkpoints
    and model at the end. after_step: see ``train``. contents: the planned ``contents_of`` the run;
    raises InputError if they changed.
    """
    run = Path(config.output_dir)
    if contents:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the parent has printed these warnings
            now = contents_of(kind, config, test)
        if changed := [name for name in contents if now.get(name) != contents[name]]:
            raise InputError(
                f"{', '.join(changed)} changed after the first run started, so the runs could not "
                "be compared. Undo the change and repeat the command, or use another output_dir."
            )
    device, trust = config.run.device, config.model.trust_remote_code
    model: EncoderConfig | DualEncoder = EncoderConfig(BM25_NAME)
    if kind == "run":
        folder = train(config, after_step=after_step)
        model = EncoderConfig(str(folder), device=device, trust_remote_code=trust)
    elif kind == "untrained":
        model = build_encoder(config, load_training(config.data), encoding_device(device))
    if test is None:
        mean = read_metrics(run / DEV_METRICS_FILE)["mean"]
        metric = config.run.metric
        write_json(run / TUNED_FILE, {"metric": metric, "score": mean[metric]})
    else:
        settings = SearchConfig(batch_tokens=config.run.eval_batch_tokens)
        evaluate(
            model,
            test["data"],
            test["split"],
            settings=settings,
            policy=config.data.policy,
            output=run / METRICS_FILE,
        )
    if not keep_weights:
        delete_weights(run)


def delete_weights(run: Path) -> None:
    """Delete the checkpoints and the model. run: folder of the run."""
    for folder in (run / "checkpoints", run / "model"):
        if folder.is_dir():
            remove_folder(folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
