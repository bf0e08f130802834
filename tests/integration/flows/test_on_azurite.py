"""The whole lifecycle with the home's store in Blob storage: the same flow, the same versions, the same reuse."""

import re

import azurite as emulator
import pytest
from store_stand import standing
from support import Home, everything_reused, publish_tiny

from tasks.storage import open_named
from tasks.storage.store import find


@pytest.fixture(scope="module")
def stand(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lifecycle")
    with (
        emulator.running(folder / "azurite") as running,
        standing("snapshots", folder / "home", lambda: running) as made,
    ):
        yield made


@pytest.fixture(scope="module")
def home(stand):
    made = Home(stand.home)
    yield made
    made.stop()


@pytest.mark.long
def test_the_tiny_lifecycle_runs_in_a_store_in_azure_and_is_reused(home, stand):
    publish_tiny(home)
    first = home.retrain()
    assert first.code == 0, first.stderr
    again = home.retrain()
    assert again.code == 0 and again.statuses() == everything_reused()
    store = open_named(home.path, "cloud")
    assert not (home.path / "store").exists()
    kinds = {manifest.content.kind for manifest in store.manifests()}
    assert kinds >= {"dataset", "tokens", "validation", "qualification", "plan", "checkpoint", "evaluation", "model"}
    model = find(store, "model", "tiny")
    assert store.verify(model) == [] and all(v.startswith("snapshot:") for v in model.provenance.blob_versions.values())
    assert re.fullmatch("[0-9a-f]{64}", home.ok("verify", model.ref).said["signature"]["key"])
