"""Whether one system is better than another on the same queries: paired tests, effect size, and Holm's correction.

Two things vary between repetitions of an experiment: the queries and the seeds. What is tested per query is the difference of
the means over seeds, one number a query, because values of one query under several seeds are no independent observations.
Such a test says whether the difference would hold on other queries of the kind, for these trained models. Whether it
would hold for other seeds too is asked by ``p_both``, which counts both as drawn at random.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from contaccum.errors import InputError

RESAMPLES = 9999
"""Sign flips drawn where all of them are too many; all 2^n are taken up to 13 queries."""
BATCH = 256  # flips held at once

Scores = Mapping[str, Mapping[str, float]]
"""query id -> measure -> value: ``per_query`` of a metrics.json."""


@dataclass(frozen=True)
class Comparison:
    """One system less another, over the same n queries."""

    difference: float
    """Mean over queries of the difference of the means over seeds."""
    low: float
    """Lower end of the 95 % interval of ``difference`` over queries (Student's t)."""
    high: float
    """Upper end."""
    effect: float
    """Cohen's d for paired values: mean of the differences over their standard deviation; 0 where no query differs."""
    wins: int
    """Queries on which the first system is better."""
    losses: int
    """Queries on which the second one is."""
    queries: int
    p_permutation: float
    """Two-sided, over queries."""
    p_t: float
    """Two-sided, over queries."""
    p_both: float | None
    """Two-sided, over queries and seeds; None with fewer than two seeds that both systems share."""


def permutation_test(differences: ArrayLike, seed: int = 0) -> float:
    """Two-sided p of the paired permutation test: the share of sign flips of (n,) ``differences`` whose mean lies as far from 0.

    Exact for up to 13 values; beyond, 9,999 flips drawn by ``seed``, the observed one counted. Source: Fisher 1935; for
    retrieval Smucker, Allan, Carterette 2007.
    """
    values = np.asarray(differences, dtype=np.float64)
    if not np.any(values) or len(values) == 1:  # a single value and its opposite lie equally far from 0
        return 1.0
    drawn = stats.permutation_test(
        (values,),
        lambda flipped, axis: np.mean(flipped, axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=RESAMPLES,
        batch=BATCH,
        rng=np.random.default_rng(seed),
    )
    return float(drawn.pvalue)


def t_test(differences: ArrayLike) -> tuple[float, float]:
    """Student's paired t of (n,) ``differences`` and its two-sided p; (0, 1) where none differs from 0."""
    values = np.asarray(differences, dtype=np.float64)
    if not np.any(values):
        return 0.0, 1.0
    if len(values) < 2:
        return float("nan"), 1.0
    if np.ptp(values) == 0:  # the same difference everywhere: no spread to hold it against
        return float(np.copysign(np.inf, values[0])), 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # nearly equal values: t is large, which is what is meant
        found = stats.ttest_1samp(values, 0.0)
    return float(found.statistic), float(found.pvalue)


def over_both(differences: ArrayLike) -> float:
    """Two-sided p of (seeds, queries) ``differences`` when seeds and queries both count as drawn at random: min F'.

    F1 is the squared t over queries of the means over seeds, F2 that over seeds of the means over queries; then min F' =
    F1 F2 / (F1 + F2) follows F(1, j), j = (F1 + F2)^2 / (F1^2 / (seeds - 1) + F2^2 / (queries - 1)), and errs on the safe
    side. Source: Clark 1973, "The language-as-fixed-effect fallacy".
    """
    values = np.asarray(differences, dtype=np.float64)
    seeds, queries = values.shape
    first, second = t_test(values.mean(0))[0] ** 2, t_test(values.mean(1))[0] ** 2
    if not (first > 0 and second > 0):
        return 1.0
    if np.isinf(first) or np.isinf(second):  # no spread on one side: what is left is the other side's test
        return t_test(values.mean(0))[1] if np.isinf(second) else t_test(values.mean(1))[1]
    freedom = (first + second) ** 2 / (first**2 / (seeds - 1) + second**2 / (queries - 1))
    return float(stats.f.sf(first * second / (first + second), 1, freedom))


def holm(values: Sequence[float]) -> list[float]:
    """Holm's step-down correction of a family of p values: adjusted ones in the same order, each at most 1. (Holm 1979)"""
    order = np.argsort(values, kind="stable")
    adjusted, highest = [0.0] * len(values), 0.0
    for rank, place in enumerate(order):
        highest = max(highest, min(1.0, (len(values) - rank) * values[place]))
        adjusted[place] = highest
    return adjusted


def compare(ours: Mapping[int, Scores], theirs: Mapping[int, Scores], measure: str, seed: int = 0) -> Comparison:
    """Compare two systems by the values of each query, given per training seed; a system without seeds has one entry.

    seed: of the random flips. Raises InputError where the systems were not scored on the same queries, or lack the measure.
    """
    first = {number: _values(scores, measure) for number, scores in ours.items()}
    second = {number: _values(scores, measure) for number, scores in theirs.items()}
    names = sorted(next(iter(first.values())))
    for values in (*first.values(), *second.values()):
        if sorted(values) != names:
            other = next(iter(set(values) ^ set(names)))
            raise InputError(
                f"the runs were scored on {len(names)} and {len(values)} queries, {other!r} in one alone; expected the same"
            )
    one, two = (
        {number: np.array([values[name] for name in names]) for number, values in side.items()}
        for side in (first, second)
    )
    differences = np.mean(list(one.values()), axis=0) - np.mean(list(two.values()), axis=0)  # (queries,)
    _, p_t = t_test(differences)
    mean, spread = float(differences.mean()), float(differences.std(ddof=1)) if len(names) > 1 else 0.0
    reach = float(stats.t.ppf(0.975, len(names) - 1)) * spread / len(names) ** 0.5 if len(names) > 1 else float("inf")
    pairs = _pairs(one, two)
    return Comparison(
        difference=mean,
        low=mean - reach,
        high=mean + reach,
        effect=mean / spread if spread else 0.0,
        wins=int((differences > 0).sum()),
        losses=int((differences < 0).sum()),
        queries=len(names),
        p_permutation=permutation_test(differences, seed),
        p_t=p_t,
        p_both=over_both(pairs) if len(pairs) > 1 else None,
    )


def _values(scores: Scores, measure: str) -> dict[str, float]:
    try:
        return {query: values[measure] for query, values in scores.items()}
    except KeyError:
        known = ", ".join(next(iter(scores.values())))
        raise InputError(f"the metrics have no values {measure!r}, expected one of {known}") from None


def _pairs(one: dict[int, np.ndarray], two: dict[int, np.ndarray]) -> list[np.ndarray]:
    """Differences per query, for each seed that both have; a system of one entry stands against every seed of the other."""
    if len(one) == 1 and len(two) > 1:
        one = dict.fromkeys(two, next(iter(one.values())))
    elif len(two) == 1 and len(one) > 1:
        two = dict.fromkeys(one, next(iter(two.values())))
    return [one[number] - two[number] for number in sorted(one.keys() & two.keys())]
