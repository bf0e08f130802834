"""Copies between stores: the same version, verified where it arrives; what was tampered with leaves nothing behind."""

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import azurite as emulator
import pytest
from lineage_stand import publish_lineage, publish_one
from registry_service import TOKEN, serving
from store_stand import standing
from waiting import limit

from tasks.common.errors import IntegrityError, Missing
from tasks.registry.ancestry import walk
from tasks.registry.transfer import copy_artifact, share_model
from tasks.security.audit import entries
from tasks.security.signatures import require_signed
from tasks.signing.bundle import SIGNATURE
from tasks.signing.statement import STATEMENT
from tasks.storage import open_store
from tasks.storage.azureml_registry import open_registry
from tasks.storage.history import changes, current
from tasks.storage.local import LocalStore
from tasks.storage.store import find

KILLED_IN_THE_MIDDLE = """
import os, signal, sys
from pathlib import Path
from tasks.registry.transfer import copy_artifact
from tasks.storage import open_store
from tasks.storage.local import LocalStore

class Dying(LocalStore):
    def attach(self, manifest, name, data):
        os.kill(os.getpid(), signal.SIGKILL)

home = Path(sys.argv[1])
copy_artifact(open_store(home), Dying(Path(sys.argv[2])), "model/tiny", home=home)
"""


@pytest.fixture(scope="session")
def azurite(tmp_path_factory):
    with emulator.running(tmp_path_factory.mktemp("azurite"), in_memory=True) as running:
        yield running


@pytest.fixture
def home(tmp_path):
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


@pytest.fixture
def made(home):
    return publish_lineage(home)


@pytest.fixture
def team(tmp_path):
    return LocalStore(tmp_path / "team")


def nothing_in(store):
    return list(store.manifests()) == [] and store.list("history") == []


def test_a_model_arrives_as_the_same_version_with_signature_and_history(home, made, team):
    copied = copy_artifact(open_store(home), team, "model/tiny", home=home, reason="for team B")
    arrived = find(team, "model", "tiny")
    assert copied.moved and arrived.version == made["model"].version
    assert (team.fetch(arrived) / "data.bin").read_text() == "model first" * 100
    assert require_signed(team, home, arrived).version == arrived.version
    (change,) = changes(team, "model", "tiny")
    assert (change.action, change.version, change.reason) == ("copy", arrived.version, "for team B")
    assert arrived.provenance.model_extra["copied_from"] == open_store(home).uri
    for store in (team, open_store(home)):
        entry = next(entries(store))
        assert (entry.action, entry.right, entry.reason) == ("copy model", "publish", "for team B")


def test_its_lineage_is_told_where_only_it_has_bytes(home, made, team, tmp_path):
    copy_artifact(open_store(home), team, "model/tiny", home=home)
    told = walk(team, "model/tiny")
    assert [node["ref"] for node in told["nodes"]] == [
        made[kind].ref for kind in ("model", "checkpoint", "tokens", "dataset")
    ]
    assert [bool(node["uri"]) for node in told["nodes"]] == [True, False, False, False]
    assert {node["commit"] for node in told["nodes"]} == {"c0ffee"}
    for index in (None, tmp_path / "lineage.db"):
        forward = walk(team, f"dataset/tiny@{made['dataset'].version}", direction="up", index=index)
        assert [model["ref"] for model in forward["models"]] == [made["model"].ref]


def test_a_copy_of_a_copy_still_tells_all_of_it(home, made, team, tmp_path):
    third = LocalStore(tmp_path / "third")
    copy_artifact(open_store(home), team, "model/tiny", home=home)
    copied = copy_artifact(team, third, "model/tiny", home=home)
    assert set(copied.ancestors) == {made[kind].ref for kind in ("checkpoint", "tokens", "dataset")}
    assert walk(third, "model/tiny")["nodes"][-1]["ref"] == made["dataset"].ref


def test_what_is_there_already_is_not_moved_and_not_noted_again(home, made, team):
    first = copy_artifact(open_store(home), team, "model/tiny", home=home)
    again = copy_artifact(open_store(home), team, "model/tiny", home=home)
    assert (first.moved, again.moved) == (True, False)
    assert len(changes(team, "model", "tiny")) == 1 and len(list(entries(team))) == 1


@pytest.mark.parametrize("name", [SIGNATURE, STATEMENT])
def test_a_signature_that_does_not_count_stops_it_before_anything_is_sent(home, made, team, name):
    store = open_store(home)
    store.attach(made["model"], name, store.attachment(made["model"], name)[:-40])
    with pytest.raises(IntegrityError, match="model/tiny"):
        copy_artifact(store, team, "model/tiny", home=home)
    assert nothing_in(team)


def test_a_changed_byte_stops_it_before_anything_is_sent(home, made, team):
    path = home / "store" / "artifacts" / "model" / "tiny" / made["model"].version / "files" / "data.bin"
    path.chmod(0o644)
    path.write_text(path.read_text().replace("f", "g", 1))
    with pytest.raises(IntegrityError) as raised:
        copy_artifact(open_store(home), team, "model/tiny", home=home)
    assert [problem["path"] for problem in raised.value.problems] == ["data.bin"]
    assert nothing_in(team)


class Tampering(LocalStore):
    """Somebody on the way: what is sent is not what arrives."""

    def __init__(self, root: Path, what: str) -> None:
        super().__init__(root)
        self.what = what

    def publish(self, folder, **said):
        if self.what != "data.bin":
            return super().publish(folder, **said)
        other = self.root.parent / "other"
        other.mkdir()
        (other / "data.bin").write_text("poison")
        return super().publish(other, **said)

    def attach(self, manifest, name, data):
        super().attach(manifest, name, data[:-9] if name == self.what else data)


@pytest.mark.parametrize("what", ["data.bin", SIGNATURE, STATEMENT])
def test_what_changes_on_the_way_is_refused_and_leaves_nothing(home, made, tmp_path, what):
    target = Tampering(tmp_path / "team", what)
    with pytest.raises(IntegrityError):
        copy_artifact(open_store(home), target, "model/tiny", home=home)
    assert nothing_in(target) and [entry.outcome for entry in entries(target)] == ["failed", "failed"]


def test_tampering_does_not_cost_the_version_that_was_there(home, made, tmp_path):
    copy_artifact(open_store(home), LocalStore(tmp_path / "team"), "model/tiny", home=home)
    newer = publish_lineage(home, "second")
    target = Tampering(tmp_path / "team", SIGNATURE)
    with pytest.raises(IntegrityError):
        copy_artifact(open_store(home), target, f"model/tiny@{newer['model'].version}", home=home)
    assert [one.version for one in target.manifests("model")] == [made["model"].version]
    assert current(target, "model", "tiny") == made["model"].version


def test_a_copy_that_was_killed_is_finished_by_the_next_one(home, made, team, tmp_path):
    ran = subprocess.run([sys.executable, "-c", KILLED_IN_THE_MIDDLE, str(home), str(team.root)], cwd=Path.cwd())
    assert ran.returncode == -signal.SIGKILL
    assert team.attachment(made["model"], SIGNATURE) is None and changes(team, "model", "tiny") == []
    copy_artifact(open_store(home), team, "model/tiny", home=home)
    assert require_signed(team, home, find(team, "model", "tiny")) and len(changes(team, "model", "tiny")) == 1


def test_a_damaged_copy_is_mended_by_copying_again(home, made, team):
    copy_artifact(open_store(home), team, "model/tiny", home=home)
    path = team.fetch(made["model"]) / "data.bin"
    path.chmod(0o644)
    path.write_text("x" * path.stat().st_size)
    assert copy_artifact(open_store(home), team, "model/tiny", home=home).moved
    assert team.verify(made["model"]) == []


def test_a_source_that_cannot_be_written_is_copied_from_all_the_same(home, made, team):
    class ReadOnly(LocalStore):
        def create(self, key, data):
            raise PermissionError(13, "read-only", key)

    copied = copy_artifact(ReadOnly(home / "store"), team, "dataset/tiny", home=home)
    assert copied.moved and not copied.noted


def test_where_it_cannot_go_is_said_at_once(home, made, tmp_path):
    store = open_store(home)
    with pytest.raises(ValueError, match="where it comes from"):
        copy_artifact(store, LocalStore(home / "store"), "model/tiny", home=home)
    with pytest.raises(Missing, match="no folder"):
        copy_artifact(store, LocalStore(tmp_path / "not" / "mounted"), "model/tiny", home=home)


def test_a_full_disk_is_said_and_leaves_nothing(home, made, team, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(Missing, match="no space"):
        copy_artifact(open_store(home), team, "model/tiny", home=home)
    assert nothing_in(team)


def test_to_blobs_and_back(home, made, tmp_path, azurite):
    with standing("snapshots", tmp_path / "cloud", lambda: azurite) as stand:
        blobs, back = stand.open(), LocalStore(tmp_path / "back")
        assert copy_artifact(open_store(home), blobs, "model/tiny", home=home).moved
        assert not copy_artifact(open_store(home), blobs, "model/tiny", home=home).moved
        assert copy_artifact(blobs, back, "model/tiny", home=home).moved
        assert find(back, "model", "tiny").version == made["model"].version
        assert require_signed(back, home, find(back, "model", "tiny"))
        assert walk(back, "model/tiny")["nodes"][-1]["ref"] == made["dataset"].ref


def test_a_model_goes_into_an_azure_ml_registry_and_what_arrived_is_compared(home, made, azurite):
    store, where = open_store(home), {"name": "team", "home": home}
    with serving(azurite) as service:
        client = service.client()
        shared = share_model(store, client, "model/tiny", **where, reason="for them")
        assert (
            shared.moved
            and shared.uri == f"azureml://registries/team/models/tiny/versions/{made['model'].version[:12]}"
        )
        (made_there,) = service.models.values()
        assert made_there["properties"]["properties"]["headway.version"] == made["model"].version
        held = [blob.name.split("/", 1)[1] for blob in service.blobs_of("tiny", made["model"].version[:12])]
        assert sorted(held) == [
            "headway/ancestry.json",
            "headway/manifest.json",
            f"headway/{SIGNATURE}",
            f"headway/{STATEMENT}",
            "model/.gitignore",
            "model/data.bin",
            "model/more/about.json",
        ]
        assert not share_model(store, client, "model/tiny", **where).moved
        entry = next(entries(store))
        assert (entry.action, entry.reason, entry.outcome) == ("copy model", "for them", "done")
        service.flip = True
        newer = publish_lineage(home, "second")["model"]
        with pytest.raises(IntegrityError) as raised:
            share_model(store, client, newer.ref, **where)
        assert [problem["path"] for problem in raised.value.problems] == ["data.bin"]
        with pytest.raises(Missing, match="RegistryNotFound"):
            service.client("nobodys")


def test_a_registry_takes_models_only_and_says_what_is_missing(home, made):
    with pytest.raises(ValueError, match="takes models"):
        share_model(open_store(home), None, "dataset/tiny", name="team", home=home)
    publish_one(home, "model", "unsigned", "x")
    with pytest.raises(IntegrityError, match="not signed"):
        share_model(open_store(home), None, "model/unsigned", name="team", home=home)

    class Nobody:
        def get_token(self, *scopes, **_):
            from azure.core.exceptions import ClientAuthenticationError

            raise ClientAuthenticationError("az login has not been run")

    began = time.monotonic()
    with pytest.raises(Missing, match="does not let us in"):
        open_registry("team", Nobody())
    assert time.monotonic() - began < limit(20)


def test_the_registry_of_the_tests_refuses_what_azure_refuses(azurite):
    import requests

    with serving(azurite) as service:
        page = f"http://127.0.0.1:{service.port}/registrymanagement/v1.0/registries/team/discovery"
        known = {"Authorization": f"Bearer {TOKEN}"}
        place = f"http://127.0.0.1:{service.port}/registries/team/models/m/versions/1"
        dated = {"api-version": "2021-10-01-dataplanepreview"}
        assert requests.get(page, params={"api-version": "v1.0"}, timeout=9).status_code == 401
        assert requests.get(page, params={"api-version": "v0"}, headers=known, timeout=9).status_code == 400
        assert requests.put(place, params=dated, headers=known, json={"properties": {}}, timeout=9).status_code == 400
        assert requests.get(place, params=dated, headers=known, timeout=9).status_code == 404
