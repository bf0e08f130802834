"""Which word a verdict is, when windows count, and when a model is said to be degraded: the rules alone, without a run."""

import time
from hashlib import sha256

import pytest

from tasks.artifacts import Check
from tasks.config.revalidation import RevalidationConfig, ServiceConfig, alarms_per_year
from tasks.registry.records import StoreJournal
from tasks.registry.revalidations import (
    answers_judged,
    degraded_in_a_row,
    documents_looked_at,
    last_looked_at,
    last_revalidated,
    note_revalidation,
)
from tasks.revalidate import (
    Found,
    Part,
    acts,
    counted_before,
    drift_part,
    performance_part,
    sampled,
    service_part,
    shared,
    verdict_of,
    window_of,
)
from tasks.storage.local import LocalStore

pytestmark = pytest.mark.unit

PASSED = {name: "passed" for name in ("integrity", "data", "drift", "performance", "service")}
SOUND = Part(name="integrity", status="passed", said="")


def make_champion(store, since):
    """Make the model champion, as a document of the store; over what it said before."""
    key, told = "refs/m/champion.json", f'{{"target": "model/m@1111aaaa", "time": {since}, "inputs": []}}'.encode()
    before = store.read(key)
    assert store.replace(key, told, etag=before.etag) if before else store.create(key, told)


@pytest.mark.parametrize(
    "differs, word",
    [
        ({}, "valid"),
        ({"drift": "insufficient", "service": "absent"}, "valid"),
        ({"drift": "failed"}, "degraded"),
        ({"performance": "failed"}, "degraded"),
        ({"service": "failed"}, "degraded"),
        ({"drift": "failed", "performance": "insufficient"}, "degraded"),
        ({"performance": "insufficient"}, "unknown"),
        ({"data": "failed", "drift": "absent", "performance": "absent"}, "unknown"),
        ({"integrity": "failed", "drift": "failed"}, "invalid"),
    ],
)
def test_the_word_for_all_parts(differs, word):
    parts = [Part(name=name, status=status, said="") for name, status in {**PASSED, **differs}.items()]
    assert verdict_of(parts) == word


@pytest.mark.parametrize(
    "given, data, before, number, said",
    [
        ("degraded", "a", (), 1, False),
        ("degraded", "b", ("a",), 2, True),
        ("degraded", "a", ("a",), 1, False),
        ("degraded", "c", ("a", "b"), 3, True),
        ("degraded", "b", ("a", "b"), 2, False),
        ("unknown", "b", ("a",), 1, False),
        ("invalid", "b", ("a",), 1, False),
        ("valid", "b", ("a",), 0, False),
    ],
)
def test_a_window_is_other_data_and_only_a_new_one_acts(given, data, before, number, said):
    assert window_of(given, data, before, of=2)["number"] == number
    assert acts(given, data, before, of=2) is said


def test_what_was_degraded_in_a_row_ends_with_a_valid_one_and_is_of_one_champion(tmp_path):
    store = LocalStore(tmp_path)
    make_champion(store, 5.0)
    journal = StoreJournal(store)

    def note(verdict, dataset, champion="model/m@1111aaaa"):
        noted = {"champion": champion, "verdict": verdict, "dataset": dataset, "passed": verdict == "valid"}
        note_revalidation(journal, "m", noted)

    assert last_looked_at(store, "m") == last_revalidated(store, "m") == 5.0
    for verdict, dataset in (("degraded", "a"), ("valid", "b"), ("degraded", "c"), ("unknown", "d"), ("degraded", "c")):
        note(verdict, dataset)
    note("degraded", "e", champion="model/m@2222bbbb")
    note("invalid", "f")
    note("degraded", "g")
    assert degraded_in_a_row(store, "model/m@1111aaaa") == ("c", "g")
    assert last_looked_at(store, "m") > last_revalidated(store, "m") > 5.0
    journal.append("revalidations/m", {"champion": "model/m@1111aaaa", "passed": False, "dataset": "h", "time": 6.0})
    assert degraded_in_a_row(store, "model/m@1111aaaa") == ("c", "g", "h")  # a note of a release without verdicts
    make_champion(store, time.time() + 1)  # champion again, after a rollback: it starts anew
    assert degraded_in_a_row(store, "model/m@1111aaaa") == ()
    assert last_looked_at(store, "m") == last_revalidated(store, "m") > time.time()


def test_answers_count_as_judged_only_where_there_were_enough(tmp_path):
    store = LocalStore(tmp_path)
    make_champion(store, 5.0)
    journal = StoreJournal(store)

    def judged():
        return answers_judged(store, "model/m@1111aaaa", fewest=50)

    note_revalidation(journal, "m", {"champion": "model/m@1111aaaa", "passed": True, "answers": 40})
    assert judged() == 5.0, "too few: they go on counting to the next window"
    note_revalidation(journal, "m", {"champion": "model/m@1111aaaa", "passed": True, "answers": 50})
    assert judged() > 5.0
    note_revalidation(journal, "m", {"champion": "model/m@2222bbbb", "passed": True, "answers": 50})
    assert judged() < time.time()


def test_parts_that_were_not_measured_say_why():
    found = Found(integrity=SOUND, same_data=True)
    assert drift_part(None, found, RevalidationConfig()).status == "passed"
    assert drift_part(None, Found(integrity=SOUND), RevalidationConfig()).status == "absent"
    assert performance_part(None, (), found).status == "absent"
    lacking = performance_part(None, (), Found(integrity=SOUND, lacking="1 document"))
    assert lacking.status == "insufficient" and not lacking.checks[0].passed
    assert service_part(None).status == "absent"


def test_a_check_that_is_not_kept_fails_the_performance_and_is_named():
    score = {"bits_per_byte": 1.0}
    measured = {"new": score, "promotion": score, "loss": {"estimate": 0.0, "low": 0.0, "high": 0.0}}
    bad = Check(name="the limit", measured=2.0, limit="1", passed=False)
    part = performance_part(measured, (bad,), Found(integrity=SOUND))
    assert part.status == "failed" and "the limit" in part.said


def test_what_cannot_be_judged_is_insufficient_and_no_all_clear():
    score = {"bits_per_byte": 1.0}
    measured = {"new": score, "promotion": score, "loss": {"estimate": 0.12, "low": -0.1, "high": 0.4}}
    unsure = Check(name="the loss", measured=0.12, limit="1", passed=False, insufficient=True)
    part = performance_part(measured, (unsure,), Found(integrity=SOUND))
    assert part.status == "insufficient" and "the loss" in part.said
    bad = Check(name="the limit", measured=2.0, limit="1", passed=False)
    assert performance_part(measured, (unsure, bad), Found(integrity=SOUND)).status == "failed"


def test_windows_that_share_documents_are_not_two_windows(tmp_path):
    def documents(begins, ends):
        return sampled([sha256(str(number).encode()).hexdigest() for number in range(begins, ends)])

    first, grown, other = documents(1000, 2000), documents(1000, 2200), documents(5000, 6000)
    assert shared(first, grown) > 0.5 and shared(first, other) == 0.0 and shared(first, ()) == 0.0
    assert shared(first, first) == 1.0
    found = Found(integrity=SOUND, degraded_before=("a", "b"), documents_before={"a": first})
    assert [counted_before(*one, found) for one in (("c", grown), ("c", other), ("a", first))] == ["a", "", ""]
    store = LocalStore(tmp_path)
    make_champion(store, 5.0)
    journal = StoreJournal(store)
    for dataset, data in (("a", ["a"]), ("a-grown", ["a"])):
        noted = {"champion": "model/m@1111aaaa", "verdict": "degraded", "dataset": dataset, "passed": False}
        note_revalidation(journal, "m", {**noted, "window": {"data": data}, "documents": [dataset]})
    assert degraded_in_a_row(store, "model/m@1111aaaa") == ("a",)
    assert documents_looked_at(store, "model/m@1111aaaa") == {"a": ("a",)}


def test_a_rate_per_year_is_that_of_rows_of_false_alarms():
    assert alarms_per_year(0.05, windows=2, per_year=52) == pytest.approx(0.115, abs=0.001)
    assert alarms_per_year(0.05, windows=1, per_year=52) == pytest.approx(1 - 0.95**52)
    assert RevalidationConfig().drift_alarms_per_year() == pytest.approx(0.115, abs=0.001)
    chosen = RevalidationConfig(false_alarms_per_year=0.01)
    assert chosen.drift_alarms_per_year() == pytest.approx(0.01, rel=0.01) and chosen.drift_alarms_per_year() <= 0.0101
    drift = chosen.judged_drift()
    assert 0.01 < drift.false_alarm_rate < 0.02 and drift.splits * drift.false_alarm_rate >= 10
    assert RevalidationConfig().judged_drift() == RevalidationConfig().drift
    moved = {"verdict": "drift", "p_value": 0.01, "false_alarm_rate": 0.05, "columns": [], "why": ""}
    (check,) = drift_part(moved, Found(integrity=SOUND), RevalidationConfig()).checks
    assert "11.5% of unchanged champions a year" in check.remedy


def test_endpoints_of_one_champion_share_the_false_alarm_rate():
    assert ServiceConfig().shared_by(4).false_alarm_rate == pytest.approx(0.0025)
    assert ServiceConfig().shared_by(1) == ServiceConfig()


def test_an_anomaly_of_the_answers_names_the_columns():
    column = {"name": "length", "title": "tokens an answer", "verdict": "anomaly"}
    told = {
        "endpoint": "tiny", "verdict": "anomaly", "p_value": 0.001, "requests": 60, "reference_requests": 90,
        "columns": [column, {**column, "title": "latency", "verdict": "none"}],
    }  # fmt: skip
    part = service_part(told)
    assert part.status == "failed" and "tokens an answer" in part.said and "latency" not in part.said
    assert service_part({**told, "verdict": "insufficient", "p_value": None}).status == "insufficient"
