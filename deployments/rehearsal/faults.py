"""The faults of a rehearsal, a class each: how it comes about, what must hold after it, and how it is undone."""

from __future__ import annotations

import http.client
import json
import os
import secrets
import shutil
import signal
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

from deployments.rehearsal.scene import (
    Answer,
    NotSeen,
    Scene,
    below,
    checkpoints_of,
    ended,
    kill_all,
    losses,
    newest_step,
    parent_of,
    rank_pids,
    reported,
    stages_begun,
)
from tasks.artifacts import Check
from tasks.common.process import read_json
from tasks.serving.client import Sampling, complete, ready_state

JOBS = ("validate", "preprocess", "benchmark", "train", "evaluate", "export", "deploy")
"""Stages in each of which the orchestrator is killed once; `plan` takes no time in which it could be."""
RESTART_SECONDS = 60.0
"""Longest that a server may take to come back: docs/reliability.md says that its parent starts it again."""


def check(name: str, measured: float | str, limit: str, passed: bool) -> Check:
    return Check(name=name, measured=measured, limit=limit, passed=passed)


def exits(answer: Answer, *codes: int) -> Check:
    wanted = " or ".join(map(str, codes))
    return check("exit code", answer.ended(), f"exit code {wanted}", answer.code in codes)


def equal_losses(scene: Scene, folder: Path) -> Check:
    """Every step's loss, learning rate and norm of the gradient are those of the undisturbed training, bit for bit."""
    sound, ours = losses(Path(scene.undisturbed("train")["job"]["folder"])), losses(folder)
    same = sum(ours.get(step) == figures for step, figures in sound.items())
    return check(
        "steps with the undisturbed numbers",
        f"{same} of {len(sound)}",
        f"{len(sound)}",
        same == len(ours) == len(sound),
    )


class Fault(ABC):
    """Something that goes wrong on purpose. State between the calls is the object's own."""

    name: ClassVar[str]
    what: ClassVar[str]
    """What happens, as a sentence."""
    promise: ClassVar[str]
    """What must hold, as a sentence."""
    page: ClassVar[str] = "reliability.md"
    """The page of docs/ that promises it."""
    quick: ClassVar[bool] = True
    """Whether `--quick` tries it."""

    def impossible(self, scene: Scene) -> str:
        """Why it cannot be tried on this machine; empty when it can."""
        return ""

    @abstractmethod
    def inject(self, scene: Scene) -> None:
        """Let it happen, and wait for its end. Raises NotSeen when it did not come about."""

    @abstractmethod
    def expect(self, scene: Scene) -> Iterator[Check]:
        """What must hold now."""

    def undo(self, scene: Scene) -> None:  # noqa: B027
        """Leave the home as the next fault needs it."""


# --- who runs the chain -------------------------------------------------------------------------------------------------


class OrchestratorKilled(Fault):
    name = "orchestrator-killed"
    what = "`headway retrain` is killed with SIGKILL in every stage of a whole lifecycle, and started again each time."
    promise = "Jobs continue and are adopted: each is submitted once, and the numbers are those of an undisturbed run."

    def inject(self, scene: Scene) -> None:
        self.twin = scene.twin("killed")
        self.killed = list[str]()
        for stage in JOBS:
            self.kill_in(stage, scene)
        self.answer = self.twin.run("retrain", *self.twin.words)
        scene.mark("recovered", "the same command has ended")

    def kill_in(self, stage: str, scene: Scene) -> None:
        """Start the lifecycle, and kill it a moment after a stage has begun; one that ends before is left alone."""
        known = self.twin.known("runs/*/handle.json")
        command = self.twin.start("retrain", *self.twin.words)
        run = self.twin.appears("runs/*/handle.json", known).parent
        scene.until(f"the beginning of {stage}", lambda: stage in stages_begun(run) or ended(command))
        time.sleep(scene.random.uniform(0.0, 0.5))
        if not ended(command):
            command.kill()
            self.killed.append(stage)
            scene.mark("injected", f"killed in {stages_begun(run)[-1]}")

    def expect(self, scene: Scene) -> Iterator[Check]:
        yield check("stages in which it was killed", ", ".join(self.killed), "three at least", len(self.killed) >= 3)
        yield exits(self.answer, 0)
        most = max(self.twin.submissions().values(), default=0)
        yield check("submissions of a job", most, "1", most == 1)
        train = self.answer.stage("train")
        trained = next(self.twin.home.glob("jobs/train-*"))
        yield equal_losses(scene, trained)
        yield check(
            "training's result", train.get("status", "none"), "ran or reused", train.get("status") in ("ran", "reused")
        )

    def undo(self, scene: Scene) -> None:
        self.twin.close()


class LostAnswer(Fault):
    name = "answer-lost"
    what = "The orchestrator is killed between noting that it submits a job and noting that it has."
    promise = "The next one finds the job in its folder, or finds that nothing was started: it never runs twice."
    page = "reliability.md#a-job-is-submitted-once"

    def inject(self, scene: Scene) -> None:
        words = scene.training_words(self.name)
        intents = "store/documents/journal/jobs/*/*/intent.json"
        known = scene.known(intents)
        command = scene.start(*words)
        intent = scene.appears(intents, known)
        command.kill()
        self.gap = not (intent.parent / "handle.json").exists()
        scene.mark("injected", f"killed after the intent{'' if self.gap else ', and after the handle'}")
        self.token = intent.parent.parent.name
        self.answer = scene.run(*words)
        scene.mark("recovered", "the same command has ended")

    def expect(self, scene: Scene) -> Iterator[Check]:
        yield exits(self.answer, 0)
        folder = Path(self.answer.stage("train")["job"]["folder"])
        count = reported(folder)
        yield check("steps computed", count, f"{len(losses(folder))}", count == len(losses(folder)))
        submitted = scene.submissions()[self.token]
        yield check("submissions noted", submitted, "1", submitted == 1)
        yield equal_losses(scene, folder)


class TwoRuns(Fault):
    name = "two-runs"
    what = "The same training is started twice at the same moment."
    promise = "One of them trains, the other takes its result: one job, the same checkpoint."

    def inject(self, scene: Scene) -> None:
        words = scene.training_words(self.name)
        commands = [scene.start(*words) for _ in range(2)]
        scene.mark("injected", "started twice")
        self.answers = [command.answer() for command in commands]
        scene.mark("recovered", "both have ended")

    def expect(self, scene: Scene) -> Iterator[Check]:
        yield from (exits(answer, 0) for answer in self.answers)
        stages = [answer.stage("train") for answer in self.answers]
        statuses = ", ".join(sorted(stage.get("status", "none") for stage in stages))
        yield check("results of train", statuses, "ran, reused", statuses == "ran, reused")
        outputs = {tuple(stage.get("outputs", ())) for stage in stages}
        yield check("checkpoints", len(outputs), "1", len(outputs) == 1)


class PrefectKilled(Fault):
    name = "prefect-killed"
    what = "The Prefect server is killed with SIGKILL while a training runs."
    promise = "Its parent starts it again, and the run ends as if nothing had happened."

    def inject(self, scene: Scene) -> None:
        command, self.folder, _ = scene.training(self.name, after=1)
        parent = parent_of(scene.home / "prefect" / "handle.json")
        if not parent:
            raise NotSeen("no Prefect server of this home runs")
        before = below(parent)
        kill_all(before)
        scene.mark("injected", "Prefect's server is killed")
        scene.until("a new Prefect server", lambda: set(below(parent)) - set(before), RESTART_SECONDS)
        scene.mark("noticed", "its parent has started it again")
        self.answer = command.answer()
        scene.mark("recovered", "the run has ended")

    def expect(self, scene: Scene) -> Iterator[Check]:
        yield exits(self.answer, 0)
        yield equal_losses(scene, self.folder)


# --- training -----------------------------------------------------------------------------------------------------------


class RankKilled(Fault):
    name = "rank-killed"
    what = "A rank of a training is killed with SIGKILL."
    promise = "The job's parent starts the ranks again from the newest checkpoint, in the same submission, with the same numbers."

    def inject(self, scene: Scene) -> None:
        command, self.folder, _ = scene.training(self.name, after=2 * scene.interval)
        rank = scene.random.choice(rank_pids(self.folder))
        kill_all([rank])
        self.at = newest_step(self.folder)
        scene.mark("injected", f"killed at step {self.at}")
        count = reported(self.folder)
        scene.until("a step after the restart", lambda: reported(self.folder) > count + 1 or ended(command))
        scene.mark("recovered", "trains again")
        self.answer = command.answer()

    def expect(self, scene: Scene) -> Iterator[Check]:
        yield exits(self.answer, 0)
        job = self.answer.stage("train").get("job") or {}
        yield check("submissions", job.get("submissions", 0), "1", job.get("submissions") == 1)
        yield check("attempts", job.get("attempts", 0), "2", job.get("attempts") == 2)
        yield repeated(scene, self.folder)
        yield equal_losses(scene, self.folder)


def repeated(scene: Scene, folder: Path) -> Check:
    """Steps computed more than once: what was trained since the newest checkpoint, and the one that was being written."""
    count = reported(folder) - len(losses(folder))
    most = 2 * scene.interval
    return check("steps repeated", count, f"<= {most}, two intervals between checkpoints", count <= most)


class MachineLost(Fault):
    name = "machine-lost"
    what = "All processes of a training's job are killed at once, as when its machine is taken without notice."
    promise = "The stage fails, and the same command resumes from the newest checkpoint with the same numbers."

    def inject(self, scene: Scene) -> None:
        command, self.folder, words = scene.training(self.name, after=2 * scene.interval)
        self.lose(scene)
        self.first = command.answer()
        scene.mark("noticed", f"the run ended with exit code {self.first.code}")
        self.damage(scene)
        self.answer = scene.run(*words)
        scene.mark("recovered", "the same command has ended")

    def lose(self, scene: Scene) -> None:
        parent = parent_of(self.folder / "handle.json")
        kill_all([parent, *below(parent)])
        scene.mark("injected", f"everything is killed at step {newest_step(self.folder)}")

    def damage(self, scene: Scene) -> None:
        """What else happens before the training is resumed."""

    def expect(self, scene: Scene) -> Iterator[Check]:
        yield check("the interrupted run", self.first.ended(), "exit code 4", self.first.code == 4)
        yield exits(self.answer, 0)
        resumed = (self.answer.stage("train").get("job") or {}).get("resumed_from_step")
        yield check("resumed from step", str(resumed), "> 0", bool(resumed))
        yield equal_losses(scene, self.folder)


class CheckpointDamaged(MachineLost):
    """The newest checkpoint is damaged while nothing runs; `kind` says how."""

    flipped: ClassVar[bool]
    promise = "It is quarantined, and training resumes from the one before, with the same numbers."
    page = "reliability.md#checkpoints-of-a-training-job"

    def damage(self, scene: Scene) -> None:
        found = checkpoints_of(self.folder)
        if len(found) < 2:
            raise NotSeen(
                f"{len(found)} checkpoint was committed before the fault, and two are needed: lower "
                "planning.checkpoint.every_steps"
            )
        self.newest = found[0].parent
        shard = next(iter(sorted(self.newest.glob("shard-*"))))
        data = bytearray(shard.read_bytes())
        if self.flipped:
            data[scene.random.randrange(len(data))] ^= 1 << scene.random.randrange(8)
        shard.chmod(0o600)
        shard.write_bytes(data if self.flipped else data[: len(data) // 2])
        self.step = int(self.newest.parent.name.removeprefix("step-"))
        done = "a bit is flipped in" if self.flipped else "the second half is missing of"
        scene.mark("injected", f"{done} {shard.relative_to(self.folder)}")

    def expect(self, scene: Scene) -> Iterator[Check]:
        yield from super().expect(scene)
        resumed = (self.answer.stage("train").get("job") or {}).get("resumed_from_step")
        yield check(
            "older than the damaged one", str(resumed), f"< {self.step}", resumed is not None and resumed < self.step
        )


class CheckpointFlipped(CheckpointDamaged):
    name = "checkpoint-flipped"
    what = "A training's machine is lost, and a bit of its newest checkpoint flips."
    flipped = True


class CheckpointTorn(CheckpointDamaged):
    name = "checkpoint-torn"
    what = "A training's machine is lost, and half of its newest checkpoint is missing."
    flipped = False


class EvictionNotice(Fault):
    name = "eviction-notice"
    what = "Azure's Scheduled Events say that the machine will be taken in 30 seconds (asked of a server of the rehearsal)."
    promise = "Training saves a checkpoint and ends within the notice, and continues from exactly that step."

    def inject(self, scene: Scene) -> None:
        with scheduled_events() as service:
            address = f"http://127.0.0.1:{service.server_port}/metadata/scheduledevents"
            notices = [
                "execution.notices.ask=true",
                f"execution.notices.address={address}",
                "execution.notices.every_seconds=0.1",
            ]
            asks = tuple(word for one in notices for word in ("--set", one))
            command, self.folder, words = scene.training(self.name, after=scene.interval, more=asks)
            service.events = [
                {"EventId": "rehearsal", "EventType": "Preempt", "Resources": [], "EventStatus": "Scheduled"}
            ]
            told = scene.mark("injected", f"the notice comes at step {newest_step(self.folder)}")
            scene.until(
                "the end of the first submission", lambda: (self.folder / "exit.json").exists() or ended(command)
            )
            self.seconds = scene.mark("noticed", "training has saved and ended") - told
            self.answer = command.answer()
            if self.answer.code:
                self.answer = scene.run(*words)
            scene.mark("recovered", "the training has ended")

    def expect(self, scene: Scene) -> Iterator[Check]:
        yield check("seconds from the notice to the end", round(self.seconds, 1), "<= 30", self.seconds <= 30.0)
        yield exits(self.answer, 0)
        count = reported(self.folder) - len(losses(self.folder))
        yield check("steps repeated", count, "0", count == 0)
        yield equal_losses(scene, self.folder)


class Events(BaseHTTPRequestHandler):
    """Azure's service for Scheduled Events, which refuses who does not send its header."""

    def do_GET(self) -> None:
        known = self.headers.get("Metadata") == "true"
        body = json.dumps({"Events": self.server.events if known else []}).encode()  # type: ignore[attr-defined]
        self.send_response(200 if known else 400)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing is logged."""


class EventsServer(ThreadingHTTPServer):
    """Serves `events`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Events)
        self.events = list[dict[str, Any]]()


@contextmanager
def scheduled_events() -> Iterator[EventsServer]:
    server = EventsServer()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


class DiskFull(Fault):
    name = "disk-full"
    what = "The disk with the job folders has no room left when a training saves (a small tmpfs in a namespace of its own)."
    promise = "Training ends and says so, nothing torn is published, and with room it is trained to the same numbers."
    quick = False

    def impossible(self, scene: Scene) -> str:
        tried = ["unshare", "--mount", "--map-root-user", "true"]
        done = subprocess.run(tried, capture_output=True, check=False) if shutil.which("unshare") else None
        return (
            ""
            if done and not done.returncode
            else "mounting in a namespace of its own is not allowed here (unshare --mount)"
        )

    def inject(self, scene: Scene) -> None:
        jobs = scene.home / "jobs"
        mount = f'mount -t tmpfs -o size=2m tmpfs "{jobs}" && exec "$@"'
        words = scene.training_words(self.name)
        command = scene.start(*words, prefix=("unshare", "--mount", "--map-root-user", "sh", "-c", mount, "sh"))
        scene.mark("injected", "2 MiB of room for job folders")
        self.first = command.answer()
        scene.mark("noticed", f"the run ended with exit code {self.first.code}")
        self.answer = scene.run(*words)
        scene.mark("recovered", "the same command has ended")

    def expect(self, scene: Scene) -> Iterator[Check]:
        yield check("the run without room", self.first.ended(), "exit code 4 or 6", self.first.code in (4, 6))
        yield exits(self.answer, 0)
        yield equal_losses(scene, Path(self.answer.stage("train")["job"]["folder"]))


class SlowMachine(Fault):
    name = "slow-rank"
    what = "A rank of the benchmark gets half a core: it is stopped and let go twenty times a second."
    promise = "The gate closes and names the rank; nothing is trained on it."
    page = "qualification.md"
    tries = (3.0, 3.2, 3.4)
    """Seconds of measurement: on a busy machine the other ranks may be slowed down as much, and it is tried again."""

    def inject(self, scene: Scene) -> None:
        for seconds in self.tries:
            self.measure(seconds, scene)
            if self.answer.code == 3:
                break
        scene.mark("noticed", f"the run ended with exit code {self.answer.code}")

    def measure(self, seconds: float, scene: Scene) -> None:
        """One benchmark, with its last rank slowed down from its start."""
        known = scene.known("jobs/benchmark-*")
        command = scene.start("retrain", *scene.words, "--to", "benchmark", "--set", f"benchmark.seconds={seconds}")
        folder = scene.appears("jobs/benchmark-*", known)
        pids = scene.until("its ranks", lambda: rank_pids(folder))
        if len(pids) < 2:
            raise NotSeen("the benchmark has one rank, and none to compare it with")
        self.rank = len(pids) - 1
        scene.mark("injected", f"rank {self.rank} gets half a core")
        throttle(pids[-1])
        self.answer = command.answer()

    def expect(self, scene: Scene) -> Iterator[Check]:
        yield exits(self.answer, 3)
        checks = (self.answer.fields.get("error") or {}).get("checks", [])
        named = [one["name"] for one in checks if f"rank {self.rank}" in one["name"]]
        yield check("checks that name the rank", ", ".join(named) or "none", "one at least", bool(named))


def throttle(pid: int) -> None:
    """Half a core: stopped and let go, twenty times a second, until it ends."""
    while True:
        for number in (signal.SIGSTOP, signal.SIGCONT):
            try:
                if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                    return
                os.kill(pid, number)
            except (OSError, ProcessLookupError):
                return
            time.sleep(0.025)


# --- data and artifacts -------------------------------------------------------------------------------------------------


def rewrite(path: Path, data: bytes) -> None:
    """Put other bytes into a published file, which is there for reading only."""
    path.chmod(0o600)
    path.write_bytes(data)
    path.chmod(0o444)


class ArtifactFlipped(Fault):
    name = "artifact-flipped"
    what = "A bit of the published tokens flips in the store."
    promise = "Whoever reads it refuses it by name, with exit code 5, and nothing is trained on it; what is served stays served."

    def inject(self, scene: Scene) -> None:
        (tokens,) = (ref for ref in scene.undisturbed("preprocess")["outputs"] if ref.startswith("tokens/"))
        self.path = max((scene.folder_of(tokens) / "files").rglob("train*.bin"), key=lambda path: path.stat().st_size)
        self.before = self.path.read_bytes()
        data = bytearray(self.before)
        data[scene.random.randrange(len(data))] ^= 1 << scene.random.randrange(8)
        rewrite(self.path, bytes(data))
        scene.mark("injected", f"a bit is flipped in {self.path.name}")
        self.answer = scene.run(*scene.training_words(self.name))
        scene.mark("noticed", f"the run ended with exit code {self.answer.code}")
        self.ready = ready_state(scene.url) or {}

    def expect(self, scene: Scene) -> Iterator[Check]:
        yield exits(self.answer, 5)
        message = (self.answer.fields.get("error") or {}).get("message", "")
        yield check("the error names the file", message[:200], self.path.name, self.path.name in message)
        trained = list(scene.home.glob("jobs/train-*/metrics.jsonl"))
        ran = self.answer.stage("train").get("status")
        yield check("training", str(ran), "did not run", ran != "ran" and bool(trained))
        yield check("the endpoint is ready", str(self.ready.get("ready")), "True", self.ready.get("ready") is True)

    def undo(self, scene: Scene) -> None:
        rewrite(self.path, self.before)


class ShardPoisoned(Fault):
    name = "shard-poisoned"
    what = "New data arrives in which every second document is one text, and others are no text at all."
    promise = "Validation closes its gate, and neither the champion nor what is served moves."
    page = "data.md"

    def inject(self, scene: Scene) -> None:
        folder = scene.home.parent / "poisoned"
        folder.mkdir(exist_ok=True)
        noise = scene.random.randbytes(3000).decode("latin-1")
        rows = [{"text": "buy now " * 40} if at % 2 else {"text": f"{at} {noise}"} for at in range(400)]
        (folder / "shard.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        self.before = champion(scene)
        scene.ok("dataset", "publish", "poisoned", folder / "shard.jsonl")
        scene.mark("injected", "poisoned is published")
        self.answer = scene.run("retrain", *scene.words, "--dataset", "poisoned")
        scene.mark("noticed", f"the run ended with exit code {self.answer.code}")

    def expect(self, scene: Scene) -> Iterator[Check]:
        yield exits(self.answer, 3)
        stopped = (self.answer.fields.get("error") or {}).get("stage")
        yield check("the gate", str(stopped), "validate", stopped == "validate")
        yield check("champion and endpoint", champion(scene), self.before, champion(scene) == self.before)


def champion(scene: Scene) -> str:
    """What is served, by the endpoint's own record and by its answer."""
    served = ready_state(scene.url) or {}
    return f"{(read_json(scene.endpoint_folder / 'endpoint.json') or {}).get('model_ref')}, answered by {served.get('model')}"


class DataDrifted(Fault):
    name = "data-drifted"
    what = "New data arrives in which a quarter of the documents is of another kind; and new data of the kind that there was."
    promise = "The first has drifted, the second has not, at a rate of false alarms of 1 %."
    page = "drift.md"

    def inject(self, scene: Scene) -> None:
        folder = scene.home.parent / "drift"
        folder.mkdir(exist_ok=True)
        for name, share in {"before": 0.0, "same": 0.0, "other": 0.25}.items():
            rows = [{"text": sentence(scene, other=at < 400 * share)} for at in range(400)]
            scene.random.shuffle(rows)
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        scene.mark("injected", "two files of new data")
        words = ("--set", "drift.false_alarm_rate=0.01")
        self.answers = {
            name: scene.run("drift", folder / "before.jsonl", folder / f"{name}.jsonl", *words)
            for name in ("same", "other")
        }
        scene.mark("noticed", "both are judged")

    def expect(self, scene: Scene) -> Iterator[Check]:
        for name, wanted in {"same": "none", "other": "drift"}.items():
            answer = self.answers[name]
            verdict = str(answer.fields.get("drift", {}).get("verdict", answer.ended()))
            limit = wanted if name == "other" else f"{wanted}; by chance otherwise in 1 % of rehearsals"
            yield check(
                f"data of {'another' if name == 'other' else 'the same'} kind", verdict, limit, verdict == wanted
            )


def sentence(scene: Scene, *, other: bool) -> str:
    """Sixty made-up words, the first of 300 much more frequent than the last; those of another kind have their own."""
    ranks = (int(300 * scene.random.random() ** 3) for _ in range(60))
    return " ".join(f"{'other' if other else 'word'}{rank}" for rank in ranks)


class SecretGiven(Fault):
    name = "secret-given"
    what = "A run is started with an account key in one of its settings."
    promise = "It is refused before anything is spent, and the key stands in no file of the home."
    page = "trust.md"

    def inject(self, scene: Scene) -> None:
        self.secret = secrets.token_hex(32)
        value = f"DefaultEndpointsProtocol=https;AccountName=a;AccountKey={self.secret}=="
        scene.mark("injected", "an account key in a setting")
        self.answer = scene.run("retrain", *scene.words, "--dataset", value)
        scene.mark("noticed", f"the run ended with exit code {self.answer.code}")

    def expect(self, scene: Scene) -> Iterator[Check]:
        yield exits(self.answer, 2)
        needle = self.secret.encode()
        files = (path for path in scene.home.rglob("*") if path.is_file() and not path.is_symlink())
        holding = [str(path.relative_to(scene.home)) for path in files if holds(path, needle)]
        printed = self.secret in self.answer.errors or self.secret in json.dumps(self.answer.fields)
        yield check("files that hold it", ", ".join(holding) or "none", "none", not holding)
        yield check("printed", str(printed), "False", not printed)


def holds(path: Path, needle: bytes) -> bool:
    """Whether a file has these bytes; one that is gone by now has not."""
    try:
        with open(path, "rb") as file:
            before = b""
            while block := file.read(1 << 20):
                if needle in before + block:
                    return True
                before = block[-len(needle) :]
    except OSError:
        pass
    return False


# --- serving ------------------------------------------------------------------------------------------------------------


class Clients:
    """Requests to an endpoint, one after the other in each of some threads: what they were answered, and when one failed."""

    def __init__(self, url: str, *, threads: int, tokens: int, pause: float) -> None:
        self.url, self.tokens, self.pause = url, tokens, pause
        self.codes, self.seconds, self.failed = Counter[int](), list[float](), list[float]()
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
            began = time.monotonic()
            connection = http.client.HTTPConnection(host, timeout=RESTART_SECONDS)
            try:
                connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
                reply = connection.getresponse()
                reply.read()
                self.codes[reply.status] += 1
                if reply.status >= 500 and reply.status != 503:
                    self.failed.append(began)
            except (OSError, http.client.HTTPException):
                self.codes[0] += 1
                self.failed.append(began)
            finally:
                connection.close()
            self.seconds.append(time.monotonic() - began)
            self._stop.wait(self.pause)

    def told(self) -> str:
        """How many requests had which answer."""
        words = {0: "no answer"}
        return (
            ", ".join(f"{count} × {words.get(code, code)}" for code, count in sorted(self.codes.items()))
            or "none asked"
        )


class ServerKilled(Fault):
    name = "server-killed"
    what = "The server of the model behind the endpoint is killed with SIGKILL while clients ask."
    promise = "Its parent starts it again; requests meanwhile are answered late, or with 503 and a time to try again."

    def inject(self, scene: Scene) -> None:
        record = read_json(scene.endpoint_folder / "endpoint.json")
        parent = parent_of(Path(record["folder"]) / "handle.json")
        if not parent:
            raise NotSeen("no server of the endpoint runs")
        with Clients(scene.url, threads=2, tokens=4, pause=0.05) as self.clients:
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
        lost = self.clients.codes[0] + sum(
            count for code, count in self.clients.codes.items() if code not in (0, 200, 429, 503)
        )
        yield check(
            "requests without an answer", self.clients.told(), "0 but those that the server was answering", lost <= 2
        )


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
        scene.mark("seen", self.clients.told())
        self.after = complete(scene.url, "def ", Sampling(max_tokens=8))["choices"][0]["text"]
        scene.mark("recovered", "one asks alone")

    def expect(self, scene: Scene) -> Iterator[Check]:
        odd = sum(count for code, count in self.clients.codes.items() if code not in (200, 429, 503))
        yield check("answers", self.clients.told(), "200, 429 or 503", odd == 0 and self.clients.codes[200] > 0)
        yield check("the same answer afterwards", self.after, self.before, self.after == self.before)


class CanaryFails(Fault):
    name = "canary-fails"
    what = "A new model takes over the traffic step by step, and its server is killed whenever it runs."
    promise = (
        "The old model answers its requests, the traffic goes back, the run ends with exit code 3, the champion stays."
    )
    page = "rollout.md"

    def inject(self, scene: Scene) -> None:
        self.before = champion(scene)
        servers = scene.endpoint_folder / "servers"
        old = set(servers.glob("*"))
        settings = {
            "training.seed": scene.random.randrange(10**6),  # another model
            "comparison.max_loss_to_champion": 1.0,  # which may be a worse one
            "deployment.rollout.step_requests": 20,
            "deployment.rollout.step_seconds": 60,
        }
        words = (word for name, value in settings.items() for word in ("--set", f"{name}={value}"))
        with Clients(scene.url, threads=4, tokens=4, pause=0.05) as self.clients:
            command = scene.start("retrain", *scene.words, *words)
            new = scene.until(
                "a server of the new model",
                lambda: ended(command) or next(iter(set(servers.glob("*")) - old), None),
                900.0,
            )
            if ended(command) or not isinstance(new, Path):
                raise NotSeen(f"the run ended before a new model was deployed, with {command.answer().ended()}")
            scene.until("traffic to the new model", lambda: share_of(scene, new) > 0 or ended(command))
            scene.mark("injected", f"{self.harm} of {share_of(scene, new)} % of the traffic")
            while not ended(command):
                self.hurt(parent_of(new / "handle.json"))
            self.answer = command.answer()
            scene.mark("noticed", f"the run ended with exit code {self.answer.code}")
        self.after = champion(scene)

    harm: ClassVar[str] = "the new model's server is killed, again and again,"

    def hurt(self, parent: int) -> None:
        if parent:
            kill_all(below(parent))
        time.sleep(0.1)

    def expect(self, scene: Scene) -> Iterator[Check]:
        yield exits(self.answer, 3)
        stopped = (self.answer.fields.get("error") or {}).get("stage")
        yield check("the gate", str(stopped), "deploy", stopped == "deploy")
        yield check("champion and endpoint", self.after, self.before, self.after == self.before)
        lost = sum(count for code, count in self.clients.codes.items() if code not in (200, 429, 503))
        yield check("requests that failed", self.clients.told(), "none", lost == 0)


class CanarySlow(CanaryFails):
    name = "canary-slow"
    what = "A new model takes over the traffic step by step, and its server is stopped four fifths of the time."
    quick = False
    harm = "the new model's server gets a fifth of its time,"

    def hurt(self, parent: int) -> None:
        for number, seconds in ((signal.SIGSTOP, 0.4), (signal.SIGCONT, 0.1)):
            for pid in below(parent) if parent else ():
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            time.sleep(seconds)


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
    what = "A bit of the model's weights flips in the folder that the endpoint serves from, and its server is started again."
    promise = "It does not serve them: the endpoint is not ready until the bytes are those that were signed."
    page = "trust.md"

    def inject(self, scene: Scene) -> None:
        record = read_json(scene.endpoint_folder / "endpoint.json")
        folder = scene.folder_of(record["model_ref"]) / "files"
        self.path = max(folder.rglob("*.onnx*"), key=lambda path: path.stat().st_size)
        self.before = self.path.read_bytes()
        data = bytearray(self.before)
        data[len(data) // 2] ^= 1
        rewrite(self.path, bytes(data))
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


FAULTS: tuple[type[Fault], ...] = (
    OrchestratorKilled,
    LostAnswer,
    TwoRuns,
    PrefectKilled,
    RankKilled,
    MachineLost,
    CheckpointFlipped,
    CheckpointTorn,
    EvictionNotice,
    DiskFull,
    SlowMachine,
    ArtifactFlipped,
    ShardPoisoned,
    DataDrifted,
    SecretGiven,
    ServerKilled,
    Overload,
    CanaryFails,
    CanarySlow,
    KeyRevoked,
    ModelTampered,
)
