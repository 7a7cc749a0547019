"""The tests against scipy's own, an enumeration by hand, published steps, and data without any
difference."""

import itertools

import numpy as np
import pytest
from scipy import stats

from contaccum.errors import InputError
from contaccum.evaluation.significance import (
    Comparison,
    compare,
    compared_runs,
    holm,
    mean_interval,
    over_both,
    permutation_test,
    render_comparison,
    t_test,
)


def by_hand(differences) -> float:
    """All sign flips, one by one."""
    flips = [
        abs(sum(s * d for s, d in zip(signs, differences, strict=True)))
        for signs in itertools.product((1, -1), repeat=len(differences))
    ]
    return sum(flip >= abs(sum(differences)) - 1e-12 for flip in flips) / len(flips)


@pytest.mark.parametrize("size", [1, 9])
def test_few_queries_are_permuted_exactly(size):
    differences = np.random.default_rng(size).normal(0.3, 1, size).round(1)
    assert permutation_test(differences) == pytest.approx(by_hand(differences))
    assert permutation_test(differences, seed=1) == permutation_test(differences)


def test_many_queries_are_drawn_as_scipy_draws_them():
    one, two = np.random.default_rng(0).normal([[0.1], [0.0]], 1, (2, 200))
    ours = permutation_test(one - two)
    peer = stats.permutation_test(
        (one, two),
        lambda a, b, axis: (a - b).mean(axis),
        permutation_type="samples",
        n_resamples=9_999,
        rng=5,
    )
    assert ours == pytest.approx(peer.pvalue, abs=0.03)
    assert permutation_test(one - two, seed=0) == ours != permutation_test(one - two, seed=1)


def test_t_is_scipys_paired_t():
    one, two = np.random.default_rng(0).normal([[0.2], [0.0]], 1, (2, 30))
    peer = stats.ttest_rel(one, two)
    assert t_test(one - two) == pytest.approx((peer.statistic, peer.pvalue))


def test_interval_of_a_mean_is_scipys_bootstrap_and_narrows_with_more_queries():
    values = np.random.default_rng(0).beta(0.5, 0.3, 200)
    peer = stats.bootstrap((values,), np.mean, method="percentile", n_resamples=20_000, rng=1)
    low, high = mean_interval(values)
    assert (low, high) == pytest.approx(tuple(peer.confidence_interval), abs=0.005)
    narrow = mean_interval(np.tile(values, 4))
    assert narrow[1] - narrow[0] == pytest.approx((high - low) / 2, rel=0.1)
    assert mean_interval([0.25]) == (0.25, 0.25)


def test_no_difference_at_all_is_no_evidence():
    assert permutation_test([0.0] * 20) == 1
    assert t_test([0.0] * 20) == (0, 1)
    assert over_both(np.zeros((3, 20))) == (1, 0)
    assert over_both([[0.5], [0.6]]) == (1, float("inf"))
    assert t_test([0.5])[1] == 1


def test_rounding_errors_of_means_over_seeds_are_no_differences():
    values = np.random.default_rng(0).random((5, 30)).round(4)
    # the same values in another order of seeds
    shuffled = np.random.default_rng(1).permuted(values, axis=0)
    assert np.any(values.mean(0) != shuffled.mean(0))
    ours, theirs = (
        {
            seed: {str(query): {"mrr@10": value} for query, value in enumerate(row)}
            for seed, row in enumerate(each)
        }
        for each in (values, shuffled)
    )
    found = compare(ours, theirs, "mrr@10")
    assert (found.difference, found.effect, found.wins, found.losses) == (0, 0, 0, 0)
    assert (found.p_permutation, found.p_t, found.p_both) == (1, 1, 1)


def test_holm_by_hand():
    """Sorted 0.01, 0.02, 0.03, 0.04 times 4, 3, 2, 1 is 0.04, 0.06, 0.06, 0.04: each at least the
    one before."""
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.5, 0.6]) == [1, 1]
    assert holm([0.2]) == [0.2]
    assert holm([]) == []


def min_f(over_queries: float, over_seeds: float, queries: int, seeds: int) -> float:
    """p of Clark's min F', from the two values of t^2."""
    both = over_queries + over_seeds
    freedom = both**2 / (over_queries**2 / (seeds - 1) + over_seeds**2 / (queries - 1))
    return stats.f.sf(over_queries * over_seeds / both, 1, freedom)


def test_p_over_both_by_hand():
    """Means 1, 3, 2, 2 of one side (t^2 = 24) and 1.5, 2.5 of the other (t^2 = 16)."""
    differences = np.array([[0.5, 2.5, 1.5, 1.5], [1.5, 3.5, 2.5, 2.5]])
    four_seeds = over_both(differences.T).p
    assert four_seeds == pytest.approx(min_f(16.0, 24.0, queries=2, seeds=4))
    assert four_seeds > t_test(differences.mean(0))[1]
    # with two seeds, the t-test over them has the larger p
    two_seeds = over_both(differences)
    assert two_seeds.p == pytest.approx(2 * stats.t.sf(4.0, 1))
    assert two_seeds.p > min_f(24.0, 16.0, queries=4, seeds=2)
    assert two_seeds.half_interval == pytest.approx(stats.t.ppf(0.975, 1) * 2 / 4)  # mean 2, t 4


def test_the_interval_over_both_excludes_0_if_p_says_so():
    rng = np.random.default_rng(5)
    seen = set()
    for number in range(200):
        seeds = 2 + number % 3
        values = rng.normal(0.2, 1, (seeds, 30)) + rng.normal(0, 0.1, (seeds, 1))
        p, half = over_both(values)
        assert (abs(values.mean()) > half) == (p < 0.05)
        seen.add(p < 0.05)
    assert seen == {True, False}


def test_only_the_seeds_of_both_systems_count():
    """Two systems are equal seed by seed; one has two more seeds, which were lucky."""
    rng = np.random.default_rng(3)
    three, lucky = system(rng, 0, 3), system(rng, 0.3, 5)
    equal = compare(three, {**lucky, **three}, "ndcg@10")
    assert (equal.difference, equal.p_both, equal.p_permutation) == (0, 1, 1)
    assert (equal.pairs, equal.both) == (3, (0, 0))
    other = system(rng, 0.1, 3)
    found = compare(other, {**lucky, **three}, "ndcg@10")
    assert found == compare(other, three, "ndcg@10") != compare(other, lucky, "ndcg@10")
    # a system with one run is compared with the mean of all runs of the other
    one = compare({0: other[0]}, three, "ndcg@10")
    every = [compare({0: other[0]}, {0: values}, "ndcg@10") for values in three.values()]
    assert one.difference == pytest.approx(np.mean([single.difference for single in every]))
    assert one.pairs == 1


def test_two_queries_are_not_enough_for_a_small_p():
    """Equal differences of both queries and both seeds; of 4 sign flips, 2 are as far from 0."""
    ours = {seed: {query: {"ndcg@10": 0.5} for query in "ab"} for seed in range(2)}
    theirs = {seed: {query: {"ndcg@10": 0.3} for query in "ab"} for seed in range(2)}
    assert compare(ours, theirs, "ndcg@10").p_both == 0.5


def system(rng, mean: float, seeds: int, queries: int = 60, spread: float = 0.0) -> dict:
    hard = np.random.default_rng(7).normal(0, 1, queries)  # what a query brings to every system
    return {
        seed: {
            f"q{i}": {"ndcg@10": float(value)}
            for i, value in enumerate(
                hard + mean + rng.normal(0, spread) + rng.normal(0, 0.3, queries)
            )
        }
        for seed in range(seeds)
    }


@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_false_alarms_are_as_rare_as_the_level_says(seeds):
    """Systems of equal worth, 1,000 pairs of them.

    Where seeds differ in luck, that luck passes for a difference in the tests over queries, and
    with few seeds too often in min F'."""
    rng = np.random.default_rng(1)
    equal = rng.normal(0, 1, (1000, seeds, 60))
    assert np.mean([t_test(values.mean(0))[1] < 0.05 for values in equal]) < 0.07
    lucky = equal + rng.normal(0, 0.5, (1000, seeds, 1))
    for level, most in ((0.05, 0.07), (0.01, 0.02)):
        assert np.mean([over_both(values).p < level for values in lucky]) < most
    assert np.mean([t_test(values.mean(0))[1] < 0.05 for values in lucky]) > 0.3
    if seeds < 5:
        alone = [
            min_f(t_test(values.mean(0))[0] ** 2, t_test(values.mean(1))[0] ** 2, 60, seeds) < 0.01
            for values in lucky
        ]
        assert np.mean(alone) > 0.03
    few = equal[:200, 0, :10]
    assert np.mean([permutation_test(values) < 0.05 for values in few]) < 0.1


def test_a_real_difference_is_found_and_measured():
    rng = np.random.default_rng(2)
    found = compare(system(rng, 0.5, 3), system(rng, 0, 3), "ndcg@10")
    assert found.low < 0.5 < found.high
    assert found.low < found.difference < found.high
    assert max(found.p_permutation, found.p_t, found.p_both) < 0.01
    assert found.effect == pytest.approx(0.5 / (0.3 * (2 / 3) ** 0.5), rel=0.3)
    assert found.wins + found.losses == found.queries == 60
    back = compare(system(rng, 0, 3), system(rng, 0.5, 3), "ndcg@10")
    assert back.difference < 0


def test_a_system_without_seeds_stands_against_each_seed():
    rng = np.random.default_rng(3)
    seedless = {None: system(rng, 0, 1)[0]}
    assert compare(system(rng, 0.5, 4), seedless, "ndcg@10").p_both < 0.05
    assert compare(seedless, seedless, "ndcg@10").p_both is None
    # one run of a system: its luck is unknown
    assert compare(system(rng, 0.5, 4), system(rng, 0, 1), "ndcg@10").p_both is None


def test_systems_with_other_seeds_are_compared_over_seeds_too():
    """Equal systems, whose seeds differ in luck."""
    rng = np.random.default_rng(5)
    small = []
    for _ in range(40):
        first, second = (system(rng, 0, 3, spread=0.3) for _ in range(2))
        moved = {seed + 3: values for seed, values in second.items()}
        small.append(compare(first, moved, "ndcg@10").p_both < 0.05)
    assert np.mean(small) < 0.2
    assert compare(first, moved, "ndcg@10").p_both == compare(first, second, "ndcg@10").p_both


def test_other_queries_and_unknown_measures_are_refused():
    rng = np.random.default_rng(4)
    one, two = system(rng, 0, 1), system(rng, 0, 1)
    del two[0]["q5"]
    with pytest.raises(
        InputError, match=r"has 60 queries, another has 59\. For example, query .q5. is in only one"
    ):
        compare(one, two, "ndcg@10")
    with pytest.raises(InputError, match="metric 'top20' was not computed; choose one of ndcg@10"):
        compare(one, one, "top20")


@pytest.mark.parametrize(
    ("p", "shown"),
    [
        (0.0, "< 0.0001"),
        (9.9e-5, "< 0.0001"),
        (0.0001, "= 0.0001"),
        (0.04999, "= 0.0500"),
        (1.0, "= 1.0000"),
    ],
)
def test_a_small_p_is_shown_as_a_bound(p, shown):
    found = Comparison(0.1, 0.0, 0.2, 1.0, 5, 4, 10, p, p, 1, None, None)
    assert f"p {shown} by permutation, p {shown} by t-test)" in render_comparison(
        found, "ndcg@10", "other"
    )


@pytest.mark.parametrize(
    ("ours", "theirs", "compared"),
    [
        ({0: "a", 1: "b", 2: "c"}, {1: "x", 0: "y"}, (["a", "b"], ["y", "x"])),
        ({0: "a", 1: "b"}, {2: "x", 3: "y", 4: "z"}, (["a", "b"], ["x", "y"])),
        ({0: "a", 1: "b"}, {0: "x"}, (["a", "b"], ["x"])),
        ({0: "a", 1: "b"}, {None: "x"}, (["a", "b"], ["x", "x"])),
    ],
)
def test_only_pairs_of_runs_are_compared(ours, theirs, compared):
    assert compared_runs(ours, theirs) == compared
