"""A model of supervision: a job under every failure, silence, cancellation and kill, in any order, against the real supervisor.

A life of an orchestrator is one call of `run`. Its pauses are the only time there is: at each, one of the things that hypothesis
drew happens, and when there are none left, or at an effect that was drawn, it is killed. No process, no thread and no sleep.
"""

import json
import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from scripted_backend import RUNNING, ScriptedBackend

from tasks.common.errors import Cancelled, JobFailed, Missing
from tasks.common.process import read_json, write_json
from tasks.compute.job import Job, JobState
from tasks.compute.jobs_book import cancel_job, reconcile
from tasks.compute.polling import Clock, Poller, Watch, Watched
from tasks.compute.submission import HOME_DIGITS, home_of, newest, settle
from tasks.compute.supervisor import run
from tasks.config.cluster import ClusterConfig, RetryConfig, WatchConfig

TOKEN = "5" * 32
RETRY = RetryConfig(attempts=3, back_off_seconds=1.0, max_back_off_seconds=3.0, smaller_batch=True)
WATCH = WatchConfig(hang_seconds=3 * 3600, start_minutes=30)
JOB = Job(name="train", token=TOKEN, program="p", settings={}, inputs={}, retry=RETRY, watch=WATCH, progress="LATEST")
CLUSTER = ClusterConfig.model_validate({"backend": "ssh", "ssh": {"hosts": ["a"]}})
FAILURES = (
    "failed after its result",
    "user",
    "infrastructure",
    "node n1",
    "node n2",
    "preempted",
    "timeout",
    "out_of_memory",
    "cancelled",
    "no result",
)
AGAIN = ("infrastructure", "node", "preempted", "timeout", "out_of_memory")
"""Classes that are submitted again, a timeout only with progress: as docs/compute.md has the table."""
HAPPENS = ("runs", "step", "ends", "ends", "ends", "lost", *FAILURES)
"""What may happen to a job while nobody looks."""
ALWAYS = ("away", "back", "flow cancelled", "cancelled by hand", "answer gets lost", "killed", "killed soon")
"""What needs no job."""
QUIET = ((),) * 5
STORIES = st.builds(
    lambda before, before_it_runs, course, ending: (*before, *before_it_runs, "runs", *course, ending),
    st.sampled_from(
        (
            *QUIET,
            ("answer gets lost",),
            ("answer gets lost",),
            ("answer gets lost",),
            ("killed soon",),
            ("away", "back"),
            ("killed",),
            ("away",),
        )
    ),
    st.sampled_from(((), (), (), ("waits long",), ("cancelled at once",))),
    st.sampled_from(
        (
            *QUIET,
            ("step",),
            ("step", "step"),
            ("long step", "long step", "long step"),
            ("lost for a moment",),
            ("step", "stands still"),
            ("stands still",),
            ("away", "step", "back"),
            ("killed soon",),
            ("cancelled by hand",),
            ("flow cancelled",),
            ("away", "flow cancelled"),
        )
    ),
    st.sampled_from((*FAILURES, *FAILURES, "infrastructure", "node n3", "out_of_memory", "lost", "ends")),
)
"""Of one submission, each."""
MOST_PAUSES = 150


class Killed(BaseException):
    """kill -9 of the orchestrator."""


class World(ScriptedBackend):
    """The scheduler, its machines and the clock: the truth that the supervisor sees only parts of."""

    poll_seconds = 0.5

    def __init__(self, folder: Path) -> None:
        super().__init__(self._as_it_is)
        self.folder, self.now = folder, 100_000.0
        self.is_now: dict[str, str] = {}
        """By name of a submission: queued, running, ended, gone, or a class of failure."""
        self.started: set[str] = set()
        """What ran once: of that there are marks; what the scheduler forgot before may be submitted under its name again."""
        self.step, self.stood_still = 0, False
        self.blip = self.loses_answer = self.flow_cancelled = False
        self.script: list[str] = []
        self.kind = False
        """From now on everything goes well."""
        self.ticks: int | None = None
        self.pauses = 0
        self.by_hand = lambda: None

    # the backend's side

    def submit(self, job, folder):
        self.tick()
        if self.is_now.get(job.submission_id) == "gone" and job.submission_id not in self.started:
            self.jobs = [known for known in self.jobs if known.submission_id != job.submission_id]
        handle = super().submit(job, folder)
        self.is_now[job.submission_id] = "queued"
        self.tick()
        if self.loses_answer:
            self.loses_answer = False
            raise Missing("the answer got lost")
        return handle

    def find(self, job, folder):
        found = super().find(job, folder)
        return found if self.is_now.get(job.submission_id) != "gone" else None

    def cancel(self, handle, folder):
        self.tick()
        self._answer()
        if self.is_now[handle["id"]] in ("queued", "running"):
            self.is_now[handle["id"]] = "stopped"
        self.tick()

    def _as_it_is(self, job, folder, look) -> JobState:
        is_now = self.is_now[job.submission_id]
        if self.blip and is_now == "running":
            self.blip = False
            return JobState(state="lost")
        failure, _, node = is_now.partition(" ")
        ended = {"state": "ended", "code": 1, "reason": "FAILED"}
        return {
            "queued": JobState(state="queued", reason="Resources"),
            "running": RUNNING,
            "ended": JobState(state="ended", code=0, reason="ended"),
            "no result": JobState(state="ended", code=0, reason="ended"),
            "gone": JobState(state="lost"),
            "stopped": JobState(state="ended", code=143, reason="FAILED"),
            "infrastructure": JobState(**ended),
            "failed after its result": JobState(**ended),
            "user": JobState(**ended),
        }.get(is_now) or JobState(**ended, failure=failure, failed_nodes=(node,) if node else ())

    # time

    def tick(self) -> None:
        """An effect before or after which the orchestrator may be killed."""
        if self.ticks is not None:
            self.ticks -= 1
            if self.ticks < 0:
                raise Killed

    def pass_time(self, seconds: float) -> None:
        """A pause of the supervisor: time goes by, and the next thing happens that can."""
        self.now += max(seconds, 0.01)
        self.pauses += 1
        assert self.pauses < MOST_PAUSES * 4 or not self.kind, "it never ends, though everything goes well"
        if self.kind:
            self.go_well()
            return
        if self.pauses > MOST_PAUSES or not self.script:
            raise Killed
        if self.may(self.script[0]):
            self.happen(self.script.pop(0))

    def go_well(self) -> None:
        self.away = False
        for name in [name for name, is_now in self.is_now.items() if is_now in ("queued", "running")]:
            self.end(name, "ended")

    def alive(self) -> list[str]:
        return [name for name, is_now in self.is_now.items() if is_now in ("queued", "running")]

    def may(self, what: str) -> bool:
        """Whether it can happen now; else it waits for its time."""
        if what in ALWAYS or what in ("away", "back"):
            return True
        alive = self.alive()
        return bool(alive) and (
            what in ("runs", "lost", "waits long", "cancelled at once") or self.is_now[alive[0]] == "running"
        )

    def happen(self, what: str) -> None:
        match what:
            case "killed":
                raise Killed
            case "killed soon":
                self.ticks = 3
            case "away" | "back":
                self.away = what == "away"
            case "flow cancelled":
                self.flow_cancelled = True
            case "cancelled by hand" | "cancelled at once":
                self.by_hand()
            case "answer gets lost":
                self.loses_answer = True
            case _:
                self.happen_to(self.alive()[0], what)

    def happen_to(self, name: str, what: str) -> None:
        """To the job that is alive."""
        match what:
            case "runs":
                self.is_now[name] = "running"
                self.started.add(name)
                write_json(self.folder / "attempt.json", {"submission": self.number(name), "attempt": 1})
                # What a machine's agent leaves: without it, steps are not taken for those of a further submission.
                mark = {"submission": self.number(name), "attempt": 1, "time": self.now, "code": None}
                write_json(self.folder / "nodes" / "0" / "node.json", mark)
            case "waits long":
                self.now += 20 * 3600
            case "step" | "long step":
                self.now += 20 * 60 if what == "long step" else 0
                self.step += 1
                with open(self.folder / "metrics.jsonl", "a") as file:
                    file.write(json.dumps({"step": self.step, "time": self.now}) + "\n")
            case "lost for a moment":
                self.blip = True
            case "stands still":
                self.now += 10 * 3600
                self.stood_still = True
            case "lost":
                self.is_now[name] = "gone"
            case _:
                self.end(name, "ended" if what == "ends" else what)

    def end(self, name: str, how: str) -> None:
        self.is_now[name] = how
        if how in ("ended", "failed after its result"):
            write_json(self.folder / "result.json", {"submission": self.number(name)})
        if how == "user":
            write_json(
                self.folder / "errors" / "0.json",
                {"class": "user", "type": "ValueError", "message": "no", "attempt": 1},
            )

    def number(self, name: str) -> int:
        return int(name.rpartition("-")[2])


class InlinePoller(Poller):
    """The real look at the scheduler, made while the supervisor waits, and not in a thread."""

    def __init__(self, world: World, clock: Clock) -> None:
        super().__init__(world)
        self._world, self._clock = world, clock

    @contextmanager
    def watching(self, handle, folder):
        yield Watched(handle, folder, clock=self._clock)

    def wait(self, job, timeout):
        self._world.pass_time(timeout)
        self._look([job])
        if self._broken:
            raise self._broken


class Book:
    """The journal: create-only, and checked at every entry against the truth."""

    claims = None

    def __init__(self, model: "Supervision") -> None:
        self.model, self.values = model, {}

    def put(self, key, value):
        self.model.world.tick()
        if key in self.values:
            return False
        number, part = int(key.split("/")[-2]), key.split("/")[-1]
        getattr(self.model, f"check_{part}")(number, value)
        self.values[key] = json.loads(json.dumps(value))
        self.model.world.tick()
        return True

    def get(self, key):
        return self.values.get(key)

    def list(self, prefix):
        return sorted(key for key in self.values if key.startswith(prefix))


class Supervision(RuleBasedStateMachine):
    """One job over many lives of its orchestrator."""

    def __init__(self) -> None:
        super().__init__()
        self.home = Path(tempfile.mkdtemp())
        self.folder = self.home / "jobs" / JOB.id
        self.folder.mkdir(parents=True)
        self.world, self.journal = World(self.folder), Book(self)
        self.world.by_hand = self.cancel_by_hand
        self.patches = pytest.MonkeyPatch()
        self.patches.setattr(os, "fsync", lambda descriptor: None)
        self.step_then: dict[int, int] = {}
        """The newest step when a submission began."""
        self.next = {"stuck": 0, "excluded": (), "smaller": 0}
        """What the next submission must know."""
        self.now_known = dict(self.next)
        self.hung: set[int] = set()
        self.hands: set[int] = set()
        """Submissions that a person cancelled."""
        self.not_before = 0.0
        self.answer: int | None = None
        """The submission whose result the stage has, and has not published yet."""

    def teardown(self) -> None:
        self.everything_goes_well()
        self.patches.undo()
        shutil.rmtree(self.home)

    # what the journal may be told

    def check_intent(self, number, intent):
        """The next one begins after the end of the last, when nothing of it runs any more, and knows what it taught."""
        before = newest(TOKEN, self.journal)
        assert number == (before.number if before else 0) + 1
        assert not self.world.alive(), "a job is submitted while another one of the same work is alive"
        if before:
            assert before.end, "the one before is still open"
        job = intent["job"]
        told = {"stuck": intent["stuck"], "excluded": tuple(job["excluded_nodes"]), "smaller": job["smaller_batches"]}
        assert told == self.next
        assert intent["stuck"] < RETRY.attempts
        assert self.world.now >= self.not_before - 1e-6, "it did not wait before it submitted again"
        self.now_known, self.step_then[number] = told, self.world.step
        self.not_before = 0.0

    def name_of(self, number):
        home = home_of(self.folder)[:HOME_DIGITS]
        return JOB.model_copy(update={"submission": number, "home": home}).submission_id

    def check_handle(self, number, handle):
        assert handle == {"id": self.name_of(number)}

    def check_end(self, number, end):
        """An end says what was so: the class, and what becomes of the job."""
        name = self.name_of(number)
        is_now = self.world.is_now.get(name)
        assert is_now not in ("queued", "running"), "a submission is closed while it is alive"
        self.next = {"stuck": 0, "excluded": (), "smaller": 0}
        if end["outcome"] == "done":
            assert is_now == "ended"
            return
        if "failure" not in end:
            assert end["outcome"] == "cancelled" and (self.world.flow_cancelled or number in self.hands)
            return
        failure, node = self.truth(number, is_now)
        assert end["failure"] == failure, f"{is_now} is told as {end['failure']}"
        assert end["outcome"] == ("cancelled" if failure == "cancelled" else "failed")
        progressed = self.world.step > self.step_then[number]
        stuck = 0 if progressed else self.now_known["stuck"] + 1
        again = failure in AGAIN and is_now != "no result" and stuck < RETRY.attempts
        again = again and (progressed or failure != "timeout")
        assert bool(end.get("again")) is again
        if again:
            excluded = tuple(dict.fromkeys([*self.now_known["excluded"], *([node] if node else [])]))
            smaller = self.now_known["smaller"] + (failure == "out_of_memory")
            self.next = {"stuck": stuck, "excluded": excluded, "smaller": smaller}
            self.not_before = self.world.now + min(2.0 ** max(stuck - 1, 0), 3.0) if self.watched else 0.0

    def truth(self, number: int, is_now: str) -> tuple[str, str]:
        """The class of a submission that has no result, and the machine that failed."""
        failure, _, node = is_now.partition(" ")
        if number in self.hung:
            return "infrastructure", ""
        if number in self.hands:
            return "cancelled", ""
        if is_now in ("gone", "stopped", "no result", "failed after its result"):
            return "infrastructure", ""
        return failure, node

    # lives

    @rule(
        stories=st.lists(STORIES, min_size=1, max_size=5),
        killed=st.sampled_from((*(None,) * 16, *range(8), *range(8, 40, 4))),
    )
    def live(self, stories, killed):
        """The same command, once more: until its end, or until somebody kills it."""
        self.world.script = [happens for story in stories for happens in story]
        before = self.world.script.pop(0) if self.world.script[0] in ("away", "answer gets lost") else ""
        self.world.ticks, self.world.loses_answer = killed, before == "answer gets lost"
        self.world.away = before == "away"
        self.orchestrate()

    def orchestrate(self):
        world = self.world
        world.pauses, world.flow_cancelled, world.stood_still = 0, False, False
        self.hung.clear()
        self.watched = False
        self.not_before = 0.0
        clock = Clock(lambda: world.now, world.pass_time)
        watch = Watch(event=self.told, cancelled=lambda: world.flow_cancelled, stop_on_interrupt=lambda: False)
        try:
            done = run(
                JOB,
                backend=world,
                folder=self.folder,
                journal=self.journal,
                watch=watch,
                cluster=CLUSTER,
                poller=InlinePoller(world, clock),
                clock=clock,
            )
        except Killed:
            return None
        except Cancelled:
            assert world.flow_cancelled
            last = newest(TOKEN, self.journal)
            assert last.end or world.away or not world.alive() or self.said_silent, "a job that nobody wants runs on"
            return None
        except ValueError as error:
            assert str(error) == "no" and newest(TOKEN, self.journal).end["failure"] == "user"
            return None
        except Missing:
            assert not newest(TOKEN, self.journal).end, "a scheduler that did not answer may have taken the job"
            return None
        except JobFailed as error:
            last = newest(TOKEN, self.journal)
            assert last.end and (not last.end.get("again") or error.failure == "cancelled")
            return None
        finally:
            world.ticks = None
        last = newest(TOKEN, self.journal)
        assert done.result == {"submission": last.number}, "the result is another submission's"
        assert (done.submissions, last.outcome) == (last.number, "open")
        assert world.is_now[self.name_of(last.number)] == "ended"
        self.answer = last.number
        return done

    said_silent = False

    def told(self, event):
        """What the supervisor says must be so."""
        if event.kind in ("submitted", "running", "queued"):
            self.watched = True
        if event.kind == "silent":
            self.said_silent = True
        if event.kind == "hung":
            assert self.world.stood_still, "a job that moves does not hang"
            self.hung.add(event.submission)
        if event.kind == "excluded":
            assert self.next["excluded"]

    # meanwhile

    @precondition(lambda self: self.world.alive())
    @rule(what=st.sampled_from(HAPPENS))
    def nobody_looks(self, what):
        """The job goes on without an orchestrator."""
        if self.world.may(what):
            self.world.happen(what)

    @precondition(lambda self: self.world.jobs)
    @rule(what=st.sampled_from(("look", "ask", "look", "ask", "cancel", "publish")))
    def meanwhile(self, what):
        """Somebody looks after jobs, cancels one, or a stage publishes what one made."""
        if what == "cancel":
            self.cancel_by_hand()
        elif what == "publish":
            self.stage_publishes()
        else:
            self.look_after_jobs(ask=what == "ask")

    def cancel_by_hand(self):
        """`headway job cancel`, while somebody supervises the job or while nobody does."""
        last = newest(TOKEN, self.journal)
        known, ticks, self.world.ticks = set(self.hands), self.world.ticks, None
        self.hands.add(last.number)
        try:
            cancel_job(self.home, JOB.id, self.journal, opener=lambda cluster: self.world)
        except (Missing, ValueError):  # the scheduler does not answer, or it is over already
            self.hands = known
        self.world.ticks = ticks

    def look_after_jobs(self, ask):
        """`headway reconcile` settles what ended, and ends nothing."""
        alive, self.watched = self.world.alive(), False
        for found in reconcile(self.home, self.journal, ask=ask, opener=lambda cluster: self.world):
            assert found.verdict != "failed" or not alive
        assert self.world.alive() == alive

    def stage_publishes(self):
        """What the job made is published: from then on the work is done, and wanted again it begins anew."""
        if self.answer:
            settle(TOKEN, self.journal, "done", folder=self.folder)
            self.answer = None

    def everything_goes_well(self):
        """From wherever it is, the same command ends with the result when nothing more goes wrong."""
        self.world.kind, self.world.away, self.world.loses_answer, self.world.ticks = True, False, False, None
        done = self.orchestrate()
        assert done is not None, "the same command did not end with the result"
        self.world.kind = False

    # what holds

    @invariant()
    def one_job_at_most_is_alive(self):
        assert len(self.world.alive()) <= 1

    @invariant()
    def whatever_is_alive_can_be_found_again(self):
        """A job that runs stands in the journal, and its submission is open."""
        for name in self.world.alive():
            last = newest(TOKEN, self.journal)
            assert last.number == self.world.number(name) and not last.end

    @invariant()
    def nobody_supervises_between_two_lives(self):
        assert read_json(self.folder / "supervisor.json") is None


def test_a_job_that_somebody_cancels_while_its_submission_got_no_answer_is_cancelled_and_did_not_fail():
    model = Supervision()
    try:
        model.world.script = ["runs", "infrastructure", "answer gets lost", "cancelled at once"]
        model.orchestrate()
        assert not model.world.alive() and [job.submission for job in model.world.jobs] == [1, 2]
        assert newest(TOKEN, model.journal).outcome == "cancelled"
    finally:
        model.teardown()


TestSupervision = Supervision.TestCase
TestSupervision.settings = settings(max_examples=40, stateful_step_count=12)
