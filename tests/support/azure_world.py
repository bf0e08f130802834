"""Azure as programs see it, without an account: machines, names, certificates, identities and roles of their own.

Machines in networks of their own (networks.py). On the first is Azure: Blob storage and Azure Resource Manager behind their
own names and TLS, and the endpoint that gives a machine its identity's tokens. On the second is whoever submits, with the
Azure CLI logged in and nothing else. Two are the nodes of a compute cluster, the last four those of endpoints: there a job or
a deployment runs in the image that it names, built here (built_images.py), with that image's Python, files and user, and with
no other right than the roles of its identity. What programs are told is what Azure tells them; no setting of theirs points to
a test.

Behind Blob storage lie versions (versioned_blobs.py) and a real Azurite; behind Azure Resource Manager azureml_service.py.
"""

import ctypes
import datetime
import http.client
import json
import os
import re
import secrets
import signal
import ssl
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import azureml_endpoints
import azurite
import certifi
import psutil
import yaml
from azureml_bodies import DATASTORE
from azureml_endpoints import State as EndpointState
from azureml_nodes import Nodes
from azureml_service import AzureMlService, JobRecord, NotStarted
from azurite import ACCOUNT, Endpoint
from blob_relay import Relay, Request, Response, Upstream, problem, signed
from built_images import Built
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from networks import Namespace, ip, network
from versioned_blobs import VersionedBlobs
from waiting import limit

STORAGE = f"{ACCOUNT}.blob.core.windows.net"
MANAGEMENT = "management.azure.com"
INFERENCE = "eastus.inference.ml.azure.com"
SERVED = re.compile(r"/onlineEndpoints|/models/|/operations/endpoint-|/autoscalesettings")
"""What managed online endpoints answer, and not jobs."""
IMDS = "169.254.169.254"
STORAGE_SCOPE, MANAGEMENT_SCOPE = "https://storage.azure.com", "https://management.azure.com"
CONTAINER = "headway"
READER, CONTRIBUTOR = "Storage Blob Data Reader", "Storage Blob Data Contributor"
SCIENTIST, PULL = "AzureML Data Scientist", "AcrPull"
REGISTRY = "contoso.azurecr.io"
IMAGE = f"{REGISTRY}/headway-cluster:0.2.0"
ENDPOINT_IMAGE = f"{REGISTRY}/headway-endpoint:0.2.0"
PERSON, CLUSTER, SERVING = "somebody", "the cluster's identity", "the endpoint's identity"
IDENTITY = "providers/Microsoft.ManagedIdentity/userAssignedIdentities/serving"
CLIENT = "2f1c6a4e-0000-4000-8000-000000000001"
"""Client id of the cluster's identity."""
CLONE_NEWNET = 0x40000000
AZ = """#!/bin/sh
# The Azure CLI, as far as Headway asks it: tokens for whoever is logged in.
[ "$1 $2" = "account get-access-token" ] || {{ echo "az: $*" >&2; exit 2; }}
exec {python} -c 'import sys, urllib.request
words = sys.argv[1:]
print(urllib.request.urlopen("http://{imds}/az?resource=" + words[words.index("--resource") + 1]).read().decode())' "$@"
"""


@dataclass
class Identities:
    """Microsoft Entra and Azure's roles: who holds a token, for which service, and what this one may do there."""

    roles: set[tuple[str, str, str]]
    """Identity, role, and what it is on: a container, the workspace, the registry."""
    _tokens: dict[str, tuple[str, str]] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)
    """Identity and service of every token."""

    def token(self, identity: str, service: str) -> str:
        self.asked.append((identity, service))
        token = secrets.token_urlsafe(24)
        self._tokens[token] = (identity, service.rstrip("/").removesuffix("/.default"))
        return token

    def holder(self, header: str | None, service: str) -> str:
        """Of an Authorization header; empty when it is none, or is for another service."""
        identity, of = self._tokens.get((header or "").removeprefix("Bearer "), ("", ""))
        return identity if of == service else ""

    def answer(self, header: str | None) -> int:
        """Azure Resource Manager's: 401 for a token that is none, 403 for somebody without the role."""
        identity = self.holder(header, MANAGEMENT_SCOPE)
        return 401 if not identity else 200 if self.may(identity, (SCIENTIST,), "w") else 403

    def may(self, identity: str, roles: tuple[str, ...], where: str) -> bool:
        return any((identity, role, where) in self.roles for role in roles)


class Storage(Relay):
    """Blob storage at its own name, over TLS: it knows tokens of Microsoft Entra and roles, and no key."""

    def __init__(self, behind: Endpoint, identities: Identities, address: str, tls: ssl.SSLContext) -> None:
        super().__init__(behind, (address, 443))
        self.socket = tls.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        self.identities, self.behind = identities, behind
        self.busy = 0
        """Requests that are answered by 503 from now on, every third one."""
        self._asked = 0
        self.who: list[tuple[str, str, str]] = []
        """Identity, method and blob of every request that was let in."""

    def answer(self, request: Request) -> Response:
        within = replace(request, target=f"/{ACCOUNT}{request.target}")
        container, blob = within.place
        identity = self.identities.holder(request.header("authorization"), STORAGE_SCOPE)
        if not identity:
            text = "Server failed to authenticate the request."
            authority = "authorization_uri=https://login.microsoftonline.com/t/oauth2/authorize"
            challenge = {"WWW-Authenticate": f"Bearer {authority} resource_id={STORAGE_SCOPE}"}
            return problem(401, "NoAuthenticationInformation", text, **challenge)
        roles = (READER, CONTRIBUTOR) if request.method in ("GET", "HEAD") else (CONTRIBUTOR,)
        if not self.identities.may(identity, roles, container):
            return problem(
                403, "AuthorizationPermissionMismatch", "This request is not authorized to perform this operation."
            )
        self._asked += 1
        if self.busy and self._asked % 3 == 0:
            self.busy -= 1
            return problem(
                503, "ServerBusy", "The server is currently unable to receive requests.", **{"Retry-After": "1"}
            )
        self.who.append((identity, request.method, blob))
        if source := request.header("x-ms-copy-source"):
            if not source.startswith(f"https://{STORAGE}/{container}/"):
                return problem(403, "CannotVerifyCopySource", "The source is private, and in another place.")
            own = source.replace(f"https://{STORAGE}", self.behind.url, 1)
            within = within.with_header("x-ms-copy-source", own)
        return self.upstream.ask(signed(within))


class Management(Relay):
    """Azure Resource Manager at its own name, and the endpoints of a workspace at theirs; behind it are jobs and endpoints."""

    def __init__(self, made: "World", address: str, tls: ssl.SSLContext) -> None:
        super().__init__(Endpoint(made.service.server_address[1]), (address, 443))
        self.socket = tls.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        self.endpoints, self.world, self.address = Upstream(made.endpoints_port), made, address

    def answer(self, request: Request) -> Response:
        path = urlsplit(request.target).path
        other = SERVED.search(path) or request.header("host").endswith(INFERENCE)
        named = request.with_header("X-Forwarded-Host", request.header("host"))
        answer = (self.endpoints if other else self.upstream).ask(named)
        made = re.fullmatch(r".*/onlineEndpoints/([^/]+)", path)
        if made and request.method == "PUT" and answer.status < 300:
            with open(self.world.hosts, "a") as file:
                file.write(f"{self.address} {made[1]}.{INFERENCE}\n")
        return answer


class IdentityEndpoint(ThreadingHTTPServer):
    """169.254.169.254: tokens of the machine's identities, by IMDS and as Azure ML hands them on; and of the CLI's login."""

    daemon_threads = True

    def __init__(self, identities: Identities, address: str) -> None:
        super().__init__((address, 80), _IdentityHandler)
        self.identities, self.secret = identities, secrets.token_hex(16)
        self.assigned = {CLIENT: CLUSTER}
        """By client id."""


class _IdentityHandler(BaseHTTPRequestHandler):
    server: IdentityEndpoint

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = {key: value[0] for key, value in parse_qs(url.query).items()}
        code, said = self._answer(url.path, query)
        data = json.dumps(said).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _answer(self, path: str, query: dict[str, str]) -> tuple[int, dict[str, Any]]:
        resource, until = query.get("resource", ""), int(time.time()) + 3600
        if path == "/az":
            token = self.server.identities.token(PERSON, resource)
            return 200, {"accessToken": token, "expires_on": until, "expiresOn": "2100-01-01 00:00:00.000000"}
        if path == "/MSI/auth" and self.headers.get("secret") == self.server.secret:
            client = query.get("clientid", "")
        elif path == "/metadata/identity/oauth2/token" and self.headers.get("Metadata") == "true":
            client = query.get("client_id", "")
        else:
            return 404, {"error": "not_found", "error_description": path}
        identity = self.server.assigned.get(client)
        if not identity:
            return 400, {"error": "invalid_request", "error_description": "Identity not found"}
        token = self.server.identities.token(identity, resource)
        return 200, {
            "access_token": token, "expires_on": str(until), "expires_in": "3600", "resource": resource, "token_type": "Bearer"
        }  # fmt: skip


class ImageNodes(Nodes):
    """A job's nodes, each in the image on a machine of its own."""

    world: "World"
    image: Built

    def _start(self, rank: int) -> "subprocess.Popen[bytes]":
        place, machine = self.folder(rank), self.world.machines[rank]
        (place / "wd").mkdir(parents=True)
        fixed = {target: source for target, source in self.world.changes(self.image).items()}
        argv = self.image.command(
            "bash", "-c", self._command(place), read_only=fixed, mounts={"/mnt/azureml": place / "wd"},
            host=machine.name, alone=True, **self._environment(rank, place),
        )  # fmt: skip
        words, env = [*machine.entering, *argv], {"PATH": os.environ["PATH"]}
        with open(place / "std_log.txt", "wb") as log:
            return subprocess.Popen(words, cwd="/", env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _environment(self, rank: int, place: Path) -> dict[str, str]:
        """What the service adds to the image's own."""
        identity = {
            "MSI_ENDPOINT": f"http://{IMDS}/MSI/auth",
            "MSI_SECRET": self.world.imds.secret,
            "DEFAULT_IDENTITY_CLIENT_ID": CLIENT,
        }
        wanted = self.of_the_service(rank, self.world.machines[0].address)
        return {**wanted, **identity, **(self.job.get("environmentVariables") or {})}

    def _downloaded(self, address: str, place: Path) -> str:
        raise AssertionError(f"a job of an image downloads nothing, and this one {address}")

    def terminate(self) -> None:
        """As a container is stopped: its first program gets the signal, not the sandbox around it."""
        for process in self.processes:
            with suppress(psutil.NoSuchProcess):
                sandbox = psutil.Process(process.pid)
                inside = [one for first in sandbox.children() for one in first.children()] or [sandbox]
                for one in inside:
                    one.send_signal(signal.SIGTERM)


class Served:
    """A deployment's container on a machine of its own: its image, the model's files, and its variables."""

    def __init__(self, world: "World", key: str, body: dict[str, Any]) -> None:
        self.world, self.properties = world, body["properties"]
        self.refused = ""
        self.process: subprocess.Popen[bytes] | None = None
        self.machine = world.serving[len(world.served) % len(world.serving)]
        self.port = self.properties["environmentVariables"]["PORT"]
        image = world.service.assets[self.properties["environmentId"]]["properties"]["image"]
        model = world.service.assets[self.properties["model"]]["properties"]["modelUri"]
        place = world.base / "served" / f"{len(world.served)}-{key.rpartition('/')[2]}"
        if image not in world.images:
            self.refused = f"manifest for {image} not found: manifest unknown"
        elif not world.identities.may(SERVING, (PULL,), image.partition("/")[0]):
            self.refused = f"unauthorized: the endpoint's identity may not pull {image}"
        elif not world.identities.may(SERVING, (READER, CONTRIBUTOR), CONTAINER):
            self.refused = "AuthorizationPermissionMismatch: the endpoint's identity may not read the model"
        else:
            self._start(world.images[image], model, place)

    def _start(self, image: Built, model: str, place: Path) -> None:
        self.user = image.user
        _, prefix = DATASTORE.fullmatch(model).groups()
        for blob in self.world.blobs().list_blobs(name_starts_with=prefix.rstrip("/") + "/"):
            file = place / "model" / blob.name.removeprefix(prefix).lstrip("/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(self.world.blobs().download_blob(blob.name).readall())
        run, seen = place / "run", "/var/azureml-app/azureml-models/model/1"
        run.mkdir(parents=True)
        self.log = place / "log"
        argv = image.command(
            *image.default(), mounts={image.config["WorkingDir"]: run}, read_only={seen: place / "model"},
            host=self.machine.name, alone=True, AZUREML_MODEL_DIR=seen, **self.properties["environmentVariables"],
        )  # fmt: skip
        words, env = [*self.machine.entering, *argv], {"PATH": os.environ["PATH"]}
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(words, cwd="/", env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def state(self) -> str:
        if self.refused or self.process is None:
            return self.refused
        if self.process.poll() is not None:
            return self.log.read_text()[-600:]
        return "ready" if self._request("GET", "/readyz", None)[0] == 200 else "starting"

    def ask(self, body: Any) -> tuple[int, Any, dict[str, str]]:
        return self._request("POST", "/score", body)

    def _request(self, method: str, path: str, body: Any) -> tuple[int, Any, dict[str, str]]:
        connection = http.client.HTTPConnection(self.machine.address, int(self.port), timeout=20)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
            kept = {name: value for name, value in answer.getheaders() if name.lower().startswith("x-headway")}
            return answer.status, json.loads(text) if text else None, kept
        except (OSError, http.client.HTTPException, ValueError):
            return 502, {"error": "no answer"}, {}
        finally:
            connection.close()

    def stop(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()


@dataclass
class World:
    """What a test looks at and brings about. `service` is the workspace (azureml_service.py)."""

    base: Path
    identities: Identities
    service: AzureMlService
    storage: Storage
    imds: IdentityEndpoint
    azure: Namespace
    person: Namespace
    machines: list[Namespace]
    """Of the compute cluster; `serving` are those of endpoints."""
    serving: list[Namespace]
    images: dict[str, Built]
    hosts: Path
    bundle: Path
    endpoints: EndpointState
    """Of managed online endpoints (azureml_endpoints.py)."""
    endpoints_port: int
    served: list[Served] = field(default_factory=list)
    """Containers of deployments, as they were started."""
    _starter: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    hidden: list[str] = field(default_factory=list)
    """Folders of site-packages that are missing in the image."""

    @property
    def home(self) -> Path:
        return self.base / "home"

    def changes(self, image: Built) -> dict[str, Path]:
        """What is not as the image has it: the names of Azure's hosts, and who signs their certificates."""
        [trusted] = image.root.glob("opt/headway/lib/python3*/site-packages/certifi/cacert.pem")
        nothing = self.base / "nothing"
        nothing.mkdir(exist_ok=True)
        gone = {f"/{trusted.parents[1].relative_to(image.root) / name}": nothing for name in self.hidden}
        return {"/etc/hosts": self.hosts, f"/{trusted.relative_to(image.root)}": self.bundle, **gone}

    def command(self, *words: str | Path) -> list[str]:
        """A command of whoever submits, on a machine of theirs: the names of Azure's hosts, and who signs their certificates."""
        known = ["--ro-bind", self.hosts, "/etc/hosts", "--ro-bind", self.bundle, certifi.where()]
        return [*self.person.entering, "bwrap", "--dev-bind", "/", "/", *map(str, known), "--", *map(str, words)]

    def environment(self) -> dict[str, str]:
        """Of whoever submits: without what this machine says of certificates and proxies, and of the tests."""
        ours = ("TESTS_", "PYTEST_", "AZURE_", "SSL_CERT", "REQUESTS_CA", "CURL_CA")
        return {
            **{
                key: value
                for key, value in os.environ.items()
                if not key.startswith(ours) and "_proxy" not in key.lower()
            },
            "PATH": f"{self.base / 'bin'}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "HEADWAY_HOME": str(self.home),
            "PYTHONPATH": "",
            "SSL_CERT_FILE": str(self.bundle),  # the trust store of their machine; requests has one of its own
        }

    def start(self, *words: str | Path, log: Path) -> "subprocess.Popen[bytes]":
        with open(log, "wb") as out:
            return subprocess.Popen(
                self.command(*words), env=self.environment(), stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )

    def run(self, *words: str | Path, seconds: float = 600) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            self.command(*words), env=self.environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=limit(seconds),
        )  # fmt: skip

    def blobs(self) -> Any:
        """The store's container, as the services of Azure themselves reach it."""
        from azure.storage.blob import BlobServiceClient

        return BlobServiceClient.from_connection_string(self.service.blobs.connection_string).get_container_client(
            CONTAINER
        )

    def serve(self, key: str, body: dict[str, Any]) -> Served:
        """Started by a thread that stays: a sandbox dies with the thread that started it, and one of a request ends."""
        self.served.append(self._starter.submit(Served, self, key, body).result())
        return self.served[-1]

    def logs(self) -> str:
        """The nodes' own, for a test that fails."""
        found = sorted(self.service.base.rglob("std_log.txt"), key=lambda path: path.stat().st_mtime)
        return "\n".join(f"{path.parent.parent.name}: {path.read_text()[-2500:]}" for path in found[-4:])

    def nodes(self, job: JobRecord) -> Nodes:
        """Of a job that begins. Raises NotStarted as the service fails a job whose image it cannot have."""
        wanted = self.service.assets[job.body["properties"]["environmentId"]]["properties"]["image"]
        if not self.identities.may(CLUSTER, (PULL,), wanted.partition("/")[0]):
            raise NotStarted("ImagePullUnauthorized", f"unauthorized: the cluster's identity may not pull {wanted}")
        if wanted not in self.images:
            raise NotStarted("ImageNotFound", f"manifest for {wanted} not found: manifest unknown")
        service = self.service
        made = ImageNodes(
            service.blobs, service.base / job.name / str(len(job.history)), job.name, job.body["properties"], {},
            service.datastores,
        )  # fmt: skip
        made.world, made.image = self, self.images[wanted]
        return made


@contextmanager
def world(base: Path, images: dict[str, Built]) -> Iterator[World]:
    """All of it, while the block runs; this thread is on Azure's machine meanwhile. `images` are those of the registry."""
    with network(8) as machines, ExitStack() as stack:
        azure, person, *nodes = machines.machines
        nodes, serving = nodes[:2], nodes[2:]
        prefix = azure.address.rpartition(".")[0]
        names = {STORAGE: f"{prefix}.101", MANAGEMENT: f"{prefix}.102"}
        for address in names.values():
            _must("-n", azure.name, "address", "add", f"{address}/24", "dev", "eth0")
        _must("-n", azure.name, "address", "add", f"{IMDS}/32", "dev", "eth0")
        for machine in (person, *nodes):
            _must("-n", machine.name, "route", "add", IMDS, "dev", "eth0")
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in names.items())]
        hosts = base / "hosts"
        hosts.write_text("\n".join([*lines, *(f"{one.address} {one.name}" for one in machines.machines)]) + "\n")
        hosts.chmod(0o644)
        tls, bundle = certificates(base / "tls", [*names, f"*.{INFERENCE}"])
        identities = Identities(
            {
                (PERSON, CONTRIBUTOR, CONTAINER),
                (PERSON, SCIENTIST, "w"),
                (CLUSTER, CONTRIBUTOR, CONTAINER),
                (CLUSTER, PULL, REGISTRY),
                (SERVING, READER, CONTAINER),
                (SERVING, PULL, REGISTRY),
            }
        )
        stack.enter_context(inside(azure))
        blobs = stack.enter_context(azurite.running(base / "azurite", in_memory=True))
        versions = stack.enter_context(VersionedBlobs(blobs).running())
        storage = stack.enter_context(Storage(versions.endpoint, identities, names[STORAGE], tls).running())
        imds = stack.enter_context(_serving(IdentityEndpoint(identities, IMDS)))
        service = AzureMlService(blobs, base / "nodes", {}, url=f"https://{MANAGEMENT}")
        service.allows = identities.answer
        behind, state = stack.enter_context(azureml_endpoints.serving({"prompts": []}))
        state.url, state.scoring = f"https://{MANAGEMENT}", f"https://{{name}}.{INFERENCE}/score"
        state.assets, state.datastores, state.allows = service.assets, service.datastores, service.allows
        port = int(behind.rpartition(":")[2])
        made = World(
            base, identities, service, storage, imds, azure, person, nodes, serving, images, hosts, bundle, state, port
        )
        service.nodes_of, state.run = made.nodes, made.serve
        stack.enter_context(service.running())
        stack.enter_context(Management(made, names[MANAGEMENT], tls).running())
        _home(made)
        try:
            yield made
        finally:
            for one in made.served:
                one.stop()


def _home(made: World) -> None:
    """A home whose store is the container, known by the CLI's login."""
    made.blobs().create_container()
    made.home.mkdir()
    store = {"uri": f"az://{ACCOUNT}/{CONTAINER}/some/prefix", "credential": "cli"}
    (made.home / "stores.yaml").write_text(yaml.safe_dump({"use": "cloud", "stores": {"cloud": store}}))
    az = made.base / "bin" / "az"
    az.parent.mkdir()
    az.write_text(AZ.format(python=sys.executable, imds=IMDS))
    az.chmod(az.stat().st_mode | stat.S_IXUSR)


def settings(**changed: Any) -> dict[str, Any]:
    """A configuration that people would write for this workspace: no address in it is a test's."""
    own = {"subscription_id": "s", "resource_group": "g", "workspace": "w", "compute": "cpu", "shm_size": "1g"}
    endpoint = {"image": ENDPOINT_IMAGE, "identity": "/subscriptions/s/resourceGroups/g/" + IDENTITY}
    cluster = {"name": "azureml", "backend": "azureml", "image": IMAGE, "nodes": 2, "ranks_per_node": 1, "azureml": own}
    cluster["data"] = {"nodes": 2}
    return {"cluster": {**cluster, **changed}, "deployment": {"backend": "azureml", "azureml": endpoint}}


@contextmanager
def inside(machine: Namespace) -> Iterator[None]:
    """This thread, and what it starts, on a machine's network."""
    libc = ctypes.CDLL(None, use_errno=True)
    before, there = os.open("/proc/thread-self/ns/net", os.O_RDONLY), os.open(f"/run/netns/{machine.name}", os.O_RDONLY)
    try:
        assert libc.setns(there, CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        yield
    finally:
        assert libc.setns(before, CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        os.close(before)
        os.close(there)


@contextmanager
def _serving(server: ThreadingHTTPServer) -> Iterator[Any]:
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def certificates(folder: Path, names: list[str]) -> tuple[ssl.SSLContext, Path]:
    """A server's certificate for these names, and a bundle of authorities that has its signer beside the usual ones."""
    folder.mkdir(parents=True)
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    root, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Headway's tests")])

    def certificate(subject: x509.Name, public: Any, *, authority: bool) -> x509.Certificate:
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(public)
        builder = (
            builder.serial_number(x509.random_serial_number()).not_valid_before(now - day).not_valid_after(now + day)
        )
        builder = builder.add_extension(x509.BasicConstraints(authority, None), critical=True)
        if not authority:
            other = x509.SubjectAlternativeName([x509.DNSName(name) for name in names])
            builder = builder.add_extension(other, critical=False)
        return builder.sign(root, hashes.SHA256())

    pem = serialization.Encoding.PEM
    signer = certificate(issuer, root.public_key(), authority=True).public_bytes(pem)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
    plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / "server.pem").write_bytes(
        certificate(subject, key.public_key(), authority=False).public_bytes(pem) + key.private_bytes(pem, *plain)
    )
    bundle = folder / "bundle.pem"
    bundle.write_bytes(Path(certifi.where()).read_bytes() + signer)
    bundle.chmod(0o644)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem")
    return context, bundle


def _must(*words: object) -> None:
    said = ip(*words)
    assert said.returncode == 0, f"ip {words}: {said.stderr}"
