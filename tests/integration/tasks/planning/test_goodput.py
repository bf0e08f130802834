"""What the time of a run went to, from records of several attempts."""

import pytest

from tasks.planning.spent import goodput


def record(step, time, *, attempt=1, took=10.0, **more):
    return {"step": step, "time": time, "attempt": attempt, "step_seconds": took, **more}


UNBROKEN = [
    record(1, 120.0, start_seconds=20.0),
    record(2, 130.0, data_seconds=1.0, checkpoint_seconds=2.0),
    record(3, 140.0, heldout_seconds=1.0, profile_seconds=0.5),
]
KILLED = [
    *UNBROKEN,
    record(4, 150.0),
    # step 4 was in no checkpoint: 30 s nobody noticed, 20 s a process started
    record(4, 210.0, attempt=2, start_seconds=20.0),
    record(5, 220.0, attempt=2),
]


def test_an_unbroken_run_starts_works_and_stands_still():
    found = goodput(UNBROKEN)
    assert (found.useful, found.stalled, found.starting) == (25.5, 4.5, 20.0)
    assert (found.lost, found.idle) == (0.0, 0.0)
    assert found.total == 50.0 and found.share == pytest.approx(0.51)


def test_a_kill_costs_the_step_that_is_done_again_the_start_and_the_time_until_it():
    found = goodput(KILLED)
    assert found.lost == 10.0
    assert (found.starting, found.restarting, found.idle) == (20.0, 20.0, 30.0)
    assert found.useful == 25.5 + 20.0
    assert found.total == pytest.approx(220.0 - 90.0), "every second since the first process began is in one cause"
    assert sum(found.causes.values()) == pytest.approx(1.0)
    assert found.causes["lost_to_restart"] == pytest.approx(30 / 130)


def test_a_step_that_was_left_out_and_going_back_are_lost():
    again = record(2, 160.0, attempt=2, took=20.0, rollback_seconds=5.0)
    found = goodput([record(1, 120.0, start_seconds=20.0), record(2, 140.0, took=20.0, skipped=1.0), again])
    assert found.lost == 20.0 + 5.0 and found.useful == 10.0 + 15.0
    skipped = goodput([record(1, 120.0, start_seconds=20.0, skipped=1.0)])
    assert (skipped.useful, skipped.lost) == (0.0, 10.0)


def test_the_last_checkpoint_is_waited_for():
    assert goodput(UNBROKEN, ended=143.0).stalled == 4.5 + 3.0


def test_clocks_of_two_machines_may_differ():
    late = goodput([record(1, 120.0, start_seconds=20.0), record(2, 100.0, attempt=2, start_seconds=20.0)])
    assert (late.idle, late.starting, late.restarting) == (0.0, 20.0, 0.0)


def test_records_of_another_release_count_for_nothing():
    assert goodput([{"step": 1, "time": 1.0, "attempt": 1}]).total == 0.0
    assert goodput([]).share == 0.0
