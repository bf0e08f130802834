"""An endpoint with plain servers behind the real gateway, its traffic, and clients that ask it without a pause."""

import http.client
import json
import threading
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import plain_server
from waiting import limit, until

from tasks.common import process
from tasks.serving.client import ready_state
from tasks.serving.gateway import Gateway
from tasks.serving.journal import Journal
from tasks.serving.local.rollout import LocalTraffic
from tasks.serving.servers import free_port, servers_of

BLUE, GREEN = "model/tiny@blue", "model/tiny@green"


def ask(port, body=None, *, path="/v1/completions", method="POST", headers=None, timeout=None):
    """Status, headers and body of one request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout or limit(20))
    try:
        sent = None if body is None else json.dumps(body)
        connection.request(method, path, sent, {"Content-Type": "application/json", **(headers or {})})
        reply = connection.getresponse()
        return reply.status, dict(reply.getheaders()), reply.read()
    finally:
        connection.close()


class Clients:
    """Threads that ask at a rate; what they got, by model or by what went wrong."""

    def __init__(self, port, *, rate=50.0, threads=4):
        self.port, self.pause = port, threads / rate
        self.got, self.failed, self.slowest = Counter(), [], 0.0
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(threads)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self):
        while not self._stop.wait(self.pause):
            began = time.monotonic()
            try:
                status, _, body = ask(self.port, {"prompt": "a", "max_tokens": 4}, timeout=limit(30))
                if status == 200:
                    self.got[json.loads(body)["model"]] += 1
                else:
                    self.failed.append((status, body[:200]))
            except (OSError, http.client.HTTPException, ValueError) as error:
                self.failed.append((0, repr(error)))
            self.slowest = max(self.slowest, time.monotonic() - began)


class Endpoint:
    """A folder of an endpoint, as tasks/serving/local/endpoint.py keeps it."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.journal, self.gateway = Journal(folder / "journal.jsonl"), Gateway(folder)
        self._ports = ExitStack()
        self.port = self.new_port()
        self.config = {"keep_warm_seconds": 300.0, "max_error_share": 0.02, "gateway": {}}

    def new_port(self):
        return self._ports.enter_context(free_port())

    def server(self, colour, ref, *, name="", **how):
        """Start a server; its record."""
        record = plain_server.start(self.folder, name or colour, ref, port=self.new_port(), **how)
        port = process.read_json(Path(record["folder"]) / "serve.json")["port"]
        until(lambda: ready_state(f"http://127.0.0.1:{port}"))
        return {"name": "a", "port": self.port, "url": f"http://127.0.0.1:{self.port}", "colour": colour, **record}

    def serve(self, **how):
        """Blue in service."""
        record = self.server("blue", BLUE, **how)
        traffic = LocalTraffic(self.folder, {"blue": None, "green": record, "config": self.config})
        traffic.set_traffic({"blue": 0, "green": 100})
        traffic.promote()
        return process.read_json(self.folder / "endpoint.json")

    def beside(self, **how):
        """Green beside it, as a change of the journal; its traffic."""
        before = process.read_json(self.folder / "endpoint.json")
        green = self.server("green", GREEN, **how)
        self.journal.begin(what="deploy", blue=before, green=green, config=self.config)
        return self.traffic()

    def traffic(self):
        return LocalTraffic(self.folder, self.journal.open_change().begun)

    def behave(self, name, **how):
        process.write_json(self.folder / "servers" / name / "behave.json", how)

    def asked(self, name):
        """Whose requests a server answered."""
        path = self.folder / "servers" / name / "asked.txt"
        return Counter(path.read_text().split()) if path.exists() else Counter()

    def stop(self):
        self.gateway.stop()
        for folder in servers_of(self.folder):
            process.stop(folder)
        self._ports.close()
