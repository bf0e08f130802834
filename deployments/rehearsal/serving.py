"""Faults of what is served: servers that die, overload, bad new models, keys, changed weights."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from deployments.rehearsal.fault import RESTART_SECONDS, Fault, check, exits, flip, plant, rewrite, unplant
from deployments.rehearsal.scene import (
    NotSeen,
    Scene,
    below,
    kill_all,
    parent_of,
)
from tasks.artifacts import Check
from tasks.common.process import read_json
from tasks.serving.client import Sampling, complete, ready_state

NO_ANSWER = 0
"""Among the statuses of answers: none came."""


class Clients:
    """Requests to an endpoint, one after the other in each of some threads, and with which status they were answered."""

    def __init__(self, url: str, *, threads: int, tokens: int, pause: float) -> None:
        self.url, self.tokens, self.pause = url, tokens, pause
        self.codes = Counter[int]()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(threads)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        body = json.dumps({"prompt": "a", "max_tokens": self.tokens})
        host = self.url.removeprefix("http://")
        while not self._stop.is_set():
            connection = http.client.HTTPConnection(host, timeout=RESTART_SECONDS)
            try:
                connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
                reply = connection.getresponse()
                reply.read()
                self.codes[reply.status] += 1
            except (OSError, http.client.HTTPException):
                self.codes[NO_ANSWER] += 1
            finally:
                connection.close()
            self._stop.wait(self.pause)

    @property
    def failed(self) -> int:
        """Requests that were neither answered, nor refused for now."""
        return sum(count for code, count in self.codes.items() if code not in (200, 429, 503))

    def summary(self) -> str:
        """How many requests had which answer."""
        parts = (f"{count} × {code or 'no answer'}" for code, count in sorted(self.codes.items()))
        return ", ".join(parts) or "none asked"


class ServerKilled(Fault):
    name = "server-killed"
    what = "The server of the model behind the endpoint is killed with SIGKILL while clients ask."
    promise = "Its parent starts it again; requests meanwhile are answered late, or with 503 and a time to try again."
    threads = 2

    def inject(self, scene: Scene) -> None:
        record = read_json(scene.endpoint_folder / "endpoint.json")
        parent = parent_of(Path(record["folder"]) / "handle.json")
        if not parent:
            raise NotSeen("no server of the endpoint runs")
        with Clients(scene.url, threads=self.threads, tokens=4, pause=0.05) as self.clients:
            scene.until("answers before the fault", lambda: self.clients.codes[200] > 5)
            kill_all(below(parent))
            began = scene.mark("injected", "the server is killed")
            time.sleep(0.5)
            scene.until(
                "the endpoint to be ready", lambda: (ready_state(scene.url) or {}).get("ready"), RESTART_SECONDS
            )
            self.seconds = scene.mark("recovered", "the endpoint is ready") - began
            answered = self.clients.codes[200]
            scene.until("answers after the fault", lambda: self.clients.codes[200] > answered + 5, RESTART_SECONDS)

    def expect(self, scene: Scene) -> Iterator[Check]:
        yield check(
            "seconds until it is ready",
            round(self.seconds, 1),
            f"<= {RESTART_SECONDS:.0f}",
            self.seconds <= RESTART_SECONDS,
        )
        limit = f"<= {self.threads} without an answer, those that the server had in hand"
        yield check("requests", self.clients.summary(), limit, self.clients.failed <= self.threads)


class Overload(Fault):
    name = "overload"
    what = "Far more clients ask the endpoint at once than it takes: 48, without a pause, for some seconds."
    promise = (
        "Each is answered, or refused at once with 429 or 503; nothing crashes, and afterwards it answers as before."
    )
    page = "endpoint.md"

    def inject(self, scene: Scene) -> None:
        self.before = complete(scene.url, "def ", Sampling(max_tokens=8))["choices"][0]["text"]
        with Clients(scene.url, threads=48, tokens=32, pause=0.0) as self.clients:
            scene.mark("injected", "48 clients ask")
            time.sleep(6.0)
        scene.mark("seen", self.clients.summary())
        self.after = complete(scene.url, "def ", Sampling(max_tokens=8))["choices"][0]["text"]
        scene.mark("recovered", "one asks alone")

    def expect(self, scene: Scene) -> Iterator[Check]:
        codes, refused = self.clients.codes, self.clients.codes[429] + self.clients.codes[503]
        yield check("answers", self.clients.summary(), "200, 429 or 503", codes[200] > 0 and not self.clients.failed)
        yield check("requests that were refused", refused, "> 0: they were too many", refused > 0)
        yield check("the same answer afterwards", self.after, self.before, self.after == self.before)


class CanaryFails(Fault):
    name = "canary-fails"
    what = "A new model takes over the traffic step by step, and its server is killed whenever it runs."
    promise = (
        "The old model answers its requests, the traffic goes back, the run ends with exit code 3, the champion stays."
    )
    page = "rollout.md"
    quick = False
    harm: ClassVar[str] = "the new model's server is killed, again and again,"
    step_requests: ClassVar[int] = 20

    def inject(self, scene: Scene) -> None:
        self.before = scene.served()
        servers = scene.endpoint_folder / "servers"
        old = set(servers.glob("*"))
        settings = {
            "training.seed": scene.random.randrange(10**6),  # another model
            "comparison.max_loss_to_champion": 1.0,  # which may be a worse one
            "deployment.rollout.step_requests": self.step_requests,
            "deployment.rollout.step_seconds": 60,
        }
        words = (word for name, value in settings.items() for word in ("--set", f"{name}={value}"))
        with Clients(scene.url, threads=4, tokens=4, pause=0.05) as self.clients:
            command = scene.start("retrain", *scene.words, *words)
            scene.until(
                "a server of the new model", lambda: command.has_ended() or bool(set(servers.glob("*")) - old), 900.0
            )
            if command.has_ended():
                raise NotSeen(f"the run ended before a new model was deployed, with {command.answer().summary()}")
            (new,) = set(servers.glob("*")) - old
            scene.until("traffic to the new model", lambda: share_of(scene, new) > 0 or command.has_ended())
            scene.mark("injected", f"{self.harm} with {share_of(scene, new)} % of the traffic")
            while not command.has_ended():
                self.hurt(parent_of(new / "handle.json"))
            self.answer = command.answer()
            scene.mark("noticed", f"the run ended with exit code {self.answer.code}")
        self.after = scene.served()

    def hurt(self, parent: int) -> None:
        if parent:
            kill_all(below(parent))
        time.sleep(0.1)

    def expect(self, scene: Scene) -> Iterator[Check]:
        yield exits(self.answer, 3)
        stopped = (self.answer.fields.get("error") or {}).get("stage")
        yield check("the gate", str(stopped), "deploy", stopped == "deploy")
        yield check("champion and endpoint", self.after, self.before, self.after == self.before)
        yield check("requests that failed", self.clients.summary(), "none", not self.clients.failed)


class CanarySlow(CanaryFails):
    name = "canary-slow"
    what = "A new model takes over the traffic step by step, and its server is stopped four fifths of the time."
    harm = "the new model's server gets a fifth of its time,"

    def hurt(self, parent: int) -> None:
        for number, seconds in ((signal.SIGSTOP, 0.4), (signal.SIGCONT, 0.1)):
            for pid in below(parent) if parent else ():
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            time.sleep(seconds)


class CanaryWrong(CanaryFails):
    name = "canary-wrong"
    what = "A new model takes over the traffic, and from then on its process answers garbage (a planted `sitecustomize.py`)."
    promise = "Its answers are seen to differ from the old model's; traffic goes back, exit code 3, the champion stays."
    harm = "the new model's answers become wrong,"
    step_requests = 200  # answers are compared when there are enough of them

    def impossible(self, scene: Scene) -> str:
        record = read_json(scene.endpoint_folder / "endpoint.json") or {}
        if any((scene.folder_of(record.get("model_ref", "")) / "files").rglob("*.onnx*")):
            return ""
        return "the endpoint does not serve by ONNX Runtime, whose process would be made to answer garbage"

    def inject(self, scene: Scene) -> None:
        self.folder = scene.home.parent / self.name
        plant(scene, "wrong_answers.py", self.folder)
        super().inject(scene)
        if not (self.folder / "done").exists():
            raise NotSeen("the new model's process answered as ever: it has not become wrong")

    def hurt(self, parent: int) -> None:
        (self.folder / "wrong").touch()
        time.sleep(0.1)

    def expect(self, scene: Scene) -> Iterator[Check]:
        yield from super().expect(scene)
        checks = (self.answer.fields.get("error") or {}).get("checks", [])
        named = [one["name"] for one in checks if "of answers" in one["name"]]
        yield check("what was measured of its answers", ", ".join(named) or "nothing", "one at least", bool(named))

    def undo(self, scene: Scene) -> None:
        unplant(scene)
        (self.folder / "wrong").unlink(missing_ok=True)  # a model that was promoted all the same


def share_of(scene: Scene, server: Path) -> int:
    """Per cent of the traffic that goes to a server, by the gateway's routes."""
    routes = read_json(scene.endpoint_folder / "routes.json") or {}
    colours = routes.get("colours", {}).values()
    return next((one["weight"] for one in colours if any(each["server"] == server.name for each in one["servers"])), 0)


class KeyRevoked(Fault):
    name = "key-revoked"
    what = "A client asks with a key of the endpoint that was revoked, and one with a key that never was."
    promise = "Both are refused with 401; a key that is good is answered."
    page = "endpoint.md"

    def inject(self, scene: Scene) -> None:
        self.codes = dict[str, int]()
        keys = dict[str, dict[str, Any]]()
        for name in ("good", "gone"):
            keys[name] = scene.ok(
                "endpoint", "key", "add", scene.endpoint, "--caller", name, "--reason", "rehearsal"
            ).fields
        scene.ok("endpoint", "key", "revoke", scene.endpoint, keys["gone"]["id"], "--reason", "rehearsal")
        scene.mark("injected", "a key is revoked")
        shown = {name: str(fields["key"]) for name, fields in keys.items()}
        for name, key in {**shown, "never": "hw-never-was"}.items():
            self.codes[name] = self.settled(scene, key, good=name == "good")

    def settled(self, scene: Scene, key: str, *, good: bool) -> int:
        """The status that a key is answered with, once it is the right one: the gateway reads keys again within a second."""
        deadline = time.monotonic() + 10.0
        while (status := self.asked(scene, key)) != (200 if good else 401) and time.monotonic() < deadline:
            time.sleep(0.1)
        return status

    def asked(self, scene: Scene, key: str) -> int:
        connection = http.client.HTTPConnection(scene.url.removeprefix("http://"), timeout=30.0)
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        connection.request("POST", "/v1/completions", json.dumps({"prompt": "a", "max_tokens": 1}), headers)
        status = connection.getresponse().status
        connection.close()
        return status

    def expect(self, scene: Scene) -> Iterator[Check]:
        wanted = {"good": 200, "gone": 401, "never": 401}
        for name, code in wanted.items():
            yield check(f"the key {name!r}", self.codes[name], str(code), self.codes[name] == code)


class ModelTampered(Fault):
    name = "model-tampered"
    what = "A bit of the served model's weights flips in the store, and the endpoint is stopped and started again."
    promise = "It does not serve them: the endpoint is not ready until the bytes are those that were signed."
    page = "trust.md"

    def inject(self, scene: Scene) -> None:
        record = read_json(scene.endpoint_folder / "endpoint.json")
        folder = scene.folder_of(record["model_ref"]) / "files"
        self.path = max(folder.rglob("*.onnx*"), key=lambda path: path.stat().st_size)
        self.before = flip(self.path, scene.random)
        scene.mark("injected", f"a bit is flipped in {self.path.name}")
        scene.run("endpoint", "stop", scene.endpoint, "--reason", "rehearsal")
        self.answer = scene.run("retrain", *scene.words)
        scene.mark("noticed", f"`headway retrain` ended with exit code {self.answer.code}")
        self.ready = (ready_state(scene.url) or {}).get("ready")

    def expect(self, scene: Scene) -> Iterator[Check]:
        yield exits(self.answer, 5)
        yield check("the endpoint is ready", str(self.ready), "not", not self.ready)

    def undo(self, scene: Scene) -> None:
        rewrite(self.path, self.before)
        scene.ok("retrain", *scene.words)
