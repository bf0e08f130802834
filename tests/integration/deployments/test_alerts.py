"""Each alert fires for a planted fault and clears when it is gone; each change is told once, whoever is away or killed."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
import run_folders as folders
from made_versions import make
from waiting import limit

from deployments.configuration.platform import AlertsConfig, PlatformConfig
from deployments.telemetry.alert_rules import RULES, Seen
from deployments.telemetry.runs import firing
from deployments.watch.alerts import CLEARED, FIRED, Alerts, Sources
from tasks.common import process
from tasks.registry.records import StoreJournal
from tasks.registry.refs import move_ref
from tasks.registry.revalidations import note_revalidation
from tasks.security.access import Access, accesses
from tasks.security.audit import entries
from tasks.security.audit_chain import append, check
from tasks.security.signatures import sign
from tasks.security.trust import add_key, revoke_key
from tasks.signing.keys import LocalKey, ensure_key
from tasks.storage import open_store

pytestmark = pytest.mark.unit

DAY = 86_400.0


@dataclass
class World:
    """Whoever alerts ask and tell; what was told."""

    home: Path
    limits: dict[str, Any] = field(default_factory=lambda: {"disk_free_gb": 0.0})
    late: list[dict[str, Any]] = field(default_factory=list)
    down: list[dict[str, Any]] = field(default_factory=list)
    broken: dict[str, str] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    away: Exception | None = None

    def alerts(self):
        """The duty, as a watch that was just started makes it."""
        config = PlatformConfig.model_validate({"alerts": self.limits})
        sources = Sources(
            late=lambda now: self._or_away(self.late),
            down=lambda: self._or_away(self.down),
            broken=lambda: self._or_away(self.broken),
            tell=self._tell,
        )
        return Alerts(self.home, config, sources)

    def look(self, after=0.0):
        """One look, so many seconds from now; what fires then."""
        self.alerts().tick(time.time() + after)
        return [f"{alert['alert']}/{alert['instance']}" for alert in firing(self.home)]

    def told(self):
        """What was told since it was last asked, as pairs of state and alert."""
        found, self.events = [(e["payload"]["state"], e["payload"]["alert"]) for e in self.events], []
        return found

    def _tell(self, event):
        self._or_away(None)
        self.events.append(json.loads(json.dumps(event)))

    def _or_away(self, value):
        if self.away:
            raise self.away
        return value


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    made = World(tmp_path / "home")
    assert made.look() == [] and made.told() == []
    return made


# ---- each rule


@pytest.mark.integration
@pytest.mark.parametrize(
    ("fault", "name", "said"),
    [
        (folders.failed, "run_failed", "the disk is full"),
        (folders.gate_closed, "gate_closed", "validation failed"),
        (folders.died, "flow_run_died", "left no word"),
    ],
)
def test_a_run_that_went_wrong_fires_until_one_of_its_kind_succeeds(world, fault, name, said):
    fault(world.home, "a")
    assert world.look() == [f"{name}/retrain.tiny"]
    (alert,) = firing(world.home)
    assert said in alert["details"] and alert["url"].endswith("/a") and alert["labels"]["run"] == "a"
    assert world.told() == [("fired", name)]
    folders.completed(world.home, "b", subject="another")
    folders.completed(world.home, "c", flow="revalidate")
    assert world.look(1) == [f"{name}/retrain.tiny"] and world.told() == []
    folders.completed(world.home, "d")
    assert world.look(2) == [] and world.told() == [("cleared", name)]


@pytest.mark.integration
@pytest.mark.parametrize("fault", [folders.failed, folders.gate_closed, folders.died])
def test_it_ends_by_itself_after_a_day(world, fault):
    fault(world.home, "a")
    assert len(world.look(DAY - 60)) == 1 and world.look(DAY + 60) == []
    assert [state for state, _ in world.told()] == ["fired", "cleared"]


@pytest.mark.integration
def test_a_run_that_died_and_was_taken_up_again_clears(world):
    folders.died(world.home, "a")
    assert world.look() == ["flow_run_died/retrain.tiny"]
    folders.Run(world.home, "a").log.started("train", None)
    assert world.look(1) == [] and world.told() == [("fired", "flow_run_died"), ("cleared", "flow_run_died")]


def test_a_cancelled_run_and_one_that_failed_before_a_success_are_no_alert(world):
    folders.Run(world.home, "a").close("cancelled", KeyboardInterrupt())
    folders.failed(world.home, "b", subject="other")
    folders.completed(world.home, "c", subject="other")
    assert world.look() == [] and world.told() == []


def test_a_running_stage_without_progress_fires_until_it_moves(world):
    run = folders.Run(world.home, "a")
    run.log.started("train", None)
    run.progress("train", 1, 60, "step 1")
    assert world.look(14 * 60) == [] and world.look(16 * 60) == ["job_without_progress/a.train"]
    assert world.told() == [("fired", "job_without_progress")]
    run.progress("train", 1, 60, "step 1")  # the same again is no progress, however fresh
    events = world.home / "runs" / "a" / "events.jsonl"
    shift(events, 15 * 60, last=True)
    assert world.look(16 * 60) == ["job_without_progress/a.train"]
    run.progress("train", 2, 60, "step 2")
    assert world.look() == [] and world.told() == [("cleared", "job_without_progress")]


def test_a_stage_that_hangs_clears_when_it_ends(world):
    run = folders.Run(world.home, "a")
    run.log.started("train", None)
    assert world.look(16 * 60) == ["job_without_progress/a.train"]
    run.close()
    assert world.look(16 * 60) == [] and len(world.told()) == 2


def test_waiting_is_no_standstill(world):
    run = folders.Run(world.home, "a")
    run.log.started("train", None)
    run.progress("train", 0, 0, "another run works on this stage; waiting for its result")
    other = folders.Run(world.home, "b", subject="other")
    other.log.started("deploy", None)
    other.log.write("waiting", **{"for": "approval"})
    assert world.look(5 * DAY) == []


def test_a_schedule_that_was_missed_fires_until_its_run_starts(world):
    world.late = [{"deployment": "retrain/local", "name": "merry-owl", "expected": time.time() - 9 * 60}]
    assert world.look() == []
    world.late[0]["expected"] -= 120
    assert world.look() == ["schedule_missed/retrain/local"] and "merry-owl" in firing(world.home)[0]["details"]
    world.late = []
    assert world.look(1) == [] and world.told() == [("fired", "schedule_missed"), ("cleared", "schedule_missed")]


def test_a_disk_that_is_nearly_full_fires_until_there_is_room_and_some_more(world):
    free = shutil.disk_usage(world.home).free / 1e9
    world.limits = {"disk_free_gb": free + 5}
    assert world.look() == ["disk_nearly_full/home"] and f"{free:.0f} GB free" in firing(world.home)[0]["details"]
    world.limits = {"disk_free_gb": free * 0.98}
    assert world.look() == ["disk_nearly_full/home"]
    world.limits = {"disk_free_gb": free * 0.5}
    assert world.look() == [] and world.told() == [("fired", "disk_nearly_full"), ("cleared", "disk_nearly_full")]


def test_a_champion_that_was_not_revalidated_fires_until_it_is(world):
    store = open_store(world.home)
    move_ref(store, "tiny/champion", "model/tiny@1", inputs=(), reason="test")
    assert world.look(7 * DAY) == [] and world.look(9 * DAY) == ["champion_not_revalidated/tiny"]
    assert world.told() == [("fired", "champion_not_revalidated")]
    revalidated(store, "unknown")
    assert world.look(9 * DAY) == ["champion_not_revalidated/tiny"]
    revalidated(store, "valid")
    assert world.look(7 * DAY) == [] and world.told() == [("cleared", "champion_not_revalidated")]


def revalidated(store, verdict, *, champion="model/tiny@1"):
    noted = {"champion": champion, "verdict": verdict, "passed": verdict == "valid", "why": ["length: it moved"]}
    note_revalidation(StoreJournal(store), "tiny", noted)


def test_a_champion_that_was_found_degraded_fires_until_it_is_valid_or_another(world):
    store = open_store(world.home)
    move_ref(store, "tiny/champion", "model/tiny@1", inputs=(), reason="test")
    revalidated(store, "degraded", champion="model/tiny@0")
    assert world.look() == []
    revalidated(store, "degraded")
    assert world.look() == ["model_degraded/tiny"] and firing(world.home)[0]["details"] == "length: it moved"
    revalidated(store, "unknown")
    revalidated(store, "invalid")
    assert world.look(60) == ["model_degraded/tiny"] and "invalid" in firing(world.home)[0]["summary"]
    revalidated(store, "valid")
    assert world.look(120) == [] and world.told() == [("fired", "model_degraded"), ("cleared", "model_degraded")]
    revalidated(store, "degraded")
    assert world.look(180) == ["model_degraded/tiny"]
    move_ref(store, "tiny/champion", "model/tiny@2", inputs=(), reason="test")
    assert world.look(240) == []


def test_an_endpoint_that_answers_otherwise_and_files_that_were_changed_fire_while_they_stand(world):
    followed = {"model": "model/tiny@1", "since": 0.0, "before": None, "said": None}
    process.write_json(world.home / "platform" / "anomalies.json", {"api": followed})
    assert world.look() == []
    columns = {"length": ["up to 8 4.0% -> 22.0%"], "accuracy": ["right 90.0% -> 60.0%"]}
    said = {"columns": columns, "since": 1.0, "last": 1.0}
    process.write_json(world.home / "platform" / "anomalies.json", {"api": {**followed, "said": said}})
    note = world.home / "integrity" / "tiny@1.json"
    model = "model/tiny@" + "1" * 64
    process.write_json(note, {"model": model, "said": "store: model.onnx (sha256)"})
    assert world.look(60) == ["endpoint_anomaly/api", f"model_tampered/{model}"]
    told = {alert["alert"]: alert for alert in firing(world.home)}
    assert told["endpoint_anomaly"]["details"] == "length: up to 8 4.0% -> 22.0%; accuracy: right 90.0% -> 60.0%"
    assert "fewer answers right" in next(rule.when for rule in RULES if rule.name == "endpoint_anomaly")
    assert told["model_tampered"]["details"] == "store: model.onnx (sha256)"
    assert "tiny@111111111111 are" in told["model_tampered"]["summary"]
    note.unlink()
    process.write_json(world.home / "platform" / "anomalies.json", {"api": followed})
    assert world.look(120) == []
    assert world.told()[2:] == [("cleared", "endpoint_anomaly"), ("cleared", "model_tampered")]


def test_an_endpoint_fires_whose_models_key_was_revoked_until_the_model_is_signed_anew_or_it_is_stopped(
    world, tmp_path
):
    store, folder = open_store(world.home), world.home / "endpoints" / "api" / "servers" / "a"
    model = make(store, tmp_path / "model", "model/tiny", {"model.onnx": "weights"})
    sign(store, world.home, model)
    process.write_json(folder / "serve.json", {"model_folder": str(tmp_path), "model_ref": model.ref})
    me = {"pid": os.getpid(), "started": process.process_started(os.getpid()), "boot_id": process.boot_id()}
    process.write_json(folder / "handle.json", me)
    (folder / "public.json").touch()
    process.write_json(
        world.home / "endpoints" / "api" / "endpoint.json", {"model_ref": model.ref, "folder": str(folder)}
    )
    assert world.look() == []
    other = LocalKey(ensure_key(tmp_path / "other"))
    add_key(world.home, "other", other.public_key(), ("*/*",))
    revoke_key(world.home, "home", "it leaked", by="anna")
    assert world.look(60) == ["endpoint_untrusted/api"]
    assert f"serves {model.ref[:-52]}" in firing(world.home)[0]["summary"]
    trust = world.home / "trust.yaml"
    trust.write_text(f"{trust.read_text()}sign_with:\n  key: {tmp_path / 'other' / 'signing.pem'}\n")
    sign(store, world.home, model)
    assert world.look(120) == [] and world.told() == [
        ("fired", "endpoint_untrusted"),
        ("cleared", "endpoint_untrusted"),
    ]
    revoke_key(world.home, "other", "it leaked, too")
    assert world.look(180) == ["endpoint_untrusted/api"]
    (folder / "handle.json").unlink()
    assert world.look(240) == []


def test_a_part_that_does_not_run_fires_until_it_does(world):
    world.down = [{"name": "worker", "details": "its log: worker.log"}]
    assert world.look() == ["platform_part_down/worker"]
    world.down = []
    assert world.look(1) == [] and world.told() == [("fired", "platform_part_down"), ("cleared", "platform_part_down")]


def test_a_source_of_events_that_is_broken_fires_until_it_works(world):
    world.broken = {"folder /inbox": "No such file or directory"}
    assert world.look() == ["event_source_broken/folder /inbox"]
    world.broken = {}
    assert world.look(1) == []
    assert world.told() == [("fired", "event_source_broken"), ("cleared", "event_source_broken")]


def refuse(world, claimed, times, host="h"):
    for _ in range(times):
        entry = {"action": "authorise", "outcome": "refused", "who": "root", "account": "root", "claimed": claimed}
        append(open_store(world.home), {**entry, "host": host})


def read(world, who, *, ref="model/m@1", gigabytes=0.0, ago=0.0, host="h"):
    """A line of the access log, as if it had been written so many seconds ago."""
    at = time.time() - ago
    fields = {"identity": "person", "host": host, "account": "root", "what": "verify"}
    line = Access(time=at, who=who, ref=ref, bytes=int(gigabytes * 1e9), **fields)
    day = world.home / "access" / f"{datetime.fromtimestamp(at, UTC).date()}.jsonl"
    day.parent.mkdir(exist_ok=True)
    with open(day, "a") as file:
        file.write(line.model_dump_json() + "\n")


def test_many_denials_of_one_name_fire_until_they_stop(world):
    refuse(world, "anna", 4)
    refuse(world, "ben", 4, host="other")
    assert world.look() == []
    refuse(world, "anna", 1)
    assert world.look() == ["many_denials/anna"] and "root@h" in firing(world.home)[0]["details"]
    assert world.look(9 * 60) == ["many_denials/anna"] and world.told() == [("fired", "many_denials")]
    assert world.look(11 * 60) == [] and world.told() == [("cleared", "many_denials")]


def test_what_somebody_unknown_did_tells_nothing_of_where_a_name_belongs(world):
    for host in ("h", "other"):
        append(
            open_store(world.home),
            {"action": "approve", "who": "unknown", "identity": "unknown", "host": host, "account": host},
        )
    assert world.look(1) == []


def test_many_names_that_are_tried_from_one_place_fire_as_well(world):
    for name in ("anna", "ben", "carl", "dora", "emil"):
        refuse(world, name, 1)
    assert world.look() == ["many_denials/root@h"] and "anna, ben" in firing(world.home)[0]["details"]
    assert world.look(11 * 60) == [] and world.told() == [("fired", "many_denials"), ("cleared", "many_denials")]


def test_a_bulk_download_fires_by_size_and_by_number_until_the_hour_is_over(world):
    world.limits |= {"download_gb": 10, "download_artifacts": 3}
    read(world, "anna", gigabytes=9.0, ago=60)
    for number in range(3):
        read(world, "ben", ref=f"model/m@{number}")
        read(world, "ben", ref=f"model/m@{number}")
    assert world.look() == []
    read(world, "anna", gigabytes=2.0)
    read(world, "ben", ref="model/m@3")
    assert world.look() == ["bulk_download/anna", "bulk_download/ben"]
    assert "11.00 GB" in firing(world.home)[0]["details"] and "4 artifacts" in firing(world.home)[1]["details"]
    assert world.told() == [("fired", "bulk_download")] * 2
    assert world.look(3700) == [] and world.told() == [("cleared", "bulk_download")] * 2


def test_a_bulk_download_is_also_many_times_what_is_usual_for_a_name(world):
    for hour in range(3, 9):
        read(world, "anna", gigabytes=0.5, ago=hour * 3600)
        read(world, "ben", gigabytes=20.0, ago=hour * 3600)
    read(world, "anna", gigabytes=15.0)
    read(world, "ben", gigabytes=15.0)
    read(world, "carl", gigabytes=15.0)
    assert world.look() == ["bulk_download/anna"] and "usually comes to 0.50 GB" in firing(world.home)[0]["details"]
    assert world.look(3700) == [] and world.told() == [("fired", "bulk_download"), ("cleared", "bulk_download")]


def test_a_new_place_of_a_known_name_fires_for_a_day(world):
    read(world, "anna", host="desk", ago=30)
    read(world, "ben", host="cafe", ago=20)
    assert world.look() == []
    read(world, "anna", host="desk")
    read(world, "anna", host="cafe")
    assert world.look() == ["new_place/anna.root@cafe"] and "root@desk" in firing(world.home)[0]["details"]
    assert world.told() == [("fired", "new_place")]
    read(world, "anna", host="cafe")
    assert world.look(DAY + 60) == [] and world.told() == [("cleared", "new_place")]


def test_habits_are_followed_once_across_restarts_and_read_again_when_their_file_is_odd(world):
    refuse(world, "anna", 3)
    assert world.look() == []
    refuse(world, "anna", 1)
    assert world.look() == []  # 3 and 1: nothing was counted twice
    (world.home / "platform" / "habits.json").write_text("{odd")
    assert world.look() == []
    refuse(world, "anna", 1)
    assert world.look() == ["many_denials/anna"]


@pytest.mark.integration
def test_a_normal_lifecycle_is_logged_holds_and_is_not_unusual(home, done):
    made, store = World(home.path), open_store(home.path)
    logged = {(entry.action, entry.outcome) for entry in entries(store)}
    assert logged >= {(action, "done") for action in ("publish dataset", "publish model", "deploy", "move_ref")}
    assert check(store).broken is None
    now = time.time()
    read_ = list(accesses(home.path))
    assert {one.what for one in read_} >= {"preprocess", "train", "deploy"} and all(one.bytes for one in read_)
    found = made.alerts()._habits.look(now)
    seen = Seen(now=now, habits=found)
    rules = [rule for rule in RULES if rule.name in ("many_denials", "bulk_download", "new_place")]
    assert found.places and [rule.find(seen, AlertsConfig()) for rule in rules] == [[], [], []]


def test_every_rule_has_a_test_here():
    text = Path(__file__).read_text()
    assert [
        rule.name for rule in RULES if f'("cleared", "{rule.name}")' not in text and f'"{rule.name}",' not in text
    ] == []
    assert all(rule.when.endswith(".") and rule.remedy.endswith(".") for rule in RULES)


# ---- told once, whatever happens


def test_what_is_not_known_just_now_neither_fires_nor_clears(world):
    move_ref(open_store(world.home), "tiny/champion", "model/tiny@1", inputs=(), reason="test")
    world.late = [{"deployment": "retrain/local", "name": "x", "expected": time.time() - 3600}]
    world.down = [{"name": "worker"}]
    before = world.look(9 * DAY)
    assert len(before) == 3
    world.told()
    world.away = httpx.ConnectError("nobody there")
    champion = next((world.home / "store").rglob("champion.json"))
    for odd in ("{odd", "{}"):
        champion.write_text(odd)
        assert world.look(9 * DAY) == before and world.told() == []
    assert all(rule.find(Seen(now=0.0), AlertsConfig()) in ([], None) for rule in RULES)


def test_while_prefect_is_away_changes_wait_and_are_told_once_in_their_order(world):
    world.away = httpx.ConnectError("nobody there")
    folders.failed(world.home, "a")
    world.look()
    folders.completed(world.home, "b")
    world.look(1)
    assert world.events == [] and len(process.read_json(world.home / "platform" / "alerts.json")["outbox"]) == 2
    world.away = None
    world.look(2)
    world.look(3)
    assert world.told() == [("fired", "run_failed"), ("cleared", "run_failed")]


@pytest.mark.integration
def test_a_watch_that_is_killed_at_any_moment_tells_every_change(world):
    """Killed between telling and remembering, it tells again, under the same id: Prefect takes that once."""
    ids = []
    for number in range(3):
        folders.failed(world.home, f"bad{number}", subject=f"m{number}")
        child = os.fork()
        if child == 0:
            die_telling(world, number)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        ids.append(next(world.home.glob(f"told-{number}-*")).name.partition(f"told-{number}-")[2])
        world.look()
        assert [event["id"] for event in world.events] == [ids[-1]] and len(world.told()) == 1
    assert len(set(ids)) == 3


def die_telling(world, number):
    """Look, tell, and be gone before that is remembered."""
    alerts = world.alerts()

    def tell(event):
        (world.home / f"told-{number}-{event['id']}").touch()
        os._exit(9)

    alerts._sources = dataclasses.replace(alerts._sources, tell=tell)
    alerts.tick(time.time())
    os._exit(0)


def test_a_watch_that_starts_again_tells_nothing_again(world):
    folders.failed(world.home, "a")
    assert world.look() == world.look(1) == world.look(2) == ["run_failed/retrain.tiny"]
    since = firing(world.home)[0]["since"]
    folders.failed(world.home, "b", "and now the network")  # the same alert goes on; what it says is the newest
    world.look(3)
    assert firing(world.home)[0]["since"] == since and "network" in firing(world.home)[0]["details"]
    assert world.told() == [("fired", "run_failed")]


def test_an_odd_file_of_alerts_is_begun_anew(world):
    folders.failed(world.home, "a")
    (world.home / "platform").mkdir(exist_ok=True)
    for odd in ("{half", "[]", '{"firing": 3, "outbox": "x"}'):
        (world.home / "platform" / "alerts.json").write_text(odd)
        assert firing(world.home) == []
        assert world.look() == ["run_failed/retrain.tiny"]


def test_a_secret_in_an_error_is_not_told(world, monkeypatch):
    monkeypatch.setenv("PLANTED_SECRET", "c4n4ry-0123456789abcdef")
    folders.failed(world.home, "a", "refused: c4n4ry-0123456789abcdef")
    world.look()
    assert "c4n4ry" not in json.dumps(world.events) + (world.home / "platform" / "alerts.json").read_text()
    assert world.told() == [("fired", "run_failed")]


# ---- the event


def test_the_event_is_what_the_documentation_says(world):
    folders.failed(world.home, "a", "x" * 10_000)
    world.look()
    (event,) = world.events
    assert event["event"] == FIRED == "headway.alert.fired" and CLEARED == "headway.alert.cleared"
    assert event["resource"]["prefect.resource.id"] == "headway.alert.run_failed.retrain.tiny"
    assert event["resource"] | {"headway.alert": "run_failed", "headway.severity": "critical"} == event["resource"]
    assert event["resource"]["prefect.resource.name"] == "retrain of tiny failed at train"
    payload = event["payload"]
    assert payload["summary"] == "retrain of tiny failed at train" and payload["url"] == "http://127.0.0.1/a"
    assert payload.keys() == {
        *("alert", "instance", "severity", "summary", "details", "remedy", "labels", "url", "since", "state", "time")
    }
    assert len(payload["details"]) <= 4000 and payload["remedy"]


SEND_TWICE = """# fork: commands
import json, sys, time
from pathlib import Path
from deployments.services import prefect_server
prefect_server.wait(prefect_server.prepare(Path(sys.argv[1])))
from prefect.client.orchestration import get_client
from deployments.watch.alerts import FIRED, send
event = json.load(sys.stdin)
send(event)
send(event)
wanted = {"filter": {"event": {"name": [FIRED]}}, "limit": 10}
with get_client(sync_client=True) as client:
    for again in range(100):
        kept = client.request("POST", "/events/filter", json=wanted).json()["events"]
        if kept and again:
            break
        time.sleep(0.5)
print(json.dumps(kept))
"""


@pytest.mark.integration
def test_prefect_takes_an_event_once(home, done, tmp_path):
    """Sent twice under one id, as after a kill: the real server keeps one."""
    made = World(tmp_path)
    folders.failed(tmp_path, "a")
    made.look()
    (event,) = made.events
    argv = [sys.executable, "-c", SEND_TWICE, str(home.path)]
    said = {
        "input": json.dumps(event),
        "env": home.environment(),
        "cwd": Path(__file__).parents[3],
        "timeout": limit(200),
    }
    (kept,) = json.loads(subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True, **said).stdout)
    assert kept["id"] == event["id"] and kept["payload"] == event["payload"] and kept["resource"] == event["resource"]


def shift(path, seconds, *, last=False):
    """Let the events of a log (or only the last one) have happened later than they did."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for event in lines[-1:] if last else lines:
        event["time"] += seconds
    path.write_text("".join(json.dumps(event) + "\n" for event in lines))
