"""What an approval counts for, for how long, by whose right; and that who can write to the store makes none."""

import json
import shutil
import time

import pytest

from tasks.common.errors import IntegrityError, Refused
from tasks.registry.approvals import (
    Approval,
    Asked,
    asked_about,
    keep,
    require_standing,
    spend,
    standing,
    token_of,
    words,
)
from tasks.registry.refs import move_ref, read_ref
from tasks.security import audit_chain
from tasks.security import policy as rules
from tasks.security.audit import acting, audit, entries
from tasks.storage import open_store
from tasks.storage.manifest import Provenance

pytestmark = pytest.mark.unit
MODEL, TERMS = f"model/tiny@{'a' * 64}", {"endpoint": "tiny", "settings": "b" * 64}


@pytest.fixture(autouse=True)
def unnamed(monkeypatch, tmp_path):
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    monkeypatch.delenv("HEADWAY_POLICY", raising=False)


@pytest.fixture
def store(tmp_path):
    return open_store(tmp_path)


def give(home, **told):
    fields = {"kind": "deploy", "subject": MODEL, "terms": TERMS, "person": "anna", "reason": "better", "flow_run": "f"}
    given = Approval(**{**fields, "time": time.time(), **told})
    keep(home, open_store(home), given)
    return given


def question(**told):
    fields = {"kind": "deploy", "subject": MODEL, "terms": TERMS, "right": "approve", "exercises": "promote"}
    return Asked(**{**fields, "hours": 1.0, **told})


def counts(home, **told):
    return standing(home, open_store(home), question(**told))


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


def test_a_place_that_two_questions_share_does_not_make_them_one(tmp_path):
    """A place names a part of a digest: who chooses both questions can look for two that have it in common."""
    given = give(tmp_path)
    assert question().fits(given)
    for told in ({"terms": {**TERMS, "settings": "c" * 64}}, {"kind": "train"}, {"subject": "x"}, {"right": "promote"}):
        assert not question(**told).fits(given)


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
    path.write_text(path.read_text().replace("- approve\n", "", 1))  # what it exercises is asked for still
    assert counts(tmp_path) is None and counts(tmp_path, exercises="approve").person == "anna"
    path.write_text(path.read_text().replace("- promote\n", "", 1))
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


def test_somebody_who_is_let_in_under_the_same_name_takes_over_no_approval(tmp_path):
    for name, may in (("root", ()), ("anna", ("approve",))):
        rules.add_person(tmp_path, name, may)
    with acting("anna"):
        given = give(tmp_path, proven=True, token=token_of(rules.load_policy(tmp_path), "anna"))
    assert counts(tmp_path) == given
    rules.remove_person(tmp_path, "anna")
    rules.add_person(tmp_path, "anna", ("approve",))
    assert counts(tmp_path) is None
    with pytest.raises(Refused, match="anna has another token since then"):
        require_standing(tmp_path, open_store(tmp_path), question(), given)


def test_a_damaged_record_is_passed_over(tmp_path, store):
    given = give(tmp_path)
    (key,) = store.list("journal/approvals")
    put(store, key.replace("000001", "000002"), {"junk": True})
    path = next((tmp_path / "store" / "documents").glob(f"{key.replace('000001', '000002')}*"))
    path.write_bytes(path.read_bytes()[:-4] + b"junk")
    assert counts(tmp_path) == given


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


def test_a_link_in_the_store_empties_no_key_of_the_home_and_an_empty_key_seals_nothing(tmp_path, store):
    given = give(tmp_path)
    key, lock = tmp_path / "keys" / "approvals.key", tmp_path / "store" / ".lock"
    sound = key.read_bytes()
    lock.unlink(missing_ok=True)
    lock.symlink_to(key)
    with pytest.raises(OSError, match=r"\.lock"):
        store.replace("refs/tiny", b"{}", etag=None)
    assert key.read_bytes() == sound and counts(tmp_path) == given
    key.write_bytes(b"")
    with pytest.raises(IntegrityError, match="holds 0 bytes"):
        counts(tmp_path)


def test_a_link_in_the_store_hands_out_no_file_of_the_home(tmp_path, store):
    private = tmp_path / "keys" / "signing.pem"
    private.parent.mkdir()
    private.write_text("private")
    documents = tmp_path / "store" / "documents"
    documents.mkdir(parents=True, exist_ok=True)
    (documents / "linked.json").symlink_to(private)
    (documents / "keys").symlink_to(private.parent)
    for key in ("linked.json", "keys/signing.pem"):
        with pytest.raises(IntegrityError, match="is a link"):
            store.read(key)
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.txt").write_text("text")
    manifest = store.publish(source, kind="dataset", inputs=(), provenance=Provenance(name="tiny"))
    (store.root / "artifacts" / "dataset" / "tiny" / manifest.version / "signatures.json").symlink_to(private)
    with pytest.raises(IntegrityError, match="is a link"):
        store.attachment(manifest, "signatures.json")
    moved = documents.rename(tmp_path / "another disk")
    documents.symlink_to(moved)  # as somebody does whose disk is full
    store.create("mine.json", b"{}")
    assert store.read("mine.json")


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


BEFORE = f"model/tiny@{'0' * 64}"
OTHER = f"model/tiny@{'c' * 64}"


class House:
    """A champion and an endpoint, changed as the product changes them: each with its entry in the audit log."""

    def __init__(self, home):
        self.home, self.store, self.served = home, open_store(home), BEFORE
        self.make_champion(BEFORE)
        self.given = give(home, before=self.stands(), valid_hours=1.0)

    def stands(self):
        return {"refs/tiny/champion": read_ref(self.store, "tiny/champion"), "endpoint/tiny": self.served}

    def make_champion(self, ref, **told):
        move_ref(self.store, "tiny/champion", ref, inputs=(), reason="r", **told)

    def deploy(self, ref, **told):
        audit(self.store, "deploy", what="endpoint/tiny", before=self.served, after=ref, **told)
        self.served = ref

    def counts(self):
        return counts(self.home, stands=self.stands)

    def refusal(self):
        with pytest.raises(Refused) as caught:
            require_standing(self.home, self.store, question(stands=self.stands), self.given)
        assert "Start the run again" in caught.value.remedy
        return caught.value.message


@pytest.fixture
def house(tmp_path):
    return House(tmp_path)


def test_an_approval_is_used_once(house):
    assert house.counts() == house.given
    spend(house.store, house.given)
    assert house.counts() is None and "was done, and it counts once" in house.refusal()
    again = give(house.home, before=house.stands())
    assert house.counts() == again


@pytest.mark.parametrize(
    ("end", "why"),
    [
        (lambda house: spend(house.store, house.given), "was done, and it counts once"),
        (lambda house: house.deploy(OTHER), "deploy of endpoint/tiny came after it"),
    ],
)
def test_cutting_off_the_end_of_the_audit_log_brings_no_approval_back(house, tmp_path, end, why):
    documents, before = house.home / "store" / "documents", tmp_path / "before"
    shutil.copytree(documents, before)
    end(house)
    shutil.rmtree(documents)
    shutil.copytree(before, documents)
    house.served = BEFORE
    assert house.counts() is None and why in house.refusal()
    spelled = house.home / ".." / house.home.name
    assert counts(spelled, stands=house.stands) is None


@pytest.mark.parametrize(
    "decide",
    [
        lambda house: audit(house.store, "reject", what=words("deploy", MODEL, TERMS)),
        lambda house: spend(house.store, house.given),
    ],
)
def test_whoever_keeps_the_log_from_being_written_keeps_no_approval_alive(house, monkeypatch, decide):
    """Who can write to the store can put a link in the place of the log's head, and take it away again."""
    with monkeypatch.context() as patched:
        patched.setattr(audit_chain, "append", _broken)
        with pytest.raises(IntegrityError):
            decide(house)
    assert house.counts() is None


def _broken(*_):
    raise IntegrityError("a link lies in the place of the head")


def test_a_clock_that_is_set_back_hides_no_decision_of_the_home(house, tmp_path, monkeypatch):
    documents, before = house.home / "store" / "documents", tmp_path / "before"
    shutil.copytree(documents, before)
    earlier = time.time() - 1000
    with monkeypatch.context() as patched:
        patched.setattr(time, "time", lambda: earlier)
        house.deploy(OTHER)
    shutil.rmtree(documents)
    shutil.copytree(before, documents)
    house.served = BEFORE
    assert house.counts() is None and "deploy of endpoint/tiny came after it" in house.refusal()


def test_a_run_that_died_in_the_middle_of_what_was_approved_goes_on_with_the_approval(house):
    for did in (
        lambda: house.deploy(MODEL, approval=house.given.digest),
        lambda: house.make_champion(MODEL),
        lambda: audit(house.store, "make key", what="endpoint/tiny"),
        lambda: audit(house.store, "deploy", what="endpoint/other", after=OTHER),
    ):
        did()
        assert house.counts() == house.given
        require_standing(house.home, house.store, question(stands=house.stands), house.given)


@pytest.mark.parametrize(
    "decision",
    [
        lambda house: house.make_champion(OTHER),
        lambda house: house.deploy(OTHER),
        lambda house: house.deploy(MODEL),  # by somebody's own right: under which settings, nobody asked
        lambda house: audit(house.store, "stop endpoint", what="endpoint/tiny", reason="bad"),
        lambda house: audit(house.store, "rollback endpoint", what="endpoint/tiny", after=BEFORE),
        lambda house: audit(house.store, "rollback", what=BEFORE, before="a" * 64, after="0" * 64),
        lambda house: audit(house.store, "reject", what=words("deploy", MODEL, TERMS)),
    ],
)
def test_a_later_decision_about_the_model_or_the_endpoint_ends_an_approval(house, decision):
    decision(house)
    assert house.counts() is None and "came after it" in house.refusal()
    house.make_champion(BEFORE)
    house.deploy(BEFORE)  # as it stood again: what was decided was decided
    assert house.counts() is None


def test_what_stood_while_the_question_waited_is_what_an_approval_is_for(house):
    """The form said that the endpoint serves one model; it served another when somebody answered."""
    asked = house.stands()
    house.deploy(OTHER)
    house.given = give(house.home, before=asked)
    assert house.counts() is None and f"endpoint/tiny was {BEFORE} when it was asked about" in house.refusal()


def test_an_approval_does_not_count_where_the_log_after_it_was_cut_or_changed(house):
    audit(house.store, "stop endpoint", what="endpoint/tiny", reason="bad")
    last = audit(house.store, "publish dataset", what="dataset/tiny")
    audit(house.store, "publish dataset", what="dataset/tiny")
    path = house.home / "store" / "documents" / "audit" / f"{last.number:08d}.json"
    stop = path.with_name(f"{last.number - 1:08d}.json")
    stop.write_bytes(stop.read_bytes().replace(b"endpoint/tiny", b"endpoint/tony"))
    assert house.counts() is None
    path.unlink()
    assert house.counts() is None and "does not hang together" in house.refusal()


def test_the_hours_of_an_approval_are_those_it_was_given_for(tmp_path):
    """Who starts a run chooses `approval.valid_hours`: an approval that had expired lived again."""
    give(tmp_path, time=time.time() - 7200, valid_hours=1.0)
    assert counts(tmp_path, hours=1e6) is None
    given = give(tmp_path, time=time.time() - 7200, valid_hours=1e6)
    assert counts(tmp_path, hours=3.0) == given and counts(tmp_path, hours=1.0) is None


def test_an_approval_of_a_release_before_hours_were_kept_counts_for_no_more_than_the_default(tmp_path):
    given = give(tmp_path, time=time.time() - 71 * 3600)
    assert "valid_hours" not in kept(open_store(tmp_path))[1]["approval"]
    assert counts(tmp_path, hours=1e6) == given
    give(tmp_path, time=time.time() - 73 * 3600, subject=OTHER)
    assert counts(tmp_path, hours=1e6, subject=OTHER) is None


@pytest.fixture
def persons(tmp_path):
    """rita may run and approve, anna approve, paul promote too; and rita's approval."""
    rules.add_person(tmp_path, "root", ())
    for name, may in (("rita", ("run", "approve")), ("anna", ("approve",)), ("paul", ("run", "approve", "promote"))):
        rules.add_person(tmp_path, name, may)
    return tmp_path


def approved_by(home, person, **told):
    with acting(person):
        given = give(home, person=person, proven=True)
    return counts(home, **told) == given


def test_who_started_a_run_does_not_approve_its_deploy_alone(persons):
    assert not approved_by(persons, "rita", starters=frozenset({"rita"}))
    assert approved_by(persons, "anna", starters=frozenset({"rita"}))
    assert approved_by(persons, "paul", starters=frozenset({"paul"}))  # it is his right anyway
    assert approved_by(persons, "rita", starters=frozenset({"ben"}))
    assert approved_by(persons, "rita", starters=frozenset({"rita"}), exercises="run")


def test_where_nobody_knows_who_started_a_run_who_may_promote_approves_its_deploy(persons):
    assert not approved_by(persons, "anna", starters=None)
    assert approved_by(persons, "paul", starters=None)


def test_where_promote_alone_is_asked_for_who_decides_a_deploy_proves_who_they_are(persons):
    path = persons / "policy.yaml"
    path.write_text(path.read_text().replace("- approve\n", "", 1))
    give(persons, person="anna")
    assert counts(persons) is None
    assert approved_by(persons, "anna")
    with pytest.raises(Refused, match="who you are"):
        rules.authorise(persons, "approve", "anna", "", what="w", reason="r", exercises="promote")
    assert rules.authorise(persons, "approve", "anna", "", what="w", reason="r") not in ("anna", "")
    rules.remove_person(persons, "anna")
    assert counts(persons) is None
