"""Predict the peak memory at a micro-batch or bank size from peaks measured at other sizes, and find the largest that fits."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

CORRECTIONS = 4  # maximum number of predictions to check by a measurement


def predict(peaks: dict[int, float], size: int) -> float:
    """Predict the peak memory at ``size`` by linear interpolation or extrapolation.

    peaks: size -> measured peak memory, at least two entries.
    """
    sizes = sorted(peaks)
    left, right = next((pair for pair in pairwise(sizes) if size <= pair[1]), tuple(sizes[-2:]))
    slope = max(0.0, (peaks[right] - peaks[left]) / (right - left))
    return peaks[right] + slope * (size - right)


def largest(
    peaks: dict[int, float], choices: Sequence[int], budget: float, measure: Callable[[int], float | None]
) -> tuple[int | None, float]:
    """Return the largest size in ``choices`` with a peak memory of at most ``budget`` bytes, or None if no size fits.

    This size is predicted, then measured, then predicted again with the measurement. Also return the relative error of the last
    prediction that was measured. peaks: size -> measured peak memory in bytes; new measurements are added. measure: function that
    returns the peak memory at a size. If it returns None, the device cannot measure the size, and the prediction is used.
    """
    error = 0.0
    for _ in range(CORRECTIONS):
        best = max((size for size in choices if predict(peaks, size) <= budget), default=None)
        if best is None or best in peaks or (found := measure(best)) is None:
            return best, error
        error = predict(peaks, best) / found - 1
        peaks[best] = found
    return max((size for size in choices if predict(peaks, size) <= budget), default=None), error


class FittingSize(NamedTuple):
    """Largest micro-batch size within the memory budget."""

    size: int | None  # largest divisor of the global batch size that fits; None if no divisor fits
    peak: float  # peak memory in bytes with this size (if None, with the smallest size)
    error: float  # relative error of the last memory prediction that was checked by a measurement
    measured: int  # largest size whose peak memory was measured
