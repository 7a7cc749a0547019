"""Test whether two systems differ on the same queries: paired tests, effect size, Holm.

``mean_interval`` is for a single system: the interval of its mean over queries.

A system may be trained with several random seeds. The values of one query with different seeds are
not independent, so they are averaged first. ``permutation_test`` and ``t_test`` then get one
difference per query. The two tests show whether the difference between these trained models holds
for other queries. ``over_both`` shows whether it holds for other queries and other seeds. If one
system has more seeds than the other, only the seeds of both count (``compare``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from contaccum.errors import InputError
from contaccum.runtime.units import counted

RESAMPLES = 9999
"""Number of random sign flips. With n <= EXACT queries, all 2^n sign flips are used instead."""
EXACT = 13  # 2^13 is at most RESAMPLES
BOOTSTRAP_SAMPLES = 2000
BATCH = 256  # number of sign flips in memory at a time
# metrics are at most 1, so a smaller difference is a rounding error of means over seeds
ROUNDING = 1e-12

QueryScores = Mapping[str, Mapping[str, float]]
"""Values of one trained model: query id -> measure -> value, as in ``per_query`` of
metrics.json.
"""
T = TypeVar("T")


@dataclass(frozen=True)
class Comparison:
    """Result of comparing two systems on the same queries.

    A difference is the first system minus the second.
    """

    difference: float
    """Mean difference over queries. For each query, the values of a system are first averaged over
    seeds."""
    low: float
    """Lower end of the 95 % confidence interval of ``difference``, over queries, by Student's t."""
    high: float  # upper end of the confidence interval
    effect: float
    """Cohen's d for paired values: mean of the differences / their standard deviation. 0 if all
    differences are equal."""
    wins: int  # number of queries on which the first system is better
    losses: int  # number of queries on which the first system is worse
    queries: int  # number of queries
    p_permutation: float  # two-sided p of the permutation test over queries
    p_t: float  # two-sided p of the t-test over queries
    pairs: int
    """Number of pairs of runs that were compared. 1: a system has only one run."""
    p_both: float | None
    """Two-sided p over queries and seeds, see ``over_both``. With so few queries that
    ``p_permutation`` is exact, at least that. None: a system has only one run."""
    both: tuple[float, float] | None
    """95 % confidence interval of ``difference`` over queries and seeds, see ``over_both``. None:
    a system has only one run."""

    @property
    def p(self) -> float:
        """Two-sided p over queries and seeds; over queries if a system has only one run."""
        return self.p_permutation if self.p_both is None else self.p_both


def mean_interval(values: ArrayLike) -> tuple[float, float]:
    """Return a 95 % confidence interval of a mean over queries. values: one value per query, (n,).

    Percentile bootstrap: the interval contains 95 % of the means of random samples of n queries,
    drawn with replacement. Source: Efron 1979.
    """
    known = np.asarray(values, dtype=np.float64)
    random = np.random.default_rng(0)
    means = [
        known[random.integers(len(known), size=len(known))].mean() for _ in range(BOOTSTRAP_SAMPLES)
    ]
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def permutation_test(differences: ArrayLike, seed: int = 0) -> float:
    """Return the two-sided p of the paired permutation test. differences: per query, (n,).

    A flip changes the signs of some differences. Two shares of the flips are computed: those whose
    mean is at least as high as that of the given differences, and those whose mean is at most as
    high. p is twice the smaller share, but at most 1. With up to 13 differences, the test uses all
    flips, and p is exact. With more, it estimates p from 9,999 random flips. The given differences,
    with no sign changed, count as one more flip. seed: seed of the random flips. Sources: Fisher
    1935; for retrieval, Smucker, Allan and Carterette 2007.
    """
    values = np.asarray(differences, dtype=np.float64)
    if not np.any(values) or len(values) == 1:  # with one value, every flip is equally far from 0
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
    """Return t and the two-sided p of Student's paired t-test.

    If all differences are 0, return (0, 1). differences: (n,).
    """
    values = np.asarray(differences, dtype=np.float64)
    if not np.any(np.abs(values) >= ROUNDING):
        return 0.0, 1.0
    if len(values) < 2:
        return float("nan"), 1.0
    if np.ptp(values) < ROUNDING:  # the standard deviation is 0
        return float(np.copysign(np.inf, values[0])), 0.0
    found = stats.ttest_1samp(values, 0.0)
    return float(found.statistic), float(found.pvalue)


class OverBoth(NamedTuple):
    """Result of a test that treats seeds and queries as random."""

    p: float  # two-sided
    half_interval: float  # half of the width of the 95 % confidence interval of the mean


def over_both(differences: ArrayLike) -> OverBoth:
    """Test a mean over seeds and queries, both random. differences: (seeds, queries).

    The result is that of Clark's min F' test or that of a t-test on the seeds' means: the larger p,
    and the wider interval. With two or three seeds, min F' alone is too often small: of equal
    systems that differ mainly by their seeds, it calls 13 % and 9 % different at the level 0.05.

    The variance of the mean is that over queries, v1, of the queries' means over seeds, plus that
    over seeds, v2, of the seeds' means over queries. It has j = (v1 + v2)^2 / (v1^2 / (queries - 1)
    + v2^2 / (seeds - 1)) degrees of freedom. The squared t of this test is min F' = F1 F2 / (F1 +
    F2), with the squared t of the two single tests. Source: Clark 1973, "The
    language-as-fixed-effect fallacy".
    """
    values = np.asarray(differences, dtype=np.float64)
    seeds, queries = values.shape
    if queries < 2:  # nothing is known about other queries
        return OverBoth(1.0, float("inf"))
    mean = float(values.mean())
    over_queries = _variance_of_mean(values.mean(0))
    over_seeds = _variance_of_mean(values.mean(1))
    total = over_queries + over_seeds
    if total == 0:  # all differences are equal
        return OverBoth(float(abs(mean) < ROUNDING), 0.0)
    freedom = total**2 / (over_queries**2 / (queries - 1) + over_seeds**2 / (seeds - 1))
    p, half = 0.0, 0.0
    for variance, degrees in ((total, freedom), (over_seeds, seeds - 1)):
        if variance:
            error = variance**0.5
            p = max(p, 2 * float(stats.t.sf(abs(mean) / error, degrees)))
            half = max(half, float(stats.t.ppf(0.975, degrees)) * error)
    return OverBoth(p, half)


def _variance_of_mean(values: np.ndarray) -> float:
    """Return the squared standard error of the mean of n values, 0 if they are all equal."""
    return float(values.var(ddof=1)) / len(values) if np.ptp(values) >= ROUNDING else 0.0


def holm(values: Sequence[float]) -> list[float]:
    """Correct the p values of several tests by Holm's step-down method (Holm 1979).

    Keep the order of ``values``.
    """
    order = np.argsort(values, kind="stable")
    adjusted, highest = [0.0] * len(values), 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, (len(values) - rank) * values[index]))
        adjusted[index] = highest
    return adjusted


def compared_runs(
    ours: Mapping[int | None, T], theirs: Mapping[int | None, T]
) -> tuple[list[T], list[T]]:
    """Return the runs of two systems that ``compare`` compares, pair by pair.

    If a system has a single run, return all runs of both.
    """
    # a system without seeds (such as BM25) is paired with every seed of the other system
    if None in ours:
        ours = dict.fromkeys(theirs, ours[None])
    elif None in theirs:
        theirs = dict.fromkeys(ours, theirs[None])
    pairs = [(ours[seed], theirs[seed]) for seed in ours if seed in theirs]
    if len(pairs) < 2:
        pairs = list(zip(ours.values(), theirs.values(), strict=False))
    if len(pairs) < 2:
        return list(ours.values()), list(theirs.values())
    return [run for run, _ in pairs], [run for _, run in pairs]


def compare(
    ours: Mapping[int | None, QueryScores], theirs: Mapping[int | None, QueryScores], measure: str
) -> Comparison:
    """Compare two systems on the same queries by one measure, such as ndcg@10.

    ours, theirs: training seed -> values of every query. A system without seeds has one key: None.
    Runs with the same seed form a pair; if there are fewer than two such pairs, any two runs do.
    Other runs do not count: their luck would be in the difference, but not in its error. A system
    with a single run is compared with the mean of the other's runs.

    Raises InputError if the systems were scored on different queries, or if the values lack the
    measure.
    """
    queries = sorted(next(iter(ours.values())))
    # seed -> values of the queries, (queries,)
    one = {seed: _values(scores, queries, measure) for seed, scores in ours.items()}
    two = {seed: _values(scores, queries, measure) for seed, scores in theirs.items()}
    runs, others = map(np.array, compared_runs(one, two))  # (runs, queries)
    if len(runs) != len(others):  # a system with one run is compared with the mean of the other's
        runs, others = runs.mean(0, keepdims=True), others.mean(0, keepdims=True)
    by_pair = runs - others  # (pairs, queries)
    differences = by_pair.mean(0)
    differences[np.abs(differences) < ROUNDING] = 0
    mean = float(differences.mean())
    deviation = float(differences.std(ddof=1)) if np.ptp(differences) >= ROUNDING else 0.0
    half_interval = float("inf")
    if len(queries) > 1:
        half_interval = (
            float(stats.t.ppf(0.975, len(queries) - 1)) * deviation / len(queries) ** 0.5
        )
    _, p_t = t_test(differences)
    tested = over_both(by_pair) if len(by_pair) > 1 else None
    p_permutation = permutation_test(differences)
    return Comparison(
        difference=mean,
        low=mean - half_interval,
        high=mean + half_interval,
        effect=mean / deviation if deviation else 0.0,
        wins=int((differences > 0).sum()),
        losses=int((differences < 0).sum()),
        queries=len(queries),
        p_permutation=p_permutation,
        p_t=p_t,
        pairs=len(by_pair),
        p_both=tested and max(tested.p, p_permutation if len(queries) <= EXACT else 0.0),
        both=tested and (mean - tested.half_interval, mean + tested.half_interval),
    )


def render_comparison(found: Comparison, measure: str, against: str) -> str:
    """Return a comparison as one line of text. against: name of the second system."""
    return (
        f"{measure} {found.difference:+.4f} against {against} (95 % interval {found.low:+.4f} to "
        f"{found.high:+.4f}; better on {found.wins} and worse on {found.losses} of "
        f"{counted(found.queries, 'query')}; p {_compared(found.p_permutation)} by permutation, "
        f"p {_compared(found.p_t)} by t-test)"
    )


def _compared(p: float) -> str:
    return "< 0.0001" if p < 0.0001 else f"= {p:.4f}"


def _values(scores: QueryScores, queries: list[str], measure: str) -> np.ndarray:
    if sorted(scores) != queries:
        other = next(iter(set(scores) ^ set(queries)))
        raise InputError(
            "the runs were evaluated on different queries: one run has "
            f"{counted(len(queries), 'query')}, another has {len(scores)}. For example, query "
            f"{other!r} is in only one of these two runs."
        )
    for known in scores.values():
        if measure not in known:
            raise InputError(
                f"metric {measure!r} was not computed; choose one of {', '.join(known)}"
            )
    return np.array([scores[query][measure] for query in queries])
