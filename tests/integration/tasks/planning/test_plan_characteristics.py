"""How near a plan's goodput and interval are to trainings whose failures are drawn with a known rate.

A sample, and in `make long` the table of docs/planning.md.
"""

from dataclasses import replace

import pytest

from benchmarks.operating_characteristics.plan import (
    as_planned,
    covered,
    goodputs,
    hard_pressed,
    loss_of_interval,
    rows,
)
from tasks.config.planning import PlanningConfig

TOLERATED = 0.012
"""Between stated and simulated goodput: writes and restarts that vary are not in the formula."""


@pytest.mark.parametrize(("machines", "spot"), [(128, False), (2048, False), (64, True)])
def test_the_goodput_of_a_plan_is_that_of_simulated_trainings(machines, spot):
    plan = as_planned(machines, spot=spot)
    assert goodputs(plan.training, 6).mean() == pytest.approx(plan.goodput, abs=TOLERATED)


def test_what_a_plan_said_with_a_day_between_failures_is_found_to_be_wrong():
    day = PlanningConfig(mean_hours_between_failures=24.0)
    large, taken = as_planned(2048, limits=day), as_planned(64, spot=True, limits=day)
    assert large.goodput - goodputs(large.training, 4).mean() > 0.1
    assert taken.goodput - goodputs(taken.training, 4).mean() > 0.7


def test_no_interval_that_can_be_written_has_half_a_percent_more_goodput():
    pressed = hard_pressed()
    assert loss_of_interval(pressed, 4) <= 0.007
    twice = replace(pressed, every=2 * pressed.every)
    assert loss_of_interval(twice, 4) > 0.02, "the floor of before"


def test_the_range_of_goodput_holds_what_the_range_of_rates_gives():
    assert covered(60) >= 0.85


@pytest.mark.long
def test_the_table_of_all_rows():
    table = list(rows(quick=False))
    stated = [line for line in table if line.judgement == "plan: goodput" and "Weibull" not in line.truth]
    assert len(stated) == 4
    for line in stated:
        assert float(line.measured.split()[0]) == pytest.approx(float(line.stated), abs=TOLERATED), line
    for line in (line for line in table if line.judgement == "plan: interval"):
        assert float(line.measured.split()[0]) <= 0.005, line
