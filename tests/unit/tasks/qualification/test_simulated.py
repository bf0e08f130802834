"""Planted faults in simulated clusters, a seeded sample; the whole sweep is tests/soak/test_verdicts.py."""

import pytest
from simulated_clusters import Rates, Scenario, simulate

pytestmark = pytest.mark.unit

CLUSTERS, SEED = 10, 1


@pytest.mark.parametrize("machines", [4, 8])
@pytest.mark.parametrize("fault", ["none", "network", "compute", "link", "half network", "half compute", "rack"])
def test_planted_faults_are_named_and_nothing_else(machines, fault):
    if (fault, machines) != ("rack", 4):
        rates = simulate(Scenario(machines, 0.03, fault), CLUSTERS, SEED)
        assert (rates.found, rates.missed, rates.false) == (CLUSTERS, 0, 0)


def test_a_large_cluster():
    assert simulate(Scenario(64, 0.03, "half network"), 1, SEED).found == 1


@pytest.mark.parametrize("machines", [4, 8])
def test_sound_busy_cpus_are_not_flagged_in_twenty_runs(machines):
    assert simulate(Scenario(machines, 0.15, "none", "cpu", 3), 20, SEED).false == 0


def test_intervals_are_clopper_and_pearsons():
    """Of 10: nobody's upper bound is 1 - 0.025^(1/10); of 5 in 10 the table says 18.7 % to 81.3 %."""
    rates = Rates(10, 5, 0, 0)
    assert rates.interval(0) == pytest.approx((0.0, 0.3085), abs=1e-4)
    assert rates.interval(5) == pytest.approx((0.1871, 0.8129), abs=1e-4)
    assert rates.interval(10) == pytest.approx((0.6915, 1.0), abs=1e-4)
