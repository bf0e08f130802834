"""The ledger: what it took is there after a kill, once, however many processes hand it in; batches cover each event once."""

import multiprocessing
import random
import signal
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from pydantic import ValidationError

from tasks.events import batches
from tasks.events.event import Event
from tasks.events.ledger import Ledger

pytestmark = pytest.mark.unit

TAKER = """
import sys
from pathlib import Path
from tasks.events.event import Event
from tasks.events.ledger import Ledger

home, said = Path(sys.argv[1]), open(sys.argv[2], "a", buffering=1)
ledger = Ledger(home)
for start in range(0, 1000, 32):
    numbers = range(start, min(start + 32, 1000))
    ledger.receive_all([
        Event(name="data.arrived", subject="dataset/web", source="queue", identity=f"m{n}", object=f"blob{n}",
              occurred=n, channel="queue")
        for n in numbers
    ])
    said.write("".join(f"m{n}\\n" for n in numbers))
"""


def event(identity, *, name="dataset.published", subject="dataset/web", **told):
    told = {"source": "here", "occurred": 1.0, "channel": "hand", **told}
    return Event(name=name, subject=subject, identity=str(identity), **told)


@pytest.fixture
def ledger(tmp_path):
    return Ledger(tmp_path)


def rows(ledger, query, *values):
    with ledger.snapshot() as db:
        return [dict(row) for row in db.execute(query, values).fetchall()]


def everything(ledger):
    return rows(ledger, "SELECT * FROM events ORDER BY number")


def make(ledger, trigger="t", subject="dataset/web", *, cooldown=0.0, now=100.0):
    return batches.make_batch(
        ledger, trigger, subject, deployment="probe/it", dataset=lambda row: row["object"], cooldown=cooldown, now=now
    )


def routed(ledger, *triggers):
    batches.route(ledger, lambda name, subject: triggers, triggers)


def test_the_same_event_is_taken_once(ledger):
    first = ledger.receive(event(1, object="dataset/web@a"))
    assert (first.status, first.of) == ("accepted", None)
    assert ledger.receive(event(1, object="dataset/web@a"))[1:] == ("duplicate", first.number)
    same_object = ledger.receive(event(2, source="elsewhere", object="dataset/web@a"))
    assert same_object[1:] == ("duplicate", first.number)
    assert ledger.receive(event(3, name="data.arrived", object="dataset/web@a")).status == "accepted"
    assert [ledger.receive(event(number)).status for number in (4, 5)] == ["accepted"] * 2, "no object is no duplicate"


def test_what_repeats_a_duplicate_is_still_one_of_the_first(ledger):
    first = ledger.receive(event(1, object="dataset/web@a"))
    ledger.receive(event(2, object="dataset/web@a"))
    assert ledger.receive(event(2, object="dataset/web@b")).status == "accepted", "only accepted ones are remembered"
    assert ledger.receive(event(9, object="dataset/web@a")).of == first.number


def test_what_is_refused_is_kept_with_the_reason_and_keeps_nothing_out(ledger):
    number = ledger.refuse("webhook", "forged" * 1000, source="s" * 9999, identity="1", about="x")
    ledger.refuse("queue", "no JSON", source="here", identity="1", poison=True)
    assert ledger.receive(event(1)).status == "accepted"
    first, second, _ = everything(ledger)
    assert (first["number"], first["status"], second["status"]) == (number, "refused", "poison")
    assert len(first["source"]) == len(first["reason"]) == 2048


def test_several_are_taken_together_or_not_at_all(ledger):
    def full(db):
        raise RuntimeError("full")

    with pytest.raises(RuntimeError, match="full"):
        ledger.receive_all([event(1), event(2)], first=full)
    assert everything(ledger) == []
    with pytest.raises(RuntimeError), ledger.transaction() as db:
        db.execute("INSERT INTO marks VALUES ('x', 1)")
        raise RuntimeError
    assert rows(ledger, "SELECT * FROM marks") == []


def test_an_event_of_an_unknown_name_or_a_huge_one_is_no_event():
    for wrong in ({"name": "model.eaten"}, {"subject": "x" * 3000}):
        with pytest.raises(ValidationError):
            event(1, **wrong)


def hand_in(home, seed):
    """1,000 objects, each told of by several senders, in another order in each process."""
    numbers = [n % 1000 for n in range(1500)]
    random.Random(seed).shuffle(numbers)
    ledger = Ledger(home)
    for start in range(0, len(numbers), 100):
        ledger.receive_all([event(f"{seed}/{n}", object=f"blob{n}", occurred=n) for n in numbers[start : start + 100]])


def test_processes_that_hand_in_the_same_shuffled_events_leave_one_of_each(ledger, tmp_path):
    context = multiprocessing.get_context("spawn")
    running = [context.Process(target=hand_in, args=(tmp_path, seed)) for seed in range(2)]
    for process in running:
        process.start()
    for process in running:
        process.join()
    assert [process.exitcode for process in running] == [0] * 2
    found = everything(ledger)
    accepted = {row["number"]: row["object"] for row in found if row["status"] == "accepted"}
    assert len(found) == 3000 and sorted(accepted.values()) == sorted(f"blob{n}" for n in range(1000))
    assert all(accepted[row["of"]] == row["object"] for row in found if row["status"] == "duplicate")


@pytest.mark.integration
def test_threads_share_a_ledger(ledger):
    with ThreadPoolExecutor(8) as pool:
        receipts = list(pool.map(lambda n: ledger.receive(event(n % 20)), range(200)))
    assert sum(receipt.status == "accepted" for receipt in receipts) == 20


@pytest.mark.integration
def test_a_kill_while_events_are_taken_loses_none_that_was_acknowledged_and_doubles_none(ledger, tmp_path):
    said = tmp_path / "said"
    said.touch()
    for acknowledged in (32, 200, 555):
        before = said.stat().st_size
        taker = subprocess.Popen([sys.executable, "-c", TAKER, str(tmp_path), str(said)])
        while said.stat().st_size - before < acknowledged * 5 and taker.poll() is None:
            time.sleep(0.001)
        taker.send_signal(signal.SIGKILL)
        taker.wait()
    accepted = [row["identity"] for row in everything(ledger) if row["status"] == "accepted"]
    assert len(accepted) == len(set(accepted))
    assert set(said.read_text().split()) <= set(accepted)
    subprocess.run([sys.executable, "-c", TAKER, str(tmp_path), str(said)], check=True)
    accepted = [row["identity"] for row in everything(ledger) if row["status"] == "accepted"]
    assert sorted(accepted) == sorted(f"m{n}" for n in range(1000))


def test_a_batch_covers_all_that_wait_and_the_newest_says_of_what(ledger):
    ledger.receive_all(
        [event(n, object=f"dataset/web@{n}", occurred=when) for n, when in ((1, 5.0), (2, 9.0), (3, 7.0))]
    )
    ledger.receive(event(4, subject="dataset/other"))
    routed(ledger, "t", "u")
    made = make(ledger)
    assert (made.dataset, made.attempts, made.flow_run) == ("dataset/web@2", 0, None)
    assert [row["number"] for row in batches.events_of(ledger, made.id)] == [1, 2, 3]
    assert sorted(batches.waiting(ledger)) == [("t", "dataset/other"), ("u", "dataset/other"), ("u", "dataset/web")]
    assert make(ledger, "u").id != made.id and make(ledger, "u", "dataset/none") is None


def test_what_comes_while_a_run_is_at_work_or_cools_down_waits_for_one_more(ledger):
    ledger.receive(event(1))
    routed(ledger, "t")
    first = make(ledger, now=100.0)
    ledger.receive_all([event(n) for n in range(2, 50)])
    routed(ledger, "t")
    assert make(ledger, now=101.0) is None, "a run is in progress"
    batches.note_ended(ledger, first, "completed", 110.0)
    assert make(ledger, cooldown=60.0, now=159.0) is None, "the cool-down counts from the last start"
    with ledger.snapshot() as db:
        assert batches.held(db, "t", "dataset/web", 60.0, 159.0) == ("cool-down", 160.0)
    second = make(ledger, cooldown=60.0, now=160.0)
    assert len(batches.events_of(ledger, second.id)) == 48


def test_a_clock_that_was_set_back_does_not_keep_events_for_ever(ledger):
    ledger.receive_all([event(1)])
    routed(ledger, "t")
    batches.note_ended(ledger, make(ledger, now=9e9), "completed", 9e9)
    ledger.receive(event(2))
    routed(ledger, "t")
    assert make(ledger, cooldown=60.0, now=100.0) is not None
    ledger.receive(event(3))
    routed(ledger, "t")
    assert make(ledger, now=200.0) is None, "the one that is at work counts, whatever the clock says of the other"


def test_an_event_is_given_to_triggers_once_and_later_ones_do_not_get_it(ledger):
    ledger.receive_all([event(1), event(2, name="model.stale", subject="model/tiny")])
    batches.route(ledger, lambda name, subject: {"dataset.published": ["t"]}.get(name, []), ["t"])
    routed(ledger, "t", "late")
    assert batches.waiting(ledger) == [("t", "dataset/web")]
    routed(ledger)
    assert batches.waiting(ledger) == [], "nobody wants it any more"


@pytest.mark.integration
def test_one_flow_run_has_a_batch(ledger, tmp_path):
    ledger.receive(event(1))
    routed(ledger, "t")
    batch = make(ledger)
    with ThreadPoolExecutor(8) as pool:
        holders = set(pool.map(lambda n: Ledger(tmp_path).claim(batch.id, f"run{n}"), range(40)))
    assert len(holders) == 1 and ledger.claim(batch.id, "another") in holders
    assert ledger.claim("no-such-batch", "run") is None
    batches.note_ended(ledger, batch, "cancelled", 1.0)
    assert batches.open_batches(ledger) != [], "it was read before somebody claimed it: it is at work"


def test_a_batch_that_is_over_is_not_claimed(ledger):
    ledger.receive(event(1))
    routed(ledger, "t")
    batch = make(ledger)
    batches.note_seen(ledger, batch, "run1")
    batches.note_ended(ledger, batch, "cancelled", 1.0)
    assert ledger.claim(batch.id, "run2") == "run1" and batches.open_batches(ledger) == []


def test_old_finished_events_are_forgotten_and_none_that_waits(ledger):
    ledger.receive_all([event(n) for n in range(10)])
    routed(ledger, "t")
    batches.note_ended(ledger, make(ledger), "completed", 1.0)
    ledger.receive_all([event(n) for n in range(10, 20)])
    routed(ledger, "t")
    at_work = make(ledger)
    ledger.receive_all([event(n) for n in range(20, 30)])
    routed(ledger, "t")
    ledger.receive_all([event(n, name="data.arrived") for n in range(30, 40)])
    routed(ledger, "t")
    for n in range(10):
        ledger.refuse("webhook", f"forged {n}")
    ledger.receive_all([event(n) for n in range(40, 45)])
    assert batches.prune(ledger, accepted=0, others=3) == 17
    found = everything(ledger)
    kept = [row["identity"] for row in found if row["status"] == "accepted"]
    assert kept == [str(n) for n in range(10, 45)], "at work, waiting, being gathered, not looked at"
    assert [row["reason"] for row in found if row["status"] == "refused"] == ["forged 7", "forged 8", "forged 9"]
    assert [row["id"] for row in rows(ledger, "SELECT id FROM batches")] == [at_work.id]
    assert ledger.receive(event(99)).number == 56, "numbers are never given twice"


def test_strangers_who_are_refused_push_no_accepted_event_out(ledger):
    ledger.receive(event(1))
    routed(ledger)
    for n in range(30):
        ledger.refuse("webhook", f"forged {n}")
    batches.prune(ledger, accepted=5, others=5)
    assert ledger.receive(event(1)).status == "duplicate"


def test_only_the_owner_may_read_the_folder(ledger):
    ledger.receive(event(1))
    assert ledger.path.parent.stat().st_mode & 0o077 == 0
    with pytest.raises(sqlite3.OperationalError), ledger.snapshot() as db:
        db.execute("SELECT * FROM nothing")
