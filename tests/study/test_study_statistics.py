"""Student's t by its printed table, and estimates by hand."""

import math

import pytest

from kernelwarehouse.study.statistics import estimate, student_probability, student_quantile

# Two-sided 95%, from any table.
PRINTED = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 9: 2.262, 10: 2.228, 29: 2.045, 120: 1.980}


@pytest.mark.parametrize("freedom", PRINTED)
def test_quantiles_are_those_of_the_table(freedom: int) -> None:
    assert student_quantile(freedom) == pytest.approx(PRINTED[freedom], abs=6e-4)


def test_other_confidences() -> None:
    assert student_quantile(2, 0.9) == pytest.approx(2.920, abs=6e-4)
    assert student_quantile(7, 0.99) == pytest.approx(3.499, abs=6e-4)


def test_probabilities_are_areas_under_the_density() -> None:
    for freedom in (1, 2, 3, 6, 7):
        factor = math.gamma((freedom + 1) / 2) / math.sqrt(freedom * math.pi) / math.gamma(freedom / 2)
        width = 1e-3
        area = sum(
            2 * width * factor * (1 + ((number + 0.5) * width) ** 2 / freedom) ** (-(freedom + 1) / 2)
            for number in range(1500)
        )
        assert student_probability(1.5, freedom) == pytest.approx(area, abs=1e-6)


def test_estimates_by_hand() -> None:
    found = estimate([1.0, 2.0, 6.0])
    assert found is not None
    # Deviations from 3 are -2, -1, 3: 14 / 2 = 7 is the variance; 4.303 * sqrt(7 / 3) = 6.573.
    assert (found.count, found.mean) == (3, 3)
    assert found.deviation == pytest.approx(math.sqrt(7))
    assert found.interval == pytest.approx(6.573, abs=1e-3)
    assert estimate([]) is None
    alone = estimate([2.5])
    assert alone is not None
    assert (alone.count, alone.mean, alone.deviation, alone.interval) == (1, 2.5, None, None)
