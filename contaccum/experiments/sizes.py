"""Search the largest micro-batch and the largest bank within a memory budget.

A few small sizes are measured, and a line through their peaks predicts the largest size that fits.
The peak of this size is measured too, and the size is predicted again.
"""

import math
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from contaccum.errors import InputError
from contaccum.runtime.units import duration

if TYPE_CHECKING:
    from contaccum.experiments.measure import Probe

CORRECTIONS = 4  # maximum number of predictions to check by a measurement
HEADROOM = 0.9  # share of the budget that a size may use if its peak is not measured
BANK_BYTES = 64_000_000
"""Size difference of the first two measured banks, in bytes. Measurement noise would hide a smaller
difference."""
MOST_ROWS = (
    262_144  # maximum number of rows of a measured bank; the memory of larger banks is predicted
)


@dataclass(frozen=True)
class FittingSize:
    """Largest micro-batch size within the memory budget."""

    size: int | None  # largest divisor of the global batch size that fits; None if no divisor fits
    peak: float  # peak memory in bytes with this size (if None, with the smallest size)
    error: float  # relative error of the last memory prediction that was checked by a measurement
    measured: int  # largest size whose peak memory was measured


def predict(peaks: dict[int, float], size: int) -> float:
    """Predict the peak memory at ``size`` by linear interpolation or extrapolation.

    peaks: size -> measured peak memory, at least two entries.
    """
    sizes = sorted(peaks)
    # the line goes through the two nearest sizes; outside the range, through the first or the last
    # two
    index = min(max(bisect_left(sizes, size), 1), len(sizes) - 1)
    left, right = sizes[index - 1], sizes[index]
    slope = max(0.0, (peaks[right] - peaks[left]) / (right - left))
    return peaks[right] + slope * (size - right)


def largest(
    peaks: dict[int, float],
    choices: Sequence[int],
    budget: float,
    measure: Callable[[int], float | None],
) -> tuple[int | None, float]:
    """Return the largest of ``choices`` within ``budget`` bytes (or None), and a relative error.

    The largest size is predicted and its memory is measured. Then the size is predicted again with
    this measurement. The error is the relative difference between the last measured memory and the
    memory predicted for this size. peaks: size -> measured peak memory in bytes; new measurements
    are added. measure: function that returns the peak memory of a size. If it returns None because
    the device cannot measure the size, the prediction is used. If it returns infinity, the size
    does not fit.
    """
    error = 0.0
    for _ in range(CORRECTIONS):
        best = max((size for size in choices if predict(peaks, size) <= budget), default=None)
        if best is None or best in peaks:
            return best, error
        found = measure(best)
        if found is None:
            return best, error
        if found == math.inf:
            measured = max((size for size in peaks if size < best), default=0)
            choices = [size for size in choices if 2 * size <= best + measured]
            continue
        error = predict(peaks, best) / found - 1
        peaks[best] = found
    return max((size for size in choices if predict(peaks, size) <= budget), default=None), error


def largest_micro_batch(probe: "Probe", budget: float) -> FittingSize:
    """Find the largest micro-batch that fits into ``budget`` bytes, with the configured bank.

    Three small sizes are measured first, and smaller ones if memory runs out. Raises InputError if
    at most one size can be measured.
    """
    config = probe.config
    rows, n = config.bank_size(), config.batch.global_batch_size
    first = 32 if config.spec.whole else max(4, config.micro_batch_size(1))
    # measure from small to large: memory that the process keeps from a smaller size does not change
    # the peak of a larger one
    sizes = [first // 4, first // 2, first]
    peaks: dict[int, float] = {}
    seconds = 0.0  # of the last of these measurements
    for size in sizes:
        began = time.perf_counter()
        peak = probe.peak(size, rows)
        seconds = time.perf_counter() - began
        if peak is not None:
            peaks[size] = peak
    # a larger micro-batch takes less time per pair, and most searches need one more measurement
    longest = duration(seconds * n / first)
    print(f"  a micro-batch of all {n} pairs takes at most {longest}", file=sys.stderr)
    smallest = sizes[0]
    while len(peaks) < 2 and smallest > 1:
        smallest //= 2
        sizes.insert(0, smallest)
        peak = probe.peak(smallest, rows)
        if peak is not None:
            peaks[smallest] = peak
    if len(peaks) < 2:
        raise InputError(
            f"{config.method}: at most one of the micro-batch sizes {', '.join(map(str, sizes))} "
            "fits into the memory of this device, but at least two sizes must be measured to "
            "predict the memory. Lower model.max_passage_length."
        )
    high = max(peaks)
    line = {size: peak for size, peak in peaks.items() if size < high}
    error = predict(line, high) / peaks[high] - 1 if len(line) > 1 else 0.0

    def measured_peak(size: int) -> float | None:
        return probe.peak(size, rows, budget) if predict(peaks, size) <= probe.usable() else None

    choices = [n] if config.spec.whole else [size for size in range(1, n + 1) if n % size == 0]
    best, corrected = largest(peaks, choices, budget, measured_peak)
    peak_of_best = predict(peaks, best) if best else max(budget, predict(peaks, choices[0]))
    return FittingSize(best, peak_of_best, corrected or error, max(peaks))


def quick_micro_batch(probe: "Probe", most: int, budget: float) -> FittingSize:
    """Predict the largest micro-batch of at most ``most`` pairs from the peaks of 1 and 2 pairs.

    This is fast on a slow machine. The size that it finds is not measured, so a tenth of the budget
    stays free. Raises InputError if 2 pairs do not fit into the memory of the device.
    """
    rows, n = probe.config.bank_size(), probe.config.batch.global_batch_size
    peaks = {size: peak for size in (1, 2) if (peak := probe.peak(size, rows)) is not None}
    if len(peaks) < 2:
        raise InputError(
            f"{probe.config.method}: a micro-batch of 2 pairs does not fit into the memory of this "
            "device. Lower model.max_passage_length."
        )
    choices = [size for size in range(1, most + 1) if n % size == 0]
    fitting = [size for size in choices if predict(peaks, size) <= HEADROOM * budget]
    best = max(fitting, default=None)
    return FittingSize(best, predict(peaks, best or 1), 0.0, 2)


def largest_bank(probe: "Probe", rows: int, size: int, budget: float) -> int:
    """Return the number of rows of the largest bank that fits into ``budget`` bytes.

    size: pairs per micro-batch. The search starts with a bank of ``rows`` rows. The memory of banks
    that do not fit into this device is predicted. Returns 0 if no bank fits, or if the memory of a
    row cannot be measured.
    """
    more = rows + BANK_BYTES // (8 * probe.encoder.dim)
    peaks: dict[int, float] = {}  # rows of a bank -> measured peak memory
    for bank in (rows, more):
        peak = probe.peak(size, bank)
        if peak is not None:
            peaks[bank] = peak
    if (
        len(peaks) < 2 or predict(peaks, 2 * more) <= peaks[more]
    ):  # the memory of a row cannot be measured
        return 0

    def measured_peak(bank: int) -> float | None:
        measurable = bank <= MOST_ROWS and predict(peaks, bank) <= probe.usable()
        return probe.peak(size, bank, budget) if measurable else None

    most = measured_peak(MOST_ROWS) if predict(peaks, MOST_ROWS) < budget else None
    if most is not None and most < math.inf:
        peaks[MOST_ROWS] = most
    high = max(peaks)
    per_row = (peaks[high] - peaks[rows]) / (high - rows)  # the last two sizes may have equal peaks
    estimate = max(1, int(high + (budget - peaks[high]) / per_row))
    unit = max(1, estimate // 256)
    end = MOST_ROWS if most == math.inf else 2 * estimate
    return largest(peaks, range(unit, end, unit), budget, measured_peak)[0] or 0
