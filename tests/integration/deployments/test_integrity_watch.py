"""A served model whose files are changed on disk is told once and taken out of service; answers that change are told too."""

import json
import os
import shutil
import threading
import time
from dataclasses import replace

import pytest
from answers import answers, broken, every
from tiny_model import PROMPTS, export_tiny
from waiting import limit, until

from deployments.configuration.platform import PlatformConfig
from deployments.services.parts import take
from deployments.telemetry.runs import firing
from deployments.watch.__main__ import duties
from deployments.watch.alerts import SLOW_SECONDS, Alerts, Sources
from deployments.watch.duties import ANOMALIES_SECONDS, DAY, LOWEST, Anomalies, Background, Integrity, Periods
from deployments.watch.hosts import Hosts
from tasks.common import process
from tasks.common.errors import IntegrityError, Missing
from tasks.common.process import read_json, write_json
from tasks.config.base import digest
from tasks.events.ledger import Ledger
from tasks.formats.answers import line
from tasks.registry.model_integrity import act_on, findings, standing, take_out_of_service
from tasks.registry.records import StoreJournal
from tasks.registry.refs import move_ref
from tasks.registry.revalidations import note_revalidation
from tasks.registry.versions import publish
from tasks.security.audit import entries
from tasks.security.signatures import sign
from tasks.security.trust import add_key, revoke_key
from tasks.serving.client import Sampling, complete
from tasks.serving.known import endpoint_of
from tasks.serving.local.endpoint import outputs_of
from tasks.serving.monitor.watch import COOL_DOWN_SECONDS, standing_anomalies
from tasks.signing.keys import LocalKey, ensure_key
from tasks.storage import open_store
from tasks.storage.manifest import Provenance

PERIOD = 0.2
SERVICE = {"service": {"min_requests": 30}}


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    return export_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    yield tmp_path / "home"
    if (tmp_path / "home" / "endpoints").exists():
        endpoint_of(tmp_path / "home", "api").stop()


def make_champion(home, folder, *, revalidation=None):
    """Publish, sign and make_champion a model; its manifest."""
    config = {"revalidation": revalidation or SERVICE}
    provenance = Provenance(name="tiny", stage="export", config=config, config_digest=digest(config))
    store = open_store(home)
    model = publish(store, folder, kind="model", inputs=(), provenance=provenance)
    sign(store, home, model)
    move_ref(store, "tiny/champion", model.ref, inputs=(), reason="test")
    return model


def serve(home, model, *, folder=None):
    """As the stage deploy does it: every byte is checked before it is handed on."""
    folder = folder or open_store(home).fetch(model)
    endpoint, golden = endpoint_of(home, "api"), read_json(folder / "golden.json")
    files = [file.model_dump() for file in model.content.files]
    return endpoint.switch(endpoint.start(folder, model.ref, files=files, golden=golden, timeout=limit(120)))


def flip(path):
    """Change one byte and keep size and times, as somebody who knows would; twice is as before."""
    status, data = path.stat(), bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def look(home):
    """One look of a watch that was just started."""
    duty = Integrity(home, PERIOD)
    duty.tick(time.time())
    duty.work.wait(limit(120))


def events(home, name):
    """Every event of a name in the ledger, duplicates among them."""
    with Ledger(home).snapshot() as db:
        return [dict(row) for row in db.execute("SELECT * FROM events WHERE name = ? ORDER BY number", (name,))]


def stored(home, model):
    return home / "store" / "artifacts" / "model" / "tiny" / model.version / "files"


def test_a_changed_file_is_found_within_a_period_told_once_and_served_no_more_until_it_is_mended(home, exported):
    model = make_champion(home, exported)
    at = serve(home, model)
    config = PlatformConfig.model_validate({"events": {"integrity_minutes": PERIOD / 60}})
    duty = duties(home, config, Hosts(home))["integrity"]
    for _ in range(3):
        assert take("integrity", duty, "") == ""
        time.sleep(PERIOD)
    assert events(home, "model.tampered") == [] and complete(at.url, "def ", Sampling(2))["model"] == model.ref
    flip(stored(home, model) / "model.onnx.data")
    deadline = time.monotonic() + limit(60)
    while endpoint_of(home, "api").observe() and time.monotonic() < deadline:
        assert take("integrity", duty, "") == ""
        time.sleep(0.05)
    with pytest.raises(Missing):
        complete(at.url, "def ", Sampling(2))
    (event,) = events(home, "model.tampered")
    assert (event["status"], event["subject"], event["channel"]) == ("accepted", "model/tiny", "headway")
    assert json.loads(event["data"])["places"] == ["store", "endpoint/api"]
    assert "model.onnx.data (sha256)" in standing(home)[model.ref]["said"]
    stops = [entry for entry in entries(open_store(home)) if entry.action == "stop endpoint"]
    assert [(stop.what, stop.before) for stop in stops] == [("endpoint/api", model.ref)]
    assert "model.onnx.data (sha256)" in stops[0].reason
    look(home)
    act_on(home, open_store(home), model.ref, findings(home, open_store(home), model.ref), source="headway/revalidate")
    assert len(events(home, "model.tampered")) == 1  # whoever finds it again
    with pytest.raises(IntegrityError):
        serve(home, model)
    flip(stored(home, model) / "model.onnx.data")
    look(home)
    assert standing(home) == {} and serve(home, model).ready
    flip(stored(home, model) / "model.onnx.data")
    look(home)
    assert [event["status"] for event in events(home, "model.tampered")] == ["accepted", "accepted"]
    assert endpoint_of(home, "api").observe() is None


def test_a_changed_manifest_stops_what_serves_from_it_for_nobody_can_say_what_its_files_should_be(home, exported):
    """Before that: one that an older release started is looked at by its bytes alone; one that serves another model is left."""
    model = make_champion(home, exported)
    at = serve(home, model)
    store = open_store(home)
    (path,) = (endpoint_of(home, "api").folder / "servers").glob("*/serve.json")
    handed = read_json(path)
    write_json(path, {key: value for key, value in handed.items() if key != "files"})
    assert findings(home, store, model.ref) == []
    flip(stored(home, model) / "model.onnx.data")
    assert {one.where for one in findings(home, store, model.ref)} == {"store", "endpoint/api"}
    write_json(path, handed)

    assert not take_out_of_service(home, store, "api", reason="late", serving="model/tiny@other")
    assert endpoint_of(home, "api").observe() == at
    manifest = stored(home, model).parent / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"kind": "model"', '"kind": "tokens"'))
    look(home)
    assert "manifest.json" in standing(home)[model.ref]["said"]
    assert endpoint_of(home, "api").observe() is None
    assert not take_out_of_service(home, store, "api", reason="again")


def test_what_an_endpoint_serves_from_is_looked_at_where_it_lies(home, exported, tmp_path):
    model = make_champion(home, exported)
    copy = shutil.copytree(exported, tmp_path / "cache")
    serve(home, model, folder=copy)
    store = open_store(home)
    assert findings(home, store, model.ref) == []
    flip(copy / "model.onnx")
    (found,) = findings(home, store, model.ref)
    assert (found.where, found.place, found.problems[0].path) == ("endpoint/api", str(copy), "model.onnx")
    look(home)
    assert endpoint_of(home, "api").observe() is None and list(standing(home)) == [model.ref]
    look(home)
    assert list(standing(home)) == [model.ref]  # it stands while the files are there, stopped or not
    flip(copy / "model.onnx")
    look(home)
    assert standing(home) == {}
    started = next((home / "endpoints" / "api" / "servers").glob("*/serve.json"))
    handed = read_json(started)
    handed["files"][0]["sha256"] = "0" * 64
    write_json(started, handed)
    assert [problem.path for one in findings(home, store, model.ref) for problem in one.problems] == ["serve.json"]


def test_an_endpoint_goes_on_where_the_signed_configuration_says_so_and_only_then(home, exported):
    model = make_champion(home, exported, revalidation={"integrity": {"stop_endpoints": False}})
    at = serve(home, model)
    flip(stored(home, model) / "model.onnx.data")
    look(home)
    assert len(events(home, "model.tampered")) == 1 and endpoint_of(home, "api").observe() == at
    flip(stored(home, model) / "model.onnx.data")
    manifest = stored(home, model).parent / "manifest.json"
    said = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(said | {"provenance": said["provenance"] | {"config_digest": "0" * 64}}))
    look(home)
    assert "signature" in standing(home)[model.ref]["said"] and endpoint_of(home, "api").observe() is None


def test_a_revoked_key_changes_no_file_so_the_endpoint_goes_on_and_an_alert_names_it_and_its_model(home, exported):
    model = make_champion(home, exported)
    at = serve(home, model)
    told = []
    sources = Sources(late=lambda now: [], down=lambda: [], tell=told.append)
    alerts = Alerts(home, PlatformConfig.model_validate({"alerts": {"disk_free_gb": 0}}), sources)
    now = time.time()
    alerts.tick(now)
    add_key(home, "new", LocalKey(ensure_key(home / "new")).public_key(), ("*/*",))
    revoke_key(home, "home", "the laptop was stolen", by="anna")
    look(home)
    assert endpoint_of(home, "api").observe() == at and standing(home) == {} and events(home, "model.tampered") == []
    (found,) = findings(home, open_store(home), model.ref)
    assert (found.where, found.untrusted) == ("store", True)
    assert told == []
    alerts.tick(now + SLOW_SECONDS)
    (alert,) = firing(home)
    assert (alert["alert"], alert["severity"]) == ("endpoint_untrusted", "critical")
    assert alert["labels"] == {"endpoint": "api", "model": model.ref}
    assert "by anna: the laptop was stolen" in alert["details"] and len(told) == 1
    flip(stored(home, model) / "model.onnx.data")  # and what is changed is stopped all the same
    look(home)
    assert endpoint_of(home, "api").observe() is None and len(events(home, "model.tampered")) == 1
    alerts.tick(now + 2 * SLOW_SECONDS)
    assert [alert["alert"] for alert in firing(home)] == ["model_tampered"]


def test_a_manifest_that_is_gone_or_edited_is_told_and_another_champion_ends_it(home, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "model.onnx").write_text("one")
    model = make_champion(home, tmp_path / "a")
    manifest = stored(home, model).parent / "manifest.json"
    whole = manifest.read_text()
    manifest.write_text(whole.replace('"size": 3', '"size": 4'))
    look(home)
    assert "manifest.json" in standing(home)[model.ref]["said"]
    manifest.write_text(whole.replace("headway/manifest/1", "headway/manifest/9"))
    look(home)
    assert "manifest.json" in standing(home)[model.ref]["said"]
    manifest.unlink()
    look(home)
    assert "manifest.json" in standing(home)[model.ref]["said"]
    (tmp_path / "a" / "model.onnx").write_text("two")
    make_champion(home, tmp_path / "a")
    look(home)
    assert standing(home) == {}


def test_long_work_stands_back_and_the_watch_goes_on():
    work, go, seen = Background("test"), threading.Event(), []

    def slow():
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        go.wait(limit(30))
        raise ValueError("went wrong")

    before = os.getpriority(os.PRIO_PROCESS, 0)
    work.start(slow)
    assert work.busy()
    go.set()
    with pytest.raises(ValueError, match="went wrong"):
        work.wait(limit(30))
    assert seen == [LOWEST] and os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
    with pytest.raises(ValueError, match="went wrong"):
        work.busy()
    assert not work.busy()


# ---- answers


def ask_many(home, at, count, *, max_tokens):
    """Ask, and return when every answer is noted on the disk."""

    def noted():
        outputs = outputs_of(home / "endpoints" / "api", at.model_ref)
        return sum(path.read_bytes().count(b"\n") for path in outputs.glob("*.jsonl"))

    before = noted()
    for number in range(count):
        complete(at.url, PROMPTS[number % len(PROMPTS)], Sampling(max_tokens, temperature=1.0))
    until(lambda: noted() == before + count)


def test_answers_that_a_real_endpoint_cuts_short_are_told_once(home, exported):
    model = make_champion(home, exported)
    at = serve(home, model)
    duty = Anomalies(home)
    duty.look(time.time())
    for max_tokens in (24, 24, 24):
        ask_many(home, at, 40, max_tokens=max_tokens)
        duty.look(time.time())
    assert {column for told in _anomalies(home) for column in told["columns"]} <= {"latency"}  # a busy machine is slow
    for _ in range(3):
        ask_many(home, at, 40, max_tokens=3)
        Anomalies(home).look(time.time())  # as a watch that was just started
    (event,) = [e for e in events(home, "endpoint.anomaly") if set(json.loads(e["data"])["columns"]) - {"latency"}]
    assert (event["status"], event["subject"]) == ("accepted", "endpoint/api")
    told = json.loads(event["data"])
    assert told["model"] == model.ref and "length" in told["columns"] and told["p_value"] <= 0.01
    assert "length" in standing_anomalies(home)["api"]["columns"]
    endpoint_of(home, "api").stop()
    Anomalies(home).look(time.time())
    assert standing_anomalies(home) == {}


def _anomalies(home):
    return [json.loads(event["data"]) for event in events(home, "endpoint.anomaly")]


class Made:
    """An endpoint whose answers are made up, a second apart; it runs as long as this test does."""

    def __init__(self, home):
        self.home, self.now, self.model = home, 1000.0, "model/tiny@" + "1" * 64
        server = home / "endpoints" / "api" / "servers" / "s"
        me = {"pid": os.getpid(), "started": process.process_started(os.getpid()), "boot_id": process.boot_id()}
        write_json(server / "handle.json", me)
        write_json(server / "serve.json", {"model_folder": "/nowhere", "files": []})
        write_json(server / "public.json", {"port": 1})  # as one of a release without a gateway, which a test cannot be
        record = {"folder": str(server), "model_ref": self.model, "url": "", "port": 1}
        write_json(home / "endpoints" / "api" / "endpoint.json", record)
        self.path = outputs_of(home / "endpoints" / "api", self.model) / "s-000001.jsonl"
        self.path.parent.mkdir(parents=True)
        self.duty = Anomalies(home)

    def window(self, change=lambda answer: answer, *, count=100, step=1):
        """So many answers, and then a look; how many events there are then."""
        made = every(step, answers(count, seed=[7, int(self.now)], begins=self.now), change)
        with open(self.path, "ab") as file:
            file.write(b"".join(map(line, made)))
        self.now += count
        self.duty.look(self.now)
        return len(events(self.home, "endpoint.anomaly"))


@pytest.fixture
def made(tmp_path):
    return Made(tmp_path)


def loop(answer):
    return replace(answer, repetition=0.9)


def test_one_window_is_no_anomaly(made):
    assert [made.window() for _ in range(5)] == [0] * 5
    assert [made.window(loop), made.window(), made.window(loop), made.window()] == [0] * 4


def test_two_windows_are_an_anomaly_and_an_alarm_that_flaps_is_one(made):
    assert [made.window() for _ in range(5)] == [0] * 5
    assert [made.window(loop), made.window(loop)] == [0, 1]
    assert [made.window(), made.window(loop), made.window(), made.window(loop), made.window()] == [1] * 5
    assert list(standing_anomalies(made.home)) == ["api"]
    for _ in range(int(COOL_DOWN_SECONDS // 100)):
        made.window()
    assert standing_anomalies(made.home) == {}
    made.duty = Anomalies(made.home)
    assert [made.window(loop), made.window(loop)] == [1, 2]
    assert {event["status"] for event in events(made.home, "endpoint.anomaly")} == {"accepted"}


def test_many_errors_are_told_at_once_and_a_window_waits_until_it_is_full(made):
    assert made.window(count=200) == 0
    assert made.window(loop, count=20) == 0 and made.window(loop, count=20) == 0
    assert made.window(broken, count=12) == 1
    assert "errors" in standing_anomalies(made.home)["api"]["columns"]


def test_what_stands_does_not_hide_what_comes_to_stand_beside_it(made):
    def slow(answer):
        return replace(answer, seconds=answer.seconds * 50)

    def both(answer):
        return loop(slow(answer))

    assert [made.window() for _ in range(5)] == [0] * 5
    assert [made.window(slow), made.window(slow), made.window(slow)] == [0, 1, 1]
    assert [made.window(both), made.window(both), made.window(both)] == [1, 2, 2]
    assert [sorted(told["columns"]) for told in _anomalies(made.home)] == [["latency"], ["repetition"]]
    assert sorted(standing_anomalies(made.home)["api"]["columns"]) == ["latency", "repetition"]


def test_a_look_is_every_few_minutes(made):
    made.window(count=200)
    made.duty.tick(made.now)
    made.duty.work.wait(limit(60))
    kept = read_json(made.home / "platform" / "anomalies.json")
    made.duty.tick(made.now + ANOMALIES_SECONDS / 2)
    made.duty.work.wait(limit(60))
    assert read_json(made.home / "platform" / "anomalies.json") == kept


# ---- periods


def test_a_champion_that_nobody_looks_at_is_told_once_a_period(home):
    store, now = open_store(home), time.time()
    move_ref(store, "tiny/champion", "model/tiny@1", inputs=(), reason="test")

    def told(days):
        Periods(home, 8).tick(now + days * DAY)
        return len(events(home, "model.stale"))

    assert [told(7), told(8.1), told(8.2), told(15), told(16.1), told(17)] == [0, 1, 1, 1, 2, 2]
    note_revalidation(StoreJournal(store), "tiny", {"champion": "model/tiny@1", "verdict": "degraded", "passed": False})
    assert [told(7), told(8.2)] == [2, 3]
    move_ref(store, "tiny/champion", "model/tiny@2", inputs=(), reason="test")
    assert [told(7), told(8.3)] == [3, 4]
    last = events(home, "model.stale")[-1]
    assert (last["status"], last["subject"]) == ("accepted", "model/tiny")
    assert json.loads(last["data"])["model"] == "model/tiny@2"
