"""What earlier runs took corrects the next plan: by the median of the latest of the same kind, within bounds."""

import pytest

from tasks.planning.spent import ALIKE, DIVISION, LATEST, MOST, Correction, Kind, correction, measured

KIND = Kind(
    engine="torch",
    sku="desk",
    precision="fp32",
    ranks=2,
    tp=1,
    pp=1,
    cp=1,
    zero=0,
    sequence_length=64,
    parameters=1_000_000,
)


def ran(ratio, kind=KIND):
    return measured(kind, formula_seconds=0.5, seconds=0.5 * ratio)


def test_without_a_run_of_its_kind_a_plan_is_what_the_formulas_say():
    others = [
        KIND._replace(engine="deepspeed"),
        KIND._replace(precision="bf16"),
        KIND._replace(ranks=4),
        KIND._replace(sequence_length=128),
        KIND._replace(sku="other"),
        *(KIND._replace(**{name: 3}) for name in DIVISION),
    ]
    others += [KIND._replace(parameters=round(KIND.parameters * times)) for times in (2 * ALIKE, 0.5 / ALIKE)]
    assert correction([], KIND) == Correction(1.0, 0)
    for other in others:
        found = correction([ran(3.0, other)], KIND)
        assert (found.factor, found.runs) == (1.0, 0) and "the earlier run does not count" in found.said


def test_a_division_that_was_measured_says_nothing_of_another_and_the_plan_says_so():
    planned = KIND._replace(ranks=8, tp=8)
    said = correction([ran(3.0), ran(2.0, planned._replace(tp=1))], planned).said
    assert said == "none of 2 earlier runs on this cluster counts: the latest had tp 1, not 8"
    assert correction([ran(3.0), ran(2.0, planned)], planned) == Correction(2.0, 1)
    before = {name: value for name, value in ran(3.0).items() if name not in DIVISION}
    assert "tp unknown, not 1" in correction([before], KIND).said


def test_the_median_of_the_latest_counts():
    assert correction([ran(1.5)], KIND) == Correction(1.5, 1)
    mended = correction([ran(9.0)] * 20 + [ran(r) for r in (1.1, 1.2, 3.0, 1.2, 1.3)], KIND)
    assert (mended.factor, mended.runs) == (pytest.approx(1.2), LATEST)
    assert correction([ran(1.4, KIND._replace(parameters=3_000_000))], KIND).factor == pytest.approx(1.4)


def test_what_is_far_off_moves_a_plan_only_so_far():
    assert correction([ran(100.0)] * 3, KIND).factor == MOST
    assert correction([ran(0.001)] * 3, KIND).factor == 1 / MOST


def test_a_run_without_a_time_says_nothing():
    assert correction([measured(KIND, formula_seconds=0.0, seconds=1.0)], KIND) == Correction()
    assert correction([measured(KIND, formula_seconds=1.0, seconds=0.0)], KIND) == Correction()
