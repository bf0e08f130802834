"""An endpoint on this machine: supervised server processes on loopback, one of them in service.

`ROOT/NAME/servers/ID/` is one server's process folder; `ROOT/NAME/endpoint.json` names the one in service and is the
only truth: whatever else runs is a stray of an interrupted deploy, and the next one stops it. The server itself is
tasks/jobs/serve.py; requests are in client.py. Deploys of one endpoint at a time are the caller's business.
"""

from __future__ import annotations

import shutil
import socket
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tasks import process
from tasks.endpoints.client import complete, ready_state
from tasks.endpoints.endpoint import Candidate, Journal, Served, ServedFrom
from tasks.errors import JobFailed
from tasks.process import ProcessSpec, read_json, write_json

HOST = "127.0.0.1"
LOG = "server.log"
RESTARTS = 5
STEADY_SECONDS = 10.0
GRACE_SECONDS = 20.0
SWITCH_SECONDS = 15.0
POLL_SECONDS = 0.05
LOG_TAIL_LINES = 15


class LocalEndpoint:
    """The local ServingEndpoint. All state is in the folder; two objects of one name are the same endpoint."""

    def __init__(self, root: Path, name: str) -> None:
        self.name = name
        self.folder = root.absolute() / name
        self._record = self.folder / "endpoint.json"

    def observe(self) -> Served | None:
        """What is served now; None when no server runs."""
        record = read_json(self._record)
        if not record or not _runs(Path(record["folder"])):
            return None
        state = ready_state(record["url"]) or {}
        ready = bool(state.get("ready")) and state.get("server") == Path(record["folder"]).name
        model_ref = str(state["model"] if ready else record["model_ref"])
        return Served(name=self.name, model_ref=model_ref, url=record["url"], port=record["port"], ready=ready)

    def serves_from(self) -> ServedFrom | None:
        """See ServingEndpoint.serves_from."""
        record = read_json(self._record)
        started = read_json(Path(record["folder"]) / "serve.json") if record else None
        if not started:
            return None
        return ServedFrom(
            model_ref=str(record["model_ref"]),
            folder=Path(started["model_folder"]),
            files=tuple(started.get("files", ())),
            running=_runs(Path(record["folder"])),
        )

    def start(
        self,
        model_folder: Path,
        model_ref: str,
        *,
        files: Sequence[Mapping[str, Any]],
        golden: Mapping[str, Any],
        timeout: float,
        port: int | None = None,
        threads: int = 1,
        journal: Journal | None = None,
    ) -> Candidate:
        """See ServingEndpoint.start."""
        self._stop_strays()
        self._require_port(port)
        server = uuid.uuid4().hex[:8]
        folder = self.folder / "servers" / server
        _tell(journal, "starting", server=server, model_ref=model_ref, folder=str(folder))
        with _free_port() as private_port:
            settings = {
                "model_folder": str(model_folder.absolute()),
                "model_ref": model_ref,
                "files": [dict(file) for file in files],
                "threads": threads,
                "outputs": str(outputs_of(self.folder, model_ref)),
            }
            write_json(folder / "serve.json", {**settings, "port": private_port})
            process.start(folder, _spec(folder))
            candidate = Candidate(self.name, server, folder, model_ref, private_port, port)
            with _stopping_on_failure(folder):
                _await_ready(candidate, timeout=timeout)
                _tell(journal, "answering", server=server, prompts=len(golden["prompts"]))
                _ask_golden(candidate, golden)
        return candidate

    def switch(self, candidate: Candidate, *, journal: Journal | None = None) -> Served:
        """See ServingEndpoint.switch. Raises JobFailed when the candidate does not take the port; the old one stays."""
        before = read_json(self._record) or {}
        port = self._public_port(candidate, before)
        self._require_port(port)
        url = f"http://{HOST}:{port}"
        _tell(journal, "switched", server=candidate.server, model_ref=candidate.model_ref, port=port)
        with _stopping_on_failure(candidate.folder):
            write_json(candidate.folder / "public.json", {"port": port})
            _await_taken(candidate, url)
        record = {"name": self.name, "port": port, "url": url, "model_ref": candidate.model_ref}
        write_json(self._record, {**record, "folder": str(candidate.folder), "since": time.time()})
        if before and _runs(Path(before["folder"])):
            _tell(journal, "stopped", server=Path(before["folder"]).name, model_ref=before["model_ref"])
        self._stop_strays()
        return Served(name=self.name, model_ref=candidate.model_ref, url=url, port=port, ready=True)

    def stop(self, *, journal: Journal | None = None) -> None:
        """See ServingEndpoint.stop."""
        record = read_json(self._record) or {}
        if record:
            _tell(journal, "stopped", server=Path(record["folder"]).name, model_ref=record["model_ref"])
        for folder in self._servers():
            process.stop(folder, timeout=GRACE_SECONDS + 10)

    def _servers(self) -> list[Path]:
        return sorted(path for path in (self.folder / "servers").glob("*") if path.is_dir())

    def _stop_strays(self) -> None:
        """Stop and remove every server that endpoint.json does not name."""
        in_service = (read_json(self._record) or {}).get("folder")
        for folder in self._servers():
            if str(folder) != in_service:
                process.stop(folder, timeout=GRACE_SECONDS + 10)
                shutil.rmtree(folder)

    def _public_port(self, candidate: Candidate, before: Mapping[str, Any]) -> int:
        if candidate.public_port or before:
            return int(candidate.public_port or before["port"])
        with _free_port() as port:
            return port

    def _require_port(self, port: int | None) -> None:
        """A port that is asked for must be free, or be this endpoint's own."""
        record = read_json(self._record)
        ours = record and record["port"] == port and _runs(Path(record["folder"]))
        if port is not None and not ours:
            port_free(port)


def outputs_of(endpoint: Path, model_ref: str) -> Path:
    """Where an endpoint's servers write what they measure of a model's answers. Not in a server's folder: that goes with it."""
    return endpoint / "outputs" / model_ref.rpartition("@")[2]


def port_free(port: int) -> None:
    """Raise ValueError when a port of loopback cannot be listened on, naming it and the remedy."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise ValueError(
                f"port {port} of {HOST} cannot be used: {error.strerror}. Stop what listens there, set deployment.port "
                f"to another port, or leave it empty for a free one."
            ) from error


@contextmanager
def _free_port() -> Iterator[int]:
    """A port that nobody else is given while this holds: it is bound but does not listen, and our servers share it."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((HOST, 0))
        yield int(holder.getsockname()[1])


def _spec(folder: Path) -> ProcessSpec:
    return ProcessSpec(
        argv=[sys.executable, "-m", "tasks.jobs.serve"],
        env={"HEADWAY_SERVE": str(folder)},
        secrets=(),
        log=LOG,
        fatal="errors",
        restarts=RESTARTS,
        steady=STEADY_SECONDS,
        grace=GRACE_SECONDS,
    )


def _runs(folder: Path) -> bool:
    return process.alive(read_json(folder / "handle.json"))


def _await_ready(candidate: Candidate, *, timeout: float) -> None:
    """Wait for the candidate's own golden prompt; a crash ends the wait, whatever its parent would still try."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        state = ready_state(f"http://{HOST}:{candidate.private_port}")
        if state and state.get("ready"):
            return
        if state and state.get("reason"):
            raise _failed(candidate, f"will not get ready: {state['reason']}")
        attempts = (read_json(candidate.folder / "attempts.json") or {}).get("attempts", 0)
        if attempts > 1 or not _runs(candidate.folder):
            raise _failed(candidate, f"ended while it was starting:\n{_log_tail(candidate.folder)}")
        time.sleep(POLL_SECONDS)
    raise _failed(candidate, f"was not ready within {timeout:g} s:\n{_log_tail(candidate.folder)}", "timeout")


def _ask_golden(candidate: Candidate, golden: Mapping[str, Any]) -> None:
    """Compare the candidate's answers over HTTP with the golden ones; JobFailed names the first that differs."""
    url = f"http://{HOST}:{candidate.private_port}"
    for entry in golden["prompts"]:
        said = complete(url, entry["prompt"], max_tokens=len(entry["tokens"]))
        got, count = said["choices"][0]["text"], said["usage"]["completion_tokens"]
        if (got, count, said["model"]) != (entry["completion"], len(entry["tokens"]), candidate.model_ref):
            raise _failed(
                candidate,
                f"answered the golden prompt {entry['prompt']!r} with {got!r} ({count} tokens, model {said['model']}); "
                f"expected {entry['completion']!r} ({len(entry['tokens'])} tokens)",
            )


def _await_taken(candidate: Candidate, url: str) -> None:
    """Wait until it is the candidate that answers on the public port."""
    deadline = time.monotonic() + SWITCH_SECONDS
    while time.monotonic() < deadline:
        state = ready_state(url)
        if state and state.get("ready") and state.get("server") == candidate.server:
            return
        time.sleep(POLL_SECONDS)
    raise _failed(candidate, f"did not take over {url} within {SWITCH_SECONDS:g} s:\n{_log_tail(candidate.folder)}")


@contextmanager
def _stopping_on_failure(folder: Path) -> Iterator[None]:
    """Leave no server behind that did not prove itself; its folder and log stay until the next deploy."""
    with ExitStack() as undo:
        undo.callback(process.stop, folder, timeout=GRACE_SECONDS + 10)
        yield
        undo.pop_all()


def _failed(candidate: Candidate, said: str, failure: str = "infrastructure") -> JobFailed:
    return JobFailed(
        f"the new server of endpoint {candidate.name} for {candidate.model_ref} {said}",
        failure=failure,
        folder=str(candidate.folder),
        remedy=f"The endpoint serves what it served before. See {candidate.folder / LOG}.",
    )


def _log_tail(folder: Path) -> str:
    log = folder / LOG
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]) if log.exists() else ""


def _tell(journal: Journal | None, event: str, **details: Any) -> None:
    if journal is not None:
        journal(event, details)
