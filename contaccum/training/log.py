"""Record a training run: progress, log.jsonl, trackers and environment.json."""

import contextlib
import json
import math
import os
import platform
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from contaccum import __version__
from contaccum.batch import MicroBatch
from contaccum.config import TrainConfig
from contaccum.errors import InputError, NotFiniteError, printable
from contaccum.methods.loss import LossValue
from contaccum.runtime.engine import Engine
from contaccum.runtime.files import decode_json, read_json, write_errors, write_json, write_text
from contaccum.runtime.progress import LINE_SECONDS
from contaccum.runtime.units import counted, duration
from contaccum.training.trackers import TRACKERS

LOG_FILE = "log.jsonl"
FIRST_STEP_SECONDS = 15.0  # time until the first line about a long first step
ENVIRONMENT_FILE = "environment.json"
PACKAGES = ("transformers", "tokenizers", "numpy")
LOG_VERSION = 1  # ``format_version`` in the first line of log.jsonl


def read_log(run: Path) -> list[dict[str, Any]]:
    """Return the content of a run's log: one dict for each logged step and evaluation.

    Incomplete lines, which a kill or a power failure can leave, are skipped. Raises InputError if
    the log has another format_version.
    """
    path = run / LOG_FILE
    if not path.is_file():
        return []
    texts = path.read_text(encoding="utf-8", errors="replace").split("\n")
    if texts[0].startswith('{"format_version"'):
        decode_json(texts[0], dict[str, Any], str(path), version=LOG_VERSION)
    lines: list[dict[str, Any]] = []
    for text in texts[:-1]:  # the text after the last newline is incomplete
        with contextlib.suppress(InputError):
            line = decode_json(text, dict[str, Any], str(path))
            if isinstance(line.get("step"), int):
                lines.append(line)
    return lines


class RunLog:
    """Progress bar, log.jsonl and trackers of a run, in the main process only."""

    def __init__(
        self, active: bool, config: TrainConfig, total: int, resumed_at: int, evaluate: bool
    ) -> None:
        """Open the log and the trackers of a run, and remove the lines after step ``resumed_at``.

        active: whether this is the main process. total: number of optimizer steps of the run.
        resumed_at: step at which the run continues, 0 for a new run. evaluate: whether that
        step is evaluated again, so that its earlier evaluation is removed.
        """
        self.active = active
        self.bar_shown = False
        if not active:
            return
        self.total, self.first = total, resumed_at
        self.began = time.monotonic()
        self.printed_step, self.printed = resumed_at, self.began  # last line about the progress
        self.score = ""  # last dev score, as in the lines about the progress
        self.evaluations = 0  # dev evaluations since ``began``
        self.evaluation_seconds = 0.0  # of all of them
        run = Path(config.output_dir)
        kept = [
            line
            for line in read_log(run)
            if 0 < resumed_at >= line["step"]
            and not (evaluate and "dev" in line and line["step"] == resumed_at)
        ]
        settings = {
            "run.precision": config.run.precision,
            "model.unpad": config.model.unpad,
            "batch.micro_batch_size": config.batch.micro_batch_size,
            "batch.micro_batch_tokens": config.micro_batch_tokens,
        }
        lines = [{"format_version": LOG_VERSION, "settings": settings}, *kept]
        write_text(run / LOG_FILE, "".join(json.dumps(line) + "\n" for line in lines))
        # close() closes the file
        self.file = open(run / LOG_FILE, "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        with write_errors(run):
            about = {"method": config.method, "seed": config.seed}
            self.trackers = [TRACKERS[name](run, about, resumed_at) for name in config.run.trackers]
        self.bar = tqdm(
            total=total,
            initial=resumed_at,
            unit="step",
            disable=None,
            file=sys.stderr,
            dynamic_ncols=True,
        )
        self.bar_shown = not self.bar.disable

    def step(self, values: dict[str, Any], evaluations_left: int) -> None:
        """Advance the progress bar by one optimizer step; show and log its ``values``.

        evaluations_left: number of dev evaluations until the end of the run.
        """
        if not self.active:
            return
        self.bar.update()
        shown = {
            "loss": f"{values['loss']:.4g}",
            "negatives": f"{values['negatives']:.4g}",
            "pairs/s": f"{values['pairs_per_second']:.4g}",
            "peak": f"{values['peak_memory'] / 2**30:.3g} GiB",
        }
        self.bar.set_postfix(shown, refresh=False)
        if self.bar_shown:
            self.printed = time.monotonic()
        else:
            self._print_progress(values, evaluations_left)
        self._write(values)
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        self._track(numbers, values["step"])

    def _print_progress(self, values: dict[str, Any], evaluations_left: int) -> None:
        """Print a line about the progress after the first step, and a minute or 5 % of the steps.

        It replaces the progress bar where stderr is no terminal.
        """
        step, now = values["step"], time.monotonic()
        part = (step - self.printed_step) / self.total
        soon = now - self.printed < LINE_SECONDS and part < 0.05
        if soon and self.first + 1 < step < self.total:
            return
        self.printed_step, self.printed = step, now
        line = (
            f"step {step}/{self.total}  loss {values['loss']:.4g}{self.score}  "
            f"{values['pairs_per_second']:.4g} pairs/s"
        )
        if step < self.total:
            line += f"  {self.time_left(step, evaluations_left)}"
        self.say(line)

    def inside_step(self, done: float, evaluations_left: int) -> None:
        """Print a line about the progress within a long step.

        done: steps since the start of the run, of which the current one counts in part.
        evaluations_left: see ``step``.
        """
        if not self.active or done <= self.first:
            return
        now = time.monotonic()
        first = self.printed == self.began
        if now - self.printed >= (FIRST_STEP_SECONDS if first else LINE_SECONDS):
            self.printed = now
            step = int(done)
            left = self.time_left(done, evaluations_left)
            self.say(f"step {step + 1}/{self.total}  {done - step:.0%} done  {left}")

    def time_left(self, done: float, evaluations_left: int) -> str:
        """Return the expected time of the remaining steps and evaluations as text.

        Before the first evaluation, only their number is known. done: see ``inside_step``.
        """
        steps = time.monotonic() - self.began - self.evaluation_seconds
        left = steps / (done - self.first) * (self.total - done)
        if self.evaluations:
            left += self.evaluation_seconds / self.evaluations * evaluations_left
        elif evaluations_left:
            return f"about {duration(left)} and {counted(evaluations_left, 'evaluation')} left"
        return f"about {duration(left)} left"

    def evaluation(self, step: int, scores: dict[str, float], metric: str, seconds: float) -> None:
        """Add the metrics of an evaluation on the dev set to the log and the trackers.

        seconds: time of the evaluation.
        """
        if self.active:
            self.evaluations += 1
            self.evaluation_seconds += seconds
            self.score = f"  last dev {metric} {scores[metric]:.4f}"
            self._write({"step": step, "dev": scores})
            self._track({f"dev/{name}": value for name, value in scores.items()}, step)

    def say(self, text: str) -> None:
        """Print a message to stderr, because stdout is only for results."""
        if self.active:
            self.bar.write(printable(text), file=sys.stderr)

    def _write(self, values: dict[str, Any]) -> None:
        with write_errors(self.file.name):
            self.file.write(json.dumps(values) + "\n")

    def _track(self, values: dict[str, float], step: int) -> None:
        for tracker in self.trackers:
            tracker.log(values, step)

    def close(self) -> None:
        if not self.active:
            return
        self.bar.close()
        with contextlib.suppress(OSError):  # a failed write has already raised an error
            self.file.close()
        for tracker in self.trackers:
            tracker.close()


def mean_losses(
    losses: list[LossValue], micro_batches: list[MicroBatch], step: int
) -> dict[str, float]:
    """Return the values to log for one step: the mean of ``LossValue.log`` over the losses.

    losses: one loss per micro-batch, or one loss for the whole step. Each already contains the
    weight of its micro-batch. step: number of the step for the error message. Raises NotFiniteError
    if a loss is NaN or infinite.
    """
    logged = [loss.log() for loss in losses]
    names = [name for name, value in logged[0].items() if isinstance(value, torch.Tensor)]
    # one copy, because each copy waits for the device
    on_device = torch.stack(
        [torch.as_tensor(values[name]).float() for values in logged for name in names]
    )
    for values, numbers in zip(logged, on_device.view(len(logged), -1).tolist(), strict=True):
        values |= zip(names, numbers, strict=True)
    for number, values in enumerate(logged):
        loss = values["differentiated_loss"]
        if not math.isfinite(loss):
            batches = micro_batches if len(logged) == 1 else [micro_batches[number]]
            queries = named_queries([name for batch in batches for name in batch.query_ids])
            place = f"step {step}, micro-batch {number + 1} of {len(logged)} ({queries})"
            raise NotFiniteError(f"{place}: the loss is {loss}, not a finite number")
    means = {
        name: float(sum(values[name] for values in logged)) / len(logged) for name in logged[0]
    }
    if means["differentiated_loss"] == means["loss"]:
        del means["differentiated_loss"]
    return means


def named_queries(ids: list[str]) -> str:
    return f"queries {', '.join(ids[:8])}{', …' if len(ids) > 8 else ''}"


def write_environment(run: Path, engine: Engine) -> None:
    """Write environment.json: versions, device, and how many processes, cores and threads.

    No host or user names. A run that is resumed on a CPU gives the same bytes only with the same
    number of threads.
    """
    device = engine.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    environment = {
        "python": platform.python_version(),
        "contaccum": __version__,
        "torch": str(torch.__version__),  # with its CUDA version
        **{package: metadata.version(package) for package in PACKAGES},
        "system": platform.system(),
        "device": f"{device.type} ({name})",
        "processes": engine.world,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    write_json(run / ENVIRONMENT_FILE, environment)


def read_environment(run: Path) -> dict[str, Any]:
    """Return the content of environment.json. If the file does not exist, return an empty dict."""
    path = run / ENVIRONMENT_FILE
    return read_json(path, dict[str, Any]) if path.is_file() else {}
