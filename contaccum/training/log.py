"""A run's log: one progress line on the console, one JSON line a step in log.jsonl, and accelerate's trackers."""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from contaccum.engine import Engine
from contaccum.errors import InputError
from contaccum.files import write_text

LOG_FILE = "log.jsonl"


def read_log(run: Path) -> list[dict[str, Any]]:
    """All complete lines of a run's log; what a kill or a power cut left of a line is left out."""
    path = run / LOG_FILE
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    found = map(_line, lines[:-1])  # what stands behind the last newline is no whole line
    return [line for line in found if line is not None]


def _line(text: str) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except json.JSONDecodeError:
        return None
    return line if isinstance(line, dict) and isinstance(line.get("step"), int) else None


class RunLog:
    """Written by the main process alone; the others' log is silent."""

    def __init__(self, engine: Engine, run: Path, total: int, resumed_at: int) -> None:
        """total: steps of the run; resumed_at: steps already taken, whose lines stay while later ones are dropped."""
        self.engine = engine
        self.active = engine.is_main
        if not self.active:
            return
        kept = [line for line in read_log(run) if line["step"] <= resumed_at]
        write_text(run / LOG_FILE, "".join(json.dumps(line) + "\n" for line in kept))
        self.file = open(run / LOG_FILE, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - closed by close()
        self.bar = tqdm(total=total, initial=resumed_at, unit="step", disable=None, file=sys.stderr, dynamic_ncols=True)

    def step(self, values: dict[str, Any], write: bool) -> None:
        """One optimizer step: the progress line, and where ``write`` is true a line in the log."""
        if not self.active:
            return
        self.bar.update()
        shown = {"loss": values["loss"], "grad ratio": values["grad_norm_ratio"], "pairs/s": values["pairs_per_second"]}
        self.bar.set_postfix(
            {name: f"{value:.4g}" for name, value in shown.items() if value is not None}, refresh=False
        )
        if write:
            self._write(values)

    def skipped(self, step: int, sentence: str, count: int) -> None:
        """A step that was dropped, the run's ``count``-th."""
        if self.active:
            self.bar.update()
            self.say(f"{sentence}; the step is skipped, the {count}. of this run")
            self._write({"step": step, "skipped": sentence, "skips": count})

    def evaluation(self, step: int, scores: dict[str, float]) -> None:
        if self.active:
            self._write({"step": step, "dev": scores})
            self.engine.track({f"dev/{name}": value for name, value in scores.items()}, step)

    def say(self, text: str) -> None:
        """A sentence for whoever watches; stdout stays free for results."""
        if self.active:
            self.bar.write(text, file=sys.stderr)

    def _write(self, values: dict[str, Any]) -> None:
        try:
            self.file.write(json.dumps(values) + "\n")
        except OSError as error:
            raise InputError(f"{self.file.name}: could not be written ({error.strerror or error})") from error
        if "loss" in values:
            numbers = {name: value for name, value in values.items() if isinstance(value, (int, float))}
            self.engine.track(numbers, values["step"])

    def close(self) -> None:
        if self.active:
            self.bar.close()
            with contextlib.suppress(OSError):  # what could not be written was reported when it was tried
                self.file.close()
