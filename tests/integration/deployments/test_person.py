"""`headway person`, `headway audit-log`, and the commands that ask who somebody is."""

import fcntl
import json
import os
import pty
import select
import socket
import stat
import subprocess
import termios
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from retail_prices import item, retail_prices
from support import HEADWAY, Home
from waiting import limit

from deployments.configuration.platform import load_settings
from deployments.platform import start_stop
from tasks.common import process
from tasks.common.process import write_text

RIGHTS = ["publish", "run", "promote", "approve", "roll_back", "override"]


@dataclass(frozen=True)
class Desk(Home):
    """A home as one person sees it: their name and token are in the environment."""

    told: dict = field(default_factory=dict)

    def environment(self):
        kept = {name: value for name, value in super().environment().items() if not name.startswith("HEADWAY_")}
        return {**kept, "HEADWAY_HOME": str(self.path), **self.told}

    def of(self, name, token):
        return Desk(self.path, {"HEADWAY_PERSON": name, "HEADWAY_TOKEN": token})


@pytest.fixture
def desk(tmp_path):
    return Desk(tmp_path / "home")


@pytest.fixture
def anna(desk):
    """Who made the policy."""
    return desk.of("anna", desk.ok("person", "add", "anna").said["token"])


@pytest.fixture
def ben(anna):
    """Who may publish and run."""
    return anna.of("ben", anna.ok("person", "add", "ben", "--may", "run", "--may", "publish").said["token"])


@pytest.fixture
def files(tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "one.py").write_text("print(1)\n")
    return folder


def entries(desk, *words):
    return desk.ok("audit-log", *words).said["entries"]


def refused(ran):
    return ran.code == 2 and ran.said["error"]["type"] == "Refused"


def test_without_a_policy_nobody_is_asked_and_the_audit_names_the_account(desk, files):
    assert desk.ok("person", "list").said["policy"] is None
    desk.ok("dataset", "publish", "tiny", files)
    desk.ok("dataset", "publish", "tiny", files, "--as", "anna")
    first, second = entries(desk)
    assert first["who"] == second["who"] != "anna"
    assert {first["identity"], first["right"], first["outcome"]} == {"account", "publish", "done"}


def test_the_first_person_makes_the_policy_and_is_told_so(desk):
    ran = desk.run("person", "add", "anna", "--may", "run")
    assert ran.said["may"] == RIGHTS and "first person" in ran.stderr and "everything" in ran.stderr
    kept = desk.path / "policy.yaml"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    listed = desk.ok("person", "list").said
    assert (listed["policy"], listed["asks"]) == (str(kept), RIGHTS)
    assert listed["persons"] == [{"person": "anna", "may": RIGHTS}]
    assert ran.said["token"] not in kept.read_text() + json.dumps(listed)


def test_a_token_goes_into_a_file_alone(desk):
    said = subprocess.run([HEADWAY, "person", "add", "anna"], env=desk.environment(), capture_output=True, text=True)
    assert said.returncode == 0 and said.stdout.startswith("hwt_") and len(said.stdout.split()) == 1


def test_publish_asks_and_names_the_person(anna, ben, desk, files):
    desk = Desk(anna.path)
    assert refused(desk.run("dataset", "publish", "tiny", files))
    assert refused(desk.of("anna", "wrong").run("dataset", "publish", "tiny", files))
    assert desk.ok("dataset", "list").said["datasets"] == []
    ref = ben.ok("dataset", "publish", "tiny", files).said["ref"]
    done, *no = entries(desk, "--what", "dataset/tiny")
    assert (done["who"], done["identity"], done["what"], done["outcome"]) == ("ben", "person", ref, "done")
    assert [(entry["outcome"], entry["claimed"]) for entry in no] == [("refused", "anna"), ("refused", "")]


def test_as_on_the_command_line_comes_before_the_environment(anna, ben, files):
    assert refused(ben.run("dataset", "publish", "tiny", files, "--as", "anna"))
    assert entries(ben)[0]["claimed"] == "anna"


def test_retrain_asks_before_anything_starts(anna, ben, files):
    ben.ok("dataset", "publish", "tiny", files)
    assert refused(Desk(anna.path).run("retrain", "-c", "tiny"))
    assert Desk(anna.path).run("retrain", "-c", "tiny", "--dry-run").code == 0
    assert not (anna.path / "prefect").exists() and not (anna.path / "runs").exists()


def test_stopping_an_endpoint_asks_who_and_why(anna, ben):
    folder = anna.path / "endpoints" / "coder"
    folder.mkdir(parents=True)
    record = {"name": "coder", "port": 1, "url": "http://127.0.0.1:1", "model_ref": "model/coder@1"}
    (folder / "endpoint.json").write_text(json.dumps({**record, "folder": str(folder / "servers" / "a"), "since": 0}))
    without = anna.run("endpoint", "stop", "coder")
    assert without.code == 2 and "--reason" in without.said["error"]["message"]
    no = ben.run("endpoint", "stop", "coder", "--reason", "I want to")
    assert refused(no) and "ben may not roll back" in no.said["error"]["message"]
    anna.ok("endpoint", "stop", "coder", "--reason", "it answers nonsense")
    done, again = entries(anna, "--what", "endpoint/coder")
    assert (done["who"], done["action"], done["reason"]) == ("anna", "stop endpoint", "it answers nonsense")
    assert (again["claimed"], again["outcome"], again["reason"]) == ("ben", "refused", "I want to")


def test_what_the_platform_does_by_itself_is_changed_by_who_may_override_and_is_in_the_audit_log(anna, ben, tmp_path):
    """A schedule may have rights that whoever sets it has not: `schedule: [publish, run, promote]`."""
    settings = tmp_path / "platform.yaml"
    settings.write_text("schedules:\n  - {deployment: retrain/tiny, cron: '0 3 * * 1'}\n")
    with socket.socket() as taken:  # which ends `up` before it starts anything
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        up = ("up", "--detach", "--port", taken.getsockname()[1])
        assert refused(ben.run(*up, "--config", settings)) and not (ben.path / "platform.yaml").exists()
        anna.run(*up, "--config", settings)
        assert (anna.path / "platform.yaml").read_text() == settings.read_text()
        for words in (up, (*up, "--config", settings)):  # without a change nobody is asked
            assert "is taken" in ben.run(*words).said["error"]["message"]
    entry, _ = entries(anna, "--what", "settings of the platform")
    assert (entry["who"], entry["action"], entry["right"]) == ("anna", "change settings", "override")
    assert entry["what"] == "settings of the platform: schedules"


def test_of_a_file_of_settings_that_is_exchanged_meanwhile_what_was_looked_at_is_kept(tmp_path, monkeypatch):
    """Read twice, it was compared as one that changes nothing, and kept as one that does: nobody was asked."""
    home, file = tmp_path / "home", tmp_path / "settings.yaml"
    monkeypatch.setenv("HEADWAY_HOME", str(home))
    file.write_text("parallel_runs: 4\n")
    settings, text = start_stop.given(file)
    file.write_text("schedules:\n  - {deployment: retrain/tiny, cron: '0 3 * * 1'}\n")
    start_stop.keep(home, text)
    assert load_settings(home) == settings and not load_settings(home).schedules


def test_stopping_the_platform_asks_who_and_why_and_is_in_the_audit_log(anna, ben):
    part = anna.path / "platform" / "worker"
    process.start(part, process.ProcessSpec(argv=["sleep", "600"]))
    try:
        assert refused(ben.run("down", "--yes", "--reason", "no more")) and refused(
            anna.of("", "").run("down", "--reason", "x")
        )
        assert anna.run("down", "--yes").code == 2, "a reason is needed"
        assert process.alive(process.read_json(part / "handle.json"))
        assert anna.ok("down", "--yes", "--reason", "moving house").said["stopped"] == ["worker"]
    finally:
        process.stop(part)
    entry, *_ = entries(anna, "--what", "stop platform")
    assert (entry["who"], entry["reason"], entry["what"]) == ("anna", "moving house", "platform: platform/worker")


def test_a_policy_that_only_a_variable_names_is_shown_and_the_audit_log_has_which_one_allowed(desk, tmp_path):
    mine = tmp_path / "mine.yaml"
    eve = Desk(desk.path, {"HEADWAY_POLICY": str(mine)})
    assert refused(gone := eve.run("person", "add", "eve"))
    assert "unset it" in gone.said["error"]["remedy"]
    write_text(mine, "asks: []\n")
    eve.ok("dataset", "publish", "tiny", __file__)
    (tiny,) = (e["policy"] for e in entries(desk, "--what", "dataset/tiny"))
    assert str(mine) in tiny and "HEADWAY_POLICY" in tiny
    (finding,) = (f for f in eve.run("doctor").said["findings"] if f["name"] == "policy")
    assert finding["ok"] and finding["said"] == tiny
    assert eve.ok("status").said["policy"]["named"] and not desk.ok("status").said["policy"]["named"]


@pytest.mark.parametrize("variable", ["HEADWAY_POLICY", "HEADWAY_TRUST", "HEADWAY_STORES"])
def test_where_a_home_has_a_policy_no_variable_of_a_caller_replaces_its_files(anna, files, tmp_path, variable):
    mine = tmp_path / "mine.yaml"
    write_text(
        mine, {"HEADWAY_POLICY": "asks: []", "HEADWAY_TRUST": "keys: {}", "HEADWAY_STORES": "stores: {}"}[variable]
    )
    eve = Desk(anna.path, anna.told | {variable: str(mine)})
    for command in (("dataset", "publish", "tiny", files), ("up",), ("retrain", "-c", "tiny"), ("trust", "list")):
        failed = eve.run(*command)
        assert failed.code == 2 and variable in failed.said["error"]["message"], (command, failed.said)
        assert f"Unset {variable}" in failed.said["error"]["remedy"]
    assert anna.ok("trust", "list")


def test_what_was_done_is_told_in_the_audit_log_whatever_the_environment_calls_a_secret(anna, files):
    eve = Desk(
        anna.path, anna.told | {"MY_TOKEN": "dataset/tiny", "MY_SECRET": "publish dataset", "MY_KEY": "champion"}
    )
    eve.ok("dataset", "publish", "tiny", files)
    (entry,) = entries(anna, "--what", "dataset/tiny")
    assert (entry["action"], entry["right"]) == ("publish dataset", "publish")


def test_doctor_connects_with_the_programs_of_a_configuration_for_who_may_run_only(anna, ben, tmp_path):
    touched, settings = tmp_path / "touched", tmp_path / "mine.yaml"
    (tmp_path / "config").write_text(f"Host *\n  ProxyCommand touch {touched}\n")
    settings.write_text(
        f"cluster:\n  backend: ssh\n  ssh: {{hosts: [nowhere.example], config: {tmp_path / 'config'}}}\n"
    )
    eve = anna.of("eve", anna.ok("person", "add", "eve", "--may", "approve").said["token"])
    assert refused(eve.run("doctor", "-c", settings)) and refused(eve.of("", "").run("doctor", "-c", settings))
    assert not touched.exists()
    ben.run("doctor", "-c", settings)
    assert touched.exists()
    assert not refused(eve.run("doctor", "-c", "tiny"))


def test_prices_and_quota_that_plans_are_judged_by_are_updated_by_who_may_run_only(anna, ben):
    with retail_prices([item()]) as azure:
        ask = {"HEADWAY_PRICES_URL": azure.url}
        eve = anna.of("eve", anna.ok("person", "add", "eve", "--may", "approve").said["token"])
        for nobody in (eve, eve.of("", "")):
            assert refused(Desk(anna.path, {**nobody.told, **ask}).run("prices", "update", "--region", "eastus"))
            assert refused(nobody.run("quota", "update", "-c", "tiny"))
        assert not (anna.path / "prices").exists()
        assert Desk(anna.path, {**eve.told, **ask}).ok("prices").said["machines"]
        assert (
            Desk(anna.path, {**ben.told, **ask}).ok("prices", "update", "--region", "eastus").said["regions"]["eastus"]
        )
    newest = entries(anna)[0]
    assert (newest["action"], newest["what"], newest["right"]) == ("update prices", "the prices of eastus", "run")


def test_only_who_may_override_changes_the_policy(anna, ben):
    before = (anna.path / "policy.yaml").read_text()
    for words in (("add", "eve", "--may", "run"), ("remove", "anna"), ("renew", "anna")):
        assert refused(ben.run("person", *words))
    assert (anna.path / "policy.yaml").read_text() == before
    new = anna.ok("person", "renew", "ben").said["token"]
    assert refused(ben.run("retrain", "-c", "tiny"))
    assert ben.of("ben", new).run("retrain", "-c", "tiny").said["error"]["type"] == "Unknown"  # no dataset: let in
    anna.ok("person", "remove", "ben")
    assert [one["person"] for one in anna.ok("person", "list").said["persons"]] == ["anna"]
    assert anna.run("person", "remove", "anna").code == 2
    hers = [(e["action"], e["outcome"]) for e in entries(anna, "--person", "anna")]
    assert hers[:2] == [("remove person", "failed")] * 2  # of herself: begun, and refused by the policy's own rule
    assert hers[2:] == [(f"{done} person", "done") for done in ("remove", "renew", "add")]


def test_a_misspelt_right_and_a_name_that_cannot_be_change_nothing(anna):
    for may in ("", "run,aprove"):
        ran = anna.run("person", "add", "ben", "--may", may)
        assert ran.code == 2 and "publish, run, promote" in ran.said["error"]["message"]
    for name in ("Anna Schmidt", "schedule", "../x"):
        ran = anna.run("person", "add", name, "--may", "run")
        assert ran.code == 2 and name in ran.said["error"]["message"]
    assert [one["person"] for one in anna.ok("person", "list").said["persons"]] == ["anna"]


def test_a_policy_that_others_may_write_stops_who_is_asked_but_not_who_only_looks(anna, files):
    (anna.path / "policy.yaml").chmod(0o666)
    assert refused(anna.run("dataset", "publish", "tiny", files))
    assert refused(anna.run("person", "list"))
    assert anna.run("dataset", "list").code == 0 and entries(anna)[0]["outcome"] == "refused"


def test_the_audit_is_filtered_by_person_text_and_time(anna, ben, files):
    ben.ok("dataset", "publish", "tiny", files)
    assert {entry["who"] for entry in entries(anna, "--person", "ben")} == {"ben"}
    assert [entry["who"] for entry in entries(anna, "--what", "publish dataset")] == ["ben"]
    assert len(entries(anna, "--since", "1h")) == len(entries(anna)) == 3
    assert entries(anna, "--since", "2999-01-01") == []
    assert entries(anna, "--since", "0m") == []
    wrong = anna.run("audit-log", "--since", "yesterday")
    assert wrong.code == 2 and "yesterday" in wrong.said["error"]["message"]
    words = subprocess.run([HEADWAY, "audit-log"], env=anna.environment(), capture_output=True, text=True).stdout
    assert "ben" in words.splitlines()[0] and "publish dataset" in words


def test_the_token_is_asked_for_on_a_terminal_and_not_shown(anna, files):
    """A real terminal: the token is typed, and the terminal shows nothing of it."""
    environment = {k: v for k, v in anna.environment().items() if k != "HEADWAY_TOKEN"}
    parent, child = pty.openpty()
    process = subprocess.Popen(
        [HEADWAY, "dataset", "publish", "tiny", str(files), "--as", "anna"],
        env=environment,
        stdin=child,
        stdout=child,
        stderr=child,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(child)
    said = read_until(parent, "Token of anna:")
    os.write(parent, f"{anna.told['HEADWAY_TOKEN']}\n".encode())
    said += read_until(parent, "documents")
    assert process.wait(limit(60)) == 0 and anna.told["HEADWAY_TOKEN"] not in said
    os.close(parent)


def read_until(descriptor, text, timeout=60.0):
    said, deadline = "", time.monotonic() + limit(timeout)
    while text not in said and time.monotonic() < deadline:
        if select.select([descriptor], [], [], 0.5)[0]:
            said += os.read(descriptor, 4096).decode()
    assert text in said, said
    return said


def test_a_run_is_that_of_the_person_who_started_it(home, done):
    """On the home that other tests use: the policy is there for this test only."""
    desk = Desk(home.path)
    try:
        anna = desk.of("anna", desk.ok("person", "add", "anna").said["token"])
        assert refused(desk.run("retrain", "-c", "tiny"))
        ran = anna.retrain()
        assert ran.code == 0, ran.stderr
        entry = entries(anna, "--what", "start run")[0]
        assert (entry["who"], entry["identity"], entry["right"]) == ("anna", "person", "run")
        handle = json.loads((home.path / "runs" / ran.said["flow_run"]["id"] / "handle.json").read_text())
        assert handle["actor"] == {"name": "anna", "identity": "person"}
        texts = [path.read_bytes() for path in Path(home.path / "store" / "documents").rglob("*.json")]
        assert not any(anna.told["HEADWAY_TOKEN"].encode() in text for text in texts)
    finally:
        (home.path / "policy.yaml").unlink(missing_ok=True)
