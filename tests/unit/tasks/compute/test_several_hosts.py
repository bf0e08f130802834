"""A job whose supervisor's host dies, stops for a while, or loses the store: another host goes on with it, and it runs once."""

import pytest
from lease_service import LeaseService
from scripted_backend import RUNNING, ScriptedBackend, done

from tasks.common.claims import host_claim
from tasks.common.errors import Cancelled, Conflict, Missing, Superseded
from tasks.common.process import write_json
from tasks.compute.job import Job, JobState
from tasks.compute.jobs_book import reconcile
from tasks.compute.polling import Poller, Watch
from tasks.compute.submission import newest
from tasks.compute.supervisor import run
from tasks.config.cluster import ClusterConfig, RetryConfig
from tasks.config.database import keep, parse, platform_of
from tasks.registry.records import StoreJournal
from tasks.storage import open_folder

pytestmark = pytest.mark.unit

TOKEN = "5" * 32
MIRRORED = ClusterConfig.model_validate({"backend": "slurm", "mirror": {}})
PLAIN_MACHINES = ClusterConfig.model_validate({"backend": "ssh", "ssh": {"hosts": ["a"]}, "mirror": {}})
SHARED = ClusterConfig.model_validate({"backend": "ssh", "ssh": {"hosts": ["a"]}})
LOCAL = ClusterConfig()
WORK = Job(
    name="train",
    token=TOKEN,
    program="testjobs.program",
    settings={},
    inputs={},
    retry=RetryConfig(attempts=2, back_off_seconds=0.01),
)


class Killed(BaseException):
    """The process of a supervisor ends without another step."""


class Host:
    """A home of its own in a store that is everybody's."""

    def __init__(self, base, service, name, monkeypatch):
        self.name, self.home, self._patches = name, base / name, monkeypatch
        self.process = service.process(name)
        self.journal = StoreJournal(open_folder(base / "store"))
        self.journal.claims = self.process
        self.events = []
        (self.home / "jobs").mkdir(parents=True)
        self.give_key(b"k" * 32)

    def give_key(self, key):
        self.key = key

    def supervise(self, backend, cluster=MIRRORED, job=WORK, **watch):
        self._patches.setattr("tasks.compute.submission.socket.gethostname", lambda: self.name)
        self._patches.setattr("tasks.compute.submission.folder_key", lambda folder: self.key)
        watching = Watch(event=self.events.append, stop_on_interrupt=lambda: False, **watch)
        return run(
            job,
            backend=backend,
            folder=self.home / "jobs" / job.id,
            journal=self.journal,
            watch=watching,
            cluster=cluster,
            poller=Poller(backend),
        )

    def die(self):
        self.process.dead = True
        raise Killed

    def kinds(self):
        return [event.kind for event in self.events]


@pytest.fixture
def service():
    return LeaseService()


@pytest.fixture
def hosts(tmp_path, service, monkeypatch):
    return [Host(tmp_path, service, name, monkeypatch) for name in ("one", "two")]


class Dying(ScriptedBackend):
    """Kills its supervisor's host before or after the scheduler took the job."""

    host, moment = None, ""

    def submit(self, job, folder):
        if self.moment == "before":
            self.host.die()
        handle = super().submit(job, folder)
        if self.moment == "after":
            self.host.die()
        return handle


def killed(host, cluster=MIRRORED, *plays, moment="running"):
    """A supervisor that is killed with its host; the scheduler is left."""
    backend = Dying(*(plays or (done,)))
    backend.host, backend.moment = host, moment

    def look():
        if moment == "running":
            host.die()

    with pytest.raises(Killed):
        host.supervise(backend, cluster, cancelled=look)
    backend.moment = ""
    return backend


def submissions(backend):
    return [job.submission for job in backend.jobs]


@pytest.mark.parametrize("moment", ["running", "after"])
def test_the_job_of_a_host_that_died_is_adopted_and_not_submitted_again(hosts, service, moment):
    one, two = hosts
    backend = killed(one, moment=moment)
    service.pass_time(16)
    result = two.supervise(backend)
    assert (result.adopted, result.submissions) == (True, 1) and submissions(backend) == [1]
    assert newest(TOKEN, two.journal).number == 1


def test_while_its_supervisor_lives_another_host_waits_and_takes_the_result(hosts, service):
    one, two = hosts
    backend = ScriptedBackend(done)
    claim = one.process.take(f"jobs/{TOKEN}")
    asked = []

    def wait():
        asked.append(service.pass_time(20))
        if len(asked) == 2:
            claim.give_back()
        return False

    two.supervise(backend, cancelled=wait)
    assert two.kinds()[0] == "waiting" and submissions(backend) == [1] and len(asked) >= 2


def test_an_intent_that_its_host_may_yet_submit_is_closed_and_the_next_number_submitted(hosts, service):
    """Its supervisor may only be stopped. Machines of a number that is not the newest end themselves."""
    one, two = hosts
    backend = killed(one, moment="before")
    service.pass_time(16)
    two.supervise(backend)
    assert submissions(backend) == [2]
    assert two.journal.get(f"jobs/{TOKEN}/0001/end")["message"] == "its supervisor was lost before its scheduler had it"


def test_a_supervisor_that_was_stopped_while_another_took_over_does_nothing_more(hosts, service):
    """It wakes up in the middle of its job's life: it cancels nothing, writes nothing, and ends with Superseded."""
    one, two = hosts
    scheduler = {}

    def play(job, folder, look):
        if look == 2:
            one.process.stopped = True
            service.pass_time(16)
            scheduler["other"] = two.process.take(f"jobs/{TOKEN}")
            one.process.stopped = False
            service.pass_time(1)
            return JobState(state="ended", code=1, reason="FAILED")
        return RUNNING

    backend = ScriptedBackend(play, done)
    with pytest.raises(Superseded):
        one.supervise(backend)
    assert submissions(backend) == [1] and backend.cancelled == []
    assert one.journal.get(f"jobs/{TOKEN}/0001/end") is None, "what it saw of the end is the other's to write down"
    scheduler["other"].give_back()
    write_json(two.home / "jobs" / WORK.id / "result.json", {"of": "one"})
    assert newest(TOKEN, two.journal).outcome == "open"


def test_one_that_is_stopped_between_intent_and_submission_does_not_submit(hosts, service):
    one, two = hosts

    class Stops(ScriptedBackend):
        def submit(self, job, folder):
            raise AssertionError("submitted by who was stopped")

    class Journal(StoreJournal):
        def put(self, key, value):
            made = super().put(key, value)
            if key.endswith("/intent") and not one.process.stopped:
                one.process.stopped = True
                service.pass_time(16)
                assert two.process.take(f"jobs/{TOKEN}")
            return made

    one.journal = Journal(one.journal._store)
    one.journal.claims = one.process
    with pytest.raises(Superseded):
        one.supervise(Stops(done))
    assert one.journal.get(f"jobs/{TOKEN}/0001/intent") and not one.journal.get(f"jobs/{TOKEN}/0001/end")


def test_a_store_that_is_away_from_everybody_for_a_while_ends_no_healthy_run(hosts, service):
    one, _ = hosts

    def play(job, folder, look):
        if look == 2:
            service.away = True
            service.pass_time(60)
            service.away = False
            service.pass_time(1)
        return done(job, folder, look - 2) if look > 2 else RUNNING

    backend = ScriptedBackend(play)
    assert one.supervise(backend).submissions == 1 and backend.cancelled == []


def test_a_host_with_another_key_says_so_and_submits_nothing(hosts, service):
    one, two = hosts
    backend = killed(one)
    service.pass_time(16)
    two.give_key(b"x" * 32)
    with pytest.raises(Conflict, match="keys/jobs.key") as refused:
        two.supervise(backend)
    assert "Copy keys/jobs.key" in refused.value.remedy and submissions(backend) == [1]


def test_a_job_whose_folder_only_its_host_sees_stays_its_hosts(hosts, service):
    one, two = hosts
    backend = killed(one, SHARED)
    service.pass_time(16)
    with pytest.raises(Conflict, match="only there is the folder") as refused:
        two.supervise(backend, SHARED)
    assert "cluster.mirror" in refused.value.remedy and submissions(backend) == [1]


def test_a_job_that_only_its_host_can_find_stays_its_hosts(hosts, service):
    one, two = hosts
    backend = killed(one, PLAIN_MACHINES)
    service.pass_time(16)
    with pytest.raises(Conflict, match="cannot be taken over: which machines it runs on"):
        two.supervise(backend, PLAIN_MACHINES)
    assert submissions(backend) == [1]


def test_a_job_that_ran_on_the_host_itself_is_gone_with_it_and_begins_anew(hosts, service):
    one, two = hosts
    for host in hosts:
        keep(host.home, *parse("postgresql://me@db/plat"))
    backend = killed(one, LOCAL)
    watch = service.process("one").take(host_claim(platform_of(one.home), "one"))
    service.pass_time(16)
    with pytest.raises(Conflict):
        two.supervise(backend, LOCAL)
    watch.process.dead = True
    service.pass_time(16)
    two.supervise(backend, LOCAL)
    assert submissions(backend) == [1, 2]


def test_a_job_on_a_host_that_no_watch_stands_for_is_never_taken_for_gone(hosts, service):
    """A home of its own in the same store: nobody but its user knows whether the job is still at work there."""
    one, two = hosts
    backend = killed(one, LOCAL)
    service.pass_time(16)
    with pytest.raises(Conflict, match="open in another home of this store, on one"):
        two.supervise(backend, LOCAL)
    assert submissions(backend) == [1] and newest(TOKEN, two.journal).outcome == "open"


def test_a_supervisor_that_lost_its_job_while_it_was_handed_over_cancels_nothing(hosts, service):
    """It is interrupted after a stop in which another host took the job, and perhaps adopted it."""
    one, two = hosts

    class Interrupted(ScriptedBackend):
        def submit(self, job, folder):
            super().submit(job, folder)
            one.process.stopped = True
            service.pass_time(16)
            assert two.process.take(f"jobs/{TOKEN}")
            one.process.stopped = False
            raise Cancelled("the flow run was cancelled")

    backend = Interrupted(done)
    with pytest.raises(Superseded):
        one.supervise(backend)
    assert submissions(backend) == [1] and backend.cancelled == []
    assert newest(TOKEN, one.journal).outcome == "open"


def test_reconcile_settles_nothing_of_a_job_that_another_host_supervises(hosts, service):
    one, two = hosts
    backend = killed(one)
    one.journal.claims = service.process("one")  # it was started again
    service.pass_time(16)
    claim = two.process.take(f"jobs/{TOKEN}")
    folder = one.home / "jobs" / WORK.id
    write_json(folder / "nodes" / "0" / "exit.json", {"code": 1, "reason": "ended", "attempts": 1})
    assert reconcile(one.home, one.journal) == [] and newest(TOKEN, one.journal).outcome == "open"
    claim.give_back()
    assert [one.verdict for one in reconcile(one.home, one.journal)] == ["unknown"] and backend.cancelled == []


def test_a_store_that_is_away_before_a_job_begins_is_said_before_anything_is_submitted(hosts, service):
    service.away = True
    backend = ScriptedBackend(done)
    with pytest.raises(Missing, match="does not answer"):
        hosts[0].supervise(backend)
    assert backend.jobs == []
