"""Who read what: one line a read, whole however many write, no contents, and gone after its days. And the rules over it."""

import multiprocessing
import stat
import time
from datetime import UTC, datetime, timedelta

import pytest
from waiting import limit

from tasks.security.access import (
    KEPT_DAYS,
    Access,
    Habits,
    accesses,
    bulk_downloads,
    days,
    lines,
    many_denials,
    new_places,
    note_access,
)
from tasks.security.audit import Entry, account, acting

fork = multiprocessing.get_context("fork")
NOW = 1_800_000_000.0
LIMITS = {"most_gb": 100.0, "most_artifacts": 10, "times_usual": 10.0}


def test_a_read_is_one_line_with_who_what_and_how_much(tmp_path):
    with acting("anna"):
        note_access(tmp_path, "model/coder@1", bytes=12, what="verify")
    note_access(tmp_path, "model/coder@2", bytes=34, what="backup")
    newest, first = accesses(tmp_path)
    assert (first.who, first.identity, first.ref, first.bytes, first.what) == (
        *("anna", "person", "model/coder@1", 12, "verify"),
    )
    assert (newest.who, newest.identity, newest.account) == (account(), "account", account())
    assert newest.host and abs(newest.time - time.time()) < 60
    (path,) = days(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_lines_of_many_processes_do_not_mix(tmp_path):
    def read(number):
        for turn in range(200):
            note_access(tmp_path, f"model/m{number}@{turn}", bytes=turn, what="x" * 500)

    children = [fork.Process(target=read, args=(number,)) for number in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join(limit(60))
    found = list(accesses(tmp_path))
    assert len(found) == 800 == sum(len(path.read_text().splitlines()) for path in days(tmp_path))
    assert {one.ref for one in found} == {f"model/m{number}@{turn}" for number in range(4) for turn in range(200)}


def test_days_that_are_too_old_end_with_the_first_line_of_a_new_one(tmp_path):
    today = datetime.now(UTC).date()
    folder = tmp_path / "access"
    folder.mkdir()
    for back in (1, KEPT_DAYS - 1, KEPT_DAYS + 1, 400):
        (folder / f"{today - timedelta(days=back)}.jsonl").write_text("")
    (folder / "notes.txt").write_text("mine")
    note_access(tmp_path, "model/coder@1", bytes=1, what="verify")
    left = {(today - datetime.fromisoformat(path.stem).date()).days for path in days(tmp_path)}
    assert left - {-1} == {0, 1, KEPT_DAYS - 1} and (folder / "notes.txt").exists()


def test_a_line_that_was_cut_short_does_not_hide_the_others(tmp_path):
    note_access(tmp_path, "model/coder@1", bytes=1, what="verify")
    (path,) = days(tmp_path)
    whole = path.read_bytes()
    assert len(list(lines(whole + b'{"time": 1.0, "wh\n[]\n\xff\n' + whole))) == 2


def read(who, ago, gigabytes, ref="model/m@1", host="h"):
    size = int(gigabytes * 1e9)
    return Access(time=NOW - ago, who=who, host=host, account="root", what="verify", ref=ref, bytes=size)


def habits(*seen):
    made = Habits()
    for one in seen:
        made.take_entry(one) if isinstance(one, Entry) else made.take_read(one)
    return made


def refused(name, ago, place="root"):
    fields = {"number": 1, "action": "authorise", "who": "root", "identity": "account", "account": place}
    return Entry(time=NOW - ago, claimed=name, outcome="refused", host="h", **fields)


@pytest.mark.parametrize(("ages", "fires"), [([0, 1, 2], True), ([0, 1, 601], False), ([0, 1], False)])
def test_denials_count_within_their_minutes(ages, fires):
    found = many_denials(habits(*(refused("anna", age) for age in ages)), NOW, most=3, minutes=10)
    assert [one.name for one in found] == (["anna"] if fires else [])


def test_names_that_are_tried_from_one_place_count_together_and_not_twice():
    seen = habits(*(refused(name, 0) for name in ("a", "b", "c")), *(refused("d", 0) for _ in range(3)))
    assert [one.name for one in many_denials(seen, NOW, most=3, minutes=10)] == ["d", "root@h"]


def test_a_bulk_download_is_what_is_read_within_one_hour():
    assert bulk_downloads(habits(read("anna", 3700, 99), read("anna", 0, 99)), NOW, **LIMITS) == []
    (found,) = bulk_downloads(habits(read("anna", 3500, 99), read("anna", 0, 2)), NOW, **LIMITS)
    assert found.name == "anna" and found.details.startswith("101.00 GB of 1 artifacts")


def test_many_artifacts_are_a_bulk_download_and_one_that_is_read_often_is_not():
    often = habits(*(read("anna", 0, 0.1) for _ in range(50)))
    many = habits(*(read("anna", 0, 0.0, ref=f"model/m@{number}") for number in range(11)))
    assert bulk_downloads(often, NOW, **LIMITS) == [] and len(bulk_downloads(many, NOW, **LIMITS)) == 1


def test_usual_counts_only_with_enough_hours_and_for_more_than_a_little():
    few = [read("anna", hour * 3600, 0.2) for hour in range(3, 7)]
    enough = [*few, read("anna", 8 * 3600, 0.2)]
    assert bulk_downloads(habits(*few, read("anna", 0, 5)), NOW, **LIMITS) == []
    assert len(bulk_downloads(habits(*enough, read("anna", 0, 5)), NOW, **LIMITS)) == 1
    little = [read("anna", hour * 3600, 0.001) for hour in range(3, 9)]
    assert bulk_downloads(habits(*little, read("anna", 0, 0.9)), NOW, **LIMITS) == []


def test_the_first_place_of_a_name_is_not_new_and_the_second_one_is_for_a_while():
    one = habits(read("anna", 100, 0, host="desk"))
    assert new_places(one, NOW, hours=1) == []
    two = habits(read("anna", 100, 0, host="desk"), read("anna", 50, 0, host="cafe"))
    assert [found.name for found in new_places(two, NOW, hours=1)] == ["anna.root@cafe"]
    assert new_places(two, NOW + 3600, hours=1) == []


def test_a_refusal_does_not_make_a_place_known():
    seen = habits(read("anna", 100, 0, host="desk"), refused("anna", 50))
    assert list(seen.places) == ["anna"] and list(seen.places["anna"]) == ["root@desk"]


def test_an_entry_of_a_person_that_names_no_account_tells_of_no_place():
    old = Entry(number=1, time=NOW, who="anna", identity="person", host="desk", action="publish dataset")
    assert habits(old).places == {}
    assert habits(old.model_copy(update={"account": "root"})).places == {"anna": {"root@desk": NOW}}


def test_what_no_rule_looks_at_is_forgotten():
    seen = habits(read("anna", 40 * 86400, 1), read("anna", 100, 1), refused("anna", 100), refused("anna", 9000))
    seen.forget(NOW, denials_minutes=10)
    assert len(seen.denials) == 1 and len(seen.reads["anna"]) == 1 and len(seen.hours["anna"]) == 1
    seen.forget(NOW + 7200, denials_minutes=10)
    assert seen.denials == [] and seen.reads == {} and "anna" in seen.places
