"""An exported model as MLflow's users load it: `mlflow.pyfunc.load_model("models:/NAME@champion").predict([...])`.

It runs in an environment of theirs, without Headway: tasks/lineage/model_folder.py lays this file and the ones that it imports
into the MLflow model as the package `headway_model`. The signature is checked first, then every byte of the weights on its way
into memory, and the answers are those of the endpoint: the same code makes them. No MLflow in it: MLflow calls `_load_pyfunc`.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tasks.common.errors import IntegrityError, Missing
from tasks.common.process import read_json
from tasks.jobs.serving.batch import Batch
from tasks.jobs.serving.generation import Generation
from tasks.jobs.serving.runtime import Ask, Piece
from tasks.signing.bundle import SIGNATURE
from tasks.signing.keys import key_id, load_public_key
from tasks.signing.statement import STATEMENT, claimed_statement
from tasks.storage.manifest import FileEntry, Manifest
from tasks.storage.signed import open_signed, served_files

ROWS = 8
"""Prompts that are answered at once; more of them wait."""


def _load_pyfunc(data_path: str, model_config: Mapping[str, Any] | None = None) -> SignedModel:
    """What MLflow calls. `model_config` may hold `key` (a PEM file: the only public key that counts, instead of the one that
    MLflow holds), `weights` (a folder with the model's files, instead of the store's address) and `threads`.
    """
    return SignedModel(Path(data_path), **(model_config or {}))


class SignedModel:
    """A verified model in memory.

    Raises IntegrityError, with the model's name, when its signature does not hold or a byte is not what was signed; Missing when
    the weights cannot be read where they lie.
    """

    def __init__(self, data: Path, *, key: str = "", weights: str = "", threads: int = 0) -> None:
        self.manifest = Manifest.model_validate(read_json(data / "manifest.json"))
        public, envelope = load_public_key(Path(key) if key else data / "key.pub"), (data / STATEMENT).read_bytes()
        try:
            if key and claimed_statement(envelope).key != key_id(public):
                raise IntegrityError(f"it is not signed by the key of {key}")
            open_signed(self.manifest, (data / SIGNATURE).read_bytes(), envelope, public)
        except IntegrityError as error:
            raise IntegrityError(f"{self.manifest.ref}: {error.message}", problems=error.problems) from error
        places = {} if weights else read_json(data / "places.json") or {}
        folder = Path(weights) if weights else data / "weights"
        contents = {
            entry.path: self._verified(entry, places.get(entry.path, "") or str(folder / entry.path))
            for entry in served_files(self.manifest)
        }
        self._generation = Generation(contents, threads, rows=ROWS)
        self._one = threading.Lock()
        """MLflow's own server calls from several threads, and there is one cache."""

    def predict(self, model_input: Any, params: Mapping[str, Any] | None = None) -> list[str]:
        """The completion of each prompt, without the prompt. `model_input` is a data frame whose first column has them, or
        a list of them; `params` may hold `max_tokens` and `temperature` (0: greedy). Raises ValueError for too long a prompt.
        """
        prompts = model_input.iloc[:, 0].tolist() if hasattr(model_input, "iloc") else list(model_input)
        asked = {"max_tokens": 64, "temperature": 0.0, **(params or {})}
        tokens, temperature = int(asked["max_tokens"]), float(asked["temperature"])
        texts = [""] * len(prompts)
        with self._one:
            batch = Batch(self._generation)
            for number, prompt in enumerate(prompts):
                batch.add(number, Ask(prompt, tokens, temperature=temperature, measure=False))
            while batch.busy:
                for number, piece in batch.step():
                    if isinstance(piece, Piece):
                        texts[number] += piece.text
        return texts

    def _verified(self, entry: FileEntry, place: str) -> bytes:
        """A file's bytes, which are what was signed: nothing is opened again after it was compared."""
        try:
            data = _blob(place) if place.startswith("az://") else Path(place).read_bytes()
        except OSError as error:
            raise Missing(
                f"{self.manifest.ref}: {place} cannot be read ({error.strerror or error}). Load it where its store is, or "
                "name a folder with its files: model_config={'weights': FOLDER}."
            ) from error
        actual = hashlib.sha256(data).hexdigest()
        if actual != entry.sha256:
            raise IntegrityError(
                f"{self.manifest.ref} is not what was signed: {entry.path} in {place} has the sha256 {actual[:16]}, and not "
                f"{entry.sha256[:16]}; nothing was loaded"
            )
        return data


def _blob(place: str) -> bytes:
    """One blob as it was: `az://ACCOUNT/CONTAINER/PATH?versionid=ID`, or `?snapshot=TIME`.

    The credential is found as MLflow's own clients find one: AZURE_STORAGE_CONNECTION_STRING, else Azure's default chain.
    """
    from azure.core.exceptions import AzureError
    from azure.storage.blob import BlobServiceClient

    address, connection = urlsplit(place), os.environ.get("AZURE_STORAGE_CONNECTION_STRING")
    if connection:
        service = BlobServiceClient.from_connection_string(connection)
    else:
        from azure.identity import DefaultAzureCredential

        service = BlobServiceClient(f"https://{address.netloc}.blob.core.windows.net", DefaultAzureCredential())
    container, _, name = address.path.removeprefix("/").partition("/")
    query = {name: values[0] for name, values in parse_qs(address.query).items()}
    try:
        blob = service.get_blob_client(
            container, name, snapshot=query.get("snapshot"), version_id=query.get("versionid")
        )
        return bytes(blob.download_blob(max_concurrency=4).readall())
    except AzureError as error:
        raise OSError(str(error)) from error
