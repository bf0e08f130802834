"""What MLflow's users load: a model whose weights lie in Azure Blob, in the version that was signed; and what is refused."""

import json
import shutil

import azurite as emulator
import pytest
from store_stand import fill, standing
from tiny_model import PROMPTS, export_tiny

from tasks.common.errors import IntegrityError, Missing
from tasks.jobs.serving.mlflow_model import SignedModel
from tasks.registry.logged_model import logged_model
from tasks.registry.versions import publish
from tasks.security.signatures import sign
from tasks.storage.manifest import Provenance


@pytest.fixture(scope="module")
def azurite(tmp_path_factory):
    with emulator.running(tmp_path_factory.mktemp("azurite")) as running:
        yield running


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    return export_tiny(tmp_path_factory.mktemp("export"))


def laid_down(stand, exported):
    """The folder that MLflow would hand out of a model that is in a store, and the model."""
    store = stand.open()
    model = publish(store, exported, kind="model", inputs=(), provenance=Provenance(name="tiny"))
    sign(store, stand.home, model)
    logged_model(store, stand.home, model, stand.home / "laid", measuring={})
    return stand.home / "laid", model


@pytest.mark.parametrize("kind", ["versions", "snapshots"])
def test_weights_in_blob_are_read_in_the_version_that_was_signed(kind, exported, azurite, tmp_path, monkeypatch):
    with standing(kind, tmp_path / "home", lambda: azurite) as stand:
        folder, _ = laid_down(stand, exported)
        other = fill(tmp_path / "other", **{path.name: b"later" for path in exported.iterdir() if path.is_file()})
        publish(stand.open(), other, kind="model", inputs=(), provenance=Provenance(name="tiny"))
        places = json.loads((folder / "places.json").read_text())
        assert all(place.startswith("az://") and "?" in place for place in places.values())
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", stand.endpoint.connection_string)
        golden = json.loads((exported / "golden.json").read_text())["prompts"]
        answers = SignedModel(folder).predict(PROMPTS, {"max_tokens": 24})
        assert answers == [entry["completion"] for entry in golden]


def test_what_was_not_signed_is_refused_by_name(exported, tmp_path):
    with standing("local", tmp_path / "home", lambda: pytest.fail("a folder needs no Azurite")) as stand:
        folder, model = laid_down(stand, exported)
        laid = shutil.copytree(folder, tmp_path / "laid")
        manifest = json.loads((laid / "manifest.json").read_text())
        manifest["content"]["files"][0]["sha256"] = "0" * 64
        (laid / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(IntegrityError, match=r"model/tiny@.*made for something else"):
            SignedModel(laid)
        weights = shutil.copytree(exported, tmp_path / "weights")
        (weights / "golden.json").write_text("{}")
        with pytest.raises(IntegrityError, match=rf"{model.ref} is not what was signed: golden.json"):
            SignedModel(folder, weights=str(weights))
        (weights / "golden.json").unlink()
        with pytest.raises(Missing, match=rf"{model.ref}: .*golden.json cannot be read"):
            SignedModel(folder, weights=str(weights))
