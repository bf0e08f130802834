"""The servers of an endpoint on this machine: start one beside those in service, have it prove itself, stop it.

`ENDPOINT/servers/ID/` is one server's process folder. Which of them gets requests is routes.json's and the gateway's business;
the server itself is tasks/jobs/serve.py.
"""

from __future__ import annotations

import shutil
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tasks.common import process
from tasks.common.errors import GateFailed, JobFailed
from tasks.common.process import ProcessSpec, read_json
from tasks.serving.client import Sampling, complete, post, ready_state
from tasks.serving.endpoint import Candidate
from tasks.serving.journal import Journal
from tasks.serving.protocol.routes import read_secret
from tasks.serving.vllm import golden_question, wrong_golden

HOST = "127.0.0.1"
LOG = "server.log"
RESTARTS = 5
STEADY_SECONDS = 10.0
GRACE_SECONDS = 20.0
POLL_SECONDS = 0.05
LOG_TAIL_LINES = 15
READ_BYTES_PER_SECOND = 100e6
"""What a model is at least read, hashed and loaded with, all three together."""


def spec_of(folder: Path) -> ProcessSpec:
    """What runs in a server's folder."""
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


def runs(folder: Path) -> bool:
    """Whether the parent of a process folder is there; it starts what crashed again."""
    return process.alive(read_json(folder / "handle.json"))


def port_of(folder: Path) -> int:
    """The private port of a server."""
    return int(read_json(folder / "serve.json")["port"])


def servers_of(endpoint: Path) -> list[Path]:
    """The folders of all servers that there are, those of copies too."""
    return sorted(path for path in (endpoint / "servers").glob("*") if path.is_dir())


def stop_server(folder: Path) -> None:
    """Stop a server and all copies that the gateway made of it; what they have begun, they finish."""
    copies = [one for one in folder.parent.glob("*") if copy_of(one) == folder.name]
    for one in (folder, *copies):
        process.stop(one, timeout=GRACE_SECONDS + 10)


def rungs_before(endpoint: Path) -> set[str]:
    """References of the models that answer for another one when that cannot: those which an endpoint served before it."""
    started = [read_json(folder / "serve.json") or {} for folder in servers_of(endpoint) if runs(folder)]
    return {str(rung["model_ref"]) for one in started for rung in one.get("ladder", ()) if rung["name"] == "previous"}


def barring(endpoint: Path, model_ref: str) -> Path:
    """The file that keeps a model from answering for another one, while it is there."""
    return endpoint / "barred" / model_ref.rpartition("@")[2]


def copy_of(folder: Path) -> str:
    """The server that this one is a copy of; empty: none."""
    return str((read_json(folder / "serve.json") or {}).get("replica_of", ""))


def stop_strays(endpoint: Path, kept: Collection[str]) -> None:
    """Stop and remove every server whose folder is not kept, and that is no copy of one."""
    names = {Path(folder).name for folder in kept}
    for folder in servers_of(endpoint):
        if not names & {folder.name, copy_of(folder)}:
            process.stop(folder, timeout=GRACE_SECONDS + 10)
            shutil.rmtree(folder, ignore_errors=True)


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
def free_port() -> Iterator[int]:
    """A port that nobody else is given while this holds: it is bound but does not listen, and our servers share it."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((HOST, 0))
        yield int(holder.getsockname()[1])


def ask_back(endpoint: Path) -> str:
    """Why somebody wants the change that is open now to be taken back; empty: nobody does. What was said of another is over."""
    output = read_json(endpoint / "abort.json")
    change = Journal(endpoint / "journal.jsonl").open_change() if output else None
    return str(output["reason"]) if output and change and output.get("change") == change.begun["time"] else ""


def start_limit(files: Iterable[Mapping[str, Any]] | None, *, patience: float) -> float:
    """Seconds in which a server must be ready: `patience`, and what reading the model's files takes beyond that."""
    return patience + sum(int(file["size"]) for file in files or ()) / READ_BYTES_PER_SECOND


def await_ready(
    candidate: Candidate, *, timeout: float, again: bool = False, asked_back: Callable[[], str] = str
) -> None:
    """Wait for the candidate's own golden prompt; a crash ends the wait, whatever its parent would still try.

    `again`: it ran before, so one more start is no crash.
    """
    deadline = time.monotonic() + timeout
    before = int((read_json(candidate.folder / "attempts.json") or {}).get("attempts", 0))
    while time.monotonic() < deadline:
        state = ready_state(f"http://{HOST}:{candidate.private_port}")
        if state and state.get("ready"):
            return
        if state and state.get("reason"):
            raise failed(candidate, f"will not get ready: {state['reason']}")
        attempts = (read_json(candidate.folder / "attempts.json") or {}).get("attempts", 0)
        if attempts > max(before + again, 1) or not runs(candidate.folder):
            raise failed(candidate, f"ended while it was starting:\n{_log_tail(candidate.folder)}")
        if why := asked_back():
            raise withdrawn(candidate, why)
        time.sleep(POLL_SECONDS)
    raise failed(candidate, f"was not ready within {timeout:g} s:\n{_log_tail(candidate.folder)}", "timeout")


def ask_golden(candidate: Candidate, golden: Mapping[str, Any]) -> None:
    """Compare the candidate's answers over HTTP with the golden ones; JobFailed names the first that differs."""
    url = f"http://{HOST}:{candidate.private_port}"
    started = read_json(candidate.folder / "serve.json") or {}
    secret = read_secret(started.get("secret"))
    if vllm := started.get("vllm"):
        for entry in golden["prompts"]:
            reply = post(f"{url}/v1/completions", golden_question(entry, candidate.model_ref), secret=secret)
            if wrong := wrong_golden(entry, reply, most=float(vllm["max_logprob_error"])):
                raise failed(candidate, wrong)
        return
    for entry in golden["prompts"]:
        output = complete(url, entry["prompt"], Sampling(len(entry["tokens"])), secret=secret)
        got, count = output["choices"][0]["text"], output["usage"]["completion_tokens"]
        if (got, count, output["model"]) != (entry["completion"], len(entry["tokens"]), candidate.model_ref):
            raise failed(
                candidate,
                f"answered the golden prompt {entry['prompt']!r} with {got!r} ({count} tokens, model {output['model']}); "
                f"expected {entry['completion']!r} ({len(entry['tokens'])} tokens)",
            )


@contextmanager
def stopping_on_failure(folder: Path) -> Iterator[None]:
    """Leave no server behind that did not prove itself; its folder and log stay until the next deploy."""
    with ExitStack() as undo:
        undo.callback(process.stop, folder, timeout=GRACE_SECONDS + 10)
        yield
        undo.pop_all()


def failed(candidate: Candidate, text: str, failure: str = "infrastructure") -> JobFailed:
    """What a deploy says of a server that does not do."""
    return JobFailed(
        f"the new server of endpoint {candidate.name} for {candidate.model_ref} {text}",
        failure=failure,
        folder=str(candidate.folder),
        remedy=f"The endpoint serves what it served before. See {candidate.folder / LOG}.",
    )


def withdrawn(candidate: Candidate, why: str) -> GateFailed:
    """What a deploy says when somebody took it back while it was under way."""
    return GateFailed(
        f"the deploy of {candidate.model_ref} to endpoint {candidate.name} was taken back: {why}",
        stage="deploy",
        checks=[{"name": "rollback", "measured": why, "limit": "nobody takes it back"}],
        remedy="The endpoint serves what it served before.",
    )


def _log_tail(folder: Path) -> str:
    log = folder / LOG
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]) if log.exists() else ""
