"""Backups: only what is new is sent, the last one is whole whoever is killed, and an empty home becomes what the old one was."""

import json
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import azurite as emulator
import pytest
import yaml
from lineage_stand import publish_lineage, publish_one
from store_stand import standing

from tasks.common.errors import IntegrityError, Missing, Unknown
from tasks.common.process import write_text
from tasks.config.access import AccessConfig
from tasks.jobs.serving.keys import Door
from tasks.registry.ancestry import walk
from tasks.registry.backup.backup import back_up, prune
from tasks.registry.backup.restore import MARK, drill, restore
from tasks.registry.backup.snapshot import backups
from tasks.registry.refs import read_ref
from tasks.security import audit_chain
from tasks.security.audit import entries
from tasks.security.signatures import require_signed, sign
from tasks.serving.keys import add_key, keys_file, own_key, read_keys
from tasks.storage import open_store
from tasks.storage.history import changes, current
from tasks.storage.local import LocalStore

pytestmark = pytest.mark.unit

KILLED_AFTER_TWO = """
import os, signal, sys
from pathlib import Path
from tasks.registry.backup.backup import back_up
from tasks.registry.backup.restore import restore
from tasks.storage import open_store
from tasks.storage.local import LocalStore

class Dying(LocalStore):
    left = 2
    def publish(self, folder, **said):
        self.left -= 1
        if self.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().publish(folder, **said)

what, home, target = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
if what == "backup":
    back_up(home, open_store(home), Dying(target))
else:
    restore(home, Dying(home / "store"), LocalStore(target))
"""


@pytest.fixture
def home(tmp_path):
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


@pytest.fixture
def made(home):
    return publish_lineage(home)


@pytest.fixture
def target(tmp_path):
    return LocalStore(tmp_path / "backups")


@pytest.fixture
def other(tmp_path):
    return tmp_path / "other"


def save(home, target, **said):
    return back_up(home, open_store(home), target, **said)


def bring_back(home, target, **said):
    return restore(home, open_store(home), target, **said)


def documents(home):
    store = open_store(home)
    return {key: store.read(key).data for key in store.list("")}


def flip(path):
    path.chmod(0o644)
    data = path.read_bytes()
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])


def test_an_empty_home_becomes_what_the_old_one_was(home, made, target, other):
    before = documents(home)
    said = save(home, target)
    restored = bring_back(other, target)
    store = open_store(other)
    after = documents(other)
    added = {"backup", "restore"}
    assert {key: after[key] for key in before if not key.startswith("heads/")} == {
        key: data for key, data in before.items() if not key.startswith("heads/")
    }
    assert [entry.action for entry in entries(store) if entry.action in added] == ["restore", "backup"]
    assert audit_chain.check(store).broken is None
    for kind in ("dataset", "checkpoint", "model"):
        assert store.verify(store.manifest(kind, "tiny", made[kind].version)) == []
        assert [change.action for change in changes(store, kind, "tiny")] == ["publish", "restore"]
    assert read_ref(store, "tiny/champion") == made["model"].ref
    assert require_signed(store, other, made["model"]).version == made["model"].version
    assert restored.bytes == sum(made[kind].bytes for kind in ("dataset", "checkpoint", "model"))
    assert said.contents == restored.contents and not (other / MARK).exists()


def test_lineage_is_told_both_ways_over_what_was_left_out(home, made, target, other):
    assert save(home, target).left_out == (made["tokens"].ref,)
    bring_back(other, target)
    down = walk(open_store(other), "model/tiny")
    assert [node["ref"] for node in down["nodes"]] == [
        made[k].ref for k in ("model", "checkpoint", "tokens", "dataset")
    ]
    up = walk(open_store(other), "dataset/tiny", direction="up")
    assert [model["ref"] for model in up["models"]] == [made["model"].ref]
    assert all(str(other) in node["uri"] for node in down["nodes"] if node["uri"])


def test_only_what_is_new_is_sent(home, made, target):
    first = save(home, target)
    assert set(first.sent) == {made[kind].ref for kind in ("dataset", "checkpoint", "model")}
    assert save(home, target).sent == ()
    newer = publish_one(home, "dataset", "tiny", "newer")
    assert save(home, target).sent == (newer.ref,)


def test_of_checkpoints_the_newest_intact_one_and_what_a_champion_stands_on_are_kept(home, made, target):
    older = publish_one(home, "checkpoint", "tiny", "older")
    newest = publish_one(home, "checkpoint", "tiny", "newest")
    damaged = publish_one(home, "checkpoint", "tiny", "damaged")
    flip(open_store(home).fetch(damaged) / "data.bin")
    said = save(home, target)
    kept = [ref for ref in said.contents.artifacts if ref.startswith("checkpoint/")]
    assert set(kept) == {newest.ref, made["checkpoint"].ref}
    assert older.ref in said.left_out and damaged.ref in said.left_out


def test_what_is_damaged_is_named_and_does_not_stop_the_rest(home, made, target):
    flip(open_store(home).fetch(made["dataset"]) / "data.bin")
    said = save(home, target)
    assert said.contents.damaged == (made["dataset"].ref,)
    assert set(said.contents.artifacts) == {made["checkpoint"].ref, made["model"].ref}


def test_damage_after_a_backup_costs_nothing(home, made, target, other):
    save(home, target)
    flip(open_store(home).fetch(made["dataset"]) / "data.bin")
    assert save(home, target).contents.damaged == ()
    bring_back(other, target)
    assert open_store(other).verify(made["dataset"]) == []


@pytest.mark.integration
def test_a_killed_backup_leaves_the_last_one_whole_and_sends_nothing_twice(home, made, target, other):
    save(home, target)
    new = [publish_one(home, "dataset", "tiny", f"new {number}") for number in range(4)]
    ran = subprocess.run(
        [sys.executable, "-c", KILLED_AFTER_TWO, "backup", str(home), str(target.root)], cwd=Path.cwd()
    )
    assert ran.returncode == -signal.SIGKILL
    assert len(backups(target)) == 1 and drill(home, target).artifacts == 3
    assert len(save(home, target).sent) == len(new) - 2


@pytest.mark.integration
def test_a_killed_restore_goes_on(home, made, target, other):
    save(home, target)
    other.mkdir()
    ran = subprocess.run(
        [sys.executable, "-c", KILLED_AFTER_TWO, "restore", str(other), str(target.root)], cwd=Path.cwd()
    )
    assert ran.returncode == -signal.SIGKILL and (other / MARK).exists()
    assert len(list(open_store(other).manifests())) == 2
    bring_back(other, target)
    assert current(open_store(other), "model", "tiny") == made["model"].version
    assert audit_chain.check(open_store(other)).broken is None


def test_the_drill_proves_it_tells_how_long_it_took_and_leaves_nothing(home, made, target):
    said = save(home, target)
    done = drill(home, target)
    assert (done.artifacts, done.documents) == (3, len(said.contents.documents))
    assert 0 < done.rto_seconds <= done.seconds and done.rpo_seconds > 0 and done.audit_entries > 5
    assert list((home / "work").iterdir()) == []


@pytest.mark.parametrize("file", ["documents.jsonl", "backup.json", "home/keys/signing.pub"])
def test_a_flipped_byte_of_a_backup_is_named(home, made, target, other, file):
    said = save(home, target)
    flip(target.root / "artifacts" / "backup" / "home" / said.manifest.version / "files" / file)
    for use in (lambda: drill(home, target), lambda: bring_back(other, target)):
        with pytest.raises(IntegrityError) as raised:
            use()
        assert [problem["path"] for problem in raised.value.problems] == [file]


@pytest.mark.parametrize("kind, file", [("dataset", "files/data.bin"), ("model", "statement.json")])
def test_a_flipped_byte_of_what_a_backup_holds_is_named(home, made, target, other, kind, file):
    save(home, target)
    flip(target.root / "artifacts" / kind / "tiny" / made[kind].version / file)
    with pytest.raises(IntegrityError) as raised:
        bring_back(other, target)
    assert [problem["path"] for problem in raised.value.problems] == [file.removeprefix("files/")]


def test_an_artifact_that_is_gone_from_a_backup_is_named(home, made, target):
    save(home, target)
    target.delete(made["model"])
    with pytest.raises(IntegrityError, match="model/tiny"):
        drill(home, target)


def test_old_backups_go_and_with_them_what_only_they_named(home, made, target, other):
    save(home, target)
    newer = publish_one(home, "checkpoint", "other", "one")
    save(home, target)
    publish_one(home, "checkpoint", "other", "two")
    third = save(home, target, keep=1)
    assert len(third.pruned) == 2 and [one.version for one in backups(target)] == [third.manifest.version]
    assert newer.ref not in [one.ref for one in target.manifests()]
    assert drill(home, target).artifacts == 4


@pytest.mark.parametrize("damage", ["documents.jsonl", "backup.json", "the artifact"])
def test_nothing_goes_before_all_that_stays_was_read(home, made, target, damage):
    first = save(home, target)
    publish_one(home, "checkpoint", "other", "one")
    second = save(home, target)
    if damage == "the artifact":
        shutil.rmtree(target.root / "artifacts" / "model" / "tiny" / made["model"].version)
    else:
        flip(target.root / "artifacts" / "backup" / "home" / second.manifest.version / "files" / damage)
    with pytest.raises(IntegrityError, match="no old backup was removed") as raised:
        prune(target, 1)
    assert [one["path"] for one in raised.value.problems] == [made["model"].ref if damage == "the artifact" else damage]
    assert [one.version for one in backups(target)] == [second.manifest.version, first.manifest.version]


def test_a_backup_of_a_time(home, made, target, other):
    first = save(home, target).contents.at
    publish_one(home, "dataset", "tiny", "later")
    save(home, target)
    bring_back(other, target, at=first)
    assert current(open_store(other), "dataset", "tiny") == made["dataset"].version
    with pytest.raises(Unknown, match="as old as 2020"):
        bring_back(other.with_name("third"), target, at="2020-01-01")
    with pytest.raises(ValueError, match="no time"):
        bring_back(other.with_name("third"), target, at="yesterday")


def test_mlflow_and_endpoints_point_into_the_new_home(home, made, target, other):
    (home / "mlflow").mkdir()
    with sqlite3.connect(home / "mlflow" / "mlflow.db") as database:
        database.execute("CREATE TABLE runs (run_uuid TEXT, artifact_uri TEXT)")
        database.execute("INSERT INTO runs VALUES ('r', ?)", (f"{home.as_uri()}/mlflow/artifacts/1/r/artifacts",))
        database.execute("INSERT INTO runs VALUES ('s', 'az://elsewhere/x')")
        database.execute("CREATE TABLE datasets (dataset_source TEXT)")
        database.execute("INSERT INTO datasets VALUES (?)", (json.dumps({"uri": f"{home.as_uri()}/store/x"}),))
    endpoint = home / "endpoints" / "tiny" / "endpoint.json"
    endpoint.parent.mkdir(parents=True)
    endpoint.write_text(json.dumps({"model_ref": made["model"].ref, "folder": str(home / "endpoints/tiny/servers/1")}))
    save(home, target)
    bring_back(other, target)
    with sqlite3.connect(other / "mlflow" / "mlflow.db") as database:
        rows = dict(database.execute("SELECT run_uuid, artifact_uri FROM runs"))
        (source,) = database.execute("SELECT dataset_source FROM datasets").fetchone()
    assert json.loads(source) == {"uri": f"{other.as_uri()}/store/x"}
    assert rows == {"r": f"{other.as_uri()}/mlflow/artifacts/1/r/artifacts", "s": "az://elsewhere/x"}
    told = json.loads((other / "endpoints" / "tiny" / "endpoint.json").read_text())
    assert told == {"model_ref": made["model"].ref, "folder": str(other / "endpoints/tiny/servers/1")}


def test_private_keys_go_only_when_asked_for(home, made, target, other):
    save(home, target)
    bring_back(other, target)
    assert not (target.fetch(backups(target)[0]) / "home" / "keys" / "signing.pem").exists()
    newer = publish_one(other, "model", "newer", "newer")
    sign(open_store(other), other, newer)
    keys = {require_signed(open_store(other), other, one).key for one in (made["model"], newer)}
    assert len(keys) == 2, "the old home's key still counts, and the new home has one of its own"
    with_keys = other.with_name("third")
    for name in ("approvals.key", "decisions.jsonl", "jobs.key"):
        (home / "keys" / name).write_text("x" * 64)
    save(home, target, with_keys=True)
    bring_back(with_keys, target)
    kept = with_keys / "keys" / "signing.pem"
    assert kept.read_bytes() == (home / "keys" / "signing.pem").read_bytes() and kept.stat().st_mode & 0o077 == 0
    assert not {"approvals.key", "decisions.jsonl", "jobs.key"} & {path.name for path in kept.parent.iterdir()}, (
        "they count no more"
    )


def files_of(target):
    return target.fetch(backups(target)[0]) / "home"


def test_an_endpoint_that_asked_for_keys_asks_for_them_in_the_new_home(home, made, target, other):
    endpoint = home / "endpoints" / "tiny"
    _, shown = add_key(endpoint, "team-a")
    own = own_key(endpoint)
    save(home, target)
    bring_back(other, target)
    restored = other / "endpoints" / "tiny"
    assert Door(AccessConfig(), keys_file(restored)).guarded
    assert read_keys(restored).caller(shown) == "team-a"
    assert keys_file(restored).stat().st_mode & 0o077 == 0
    assert not {path.name for path in files_of(target).rglob("*.key")}
    assert not any(key in path.read_text() for path in files_of(target).rglob("*.json") for key in (shown, own))
    assert own_key(restored) not in ("", own), "Headway's own commands get a new one"


def test_passwords_in_the_platforms_settings_stay_where_they_are(home, made, target, other):
    channels = [
        {"name": "on-call", "url": "mailtos://ops:very%20secret@smtp.example.org?to=oncall@example.org"},
        {"name": "team", "url": "env:TEAM_WORKFLOW", "occasions": ["failed"]},
        {"name": "chat", "url": "slack://TokenA/TokenB/TokenC"},
    ]
    told = {"notifications": channels, "telemetry": {"otlp_endpoint": "https://me:hunter22hunter@otel.example.org"}}
    write_text(home / "platform.yaml", yaml.safe_dump(told))
    made = save(home, target)
    assert made.kept_out == ("notifications.on-call.url", "notifications.chat.url", "telemetry.otlp_endpoint")
    held = (files_of(target) / "platform.yaml").read_text()
    assert not [secret for secret in ("very%20secret", "TokenA", "hunter22hunter") if secret in held]
    bring_back(other, target)
    back = yaml.safe_load((other / "platform.yaml").read_text())
    assert [one["url"] for one in back["notifications"]] == [
        "env:ADDRESS_OF_ON_CALL",
        "env:TEAM_WORKFLOW",
        "env:ADDRESS_OF_CHAT",
    ]
    assert back["notifications"][1] == channels[1]
    assert yaml.safe_load((home / "platform.yaml").read_text()) == told


def test_settings_without_secrets_come_back_as_they_were_written_and_for_their_owner_alone(home, made, target, other):
    text = "# ours\nparallel_runs: 2\nnotifications: [{name: team, url: 'env:TEAM'}]\n"
    write_text(home / "platform.yaml", text)
    save(home, target)
    bring_back(other, target)
    assert (other / "platform.yaml").read_text() == text
    restored = [
        path
        for path in other.rglob("*")
        if path.is_file() and path.relative_to(other).parts[0] not in ("store", "locks")
    ]
    assert (other / "platform.yaml") in restored
    assert [path for path in restored if path.stat().st_mode & 0o077] == []
    write_text(home / "platform.yaml", "notifications: [")
    with pytest.raises(ValueError, match="platform.yaml of the home"):
        save(home, target)


def test_a_home_that_is_not_empty_is_left_alone(home, made, target, other):
    save(home, target)
    with pytest.raises(ValueError, match="not empty"):
        bring_back(home, target)
    (other / "keys").mkdir(parents=True)
    with pytest.raises(ValueError, match="it holds keys"):
        bring_back(other, target)


def test_a_home_may_say_where_its_backups_are(home, made, target, other):
    (home / "stores.yaml").write_text(f"stores:\n  backup: {{uri: {target.root}}}\n")
    save(home, target)
    other.mkdir()
    (other / "stores.yaml").write_text(f"stores:\n  nightly: {{uri: {target.root}}}\n")
    bring_back(other, target)
    assert "nightly" in (other / "stores.yaml").read_text()


def test_a_home_that_worked_in_another_store_is_restored_into_its_own_folder(home, target, other, tmp_path):
    said = {"use": "main", "stores": {"main": {"uri": str(tmp_path / "main")}}}
    (home / "stores.yaml").write_text(yaml.safe_dump(said))
    made = publish_lineage(home)
    save(home, target)
    bring_back(other, target)
    assert open_store(other).uri == (other / "store").as_uri()
    assert current(open_store(other), "model", "tiny") == made["model"].version


def test_where_a_backup_cannot_go_is_said_before_anything_is_sent(home, made, target, other, monkeypatch):
    with pytest.raises(ValueError, match="where it comes from"):
        save(home, LocalStore(home / "store"))
    with pytest.raises(ValueError, match="lies in the home"):
        save(home, LocalStore(home / "backups"))
    with pytest.raises(Missing, match="no folder"):
        save(home, LocalStore(other / "not" / "mounted"))
    publish_one(other, "dataset", "theirs", "x")
    with pytest.raises(ValueError, match="other things"):
        save(home, LocalStore(other / "store"))
    save(other, target)
    with pytest.raises(ValueError, match="another home"):
        save(home, target)
    with pytest.raises(ValueError, match="nothing to back up"):
        save(other.with_name("third"), LocalStore(other.with_name("fourth")))
    with pytest.raises(Unknown, match="no backup"):
        bring_back(other.with_name("third"), LocalStore(other.with_name("fourth")))


def test_a_full_disk_is_said_and_costs_no_backup_from_before(home, made, target, monkeypatch):
    save(home, target)
    publish_one(home, "dataset", "tiny", "newer")
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
        with pytest.raises(Missing, match="no space"):
            save(home, target)
        with pytest.raises(Missing, match="no space"):
            drill(home, target)
    assert len(backups(target)) == 1 and drill(home, target).artifacts == 3


def test_a_backup_of_a_newer_headway_is_not_restored(home, made, target, other, tmp_path):
    said = save(home, target)
    folder = tmp_path / "newer"
    shutil.copytree(target.fetch(said.manifest), folder)
    text = (folder / "backup.json").read_text().replace("headway/backup/1", "headway/backup/9")
    (folder / "backup.json").chmod(0o644)
    (folder / "backup.json").write_text(text)
    later = said.manifest.provenance.model_copy(update={"created": "2999-01-01T00:00:00+00:00"})
    target.publish(folder, kind="backup", inputs=(), provenance=later)
    with pytest.raises(ValueError, match=r"headway/backup/9.*restore it with"):
        bring_back(other, target)


@pytest.mark.integration
def test_to_blobs(home, made, other, tmp_path):
    with (
        emulator.running(tmp_path / "azurite", in_memory=True) as azurite,
        standing("snapshots", tmp_path / "cloud", lambda: azurite) as stand,
    ):
        target = stand.open()
        save(home, target)
        publish_one(home, "dataset", "tiny", "newer")
        assert len(save(home, target, keep=1).sent) == 1 and len(backups(target)) == 1
        assert drill(home, target).artifacts == 4
        bring_back(other, target)
    assert current(open_store(other), "dataset", "tiny") == current(open_store(home), "dataset", "tiny")
    assert (
        require_signed(open_store(other), other, made["model"]) and audit_chain.check(open_store(other)).broken is None
    )
