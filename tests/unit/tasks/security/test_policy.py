"""Who may do what: the file, who is let in, who is refused and written down, and how it changes."""

import json
import os
import stat
import time

import pytest

from tasks.common.errors import Refused, Unknown
from tasks.registry.refs import move_ref
from tasks.security import audit as log
from tasks.security import policy as rules
from tasks.security.policy import RIGHTS, Policy, authorise, load_policy, require
from tasks.storage import open_store

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def unnamed(monkeypatch):
    monkeypatch.delenv("HEADWAY_POLICY", raising=False)


@pytest.fixture
def tokens(tmp_path):
    """A policy with anna, who may everything, and ben, who may run; their tokens."""
    return {
        "anna": rules.add_person(tmp_path, "anna", ("run",)),
        "ben": rules.add_person(tmp_path, "ben", ("run", "publish")),
    }


def newest(home):
    return next(log.entries(open_store(home)), None)


def told(home):
    """Everything that the store holds, as text."""
    return "".join(path.read_text() for path in (home / "store").rglob("*") if path.is_file())


def ask(home, right, name, token):
    return authorise(home, right, name, token, what="endpoint/local", reason="because")


def write(home, text, mode=0o600):
    path = home / "policy.yaml"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_without_a_policy_everybody_may_everything_as_the_account(tmp_path):
    for right in RIGHTS:
        assert ask(tmp_path, right, "", "") == log.account()
        require(tmp_path, right, what="x")
    assert newest(tmp_path) is None
    log.audit(open_store(tmp_path), "stop endpoint", right="roll_back", what="endpoint/local", reason="night")
    entry = newest(tmp_path)
    assert (entry.who, entry.identity, entry.outcome, entry.reason) == (log.account(), "account", "done", "night")
    assert entry.host and abs(entry.time - time.time()) < 60


def test_who_the_account_is_cannot_be_said_in_the_environment(monkeypatch):
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(name, "anna")
    assert log.account() != "anna"


def test_the_first_person_gets_every_right_and_others_what_they_are_given(tmp_path, tokens):
    policy = load_policy(tmp_path)
    assert policy.persons["anna"].may == RIGHTS
    assert policy.persons["ben"].may == ("run", "publish")
    assert all(policy.asks(right) for right in RIGHTS)
    assert stat.S_IMODE((tmp_path / "policy.yaml").stat().st_mode) == 0o600
    assert not any(token in (tmp_path / "policy.yaml").read_text() for token in tokens.values())


def test_name_and_token_and_right_let_in(tmp_path, tokens):
    assert ask(tmp_path, "roll_back", "anna", tokens["anna"]) == "anna"
    assert ask(tmp_path, "run", "ben", tokens["ben"]) == "ben"
    assert newest(tmp_path) is None


def test_each_way_to_be_wrong_is_refused_and_written_down_without_the_token(tmp_path, tokens):
    wrong = {
        "belong together": [("anna", "hwt_" + "x" * 43), ("anna", tokens["ben"]), ("carla", tokens["anna"])],
        "may not roll back": [("ben", tokens["ben"])],
        "asks who you are": [("", ""), ("anna", ""), ("", tokens["anna"])],
    }
    for said, tries in wrong.items():
        for name, token in tries:
            with pytest.raises(Refused, match=said):
                ask(tmp_path, "roll_back", name, token)
            entry = newest(tmp_path)
            assert (entry.outcome, entry.claimed, entry.right) == ("refused", name, "roll_back")
            assert (entry.what, entry.reason, entry.who) == ("endpoint/local", "because", log.account())
            assert said in entry.why
    assert not any(token in told(tmp_path) for token in tokens.values())


def test_a_token_that_was_typed_as_the_name_is_not_written_down(tmp_path, tokens):
    with pytest.raises(Refused):
        ask(tmp_path, "run", tokens["anna"], "anna")
    assert newest(tmp_path).claimed == "[redacted]"
    assert tokens["anna"] not in told(tmp_path)


def test_wrong_tokens_make_the_next_try_wait_longer_and_the_right_one_waits_too(tmp_path, tokens, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    for _ in range(rules.FREE_TRIES):
        with pytest.raises(Refused, match="belong together"):
            ask(tmp_path, "run", "anna", "wrong")
    pauses = []
    for _ in range(7):
        with pytest.raises(Refused, match="too many wrong tokens") as refused:
            ask(tmp_path, "run", "anna", tokens["anna"])
        pauses.append(int(refused.value.message.split("wait ")[1].split()[0]))
        now[0] += pauses[-1]
        with pytest.raises(Refused, match="belong together"):
            ask(tmp_path, "run", "anna", "wrong")
    assert pauses == sorted(pauses) and pauses[0] == 2 and pauses[-1] == rules.LONGEST_WAIT_SECONDS
    assert ask(tmp_path, "run", "ben", tokens["ben"]) == "ben"  # another name does not wait
    now[0] += pauses[-1]
    assert ask(tmp_path, "run", "anna", tokens["anna"]) == "anna"
    with pytest.raises(Refused, match="belong together"):  # and the count begins anew
        ask(tmp_path, "run", "anna", "wrong")


def test_a_clock_that_was_set_back_locks_nobody_out(tmp_path, tokens, monkeypatch):
    for _ in range(rules.FREE_TRIES):
        with pytest.raises(Refused):
            ask(tmp_path, "run", "anna", "wrong")
    now = time.time() - 1e6
    monkeypatch.setattr(time, "time", lambda: now)
    with pytest.raises(Refused, match="wait 2 s"):
        ask(tmp_path, "run", "anna", tokens["anna"])


@pytest.mark.parametrize("junk", [b"", b"junk", b"[]", b'{"wrong": "many", "time": 0}', b'{"wrong": 1e999, "time": 0}'])
def test_junk_in_the_store_locks_nobody_out(tmp_path, tokens, junk):
    assert open_store(tmp_path).replace("tries/anna.json", junk, etag=None)
    assert ask(tmp_path, "run", "anna", tokens["anna"]) == "anna"


def test_a_time_to_come_in_the_store_bars_nobody_for_longer_than_the_longest_wait(tmp_path, tokens, monkeypatch):
    said = json.dumps({"wrong": 10**9, "time": time.time() + 1e9}).encode()
    assert open_store(tmp_path).replace("tries/anna.json", said, etag=None)
    with pytest.raises(Refused, match=f"wait {rules.LONGEST_WAIT_SECONDS:.0f} s"):
        ask(tmp_path, "run", "anna", tokens["anna"])
    later = time.time() + rules.LONGEST_WAIT_SECONDS
    monkeypatch.setattr(time, "time", lambda: later)
    assert ask(tmp_path, "run", "anna", tokens["anna"]) == "anna"


def test_guesses_at_names_are_counted_together_and_leave_one_document(tmp_path, tokens):
    for number in range(rules.FREE_TRIES):
        with pytest.raises(Refused, match="belong together"):
            ask(tmp_path, "run", f"guess{number}", "wrong")
    with pytest.raises(Refused, match="too many wrong tokens"):
        ask(tmp_path, "run", "another", "wrong")
    assert len(open_store(tmp_path).list("tries")) == 1


@pytest.mark.parametrize("mode", [0o660, 0o644, 0o602, 0o604, 0o640, 0o777])
def test_a_policy_that_others_may_touch_allows_nothing(tmp_path, tokens, mode):
    (tmp_path / "policy.yaml").chmod(mode)
    with pytest.raises(Refused, match="access for nobody else: nothing is allowed"):
        ask(tmp_path, "run", "anna", tokens["anna"])
    assert newest(tmp_path).outcome == "refused"
    with pytest.raises(Refused, match="nothing is allowed"):
        require(tmp_path, "run", what="x")
    with pytest.raises(Refused, match="nothing is allowed"):
        rules.add_person(tmp_path, "eve", ("run",))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_policy_of_another_account_allows_nothing(tmp_path, tokens):
    os.chown(tmp_path / "policy.yaml", 65534, -1)
    with pytest.raises(Refused, match="nothing is allowed"):
        ask(tmp_path, "run", "anna", tokens["anna"])


def test_a_folder_in_the_place_of_the_policy_allows_nothing(tmp_path):
    (tmp_path / "policy.yaml").mkdir(mode=0o700)
    with pytest.raises(Refused, match="nothing is allowed"):
        load_policy(tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "valid dictionary"),
        ("asks: [run", "not YAML"),
        ("\x00\x01", "not YAML"),
        ("asks: [runn]", "'publish', 'run'"),
        ("ask: [run]", "ask: there is no such key"),
        ("persons: {anna: {may: [run], tokn: x}}", "persons.anna.tokn: there is no such key"),
        ("persons: {anna: {may: [run], token: plain}}", "persons.anna.token"),
        ("persons: {anna: {may: [rum], token: plain}}", "persons.anna.may.0"),
        ("persons: {Anna B: {may: [run]}}", "Anna B"),
        ("automatic: {cron: [run]}", "cron: schedule, prefect and bridge belong under automatic"),
        (
            f"persons: {{schedule: {{may: [run], token: '{rules.NOBODY}'}}}}",
            "schedule: schedule, prefect and bridge belong",
        ),
    ],
)
def test_a_damaged_policy_allows_nothing_and_says_where(tmp_path, text, said):
    write(tmp_path, text)
    with pytest.raises(Refused, match="so nothing is allowed") as refused:
        ask(tmp_path, "run", "anna", "x")
    assert said in refused.value.message
    assert newest(tmp_path).outcome == "refused"


def test_a_value_of_a_damaged_policy_is_not_said(tmp_path):
    write(tmp_path, "persons: {anna: {may: [run], token: my-own-secret}}")
    with pytest.raises(Refused) as refused:
        load_policy(tmp_path)
    assert "my-own-secret" not in refused.value.message
    assert "my-own-secret" not in told(tmp_path) if (tmp_path / "store").exists() else True


def test_only_the_rights_that_the_policy_names_are_asked_for(tmp_path, tokens):
    path = tmp_path / "policy.yaml"
    kept = path.read_text().partition("persons:")
    write(tmp_path, f"asks: [override]\npersons:{kept[2]}")
    assert ask(tmp_path, "run", "", "") == log.account()
    require(tmp_path, "promote", what="x")
    with pytest.raises(Refused):
        ask(tmp_path, "override", "", "")
    rules.renew_person(tmp_path, "ben")
    assert load_policy(tmp_path).asked == ("override",)


def test_a_policy_elsewhere_is_used_and_must_be_there(tmp_path, monkeypatch):
    elsewhere = tmp_path / "etc" / "who.yaml"
    monkeypatch.setenv("HEADWAY_POLICY", str(elsewhere))
    with pytest.raises(Refused, match="there is no such file: nothing is allowed"):
        ask(tmp_path, "run", "", "")
    token = rules.add_person(tmp_path, "anna", ())
    assert elsewhere.is_file() and not (tmp_path / "policy.yaml").exists()
    assert ask(tmp_path, "run", "anna", token) == "anna"


def test_a_token_ends_when_it_is_renewed_or_its_person_removed(tmp_path, tokens):
    new = rules.renew_person(tmp_path, "ben")
    with pytest.raises(Refused):
        ask(tmp_path, "run", "ben", tokens["ben"])
    assert ask(tmp_path, "run", "ben", new) == "ben"
    rules.remove_person(tmp_path, "ben")
    with pytest.raises(Refused):
        ask(tmp_path, "run", "ben", new)
    for change in (rules.renew_person, rules.remove_person):
        with pytest.raises(Unknown, match="knows no 'ben'"):
            change(tmp_path, "ben")


def test_somebody_who_may_change_the_policy_is_left(tmp_path, tokens):
    before = (tmp_path / "policy.yaml").read_text()
    with pytest.raises(ValueError, match="nobody could change the policy"):
        rules.remove_person(tmp_path, "anna")
    with pytest.raises(ValueError, match="in the policy already"):
        rules.add_person(tmp_path, "ben", ("run",))
    assert (tmp_path / "policy.yaml").read_text() == before


def test_who_acts_already_is_asked_for_the_right_only(tmp_path, tokens):
    with log.acting("ben"):
        require(tmp_path, "run", what="x")
        with pytest.raises(Refused, match="ben may not promote"):
            require(tmp_path, "promote", what="model/coder@1")
    entry = newest(tmp_path)
    assert (entry.who, entry.identity, entry.what, entry.outcome) == ("ben", "person", "model/coder@1", "refused")
    rules.remove_person(tmp_path, "ben")
    with log.acting("ben"), pytest.raises(Refused, match="ben may not run"):
        require(tmp_path, "run", what="x")


def test_an_account_is_not_the_person_of_the_same_name(tmp_path):
    rules.add_person(tmp_path, log.account(), ())
    with pytest.raises(Refused):
        require(tmp_path, "run", what="x")


def test_what_runs_by_itself_may_what_the_policy_says(tmp_path, tokens):
    for name in log.AUTOMATIC:
        with log.acting(name):
            require(tmp_path, "run", what="x")
            with pytest.raises(Refused, match=f"{name} may not promote"):
                require(tmp_path, "promote", what="x")
        assert newest(tmp_path).identity == "automatic"
        with pytest.raises(Refused):  # and it is no person: there is no token for it
            ask(tmp_path, "run", name, "")
    text = (tmp_path / "policy.yaml").read_text().replace("schedule:\n  - publish\n", "schedule:\n  - promote\n")
    write(tmp_path, text)
    with log.acting("schedule"):
        require(tmp_path, "promote", what="x")


def test_a_ref_that_moves_names_the_person(tmp_path):
    with log.acting("anna"):
        move_ref(open_store(tmp_path), "coder/champion", "model/coder@1", inputs=(), reason="better")
    entry = newest(tmp_path)
    assert (entry.who, entry.right, entry.what) == ("anna", "promote", "refs/coder/champion")
    assert (entry.before, entry.after, entry.reason) == (None, "model/coder@1", "better")
    assert log.actor().identity == "account"


def test_entries_come_newest_first_and_older_ones_are_read_too(tmp_path):
    store = open_store(tmp_path)
    old = {"action": "move_ref", "ref": "a/champion", "before": None, "after": "model/a@1", "who": "root", "time": 5.0}
    assert store.create("audit/00000001.json", json.dumps({**old, "reason": "r", "previous": None}).encode())
    log.audit(store, "stop endpoint", what="endpoint/local")
    assert [(entry.number, entry.action, entry.who) for entry in log.entries(store)] == [
        (2, "stop endpoint", log.account()),
        (1, "move_ref", "root"),
    ]


def test_a_policy_is_a_value_that_asks_for_everything_by_default():
    policy = Policy()
    assert all(policy.asks(right) for right in RIGHTS)
    with pytest.raises(Refused):
        policy.person("anna", "x")
    with pytest.raises(ValueError):
        policy.asked = ()
