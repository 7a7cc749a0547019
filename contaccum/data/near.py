"""Order the examples so that each step gets examples with similar vectors.

The examples are divided by bisection into groups, one for each step. Balanced 2-means of a sample gives a direction. The
examples are sorted by their inner product with this direction and split in two; each half is then split in the same way.
Sources: steps of one cluster, Hofstaetter et al. 2021 (arXiv 2104.06967); steps of similar examples as hard negatives of each
other, Thirukovalluru et al. 2025 (arXiv 2505.11293).
"""

import numpy as np

SAMPLE = 1024  # number of examples that decide the direction of a split
ROUNDS = 4  # number of iterations of 2-means
LEVELS = 1023  # largest absolute value in a rounded vector
BLOCK = 65_536  # number of vectors to multiply at once


def rounded(vectors: np.ndarray) -> np.ndarray:
    """Scale vectors (n, d) and round them to integers from -LEVELS to LEVELS: (n, d) int16.

    Inner products are then integers below 2^53, which float64 adds without rounding, so every machine finds the same order.
    """
    largest = float(np.abs(vectors).max(initial=0)) or 1.0
    blocks = (vectors[start : start + BLOCK] for start in range(0, len(vectors), BLOCK))
    return np.concatenate([np.rint(block * (LEVELS / largest)).astype(np.int16) for block in blocks])


def near_order(vectors: np.ndarray, random: np.random.Generator, size: int, first: int) -> np.ndarray:
    """Return an order of n examples in which the examples of each group have similar vectors: (n,) int64.

    vectors: (n, d) from ``rounded``. size: number of examples of a group. first: number of examples that complete the last step
    of the previous epoch. They come first. The full groups follow in random order, then the other examples as a smaller group.
    """
    first = min(first, len(vectors))
    full, last = divmod(len(vectors) - first, size)
    sizes = [first] * (first > 0) + [size] * full + [last] * (last > 0)
    groups = _bisected(vectors, np.arange(len(vectors)), sizes, random)
    start = int(first > 0)
    middle = [groups[start + number] for number in random.permutation(full)]
    return np.concatenate([*groups[:start], *middle, *groups[start + full :]])


def _bisected(vectors: np.ndarray, rows: np.ndarray, sizes: list[int], random: np.random.Generator) -> list[np.ndarray]:
    """Divide ``rows`` into groups of the given sizes."""
    if len(sizes) == 1:
        return [rows]
    direction = _direction(vectors[random.permutation(rows)[:SAMPLE]].astype(np.float64), random)
    products = [vectors[rows[start : start + BLOCK]] @ direction for start in range(0, len(rows), BLOCK)]
    rows = rows[np.argsort(np.concatenate(products), kind="stable")]
    half = len(sizes) // 2
    count = sum(sizes[:half])
    left = _bisected(vectors, rows[:count], sizes[:half], random)
    return left + _bisected(vectors, rows[count:], sizes[half:], random)


def _direction(sample: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Divide a sample (s, d) by balanced 2-means. Return the difference of the sums of both halves, (d,)."""
    one, other = random.choice(len(sample), 2, replace=False)
    direction = sample[one] - sample[other]
    half = len(sample) // 2
    for _ in range(ROUNDS):
        order = np.argsort(sample @ direction, kind="stable")
        direction = sample[order[-half:]].sum(0) - sample[order[:half]].sum(0)
    return direction
