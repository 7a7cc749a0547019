"""Choose values of settings by their dev metric. Successive halving is cheaper than training all combinations fully.

Tuning has several rounds, called rungs. In the first rung, all combinations train for a short time. In each later rung, the best
quarter of the combinations trains again from the start, LONGER times as long. In the last rung, the remaining combinations train
with the full budget. By default, at most FINALISTS combinations remain. The learning rate schedule of each run ends with that
run. All runs use the first seed. Source: Jamieson, Talwalkar 2016, arXiv 1502.07943.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from contaccum.config import train_settings
from contaccum.experiments.settings import Values, Variant, named

LONGER = 3
QUARTER = 4
FINALISTS = 3

Scores = dict[Values, float]


def rung_shares(candidates: int, rungs: int | None) -> list[Fraction]:
    """Return for each rung the share of the full budget that one run gets. The share of the last rung is 1.

    rungs: number of rungs. Default: the smallest number with at most FINALISTS candidates in the last rung. Example: 30
    candidates need three rungs. Together these rungs cost 30/9 + 8/3 + 2 = 8 full runs.
    """
    if rungs is None:
        rungs, left = 1, candidates
        while left > FINALISTS:
            left, rungs = survivors(left), rungs + 1
    return [Fraction(1, LONGER**rung) for rung in reversed(range(rungs))]


def survivors(candidates: int) -> int:
    """Return the number of candidates in the next rung: a quarter, rounded up, but at least two (one if there is only one)."""
    return min(candidates, max(2, -(-candidates // QUARTER)))


@dataclass
class Tuned:
    """Tuning of one variant: the dev metrics of its candidates in each rung, and the chosen candidate."""

    variant: Variant
    shares: list[Fraction]
    rungs: list[Scores] = field(default_factory=list)
    """For each rung: candidate -> dev metric. Candidates with failed runs are missing."""
    trained: list[int] = field(default_factory=list)
    """Number of candidates that each rung trained."""
    invalid: dict[str, str] = field(default_factory=dict)
    """Name of a candidate that cannot be trained -> reason."""

    def alive(self) -> list[Values]:
        """Return the candidates of the next rung: first all candidates, later the best ones of the rung before, best first."""
        if not self.rungs:
            return list(self.variant.candidates)
        scores = self.rungs[-1]
        best = sorted(scores, key=lambda each: -scores[each])  # stable: candidates with equal scores keep their order
        return best[: survivors(self.trained[-1])]

    @property
    def chosen(self) -> Values | None:
        """Best candidate of the last rung. None if all runs of the last rung failed."""
        return max(self.rungs[-1], key=self.rungs[-1].__getitem__, default=None)

    @property
    def full_runs(self) -> Fraction:
        """Cost of tuning. A run with the full budget costs 1."""
        return sum((count * share for count, share in zip(self.trained, self.shares, strict=True)), Fraction(0))

    def edges(self) -> list[str]:
        """Return the names of tuned settings whose chosen number is the lowest or the highest that was tried.

        A number at the limit of its setting does not count, because no wider range is possible.
        """
        found = []
        for name, value in self.chosen or ():
            tried = {
                number for each in self.variant.candidates if (number := _number(dict(each).get(name))) is not None
            }
            own, spec = _number(value), train_settings()[name]
            bounds = (spec.at_least, spec.at_most)
            if len(tried) > 1 and own in (min(tried), max(tried)) and own not in bounds:
                found.append(name)
        return found

    def as_json(self, metric: str) -> dict[str, Any]:
        """Return the entry of this variant in compare.json. ``metric`` is the name of the dev metric."""
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
                    "dev": {str(share): rung.get(each) for share, rung in zip(self.shares, self.rungs, strict=True)},
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


def tune(tuned: list[Tuned], train: Callable[[list[tuple[Variant, Values, Fraction]]], list[float | None]]) -> None:
    """Run all rungs of all variants. Save the dev metrics in ``tuned``.

    train: function that trains candidates of the variants, each for its share of the budget. It returns the dev metric of each
    run, or None for a failed run. The same rung of all variants is trained in one call, so that several devices have enough work.
    """
    for number in range(max((len(each.shares) for each in tuned), default=0)):
        current = [each for each in tuned if len(each.shares) > number]
        runs = [(each, candidate) for each in current for candidate in each.alive()]
        scores = train([(each.variant, candidate, each.shares[number]) for each, candidate in runs])
        for each in current:
            mine = {candidate: score for (owner, candidate), score in zip(runs, scores, strict=True) if owner is each}
            each.trained.append(len(mine))
            each.rungs.append({candidate: score for candidate, score in mine.items() if score is not None})


def run_name(variant: Variant, candidate: Values, seed: int, share: Fraction) -> str:
    """Return the name of a training run, such as ``cont_accum-size=64-seed0-1of9``."""
    part = "" if share == 1 else f"-{share.numerator}of{share.denominator}"
    return f"{named(variant.label, candidate)}-seed{seed}{part}"
