"""The promise: what is unchanged is called drift as often as was asked for, over all columns together, and no oftener."""

import numpy as np
import pytest
from scipy.stats import binom

from tasks.data.drift.splits import corrected, judge

RATE, TRIALS = 0.05, 400


def alarms(draw, rate=RATE):
    dice = np.random.default_rng(11)
    return sum(corrected(draw(dice)).min() <= rate for _ in range(TRIALS))


def related(dice):
    common = dice.normal(size=(101, 1))
    return np.hstack((common + 0.3 * dice.normal(size=(101, 4)), dice.normal(size=(101, 2)) ** 2))


DRAWS = {
    "independent": lambda dice: dice.normal(size=(101, 6)),
    "related and skewed": related,
    "one heavy tail": lambda dice: np.hstack((dice.normal(size=(101, 5)), dice.pareto(1, (101, 1)))),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_unchanged_rows_are_called_drift_at_the_rate(draw):
    low, high = binom.ppf((0.001, 0.999), TRIALS, RATE)
    assert low <= alarms(draw) <= high


def test_ties_give_fewer_alarms_never_more():
    assert alarms(lambda dice: dice.integers(0, 3, (101, 6)).astype(float)) <= binom.ppf(0.999, TRIALS, RATE)
    assert alarms(lambda dice: np.zeros((101, 6))) == 0


def test_columns_of_which_nothing_can_be_told_cost_no_power():
    dice = np.random.default_rng(1)
    values = np.hstack((dice.normal(size=(401, 1)), np.zeros((401, 9))))
    values[0, 0] = np.sort(values[1:, 0])[-18]
    assert judge(values, RATE).p_values[0] <= RATE


def test_a_column_that_says_the_same_as_another_costs_no_power():
    dice = np.random.default_rng(1)
    values = np.repeat(dice.normal(size=(401, 1)), 10, axis=1)
    values[0] = np.sort(values[1:, 0])[-18]
    assert judge(values, RATE).p_values.max() <= RATE


def test_a_value_is_over_its_threshold_just_when_its_p_says_so():
    dice = np.random.default_rng(5)
    values = dice.normal(size=(401, 4)) ** 2
    found = judge(values, RATE)
    for column, threshold in enumerate(found.thresholds):
        for factor, drift in ((0.999, False), (1.001, True)):
            tried = values.copy()
            tried[0, column] = threshold * factor
            assert bool(corrected(tried)[column] <= RATE) is drift


def test_one_rare_value_in_many_columns_is_corrected_for():
    dice = np.random.default_rng(3)
    values = dice.normal(size=(401, 10))
    values[0, 2] = np.sort(values[1:, 2])[-8]
    single, family = judge(values[:, 2:3], RATE), judge(values, RATE)
    assert single.p_values[0] <= RATE < family.p_values[2]
