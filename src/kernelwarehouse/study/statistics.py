"""Means, deviations and intervals of a few numbers."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """Of so many numbers the mean, the standard deviation, and half the width of the mean's 95% interval by Student's
    t; the latter two are missing where one number is all."""

    count: int
    mean: float
    deviation: float | None
    interval: float | None


def estimate(values: Sequence[float]) -> Estimate | None:
    """`None` of no numbers."""
    count = len(values)
    if not count:
        return None
    mean = statistics.fmean(values)
    if count == 1:
        return Estimate(count, mean, None, None)
    deviation = statistics.stdev(values)
    return Estimate(count, mean, deviation, student_quantile(count - 1) * deviation / math.sqrt(count))


def student_quantile(freedom: int, confidence: float = CONFIDENCE) -> float:
    """The t between -t and t of which a variable with so many degrees of freedom lies with this probability."""
    low, high = 0.0, 1.0
    while student_probability(high, freedom) < confidence:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if student_probability(middle, freedom) < confidence else (low, middle)
    return high


def student_probability(t: float, freedom: int) -> float:
    """The probability of lying between -t and t: for whole degrees of freedom a finite sum (Abramowitz and Stegun,
    26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine, sine = math.cos(angle), math.sin(angle)
    odd = freedom % 2
    term = total = cosine if odd else 1.0
    for number in range(3 if odd else 2, freedom - 1, 2):
        term *= cosine**2 * (number - 1) / number
        total += term
    if not odd:
        return sine * total
    return 2 / math.pi * (angle + (sine * total if freedom > 1 else 0.0))
