"""An Azure ML registry behind the SDK's own HTTP edge: discovery, places to upload to, models; the bytes lie in a real Azurite.

Every request must have a token and the API version that the SDK speaks, and a model must be one by the SDK's own class. Making
one is answered with 202 and a page to ask at, as the service does.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit, urlunsplit

from azure.ai.ml import MLClient
from azure.ai.ml._restclient.arm_ml_service.models import ModelVersion
from azure.ai.ml._utils._registry_utils import REGISTRY_DATAPLANE_API_VERSION
from azure.core.credentials import AccessToken
from azure.core.pipeline.transport import RequestsTransport
from azure.storage.blob import BlobServiceClient, ContainerSasPermissions, generate_container_sas
from azurite import ACCOUNT, KEY, Endpoint

from tasks.storage.azureml_registry import open_registry

TOKEN = "a token of the tests"
HOME = "https://registry.invalid/"
ASKED = 1
"""Times that somebody asks before a model is made."""


class Login:
    """A credential that needs nobody."""

    def get_token(self, *scopes: str, **_: Any) -> AccessToken:
        return AccessToken(TOKEN, int((datetime.now(UTC) + timedelta(hours=1)).timestamp()))


class ToUs(RequestsTransport):
    """What the SDK sends to Azure comes to a port of this machine."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self.port = port

    def send(self, request: Any, **kwargs: Any) -> Any:
        meant, parts = request.url, urlsplit(request.url)
        request.url = urlunsplit(("http", f"127.0.0.1:{self.port}", parts.path, parts.query, ""))
        try:
            return super().send(request, **kwargs)
        finally:
            request.url = meant  # it is asked again under this one, and tokens go over https only


class RegistryService(ThreadingHTTPServer):
    """One registry, `team`. `models` are the bodies of what was made, by name and version."""

    def __init__(self, blobs: Endpoint) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.blobs = blobs
        self.service = BlobServiceClient.from_connection_string(blobs.connection_string)
        self.models: dict[tuple[str, str], dict[str, Any]] = {}
        self.polls: dict[tuple[str, str], int] = {}
        self.flip = False
        """Whether a byte of every model changes once it is there."""

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def client(self, registry: str = "team") -> MLClient:
        return open_registry(registry, Login(), transport=ToUs(self.port))

    def blobs_of(self, name: str, version: str) -> list[Any]:
        return list(self.service.get_container_client(f"{name}-{version}").list_blobs())

    def rot(self, name: str, version: str) -> None:
        container = self.service.get_container_client(f"{name}-{version}")
        blob = next(one.name for one in container.list_blobs() if one.name.endswith("data.bin"))
        data = container.download_blob(blob).readall()
        container.upload_blob(blob, bytes([data[0] ^ 1]) + data[1:], overwrite=True)

    def place(self, name: str, version: str) -> str:
        """A container of its own, by an address that lets in whoever has it."""
        container = self.service.get_container_client(f"{name}-{version}")
        if not container.exists():
            container.create_container()
        sas = generate_container_sas(
            ACCOUNT,
            container.container_name,
            account_key=KEY,
            permission=ContainerSasPermissions(read=True, write=True, create=True, list=True, add=True),
            expiry=datetime.now(UTC) + timedelta(hours=1),
        )
        return f"{container.url}?{sas}"


class _Handler(BaseHTTPRequestHandler):
    server: RegistryService
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_PUT(self) -> None:
        self._answer(self._put)

    def do_POST(self) -> None:
        self._answer(self._put)

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self, how: Any) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(size)) if size else {}
        code, said, headers = self._refusal() or how(urlsplit(self.path).path.strip("/").split("/"), body)
        data = json.dumps(said).encode()
        self.send_response(code)
        for key, value in {"Content-Type": "application/json", "Content-Length": str(len(data)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(data)

    def _refusal(self) -> tuple[int, Any, dict[str, str]] | None:
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return _error(401, "InvalidAuthenticationToken")
        asked = parse_qs(urlsplit(self.path).query).get("api-version", [""])[0]
        if asked not in (REGISTRY_DATAPLANE_API_VERSION, "v1.0"):
            return _error(400, "InvalidApiVersionParameter")
        return None

    def _get(self, path: list[str], _: Any) -> tuple[int, Any, dict[str, str]]:
        if path[0] == "registrymanagement":
            return self._discovered(path[3])
        if "operations" in path:
            return self._polled(path[-2], path[-1])
        if path[-1] == "versions":
            return 200, {"value": [one for (name, _), one in self.server.models.items() if name == path[-2]]}, {}
        found = self.server.models.get((path[-3], path[-1]))
        return (200, found, {}) if found else _error(404, "NotFound")

    def _discovered(self, registry: str) -> tuple[int, Any, dict[str, str]]:
        if registry != "team":
            return _error(404, "RegistryNotFound")
        told = {"registryName": registry, "primaryRegion": "eastus", "regions": ["eastus"], "subscriptionId": "s"}
        return 200, {**told, "resourceGroup": "g", "primaryRegionResourceProviderUri": HOME}, {}

    def _put(self, path: list[str], body: Any) -> tuple[int, Any, dict[str, str]]:
        name, version = path[-3], path[-1]
        if path[-4] in ("tempdatarefs", "datarefs"):
            credential = {"credentialType": "SAS", "sasUri": self.server.place(name, version)}
            return 200, {"blobReferenceForConsumption": {"credential": credential}}, {}
        if (name, version) in self.server.models:
            return _error(409, "Conflict")
        sent = ModelVersion._deserialize(body, [])
        if not sent.properties or not sent.properties.model_uri:
            return _error(400, "InvalidModel")
        identity = f"azureml://registries/team/models/{name}/versions/{version}"
        if self.server.flip:
            self.server.rot(name, version)
        place = body["properties"]["modelUri"].replace(self.server.blobs.url, f"https://{ACCOUNT}.blob.invalid")
        properties = {"flavors": {}, **body["properties"], "modelUri": place}
        self.server.models[name, version] = {"id": identity, "name": version, "properties": properties}
        operation = f"{HOME}operations/{name}/{version}?api-version={REGISTRY_DATAPLANE_API_VERSION}"
        return 202, {}, {"Location": operation, "Azure-AsyncOperation": operation, "Retry-After": "1"}

    def _polled(self, name: str, version: str) -> tuple[int, Any, dict[str, str]]:
        self.server.polls[name, version] = self.server.polls.get((name, version), 0) + 1
        done = self.server.polls[name, version] > ASKED
        return 200, {"status": "Succeeded" if done else "InProgress"}, {} if done else {"Retry-After": "1"}


def _error(code: int, word: str) -> tuple[int, Any, dict[str, str]]:
    return code, {"error": {"code": word, "message": word}}, {}


@contextmanager
def serving(blobs: Endpoint) -> Iterator[RegistryService]:
    service = RegistryService(blobs)
    threading.Thread(target=service.serve_forever, daemon=True).start()
    try:
        yield service
    finally:
        service.shutdown()
        service.server_close()
