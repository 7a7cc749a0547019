"""Compute how many steps a training run takes within a budget, so that no method costs more than another."""

import re
import sys
from dataclasses import asdict, replace
from fractions import Fraction
from pathlib import Path
from typing import Literal, NamedTuple

from contaccum.config import TrainConfig, affects
from contaccum.config.groups import OptimConfig
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
        pairs = config.batch.global_batch_size
        prices = {"f": pairs * config.spec.cost(config.replay_share), "p": pairs, "u": 1, "s": step_seconds}
        price = prices[self.unit]
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
    """Convert a number with a letter from UNITS to a budget: 200000f is 200000 forward passes. Raise InputError otherwise."""
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


def measured_step(config: TrainConfig, folder: Path) -> float:
    """Return the seconds of an optimizer step with ``config``, measured in a new process.

    A file in ``folder`` keeps the seconds, so that a repeated command plans the same numbers of steps.
    """
    file = folder / TIMES_FILE
    seconds = read_json(file, dict[str, float]) if file.is_file() else {}
    speed = {
        name: value
        for name, value in flat(asdict(config)).items()
        if affects(name, config.method)
        and name not in ("bank.age_decay", "bank.row_weight")
        and not name.startswith("optim.")
    }
    key = repr([config.method, config.run.device, *speed.items()])
    if key not in seconds:
        print(f"measuring a step of {config.method}, N = {config.batch.global_batch_size}", file=sys.stderr)
        seconds[key] = ask(config, "seconds_per_step")
        write_json(file, seconds)
    return seconds[key]
