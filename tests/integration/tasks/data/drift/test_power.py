"""Null windows and planted shifts, seeds fixed; the corpora and shifts are benchmarks/drift_power.py's.

A sample runs in `make test`; all of it is `make soak N=200 SEED=1`. A perfect detector of a rate of 5 % gives more than 18 alarms
of 200 in 0.6 % of runs, and a sample of 20 more than 4 in 0.3 %.
"""

import os

import pytest

from benchmarks.drift_power import SHIFTS, planted, pool, unchanged

SEED, TRIALS = int(os.environ.get("SEED", "1")), int(os.environ.get("N", "200"))
SOAK = [pytest.mark.soak, pytest.mark.timeout(7200)]


@pytest.fixture(scope="module")
def sample():
    return pool(SEED, most=3000)


@pytest.fixture(scope="module")
def whole():
    return pool(SEED)


def drifts(found):
    return found["verdict"] == "drift"


@pytest.mark.long
def test_a_sample_of_unchanged_windows_gives_few_alarms(sample):
    assert sum(drifts(unchanged(sample, SEED * 1000 + trial, splits=200)) for trial in range(20)) <= 4


@pytest.mark.long
@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("trials", [5])
def test_a_sample_of_planted_shifts_is_found(sample, shift, trials):
    assert all(drifts(planted(sample, shift, SEED * 1000 + trial, splits=200)) for trial in range(trials))


@pytest.mark.parametrize("sizes", [(1000, 1000), (2000, 300), (150, 1000)], ids=lambda sizes: "-".join(map(str, sizes)))
@pytest.mark.parametrize("trials", [pytest.param(TRIALS, marks=SOAK, id="all")])
def test_unchanged_windows_give_alarms_at_the_rate(whole, sizes, trials):
    found = sum(drifts(unchanged(whole, SEED * 10_000 + trial, sizes=sizes)) for trial in range(trials))
    print(f"{sizes}: {found} alarms of {trials}")
    assert found <= 0.09 * trials


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("trials", [pytest.param(TRIALS, marks=SOAK, id="all")])
def test_planted_shifts_are_found(whole, shift, trials):
    found = sum(drifts(planted(whole, shift, SEED * 10_000 + trial)) for trial in range(trials))
    print(f"{shift}: {found} of {trials}")
    assert found >= 0.95 * trials
