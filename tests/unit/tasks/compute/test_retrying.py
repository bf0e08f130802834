"""What follows a failure, and what a scheduler that is slow, silent or forgetful cannot bring about: a second job."""

import threading
import time

import pytest
from scripted_backend import RUNNING, ScriptedBackend, done, fails

from tasks.common.errors import Cancelled, Conflict, IntegrityError, JobFailed, Missing
from tasks.common.process import read_json, write_json
from tasks.compute.job import Job, JobState
from tasks.compute.polling import Watch, poller_of
from tasks.compute.submission import home_of, newest, settle
from tasks.compute.supervisor import as_intended, run
from tasks.config.cluster import ClusterConfig, RetryConfig, WatchConfig
from tasks.registry.records import StoreJournal
from tasks.storage import open_store

pytestmark = pytest.mark.unit

TOKEN = "5" * 32
RETRY = RetryConfig(attempts=2, back_off_seconds=0.01)
WATCH = WatchConfig(silent_minutes=0.005)


@pytest.fixture
def journal(tmp_path):
    return StoreJournal(open_store(tmp_path))


def job(**fields):
    plain = {"name": "train", "token": TOKEN, "program": "testjobs.program", "settings": {}, "inputs": {}}
    return Job(**{**plain, "retry": RETRY, "watch": WATCH, **fields})


class Run:
    """One call of the supervisor; what it said is kept."""

    def __init__(self, tmp_path, journal, backend):
        self.folder, self.journal, self.backend, self.events = tmp_path / "job", journal, backend, []

    def __call__(self, job, **watch):
        told = Watch(event=self.events.append, **watch)
        return run(job, backend=self.backend, folder=self.folder, journal=self.journal, watch=told)

    def said(self, kind):
        return [event.text for event in self.events if event.kind == kind]

    @property
    def submitted(self):
        return [job.submission for job in self.backend.jobs]


@pytest.fixture
def supervise(tmp_path, journal):
    return lambda *plays: Run(tmp_path, journal, ScriptedBackend(*plays))


def end(journal, number):
    return journal.get(f"jobs/{TOKEN}/{number:04d}/end")


def test_a_bad_machine_is_left_out_of_the_next_submission_and_of_all_after_it(supervise, journal):
    running = supervise(fails("node", nodes=("n2",)), fails("node", nodes=("n3",), step=4), done)
    result = running(job(excluded_nodes=("n9",)))
    assert (result.submissions, result.excluded_nodes, result.result) == (3, ("n2", "n3"), {"submission": 3})
    assert [j.excluded_nodes for j in running.backend.jobs] == [("n9",), ("n9", "n2"), ("n9", "n2", "n3")]
    assert running.said("excluded")[0].startswith("n2: left out")
    assert "(node: FAILED (n2), exit code 1)" in running.said("retrying")[0]
    assert [end(journal, number)["failure"] for number in (1, 2)] == ["node", "node"]
    assert newest(TOKEN, journal).outcome == "open"
    assert (running.folder / "submissions" / "0001").is_dir()


def test_it_stops_after_so_many_submissions_without_progress(supervise, journal):
    running = supervise(fails())
    with pytest.raises(JobFailed, match="2 submissions in a row made no progress") as error:
        running(job())
    assert running.submitted == [1, 2]
    assert error.value.failure == "infrastructure"
    assert "after 1 attempt(s) and 2 submissions: FAILED, exit code 1" in error.value.message
    assert end(journal, 1)["again"]["stuck"] == 1
    assert end(journal, 2)["again"] is None


def test_every_progress_begins_the_count_anew(supervise):
    plays = [fails(step=1), fails(step=1), fails(step=2), fails(step=2), fails(step=2)]
    running = supervise(*plays)
    with pytest.raises(JobFailed):
        running(job())
    assert running.submitted == [1, 2, 3, 4, 5]


def test_a_new_checkpoint_is_progress(supervise):
    def writes(job, folder, look):
        (folder / "LATEST").write_text(str(job.submission))
        return done(job, folder, look) if job.submission == 4 else fails()(job, folder, look)

    assert supervise(writes)(job(progress="LATEST")).submissions == 4


@pytest.mark.parametrize(
    ("failure", "step", "retry", "submissions"),
    [
        ("preempted", None, {}, 2),
        ("timeout", None, {}, 1),
        ("timeout", 7, {}, 2),
        ("out_of_memory", None, {}, 1),
        ("out_of_memory", None, {"smaller_batch": True}, 2),
        ("cancelled", None, {}, 1),
    ],
)
def test_the_table_says_what_is_tried_again(supervise, failure, step, retry, submissions):
    running = supervise(fails(failure, step=step), done)
    work = job(retry=RETRY.model_copy(update=retry))
    if submissions == 2:
        assert running(work).submissions == 2
    else:
        with pytest.raises(JobFailed) as error:
            running(work)
        assert error.value.failure == failure
    assert running.submitted == list(range(1, submissions + 1))


def test_less_memory_is_needed_by_smaller_batches_that_the_program_reads_in_its_settings(supervise):
    running = supervise(fails("out_of_memory"), fails("out_of_memory", step=1), done)
    running(job(retry=RETRY.model_copy(update={"smaller_batch": True})))
    assert read_json(running.folder / "config.json")["settings"] == {"smaller_batches": 2}


def test_a_job_without_a_retry_policy_is_submitted_once(supervise):
    running = supervise(fails("preempted"))
    with pytest.raises(JobFailed):
        running(job(retry=None))
    assert running.submitted == [1]


def test_an_administrators_cancel_is_said_and_not_overruled(supervise, journal):
    running = supervise(fails("cancelled"))
    with pytest.raises(JobFailed, match="Somebody cancelled the job"):
        running(job())
    assert end(journal, 1)["outcome"] == "cancelled"


def test_what_was_learned_outlives_an_orchestrator_that_goes_while_it_waits(supervise, journal):
    running = supervise(fails("node", nodes=("n2",)), fails("node", nodes=("n3",)), done)
    slow = RETRY.model_copy(update={"back_off_seconds": 60.0})
    with pytest.raises(Cancelled):
        running(job(retry=slow), cancelled=lambda: bool(running.said("retrying")))
    with pytest.raises(JobFailed, match="2 submissions in a row"):
        running(job())
    assert [j.excluded_nodes for j in running.backend.jobs] == [(), ("n2",)]


def test_a_find_without_an_answer_submits_nothing(supervise, journal):
    running = supervise(done)
    work = job()
    journal.put(f"jobs/{TOKEN}/0001/intent", {"job": work.model_dump(mode="json"), "time": time.time()})
    running.backend.away = True
    with pytest.raises(Missing, match="does not answer"):
        running(work)
    assert running.submitted == []
    running.backend.away = False
    assert running(work).submissions == 1


def test_a_submission_whose_answer_is_lost_is_found_again_and_not_repeated(supervise, journal):
    """The scheduler takes the second submission, and its answer does not get through."""
    running = supervise(fails("preempted"), done)
    backend, submit = running.backend, running.backend.submit

    def half(work, folder):
        if work.submission == 2:
            backend.take(work, folder)
            backend.away = True
            threading.Timer(0.4, lambda: setattr(backend, "away", False)).start()
        return submit(work, folder)

    backend.submit = half
    result = running(job(watch=WatchConfig(silent_minutes=1)))
    assert (result.submissions, running.submitted) == (2, [1, 2])
    assert len(running.said("silent")) == 1


def test_at_the_first_submission_what_is_missing_is_said_at_once_and_the_next_run_looks_first(supervise, journal):
    running = supervise(done)
    running.backend.away = True
    with pytest.raises(Missing):
        running(job())
    assert newest(TOKEN, journal).outcome == "open"
    running.backend.away = False
    running.backend.take(as_intended(job(), newest(TOKEN, journal)), running.folder)
    assert running(job()).adopted


def test_a_silent_scheduler_is_told_of_and_waited_for(supervise):
    running = supervise(done)
    backend = running.backend

    def event(said):
        if said.kind == "submitted":
            backend.away = True
        if said.kind == "silent":
            backend.away = False

    running.events = Told(event)
    assert running(job()).submissions == 1
    assert "is not given up and not submitted again" in running.said("silent")[0]
    assert "no route" in running.said("silent")[0]
    assert running.said("answers") == ["The scheduler answers again."]


class Told(list):
    """A list of events that also does something at each."""

    def __init__(self, action):
        self.action = action

    def append(self, event):
        super().append(event)
        self.action(event)


def test_a_scheduler_that_forgets_a_job_for_a_moment_does_not_get_a_second_one(supervise):
    def forgotten(job, folder, look):
        return JobState(state="lost") if look == 2 else done(job, folder, max(look - 2, 1))

    running = supervise(forgotten)
    assert running(job()).submissions == 1


def test_a_job_that_is_gone_without_a_mark_is_submitted_again_and_said_to_be_gone(supervise):
    running = supervise(lambda job, folder, look: JobState(state="lost"), done)
    assert running(job()).submissions == 2
    assert "the scheduler does not know it any more" in running.said("retrying")[0]


def test_another_spec_under_the_token_is_refused_by_what_differs(supervise, journal):
    running = supervise(lambda job, folder, look: RUNNING)
    with pytest.raises(KeyboardInterrupt):
        running(job(settings={"steps": 5}), progress=None, stop_on_interrupt=lambda: False, cancelled=interrupt)
    with pytest.raises(ValueError, match=r"settings\.steps: there 5, here 6; nodes: there 1, here 2") as error:
        running(job(settings={"steps": 6}, nodes=2))
    assert "headway job cancel train-555555555555" in str(error.value)
    assert running.submitted == [1]


def interrupt():
    raise KeyboardInterrupt


def test_patience_and_retries_may_change_while_a_job_runs(supervise, journal):
    running = supervise(done)
    journal.put(f"jobs/{TOKEN}/0001/intent", {"job": job().model_dump(mode="json"), "time": time.time()})
    running.backend.take(job(), running.folder)
    patient = job(retry=RETRY.model_copy(update={"attempts": 9}), watch=WatchConfig())
    assert running(patient).adopted


def test_a_refused_submission_is_settled_and_says_which_machines_are_left_out(supervise, journal):
    running = supervise(fails("node", nodes=("n2",)), done)
    submit = running.backend.submit

    def refuses(work, folder):
        if work.excluded_nodes:
            raise ValueError("2 nodes are wanted, and the partition has 1")
        return submit(work, folder)

    running.backend.submit = refuses
    with pytest.raises(ValueError, match=r"the partition has 1 \(left out because they failed: n2\)"):
        running(job())
    assert end(journal, 2)["outcome"] == "failed"


def test_an_empty_result_is_a_failure_and_tried_no_second_time(supervise):
    def empty(job, folder, look):
        (folder / "result.json").write_text("")
        return JobState(state="ended", code=0, reason="ended")

    running = supervise(empty)
    with pytest.raises(JobFailed, match="an empty result"):
        running(job())
    assert running.submitted == [1]


def test_a_users_own_program_needs_no_result_but_an_exit_code(supervise):
    def ends(job, folder, look):
        return JobState(state="ended", code=0, reason="ended")

    assert supervise(ends)(job(module=False)).result == {}


def test_waiting_in_a_queue_is_said_in_the_schedulers_words_and_is_no_hang(supervise):
    def queued(work, folder, look):
        write_json(folder / "progress.json", {"done": 0, "total": 1})
        waits = [JobState(state="queued", reason="Resources"), JobState(state="starting", reason="powering up")]
        return waits[look // 4] if look < 8 else done(work, folder, look)

    running = supervise(queued)
    running(job(progress="LATEST", watch=WatchConfig(start_minutes=0.0001, silent_minutes=1)))
    name = f"headway-train-{TOKEN[:12]}-{home_of(running.folder)[:6]}-1"
    assert running.said("queued") == [f"The job of train is queued: Resources ({name})."]
    assert running.said("starting") == [f"The job of train is starting: powering up ({name})."]


def test_the_same_work_of_two_homes_are_two_jobs_of_one_scheduler(tmp_path):
    """Under one account: found and cancelled by its name, a job of the other home would be taken, or ended."""
    backend = ScriptedBackend(done)
    homes = [
        Run(tmp_path / name / "jobs", StoreJournal(open_store(tmp_path / name)), backend) for name in ("one", "two")
    ]
    results = [running(job()) for running in homes]
    assert [(result.submissions, result.adopted) for result in results] == [(1, False)] * 2
    names = [known.submission_id for known in backend.jobs]
    assert len(set(names)) == 2 and all(name.endswith("-1") for name in names)


def test_the_submission_of_an_earlier_release_is_found_by_the_name_that_it_has(supervise, journal):
    running = supervise(done)
    running.backend.away = True
    with pytest.raises(Missing):
        running(job())
    generation = newest(TOKEN, journal)
    assert home_of(running.folder).startswith(generation.intent["job"].pop("home"))
    assert as_intended(job(), generation).submission_id == f"headway-train-{TOKEN[:12]}-1"
    generation.intent["job"]["home"] = "a; rm -rf /"
    with pytest.raises(IntegrityError, match="names a home"):
        as_intended(job(), generation)


def test_a_settled_job_is_work_of_its_own_when_it_is_wanted_again(supervise, journal):
    running = supervise(done)
    running(job())
    settle(TOKEN, journal, "done", folder=running.folder)
    assert running(job()).submissions == 2


def test_a_bug_in_a_backend_is_raised_where_the_job_is_supervised(supervise):
    def bug(job, folder, look):
        raise KeyError("a bug")

    with pytest.raises(KeyError, match="a bug"):
        supervise(bug)(job())


def test_one_scheduler_call_serves_all_supervisors(tmp_path, journal):
    """Jobs of one cluster share a poller, whichever thread supervises them."""
    backend, number = ScriptedBackend(lambda job, folder, look: done(job, folder, look // 10)), 40
    poller = poller_of(backend, None)
    handles = [
        (backend.take(job(token=f"{i:012d}{TOKEN}"), tmp_path / str(i)), tmp_path / str(i)) for i in range(number)
    ]
    together = threading.Barrier(number)

    def watch(handle, folder):
        with poller.watching(handle, folder) as watched:
            together.wait()
            while not watched.state.over:
                poller.wait(watched, 1.0)

    began = time.monotonic()
    threads = [threading.Thread(target=watch, args=pair) for pair in handles]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    periods = (time.monotonic() - began) / backend.poll_seconds
    assert max(backend.calls) == number
    assert len(backend.calls) <= periods + 2
    same = [ClusterConfig(backend="local", ranks_per_node=ranks) for ranks in (1, 4)]
    assert poller_of(backend, same[0]) is poller_of(backend, same[1])


def test_work_that_is_open_in_another_home_of_the_store_is_left_to_it(tmp_path, journal):
    there = Run(tmp_path / "there", journal, ScriptedBackend(lambda job, folder, look: RUNNING))
    with pytest.raises(KeyboardInterrupt):
        there(job(), cancelled=interrupts(after=3), stop_on_interrupt=lambda: False)
    here = Run(tmp_path / "here", journal, ScriptedBackend(done))
    with pytest.raises(Conflict, match="open in another home"):
        here(job())
    assert (here.submitted, newest(TOKEN, journal).outcome) == ([], "open")
    settle(TOKEN, journal, "failed")
    assert here(job()).submissions == 2


def test_a_cancel_from_outside_while_the_job_is_handed_over_is_not_lost(supervise, journal):
    running = supervise(lambda job, folder, look: RUNNING)
    submit = running.backend.submit

    def slow(work, folder):
        handle = submit(work, folder)
        write_json(folder / "cancelled.json", {"submission": work.submission, "time": time.time()})
        return handle

    running.backend.submit = slow
    with pytest.raises(JobFailed) as failed:
        running(job())
    name = f"headway-train-{TOKEN[:12]}-{home_of(running.folder)[:6]}-1"
    assert (failed.value.failure, running.backend.cancelled) == ("cancelled", [name])


def interrupts(after):
    """Ctrl-C at the so-manieth question whether the run is cancelled."""
    asked = iter(range(after))

    def cancelled():
        if next(asked, None) is None:
            raise KeyboardInterrupt
        return False

    return cancelled
