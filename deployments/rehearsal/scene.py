"""The home of a rehearsal: the `headway` command in it, what its runs and jobs have written, and the time line of a fault.

Nothing is imported from the product but readers of its files and what reaches a cluster's machines: everything else happens by
the command line, in processes of its own, as it does in production.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from pathlib import Path
from random import Random
from typing import Any, Literal, TypeVar

import psutil

from tasks.artifacts import Value
from tasks.common.errors import HeadwayError
from tasks.common.process import alive, descendants, process_started, read_json
from tasks.compute import machines_of
from tasks.config.cluster import ClusterConfig
from tasks.serving.client import ready_state

LOOK_SECONDS = 0.01
"""Between two looks at a file that something is waited for in."""
COMMAND_SECONDS, SHOWN_SECONDS = 1800.0, 300.0
"""Longest that a command may take, and that anything else is waited for."""
DATASET = "rehearsal"
EXECUTABLE = Path(sys.executable).with_name("headway")
JOBS = "store/documents/journal/jobs"
"""The journal of submissions, in a home with its own store: TOKEN/NUMBER/intent.json, handle.json and end.json."""
BELOW = "below() { for one in $(cat /proc/$1/task/*/children 2>/dev/null); do echo $one; below $one; done; }"
"""A function of sh that prints the processes that one has started, theirs included."""
Kind = Literal["injected", "noticed", "recovered", "seen"]
Found = TypeVar("Found")
Server = TypeVar("Server", bound=ThreadingHTTPServer)


class NotSeen(HeadwayError):
    """What a fault waits for did not happen: neither passed nor failed by a figure, and so it failed."""

    exit_code = 4


@dataclass(frozen=True)
class Answer:
    """How a command ended: its exit code, the object that it printed with --json, and its seconds."""

    code: int
    fields: dict[str, Any]
    seconds: float
    errors: str

    def stage(self, name: str) -> dict[str, Any]:
        """What became of a stage; empty when the run did not come to it."""
        return next((stage for stage in self.fields.get("stages", ()) if stage["name"] == name), {})

    def summary(self) -> str:
        """The exit code, and the error's first line."""
        error = (self.fields.get("error") or {}).get("message", "") if self.fields else self.errors.strip()[-300:]
        return f"exit code {self.code}" + (f": {str(error).splitlines()[0]}" if error else "")


@dataclass(frozen=True)
class Command:
    """A `headway` command that runs. What it prints goes into files, for nobody reads it meanwhile."""

    process: subprocess.Popen[bytes]
    log: Path
    """What it printed to stdout is beside it, with the suffix `.json`."""
    began: float

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def answer(self, seconds: float = COMMAND_SECONDS) -> Answer:
        """Wait until it has ended."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise NotSeen(f"{self.process.args!r} had not ended after {seconds:.0f} s, and was killed") from None
        took = time.monotonic() - self.began
        printed = self.log.with_suffix(".json").read_text(encoding="utf-8", errors="replace")
        errors = self.log.read_text(encoding="utf-8", errors="replace")
        return Answer(code, json.loads(printed) if printed.strip() else {}, took, errors)

    def kill(self) -> None:
        """SIGKILL: it has no time for anything."""
        self.process.kill()
        self.process.wait()


class Moment(Value):
    """Something on the time line of a fault, in seconds since its beginning."""

    seconds: float
    kind: Kind
    text: str


@dataclass
class Scene:
    """A home with a finished lifecycle, in which one fault after the other is injected.

    `words` are the configuration and the settings of every run, `model` and `endpoint` their names there, `sources` the words
    that publish the dataset, `interval` the steps between two checkpoints, `cluster` where its jobs run. `switch_off` and
    `switch_on` are commands that do that to `{machine}`, `environment` has further variables of commands. `sound` is the
    answer of the lifecycle without a fault.
    """

    home: Path
    words: tuple[str, ...]
    model: str
    endpoint: str
    sources: tuple[str, ...]
    interval: int
    random: Random
    progress: Callable[[str], None]
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    switch_off: str = ""
    switch_on: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    sound: Answer | None = None
    moments: list[Moment] = field(default_factory=list)
    began: float = 0.0
    commands: list[Command] = field(default_factory=list)

    # --- commands -----------------------------------------------------------------------------------------------------

    def start(self, *words: object, prefix: Sequence[str] = ()) -> Command:
        """Start a command in this home; `prefix` is a program that starts it."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_"))}
        log = self.home.parent / "logs" / f"{self.home.name}-{len(list(self.home.parent.glob('logs/*.log'))):03}.log"
        log.parent.mkdir(exist_ok=True)
        with open(log, "wb") as errors, open(log.with_suffix(".json"), "wb") as out:
            process = subprocess.Popen(
                [*prefix, str(EXECUTABLE), *map(str, words), "--json"],
                env={**kept, **self.environment, "HEADWAY_HOME": str(self.home)},
                cwd=self.home.parent,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=errors,
            )
        self.commands.append(Command(process, log, time.monotonic()))
        return self.commands[-1]

    def run(self, *words: object) -> Answer:
        """Run a command to its end."""
        return self.start(*words).answer()

    def lifecycle(self) -> Answer:
        """Run the whole lifecycle, and tell which stage it is in. Raises NotSeen when it does not end well."""
        known = self.known("runs/*/handle.json")
        command, shown = self.start("retrain", *self.words), 0
        while not command.has_ended():
            for path in self.known("runs/*/handle.json") - known:
                stages = stages_begun(path.parent)
                for stage in stages[shown:]:
                    self.progress(f"   {time.monotonic() - command.began:6.1f} s  {stage}")
                shown = len(stages)
            time.sleep(20 * LOOK_SECONDS)
        answer = command.answer()
        if answer.code:
            raise NotSeen(f"the lifecycle without a fault ended with {answer.summary()}: fix that first")
        return answer

    def ok(self, *words: object) -> Answer:
        """Run a command that has to end well. Raises NotSeen otherwise."""
        answer = self.run(*words)
        if answer.code:
            raise NotSeen(f"headway {' '.join(map(str, words))} ended with {answer.summary()}")
        return answer

    def publish(self) -> None:
        """Publish the dataset; its shards are kept byte for byte, so that each home has the same version."""
        self.ok("dataset", "publish", DATASET, *self.sources)

    def twin(self, name: str, *, publish: bool = True, environment: dict[str, str] | None = None) -> Scene:
        """Another home, empty but for the dataset, which is run with the same words; `environment` is of its commands."""
        names = (self.words, self.model, self.endpoint, self.sources)
        twin = Scene(self.home.parent / name, *names, self.interval, self.random, self.progress, self.cluster)
        twin.environment.update(environment or {})
        if publish:
            twin.publish()
        return twin

    def close(self) -> None:
        """Stop everything that runs in this home."""
        self.clean()
        for words in (("endpoint", "stop", self.endpoint, "--reason", "rehearsal"), ("down", "--yes")):
            self.run(*words)

    def training_words(self, name: str, *words: object) -> tuple[str, ...]:
        """A training under a name of its own: it is run anew, with the numbers of the sound one."""
        named = ("--set", f"training.model={self.model}-{name}", "--to", "train")
        return ("retrain", *self.words, *named, *map(str, words))

    def training(self, name: str, *, after: int, more: Sequence[str] = ()) -> tuple[Command, Path, tuple[str, ...]]:
        """Start a training, and return the command, its job folder and its words once it has made so many steps."""
        words = self.training_words(name, *more)
        known = self.known("jobs/train-*")
        command = self.start(*words)
        folder = self.appears("jobs/train-*", known)
        self.until(f"step {after} of training", lambda: newest_step(folder) >= after or command.has_ended())
        if command.has_ended() or (folder / "result.json").exists():
            raise NotSeen(
                f"training was over before the fault came: raise training.steps, which is {newest_step(folder)}"
            )
        return command, folder, words

    # --- what is waited for ---------------------------------------------------------------------------------------------

    def until(self, what: str, look: Callable[[], Found | None], seconds: float = SHOWN_SECONDS) -> Found:
        """Look until something true is there, and return it. Raises NotSeen."""
        deadline = time.monotonic() + seconds
        while not (value := look()):
            if time.monotonic() > deadline:
                raise NotSeen(f"{what} was not seen within {seconds:.0f} s")
            time.sleep(LOOK_SECONDS)
        return value

    def mark(self, kind: Kind, text: str) -> float:
        """Note a moment; returns the seconds since the fault's beginning."""
        seconds = time.monotonic() - self.began
        self.moments.append(Moment(seconds=round(seconds, 3), kind=kind, text=text))
        self.progress(f"   {seconds:6.1f} s  {kind}: {text}")
        return seconds

    def begin(self) -> None:
        """The time line begins anew."""
        self.moments, self.began = [], time.monotonic()

    def clean(self) -> None:
        """Kill commands that still run."""
        for command in self.commands:
            if not command.has_ended():
                command.kill()
        self.commands.clear()

    @property
    def url(self) -> str:
        """Where the endpoint answers."""
        return str((read_json(self.endpoint_folder / "endpoint.json") or {}).get("url", ""))

    @property
    def endpoint_folder(self) -> Path:
        return self.home / "endpoints" / self.endpoint

    def undisturbed(self, stage: str) -> dict[str, Any]:
        """What became of a stage in the lifecycle without a fault."""
        assert self.sound is not None
        return self.sound.stage(stage)

    # --- processes of jobs, wherever they run ----------------------------------------------------------------------------

    def signal_rank(self, folder: Path, dice: Random, name: str = "KILL", *, launcher: bool = False) -> str:
        """Send a signal to one of a job's ranks, or to what started it; returns which. Raises Missing when it is gone."""
        rank = read_json(folder / "ranks" / f"{dice.randrange(self.cluster.world_size)}.json")
        if not rank:
            raise NotSeen(f"no rank has said in {folder} that it runs")
        pid = f"$(sed -n 's/^PPid:[[:space:]]*//p' /proc/{rank['pid']}/status)" if launcher else rank["pid"]
        node = rank["rank"] // self.cluster.ranks_per_node
        own = f"grep -qzxF {shlex.quote(f'HEADWAY_JOB={folder}')} /proc/{rank['pid']}/environ"
        self.execute(folder, node, f"{own} && kill -{name} {pid}")
        return f"{'the launcher of ' if launcher else ''}rank {rank['rank']}"

    def kill_machine(self, folder: Path, dice: Random) -> str:
        """SIGKILL all that a job runs on one of its machines; returns which. Raises Missing when it is gone already."""
        node = dice.randrange(self.cluster.nodes)
        place = folder if self.cluster.capabilities.this_machine else folder / "nodes" / str(node)
        pid = (read_json(place / "handle.json") or {}).get("pid", 0)
        own = f"grep -qzxF {shlex.quote(str(place))} /proc/{pid}/cmdline"
        self.execute(folder, node, f"{BELOW}; {own} && {{ kill -9 {pid} $(below {pid}); true; }}")
        return self.machine(folder, node)

    def execute(self, folder: Path, node: int, script: str) -> None:
        """Run a script on one of a job's machines. Raises Missing."""
        handles = sorted(self.known(f"{JOBS}/{folder.name.rpartition('-')[2]}*/*/handle.json"))
        handle = read_json(handles[-1]) if handles else {}
        machines_of(self.cluster).execute(self.machine(folder, node), script, handle=handle)

    def switch(self, command: str, machine: str) -> None:
        """Switch a machine off or on by the command that was given for it. Raises NotSeen when that fails."""
        words = command.replace("{machine}", shlex.quote(machine))
        ran = subprocess.run(["sh", "-c", words], capture_output=True, text=True, check=False, timeout=SHOWN_SECONDS)
        if ran.returncode:
            raise NotSeen(
                f"`{words}` ended with exit code {ran.returncode}: {ran.stderr.strip() or ran.stdout.strip()}"
            )

    def machine(self, folder: Path, node: int) -> str:
        """The name of one of a job's machines."""
        return str((read_json(folder / "nodes" / str(node) / "node.json") or {}).get("name", ""))

    # --- what the home says -----------------------------------------------------------------------------------------------

    def known(self, pattern: str) -> frozenset[Path]:
        """Paths of this home that fit a pattern now."""
        return frozenset(self.home.glob(pattern))

    def appears(self, pattern: str, known: frozenset[Path], seconds: float = SHOWN_SECONDS) -> Path:
        """Wait for a path that fits a pattern and is not among those that were known."""
        return self.until(pattern, lambda: next(iter(self.known(pattern) - known), None), seconds)

    def folder_of(self, ref: str) -> Path:
        """The folder of an artifact of this home's own store."""
        kind, _, rest = ref.partition("/")
        name, _, version = rest.partition("@")
        return self.home / "store" / "artifacts" / kind / name / version

    def served(self) -> str:
        """The model that is served, by the endpoint's own record and by its answer."""
        record = read_json(self.endpoint_folder / "endpoint.json") or {}
        return f"{record.get('model_ref')}, answered by {(ready_state(self.url) or {}).get('model')}"

    def two_at_work(self) -> Iterator[str]:
        """Tokens of jobs that were submitted again before the submission before was closed."""
        for token in sorted(self.known(f"{JOBS}/*")):
            if any(not (number / "end.json").exists() for number in sorted(token.glob("*"))[:-1]):
                yield token.name

    def submissions(self) -> dict[str, int]:
        """How often each job was submitted, by its token."""
        return {path.name: len(list(path.glob("*/handle.json"))) for path in self.known(f"{JOBS}/*")}


def stages_begun(run: Path) -> list[str]:
    """Stages that a flow run has started, in order."""
    return [event["stage"] for event in lines_of(run / "events.jsonl") if event.get("event") == "started"]


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines; a line that is being written is left out."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for line in lines:
        try:
            yield json.loads(line)
        except ValueError:
            continue


def newest_step(folder: Path) -> int:
    """The last step that a training job has reported."""
    return max((record["step"] for record in lines_of(folder / "metrics.jsonl") if "loss" in record), default=0)


def losses(folder: Path) -> dict[int, list[float]]:
    """Loss, learning rate and norm of the gradient at each step, as the last attempt reported them."""
    kept = ("loss", "learning_rate", "grad_norm")
    records = (record for record in lines_of(folder / "metrics.jsonl") if "loss" in record)
    return {record["step"]: [record[name] for name in kept] for record in records}


def reported(folder: Path) -> int:
    """Steps that were computed, those of every attempt."""
    return sum("loss" in record for record in lines_of(folder / "metrics.jsonl"))


def rank_pids(folder: Path) -> list[int]:
    """Process ids of a job's ranks on this machine."""
    return [rank["pid"] for rank in (read_json(folder / "handle.json") or {}).get("ranks", [])]


@contextmanager
def serving(server: Server) -> Iterator[Server]:
    """A server that answers, in a thread, until the end."""
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def kill_all(pids: Sequence[int]) -> None:
    """SIGKILL; a process that is gone already is no error."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def parent_of(handle: Path) -> int:
    """The process that a handle names, if it runs; else 0."""
    value = read_json(handle)
    return int(value["pid"]) if alive(value) else 0


def children(pid: int) -> list[int]:
    """The processes that a process itself has started, and which run."""
    if not pid or not process_started(pid):
        return []
    return [child.pid for child in psutil.Process(pid).children() if process_started(child.pid)]


def below(pid: int) -> list[int]:
    """The processes that a process has started, theirs included, which run."""
    return [child for child in descendants(pid) if process_started(child)]


def checkpoints_of(folder: Path) -> list[Path]:
    """Manifests of the committed checkpoints of a training job, newest first."""
    return sorted(
        (folder / "checkpoints").glob("step-*/attempt-*/manifest.json"),
        key=lambda path: int(path.parts[-3].removeprefix("step-")),
        reverse=True,
    )
