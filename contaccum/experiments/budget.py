"""Compute the cost of training runs, so that all methods can train at the same cost."""

import re
import sys
from dataclasses import asdict, replace
from fractions import Fraction
from pathlib import Path
from typing import Literal, NamedTuple

from contaccum.config import OptimConfig, TrainConfig, affects
from contaccum.errors import InputError
from contaccum.experiments.plan import ask
from contaccum.runtime.files import read_json, write_json
from contaccum.training.run_folder import flat

TIMES_FILE = "step_times.json"
UNITS = {"f": "forward passes of a pair", "p": "pairs", "u": "updates", "s": "seconds"}


class Budget(NamedTuple):
    """Maximum cost of a training run. ``unit`` is a letter from UNITS."""

    amount: Fraction
    unit: Literal["f", "p", "u", "s"]

    def __str__(self) -> str:
        return f"{float(self.amount):g} {UNITS[self.unit]}"

    def steps(self, config: TrainConfig, share: Fraction, step_seconds: float | None) -> int:
        """Return the number of optimizer steps that ``share`` of the budget pays for.

        step_seconds: measured seconds of a step, needed only for a budget in seconds. Raises InputError if the number is 0.
        """
        price = step_seconds if self.unit == "s" else step_cost(config, self.unit)
        assert price is not None
        # limit_denominator removes rounding errors of the price: 1 + 3 * 0.3 is not exactly 1.9
        steps = int(self.amount * share / Fraction(price).limit_denominator(10**9))
        if steps < 1:
            raise InputError(
                f"--budget: one step of {config.method} costs {price:g} {UNITS[self.unit]}, but a run may cost at most "
                f"{float(self.amount * share):g}. Raise --budget, or lower batch.global_batch_size or --rungs."
            )
        return steps


def parse_budget(text: str) -> Budget:
    """Convert a text such as 200000f to a budget. Raise InputError for any other text."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([fpus])", text.strip())
    if not found or not float(found[1]):
        units = ", ".join(f"{letter} ({name})" for letter, name in UNITS.items())
        raise InputError(
            f"--budget is {text!r}; it must be a number above 0 followed by one of {units}, such as 200000f."
        )
    return Budget(Fraction(found[1]), found[2])  # type: ignore[arg-type]


def parse_time(text: str) -> float:
    """Convert a text such as 90s, 30m or 2h to seconds. Raise InputError for another text or less than 1 second."""
    unit = {"s": 1, "m": 60, "h": 3600}.get(text[-1:])
    try:
        seconds = float(text[:-1]) * unit if unit else 0.0
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds < 1e9:
        raise InputError(
            f"--time is {text!r}; it must be a time from 1 second to 1e9 seconds: a number followed by s, m or h, such as 30m"
        )
    return seconds


def step_cost(config: TrainConfig, unit: str) -> float:
    """Return the cost of an optimizer step. The unit is f (forward passes of one pair), p (pairs) or u (updates)."""
    pairs = config.batch.global_batch_size
    return {"f": pairs * config.spec.cost(config.replay_share), "p": pairs, "u": 1}[unit]


def limited(config: TrainConfig, budget: Budget | None, share: Fraction, step_seconds: float | None) -> TrainConfig:
    """Return the config with the number of steps that ``share`` of the budget pays for.

    Without a budget, the run takes ``share`` of the configured steps or epochs. step_seconds: measured seconds of a step, needed
    only for a budget in seconds.
    """
    optim = config.optim
    if budget is not None:
        steps = budget.steps(config, share, step_seconds)
        return replace(config, optim=replace(optim, max_steps=steps, epochs=OptimConfig.epochs))
    if share == 1:
        return config
    if optim.max_steps is None:
        return replace(config, optim=replace(optim, epochs=float(optim.epochs * share)))
    return replace(config, optim=replace(optim, max_steps=max(1, int(optim.max_steps * share))))


class StepTimes:
    """Measured seconds of an optimizer step, saved in a file, so that a repeated command plans the same numbers of steps."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / TIMES_FILE
        self.seconds = read_json(self.file, dict[str, float]) if self.file.is_file() else {}

    def of(self, config: TrainConfig) -> float:
        """Return the seconds of a step with ``config``. Measure them in a new process if the file does not contain them."""
        speed = {
            name: value
            for name, value in flat(asdict(config)).items()
            if affects(name, config.method)
            and name not in ("bank.age_decay", "bank.row_weight")
            and not name.startswith("optim.")
        }
        key = repr([config.method, config.run.device, *speed.items()])
        if key not in self.seconds:
            print(f"measuring a step of {config.method}, N = {config.batch.global_batch_size}", file=sys.stderr)
            self.seconds[key] = ask(config, "seconds_per_step")
            write_json(self.file, self.seconds)
        return self.seconds[key]
