import pytest

from deployments.cli.operations.approve import _choose, told_apart

pytestmark = pytest.mark.unit
RUNS = ("01a21cf7-acb7-7000", "01a21cf7-acb9-7000", "77777777-0000-4000")


def test_runs_of_a_schedule_that_ask_the_same_have_names_of_their_own():
    waiting = told_apart([{"flow_run": run, "key": "d" * 4} for run in RUNS])
    names = [one["name"] for one in waiting]
    assert names == ["01a21cf7-acb7.dddd", "01a21cf7-acb9.dddd", "77777777-0000.dddd"]
    assert [_choose(waiting, name)["flow_run"] for name in names] == list(RUNS)


def test_other_names_stay_short():
    waiting = told_apart(
        [{"flow_run": RUNS[0], "key": "a"}, {"flow_run": RUNS[1], "key": "b"}, {"flow_run": RUNS[2], "key": ""}]
    )
    assert [one["name"] for one in waiting] == ["01a21cf7.a", "01a21cf7.b", "77777777"]
