"""Flow runs whose process was killed, on a real Prefect server with a real worker: found, given their end, taken up again.

The first half has no worker: states are set as a worker and a flow would, so that every case is reached in a moment. The second
half kills real processes. A turn of the watch is taken every second here, every five in the platform.
"""

import os
import signal
import socket
import subprocess
import threading
import time
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
from live_prefect import kill, lines, live, python, until
from prefect.client.schemas.objects import StateType
from prefect.states import AwaitingRetry, Cancelling, Completed, Crashed, Paused, Pending, Running, Scheduled
from waiting import limit

from deployments.bridge.dispatch import follow
from deployments.catalogue.flows import POOL
from deployments.configuration.platform import PlatformConfig
from deployments.services import parts
from deployments.services.flow_runs import STALE_SECONDS, claim, history
from deployments.watch.dead_runs import CONFIRM_SECONDS, RESUMED, WAITS, DeadRuns
from flows.support.prefect_run import STOPPED
from tasks.events.batches import Batch
from tasks.orchestration.run_log import read_run

HERE = socket.gethostname()
PID_MAX = 4_194_304
"""Linux gives no process this number."""


@pytest.fixture(scope="module")
def platform(tmp_path_factory):
    with live(tmp_path_factory.mktemp("dead") / "home") as made:
        yield made


@pytest.fixture
def client(platform):
    with platform.client() as made:
        yield made


def at_work(platform, client, name, folder):
    run = platform.taken_up(client, name, folder)
    client.set_flow_run_state(run, Running())
    return run


def died(platform, client, name, folder, *, state=None, host=HERE, ended=""):
    """A flow run of a deployment at work, whose process is no more."""
    run = at_work(platform, client, name, folder)
    platform.logged(run, pid=PID_MAX, host=host, ended=ended)
    if state is not None:
        client.set_flow_run_state(run, state)
    return run


def watched(platform, client, config=None, *, patience=45.0):
    """A watch that looked twice."""
    duty = DeadRuns(platform.home, config or PlatformConfig(), patience=patience)
    duty.tick(client, time.time())
    time.sleep(CONFIRM_SECONDS + 0.1)
    duty.tick(client, time.time())
    return duty


def resumes(client, run):
    return [state for state in history(client, run) if (state.message or "").startswith(RESUMED)]


def test_each_death_gets_its_own_end(platform, client, tmp_path):
    """What the run wrote down itself decides; then whether it was being cancelled; other hosts' and suspended runs are left."""
    cases = {
        "crashed": died(platform, client, "crashed", tmp_path),
        "cancelling": died(platform, client, "cancelling", tmp_path, state=Cancelling()),
        "completed": died(platform, client, "completed", tmp_path, ended="completed"),
        "gate": died(platform, client, "gate", tmp_path, ended="gate_closed"),
        "stopped": died(platform, client, "stopped", tmp_path, ended="cancelled"),
        "paused": died(platform, client, "paused", tmp_path, state=Paused(timeout_seconds=600)),
        "elsewhere": died(platform, client, "elsewhere", tmp_path, host="another-host"),
        "suspended": died(platform, client, "suspended", tmp_path, state=Paused(timeout_seconds=600, reschedule=True)),
    }
    watched(platform, client, PlatformConfig(on_crash="mark"))
    ends = {name: client.read_flow_run(run).state for name, run in cases.items()}
    assert {name: state.name for name, state in ends.items()} == {
        "crashed": "Crashed",
        "cancelling": "Cancelled",
        "completed": "Completed",
        "gate": "Failed",
        "stopped": "Crashed",
        "paused": "Crashed",
        "elsewhere": "Running",
        "suspended": "Paused",
    }
    assert f"its process {PID_MAX} on {HERE} is gone" in ends["crashed"].message
    assert "the gate compare is closed" in ends["gate"].message
    ours = [name for name in cases if name not in ("elsewhere", "suspended")]
    assert {name: platform.slots(client, name) for name in ours} == dict.fromkeys(ours, 0)
    for name in ("elsewhere", "suspended"):
        client.delete_flow_run(cases[name])


def test_a_run_is_taken_up_again_so_often_and_no_more(platform, client, tmp_path):
    config = PlatformConfig(max_resumes=2)
    run = died(platform, client, "often", tmp_path)
    for count in (1, 2):
        watched(platform, client, config)
        state = client.read_flow_run(run).state
        assert (state.type, state.name) == (StateType.SCHEDULED, "AwaitingRetry")
        assert f"({count} of 2)" in state.message
        client.set_flow_run_state(run, Pending())
        client.set_flow_run_state(run, Running())
        platform.logged(run, pid=PID_MAX, host=HERE)
    watched(platform, client, config)
    state = client.read_flow_run(run).state
    assert state.is_crashed()
    assert "resumed 2 times already" in state.message
    watched(platform, client, config)
    assert client.read_flow_run(run).state.is_crashed()
    assert platform.slots(client, "often") == 0


def test_what_down_stopped_goes_on_whatever_the_settings_and_counts_for_nothing(platform, client, tmp_path):
    states = {"running": None, "waiting": Paused(timeout_seconds=600), "crashed": Crashed()}
    runs = {name: died(platform, client, f"down-{name}", tmp_path, state=state) for name, state in states.items()}
    for run in runs.values():
        platform.stopped(run)
        assert read_run(platform.home / "runs" / str(run)).status == "stopped"
    watched(platform, client, PlatformConfig(on_crash="mark", max_resumes=0))
    for name, run in runs.items():
        said = client.read_flow_run(run).state
        assert (said.name, said.message.startswith(STOPPED)) == ("AwaitingRetry", True), name
        assert resumes(client, run) == []
        assert platform.slots(client, f"down-{name}") == 0
    assert not any(one.is_crashed() for one in history(client, runs["running"])), "people are told of what crashed"


def test_a_run_that_was_only_taken_up_when_the_platform_stopped_is_queued_again_and_counts_for_nothing(
    platform, client, tmp_path
):
    """`down` stops the runs before the worker, which takes up what waited for their slots; one that a watch saw die counts."""
    run = platform.taken_up(client, "taken-up", tmp_path)
    watched(platform, client, PlatformConfig(on_crash="mark", max_resumes=0), patience=0.0)
    assert client.read_flow_run(run).state.name == "AwaitingRetry"
    assert resumes(client, run) == []
    duty = DeadRuns(platform.home, PlatformConfig(), patience=0.0)
    duty.tick(client, time.time())
    client.set_flow_run_state(run, Pending())
    for _ in range(2):
        time.sleep(CONFIRM_SECONDS + 0.1)
        duty.tick(client, time.time())
    assert client.read_flow_run(run).state.name == "AwaitingRetry"
    assert len(resumes(client, run)) == 1
    client.delete_flow_run(run)


def test_time_in_which_nobody_watched_makes_no_crash_history(platform, client, tmp_path):
    """It crashed while nobody watched, a day ago; one that a watch has seen for two hours is left."""
    DeadRuns(platform.home, PlatformConfig(on_crash="mark")).tick(client, time.time())
    day, hours = died(platform, client, "day", tmp_path), died(platform, client, "hours", tmp_path)
    for run in (day, hours):
        client.set_flow_run_state(run, Crashed())
    tomorrow = time.time() + 86_400.0
    DeadRuns(platform.home, PlatformConfig()).tick(client, tomorrow)
    assert client.read_flow_run(day).state.name == "AwaitingRetry"
    client.set_flow_run_state(hours, Crashed(), force=True)
    marks = DeadRuns(platform.home, PlatformConfig(on_crash="mark"))
    for minutes in range(0, 121, 60):
        marks.tick(client, tomorrow + 60.0 * minutes)
    DeadRuns(platform.home, PlatformConfig()).tick(client, tomorrow + 7200.0)
    assert client.read_flow_run(hours).state.is_crashed()


def test_a_run_that_goes_on_is_not_cancelled_by_the_limit_but_waits_for_its_slot(platform, client, tmp_path):
    """`overlap: refuse`: one that was at work comes again when the other one has ended; one that never began stays refused."""
    platform.deployment(client, "refuse", collision="CANCEL_NEW")
    first = died(platform, client, "refuse", tmp_path)
    client.set_flow_run_state(first, AwaitingRetry(message=f"{RESUMED}: it lost its worker"))
    second = at_work(platform, client, "refuse", tmp_path)
    platform.logged(second, pid=os.getpid(), host=HERE)
    for run in (first, platform.run(client, "refuse", tmp_path).id):
        client.set_flow_run_state(run, Pending())
        assert client.read_flow_run(run).state.is_cancelled()
    never = run
    batch = Batch("b", "t", "s", "probe/refuse", "d", time.time(), None, 1, None, str(first))
    assert follow(client, platform.home, batch, time.time(), since=0.0).state == "running", "its events are not over"
    duty = watched(platform, client)
    assert client.read_flow_run(first).state.name == WAITS
    assert client.read_flow_run(never).state.is_cancelled()
    client.set_flow_run_state(second, Completed())
    duty.tick(client, time.time())
    assert client.read_flow_run(first).state.name == "AwaitingRetry"
    assert client.set_flow_run_state(first, Pending()).state.is_pending()
    client.delete_flow_run(first)


def test_an_earlier_attempts_process_says_nothing_about_the_next_one(platform, client, tmp_path):
    """Taken up again, the run has a dead handle until its new process opened its folder: it is not dead for that."""
    run = died(platform, client, "next", tmp_path)
    watched(platform, client)
    client.set_flow_run_state(run, Pending())
    client.set_flow_run_state(run, Running())
    watched(platform, client)
    assert client.read_flow_run(run).state.is_running()
    platform.logged(run, pid=os.getpid(), host=HERE)
    watched(platform, client, patience=0.0)
    assert client.read_flow_run(run).state.is_running()
    client.delete_flow_run(run)


def test_many_watches_act_once(platform, client, tmp_path):
    """Three watches see one death at once."""
    run = died(platform, client, "watches", tmp_path)
    duties = [DeadRuns(platform.home, PlatformConfig()) for _ in range(3)]
    barrier = threading.Barrier(len(duties))

    def watch(duty):
        with platform.client() as own:
            for _ in range(4):
                barrier.wait()
                duty.tick(own, time.time())
                time.sleep(CONFIRM_SECONDS / 2 + 0.1)

    threads = [threading.Thread(target=watch, args=(duty,)) for duty in duties]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names = [state.name for state in history(client, run)]
    assert names[-2:] == ["Crashed", "AwaitingRetry"]
    assert len(resumes(client, run)) == 1
    client.delete_flow_run(run)


def test_a_claim_of_a_watch_that_died_goes_stale(platform, client, tmp_path):
    run, state, now = platform.run(client, "claims", tmp_path).id, uuid4(), time.time()
    assert claim(client, run, state, now)
    assert not claim(client, run, state, now + STALE_SECONDS / 2)
    assert claim(client, run, state, now + STALE_SECONDS + 1)
    assert not claim(client, run, state, now + STALE_SECONDS + 2)
    client.delete_flow_run(run)


def test_claims_that_no_watch_wrote_stop_no_watch(platform, client, tmp_path):
    run, state, now = platform.run(client, "junk-claims", tmp_path).id, uuid4(), time.time()
    for key, value in (("-x", "{}"), (f"-{'9' * 5000}", "{}"), ("-3", "junk"), ("-4", "[]"), ("-5", '{"time": "now"}')):
        client.create_flow_run_input(run, f"headway-watch-{state}{key}", value)
    assert claim(client, run, state, now)
    assert not claim(client, run, state, now + 1)
    client.delete_flow_run(run)


class Meanwhile:
    """A client of Prefect's; what others do happens after it has read claims, before it does anything about them."""

    def __init__(self, client, others):
        self._client, self._others = client, others

    def __getattr__(self, name):
        asked = getattr(self._client, name)
        if not name.endswith("_flow_run_input") or not name.startswith(("read", "filter")):
            return asked

        def read(*words, **named):
            answer = asked(*words, **named)
            self._others()
            return answer

        return read


def test_of_two_watches_that_read_the_same_stale_claim_one_gets_it(platform, client, tmp_path):
    run, state, now = platform.run(client, "claimed-twice", tmp_path).id, uuid4(), time.time()
    assert claim(client, run, state, now)
    for _ in range(2):
        now += STALE_SECONDS + 1
        told = []
        theirs = Meanwhile(client, lambda now=now, told=told: told.append(claim(client, run, state, now)))
        told.append(claim(theirs, run, state, now))
        assert sorted(told) == [False, True]
    client.delete_flow_run(run)


def test_slots_are_as_many_as_runs_at_work(platform, client, tmp_path):
    """A lease that ran out gives its slot back, and Prefect gives it back once more when the run ends: another run's."""
    first = died(platform, client, "slots", tmp_path, ended="completed")
    lease = client.read_flow_run(first).state.state_details.deployment_concurrency_lease_id
    client.release_concurrency_slots_with_lease(lease)
    second = at_work(platform, client, "slots", tmp_path)
    platform.logged(second, pid=os.getpid(), host=HERE)
    assert platform.slots(client, "slots") == 1
    duty = watched(platform, client)
    assert client.read_flow_run(first).state.is_completed()
    assert platform.slots(client, "slots") == 0, (
        "Prefect counts right by now: deployments/watch/dead_runs.py is not needed"
    )
    for _ in range(2):
        duty.tick(client, time.time())
    assert platform.slots(client, "slots") == 1
    client.delete_flow_run(second)
    for _ in range(2):
        duty.tick(client, time.time())
    assert platform.slots(client, "slots") == 0


def test_killed_on_the_command_line(platform, client, tmp_path):
    """It is marked, with its task runs; nobody starts it again: the words say what to do."""
    words = python("-c", "import sys, probed; probed.probe(sys.argv[1])", str(tmp_path))
    flow = subprocess.Popen(words, env=platform.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    run = until(lambda: lines(tmp_path / "starts"))[0][0]
    until(lambda: client.read_task_runs())
    flow.kill()
    flow.wait()
    watched(platform, client)
    state = client.read_flow_run(run).state
    assert state.is_crashed()
    assert "The same command continues after the last finished stage." in state.message
    assert {task.state.name for task in client.read_task_runs()} == {"Crashed"}


@pytest.fixture(scope="module")
def worker(platform):
    """With a worker, and without what the tests above left to be taken up."""
    platform.clear()
    platform.start_worker()
    return platform


def test_a_worker_starts_although_another_users_storage_lies_in_the_shared_temporary_folder(worker, client):
    assert (worker.home.parent / "shared" / "runner_storage").is_file()
    until(lambda: [one for one in client.read_workers_for_work_pool(POOL) if one.status == "ONLINE"])
    assert (worker.home / "platform" / "worker" / "tmp" / "runner_storage").is_dir()


def started(folder, count):
    """Wait until a flow's processes were so many, and return the newest one's pid."""
    return int(until(lambda: len(lines(folder / "starts")) >= count and lines(folder / "starts")[-1])[1])


@pytest.mark.long
def test_lost_before_it_had_a_process(worker, client, tmp_path):
    """The worker was killed between taking the run up and starting its process: it is queued again, and runs once."""
    run = worker.taken_up(client, "lost", tmp_path, seconds=0.1)
    assert worker.slots(client, "lost") == 1
    duty = DeadRuns(worker.home, PlatformConfig(), patience=3.0)
    began = time.monotonic()
    until(lambda: duty.tick(client, time.time()) or client.read_flow_run(run).state.is_completed(), every=1.0)
    print(f"lost before a process: completed after {time.monotonic() - began:.1f} s, patience 3 s")
    assert len(lines(tmp_path / "starts")) == 1
    assert worker.slots(client, "lost") == 0


def test_flow_killed_and_worker_alive(worker, client, tmp_path):
    """The worker tells of it; the watch has the same flow run taken up again."""
    run = worker.run(client, "killed", tmp_path)
    first = started(tmp_path, 1)
    kill(first)
    began = time.monotonic()
    duty = DeadRuns(worker.home, PlatformConfig())
    until(lambda: duty.tick(client, time.time()) or resumes(client, run.id), every=1.0)
    print(f"flow killed: queued again after {time.monotonic() - began:.1f} s")
    until(lambda: duty.tick(client, time.time()) or len(lines(tmp_path / "starts")) == 2, every=1.0)
    print(f"flow killed: at work again after {time.monotonic() - began:.1f} s")
    (tmp_path / "go").touch()
    until(lambda: client.read_flow_run(run.id).state.is_completed())
    starts = lines(tmp_path / "starts")
    assert len(starts) == 2
    assert {line[0] for line in starts} == {str(run.id)}
    assert len(lines(tmp_path / "ends")) == 1


@pytest.mark.long
def test_worker_and_flow_killed(worker, client, tmp_path):
    """Prefect alone leaves the run Running for ever, and its slot occupied: the second run would never start."""
    run = worker.run(client, "both", tmp_path / "first")
    second = worker.run(client, "both", tmp_path / "second", seconds=0.1)
    first = started(tmp_path / "first", 1)
    worker.kill_worker()
    kill(first)
    began = time.monotonic()
    assert client.read_flow_run(run.id).state.is_running()
    duty = DeadRuns(worker.home, PlatformConfig())
    until(lambda: duty.tick(client, time.time()) or resumes(client, run.id), every=1.0)
    print(f"worker and flow killed: marked and queued again after {time.monotonic() - began:.1f} s")
    assert time.monotonic() - began < limit(60.0)
    crashed = next(state for state in history(client, run.id) if state.is_crashed())
    assert f"its process {first} on {HERE} is gone" in crashed.message
    assert worker.slots(client, "both") == 0
    (tmp_path / "first" / "go").touch()
    began = time.monotonic()
    worker.start_worker()
    for one in (run, second):
        until(lambda one=one: duty.tick(client, time.time()) or client.read_flow_run(one.id).state.is_completed())
    print(f"worker and flow killed: both runs done {time.monotonic() - began:.1f} s after the worker's start")
    assert [len(lines(tmp_path / name / "starts")) for name in ("first", "second")] == [2, 1]
    assert worker.slots(client, "both") == 0


@pytest.mark.long
def test_worker_killed_and_flow_alive(worker, client, tmp_path):
    """A flow's process outlives its worker: it is left alone, and ends right."""
    run = worker.run(client, "alone", tmp_path)
    started(tmp_path, 1)
    kill(worker.worker_pid())
    watched(worker, client, patience=0.0)
    assert client.read_flow_run(run.id).state.is_running()
    (tmp_path / "go").touch()
    until(lambda: client.read_flow_run(run.id).state.is_completed())
    assert len(lines(tmp_path / "starts")) == 1


def test_a_process_that_down_stops_tells_of_no_crash_and_goes_on_at_the_next_up(worker, client, tmp_path):
    run = worker.run(client, "planned", tmp_path).id
    pid = started(tmp_path, 1)
    worker.stopped(run)
    os.kill(pid, signal.SIGTERM)
    until(
        lambda: client.read_flow_run(run).state.name == "AwaitingRetry",
        why=lambda: [(state.name, state.message) for state in history(client, run)],
    )
    assert client.read_flow_run(run).next_scheduled_start_time > datetime.now(UTC) + timedelta(seconds=30)
    (tmp_path / "go").touch()
    DeadRuns(worker.home, PlatformConfig(max_resumes=0)).tick(client, time.time())
    until(lambda: client.read_flow_run(run).state.is_completed())
    assert not any(state.is_crashed() for state in history(client, run))
    assert len(lines(tmp_path / "starts")) == 2
    assert worker.slots(client, "planned") == 0


def test_a_run_that_waits_for_a_person_holds_no_place_of_parallel_runs(worker, client, tmp_path):
    parts.worker.allow(client, 1)
    try:
        first = worker.run(client, "asks", tmp_path / "first").id
        started(tmp_path / "first", 1)
        second = worker.run(client, "starts", tmp_path / "second", seconds=0.1).id
        time.sleep(3 * 2.0)
        assert not lines(tmp_path / "second" / "starts"), "one at work is as many as may be"
        client.set_flow_run_state(first, Paused(timeout_seconds=600), force=True)
        until(lambda: client.read_flow_run(second).state.is_completed())
        assert not lines(tmp_path / "first" / "ends")
    finally:
        parts.worker.allow(client, None)
        client.set_flow_run_state(first, Running(), force=True)
        (tmp_path / "first" / "go").touch()
    until(lambda: client.read_flow_run(first).state.is_completed())


def test_scheduled_runs_wait_for_their_time(worker, client, tmp_path):
    """Nothing here touches what has not begun."""
    later = datetime.now(UTC) + timedelta(hours=1)
    run = worker.run(client, "later", tmp_path, state=Scheduled(scheduled_time=later))
    watched(worker, client, patience=0.0)
    assert client.read_flow_run(run.id).state.name == "Scheduled"
