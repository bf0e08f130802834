"""Models of who holds what: a run's place, a job's folder, a folder of parts, an attempt's number, a process by its handle.

The locks are the system's own: several holders in one process are as strange to each other as processes are, for a lock is of
the file that was opened. A holder that is killed leaves what it would have cleaned up. Real processes are in test_process.py.
"""

import os
import shutil
import signal
import tempfile
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tasks.common import process
from tasks.common.process import locked, read_json, write_json
from tasks.compute.supervisor_lock import is_supervised, supervising, unsupervised
from tasks.data.tokenizing import run as tokenizing
from tasks.jobs.checkpoint.files import claim_attempt, newest_attempt

PLACES = ("run-retrain-tiny", "run-retrain-code", "job-1", "job-2", "parts")
"""Two flows of their own subjects, two jobs, and one folder of parts."""


class Busy(Exception):
    """Somebody else holds it, and whoever asked does not want to wait."""


class Killed(BaseException):
    """kill -9 of a holder."""


class Claims(RuleBasedStateMachine):
    """Several processes want the same places. A place has one holder, for as long as that one lives and wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.home = Path(tempfile.mkdtemp())
        self.patches = pytest.MonkeyPatch()
        self.patches.setattr(os, "fsync", lambda descriptor: None)
        self.patches.setattr(process, "POLL_SECONDS", 0)
        self.holders: dict[str, ExitStack] = {}
        self.attempts: list[int] = []
        self.at_the_lock = lambda: None
        """What happens between the opening of a file and its lock."""
        lock = tokenizing.fcntl.flock

        def flock(file, how):
            happens, self.at_the_lock = self.at_the_lock, lambda: None
            happens()
            lock(file, how)

        self.patches.setattr(tokenizing, "fcntl", SimpleNamespace(flock=flock, LOCK_EX=2, LOCK_NB=4))
        for place in PLACES:
            (self.home / place).mkdir()
        (self.home / "parts").rmdir()

    def teardown(self) -> None:
        for place in list(self.holders):
            self.let_go(place)
        self.patches.undo()
        shutil.rmtree(self.home)

    def claim(self, place: str, waiting):
        """The product's own way to hold a place."""
        if place.startswith("run"):
            return locked(self.home / "locks" / place, waiting=waiting)
        if place == "parts":
            return tokenizing._held(self.home / "parts")
        return supervising(self.home / place, place, flow_run="f", claims=None, waiting=waiting)

    def busy(self) -> None:
        raise Busy

    def take(self, place: str, waiting=None) -> ExitStack:
        stack = ExitStack()
        try:
            stack.enter_context(self.claim(place, waiting or self.busy))
        except ValueError as error:
            assert "another process writes to" in str(error)
            raise Busy from error
        return stack

    def let_go(self, place: str) -> None:
        self.holders.pop(place).close()

    def die(self, place: str) -> None:
        """The system closes the holder's files; nothing that the holder would still have done is done."""
        left = read_json(self.home / place / "supervisor.json")
        with pytest.MonkeyPatch.context() as patches, suppress(Killed):
            patches.setattr(tokenizing, "_drop_empty", lambda parts: None)
            stack = self.holders.pop(place)
            with stack:
                raise Killed
        if left:
            write_json(self.home / place / "supervisor.json", left)

    @rule(place=st.sampled_from(PLACES))
    def somebody_wants_it(self, place):
        """One gets it only when nobody has it; one that does not get it takes nothing away from who has it."""
        if place in self.holders:
            with pytest.raises(Busy):
                self.take(place)
        else:
            self.holders[place] = self.take(place)

    @precondition(lambda self: any(place != "parts" for place in self.holders))
    @rule(data=st.data(), patience=st.integers(0, 3), dies=st.booleans())
    def somebody_waits_for_it(self, data, patience, dies):
        """Who waits gets it when the one before lets it go, or dies."""
        place = data.draw(st.sampled_from(sorted(set(self.holders) - {"parts"})))
        waited = []

        def waiting():
            waited.append(1)
            assert place in self.holders, "nobody holds it, and still it is waited for"
            if len(waited) > patience:
                (self.die if dies else self.let_go)(place)

        self.holders[place] = self.take(place, waiting)
        assert len(waited) == patience + 1

    @precondition(lambda self: "parts" in self.holders)
    @rule(dies=st.booleans(), third=st.booleans())
    def the_folder_goes_while_somebody_opens_it(self, dies, third):
        """Who is done removes the folder with the lock in it: a lock on the old file is no claim on the new one."""

        def meanwhile():
            (self.die if dies else self.let_go)("parts")
            if third:
                self.holders["parts"] = self.take("parts")

        self.at_the_lock = meanwhile
        if third:
            with pytest.raises(Busy):
                self.take("parts")
        else:
            self.holders["parts"] = self.take("parts")

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), dies=st.booleans())
    def a_holder_ends(self, data, dies):
        place = data.draw(st.sampled_from(sorted(self.holders)))
        (self.die if dies else self.let_go)(place)

    @rule(place=st.sampled_from(("job-1", "job-2")))
    def somebody_keeps_supervisors_away(self, place):
        """As `headway reconcile` does while it looks at a job: never beside a supervisor, and none comes meanwhile."""
        with unsupervised(self.home / place, place, None) as mine:
            assert mine is (place not in self.holders)
            with pytest.raises(Busy):
                self.take(place)
            with unsupervised(self.home / place, place, None) as theirs:
                assert not theirs

    @rule(attempt=st.integers(0, 4))
    def a_start_takes_its_number(self, attempt):
        """Of an attempt: the first free one, which nobody ever had."""
        taken = claim_attempt(self.home, attempt)
        assert taken >= attempt and taken not in self.attempts
        assert all(number in self.attempts for number in range(attempt, taken)), "a free one was left out"
        self.attempts.append(taken)
        assert newest_attempt(self.home) == max(self.attempts)

    @invariant()
    def a_place_is_held_by_its_holder_and_nobody_else(self):
        """Asked with no claim of our own: whether the place is free."""
        for place in PLACES:
            free = self.free(place)
            assert free is (place not in self.holders), f"{place} is {'free' if free else 'held'}"

    def free(self, place: str) -> bool:
        if place.startswith("job"):
            return not is_supervised(self.home / place)
        path = self.home / "parts" / ".lock" if place == "parts" else self.home / "locks" / place
        if not path.exists():
            return True
        with open(path) as file:
            return process._lock(file)

    @invariant()
    def who_supervises_stands_in_the_folder(self):
        for place in {"job-1", "job-2"} & set(self.holders):
            assert process.alive(read_json(self.home / place / "supervisor.json"))


@dataclass
class Running:
    """A process of the machine, and whether it ends when it is asked to."""

    started: str
    obeys: bool


class Handles(RuleBasedStateMachine):
    """Processes come and go, their numbers are used again, the machine is started anew: a handle means its very process."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.running: dict[int, Running] = {}
        self.boot, self.now, self.count = 1, 0.0, 0
        self.handles: list[dict] = []
        self.aim: dict = {}
        """The handle whose process is being stopped."""
        self.patches = pytest.MonkeyPatch()
        put = self.patches.setattr
        put(process, "process_started", lambda pid: self.running[pid].started if pid in self.running else None)
        put(process, "boot_id", lambda: f"boot-{self.boot}")
        put(process, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))
        put(process, "os", SimpleNamespace(**{**vars(os), "kill": self.kill, "fsync": lambda descriptor: None}))

    def teardown(self) -> None:
        self.patches.undo()
        shutil.rmtree(self.folder)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def kill(self, pid: int, number: int) -> None:
        assert self.is_there(self.aim), "somebody else's process is killed"
        assert pid == self.aim["pid"]
        if self.running[pid].obeys or number == signal.SIGKILL:
            del self.running[pid]

    def is_there(self, handle) -> bool:
        """The truth: whether the process that a handle was written for runs."""
        found = self.running.get(handle["pid"])
        return found is not None and handle["boot_id"] == f"boot-{self.boot}" and found.started == handle["started"]

    @rule(pid=st.sampled_from((7, 8, 9)), same_second=st.booleans(), obeys=st.booleans())
    def one_starts(self, pid, same_second, obeys):
        """With a number that is free; after a restart of the machine it may even have started at the same count."""
        if pid in self.running:
            return
        self.count += 1
        known = {handle["started"] for handle in self.handles if handle["boot_id"] == f"boot-{self.boot}"}
        started = "1" if same_second and "1" not in known else f"{self.count + 1}"
        self.running[pid] = Running(started, obeys)
        self.handles.append({"pid": pid, "started": started, "boot_id": f"boot-{self.boot}"})

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def one_dies(self, data):
        del self.running[data.draw(st.sampled_from(sorted(self.running)))]

    @rule()
    def the_machine_starts_again(self):
        self.boot += 1
        self.running.clear()

    @precondition(lambda self: self.handles)
    @rule(data=st.data())
    def somebody_stops_one(self, data):
        """By the handle of a folder, which may be of long ago: it ends that process, and touches no other."""
        self.aim = data.draw(st.sampled_from(self.handles))
        others = {
            pid: one for pid, one in self.running.items() if not self.is_there(self.aim) or pid != self.aim["pid"]
        }
        write_json(self.folder / "handle.json", self.aim)
        before = self.now
        process.stop(self.folder, timeout=5.0)
        assert self.running == others
        assert self.now - before < 6.0

    @invariant()
    def a_handle_lives_with_its_process(self):
        assert [process.alive(handle) for handle in self.handles] == [self.is_there(handle) for handle in self.handles]
        assert not process.alive(None) and not process.alive({})


class Parents(RuleBasedStateMachine):
    """A process folder has one parent at a time; one for the same owner goes at once, one for another owner waits its turn."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.inside: list[str] = []
        self.then: list[tuple[str, bool]] = []
        self.patches = pytest.MonkeyPatch()
        self.patches.setattr(os, "fsync", lambda descriptor: None)
        self.patches.setattr(process, "_Supervision", lambda folder: SimpleNamespace(run=self.run))
        self.patches.setattr(process, "time", SimpleNamespace(sleep=self.sleep))

    def teardown(self) -> None:
        self.patches.undo()
        shutil.rmtree(self.folder)

    def sleep(self, seconds: float) -> None:
        raise Busy

    def run(self) -> None:
        """A parent at work: meanwhile others come."""
        assert not self.inside, "two parents in one folder"
        assert not (self.folder / "exit.json").exists(), "the end of the one before is read as this one's"
        owner = read_json(self.folder / "process.json")["owner"]
        self.inside.append(owner)
        for other, has_handle in self.then:
            write_json(self.folder / "handle.json", {"owner": owner if has_handle else "somebody before"})
            write_json(self.folder / "process.json", {"owner": other})
            try:
                process.main(self.folder)
                assert other == owner and has_handle, "it went away, and its owner's work is not done"
            except Busy:
                assert other != owner or not has_handle, "it waits for what runs already"
        self.inside.pop()
        write_json(self.folder / "exit.json", {"code": 0})

    @rule(
        owner=st.sampled_from("ab"),
        then=st.lists(st.tuples(st.sampled_from("ab"), st.booleans()), max_size=3),
        killed=st.booleans(),
    )
    def a_parent_starts(self, owner, then, killed):
        """Whatever the one before left, alive or killed, does not keep the next one out."""
        write_json(self.folder / "process.json", {"owner": owner})
        self.then = then
        process.main(self.folder)
        if killed:
            write_json(self.folder / "handle.json", {"owner": owner})
            (self.folder / "exit.json").unlink()


TestClaims = Claims.TestCase
TestHandles = Handles.TestCase
TestParents = Parents.TestCase
TestClaims.settings = settings(max_examples=25)
TestParents.settings = settings(max_examples=15, stateful_step_count=10)
