"""Models of the two books that nothing may be lost from: the ledger of events, and the journal of submissions.

Each is driven in any order beside a plain model of it in sets and dictionaries, which must agree at every step. Kills and several
processes are test_ledger.py.
"""

import os
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tasks.common.errors import Conflict
from tasks.common.process import read_json, write_json
from tasks.compute.job import Job
from tasks.compute.submission import intend, newest, note_handle, require_reachable, set_aside, settle
from tasks.events import batches
from tasks.events.batches import Batch
from tasks.events.event import Event
from tasks.events.ledger import Ledger
from tasks.registry.records import StoreJournal
from tasks.storage import open_store

NAMES = ("dataset.published", "model.stale", "data.arrived")
TASTES = {
    "t": ("dataset.published",),
    "u": ("dataset.published", "model.stale"),
    "v": ("dataset.published", "data.arrived"),
}
"""Which names each trigger wants."""
SUBJECTS = ("dataset/web", "dataset/code")
EVENTS = st.builds(
    Event,
    name=st.sampled_from(NAMES),
    subject=st.sampled_from(SUBJECTS),
    source=st.sampled_from(("here", "there")),
    identity=st.sampled_from("12345678"),
    object=st.sampled_from(("", "", "a", "b", "c", "d")),
    occurred=st.sampled_from((1.0, 2.0, 3.0)),
    channel=st.just("hand"),
)
COOLDOWN = 50.0


class Full(Exception):
    """What keeps a transaction from being kept."""


@dataclass
class Made:
    """A batch, as the model has it."""

    trigger: str
    subject: str
    made: float
    events: set[int]
    flow_run: str | None = None
    seen: str | None = None
    ended: bool = False
    sent: int = 0


class EventLedger(RuleBasedStateMachine):
    """Every event once, covered once for each trigger, and one flow run a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.home = Path(tempfile.mkdtemp())
        self.now, self.number, self.routed = 1000.0, 0, 0
        self.accepted: dict[int, Event] = {}
        self.others: dict[int, str] = {}
        self.became: set[int] = set()
        self.wanted: set[tuple[str, int]] = set()
        self.made: dict[str, Made] = {}
        self.holders: dict[str, str] = {}
        """Whom each batch was ever given to."""
        self.read: list[Batch] = []
        """Batches as somebody read them, maybe long ago."""
        self.open_ledger()

    def open_ledger(self):
        """Another process opens it, or the same one again."""
        self.ledger = Ledger(self.home)
        with self.ledger.snapshot() as db:
            self.connection = db
        self.connection.execute("PRAGMA synchronous = OFF")  # no machine stops here

    def teardown(self) -> None:
        self.connection.close()
        shutil.rmtree(self.home)

    # events

    def repeats(self, event: Event, accepted: dict[int, Event]) -> int | None:
        for number, other in accepted.items():
            if (other.source, other.identity) == (event.source, event.identity):
                return number
        return next(
            (n for n, o in accepted.items() if event.object and (o.name, o.object) == (event.name, event.object)), None
        )

    @rule(events=st.lists(EVENTS, min_size=1, max_size=4))
    def receive(self, events):
        """Several at once; each is accepted, or repeats one that was."""
        receipts = self.ledger.receive_all(events, now=self.now)
        for event, receipt in zip(events, receipts, strict=True):
            known = self.repeats(event, self.accepted)
            self.number += 1
            assert receipt == (self.number, "accepted" if known is None else "duplicate", known)
            if known is None:
                self.accepted[self.number] = event
            else:
                self.others[self.number] = "duplicate"
            assert self.ledger.knows(event)

    @precondition(lambda self: self.accepted)
    @rule(data=st.data())
    def deliver_again(self, data):
        """Queues and senders tell of the same twice."""
        self.receive([data.draw(st.sampled_from([*self.accepted.values()]))] * 2)

    @rule(what=st.sampled_from(("opened again", "refused", "poison", "failed", "failed half-way")))
    def something_else(self, what):
        """Another process opens it, something is refused, or a transaction fails: that keeps nothing, and takes no number."""

        def full(db):
            if what == "failed half-way":
                db.execute("INSERT INTO events (received, channel, status) VALUES (1, 'hand', 'refused')")
            raise Full

        if what == "opened again":
            self.connection.close()
            self.open_ledger()
        elif what.startswith("failed"):
            event = Event(name="model.stale", subject="m", source="here", identity="9", occurred=1.0, channel="hand")
            with pytest.raises(Full):
                self.ledger.receive_all([event], now=self.now, first=full)
        else:
            self.number += 1
            number = self.ledger.refuse("webhook", "forged", source="here", identity="1", poison=what == "poison")
            assert number == self.number
            self.others[number] = what

    @rule(subject=st.sampled_from(SUBJECTS))
    def arrivals_become_a_version(self, subject):
        """As the bridge notes it on all that waited (deployments/bridge/arrivals.py)."""
        with self.ledger.transaction() as db:
            db.execute(
                "UPDATE events SET became = 0 WHERE name = 'data.arrived' AND status = 'accepted' AND subject = ?",
                (subject,),
            )
        self.became |= {n for n, e in self.accepted.items() if (e.name, e.subject) == ("data.arrived", subject)}

    # batches

    @rule(triggers=st.sampled_from((("t",), ("t", "u"), ("u", "v"), ("t", "u", "v"), ("t", "u", "v"), ("t", "u", "v"))))
    def route(self, triggers):
        """Each new event waits for who wants it; what waits for a trigger that is gone is handed on."""

        def wanted_by(name, subject):
            return [trigger for trigger in triggers if name in TASTES[trigger]]

        batches.route(self.ledger, wanted_by, triggers)
        for number, event in self.accepted.items():
            if number > self.routed:
                self.wanted |= {(trigger, number) for trigger in wanted_by(event.name, event.subject)}
        for gone, number in [pair for pair in self.wanted if pair[0] not in triggers]:
            event = self.accepted[number]
            heirs = {(heir, number) for heir in wanted_by(event.name, event.subject)}
            self.wanted |= {(heir, n) for heir, n in heirs if not self.covered(heir, n)}
            self.wanted.discard((gone, number))
        self.routed = max(self.routed, max([*self.accepted, *self.others], default=0))

    def covered(self, trigger: str, number: int) -> list[str]:
        return [name for name, one in self.made.items() if one.trigger == trigger and number in one.events]

    @precondition(lambda self: self.wanted)
    @rule(data=st.data(), pause=st.sampled_from((0, 20, 60, -500)))
    def make_batch(self, data, pause):
        """All that wait, in one; none while one is open, or cools down; a clock that is set back holds nobody up."""
        self.now += pause
        pairs = sorted({(trigger, self.accepted[number].subject) for trigger, number in self.wanted})
        trigger, subject = data.draw(st.sampled_from(pairs))
        told = {"deployment": "d/l", "dataset": lambda row: str(row["number"])}
        made = batches.make_batch(self.ledger, trigger, subject, **told, cooldown=COOLDOWN, now=self.now)
        mine = [one for one in self.made.values() if (one.trigger, one.subject) == (trigger, subject)]
        if mine and (not mine[-1].ended or 0 <= self.now - mine[-1].made < COOLDOWN):
            assert made is None
            return
        waits = {n for t, n in self.wanted if t == trigger and self.accepted[n].subject == subject}
        newest_one = max(waits, key=lambda n: (self.accepted[n].occurred, n))
        assert (made.trigger, made.subject, made.dataset) == (trigger, subject, str(newest_one))
        assert {row["number"] for row in batches.events_of(self.ledger, made.id)} == waits
        self.made[made.id] = Made(trigger, subject, self.now, waits)
        self.wanted -= {(trigger, number) for number in waits}
        self.read.append(made)

    @precondition(lambda self: self.read)
    @rule()
    def read_open_batches(self):
        found = batches.open_batches(self.ledger)
        assert {one.id for one in found} == {name for name, one in self.made.items() if not one.ended}
        self.read += found

    @precondition(lambda self: self.read)
    @rule(data=st.data(), flow_run=st.sampled_from(("run1", "run2", "run3")), end=st.booleans())
    def claim(self, data, flow_run, end):
        """The first one has it for good; after its end nobody gets it any more. Maybe another one's end is noted after that."""
        as_read = data.draw(st.sampled_from(self.read[-3:]))
        self.claim_one(as_read.id, flow_run)
        if end:
            self.end_one(as_read)

    def claim_one(self, batch, flow_run):
        one, has = self.made.get(batch), self.ledger.claim(batch, flow_run)
        if one is None:
            assert has is None
            return
        if one.flow_run is None and not one.ended:
            one.flow_run = flow_run
        assert has == (one.flow_run or one.seen or "ended")
        if one.flow_run:
            assert self.holders.setdefault(batch, has) == has, "a batch has two flow runs"

    @precondition(lambda self: self.read)
    @rule(data=st.data(), flow_run=st.sampled_from(("run1", "run2")))
    def prefect_has_a_run(self, data, flow_run):
        batch = data.draw(st.sampled_from(self.read[-3:]))
        batches.note_sent(self.ledger, batch, self.now)
        batches.note_seen(self.ledger, batch, flow_run)
        if batch.id in self.made:
            self.made[batch.id].seen = flow_run
            self.made[batch.id].sent += 1

    @precondition(lambda self: self.read)
    @rule(data=st.data())
    def run_ends(self, data):
        """Of a batch as it was read: one that somebody claimed meanwhile is at work, and stays open."""
        self.end_one(data.draw(st.sampled_from(self.read[-3:])))

    def end_one(self, batch):
        batches.note_ended(self.ledger, batch, "completed", self.now)
        one = self.made.get(batch.id)
        if one and one.flow_run == batch.flow_run:
            one.ended = True

    @rule(accepted=st.sampled_from((0, 0, 2)), others=st.sampled_from((0, 0, 1)))
    def prune(self, accepted, others):
        """The oldest beyond so many go, and only what is finished; with them batches of which nothing is left."""
        gone = self.old(self.accepted, accepted) | self.old(self.others, others)
        assert batches.prune(self.ledger, accepted=accepted, others=others) == len(gone)
        for number in gone:
            self.accepted.pop(number, None)
            self.others.pop(number, None)
        for name, one in list(self.made.items()):
            one.events -= gone
            if gone and one.ended and not one.events:
                del self.made[name]

    def old(self, events, keep: int) -> set[int]:
        return {number for number in sorted(events, reverse=True)[keep:] if not self.unfinished(number)}

    def unfinished(self, number: int) -> bool:
        event = self.accepted.get(number)
        waits = any(n == number for _, n in self.wanted)
        at_work = any(number in one.events and not one.ended for one in self.made.values())
        gathered = event is not None and event.name == "data.arrived" and number not in self.became
        return event is not None and (waits or at_work or gathered or number > self.routed)

    # what holds

    @invariant()
    def the_ledger_is_as_the_model_has_it(self):
        with self.ledger.snapshot() as db:
            kept = {row["number"]: row["status"] for row in db.execute("SELECT number, status FROM events")}
            waits = {tuple(row) for row in db.execute("SELECT trigger, event FROM wanted")}
            covers = [tuple(row) for row in db.execute("SELECT batch, trigger, event FROM covered")]
            rows = {row["id"]: row for row in db.execute("SELECT * FROM batches")}
        assert kept == {**dict.fromkeys(self.accepted, "accepted"), **self.others}
        assert waits == self.wanted
        assert set(covers) == {(name, one.trigger, n) for name, one in self.made.items() for n in one.events}
        told = {
            name: (row["flow_run"], row["seen"], row["ended"] is not None, row["attempts"])
            for name, row in rows.items()
        }
        assert told == {name: (one.flow_run, one.seen, one.ended, one.sent) for name, one in self.made.items()}

    @invariant()
    def an_event_is_once_and_covered_once(self):
        events = list(self.accepted.values())
        assert len({(e.source, e.identity) for e in events}) == len(events)
        objects = [(e.name, e.object) for e in events if e.object]
        assert len(set(objects)) == len(objects)
        pairs = [(one.trigger, n) for one in self.made.values() for n in one.events]
        assert len(set(pairs)) == len(pairs) and not set(pairs) & self.wanted
        at_work = [(one.trigger, one.subject) for one in self.made.values() if not one.ended]
        assert len(set(at_work)) == len(at_work)


@dataclass
class Written:
    """One submission, as the model has it."""

    job: Job
    home: str
    handle: dict | None = None
    end: dict | None = None
    marks: list[str] = field(default_factory=list)


class SubmissionJournal(RuleBasedStateMachine):
    """Two homes on one store write down the submissions of one job: what was first stays, and what is closed stays closed."""

    @initialize()
    def begin(self):
        self.patches = pytest.MonkeyPatch()
        self.patches.setattr(os, "fsync", lambda descriptor: None)
        self.root = Path(tempfile.mkdtemp())
        self.journal = StoreJournal(open_store(self.root / "store"))
        self.folders = {home: self.root / home / "jobs" / "train-1" for home in ("one", "two")}
        for folder in self.folders.values():
            folder.mkdir(parents=True)
        self.written: list[Written] = []

    def teardown(self) -> None:
        self.patches.undo()
        shutil.rmtree(self.root)

    def job(self, number: int, **fields) -> Job:
        plain = {"name": "train", "token": "5" * 32, "program": "p", "settings": {}, "inputs": {}, "submission": number}
        return Job(**{**plain, **fields})

    @rule(home=st.sampled_from(("one", "two")), late=st.booleans(), stuck=st.sampled_from((0, 1)))
    def intend(self, home, late, stuck):
        """Whoever is first with a number has it; who comes late, or for a number that is taken, writes nothing."""
        opened = self.written and self.written[-1].end is None
        number = len(self.written) + (0 if (late and self.written) or opened else 1)
        job = self.job(number, excluded_nodes=(home,))
        said = intend(job, self.folders[home], self.journal, stuck=stuck, cluster=None)
        if number <= len(self.written):
            assert said is None
            return
        assert (said.number, said.stuck, said.outcome) == (number, stuck, "open")
        self.written.append(Written(job, home))

    @rule(name=st.sampled_from(("a", "b")))
    def note(self, name):
        """A handle is noted once: it is the same job that is found again."""
        if self.written:
            note_handle("5" * 32, len(self.written), {"id": name}, self.journal)
            self.written[-1].handle = self.written[-1].handle or {"id": name}

    @rule(outcome=st.sampled_from(("done", "failed", "cancelled")), home=st.sampled_from(("one", "two", "")))
    def close(self, outcome, home):
        """The first end counts, whoever says another one later; the folder's mark says the same."""
        folder = self.folders.get(home)
        settle("5" * 32, self.journal, outcome, folder=folder, message=outcome)
        if not self.written:
            return
        last = self.written[-1]
        last.end = last.end or {"outcome": outcome, "message": outcome}
        if folder:
            mark = read_json(folder / "settled.json")
            assert (mark["submission"], mark["outcome"]) == (len(self.written), last.end["outcome"])

    @rule(home=st.sampled_from(("one", "two")), left=st.sampled_from(("result.json", "exit.json", "cancelled.json")))
    def work_goes_on_in_the_folder(self, home, left):
        """What a submission left of its end is not there when the next one begins; its checkpoints are."""
        folder = self.folders[home]
        write_json(folder / left, {"of": len(self.written)})
        write_json(folder / "checkpoints" / "LATEST", {})
        set_aside(folder, len(self.written))
        assert not (folder / left).exists() and (folder / "checkpoints" / "LATEST").exists()
        assert list((folder / "submissions").glob(f"*/{left}"))

    @invariant()
    def the_newest_is_as_it_was_written_first(self):
        found = newest("5" * 32, self.journal)
        if not self.written:
            assert found is None
            return
        last = self.written[-1]
        assert (found.number, found.handle) == (len(self.written), last.handle)
        assert found.intent["job"]["excluded_nodes"] == [last.home]
        assert found.outcome == (last.end["outcome"] if last.end else "open")
        assert require_reachable(found, self.folders[last.home], None, None) == "ours"
        with pytest.raises(Conflict):
            require_reachable(found, self.folders["two" if last.home == "one" else "one"], None, None)

    @invariant()
    def numbers_have_no_gap_and_only_the_newest_is_open(self):
        keys = [key for key in self.journal.list("jobs/" + "5" * 32) if key.endswith("/intent")]
        assert [int(key.split("/")[-2]) for key in sorted(keys)] == [*range(1, len(self.written) + 1)]
        for number in range(1, len(self.written)):
            assert self.journal.get(f"jobs/{'5' * 32}/{number:04d}/end")


TestEventLedger = EventLedger.TestCase
TestSubmissionJournal = SubmissionJournal.TestCase
TestEventLedger.settings = settings(max_examples=40, stateful_step_count=35)
TestSubmissionJournal.settings = settings(max_examples=15)


def test_a_file_that_was_told_of_twice_is_forgotten_like_any_other_duplicate(tmp_path):
    ledger = Ledger(tmp_path)
    arrived = Event(name="data.arrived", subject="dataset/web", source="q", identity="1", occurred=1.0, channel="queue")
    ledger.receive_all([arrived] * 10)
    assert batches.prune(ledger, accepted=0, others=3) == 6, "the accepted one still waits to become a version"
