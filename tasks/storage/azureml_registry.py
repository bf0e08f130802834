"""A model in an Azure ML registry: rendered as the SDK's own entity, submitted, and read back. One vendor, one file.

A registry is no store: it takes models, under a version that it never overwrites. Beside the model's files, in a folder of their
own, go the manifest, the signature and the manifests of what the model was made from. What may be copied there is decided by
tasks/registry/transfer.py. See https://learn.microsoft.com/azure/machine-learning/how-to-manage-registries.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.common.errors import Missing
from tasks.storage.manifest import Manifest, Problem, check

if TYPE_CHECKING:
    from azure.ai.ml import MLClient
    from azure.ai.ml.entities import Model

FILES = "model"
BESIDE = "headway"
DIGITS = 12
"""Of a version: what Azure ML calls the version."""
LONGEST_DESCRIPTION = 200
SCHEME = "azureml://registries/"


def render(manifest: Manifest, folder: Path, tags: Mapping[str, str]) -> Model:
    """The model as Azure ML's entity; the SDK has checked its form. `folder` is what `stage` made."""
    from azure.ai.ml.constants import AssetTypes
    from azure.ai.ml.entities import Model

    return Model(
        name=manifest.provenance.name,
        version=manifest.version[:DIGITS],
        type=AssetTypes.CUSTOM_MODEL,
        path=folder,
        description=f"{manifest.ref}, by Headway"[:LONGEST_DESCRIPTION],
        tags={"headway.version": manifest.version, "headway.ref": manifest.ref},
        properties={"headway.version": manifest.version, **tags},
    )


def stage(manifest: Manifest, files: Path, beside: Mapping[str, bytes], folder: Path) -> Path:
    """Lay out what a registry gets: the model's files in `model/`, what tells of them in `headway/`.

    In folders of their own: a `.gitignore` among a model's files would have the SDK leave files out.
    """
    for entry in manifest.content.files:
        target = folder / FILES / entry.path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(files / entry.path, target)
    (folder / BESIDE).mkdir()
    for name, data in beside.items():
        (folder / BESIDE / name).write_bytes(data)
    return folder


def registered(client: MLClient, manifest: Manifest) -> str | None:
    """The whole version that the registry has under this model's name and digits; None when it has none. Raises Missing."""
    from azure.core.exceptions import ResourceNotFoundError

    with _reachable(client):
        try:
            result = client.models.get(manifest.provenance.name, manifest.version[:DIGITS])
        except ResourceNotFoundError:
            return None
    return str((result.properties or {}).get("headway.version") or (result.tags or {}).get("headway.version") or "")


def submit(client: MLClient, model: Model) -> str:
    """Upload a rendered model and register it; returns what Azure ML calls it. Raises Missing."""
    with _reachable(client):
        made = client.models.create_or_update(model)
    return str(made.id)


def problems(client: MLClient, manifest: Manifest, scratch: Path) -> list[Problem]:
    """Every way in which what the registry hands out differs from the manifest; it is downloaded for that."""
    with _reachable(client):
        client.models.download(manifest.provenance.name, manifest.version[:DIGITS], download_path=scratch)
    arrived = next((path for path in sorted(scratch.rglob(FILES)) if path.is_dir()), scratch / FILES)
    return check(arrived, manifest.content.files)


def open_registry(name: str, credential: Any, **transport: Any) -> MLClient:
    """A client of a registry, by a credential; `transport` is how the SDK reaches Azure, where that is not the usual way.

    Raises Missing without the SDK, the account or the registry.
    """
    try:
        from azure.ai.ml import MLClient
    except ModuleNotFoundError as error:
        raise Missing(
            f"copying to an Azure ML registry needs the package azure-ai-ml ({error.name} is not installed)",
            remedy="pip install -c constraints.txt -e '.[azure]'",
        ) from error
    with _translated(name):
        return MLClient(credential, registry_name=name, show_progress=False, **transport)


@contextmanager
def _reachable(client: MLClient) -> Iterator[None]:
    with _translated(str(client.models._registry_name)):
        yield


@contextmanager
def _translated(registry: str) -> Iterator[None]:
    """Azure's errors as ours."""
    from azure.ai.ml.exceptions import MlException
    from azure.core.exceptions import AzureError, ClientAuthenticationError

    try:
        yield
    except ClientAuthenticationError as error:
        raise Missing(
            f"Azure does not let us into the registry {registry}: {_first_line(error)}",
            remedy="Log in as the credential of stores.yaml says (`az login` for `cli`), with the role AzureML Registry User.",
        ) from error
    except (AzureError, MlException) as error:
        raise Missing(
            f"the Azure ML registry {registry} cannot be used: {_first_line(error)}",
            remedy="Look at its name in stores.yaml, at the network, and at https://status.azure.com; then copy again.",
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
