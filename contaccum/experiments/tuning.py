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
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from contaccum.config import TrainConfig, affects
from contaccum.config.groups import OptimConfig
from contaccum.config.load import flat
from contaccum.errors import InputError
from contaccum.experiments.measure import Unit, measure_cost
from contaccum.experiments.page import MISSING, Section, Table, number
from contaccum.experiments.settings import Values, Variant
from contaccum.runtime.files import read_json, write_json

COSTS_FILE = "step_costs.json"
LONGER = 3
QUARTER = 4
FINALISTS = 3


class Budget(NamedTuple):
    """Maximum cost of a training run, in seconds or in forward passes of a pair."""

    amount: Fraction
    in_seconds: bool

    def __str__(self) -> str:
        unit = "seconds" if self.in_seconds else "forward passes of a pair"
        return f"{float(self.amount):g} {unit}"


def parse_budget(text: str) -> Budget:
    """Convert a text such as 200000f (forward passes of a pair) or 600s (seconds) to a budget.

    Raise InputError if the text has another form.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?(?:[eE]\d+)?)([fs])", text.strip())
    if not found or not float(found[1]):
        raise InputError(
            f"--budget is {text!r}; it must be a number above 0 followed by f (forward passes of a "
            "pair) or s (seconds), such as 200000f."
        )
    return Budget(Fraction(found[1]), found[2] == "s")


def limited(
    config: TrainConfig, budget: Budget | None, share: Fraction, price: float = 0.0
) -> TrainConfig:
    """Return the config with the steps that fit in the fraction ``share`` of the budget.

    Without a budget, the run takes this fraction of the configured steps or epochs. price: cost of
    a step, in the unit of the budget.
    """
    optim = config.optim
    if budget is not None:
        cost = budget._replace(amount=Fraction(price))
        allowed = budget._replace(amount=budget.amount * share)
        # limit_denominator removes rounding errors of the price: 1 + 3 * 0.3 is not exactly 1.9
        steps = int(allowed.amount / Fraction(price).limit_denominator(10**9))
        if steps < 1:
            raise InputError(
                f"--budget: one step of {config.method} costs {cost}, but a run may "
                f"cost at most {allowed}. Raise --budget, or lower batch.global_batch_size or "
                "--rungs."
            )
        return replace(config, optim=replace(optim, max_steps=steps, epochs=OptimConfig.epochs))
    if share == 1:
        return config
    if optim.max_steps is None:
        return replace(config, optim=replace(optim, epochs=float(optim.epochs * share)))
    return replace(config, optim=replace(optim, max_steps=max(1, int(optim.max_steps * share))))


def step_price(
    config: TrainConfig, budget: Budget, folder: Path, environment: Mapping[str, str]
) -> float:
    """Return the cost of an optimizer step with ``config``, in the unit of ``budget``.

    folder, environment: see ``measured_cost``.
    """
    if budget.in_seconds:
        return measured_cost(config, "seconds", folder, environment)
    by_tokens = config.micro_batch_tokens or config.micro_batches_by_memory
    if by_tokens and config.spec.two_pass and config.replay_share == 1:
        return measured_cost(config, "passes", folder, environment)
    pairs, size = config.batch.global_batch_size, config.micro_batch_size(world=1)
    return pairs * config.spec.cost(pairs, size, config.replay_share)


def measured_cost(
    config: TrainConfig, unit: Unit, folder: Path, environment: Mapping[str, str]
) -> float:
    """Return the cost of an optimizer step with ``config``, measured in a new process.

    A file in ``folder`` keeps it, so that a repeated command plans the same numbers of steps.
    environment: variables of the process, such as the number of threads of a run.
    """
    file = folder / COSTS_FILE
    costs = read_json(file, dict[str, float]) if file.is_file() else {}
    speed = {
        name: value
        for name, value in flat(asdict(config)).items()
        if affects(name, config.method)
        and name not in ("bank.age_decay", "bank.row_weight")
        and (name == "optim.name" or not name.startswith("optim."))
    }
    threads = environment.get("OMP_NUM_THREADS")
    key = repr([unit, threads, config.method, config.run.device, *speed.items()])
    if key not in costs:
        print(
            f"measuring the {unit} of a step of {config.method}, "
            f"N = {config.batch.global_batch_size}",
            file=sys.stderr,
        )
        costs[key] = measure_cost(config, unit, environment)
        write_json(file, costs)
    return costs[key]


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
    rungs: list[dict[Values, float | None]] = field(default_factory=list)
    """For each rung: candidate -> dev metric, None for a failed run."""

    def alive(self) -> list[Values]:
        """Return the candidates that the next rung (round of tuning) trains.

        The first rung trains all candidates. A later rung trains the best candidates of the
        previous rung; the list is then sorted by dev metric, the best first.
        """
        if not self.rungs:
            return list(self.variant.candidates)
        scores = {key: score for key, score in self.rungs[-1].items() if score is not None}
        # stable: candidates with equal scores keep their order
        best = sorted(scores, key=lambda candidate: -scores[candidate])
        return best[: survivors(len(self.rungs[-1]))]

    @property
    def chosen(self) -> Values | None:
        """Best candidate of the last rung. None if all runs of the last rung failed."""
        return next(iter(self.alive()), None) if self.rungs else None

    def edges(self) -> list[str]:
        """Return the settings whose chosen value is the lowest or highest number that was tried."""
        found = []
        for name, value in self.chosen or ():
            choices = [dict(candidate) for candidate in self.variant.candidates]
            with suppress(ValueError):  # not a number
                tried = {float(choice[name]) for choice in choices if name in choice}
                if len(tried) > 1 and float(value) in (min(tried), max(tried)):
                    found.append(name)
        return found


def tune(
    tuned: list[Tuned],
    train: Callable[[list[tuple[Variant, Values, Fraction]]], list[float | None]],
) -> None:
    """Run all rungs of all variants. Save the dev metrics in ``tuned``.

    train: function that trains candidates of the variants, each for its share of the budget. It
    returns the dev metric of each run, or None for a failed run. The same rung of all variants is
    trained in one call, so that several devices have enough work.
    """
    for number_of_rung in range(max((len(each.shares) for each in tuned), default=0)):
        current = [each for each in tuned if len(each.shares) > number_of_rung]
        runs = [(each, candidate) for each in current for candidate in each.alive()]
        scores = train(
            [(each.variant, candidate, each.shares[number_of_rung]) for each, candidate in runs]
        )
        for each in current:
            each.rungs.append({})
        for (each, candidate), score in zip(runs, scores, strict=True):
            each.rungs[-1][candidate] = score


def tuning_section(tuned: list[Tuned], metric: str) -> Section:
    """Return a section of the report: the dev metric of each combination by rung."""
    shares = sorted({share for each in tuned for share in each.shares})
    rows = []
    for each in tuned:
        rungs = dict(zip(each.shares, each.rungs, strict=True))
        for candidate in each.variant.candidates:
            scores = [number(rungs.get(share, {}).get(candidate)) for share in shares]
            values = ", ".join(f"{name}={value}" for name, value in candidate) or MISSING
            mark = ""
            if candidate == each.chosen:
                mark = "chosen" + "".join(f", {name} at the edge" for name in each.edges())
            rows.append([each.variant.label, values, *scores, mark])
    heads = [f"{share} of the budget" if share < 1 else "full budget" for share in shares]
    note = (
        f"The numbers are {metric} on dev with the first seed. All seeds use the chosen values; "
        "the test data are not used to choose. The best quarter of a column's combinations (at "
        "least two) are trained again from the start, with more steps. The next column shows "
        "them. A combination without a number was not trained, or its run failed. A setting at the "
        "edge has the lowest or highest value that was tried: a wider range may be better."
    )
    return Section("Tuning", [Table(["setting", "values", *heads, ""], rows)], [note])
