"""Faults between a home and its store in Azure, and of what reaches a home from outside.

The store is an Azurite on this machine, for a home of its own, behind a proxy that answers in its place, hangs up, or is slow.
The store of the configuration is never touched.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import json
import secrets
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from typing import ClassVar
from urllib.parse import urlsplit

from deployments.rehearsal.fault import RESTART_SECONDS, Fault, check, equal_losses, exits
from deployments.rehearsal.scene import DATASET, Answer, NotSeen, Scene, serving
from tasks.artifacts import Check
from tasks.common.process import die_with_parent, read_json

AZURITE, ACCOUNT = "azurite-blob", "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Azurite's documented key, which every Azurite has: no secret."""
ERRORS = {503: "ServerBusy", 409: "BlobBeingRehydrated"}
"""What the service answers when it is busy, and when a blob of the archive tier is not back yet."""
CONFLICTS = 3
"""Reads that are answered 409: each may end a run."""
OF_ONE_CONNECTION = ("connection", "keep-alive", "transfer-encoding", "content-length", "date", "server")


class Proxy(ThreadingHTTPServer):
    """Passes requests to a blob service on this machine, and hurts one of `every` of them, by the dice; 0: none."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, port: int, dice: Random) -> None:
        super().__init__(("127.0.0.1", 0), Passing)
        self.behind, self.dice = port, dice
        self.every, self.how, self.hit = 0, "", 0
        self.conflicts = CONFLICTS
        self._lock = threading.Lock()

    def hurts(self) -> bool:
        """Whether the next request is hurt; counts those that are."""
        with self._lock:
            hurt = bool(self.every) and self.dice.randrange(self.every) == 0
            self.hit += hurt
            return hurt

    def status(self, command: str) -> int:
        """What a request that is refused is answered: 503, which passes, or of a few reads 409, which ends the run."""
        with self._lock:
            if command != "GET" or not self.conflicts or self.dice.random() < 0.5:
                return 503
            self.conflicts -= 1
            return 409

    def handle_error(self, *_: object) -> None:
        """A client that is gone is no news."""


class Passing(BaseHTTPRequestHandler):
    """One connection of a client."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Proxy

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        how = self.server.how if self.server.hurts() else ""
        if how == "refused":
            self.refuse(self.server.status(self.command))
            return
        if how == "lost" and self.server.dice.random() < 0.5:  # the service never sees it
            self.close_connection = True
            return
        if how == "slow":
            time.sleep(1.0)
        self.pass_on(body, lost=how == "lost")

    do_PUT = do_POST = do_DELETE = do_HEAD = do_GET  # noqa: N815

    def refuse(self, status: int) -> None:
        code = ERRORS[status]
        body = f'<?xml version="1.0" encoding="utf-8"?><Error><Code>{code}</Code><Message>{code}</Message></Error>'.encode()
        self.send_response(status)
        for name, value in {
            "x-ms-error-code": code,
            "Content-Type": "application/xml",
            "Content-Length": len(body),
        }.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else body)

    def pass_on(self, body: bytes, *, lost: bool) -> None:
        """Answer as the service does; `lost`: it has done it, and half of the answer comes."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.behind, timeout=RESTART_SECONDS)
        headers = {name: value for name, value in self.headers.items() if name.lower() != "connection"}
        connection.request(self.command, self.path, body or None, headers)
        answer = connection.getresponse()
        data = answer.read()
        size = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(data))
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in OF_ONE_CONNECTION:
                self.send_header(name, value)
        if size is not None and answer.status not in (204, 304):
            self.send_header("Content-Length", size)
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if lost else data)
        self.close_connection = lost
        connection.close()

    def log_message(self, *_: object) -> None:
        """Nothing is logged."""


@contextmanager
def store_behind_a_proxy(folder: Path, dice: Random) -> Iterator[Proxy]:
    """Azurite with its files in a folder, and the proxy before it. Raises NotSeen when it does not start."""
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [
        AZURITE,
        "--blobHost",
        "127.0.0.1",
        "--blobPort",
        str(port),
        "--location",
        str(folder),
        "--skipApiVersionCheck",
    ]
    with open(folder / "azurite.log", "wb") as log:
        azurite = subprocess.Popen(
            [*words, "--disableTelemetry"],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=die_with_parent,
        )
    try:
        deadline = time.monotonic() + RESTART_SECONDS
        while not listens(port):
            if time.monotonic() > deadline or azurite.poll() is not None:
                raise NotSeen(f"Azurite did not start: see {folder / 'azurite.log'}")
            time.sleep(0.1)
        with serving(Proxy(port, dice)) as proxy:
            yield proxy
    finally:
        azurite.kill()
        azurite.wait()


def listens(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


class StoreRefuses(Fault):
    name = "store-refuses"
    what = (
        "A store in Azure answers every eighth request with 503, and three reads with 409 (an Azurite behind a proxy)."
    )
    promise = (
        "The same command, run again where it ends with an error, comes to the same numbers, and every byte verifies."
    )
    page = "storage.md"
    quick = False
    how: ClassVar[str] = "refused"
    every: ClassVar[int] = 8
    most_runs: ClassVar[int] = CONFLICTS + 1

    def impossible(self, scene: Scene) -> str:
        if shutil.which(AZURITE):
            return ""
        return f"there is no {AZURITE} on PATH, which stands for Azure's store: npm install --global azurite"

    def inject(self, scene: Scene) -> None:
        folder = scene.home.parent / self.name
        with store_behind_a_proxy(folder, scene.random) as proxy:
            address = f"http://127.0.0.1:{proxy.server_port}/{ACCOUNT}"
            text = f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={address};"
            self.twin = scene.twin(f"{self.name}-home", publish=False, environment={"REHEARSAL_STORE": text})
            self.twin.home.mkdir()
            store = {
                "uri": f"az://{ACCOUNT}/rehearsal/home",
                "credential": "connection_string",
                "secret": "env:REHEARSAL_STORE",
            }
            # A container is made by its owner: of Azurite anybody who signs with its key is.
            make_container(proxy.server_port)
            (self.twin.home / "stores.yaml").write_text(json.dumps({"use": "cloud", "stores": {"cloud": store}}))
            self.twin.publish()
            proxy.how, proxy.every = self.how, self.every
            scene.mark("injected", f"one of {self.every} requests is {self.how}")
            self.answers = list(self.runs())
            self.hit, proxy.every = proxy.hit, 0
            scene.mark("recovered", f"the training has ended; {self.hit} requests were {self.how}")
            self.verified = self.twin.run("verify")
            self.twin.close()

    def runs(self) -> Iterator[Answer]:
        """The same command until it ends well, a few times at most."""
        for _ in range(self.most_runs):
            answer = self.twin.run(*self.twin.training_words(self.name))
            yield answer
            if not answer.code:
                return

    def expect(self, scene: Scene) -> Iterator[Check]:
        yield check("requests that were hurt", self.hit, "> 0", self.hit > 0)
        codes = ", ".join(str(answer.code) for answer in self.answers)
        clear = all(answer.code in (0, 2, 4, 6) for answer in self.answers)
        yield check("exit codes of the runs", codes, "0, or that of an error with a remedy: 2, 4, 6", clear)
        yield exits(self.answers[-1], 0)
        folder = Path((self.answers[-1].stage("train").get("job") or {}).get("folder", ""))
        yield equal_losses(scene, folder)
        yield check("every byte in the store", self.verified.summary(), "exit code 0", self.verified.code == 0)


class StoreLost(StoreRefuses):
    name = "store-lost"
    what = "Every eighth request to a store in Azure is lost on its way, or its answer breaks off (an Azurite behind a proxy)."
    how = "lost"


class StoreSlow(StoreRefuses):
    name = "store-slow"
    what = "Every third answer of a store in Azure comes a second late (an Azurite behind a proxy)."
    promise = "The run ends well at the first try, with the same numbers, and every byte verifies."
    how = "slow"
    every = 3
    most_runs = 1


def make_container(port: int) -> None:
    """Create the container of the rehearsal, signed with Azurite's key. Raises NotSeen."""
    target = f"/{ACCOUNT}/rehearsal"
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-12-02", "Content-Length": "0"}
    lines = ["PUT", *[""] * 11, *(f"{name}:{headers[name]}" for name in ("x-ms-date", "x-ms-version"))]
    text = "\n".join([*lines, f"/{ACCOUNT}{target}", "restype:container"])
    code = base64.b64encode(hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()).decode()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=RESTART_SECONDS)
    connection.request(
        "PUT", f"{target}?restype=container", headers={**headers, "Authorization": f"SharedKey {ACCOUNT}:{code}"}
    )
    answer = connection.getresponse()
    if answer.status != 201:
        raise NotSeen(f"Azurite answered {answer.status} when a container was to be made: {answer.read(300)!r}")


class WebhookForged(Fault):
    name = "webhook-forged"
    what = "Events are posted to the webhook without a signature, with one of another key, an old one, and a right one twice."
    promise = "Each is refused with 401 but the right one, once; nothing else comes into the ledger of events."
    page = "webhook.md"
    quick = False

    def inject(self, scene: Scene) -> None:
        self.key = secrets.token_hex(32)
        settings = scene.home.parent / "platform.yaml"
        settings.write_text(json.dumps({"events": {"webhook": {"hmac": "env:REHEARSAL_HOOK"}}}))
        scene.environment["REHEARSAL_HOOK"] = self.key
        scene.ok("up", "--detach", "--config", settings)
        record = scene.home / "events" / "webhook.json"
        self.url = scene.until(
            "the webhook's address", lambda: (read_json(record) or {}).get("url"), 2 * RESTART_SECONDS
        )
        now = int(time.time())
        right = (self.key, now)
        sent = {"none": None, "other-key": (secrets.token_hex(32), now), "old": (self.key, now - 86400), "right": right}
        scene.mark("injected", f"{len(sent) + 1} requests")
        self.codes = {name: self.post(name, signed) for name, signed in sent.items()}
        self.codes["again"] = self.post("right", right)
        scene.mark("noticed", f"answered with {', '.join(map(str, self.codes.values()))}")
        self.taken = [one for one in scene.ok("events").fields["events"] if one["status"] != "refused"]

    def post(self, name: str, signed: tuple[str, int] | None) -> int:
        """The status that an event is answered with; `signed` is the key and the time of its signature."""
        event = {"specversion": "1.0", "id": name, "source": "/rehearsal", "type": "headway.dataset.published"}
        event |= {"subject": f"dataset/{DATASET}", "time": "2026-01-01T00:00:00Z"}
        body = json.dumps({**event, "data": {"object": f"dataset/{DATASET}@{0:064x}"}}).encode()
        headers = {"Content-Type": "application/cloudevents+json"}
        if signed:
            key, stamp = signed
            code = hmac.new(key.encode(), f"{stamp}.".encode() + body, hashlib.sha256).hexdigest()
            headers["X-Headway-Signature"] = f"t={stamp},v1={code}"
        where = urlsplit(self.url)
        connection = http.client.HTTPConnection(where.netloc, timeout=RESTART_SECONDS)
        connection.request("POST", where.path, body, headers)
        status = connection.getresponse().status
        connection.close()
        return status

    def expect(self, scene: Scene) -> Iterator[Check]:
        for name, code in self.codes.items():
            limit = "200 to 299" if name == "right" else "401"
            good = 200 <= code < 300 if name == "right" else code == 401
            yield check(f"the request {name!r}", code, limit, good)
        yield check("events in the ledger", len(self.taken), "1", len(self.taken) == 1)

    def undo(self, scene: Scene) -> None:
        scene.ok("down", "--yes")
        scene.environment.pop("REHEARSAL_HOOK", None)
