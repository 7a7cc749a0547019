"""From the candidates that a search found for a query to its hard negatives: filters, rank window, sampling."""

from typing import NamedTuple

import numpy as np

from contaccum.errors import InputError
from contaccum.options import MineSettings

_NO_SMALLER = ("num_negatives", 1), ("range_min", 0), ("seed", 0), ("block_size", 1), ("cross_encoder_batch_size", 1)


def check(settings: MineSettings) -> None:
    """InputError naming a setting that is out of its range, or two that do not go together."""
    for name, least in _NO_SMALLER:
        if getattr(settings, name) < least:
            raise InputError(f"{name} is {getattr(settings, name)}, expected at least {least}")
    if settings.range_max < settings.range_min + settings.num_negatives:
        raise InputError(
            f"range_max is {settings.range_max}, expected at least the {settings.range_min} of range_min and the "
            f"{settings.num_negatives} of num_negatives together"
        )
    for name in ("relative_margin", "absolute_margin", "max_score", "min_score"):
        value = getattr(settings, name)
        if value is not None and not np.isfinite(value):
            raise InputError(f"{name} is {value}, expected a finite number")
    if settings.relative_margin is not None and not 0 <= settings.relative_margin <= 1:
        raise InputError(f"relative_margin is {settings.relative_margin}, expected a share between 0 and 1")
    if None not in (low := settings.min_score, high := settings.max_score) and low > high:  # type: ignore[operator]
        raise InputError(f"min_score is {low} and max_score {high}, expected them the other way round")


class Choice(NamedTuple):
    """What became of a query's candidates."""

    places: np.ndarray
    """Of the negatives among the candidates, rising, (at most num_negatives,)."""
    removed: dict[str, int]
    """How many candidates each filter took away, from what those before it had left."""


def choose(scores: np.ndarray, positives: np.ndarray, settings: MineSettings, number: int) -> Choice:
    """The hard negatives among candidates of the given scores (n,), which fall, for a query with those of its positives (P,).

    Query ``number`` of the data draws by a random stream of its own, so that a draw depends on no other query. With
    p the lowest of the positives' scores, a candidate of score s is kept where s <= p - absolute_margin,
    s <= p - relative_margin |p|, s <= max_score and s >= min_score. The relative margin is TopK-PercPos of Moreira et
    al. 2024 (NV-Retriever, arXiv 2407.15831), the absolute one its TopK-MarginPos, max_score its TopK-Abs.
    """
    exact = scores.astype(np.float64)
    lowest = float(positives.min())
    left = np.ones(len(scores), dtype=bool)
    removed = {}
    for name, sign, bound in _bounds(lowest, settings):
        fails = left & (sign * exact > sign * bound)
        removed[name] = int(fails.sum())
        left &= ~fails
    window = np.flatnonzero(left)[settings.range_min :]
    take = settings.num_negatives
    if settings.sampling_strategy == "random" and len(window) > take:
        random = np.random.Generator(np.random.Philox(np.random.SeedSequence([settings.seed, number])))
        window = np.sort(random.choice(window, take, replace=False))
    return Choice(window[:take], removed)


def _bounds(lowest: float, settings: MineSettings) -> list[tuple[str, int, float]]:
    """Name of each filter that is set, 1 for an upper and -1 for a lower bound on a score, and the bound."""
    found = []
    if settings.absolute_margin is not None:
        found.append(("absolute_margin", 1, lowest - settings.absolute_margin))
    if settings.relative_margin is not None:
        # of a negative score less of it would be more
        found.append(("relative_margin", 1, lowest - settings.relative_margin * abs(lowest)))
    if settings.max_score is not None:
        found.append(("max_score", 1, settings.max_score))
    if settings.min_score is not None:
        found.append(("min_score", -1, settings.min_score))
    return found
