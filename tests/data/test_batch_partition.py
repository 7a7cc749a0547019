"""Partition by tokens against every possible partition of the sorted pairs, in one process and
several."""

from itertools import combinations

import numpy as np
import pytest

from contaccum.data.batches import partition_by_tokens


def cost(queries, passages) -> int:
    """Return the padded tokens of one process's micro-batch."""
    return len(queries) * int(queries.max() + passages.shape[1] * passages.max())


def lengths(pairs: int, hard: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.integers(3, 20, pairs), random.integers(3, 60, (pairs, 1 + hard))


@pytest.mark.parametrize("hard", [0, 2])
@pytest.mark.parametrize("seed", range(2))
def test_partition_has_fewest_micro_batches_and_smallest_largest(hard, seed):
    queries, passages = lengths(10, hard, seed)
    budget = 3 * (20 + 60 * (1 + hard))
    cut = partition_by_tokens(queries, passages, budget, world=1)
    found = [cost(queries[part], passages[part]) for part in cut]
    assert max(found) <= budget
    assert sorted(np.concatenate(cut)) == list(range(10))
    order = sorted(range(10), key=lambda n: (-passages[n].max(), -queries[n]))
    assert np.concatenate(cut).tolist() == order
    tried = []
    for count in range(len(cut)):  # every way to set this many bounds
        for bounds in combinations(range(1, 10), count):
            parts = np.split(np.array(order), bounds)
            tried.append((len(parts), max(cost(queries[part], passages[part]) for part in parts)))
    assert min(found for found in tried if found[1] <= budget) == (len(cut), max(found))


def test_processes_get_equally_many_pairs_of_similar_length():
    queries, passages = lengths(24, 1, 0)
    budget = 500
    cut = partition_by_tokens(queries, passages, budget, world=2)
    assert sorted(np.concatenate(cut)) == list(range(24))
    for part in cut:
        first, second = np.split(part, 2)
        for own in (first, second):
            assert cost(queries[own], passages[own]) <= budget
        # neighbours in the sorted order: process 1's pair is the next shorter one
        assert (passages[first].max(1) >= passages[second].max(1)).all()
        assert (passages[first].max(1)[1:] <= passages[second].max(1)[:-1]).all()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("seed", range(2))
def test_partition_without_padding(world, seed):
    """Against every partition of the pairs in their order."""
    queries, passages = lengths(10, 1, seed)
    tokens, budget = queries + passages.sum(1), 300
    cut = partition_by_tokens(queries, passages, budget, world, padded=False)
    rows = [part.reshape(world, -1).T for part in cut]
    assert np.concatenate(rows).reshape(-1).tolist() == list(range(10))
    by_row = tokens.reshape(-1, world).max(1)  # the process with the longest pair decides

    def largest(bounds) -> int:
        return max(int(part.sum()) for part in np.split(by_row, bounds))

    tried = [
        (count + 1, largest(bounds))
        for count in range(len(by_row))
        for bounds in combinations(range(1, len(by_row)), count)
    ]
    ends = np.cumsum([len(part) for part in rows])[:-1]
    assert (len(cut), largest(ends)) == min(each for each in tried if each[1] <= budget)


def test_a_step_of_65536_pairs_is_partitioned_in_seconds():
    queries, passages = lengths(65536, 0, 0)
    cut = partition_by_tokens(queries, passages, 640, world=1)
    assert sum(map(len, cut)) == 65536
