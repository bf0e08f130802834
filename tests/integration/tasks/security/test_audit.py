"""The audit log as a chain: every break is named, appending is cheap and safe for many at once, nothing changes unlogged."""

import json
import multiprocessing
import os
import random
import signal
import time

import pytest
from waiting import limit, until

from tasks.common.errors import Conflict
from tasks.registry.refs import move_ref, read_ref
from tasks.registry.versions import publish
from tasks.security import audit_chain
from tasks.security.audit import acting, audit, audited, entries
from tasks.security.audit_chain import HEAD, Link, append, check, newest
from tasks.storage.history import changes
from tasks.storage.local import LocalStore
from tasks.storage.manifest import Provenance

pytestmark = pytest.mark.unit

fork = multiprocessing.get_context("fork")


class Counting:
    """A store that writes down what it is asked."""

    def __init__(self, store):
        self._store, self.asked = store, []

    def __getattr__(self, name):
        def call(key, *words, **named):
            self.asked.append((name, key))
            return getattr(self._store, name)(key, *words, **named)

        return call


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path)


@pytest.fixture
def log(store, tmp_path):
    """Six entries, and a way to their bytes past the store."""
    for number in range(1, 7):
        audit(store, "delete", what=f"model/coder@{number}", reason="old")
    return tmp_path / "documents" / "audit"


def path(log, number):
    return log / f"{number:08d}.json"


def broken(store, **known):
    found = check(store, **known).broken
    return (found.number, found.problem) if found else None


def sealed(log, number, change):
    """Change an entry, and mend every hash behind it, as somebody would who knows how the log is made."""
    entry = json.loads(path(log, number).read_bytes())
    path(log, number).write_text(json.dumps({**entry, **change}, indent=1))
    for later in range(number + 1, 7):
        link = audit_chain.hash_of(path(log, later - 1).read_bytes())
        entry = json.loads(path(log, later).read_bytes())
        path(log, later).write_text(json.dumps({**entry, "previous": link}, indent=1))


def head_of(log):
    return log.parent / "heads" / "audit.json"


# ---- what breaks the chain


def test_a_log_that_nobody_touched_holds_and_tells_its_head(store, log):
    found = check(store)
    assert (found.entries, found.broken) == (6, None)
    assert found.head == newest(store) == Link(6, audit_chain.hash_of(path(log, 6).read_bytes()))
    assert json.loads(path(log, 6).read_bytes())["previous"] == audit_chain.hash_of(path(log, 5).read_bytes())


def test_an_empty_log_holds(store):
    assert check(store).entries == 0 and broken(store) is None and newest(store).number == 0


@pytest.mark.parametrize("number", range(1, 7))
def test_an_edited_entry_is_named(store, log, number):
    path(log, number).write_bytes(path(log, number).read_bytes().replace(b"old", b"new"))
    assert broken(store) == (number, "changed")


@pytest.mark.parametrize("number", range(1, 7))
def test_a_removed_entry_is_named(store, log, number):
    path(log, number).unlink()
    assert broken(store) == (number, "missing" if number < 6 else "cut off")


@pytest.mark.parametrize("cut", [1, 3, 6])
def test_a_log_that_was_cut_off_at_its_end_is_named(store, log, cut):
    for number in range(7 - cut, 7):
        path(log, number).unlink()
    assert broken(store) == (7 - cut, "cut off")
    audit(store, "go on")
    assert broken(store) == (7 - cut, "missing")


@pytest.mark.parametrize("number", [1, 3, 6])
def test_an_entry_that_was_put_in_is_named(store, log, number):
    for later in range(6, number - 1, -1):
        os.rename(path(log, later), path(log, later + 1))
    before = path(log, number - 1).read_bytes() if number > 1 else b""
    link = audit_chain.hash_of(before) if before else None
    path(log, number).write_text(json.dumps({"number": number, "action": "x", "previous": link}))
    assert broken(store)[1] == "changed" and broken(store)[0] in (number, number + 1)


def test_a_removed_entry_is_named_when_those_behind_it_were_given_its_number(store, log):
    path(log, 3).unlink()
    for later in range(4, 7):
        os.rename(path(log, later), path(log, later - 1))
    assert broken(store) == (3, "changed")


def test_two_entries_that_changed_places_are_named(store, log):
    one, other = path(log, 2).read_bytes(), path(log, 3).read_bytes()
    path(log, 2).write_bytes(other)
    path(log, 3).write_bytes(one)
    assert broken(store) == (2, "changed")


def test_what_is_no_entry_is_named(store, log):
    (log / "00000003b.json").write_text("{}")
    assert broken(store) == (0, "foreign")
    assert len(list(entries(store))) == 6


@pytest.mark.parametrize("odd", [b"", b"[1]", b"{half", b"\xff\xfe"])
def test_an_unreadable_entry_is_named_and_does_not_hide_the_others(store, log, odd):
    path(log, 4).write_bytes(odd)
    assert broken(store) == (4, "changed")
    assert [entry.action for entry in entries(store)].count("delete") == 5


def test_a_log_that_was_written_anew_is_found_by_what_is_known_elsewhere(store, log):
    kept = {number: audit_chain.hash_of(path(log, number).read_bytes()) for number in (2, 6)}
    sealed(log, 4, {"reason": "new"})
    assert broken(store) == (6, "changed")  # the head of the store knows the last one
    head_of(log).write_text(json.dumps({"number": 6, "hash": audit_chain.hash_of(path(log, 6).read_bytes())}))
    assert broken(store) is None  # who may write everywhere in the store can do that
    assert broken(store, contains=[kept[2]]) is None
    assert broken(store, contains=[kept[6]]) == (6, "forgotten")
    assert broken(store, contains=[kept[6][:12].upper()]) == (6, "forgotten")
    assert broken(store, shipped=Link(6, kept[6])) == (6, "changed")
    assert broken(store, shipped=Link(2, kept[2])) is None


def test_a_tail_that_was_cut_off_together_with_the_head_is_found_by_the_copy(store, log):
    known = newest(store)
    for number in (5, 6):
        path(log, number).unlink()
    head_of(log).write_text(json.dumps({"number": 4, "hash": audit_chain.hash_of(path(log, 4).read_bytes())}))
    assert broken(store) is None
    assert broken(store, shipped=known) == (5, "cut off")


@pytest.mark.parametrize("odd", [None, "{half", "{}", '{"number": "x", "hash": 1}'])
def test_a_head_that_is_gone_or_odd_is_named_and_the_log_goes_on(store, log, odd):
    head_of(log).unlink() if odd is None else head_of(log).write_text(odd)
    assert broken(store) == (6, "head")
    audit(store, "go on")
    assert broken(store) is None and newest(store).number == 7


def test_an_entry_that_was_changed_is_not_sealed_by_the_next_one(store, log):
    path(log, 6).write_bytes(path(log, 6).read_bytes().replace(b"old", b"new"))
    audit(store, "go on")
    assert broken(store) == (6, "changed")


def test_a_log_from_before_there_were_heads_holds_and_goes_on(store):
    last = None
    for number in range(1, 4):
        data = json.dumps({"action": "delete", "previous": last}, indent=1).encode()
        store.create(f"audit/{number:08d}.json", data)
        last = audit_chain.hash_of(data)
    assert broken(store) is None
    audit(store, "go on")
    assert broken(store) is None and newest(store).number == 4


# ---- appending


def test_an_append_is_three_requests_however_long_the_log_is(store, log):
    counting = Counting(store)
    audit(counting, "more")
    assert counting.asked == [("read", HEAD), ("create", "audit/00000007.json"), ("replace", HEAD)]


def test_a_head_that_was_left_behind_by_a_kill_is_caught_up_with(store, log):
    behind = store.read(HEAD)
    audit(store, "one")
    audit(store, "two")
    store.replace(HEAD, behind.data, etag=store.read(HEAD).etag)
    assert broken(store) is None
    audit(store, "three")
    assert broken(store) is None and newest(store).number == 9


@pytest.mark.integration
def test_processes_that_write_and_are_killed_leave_one_chain(tmp_path, store):
    def write(number):
        mine, turn = LocalStore(tmp_path), 0
        while True:
            turn += 1
            append(mine, {"action": f"{number}-{turn}"})

    children = [fork.Process(target=write, args=(number,)) for number in range(4)]
    for child in children:
        child.start()
    for child in random.Random(5).sample(children, 3):
        time.sleep(0.3)
        os.kill(child.pid, signal.SIGKILL)
    until(lambda: check(store).entries > 20)
    for child in children:
        child.kill()
        child.join(limit(10))
    audit(store, "the last")
    found = check(store)
    assert found.broken is None and found.entries > 20
    by = [entry.action.split("-") for entry in entries(store) if "-" in entry.action][::-1]
    for number in "0123":
        turns = [int(turn) for who, turn in by if who == number]
        assert turns == sorted(turns) == list(range(1, len(turns) + 1))


# ---- nothing changes unlogged


def test_the_entry_is_there_before_the_change(store):
    with acting("anna"), audited(store, "delete", what="model/coder@1", reason="old"):
        (entry,) = entries(store)
        assert (entry.who, entry.action, entry.outcome, entry.reason) == ("anna", "delete", "done", "old")


@pytest.mark.parametrize("error", [OSError("disk"), KeyboardInterrupt(), Conflict("other")])
def test_a_change_that_failed_is_told_as_failed(store, error):
    with pytest.raises(type(error)), audited(store, "delete", what="model/coder@1", right="override"):
        raise error
    failed, first = entries(store)
    assert (failed.outcome, failed.of, failed.what, failed.right) == ("failed", 1, first.what, "override")
    assert failed.why.startswith(type(error).__name__) and first.outcome == "failed" and first.number == 1
    assert json.loads(store.read("audit/00000001.json").data)["outcome"] == "done"  # what is written stays
    assert broken(store) is None


def test_what_cannot_be_logged_does_not_happen(tmp_path):
    class Full(LocalStore):
        def create(self, key, data):
            if key.startswith("audit/"):
                raise OSError(28, "No space left on device")
            return super().create(key, data)

    store, folder = Full(tmp_path / "store"), tmp_path / "files"
    folder.mkdir()
    (folder / "one.txt").write_text("1")
    with pytest.raises(OSError, match="No space"):
        move_ref(store, "coder/champion", "model/coder@1", inputs=(), reason="night")
    assert read_ref(store, "coder/champion") is None
    with pytest.raises(OSError, match="No space"):
        publish(store, folder, kind="dataset", inputs=(), provenance=Provenance(name="tiny"))
    assert changes(store, "dataset", "tiny") == []


def test_a_secret_is_not_in_an_entry_nor_in_what_went_wrong(store, monkeypatch):
    monkeypatch.setenv("PLANTED_SECRET", "c4n4ry-0123456789abcdef")
    with pytest.raises(OSError), audited(store, "delete", reason="c4n4ry-0123456789abcdef"):
        raise OSError("refused: c4n4ry-0123456789abcdef")
    assert all(b"c4n4ry" not in store.read(key).data for key in store.list("audit"))


def test_an_entry_that_could_not_say_what_was_done_is_not_written(store, monkeypatch):
    monkeypatch.setenv("MY_SECRET", "model/coder@7")
    audit(store, "delete", what="model/coder@7", reason="model/coder@7 is old")
    (entry,) = entries(store)
    assert (entry.what, entry.reason) == ("model/coder@7", "[redacted] is old")
    with pytest.raises(ValueError, match="looks like a secret"):
        audit(store, "run", what="train --api_key=abcdefgh12345")
    assert [entry.number for entry in entries(store)] == [1]
