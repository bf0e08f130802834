"""Managed online endpoints of a workspace behind the SDK's own HTTP edge: state, long operations, and failure at any step.

Every request must have a token and the API version, a body must be one by the SDK's own models (azureml_bodies.py), and what the
real service refuses is refused: shares that do not sum to 100, traffic for what is not there or not up, a second change while one
is under way, deleting what has traffic. A deployment answers golden prompts, and can be slow, wrong or broken.
"""

import json
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol
from urllib.parse import parse_qs, urlsplit

import azureml_bodies
from azure.ai.ml._restclient.arm_ml_service import models
from azureml_service import API_VERSIONS, NOT_ALLOWED, TOKEN, WHERE, Trouble

API_VERSION = API_VERSIONS[-1]
KEY = "a key of the endpoint"
OPERATION_SECONDS = 0.05
MOVING = ("Creating", "Updating", "Deleting")
ROOTS = {
    "onlineEndpoints": models.OnlineEndpoint,
    "deployments": models.OnlineDeployment,
    "models": models.ModelVersion,
    "environments": models.EnvironmentVersion,
    "datastores": models.Datastore,
}
Reply = tuple[int, Any, dict[str, str]]
SCALING = "/subscriptions/s/resourceGroups/g/providers/Microsoft.Insights/autoscalesettings"
RULE = {
    "metricTrigger": {
        "metricName", "metricResourceUri", "operator", "statistic", "threshold", "timeAggregation", "timeGrain", "timeWindow",
    },
    "scaleAction": {"cooldown", "direction", "type", "value"},
}  # fmt: skip
"""What a rule must have, by the reference of Microsoft.Insights/autoscalesettings at 2022-10-01; `value` has a default there."""
WORDS = {
    "operator": {"Equals", "NotEquals", "GreaterThan", "GreaterThanOrEqual", "LessThan", "LessThanOrEqual"},
    "statistic": {"Average", "Min", "Max", "Sum", "Count"},
    "timeAggregation": {"Average", "Minimum", "Maximum", "Total", "Count", "Last"},
    "direction": {"None", "Increase", "Decrease"},
    "type": {"ChangeCount", "PercentChangeCount", "ExactCount", "ServiceAllowedNextValue"},
}


class Container(Protocol):
    """What runs of a deployment, where one really runs (azure_world.py)."""

    def state(self) -> str:
        """`starting`, `ready`, or why it is neither."""
        ...

    def ask(self, body: Any) -> Reply: ...

    def stop(self) -> None: ...


@dataclass
class Resource:
    """An endpoint or a deployment, as the service keeps it."""

    body: dict[str, Any]
    state: str = "Creating"
    container: Container | None = None

    def told(self, identity: str, **more: Any) -> dict[str, Any]:
        name = identity.rpartition("/")[2]
        properties = {**self.body["properties"], "provisioningState": self.state, **more}
        return {**self.body, "id": f"{WHERE}/{identity}", "name": name, "properties": properties}


@dataclass
class Behaviour:
    """How a deployment answers."""

    fails: bool = False
    wrong: bool = False
    seconds: float = 0.0


@dataclass
class Operation:
    """An asynchronous change; it is done when its time has come."""

    finish: Callable[[], None]
    due: float
    error: tuple[str, str] | None = None
    container: Container | None = None
    undo: Callable[[], None] = lambda: None
    over: bool = False

    def advance(self) -> None:
        """Finish it when it is due; with a container, once that is ready or has failed."""
        state = self.container.state() if self.container else "ready"
        if self.over or time.monotonic() < self.due or state == "starting":
            return None
        self.over = True
        if state == "ready":
            return self.finish()
        self.error = ("ResourceNotReady", f"User container has crashed or terminated: {state}")
        return self.undo()


@dataclass
class State:
    """Everything that a test may look at or bring about."""

    golden: Mapping[str, Any]
    url: str = ""
    """Under which it is asked."""
    scoring: str = ""
    """Address of an endpoint's answers, with `{name}` in it; empty: here."""
    allows: Callable[[str | None], int] = lambda header: 200 if header == f"Bearer {TOKEN}" else 401
    """As in azureml_service.py."""
    resources: dict[str, Resource] = field(default_factory=dict)
    assets: dict[str, dict[str, Any]] = field(default_factory=dict)
    datastores: dict[str, dict[str, Any]] = field(default_factory=dict)
    scaling: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Autoscale settings of Azure Monitor, by name; they outlive what they scale."""
    may_scale: bool = True
    operations: dict[str, Operation] = field(default_factory=dict)
    trouble: list[Trouble] = field(default_factory=list)
    failing: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Pattern of `METHOD path`, and the code and message with which the operation ends that it begins."""
    behaviour: dict[str, Behaviour] = field(default_factory=dict)
    """By model reference."""
    metrics: list[dict[str, Any]] | None = None
    """Of Azure Monitor; None: it has no right to answer us."""
    run: Callable[[str, dict[str, Any]], Container] | None = None
    """Starts the container of a deployment by its key and body; None: deployments answer from `golden`."""
    log: list[str] = field(default_factory=list)
    traffic: list[dict[str, int]] = field(default_factory=list)
    """Every state of the shares, in their order."""
    mirrors: list[dict[str, int]] = field(default_factory=list)
    heard: list[tuple[str, bool]] = field(default_factory=list)
    """Deployment of each request to a model, and whether the header named it."""
    done: Callable[[str], None] = lambda said: None
    """Called with `METHOD path` after each change, before its answer."""
    lock: threading.RLock = field(default_factory=threading.RLock)

    def shares(self, name: str) -> dict[str, int]:
        return dict(self.resources[f"onlineEndpoints/{name}"].body["properties"].get("traffic") or {})

    def deployments(self, name: str) -> list[str]:
        start = f"onlineEndpoints/{name}/deployments/"
        return sorted(key.removeprefix(start) for key in self.resources if key.startswith(start))

    def begin(
        self, said: str, finish: Callable[[], None], undo: Callable[[], None], container: Container | None = None
    ) -> str:
        error = next((error for pattern, error in self.failing.items() if re.search(pattern, said)), None)
        number = f"endpoint-{uuid.uuid4().hex}"
        due = time.monotonic() + OPERATION_SECONDS
        self.operations[number] = Operation(undo if error else finish, due, error, container, undo)
        return number

    def advance(self) -> None:
        """Finish what is due: the service does so whether anybody asks or not."""
        for operation in [one for one in self.operations.values() if not one.over]:
            operation.advance()


def scaling_problem(name: str, body: dict[str, Any]) -> str:
    """What the service would refuse of an autoscale setting; empty when nothing."""
    said = body.get("properties") or {}
    if not body.get("location") or set(body) - {"location", "properties", "tags"}:
        return f"a setting has location and properties, and tags at most, not {sorted(body)}"
    known = {
        "enabled",
        "name",
        "notifications",
        "predictiveAutoscalePolicy",
        "profiles",
        "targetResourceLocation",
        "targetResourceUri",
    }
    if set(said) - known or said.get("name") != name or not said.get("profiles"):
        return f"properties {sorted(said)} of {name}"
    for profile in said["profiles"]:
        capacity = profile["capacity"]
        if set(profile) != {"name", "capacity", "rules"} or {type(one) for one in capacity.values()} != {str}:
            return f"profile {profile['name']}: its capacity has texts"
        if not int(capacity["minimum"]) <= int(capacity["default"]) <= int(capacity["maximum"]):
            return f"capacity {capacity}"
        for rule in profile["rules"]:
            parts = {part: set(rule[part]) for part in rule}
            words = [one for part in rule.values() for key, one in part.items() if one not in WORDS.get(key, {one})]
            if parts != RULE or words:
                return f"rule {rule}"
    return ""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer("GET")

    def do_PUT(self) -> None:
        self._answer("PUT")

    def do_POST(self) -> None:
        self._answer("POST")

    def do_DELETE(self) -> None:
        self._answer("DELETE")

    @property
    def state(self) -> State:
        return self.server.state  # type: ignore[attr-defined]

    def _answer(self, method: str) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(size)) if size else {}
        path = urlsplit(self.path).path
        if path == "/score":
            return self._send(*self._score(body))
        said = f"{method} {path.removeprefix(WHERE).strip('/')}"
        with self.state.lock:
            self.state.log.append(said)
            self.state.advance()
            trouble = next(
                (t for t in self.state.trouble if t.method == method and re.search(t.path, path) and t.times), None
            )
            if trouble:
                trouble.times -= 1
            if trouble and not trouble.lost:
                return self._send(trouble.status, _error(trouble.code, trouble.message), trouble.headers)
            reply = self._refused(path) or self._route(method, said.partition(" ")[2], body)
        if method in ("PUT", "DELETE") and reply[0] < 300:
            self.state.done(said)
        if trouble:
            self.close_connection = True
            return self.connection.close()
        return self._send(*reply)

    def _send(self, code: int, said: Any, headers: dict[str, str]) -> None:
        data = json.dumps(said).encode() if said is not None else b""
        self.send_response(code)
        for key, value in {"Content-Type": "application/json", "Content-Length": str(len(data)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(data)

    def _refused(self, path: str) -> Reply | None:
        if (code := self.state.allows(self.headers.get("Authorization"))) != 200:
            return code, NOT_ALLOWED[code], {}
        asked = parse_qs(urlsplit(self.path).query).get("api-version", [""])[0]
        scaling = path.startswith(SCALING)
        if asked not in (
            ("2018-01-01",) if path.endswith("/metrics") else ("2022-10-01",) if scaling else API_VERSIONS
        ):
            return 400, _error("InvalidApiVersionParameter", f"The api-version '{asked}' is invalid."), {}
        if not path.startswith((WHERE, SCALING, "/operations/")):
            return 404, _error("ResourceNotFound", f"The resource {path} was not found."), {}
        return None

    def _route(self, method: str, rest: str, body: Any) -> Reply:
        endpoint = r"onlineEndpoints/[^/]+"
        routes: list[tuple[str, str, Callable[..., Reply]]] = [
            ("GET", r"", lambda: (200, {"id": WHERE, "name": "w", "location": "eastus", "properties": {}}, {})),
            ("GET", r"operations/([^/]+)", self._operation),
            ("PUT", r"(models|environments)/([^/]+)/versions/([^/]+)", lambda *key: self._put_asset(body, *key)),
            ("GET", r"datastores/([^/]+)", self._datastore),
            ("PUT", r"datastores/(\w+)", lambda name: self._put_datastore(body, name)),
            ("POST", rf"({endpoint})/listKeys", lambda _: (200, {"primaryKey": KEY, "secondaryKey": "other"}, {})),
            ("POST", rf"({endpoint})/token", lambda _: (200, {"accessToken": KEY, "tokenType": "Bearer"}, {})),
            ("GET", rf"{endpoint}/providers/Microsoft.Insights/metrics", self._metrics),
            ("PUT", rf"{SCALING.strip('/')}/([^/]+)", lambda name: self._scale(name, body)),
            ("DELETE", rf"{SCALING.strip('/')}/([^/]+)", lambda name: self._scale(name, None)),
            ("GET", rf"({endpoint}(?:/deployments/[^/]+)?)", self._get),
            ("GET", rf"(onlineEndpoints|{endpoint}/deployments)", self._list),
            ("PUT", rf"({endpoint})", lambda key: self._put_endpoint(key, body)),
            ("PUT", rf"({endpoint}/deployments/[^/]+)", lambda key: self._put_deployment(key, body)),
            ("DELETE", rf"({endpoint}(?:/deployments/[^/]+)?)", self._delete),
        ]
        for verb, pattern, do in routes:
            if verb == method and (found := re.fullmatch(pattern, rest)):
                return do(*found.groups())
        return 404, _error("NotFound", f"{method} {rest}"), {}

    def _get(self, key: str) -> Reply:
        found = self.state.resources.get(key)
        if found is None:
            return 404, _error("NotFound", f"{key} not found"), {}
        own = {"scoringUri": self.state.scoring.format(name=key.partition("/")[2]) or f"{self.state.url}/score"}
        more = {} if "/deployments/" in key else own
        filled = {} if found.body["properties"].get("scaleSettings") else {"scaleSettings": {"scaleType": "Default"}}
        return 200, found.told(key, **more, **(filled if "/deployments/" in key else {})), {}

    def _list(self, where: str) -> Reply:
        keys = [key for key in self.state.resources if key.rpartition("/")[0] == where]
        return 200, {"value": [self._get(key)[1] for key in sorted(keys)]}, {}

    def _put_asset(self, body: Any, kind: str, name: str, version: str) -> Reply:
        if wrong := problem(kind, body):
            return 400, _error("ValidationError", wrong), {}
        uri = body["properties"].get("modelUri")
        if uri and (refused := azureml_bodies.unreadable(uri, self.state.datastores)):
            return 400, _error(*refused), {}
        self.state.assets[f"{WHERE}/{kind}/{name}/versions/{version}"] = body
        filled = {
            "flavors": {},
            "properties": {},
            "tags": {},
            **{k: v for k, v in body["properties"].items() if v is not None},
        }
        identity = f"{WHERE}/{kind}/{name}/versions/{version}"
        return (
            201,
            {"id": identity, "name": version, **body, "properties": filled if kind == "models" else body["properties"]},
            {},
        )

    def _datastore(self, name: str) -> Reply:
        found = self.state.datastores.get(name)
        return (200, {"name": name, **found}, {}) if found else (404, _error("UserError", f"no datastore {name}"), {})

    def _put_datastore(self, body: Any, name: str) -> Reply:
        if wrong := problem("datastores", body):
            return 400, _error("ValidationError", wrong), {}
        self.state.datastores[name] = body
        return 201, {"name": name, **body}, {}

    def _put_endpoint(self, key: str, body: Any) -> Reply:
        there = self.state.resources.get(key)
        wrong = problem("onlineEndpoints", body) or self._wrong_traffic(key, body["properties"])
        if wrong:
            return 400, _error("ValidationError", wrong), {}
        if there and there.state in MOVING:
            return 409, _error("Conflict", f"{key} is {there.state}"), {}
        kept, now = there, Resource(body, "Updating" if there else "Creating")

        def finish() -> None:
            now.state = "Succeeded"
            self.state.traffic.append(dict(body["properties"].get("traffic") or {}))
            self.state.mirrors.append(dict(body["properties"].get("mirrorTraffic") or {}))

        def undo() -> None:
            self.state.resources[key] = Resource(kept.body, "Succeeded") if kept else Resource(body, "Failed")

        self.state.resources[key] = now
        return self._accepted("PUT", key, finish, undo, status=200 if there else 201)

    def _put_deployment(self, key: str, body: Any) -> Reply:
        endpoint = self.state.resources.get(key.partition("/deployments/")[0])
        if endpoint is None:
            return 404, _error("NotFound", f"the endpoint of {key} not found"), {}
        if wrong := problem("deployments", body) or self._unknown(body["properties"]):
            return 400, _error("ValidationError", wrong), {}
        if (endpoint.body.get("identity") or {}).get("type") != "UserAssigned":
            # The service takes it, and fails some minutes later, when nobody's identity may pull the image or read the model.
            return 400, _error("ImagePullUnauthorized", "the endpoint's identity has no right to pull the image"), {}
        if endpoint.state in MOVING or (key in self.state.resources and self.state.resources[key].state in MOVING):
            return 409, _error("Conflict", f"{key} or its endpoint is being changed"), {}
        if (before := self.state.resources.get(key)) and before.container:
            before.container.stop()
        container = self.state.run(key, body) if self.state.run else None
        made = self.state.resources[key] = Resource(body, container=container)
        up, down = (lambda: _become(made, "Succeeded")), (lambda: _become(made, "Failed"))
        return self._accepted("PUT", key, up, down, status=201, container=container)

    def _delete(self, key: str) -> Reply:
        found = self.state.resources.get(key)
        if found is None:
            return 204, None, {}
        name, _, colour = key.partition("/deployments/")
        if colour and self.state.shares(name.partition("/")[2]).get(colour):
            return 400, _error("ValidationError", f"{colour} has traffic: set it to 0 first"), {}
        if found.state in MOVING:
            return 409, _error("Conflict", f"{key} is {found.state}"), {}
        found.state = "Deleting"

        def gone() -> None:
            for each in [one for one in self.state.resources if one == key or one.startswith(f"{key}/")]:
                if container := self.state.resources.pop(each).container:
                    container.stop()

        return self._accepted("DELETE", key, gone, lambda: _become(found, "Succeeded"), status=202)

    def _accepted(
        self,
        method: str,
        key: str,
        finish: Callable[[], None],
        undo: Callable[[], None],
        *,
        status: int,
        container: Container | None = None,
    ) -> Reply:
        number = self.state.begin(f"{method} {key}", finish, undo, container)
        page = f"{self.state.url}/operations/{number}?api-version={API_VERSION}"
        headers = {"Azure-AsyncOperation": page, "Location": page}
        return status, None if status == 202 else self._get(key)[1], headers

    def _operation(self, number: str) -> Reply:
        operation = self.state.operations[number]
        if not operation.over:
            return 200, {"status": "InProgress"}, {}
        if operation.error:
            return 200, {"status": "Failed", **_error(*operation.error)}, {}
        return 200, {"status": "Succeeded"}, {}

    def _scale(self, name: str, body: Any) -> Reply:
        if not self.state.may_scale:
            return 403, _error("AuthorizationFailed", "does not have authorization to perform autoscalesettings"), {}
        if body is None:
            return (200 if self.state.scaling.pop(name, None) else 204), None, {}
        if wrong := scaling_problem(name, body):
            return 400, _error("InvalidAutoscaleSetting", wrong), {}
        target = body["properties"]["targetResourceUri"].removeprefix(f"{WHERE}/")
        if target not in self.state.resources:
            return 400, _error("TargetResourceNotFound", f"{target} is not there"), {}
        status = 200 if name in self.state.scaling else 201
        self.state.scaling[name] = body
        return status, {"name": name, **body}, {}

    def _metrics(self) -> Reply:
        if self.state.metrics is None:
            return 403, _error("AuthorizationFailed", "does not have authorization to read metrics"), {}
        return 200, {"value": [{"name": {"value": "RequestsPerMinute"}, "timeseries": self.state.metrics}]}, {}

    def _wrong_traffic(self, key: str, said: dict[str, Any]) -> str:
        shares, mirror = said.get("traffic") or {}, said.get("mirrorTraffic") or {}
        if shares and sum(shares.values()) != 100:
            return f"traffic {shares} does not sum to 100"
        if len(mirror) > 1 or any(share > 50 or shares.get(name) for name, share in mirror.items()):
            return f"mirrorTraffic {mirror} is for one deployment without traffic, at most 50"
        for name in [*shares, *mirror]:
            found = self.state.resources.get(f"{key}/deployments/{name}")
            if found is None or found.state != "Succeeded":
                return f"the deployment {name} is not there, or not up"
        return ""

    def _asked(self) -> str:
        """The endpoint whose name the host begins with; without one, the only one."""
        names = [key.partition("/")[2] for key in self.state.resources if "/deployments/" not in key]
        host = self.headers.get("X-Forwarded-Host", "").partition(".")[0]
        return host if host in names else names[0]

    def _most_traffic(self, name: str) -> str:
        shares = self.state.shares(name)
        return max(shares, key=lambda colour: shares[colour])

    def _unknown(self, said: dict[str, Any]) -> str:
        missing = [said[field] for field in ("model", "environmentId") if said[field] not in self.state.assets]
        return f"{missing[0]} not found" if missing else ""

    def _score(self, body: Any) -> Reply:
        if self.headers.get("Authorization") != f"Bearer {KEY}":
            return 401, {"error": "unauthorized"}, {}
        colour = self.headers.get("azureml-model-deployment", "")
        with self.state.lock:
            self.state.advance()
            name = self._asked()
            chosen = colour or self._most_traffic(name)
            found = self.state.resources.get(f"onlineEndpoints/{name}/deployments/{chosen}")
            self.state.heard.append((chosen, bool(colour)))
        if found is None or found.state != "Succeeded":
            return 404, {"error": "no such deployment"}, {}
        if found.container:
            return found.container.ask(body)
        ref = found.body["properties"]["environmentVariables"]["MODEL_REF"]
        how = self.state.behaviour.get(ref, Behaviour())
        time.sleep(how.seconds)
        if how.fails:
            return 502, {"error": "broken"}, {}
        [prompt] = body["input_data"]["input_string"]
        known = {one["prompt"]: one["completion"] for one in self.state.golden["prompts"]}
        return 200, [{"0": "something else" if how.wrong else known[prompt]}], {"X-Headway-Model": ref}


def problem(kind: str, body: Any) -> str:
    """What is wrong with a body by the SDK's own model; empty when nothing is."""
    return azureml_bodies.problem(ROOTS[kind]._deserialize(body, []), body)


def _become(resource: Resource, state: str) -> None:
    resource.state = state


def _error(code: str, message: str) -> dict[str, Any]:
    return {"error": {"code": code, "message": message}}


@contextmanager
def serving(golden: Mapping[str, Any]) -> Iterator[tuple[str, State]]:
    """The workspace's address and state, while the block runs."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    url = f"http://127.0.0.1:{server.server_address[1]}"
    server.state = state = State(golden, url)  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield url, state
    finally:
        server.shutdown()
        server.server_close()
