"""State of ``contaccum auto`` in ``auto.json``, for later calls.

This module also divides the time limit among the stages.
"""

import time
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from contaccum.errors import InputError
from contaccum.experiments.settings import Values
from contaccum.experiments.tuning import rung_shares, survivors
from contaccum.runtime.files import read_json, write_json
from contaccum.training.run_folder import config_differences

STATE_FILE = "auto.json"
TUNING = 0.2  # share of the total time that tuning may take
FEWEST_STEPS = (
    8  # minimum number of steps of a tuning run; shorter runs do not show which settings are better
)
EVALUATIONS = 4  # number of dev evaluations during the final run


def parse_time(text: str) -> float:
    """Convert a text such as 90s, 30m or 2h to seconds.

    Raise InputError for an invalid text or a time below 1 second.
    """
    unit = {"s": 1, "m": 60, "h": 3600}.get(text[-1:])
    try:
        seconds = float(text[:-1]) * unit if unit else 0.0
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds < 1e9:
        raise InputError(
            f"--time is {text!r}; it must be a time from 1 second to 1e9 seconds: a number "
            "followed by s, m or h, such as 30m"
        )
    return seconds


@dataclass
class State:
    """Content of ``auto.json``: settings, measurements and decisions."""

    settings: dict[str, Any]
    spent: float = 0.0
    """Total seconds of all calls so far."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Key -> measured seconds.

    ``dev``: evaluation of the untrained model on dev. ``untrained``, ``bm25``: evaluation of the
    baseline on the test data. ``run``: time that a training run needs in addition to its steps
    (loading, dev evaluation, saving); the longest time that was measured. Each method is also a
    key, for example ``grad_cache``; its value is the training time per pair.
    """
    sizes: dict[str, int] = field(default_factory=dict)
    """Method -> largest micro-batch size that fits into the memory."""
    tuning: float = 0.0
    """Total seconds of all tuning runs so far."""
    # setting -> chosen value; empty before the end of tuning
    chosen: dict[str, str] = field(default_factory=dict)
    steps: int = 0
    """Number of optimizer steps of the final run. 0: not planned yet."""
    content: dict[str, str] = field(default_factory=dict)  # see data_hashes
    format_version: int = 1
    file: Path = field(default=Path(), repr=False)
    began: float = field(default_factory=time.monotonic, repr=False)

    @classmethod
    def read(cls, file: Path, settings: dict[str, Any]) -> "State":
        """Read the state of earlier calls from ``file``, if it exists.

        Raise InputError if these calls had other settings.
        """
        if not file.is_file():
            return cls(settings, file=file)
        saved = read_json(file, cls, version=1)
        if changes := "; ".join(config_differences(saved.settings, settings)):
            raise InputError(
                f"{file.parent}: contains results with other settings ({changes}). Use the same "
                "settings or another folder."
            )
        return replace(saved, file=file, began=time.monotonic())

    def save(self) -> None:
        now = time.monotonic()
        self.spent += now - self.began
        self.began = now
        write_json(self.file, {k: v for k, v in asdict(self).items() if k not in ("file", "began")})

    @property
    def elapsed(self) -> float:
        return self.spent + time.monotonic() - self.began

    @property
    def evaluation_seconds(self) -> float:
        """Expected seconds of the final run's evaluations: EVALUATIONS on dev, one on test."""
        return (
            self.seconds.get("untrained", self.seconds["dev"]) + EVALUATIONS * self.seconds["dev"]
        )

    def seconds_left(self, total: float) -> float:
        """Return the seconds for the steps of the final run. total: time limit of the command."""
        return total - self.elapsed - self.seconds["run"] - self.evaluation_seconds

    def step_seconds(self, values: Values) -> float:
        """Return the seconds of a step: measured seconds per pair, times global batch size."""
        changes = dict(values)
        return self.seconds[changes["method"]] * int(changes["batch.global_batch_size"])

    def tuning_plan(self, candidates: list[Values], total: float) -> tuple[list[Values], float]:
        """Return the candidates to try, and the planned seconds of a run in the last rung.

        candidates: the most promising first. total: seconds that the whole command may take. If
        there is only one candidate, or no time to compare two, return the first candidate and 0
        seconds.
        """
        for count in range(len(candidates), 1, -1):
            shares = rung_shares(count, None)
            runs = 0  # number of training runs
            full = Fraction(0)  # their cost; a run with the full budget costs 1
            trained = count
            for share in shares:
                runs += trained
                full += trained * share
                trained = survivors(trained)
            budget = (TUNING * total - runs * self.seconds["run"]) / float(full)
            slowest = max(map(self.step_seconds, candidates[:count]))
            if budget * float(shares[0]) >= FEWEST_STEPS * slowest:
                return candidates[:count], budget
        return candidates[:1], 0.0
