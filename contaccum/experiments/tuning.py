"""Length of training runs: equal budgets for final runs, shorter runs to tune.

Successive halving is cheaper than training all combinations of values fully. It has several rounds,
called rungs. In the first rung, all combinations train for a short time. In each later rung, the
best quarter of the combinations trains again from the start, 3 times as long (LONGER). In the last
rung, the remaining combinations train with the full budget. By default, at most 3 combinations
remain (FINALISTS). The learning rate schedule of each run ends with that run. All runs use the
first seed. Source: Jamieson, Talwalkar 2016, arXiv 1502.07943.
"""

import re
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, NamedTuple

from contaccum.config import TrainConfig, affects, train_settings
from contaccum.config.groups import OptimConfig
from contaccum.config.load import number_type
from contaccum.errors import InputError
from contaccum.experiments.measure import measure_step
from contaccum.experiments.settings import Values, Variant
from contaccum.runtime.files import read_json, write_json
from contaccum.training.run_folder import flat

TIMES_FILE = "step_times.json"
UNITS = {"f": "forward passes of a pair", "p": "pairs", "u": "updates", "s": "seconds"}
LONGER = 3
QUARTER = 4
FINALISTS = 3

Scores = dict[Values, float]


class Budget(NamedTuple):
    """Maximum cost of a training run.

    unit: f (forward passes of a pair), p (pairs), u (updates) or s (seconds).
    """

    amount: Fraction
    unit: Literal["f", "p", "u", "s"]

    def __str__(self) -> str:
        return f"{float(self.amount):g} {UNITS[self.unit]}"

    def steps(self, config: TrainConfig, share: Fraction, step_seconds: float | None) -> int:
        """Return the number of optimizer steps that fit in the fraction ``share`` of the budget.

        step_seconds: measured seconds of a step, only for a budget in seconds. Raises InputError if
        the number of steps is 0.
        """
        pairs = config.batch.global_batch_size
        by_tokens = config.micro_batch_tokens or config.micro_batches_by_memory
        micro_batch_size = None if by_tokens else config.micro_batch_size(world=1)
        passes = config.spec.cost(pairs, micro_batch_size, config.replay_share)
        prices = {"f": pairs * passes, "p": pairs, "u": 1, "s": step_seconds}
        price = prices[self.unit]
        assert price is not None
        # limit_denominator removes rounding errors of the price: 1 + 3 * 0.3 is not exactly 1.9
        steps = int(self.amount * share / Fraction(price).limit_denominator(10**9))
        if steps < 1:
            raise InputError(
                f"--budget: one step of {config.method} costs {price:g} {UNITS[self.unit]}, but a "
                f"run may cost at most {float(self.amount * share):g}. Raise --budget, or lower "
                "batch.global_batch_size or --rungs."
            )
        return steps


def parse_budget(text: str) -> Budget:
    """Convert a text such as 200000f (number and unit) to a budget.

    Raise InputError if the text has another form.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([fpus])", text.strip())
    if not found or not float(found[1]):
        units = ", ".join(f"{letter} ({name})" for letter, name in UNITS.items())
        raise InputError(
            f"--budget is {text!r}; it must be a number above 0 followed by one of {units}, such "
            "as 200000f."
        )
    return Budget(Fraction(found[1]), found[2])  # type: ignore[arg-type]


def limited(
    config: TrainConfig, budget: Budget | None, share: Fraction, step_seconds: float | None
) -> TrainConfig:
    """Return the config with the steps that fit in the fraction ``share`` of the budget.

    Without a budget, the run takes this fraction of the configured steps or epochs. step_seconds:
    measured seconds of a step, needed only for a budget in seconds.
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

    A file in ``folder`` keeps the seconds, so that a repeated command plans the same numbers of
    steps.
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
        print(
            f"measuring a step of {config.method}, N = {config.batch.global_batch_size}",
            file=sys.stderr,
        )
        seconds[key] = measure_step(config)
        write_json(file, seconds)
    return seconds[key]


def rung_shares(candidates: int, rungs: int | None) -> list[Fraction]:
    """Return, for each rung (round of tuning), the share of the full budget that one run gets.

    The share of the last rung is 1.

    rungs: number of rungs. Default: as few as possible, with at most FINALISTS candidates in the
    last rung. Example: for 30 candidates there are three rungs, with 30, 8 and 2 candidates.
    Together they cost 30/9 + 8/3 + 2 = 8 full runs.
    """
    if rungs is None:
        rungs, left = 1, candidates
        while left > FINALISTS:
            left, rungs = survivors(left), rungs + 1
    return [Fraction(1, LONGER**rung) for rung in reversed(range(rungs))]


def survivors(candidates: int) -> int:
    """Return the number of candidates in the next rung.

    It is a quarter, rounded up, but at least two (one if there is only one).
    """
    return min(candidates, max(2, -(-candidates // QUARTER)))


@dataclass
class Tuned:
    """Tuning of one variant: dev metrics of its candidates by rung, and the chosen candidate."""

    variant: Variant
    shares: list[Fraction]
    rungs: list[Scores] = field(default_factory=list)
    """For each rung: candidate -> dev metric. Candidates with failed runs are missing."""
    trained: list[int] = field(default_factory=list)
    """Number of candidates that each rung trained."""
    invalid: dict[str, str] = field(default_factory=dict)
    """Name of a candidate that cannot be trained -> reason."""

    def alive(self) -> list[Values]:
        """Return the candidates that the next rung (round of tuning) trains.

        The first rung trains all candidates. A later rung trains the best candidates of the
        previous rung; the list is then sorted by dev metric, the best first.
        """
        if not self.rungs:
            return list(self.variant.candidates)
        scores = self.rungs[-1]
        # stable: candidates with equal scores keep their order
        best = sorted(scores, key=lambda candidate: -scores[candidate])
        return best[: survivors(self.trained[-1])]

    @property
    def chosen(self) -> Values | None:
        """Best candidate of the last rung. None if all runs of the last rung failed."""
        return max(self.rungs[-1], key=self.rungs[-1].__getitem__, default=None)

    @property
    def full_runs(self) -> Fraction:
        """Cost of tuning. A run with the full budget costs 1."""
        return sum(
            (count * share for count, share in zip(self.trained, self.shares, strict=True)),
            Fraction(0),
        )

    def edges(self) -> list[str]:
        """Return the tuned settings whose chosen number is the lowest or highest that was tried.

        Leave out a number that is also the lowest or the highest allowed value, because no wider
        range is possible.
        """
        found = []
        for name, value in self.chosen or ():
            numbers = [_number(dict(candidate).get(name)) for candidate in self.variant.candidates]
            tried = {number for number in numbers if number is not None}
            chosen = _number(value)
            limits = number_type(train_settings()[name].type)
            at_the_edge = len(tried) > 1 and chosen in (min(tried), max(tried))
            if at_the_edge and not (limits and chosen in (limits.ge, limits.le)):
                found.append(name)
        return found

    def as_json(self, metric: str) -> dict[str, Any]:
        """Return the entry of this variant in compare.json.

        ``metric`` is the name of the dev metric.
        """
        chosen = self.chosen
        return {
            "setting": self.variant.label,
            "metric": metric,
            "chosen": None if chosen is None else dict(chosen),
            "at_the_edge": self.edges(),
            "cost_in_full_runs": float(self.full_runs),
            "candidates": [
                {
                    "values": dict(each),
                    "dev": {
                        str(share): rung.get(each)
                        for share, rung in zip(self.shares, self.rungs, strict=True)
                    },
                }
                for each in self.variant.candidates
            ],
            "invalid": self.invalid,
        }


def _number(text: str | None) -> float | None:
    try:
        return float(text)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None


def tune(
    tuned: list[Tuned],
    train: Callable[[list[tuple[Variant, Values, Fraction]]], list[float | None]],
) -> None:
    """Run all rungs of all variants. Save the dev metrics in ``tuned``.

    train: function that trains candidates of the variants, each for its share of the budget. It
    returns the dev metric of each run, or None for a failed run. The same rung of all variants is
    trained in one call, so that several devices have enough work.
    """
    for number in range(max((len(each.shares) for each in tuned), default=0)):
        current = [each for each in tuned if len(each.shares) > number]
        runs = [(each, candidate) for each in current for candidate in each.alive()]
        scores = train([(each.variant, candidate, each.shares[number]) for each, candidate in runs])
        for each in current:
            mine = {
                candidate: score
                for (owner, candidate), score in zip(runs, scores, strict=True)
                if owner is each
            }
            each.trained.append(len(mine))
            each.rungs.append(
                {candidate: score for candidate, score in mine.items() if score is not None}
            )
