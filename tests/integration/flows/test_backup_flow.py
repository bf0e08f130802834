"""Five versions, a rollback to the second, a restore on an empty home: everything tells the same story there. And the flow."""

import json
import subprocess
import sys

import pytest
from support import Home
from waiting import limit

from flows.backup import backup
from tasks.common.errors import Refused
from tasks.security.audit import acting
from tasks.security.policy import add_person

FLOW = """# fork: commands
import json
from deployments.services import prefect_server
from tasks.config.base import home

server = prefect_server.prepare(home())
from flows.backup import backup
prefect_server.wait(server)
print(json.dumps(backup(config={"to": "nightly", "keep": 2, "drill": True})))
"""


@pytest.fixture
def five(fresh):
    """Versions 1 to 5 of one name, rolled back to the second; the references by number."""
    refs = []
    for number in range(1, 6):
        folder = fresh.path.parent / "texts"
        folder.mkdir(exist_ok=True)
        (folder / "a.jsonl").write_text("".join(json.dumps({"text": f"{number}.{n}"}) + "\n" for n in range(number)))
        refs.append(fresh.ok("dataset", "publish", "five", folder).said["ref"])
    fresh.ok("rollback", "dataset/five", "--to", refs[1].partition("@")[2], "--reason", "the third is poisoned")
    return refs


def told(home):
    """History, audit log, lineage and files of a home, as its commands tell them."""
    history = home.ok("artifacts", "dataset/five", "--history").said["history"]
    files = {
        a["ref"]: [(f["path"], f["sha256"]) for f in a["files"]]
        for a in home.ok("artifacts", "dataset").said["artifacts"]
    }
    return {
        "history": [{**change, "current": None} for change in history],
        "audit": home.ok("audit-log").said["entries"],
        "down": [node["ref"] for node in home.ok("lineage", "dataset/five").said["nodes"]],
        "up": [node["ref"] for node in home.ok("lineage", "dataset/five", "--forward").said["nodes"]],
        "files": files,
    }


@pytest.mark.long
def test_a_restored_home_tells_the_same_story(fresh, five, tmp_path):
    fresh.ok("backup", "--to", "./backups")
    before = told(fresh)
    restored = Home(tmp_path / "other")
    said = restored.ok("restore", "--from", "./backups").said
    assert said["artifacts"] == 5
    after = told(restored)
    assert after["files"] == before["files"] and set(after["files"]) == set(five)
    assert after["down"] == before["down"] == [five[1]] and after["up"] == before["up"]
    assert after["history"][1:] == before["history"] and after["history"][0]["action"] == "restore"
    assert after["audit"][1:] == before["audit"] and after["audit"][0]["action"] == "restore"
    restored.ok("audit-log", "--verify")
    for ref in five:
        assert restored.ok("verify", ref).said["ok"]
    assert restored.ok("rollback", "dataset/five", "--to", five[4].partition("@")[2], "--reason", "healed").code == 0
    line = sorted((restored.path / "store" / "documents" / "audit").iterdir())[2]
    line.write_text(line.read_text().replace("publish", "fetch"))
    assert restored.run("audit-log", "--verify").code == 5


def test_the_flow_backs_up_and_proves_it(fresh, five, tmp_path):
    (fresh.path / "stores.yaml").write_text(f"stores:\n  nightly: {{uri: {tmp_path / 'backups'}}}\n")
    ran = subprocess.run(
        [sys.executable, "-c", FLOW], env=fresh.environment(), capture_output=True, text=True, timeout=limit(300)
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    said = json.loads(ran.stdout.splitlines()[-1])
    assert said["backup"]["artifacts"] == said["backup"]["sent"] == said["drill"]["artifacts"] == 5
    assert said["drill"]["rpo_seconds"] < limit(120) and said["drill"]["audit_entries"] >= 7
    entry = fresh.ok("audit-log", "--what", "backup").said["entries"][0]
    assert entry["action"] in ("backup", "prune backups") and entry["outcome"] == "done"


def test_the_flow_asks_for_publish_as_the_command_does(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    add_person(tmp_path, "anna", ("override",))
    add_person(tmp_path, "ben", ("run",))
    with acting("ben"), pytest.raises(Refused, match="ben may not publish"):
        backup.fn(config={"to": "nightly"})
