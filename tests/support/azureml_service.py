"""A workspace of Azure ML behind the SDK's own HTTP edge: it keeps state, can fail, and really runs its jobs as local processes.

Every request must have a token and the API version, and a body must be one by the SDK's own models (azureml_bodies.py).
Cancelling is answered with 202 and a page to ask at. A job runs its command once a node, with the distribution's variables,
in folders that nodes do not share (azureml_nodes.py); the Blob store that they share is a real Azurite.
"""

import json
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from azureml_bodies import refusal
from azureml_nodes import Nodes
from azurite import Endpoint

API_VERSION = "2025-01-01-preview"
API_VERSIONS = (
    *("2022-02-01-preview", "2022-05-01", "2022-10-01", "2022-10-01-preview", "2023-02-01-preview", "2023-04-01"),
    *("2023-04-01-preview", "2023-06-01-preview", "2023-08-01-preview", "2023-10-01", "2024-01-01-preview"),
    *("2024-04-01-preview", "2024-10-01-preview", API_VERSION),
)
"""Those that azure-ai-ml 1.35 sends, each to other resources (azure/ai/ml/_ml_client.py)."""
HISTORY_VERSION = "v1.0"
TOKEN = "a token of the tests"
WHERE = "/subscriptions/s/resourceGroups/g/providers/Microsoft.MachineLearningServices/workspaces/w"
USAGES = "/subscriptions/s/providers/Microsoft.MachineLearningServices/locations/eastus/usages"
PAGE = 10
"""Jobs of one page of a listing."""
STEP_SECONDS = 0.1
"""Between two states on a job's way."""
OVER = ("Completed", "Failed", "Canceled")


@dataclass
class Trouble:
    """What the next requests that fit get instead of an answer."""

    method: str
    path: str
    """A pattern."""
    status: int
    times: int = 1
    code: str = "InternalServerError"
    message: str = "try again"
    headers: dict[str, str] = field(default_factory=dict)
    lost: bool = False
    """The request is done, and its answer never comes."""


@dataclass
class JobRecord:
    """A job, as the service keeps it."""

    name: str
    body: dict[str, Any]
    number: int
    status: str = "NotStarted"
    error: dict[str, Any] = field(default_factory=dict)
    nodes: Nodes | None = None
    cancelled: bool = False
    preempted: bool = False
    again: bool = False
    """Its nodes were taken away, and it waits for others."""
    history: list[str] = field(default_factory=list)

    def become(self, status: str) -> None:
        self.status = status
        self.history.append(status)


class NotStarted(Exception):
    """Why a job does not begin, such as for its image: the service's code and message."""


class AzureMlService(ThreadingHTTPServer):
    """One workspace, `w`, with one cluster, `cpu`. Everything that a test may look at or bring about is an attribute."""

    daemon_threads = True

    def __init__(
        self,
        blobs: Endpoint,
        base: Path,
        environment: dict[str, str],
        *,
        address: tuple[str, int] = ("127.0.0.1", 0),
        url: str = "",
    ) -> None:
        super().__init__(address, _Handler)
        self.url = url or f"http://127.0.0.1:{self.server_address[1]}"
        self.blobs, self.base, self.environment = blobs, base, environment
        self.token, self.signature = TOKEN, uuid.uuid4().hex
        self.allows: Callable[[str | None], int] = lambda header: 200 if header == f"Bearer {self.token}" else 401
        """What an Authorization header is answered with: 200, 401, or 403 for somebody without a role."""
        self.nodes_of: Callable[[JobRecord], Nodes] = self._nodes
        """The nodes of a job that begins; raises NotStarted."""
        self.jobs: dict[str, JobRecord] = {}
        self.assets: dict[str, dict[str, Any]] = {}
        self.datastores: dict[str, dict[str, Any]] = {}
        self.operations: dict[str, int] = {}
        self.trouble: list[Trouble] = []
        self.log: list[str] = []
        self.submitted: list[str] = []
        """Names of the jobs that were started, one for each start."""
        self.fails_with: tuple[str, str] | None = None
        """Code and message with which the next job fails before it runs."""
        self.holds = threading.Event()
        """Jobs stay in Preparing until it is set."""
        self.holds.set()
        self.clusters: dict[str, dict[str, Any]] = {"cpu": cluster()}
        self.usages: list[dict[str, Any]] = []
        self.lock = threading.Lock()

    @contextmanager
    def running(self) -> "Iterator[AzureMlService]":
        """It answers while the block runs; then nothing of its jobs is left."""
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield self
        finally:
            for job in list(self.jobs.values()):
                job.cancelled = True
                if job.nodes:
                    job.nodes.kill()
            self.shutdown()
            self.server_close()

    def record(self, name: str) -> JobRecord:
        return self.jobs[name]

    def preempt(self, name: str) -> None:
        """Take a job's low priority nodes away, as Azure does: at once."""
        job = self.jobs[name]
        job.preempted = True
        if job.nodes:
            job.nodes.kill()

    def requeue(self, name: str) -> None:
        """Take its nodes away, and start the same job on others: a job of Azure Batch waits for nodes again."""
        job = self.jobs[name]
        job.again = True
        if job.nodes:
            job.nodes.kill()

    def delete(self, name: str) -> None:
        """What an administrator does."""
        job = self.jobs.pop(name)
        job.cancelled = True
        if job.nodes:
            job.nodes.kill()

    def put(self, name: str, body: dict[str, Any]) -> JobRecord:
        """Make a job, once; the same name again only has its tags replaced."""
        with self.lock:
            there = self.jobs.get(name)
            if there:
                there.body["properties"]["tags"] = body["properties"].get("tags") or {}
                return there
            job = self.jobs[name] = JobRecord(name, body, number=len(self.submitted))
            job.become("NotStarted")
            self.submitted.append(name)
        threading.Thread(target=self._live, args=(job,), daemon=True).start()
        return job

    def cancel(self, job: JobRecord) -> str:
        """Begin to cancel; returns the page to ask at."""
        job.cancelled = True
        if job.status not in OVER:
            job.become("CancelRequested")
        if job.nodes:
            job.nodes.terminate()
        operation = uuid.uuid4().hex
        self.operations[operation] = 0
        return operation

    def _live(self, job: JobRecord) -> None:
        """A job's life, from NotStarted to its end."""
        error, self.fails_with = self.fails_with, None
        if not self._waited(job):
            return job.become("Canceled")
        try:
            if error:
                raise NotStarted(*error)
            job.nodes = self.nodes_of(job)
        except NotStarted as why:
            return self._fail(job, *why.args)
        job.become("Running")
        code = job.nodes.run()
        if job.again:
            job.again = False
            return self._live(job)
        return self._end(job, code)

    def _waited(self, job: JobRecord) -> bool:
        """The time before it runs; False when it is cancelled meanwhile."""
        for status in ("Queued", "Preparing"):
            time.sleep(STEP_SECONDS)
            if job.cancelled:
                return False
            job.become(status)
        while not self.holds.wait(STEP_SECONDS):
            if job.cancelled:
                return False
        return True

    def _end(self, job: JobRecord, code: int) -> None:
        if job.preempted:
            return self._fail(job, "NodePreempted", "The low priority nodes of the job were preempted.")
        if job.cancelled:
            return job.become("Canceled")
        if code:
            return self._fail(job, "UserError", f"Execution failed. User process exited with status code {code}.")
        job.become("Finalizing")
        return job.become("Completed")

    def _nodes(self, job: JobRecord) -> Nodes:
        place = self.base / job.name
        return Nodes(self.blobs, place, job.name, job.body["properties"], self.environment, self.datastores)

    def _fail(self, job: JobRecord, code: str, message: str) -> None:
        outer = "UserError" if code.startswith(("User", "Image")) else "ServiceError"
        job.error = {"error": {"code": outer, "message": message, "innerError": {"code": code}}}
        job.become("Failed")


def cluster(**changed: Any) -> dict[str, Any]:
    """A compute cluster as the service tells it."""
    said = {
        "vmSize": "STANDARD_D2_V2",
        "vmPriority": "Dedicated",
        "scaleSettings": {"maxNodeCount": 2, "minNodeCount": 0},
    }
    return {"computeType": "AmlCompute", "provisioningState": "Succeeded", "properties": {**said, **changed}}


class _Handler(BaseHTTPRequestHandler):
    server: AzureMlService
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer("GET")

    def do_PUT(self) -> None:
        self._answer("PUT")

    def do_POST(self) -> None:
        self._answer("POST")

    def _answer(self, method: str) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(size)) if size else {}
        path = urlsplit(self.path).path
        self.server.log.append(f"{method} {path}")
        trouble = self._trouble(method, path)
        if trouble and not trouble.lost:
            return self._send(trouble.status, _error(trouble.code, trouble.message), trouble.headers)
        code, said, headers = self._refused(path) or self._route(method, path)(body)
        if trouble:
            self.close_connection = True
            return self.connection.close()
        return self._send(code, said, headers)

    def _send(self, code: int, said: Any, headers: dict[str, str]) -> None:
        data = b"" if said is None else (said if isinstance(said, str) else json.dumps(said)).encode()
        self.send_response(code)
        for key, value in {"Content-Type": "application/json", "Content-Length": str(len(data)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(data)

    def _trouble(self, method: str, path: str) -> Trouble | None:
        with self.server.lock:
            fits = [t for t in self.server.trouble if t.method == method and re.search(t.path, path) and t.times]
            if fits:
                fits[0].times -= 1
        return fits[0] if fits else None

    def _refused(self, path: str) -> tuple[int, Any, dict[str, str]] | None:
        if path == "/discovery" or path.startswith("/logs/"):
            return None
        if (code := self.server.allows(self.headers.get("Authorization"))) != 200:
            return code, NOT_ALLOWED[code], {}
        asked = self._query.get("api-version", [""])[0]
        if asked not in (("", HISTORY_VERSION) if path.startswith("/history/") else API_VERSIONS):
            return 400, _error("InvalidApiVersionParameter", f"The api-version '{asked}' is invalid."), {}
        if not path.startswith((WHERE, f"/history/v1.0{WHERE}", "/operations/", USAGES)):
            return 404, _error("ResourceNotFound", f"The resource {path} was not found."), {}
        return None

    @property
    def _query(self) -> dict[str, list[str]]:
        return parse_qs(urlsplit(self.path).query)

    def _route(self, method: str, path: str) -> Callable[[Any], tuple[int, Any, dict[str, str]]]:
        rest = path.removeprefix(WHERE).strip("/")
        routes: list[tuple[str, str, Callable[..., tuple[int, Any, dict[str, str]]]]] = [
            ("GET", r"", self._workspace),
            ("GET", r"discovery", self._discovery),
            ("GET", r"jobs", self._list),
            ("PUT", r"jobs/([^/]+)", self._put),
            ("GET", r"jobs/([^/]+)", self._get),
            ("POST", r"jobs/([^/]+)/cancel", self._cancel),
            ("PUT", r"(data|environments)/([^/]+)/versions/([^/]+)", self._put_asset),
            ("GET", r"datastores/([^/]+)", self._datastore),
            ("PUT", r"datastores/(\w+)", self._put_datastore),
            ("GET", r"computes/([^/]+)", self._compute),
            ("GET", r"operations/([^/]+)", self._operation),
            ("GET", USAGES.strip("/"), self._usages),
            ("GET", rf"history/v1.0{WHERE}/runs/([^/]+)/details", self._details),
            ("GET", r"logs/([^/]+)/(\d+)", self._log),
        ]
        for verb, pattern, do in routes:
            found = re.fullmatch(pattern, rest)
            if verb == method and found:
                return lambda body, do=do, found=found: do(body, *found.groups())
        return lambda body: (404, _error("ResourceNotFound", f"{method} {path}"), {})

    def _workspace(self, _: Any) -> tuple[int, Any, dict[str, str]]:
        told = {"discoveryUrl": f"{self.server.url}/discovery", "workspaceId": "1"}
        return 200, {"id": WHERE, "name": "w", "location": "eastus", "properties": told}, {}

    def _discovery(self, _: Any) -> tuple[int, Any, dict[str, str]]:
        return 200, {"api": self.server.url, "history": self.server.url}, {}

    def _list(self, _: Any) -> tuple[int, Any, dict[str, str]]:
        tag, skip = self._query.get("tag", [""])[0], int(self._query.get("$skip", ["0"])[0])
        known = sorted(self.server.jobs.values(), key=lambda job: -job.number)
        fitting = [job for job in known if not tag or tag in (job.body["properties"].get("tags") or {})]
        said: dict[str, Any] = {"value": [_told(job) for job in fitting[skip : skip + PAGE]]}
        if skip + PAGE < len(fitting):
            said["nextLink"] = f"{self.server.url}{WHERE}/jobs?api-version={API_VERSION}&tag={tag}&$skip={skip + PAGE}"
        return 200, said, {}

    def _put(self, body: Any, name: str) -> tuple[int, Any, dict[str, str]]:
        known = {"assets": self.server.assets, "clusters": self.server.clusters, "datastores": self.server.datastores}
        wrong = refusal(body, where=WHERE, **known)
        if wrong:
            return 400, _error(*wrong), {}
        as_user = (body["properties"].get("identity") or {}).get("identityType") == "UserIdentity"
        if as_user and not self.headers.get("x-azureml-token"):
            return 400, _error("UserError", "A job of the user's identity needs the header x-azureml-token."), {}
        again = name in self.server.jobs
        return 200 if again else 201, _told(self.server.put(name, body)), {}

    def _get(self, _: Any, name: str) -> tuple[int, Any, dict[str, str]]:
        job = self.server.jobs.get(name)
        return (200, _told(job), {}) if job else (404, _error("UserError", f"Run {name} not found"), {})

    def _cancel(self, _: Any, name: str) -> tuple[int, Any, dict[str, str]]:
        job = self.server.jobs.get(name)
        if job is None:
            return 404, _error("UserError", f"Run {name} not found"), {}
        page = f"{self.server.url}/operations/{self.server.cancel(job)}?api-version={API_VERSION}"
        return 202, None, {"Location": page, "Azure-AsyncOperation": page, "Retry-After": "1"}

    def _operation(self, _: Any, operation: str) -> tuple[int, Any, dict[str, str]]:
        self.server.operations[operation] += 1
        done = self.server.operations[operation] > 1
        return 200, {"status": "Succeeded" if done else "InProgress"}, {} if done else {"Retry-After": "1"}

    def _put_asset(self, body: Any, kind: str, name: str, version: str) -> tuple[int, Any, dict[str, str]]:
        wrong = refusal(body, kind=kind, where=WHERE, datastores=self.server.datastores)
        if wrong:
            return 400, _error(*wrong), {}
        identity = f"{WHERE}/{kind}/{name}/versions/{version}"
        if identity in self.server.assets and self.server.assets[identity] != body:
            return 409, _error("Conflict", f"{identity} is there, and cannot be changed"), {}
        self.server.assets[identity] = body
        return 201, {"id": identity, "name": version, **body}, {}

    def _datastore(self, _: Any, name: str) -> tuple[int, Any, dict[str, str]]:
        found = self.server.datastores.get(name)
        if found is None:
            return 404, _error("UserError", f"Could not find datastore: {name}"), {}
        return 200, {"id": f"{WHERE}/datastores/{name}", "name": name, **found}, {}

    def _put_datastore(self, body: Any, name: str) -> tuple[int, Any, dict[str, str]]:
        if wrong := refusal(body, kind="datastores", where=WHERE):
            return 400, _error(*wrong), {}
        again, self.server.datastores[name] = name in self.server.datastores, body
        return 200 if again else 201, {"id": f"{WHERE}/datastores/{name}", "name": name, **body}, {}

    def _compute(self, _: Any, name: str) -> tuple[int, Any, dict[str, str]]:
        found = self.server.clusters.get(name)
        if found is None:
            return 404, _error("ComputeNotFound", f"Compute with name '{name}' not found"), {}
        return 200, {"id": f"{WHERE}/computes/{name}", "name": name, "properties": found}, {}

    def _usages(self, _: Any) -> tuple[int, Any, dict[str, str]]:
        return 200, {"value": self.server.usages}, {}

    def _details(self, _: Any, name: str) -> tuple[int, Any, dict[str, str]]:
        job = self.server.jobs.get(name)
        if job is None:
            return 404, _error("UserError", f"Run {name} not found"), {}
        logs = {
            f"user_logs/std_log_{rank}.txt" if job.nodes and job.nodes.count > 1 else "user_logs/std_log.txt": (
                f"{self.server.url}/logs/{name}/{rank}?sig={self.server.signature}"
            )
            for rank in range(job.nodes.count if job.nodes else 0)
        }
        error = {"error": job.error} if job.error else {}
        return 200, {"runId": name, "status": job.status, "logFiles": logs, **error}, {}

    def _log(self, _: Any, name: str, rank: str) -> tuple[int, Any, dict[str, str]]:
        """Of a node, by an address that needs no token, as a shared access signature does."""
        nodes = self.server.jobs[name].nodes
        if self._query.get("sig") != [self.server.signature] or nodes is None:
            return 403, _error("AuthenticationFailed", "Signature did not match."), {}
        return 200, nodes.log(int(rank)), {"Content-Type": "text/plain"}


def _told(job: JobRecord) -> dict[str, Any]:
    studio = {"Studio": {"jobServiceType": "Studio", "endpoint": f"https://ml.azure.com/runs/{job.name}"}}
    properties = {**job.body["properties"], "status": job.status, "services": studio}
    return {"id": f"{WHERE}/jobs/{job.name}", "name": job.name, "properties": properties}


def _error(code: str, message: str) -> dict[str, Any]:
    return {"error": {"code": code, "message": message}}


NOT_ALLOWED = {
    401: _error("InvalidAuthenticationToken", "The access token is invalid or has expired."),
    403: _error(
        "AuthorizationFailed", f"The client does not have authorization to perform this action over scope {WHERE}."
    ),
}


@contextmanager
def serving(blobs: Endpoint, base: Path, environment: dict[str, str]) -> Iterator[AzureMlService]:
    """The workspace answers while the block runs; then nothing of its jobs is left. `environment` is what nodes have."""
    with AzureMlService(blobs, base, environment).running() as service:
        yield service
