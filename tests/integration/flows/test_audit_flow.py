"""The flow of the audit: the newest export is judged, the report is an artifact, and drift becomes one event."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from prefect.settings import PREFECT_API_URL, temporary_settings
from waiting import limit

from tasks.config.flows import AuditConfig
from tasks.events.ledger import Ledger
from tasks.storage import open_store

CARELESS = Path("tests/support/careless_estate/export")
SUBSCRIPTION = "5f1e2d3c-0000-4000-8000-00000000c4e1"
FLOW = """
import json, sys
from deployments.services import prefect_server
from tasks.common.home import home

server = prefect_server.prepare(home())
from flows.audit import audit
from tasks.common.errors import GateFailed
prefect_server.wait(server)
try:
    print(json.dumps(audit(config=json.loads(sys.argv[1]))))
except GateFailed as error:
    print(json.dumps({"failed": error.message, "checks": error.checks}))
"""


@pytest.fixture
def judged(tmp_path, monkeypatch):
    """The flow's task on a home, without a server."""
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    from flows.audit import report

    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        yield lambda **config: report.fn(AuditConfig(**config))


def export_in(home, day, *, changes=None):
    folder = home / "estate" / day
    shutil.copytree(CARELESS, folder)
    if changes is not None:
        (folder / "what-if.json").write_text(json.dumps({"status": "Succeeded", "changes": changes}))
    return folder


def report_of(home, ref):
    store = open_store(home)
    (manifest,) = [one for one in store.manifests("audit", "estate") if one.ref == ref]
    return manifest, json.loads(
        (store.root / "artifacts/audit/estate" / manifest.version / "files/audit.json").read_text()
    )


def test_drift_is_said_once_until_it_was_mended(judged, tmp_path):
    gone = [{"resourceId": "/subscriptions/s/resourceGroups/a", "changeType": "Create"}]
    steps = {"1": gone, "2": gone, "3": [], "4": gone}
    for number, (day, changes) in enumerate(steps.items()):
        folder = export_in(tmp_path, day, changes=changes)
        for path in folder.iterdir():
            os.utime(path, (2_000_000_000 + number,) * 2)
        said = judged()
        assert ("against its templates: drifted" in said["failed"]) == bool(changes)
    with Ledger(tmp_path).snapshot() as db:
        events = [dict(row) for row in db.execute("SELECT * FROM events ORDER BY number")]
    assert {event["name"] for event in events} == {"estate.drifted"}
    assert [event["status"] for event in events] == ["accepted", "duplicate", "accepted"]
    assert events[0]["subject"] == f"estate/{SUBSCRIPTION}"


def test_the_report_of_the_newest_export_is_an_artifact(judged, tmp_path):
    old, new = export_in(tmp_path, "b"), export_in(tmp_path, "a")
    for path in old.iterdir():
        os.utime(path, (1_000_000_000,) * 2)
    (new / "budgets-1.json").unlink()
    said = judged(level="low")
    manifest, page = report_of(tmp_path, said["ref"])
    assert page["counts"] == said["counts"] and page["subscription"] == SUBSCRIPTION and page["drift"] is None
    assert {row["id"]: row["verdict"] for row in page["rows"]}["budget"] == "not in this export"
    assert manifest.provenance.metrics["not_met"] == said["counts"]["not met"] > 10
    assert "budget" not in said["failed"] and "reservations" in said["failed"]
    with pytest.raises(ValueError, match="the settings name"):
        judged(subscription_id="00000000-0000-0000-0000-0000000000aa")


def test_a_waiver_that_nobody_noted_does_not_count(judged, tmp_path):
    export_in(tmp_path, "a")
    waiver = {"row": "scans", "who": "Ada", "why": "soon", "until": "2099-01-01"}
    (tmp_path / "waivers.yaml").write_text(yaml.safe_dump([waiver]))
    said = judged(waivers="waivers.yaml")
    _, page = report_of(tmp_path, said["ref"])
    assert "scans" in said["failed"] and any("does not count" in note for note in page["notes"])
    from tasks.report.estate.audit import load_waivers
    from tasks.report.estate.waivers import note

    note(open_store(tmp_path), load_waivers(tmp_path / "waivers.yaml"))
    assert "scans" not in judged(waivers="waivers.yaml")["failed"]


def test_without_an_export_the_home_alone_is_judged(judged, tmp_path):
    said = judged(strict=True)
    _, page = report_of(tmp_path, said["ref"])
    assert "no exports in estate" in page["notes"][0] and "recovery" in said["failed"]


@pytest.mark.long
def test_the_flow_runs_on_a_server_and_closes_its_gate_after_the_report(fresh, tmp_path):
    export_in(fresh.path, "a")
    command = [sys.executable, "-c", FLOW, json.dumps({"level": "high"})]
    ran = subprocess.run(command, env=fresh.environment(), capture_output=True, text=True, timeout=limit(300))
    assert ran.returncode == 0, ran.stderr[-3000:]
    said = json.loads(ran.stdout.splitlines()[-1])
    assert "scans" in said["failed"] and any(one["name"] == "scans/plans" for one in said["checks"])
    (artifact,) = fresh.ok("artifacts", "audit").said["artifacts"]
    assert {one["path"] for one in artifact["files"]} == {"audit.json", "audit.html"}
    assert fresh.ok("verify", artifact["ref"]).said["ok"]
    assert [node["ref"] for node in fresh.ok("lineage", "audit/estate").said["nodes"]] == [artifact["ref"]]
