"""One job from intent to result on the real local backend, whatever dies in between. Programs are the test's own, and small."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from waiting import limit, until

from tasks.common import process
from tasks.common.errors import Cancelled, IntegrityError, JobFailed, Missing
from tasks.compute import open_backend
from tasks.compute.job import Job
from tasks.compute.local import spec
from tasks.compute.polling import Watch
from tasks.compute.submission import settle
from tasks.compute.supervisor import run
from tasks.config.cluster import ClusterConfig, RetryConfig
from tasks.jobs.node.launching import Place, environment, launcher
from tasks.registry.records import StoreJournal
from tasks.storage import open_store

ROOT = Path(__file__).parents[4]
QUICK = RetryConfig(attempts=2, back_off_seconds=0.1)
PROGRAM = """
import os, sys, time
from tasks.common.errors import IntegrityError, Missing
from tasks.jobs.node.runtime import main

def run(rank):
    with open(rank.folder.parent / "starts", "a") as file:
        file.write(f"{rank.attempt} {rank.rank}\\n")
    print(f"attempt {rank.attempt} says hello")
    return eval(rank.settings["code"], globals(), {"rank": rank})

def fail(error):
    raise error

def wait_for(path):
    while not os.path.exists(path):
        time.sleep(0.02)

def write_in_halves(rank, records):
    for number in range(records):
        for half in ('{"step": %d' % number, ', "loss": 0.5}\\n'):
            with open(rank.folder / "metrics.jsonl", "a") as file:
                file.write(half)
            time.sleep(0.3)

if __name__ == "__main__":
    sys.exit(main(run))
"""
ORCHESTRATOR = """
import sys
from pathlib import Path
from tasks.config.cluster import ClusterConfig
from tasks.compute import open_backend
from tasks.compute.job import Job
from tasks.compute.supervisor import run
from tasks.compute.polling import Watch
from tasks.registry.records import StoreJournal
from tasks.storage import open_store
base = Path(sys.argv[1])
job = Job.model_validate_json(sys.argv[2])
journal = StoreJournal(open_store(base))
print(run(job, backend=open_backend(ClusterConfig()), folder=base / "job", journal=journal, watch=Watch()).model_dump_json())
"""


@pytest.fixture
def base(tmp_path, monkeypatch):
    """A home with the package `testjobs` in it, which programs find; no process of it is left in the end."""
    package = tmp_path / "testjobs"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "program.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    yield tmp_path
    process.stop(tmp_path / "job")


@pytest.fixture
def journal(base):
    return StoreJournal(open_store(base))


def job(code, **fields):
    """A job whose only rank evaluates an expression; `rank` is in scope."""
    plain = {
        "name": "stage",
        "token": "7" * 32,
        "program": "testjobs.program",
        "inputs": {},
        "restarts": 1,
        "retry": QUICK,
    }
    return Job(settings={"code": code}, **{**plain, **fields})


def supervise(base, journal, job, **watch):
    return run(
        job,
        backend=open_backend(ClusterConfig()),
        folder=base / "job",
        journal=journal,
        watch=Watch(**watch),
        cluster=ClusterConfig(),
    )


def orchestrator(base, job):
    """A process that supervises a job, and can be killed."""
    return subprocess.Popen(
        [sys.executable, "-c", ORCHESTRATOR, str(base), job.model_dump_json()],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{base}"},
        stdout=subprocess.PIPE,
        text=True,
    )


def left_alone(base, journal, work):
    """Submit a job as an orchestrator does that is killed then."""
    journal.put(f"jobs/{work.token}/0001/intent", {"spec": work.spec_digest})
    journal.put(f"jobs/{work.token}/0001/handle", open_backend(ClusterConfig()).submit(work, base / "job"))


def starts(base):
    path = base / "starts"
    return path.read_text().splitlines() if path.exists() else []


def after(condition, action):
    """Do something in a thread as soon as a condition holds."""
    thread = threading.Thread(target=lambda: (until(condition), action()), daemon=True)
    thread.start()


def test_a_job_gives_its_result_and_its_output(base, journal):
    code = """((rank.output / "made").write_text(str(rank.inputs["data"])), rank.metrics(step=1, loss=2.5),
           {"answer": 42, "resumed_from_step": 7})[-1]"""
    done = supervise(base, journal, job(code, inputs={"data": "/somewhere"}))
    assert done.result["answer"] == 42
    assert done.resumed_from_step == 7
    assert (done.output / "made").read_text() == "/somewhere"
    assert (done.submissions, done.attempts, done.adopted) == (1, 1, False)
    assert done.id == "stage-777777777777-1"
    assert starts(base) == ["1 0"]
    assert json.loads((base / "job" / "config.json").read_text())["inputs"] == {"data": "/somewhere"}


def test_a_users_error_is_a_value_error_and_not_tried_again(base, journal):
    wrong = job("fail(ValueError('learning_rate -1 must be above 0'))")
    with pytest.raises(ValueError, match="learning_rate -1 must be above 0"):
        supervise(base, journal, wrong)
    assert starts(base) == ["1 0"]
    assert journal.get(f"jobs/{wrong.token}/0001/end")["outcome"] == "failed"


@pytest.mark.parametrize("kind", [IntegrityError, pytest.param(Missing, marks=pytest.mark.long)])
def test_domain_errors_come_through_with_their_remedy(base, journal, kind):
    with pytest.raises(kind, match=r"shard 3") as error:
        supervise(base, journal, job(f"fail({kind.__name__}('shard 3', remedy='Mend it.'))"))
    assert error.value.remedy == "Mend it."
    assert starts(base) == ["1 0"]


def test_a_full_disk_is_said_to_be_missing_room(base, journal):
    with pytest.raises(Missing, match="No space left") as error:
        supervise(base, journal, job("fail(OSError(28, 'No space left on device'))"))
    assert "Free space" in error.value.remedy


def test_a_crash_is_tried_again_and_then_told_with_the_end_of_the_log(base, journal):
    with pytest.raises(JobFailed) as error:
        supervise(base, journal, job("fail(RuntimeError('the network is gone'))"))
    assert starts(base) == ["1 0", "2 0"]
    assert error.value.failure == "infrastructure"
    assert error.value.message.startswith(
        "the job of stage failed after 2 attempt(s): RuntimeError: the network is gone"
    )
    assert "attempt 2 says hello\nTraceback" in error.value.message
    assert error.value.folder == str(base / "job")


def test_out_of_memory_has_a_class_of_its_own(base, journal):
    with pytest.raises(JobFailed) as error:
        supervise(base, journal, job("fail(MemoryError())", restarts=0))
    assert error.value.failure == "out_of_memory"


def test_a_loss_that_is_no_number_is_not_tried_again(base, journal):
    with pytest.raises(JobFailed, match="loss is nan at step 3") as error:
        supervise(base, journal, job("fail(FloatingPointError('loss is nan at step 3'))"))
    assert error.value.failure == "diverged"
    assert starts(base) == ["1 0"]


def test_a_program_that_a_signal_kills_still_shows_its_log(base, journal):
    with pytest.raises(JobFailed, match="exit code 137") as error:
        supervise(base, journal, job("(sys.stdout.flush(), os.kill(os.getpid(), 9))", restarts=0))
    assert "attempt 1 says hello" in error.value.message


def test_the_end_without_a_result_is_a_failure(base, journal):
    with pytest.raises(JobFailed, match="without a result"):
        supervise(base, journal, job("os._exit(0)"))
    assert starts(base) == ["1 0"]


def test_a_crash_that_is_over_by_the_second_attempt_is_no_failure(base, journal):
    done = supervise(base, journal, job("{'attempt': rank.attempt} if rank.attempt > 1 else os._exit(9)"))
    assert (done.attempts, done.submissions, done.result) == (2, 1, {"attempt": 2})


def test_time_that_is_over_is_a_timeout(base, journal):
    with pytest.raises(JobFailed) as error:
        supervise(base, journal, job("time.sleep(60)", time_limit=0.5))
    assert error.value.failure == "timeout"


@pytest.mark.long
def test_a_killed_orchestrators_job_is_adopted_and_not_run_again(base, journal):
    work = job(f"(wait_for({str(base / 'go')!r}), {{'done': True}})[1]")
    first = orchestrator(base, work)
    until(lambda: starts(base))
    first.kill()
    first.communicate()
    handle = process.read_json(base / "job" / "handle.json")
    assert process.alive(handle)
    second = orchestrator(base, work)
    time.sleep(0.5)
    (base / "go").touch()
    done = json.loads(second.communicate(timeout=limit(30))[0])
    assert (done["adopted"], done["submissions"], done["attempts"]) == (True, 1, 1)
    assert done["result"] == {"done": True}
    assert starts(base) == ["1 0"]
    assert journal.list(f"jobs/{work.token}") == [f"jobs/{work.token}/0001/handle", f"jobs/{work.token}/0001/intent"]


def test_orchestrators_killed_at_any_moment_do_not_run_the_work_twice(base):
    """One after another is killed, ever later, from before the intent until the job runs; then one is left alone."""
    work = job(f"(wait_for({str(base / 'go')!r}), {{'done': True}})[1]")
    for tenths in (1, 2, 4, 6):
        killed = orchestrator(base, work)
        time.sleep(tenths / 10)
        killed.kill()
        killed.communicate()
    last = orchestrator(base, work)
    until(lambda: starts(base))
    (base / "go").touch()
    done = json.loads(last.communicate(timeout=limit(30))[0])
    assert (done["submissions"], done["result"]) == (1, {"done": True})
    assert starts(base) == ["1 0"]


def test_a_job_that_ended_well_while_nobody_looked_is_adopted(base, journal):
    work = job("{'done': True}")
    open_backend(ClusterConfig()).submit(work, base / "job")
    journal.put(f"jobs/{work.token}/0001/intent", {"spec": work.spec_digest})
    until(lambda: (base / "job" / "exit.json").exists())
    done = supervise(base, journal, work)
    assert (done.adopted, done.submissions) == (True, 1)
    assert starts(base) == ["1 0"]


def test_an_intent_without_a_job_is_submitted_once(base, journal):
    work = job("{'done': True}")
    journal.put(f"jobs/{work.token}/0001/intent", {"spec": work.spec_digest})
    done = supervise(base, journal, work)
    assert (done.adopted, done.submissions, starts(base)) == (False, 1, ["1 0"])
    assert journal.get(f"jobs/{work.token}/0001/handle")["pid"]


def test_an_intent_with_a_job_that_was_not_noted_any_more_adopts_it(base, journal):
    work = job(f"(wait_for({str(base / 'go')!r}), {{'done': True}})[1]")
    journal.put(f"jobs/{work.token}/0001/intent", {"spec": work.spec_digest})
    open_backend(ClusterConfig()).submit(work, base / "job")
    after(lambda: starts(base), (base / "go").touch)
    done = supervise(base, journal, work)
    assert (done.adopted, done.submissions, starts(base)) == (True, 1, ["1 0"])


def test_a_job_that_failed_while_nobody_looked_is_a_new_submission(base, journal):
    """It goes on in the same folder, from its checkpoints; what the first one left of its end is gone."""
    code = f"{{'kept': (rank.folder / 'checkpoint').exists()}} if os.path.exists({str(base / 'mended')!r}) else "
    code += "((rank.folder / 'checkpoint').touch(), fail(ValueError('not yet')))"
    left_alone(base, journal, job(code))
    until(lambda: starts(base))
    until(lambda: not process.alive(process.read_json(base / "job" / "handle.json")))
    (base / "mended").touch()
    done = supervise(base, journal, job(code))
    assert (done.submissions, done.adopted, done.result) == (2, False, {"kept": True})
    assert not (base / "job" / "errors").exists()


def test_a_parent_that_died_before_the_result_is_a_failure_and_after_it_is_none(base, journal):
    work = job("time.sleep(60)", retry=None)
    after(lambda: starts(base), lambda: os.kill(process.read_json(base / "job" / "handle.json")["pid"], signal.SIGKILL))
    with pytest.raises(JobFailed, match="its parent process ended without a result"):
        supervise(base, journal, work)
    open_backend(ClusterConfig()).submit(work, base / "job")
    journal.put(f"jobs/{work.token}/0002/intent", {"spec": work.spec_digest})
    process.write_json(base / "job" / "result.json", {"done": True})
    os.kill(process.read_json(base / "job" / "handle.json")["pid"], signal.SIGKILL)
    assert supervise(base, journal, work).result == {"done": True}


def test_work_that_was_done_begins_in_an_empty_folder_when_it_is_wanted_again(base, journal):
    work = job("{'kept': (rank.folder / 'checkpoint').exists(), 'x': (rank.folder / 'checkpoint').touch()}")
    supervise(base, journal, work)
    settle(work.token, journal, "done")
    done = supervise(base, journal, work)
    assert (done.submissions, done.adopted, done.attempts) == (2, False, 1)
    assert done.result["kept"] is False


def test_an_open_generation_with_a_result_is_handed_on_until_it_is_settled(base, journal):
    first, second = (supervise(base, journal, job("{'time': time.time()}")) for _ in range(2))
    assert second.result == first.result
    assert (first.adopted, second.adopted, second.submissions) == (False, True, 1)


def test_another_spec_under_the_same_token_is_refused_while_the_first_one_runs(base, journal):
    work = job("time.sleep(60)")
    left_alone(base, journal, work)
    with pytest.raises(ValueError, match="under other settings of the cluster"):
        supervise(base, journal, job("time.sleep(60)", threads_per_rank=2))
    assert process.alive(process.read_json(base / "job" / "handle.json"))


def test_a_job_of_a_release_that_knew_no_sizes_is_the_same_job(base, journal):
    work = job("{'done': True}", size="Standard_ND96isr_H100_v5")
    folder, known = base / "job", work.model_dump(mode="json", exclude={"size"})
    open_backend(ClusterConfig()).submit(work.model_copy(update={"size": ""}), folder)
    journal.put(f"jobs/{work.token}/0001/intent", {"job": known, "spec": work.spec_digest})
    done = supervise(base, journal, work)
    assert (done.adopted, done.submissions, done.result) == (True, 1, {"done": True})


def test_cancelling_stops_the_job_and_leaves_no_process(base, journal):
    work = job("(__import__('subprocess').Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)']), "
               "rank.progress(1, 2), time.sleep(60))")  # fmt: skip
    everyone = []

    def cancelled():
        if (base / "job" / "progress.json").exists() and not everyone:
            parent = process.read_json(base / "job" / "handle.json")["pid"]
            everyone.extend([parent, *process.descendants(parent)])
        return bool(everyone)

    with pytest.raises(Cancelled, match="was stopped"):
        supervise(base, journal, work, cancelled=cancelled)
    assert len(everyone) == 4
    until(lambda: not any(process.process_started(pid) for pid in everyone))
    assert journal.get(f"jobs/{work.token}/0001/end")["outcome"] == "cancelled"
    assert process.read_json(base / "job" / "exit.json")["reason"] == "cancelled"


@pytest.mark.parametrize("stops", [True, False])
def test_an_interrupt_asks_whether_the_job_stops(base, journal, stops):
    def interrupt(progress):
        raise KeyboardInterrupt

    events = []
    work = job(f"(rank.progress(1, 2), wait_for({str(base / 'go')!r}), {{'done': True}})[2]")
    with pytest.raises(KeyboardInterrupt):
        supervise(base, journal, work, progress=interrupt, stop_on_interrupt=lambda: stops, event=events.append)
    assert [event.text for event in events if event.kind == "left"] == (
        [] if stops else [f"{work.id} continues to run. To end it: headway job cancel {work.id}"]
    )
    assert process.alive(process.read_json(base / "job" / "handle.json")) is not stops
    (base / "go").touch()
    done = supervise(base, journal, work)
    assert done.result == {"done": True}
    assert (done.adopted, done.submissions) == ((False, 2) if stops else (True, 1))


def test_metrics_are_forwarded_once_and_in_whole_lines(base, journal):
    batches, said = [], []
    work = job("(rank.progress(1, 3, 'one'), write_in_halves(rank, 3), {'done': True})[2]")
    supervise(base, journal, work, metrics=batches.append, progress=said.append)
    assert batches == [[{"step": number, "loss": 0.5}] for number in range(3)]
    assert [(progress["done"], progress["total"], progress["text"]) for progress in said] == [(1, 3, "one")]


def test_two_ranks_run_under_torchrun_and_one_ranks_mistake_ends_both(base, journal):
    def handle():
        return process.read_json(base / "job" / "handle.json") or {"ranks": []}

    code = f"(wait_for({str(base / 'go')!r}), fail(ValueError('rank 1 cannot'))) if rank.rank else time.sleep(60)"
    after(lambda: len(handle()["ranks"]) == 2 and len(starts(base)) == 2, (base / "go").touch)
    with pytest.raises(ValueError, match="rank 1 cannot"):
        supervise(base, journal, job(code, ranks_per_node=2))
    assert sorted(starts(base)) == ["1 0", "1 1"]
    assert [(rank["rank"], rank["attempt"]) for rank in handle()["ranks"]] == [(0, 1), (1, 1)]
    assert not any(process.process_started(rank["pid"]) for rank in handle()["ranks"])


def test_what_would_be_started_is_a_value():
    one = job("1", threads_per_rank=3, time_limit=9.0, progress="LATEST")
    assert spec(one, Path("/jobs/one")) == process.ProcessSpec(
        argv=[sys.executable, "-m", "tasks.jobs.node", "/jobs/one"],
        env={"HEADWAY_NODE_RANK": "0", "HEADWAY_SUBMISSION": "1", "HEADWAY_LIMITS": "1"},
        secrets=(),
        log="launcher.log",
        restarts=1,
        progress="LATEST",
        fatal="errors",
        time_limit=9.0,
        grace=30.0,
    )
    place = Place(node_rank=0, address="127.0.0.1", port=29500, attempt=1)
    loopback = {"linux": "lo", "darwin": "lo0"}[sys.platform]
    plain = one.model_dump(mode="json")
    assert launcher(plain, place) == [sys.executable, "-m", "testjobs.program"]
    assert environment(plain, Path("/jobs/one"), place) == {
        "HEADWAY_JOB": "/jobs/one",
        "HEADWAY_ATTEMPT": "1",
        "OMP_NUM_THREADS": "3",
        "GLOO_SOCKET_IFNAME": loopback,
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    }
    two = job("1", ranks_per_node=2).model_dump(mode="json")
    assert launcher(two, place) == [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--node-rank", "0", "--nproc-per-node", "2",
        "--master-addr", "127.0.0.1", "--master-port", "29500", "--rdzv-id", f"{two['token'][:12]}-{two['submission']}-1",
        "-m", "testjobs.program",
    ]  # fmt: skip
