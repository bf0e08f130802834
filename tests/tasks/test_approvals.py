"""What an approval counts for, for how long, by whose right; and that who can write to the store makes none."""

import json
import time

import pytest

from tasks.registry import policy as rules
from tasks.registry.approvals import Approval, asked_about, keep, standing
from tasks.registry.audit import acting, audit, entries
from tasks.storage import open_store

pytestmark = pytest.mark.unit
MODEL, TERMS = f"model/tiny@{'a' * 64}", {"endpoint": "tiny", "settings": "b" * 64}


@pytest.fixture(autouse=True)
def unnamed(monkeypatch):
    monkeypatch.delenv("HEADWAY_POLICY", raising=False)


@pytest.fixture
def store(tmp_path):
    return open_store(tmp_path)


def give(home, **told):
    fields = {"kind": "deploy", "subject": MODEL, "terms": TERMS, "person": "anna", "reason": "better", "flow_run": "f"}
    given = Approval(**{**fields, "time": time.time(), **told})
    keep(home, open_store(home), given)
    return given


def counts(home, kind="deploy", subject=MODEL, terms=TERMS, right="approve", hours=1.0):
    return standing(home, open_store(home), kind, subject, terms, right=right, hours=hours)


def test_it_counts_for_exactly_what_was_asked(tmp_path):
    assert counts(tmp_path) is None
    given = give(tmp_path)
    assert counts(tmp_path) == given
    assert counts(tmp_path, kind="train") is None
    assert counts(tmp_path, subject=f"model/tiny@{'c' * 64}") is None
    assert counts(tmp_path, terms={**TERMS, "endpoint": "other"}) is None
    assert counts(tmp_path, terms={**TERMS, "settings": "c" * 64}) is None
    assert counts(tmp_path, terms={}) is None and counts(tmp_path, right="override") is None
    entry = next(entries(open_store(tmp_path)))
    assert (entry.action, entry.claimed, entry.reason) == ("approve", "anna", "better")
    assert entry.what == f"deploy {MODEL} (endpoint tiny, settings {'b' * 64})"


def test_it_ends_and_a_newer_one_counts_anew(tmp_path):
    give(tmp_path, time=time.time() - 7200)
    assert counts(tmp_path) is None and counts(tmp_path, hours=3.0).person == "anna"
    give(tmp_path, person="ben")
    assert counts(tmp_path).person == "ben"


def test_a_name_that_nobody_proved_does_not_count_once_a_policy_asks(tmp_path):
    give(tmp_path)
    rules.add_person(tmp_path, "anna", ())
    assert counts(tmp_path) is None
    path = tmp_path / "policy.yaml"
    path.write_text(path.read_text().replace("- approve\n", "", 1))  # it is not asked for
    assert counts(tmp_path).person == "anna"


def test_the_right_of_who_approved_is_asked_again(tmp_path):
    rules.add_person(tmp_path, "root", ())
    rules.add_person(tmp_path, "anna", ("approve",))
    with acting("anna"):
        give(tmp_path, proven=True)
    assert counts(tmp_path).person == "anna"
    path, before = tmp_path / "policy.yaml", (tmp_path / "policy.yaml").read_text()
    head, _, hers = before.partition("  anna:")
    path.write_text(head + "  anna:" + hers.replace("- approve", "- run", 1))
    assert counts(tmp_path) is None
    path.write_text(before)
    assert counts(tmp_path).person == "anna"
    rules.remove_person(tmp_path, "anna")
    assert counts(tmp_path) is None


def kept(store):
    (key,) = [key for key in store.list("journal/approvals")]
    return key, json.loads(store.read(key).data)


def put(store, key, value):
    now = store.read(key)
    assert store.replace(key, json.dumps(value).encode(), etag=now.etag if now else None)


@pytest.mark.parametrize(
    "changed", [{"person": "mallory"}, {"time": time.time() + 1e6}, {"proven": True}, {"reason": ""}]
)
def test_a_changed_record_does_not_count(tmp_path, store, changed):
    give(tmp_path)
    key, value = kept(store)
    put(store, key, {**value, "approval": {**value["approval"], **changed}})
    assert counts(tmp_path) is None


def test_a_record_elsewhere_does_not_count_there(tmp_path, store):
    give(tmp_path)
    _, value = kept(store)
    other = {**TERMS, "endpoint": "other"}
    put(store, f"journal/{asked_about('deploy', MODEL, other)}/000001.json", value)
    assert counts(tmp_path, terms=other) is None


def test_a_writer_of_the_store_makes_none_not_even_with_an_entry_of_the_log(tmp_path, store):
    other = tmp_path / "other"
    give(other)  # as the product makes it, with another home's key
    key, value = kept(open_store(other))
    said = json.loads(open_store(other).read("audit/00000001.json").data)
    entry = audit(store, said["action"], approval=said["approval"], what=said["what"])
    put(store, key, {**value, "entry": {"number": entry.number, "hash": entry.hash}})
    assert counts(tmp_path) is None


@pytest.mark.parametrize("later", [0, 1])
def test_it_counts_while_its_entry_stands_in_the_audit_log(tmp_path, store, later):
    given = give(tmp_path)
    for _ in range(later):
        audit(store, "publish dataset", what="dataset/tiny")
    assert counts(tmp_path) == given
    path = tmp_path / "store" / "documents" / "audit" / f"{1 + later:08d}.json"
    sound = path.read_bytes()
    path.write_bytes(
        sound.replace(b"anna", b"emma") if not later else sound.replace(b'"previous": "', b'"previous": "0')
    )
    assert counts(tmp_path) is None
    path.unlink()
    assert counts(tmp_path) is None  # the head knows of it
    path.write_bytes(sound)
    assert counts(tmp_path) == given


def test_without_the_homes_key_people_are_asked_again(tmp_path):
    give(tmp_path)
    (tmp_path / "keys" / "approvals.key").unlink()
    assert counts(tmp_path) is None
    assert counts(tmp_path, hours=2.0) is None and give(tmp_path) == counts(tmp_path)
    assert (tmp_path / "keys" / "approvals.key").stat().st_mode & 0o077 == 0


def test_one_of_a_release_before_this_is_asked_again_and_left_alone(tmp_path, store):
    old = {"kind": "deploy", "subject": MODEL, "person": "anna", "reason": "r", "time": time.time(), "flow_run": "f"}
    key = f"journal/approvals/deploy/model/tiny/{'a' * 64}.json"
    assert store.create(key, json.dumps(old).encode())
    assert counts(tmp_path) is None and counts(tmp_path, terms={}) is None
    given = give(tmp_path)
    assert counts(tmp_path) == given and json.loads(store.read(key).data) == old
    assert Approval.model_validate(old).proven is False
