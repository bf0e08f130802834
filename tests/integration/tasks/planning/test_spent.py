"""What a run took of machines, from the events of its log, and what says whether they had the right size."""

import pytest

from tasks.planning.spent import Machines, Use, costs, judge, timed, total


def events(*said):
    """(time, event, stage, kind or status)"""
    for time, event, stage, more in said:
        if event == "ended":
            job = {"folder": f"/jobs/{stage}"} if stage != "plan" else None
            outcome = {"name": stage, "status": more, "job": job, "metrics": {"goodput": 0.9}}
            yield {"time": time, "event": event, "outcome": outcome}
        else:
            yield {"time": time, "event": event, "stage": stage, "kind": more}


def test_a_job_pays_while_it_has_machines_and_not_in_the_queue():
    log = events(
        (0, "started", "train", None),
        (1, "job", "train", "submitted"),
        (2, "job", "train", "queued"),
        (602, "job", "train", "starting"),
        (702, "job", "train", "running"),
        (1602, "job", "train", "retrying"),  # 1,000 s paid, then a wait
        (1700, "job", "train", "submitted"),
        (1800, "job", "train", "running"),
        (4400, "ended", "train", "ran"),  # 2,600 s more
    )
    (train,) = timed(log)
    assert (train.seconds, train.machine_seconds) == (4400, 3600)
    (found,) = costs([train], {"/jobs/train": Machines("ten", 4)}, {"ten": 10.0}.get, planned_train_seconds=4000)
    assert (found.machine_hours, found.cost, found.planned_cost) == (4.0, 40.0, pytest.approx(400 / 9))
    assert found.over == pytest.approx(0.1) and found.goodput == 0.9


def test_reused_stages_and_those_beside_the_orchestrator_cost_nothing():
    log = events(
        (0, "started", "validate", None),
        (1, "ended", "validate", "reused"),
        (1, "started", "plan", None),
        (9, "ended", "plan", "ran"),
    )
    found = costs(timed(log), {"/jobs/validate": Machines("ten", 1)}, {"ten": 10.0}.get)
    assert [(one.stage, one.cost, one.seconds) for one in found] == [("validate", 0.0, 0.0), ("plan", 0.0, 8)]
    assert total(found) == 0.0


def test_a_stage_without_a_price_leaves_the_total_open():
    log = list(events((0, "started", "train", None), (0, "job", "train", "running"), (36, "ended", "train", "ran")))
    for machines in ({}, {"/jobs/train": Machines("nobody knows", 1)}):
        (found,) = costs(timed(log), machines, {}.get)
        assert found.cost is None and total([found]) is None


def test_a_run_that_died_paid_until_its_log_ends():
    log = [
        *events((0, "started", "train", None), (5, "job", "train", "running")),
        {"time": 65, "event": "progress", "stage": "train"},
    ]
    (found,) = timed(log)
    assert (found.status, found.machine_seconds) == ("died", 60)


def test_a_stage_may_run_twice():
    log = events(
        (0, "started", "evaluate", None),
        (0, "job", "evaluate", "running"),
        (10, "ended", "evaluate", "ran"),
        (20, "started", "evaluate", None),
        (20, "job", "evaluate", "adopted"),
        (50, "ended", "evaluate", "failed"),
    )
    assert [one.machine_seconds for one in timed(log)] == [10, 30]


@pytest.mark.parametrize(
    ("use", "advice", "said"),
    [
        ({"memory": 0.95, "busy": 0.9}, "larger", "95%"),
        ({"memory": 0.3, "busy": 0.1, "out_of_memory": 2}, "larger", "2 times"),
        ({"memory": 0.4, "busy": 0.2, "mfu": 0.05}, "smaller", "40% of the gpu's memory and 20% of its time"),
        ({"memory": 0.4, "busy": 0.2, "data": 0.5}, "keep", "50% of a step waits for data"),
        ({"memory": 0.4, "busy": 0.9}, "keep", "90% of its time"),
        ({"memory": 0.8, "busy": 0.2}, "keep", "80%"),
        (
            {"memory": 0.8, "busy": 0.9, "communication": 0.6, "machines": 16},
            "smaller",
            "60% of a step is communication",
        ),
        ({"memory": 0.8, "busy": 0.9, "communication": 0.6}, "keep", "communication 60%"),
        ({"memory": None, "busy": 0.2}, "unknown", "not measured: its memory of the gpu"),
        ({"memory": 0.2, "busy": None}, "unknown", "how busy it was"),
        ({}, "unknown", "its memory and how busy it was"),
    ],
)
def test_measured_use_says_the_size(use, advice, said):
    found = judge(Use(device="gpu", **use))
    assert found.advice == advice and said in "; ".join(found.reasons)
