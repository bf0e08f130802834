"""What if: around a plan there are plans with other GPUs and depths, in the order that physics asks for."""

from itertools import pairwise

import pytest

from tasks.planning.case import Case
from tasks.planning.planned_case import Point, cheapest_by_time, planned, what_if

CASE = {
    "network": {"layers": 16, "hidden": 2048, "heads": 16, "vocab": 51200},
    "sequence": 2048,
    "cluster": {"gpu": "A100-80GB", "gpus": 16},
    "parallel": {"tp": 1, "pp": 1, "dp": 16, "zero": 1},
    "batch": {"global": 256},
    "tokens": 10**11,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    return what_if(planned(Case.model_validate(CASE), home=home), home=home)


def test_more_gpus_are_quicker_and_never_better_than_a_straight_line(made):
    points = made.by_gpus
    assert [point.gpus for point in points] == [2, 4, 8, 16, 32, 64, 128]
    rates = [point.tokens_per_second for point in points]
    assert rates == sorted(rates)
    assert all(b.tokens_per_second / a.tokens_per_second <= 2.02 for a, b in pairwise(points))
    assert made.chosen in points


def test_deeper_networks_are_larger(made):
    sizes = [point.parameters for point in made.by_depth]
    assert len(sizes) == 7 and sizes == sorted(set(sizes)) and made.chosen.parameters == sizes[3]


def test_goodput_by_interval_is_best_near_the_chosen_one_and_falls_with_failures(made):
    for (_, most), (_, middle), (_, least) in zip(*made.by_interval.values(), strict=True):
        assert 0 < most < middle < least < 1
    assert any(seconds == made.interval_seconds for seconds, _ in made.by_interval["mid"])


def test_of_the_front_nothing_is_quicker_and_cheaper():
    points = [
        Point(1, 1.0, 1.0, 1.0, days, cost) for days, cost in ((1, 9), (2, 5), (3, 6), (4, 2), (None, 1), (1, None))
    ]
    assert [(point.days, point.cost) for point in cheapest_by_time(points)] == [(1, 9), (2, 5), (4, 2)]


def test_a_plan_that_does_not_fit_has_no_what_if(tmp_path):
    case = Case.model_validate(
        {**CASE, "network": {**CASE["network"], "layers": 640}, "cluster": {"gpu": "V100-32GB", "gpus": 8},
         "parallel": {"tp": 1, "pp": 1, "zero": 0}, "precision": "fp16"}
    )  # fmt: skip
    with pytest.raises(ValueError, match="does not fit"):
        what_if(planned(case, home=tmp_path), home=tmp_path)
