"""Faults of training and its machines: ranks, machines, checkpoints, eviction, disks, slow machines."""

from __future__ import annotations

import errno
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

from deployments.rehearsal.fault import Fault, check, equal_losses, exits, flip, plant, rewrite, unplant
from deployments.rehearsal.scene import (
    JOBS,
    SHOWN_SECONDS,
    Command,
    NotSeen,
    Scene,
    checkpoints_of,
    lines_of,
    losses,
    newest_step,
    rank_pids,
    reported,
    serving,
)
from tasks.artifacts import Check
from tasks.common.errors import Missing
from tasks.common.process import read_json, write_text


class RankKilled(Fault):
    name = "rank-killed"
    what = "A rank of a training is killed with SIGKILL."
    launcher: ClassVar[bool] = False
    promise = "The job's parent starts the ranks again from the newest checkpoint, in the same submission, with the same numbers."

    def inject(self, scene: Scene) -> None:
        command, self.folder, _ = scene.training(self.name, after=3 * scene.interval)
        killed = scene.signal_rank(self.folder, scene.random, launcher=self.launcher)
        scene.mark("injected", f"{killed} is killed at step {newest_step(self.folder)}")
        count = reported(self.folder)
        scene.until("a step after the restart", lambda: reported(self.folder) > count + 1 or command.has_ended())
        scene.mark("recovered", "trains again")
        self.answer = command.answer()

    def expect(self, scene: Scene) -> Iterator[Check]:
        yield exits(self.answer, 0)
        job = self.answer.stage("train").get("job") or {}
        yield check("submissions", job.get("submissions", 0), "1", job.get("submissions") == 1)
        yield check("attempts", job.get("attempts", 0), "2", job.get("attempts") == 2)
        yield resumed(job)
        yield repeated(scene, self.folder)
        yield equal_losses(scene, self.folder)


class LauncherKilled(RankKilled):
    name = "launcher-killed"
    what = "What has started the ranks of a training on a machine (torchrun) is killed with SIGKILL."
    launcher = True
    quick = False


def resumed(job: dict[str, Any]) -> Check:
    """Training went on from a checkpoint, and did not begin anew."""
    step = job.get("resumed_from_step")
    return check("resumed from step", str(step), "> 0", bool(step))


def repeated(scene: Scene, folder: Path) -> Check:
    """Steps computed more than once: what was trained since the newest checkpoint, and the one that was being written."""
    count = reported(folder) - len(losses(folder))
    most = 2 * scene.interval
    return check("steps repeated", count, f"<= {most}, two intervals between checkpoints", count <= most)


class MachineLost(Fault):
    name = "machine-lost"
    what = "All processes of a training's job on one machine are killed at once, as when it is taken without notice."
    promise = "The run submits the job again, which resumes from the newest checkpoint with the same numbers."
    page = "compute.md"
    quick = False  # `checkpoint-flipped` has it in it

    def inject(self, scene: Scene) -> None:
        command, self.folder, _ = scene.training(self.name, after=3 * scene.interval)
        ends = f"{JOBS}/*/*/end.json"
        known = scene.known(ends)
        self.lose(scene)
        self.damage(scene)
        count = reported(self.folder)
        self.end = scene.appears(ends, known, SHOWN_SECONDS + scene.cluster.watch.hang_seconds)
        scene.mark("noticed", "the submission is closed as failed")
        self.bring_back(scene)
        scene.until("a step of the next submission", lambda: reported(self.folder) > count + 1 or command.has_ended())
        scene.mark("recovered", "trains again")
        self.answer = command.answer()

    def lose(self, scene: Scene) -> None:
        """Take the machine away."""
        machine = scene.kill_machine(self.folder, scene.random)
        scene.mark(
            "injected",
            f"everything of the job on {machine or 'this machine'} is killed at step {newest_step(self.folder)}",
        )

    def bring_back(self, scene: Scene) -> None:
        """What is done once the loss was noticed."""

    def damage(self, scene: Scene) -> None:
        """What else happens before the training is resumed."""

    def expect(self, scene: Scene) -> Iterator[Check]:
        yield exits(self.answer, 0)
        job = self.answer.stage("train").get("job") or {}
        yield check("submissions", job.get("submissions", 0), "2", job.get("submissions") == 2)
        yield resumed(job)
        yield equal_losses(scene, self.folder)


class MachineOff(MachineLost):
    name = "machine-off"
    what = (
        "A machine of a training is switched off, by the command of `--switch-off`, and on again once that was noticed."
    )

    def impossible(self, scene: Scene) -> str:
        return (
            ""
            if scene.switch_off
            else "no command was given that switches a machine off and on: --switch-off, --switch-on"
        )

    def lose(self, scene: Scene) -> None:
        self.machine = scene.machine(self.folder, scene.cluster.nodes - 1)
        scene.switch(scene.switch_off, self.machine)
        scene.mark("injected", f"{self.machine} is switched off at step {newest_step(self.folder)}")

    def bring_back(self, scene: Scene) -> None:
        scene.switch(scene.switch_on, self.machine)
        scene.mark("seen", f"{self.machine} is switched on")


class RankHangs(MachineLost):
    name = "rank-hangs"
    what = "A rank of a training is stopped and answers nobody, as when the network between machines is cut."
    promise = "Missing steps are noticed, the submission ends, and the next one resumes with the same numbers."

    def lose(self, scene: Scene) -> None:
        stopped = scene.signal_rank(self.folder, scene.random, "STOP")
        scene.mark("injected", f"{stopped} is stopped at step {newest_step(self.folder)}")

    def expect(self, scene: Scene) -> Iterator[Check]:
        words = str((read_json(self.end) or {}).get("message", ""))
        by_steps = words.startswith("no step after step") and "is silent" not in words
        yield check("why the submission ended", words, "steps that did not come, from a machine that lives", by_steps)
        yield from super().expect(scene)
        yield repeated(scene, self.folder)

    def undo(self, scene: Scene) -> None:
        """A hang that nobody noticed would stay."""
        for folder in scene.known("jobs/train-*"):
            if not (folder / "result.json").exists() and (folder / "handle.json").exists():
                scene.run("job", "cancel", folder.name, "--reason", "rehearsal")


class ClockMoved(RankHangs):
    name = "clock-moved"
    what = (
        "While a training runs, what `time.time` says jumps an hour ahead and two hours back (a planted `sitecustomize.py`); "
        "then a rank is stopped."
    )
    promise = "The jumps are not taken for a hang, and do not hide the one that follows; every record verifies."
    page = "reliability.md"
    local_only = "the clock is moved by a module on the PYTHONPATH of this machine's jobs"
    jumps = (3600, -3600)
    """Seconds from the true time."""

    def inject(self, scene: Scene) -> None:
        self.planted = scene.home.parent / self.name
        plant(scene, "moved_clock.py", self.planted)
        super().inject(scene)
        write_text(self.planted / "offset", "0")
        self.verified = scene.run("verify")

    def lose(self, scene: Scene) -> None:
        for jump in self.jumps:
            step = newest_step(self.folder)
            write_text(self.planted / "offset", str(jump))
            scene.mark("injected", f"the clock is {jump} s off at step {step}")
            self.train_to(step + scene.interval, scene)
        super().lose(scene)

    def train_to(self, step: int, scene: Scene) -> None:
        scene.until(f"step {step}", lambda: newest_step(self.folder) >= step)

    def expect(self, scene: Scene) -> Iterator[Check]:
        yield from super().expect(scene)
        times = [record["time"] for record in lines_of(self.folder / "metrics.jsonl") if "loss" in record]
        moved, least = max(times) - min(times), max(self.jumps) - min(self.jumps) - 60
        yield check("seconds between the times of steps", round(moved), f">= {least}: it was moved", moved >= least)
        yield check("every byte and record", self.verified.summary(), "exit code 0", self.verified.code == 0)

    def undo(self, scene: Scene) -> None:
        super().undo(scene)
        unplant(scene)
        write_text(self.planted / "offset", "0")  # a server that was started meanwhile reads it as long as it runs


class CheckpointDamaged(MachineLost):
    """The newest checkpoint is damaged while nothing runs; `kind` says how."""

    flipped: ClassVar[bool]
    promise = "It is quarantined, and training resumes from the one before, with the same numbers."
    page = "reliability.md#checkpoints-of-a-training-job"

    def damage(self, scene: Scene) -> None:
        committed = checkpoints_of(self.folder)
        if len(committed) < 2:
            raise NotSeen(
                f"{len(committed)} checkpoint was committed before the fault, and two are needed: lower "
                "planning.checkpoint.every_steps"
            )
        self.newest = committed[0].parent
        shard = next(iter(sorted(self.newest.glob("shard-*"))))
        if self.flipped:
            flip(shard, scene.random)
        else:
            data = shard.read_bytes()
            rewrite(shard, data[: len(data) // 2])
        self.step = int(self.newest.parent.name.removeprefix("step-"))
        done = "a bit is flipped in" if self.flipped else "the second half is missing of"
        scene.mark("injected", f"{done} {shard.relative_to(self.folder)}")

    def expect(self, scene: Scene) -> Iterator[Check]:
        yield from super().expect(scene)
        step = (self.answer.stage("train").get("job") or {}).get("resumed_from_step")
        yield check("older than the damaged one", str(step), f"< {self.step}", step is not None and step < self.step)


class CheckpointFlipped(CheckpointDamaged):
    name = "checkpoint-flipped"
    what = "A training's machine is lost, and a bit of its newest checkpoint flips."
    quick = True
    flipped = True


class CheckpointTorn(CheckpointDamaged):
    name = "checkpoint-torn"
    what = "A training's machine is lost, and half of its newest checkpoint is missing."
    flipped = False


class EvictionNotice(Fault):
    name = "eviction-notice"
    what = "Azure's Scheduled Events say that the machine will be taken in 30 seconds (asked of a server of the rehearsal)."
    promise = "Training saves a checkpoint and ends within the notice, and continues from exactly that step."
    local_only = "the notices come from a server of the rehearsal, which other machines do not reach"

    def inject(self, scene: Scene) -> None:
        with serving(EventsServer()) as service:
            address = f"http://127.0.0.1:{service.server_port}/metadata/scheduledevents"
            notices = [
                "execution.notices.ask=true",
                f"execution.notices.address={address}",
                "execution.notices.every_seconds=0.1",
            ]
            asks = tuple(word for one in notices for word in ("--set", one))
            command, self.folder, words = scene.training(self.name, after=scene.interval, more=asks)
            service.events = [
                {"EventId": "rehearsal", "EventType": "Preempt", "Resources": [MACHINE], "EventStatus": "Scheduled"}
            ]
            began = scene.mark("injected", f"the notice comes at step {newest_step(self.folder)}")
            scene.until(
                "the end of the first submission", lambda: (self.folder / "exit.json").exists() or command.has_ended()
            )
            self.last = newest_step(self.folder)
            self.seconds = scene.mark("noticed", f"training has ended at step {self.last}") - began
            self.answer = command.answer()
            if self.answer.code:
                self.answer = scene.run(*words)
            scene.mark("recovered", "the training has ended")

    def expect(self, scene: Scene) -> Iterator[Check]:
        steps = len(losses(self.folder))
        yield check("training stopped at step", self.last, f"< {steps}, its last one", self.last < steps)
        yield check("seconds from the notice to the end", round(self.seconds, 1), "<= 30", self.seconds <= 30.0)
        yield exits(self.answer, 0)
        count = reported(self.folder) - len(losses(self.folder))
        yield check("steps repeated", count, "0", count == 0)
        yield equal_losses(scene, self.folder)


MACHINE = "rehearsal"
"""The name that the service has for this machine."""


class Events(BaseHTTPRequestHandler):
    """Azure's service for Scheduled Events, which refuses who does not send its header."""

    def do_GET(self) -> None:
        known = self.headers.get("Metadata") == "true"
        body = json.dumps({"Events": self.server.events if known else []}).encode()  # type: ignore[attr-defined]
        if known and "/scheduledevents" not in self.path:  # the name of this machine is asked for first
            body = MACHINE.encode()
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


class DiskFull(Fault):
    name = "disk-full"
    what = "The disk with the job folders has no room left when a training saves (a small tmpfs in a namespace of its own)."
    promise = (
        "Training ends and reports it, nothing torn is published, and with room it is trained to the same numbers."
    )
    quick = False
    local_only = "the disk with the job folders is also others', who would have no room either"

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
        words = os.strerror(errno.ENOSPC)
        without = self.first.code == 6 and words in self.first.summary()
        yield check("the run without room", self.first.summary(), f"exit code 6: {words}", without)
        yield exits(self.answer, 0)
        yield equal_losses(scene, Path(self.answer.stage("train")["job"]["folder"]))


class SlowMachine(Fault):
    name = "slow-rank"
    what = "A rank of the benchmark gets half a core: it is stopped and let go twenty times a second."
    promise = "The gate closes and names the rank; nothing is trained on it."
    page = "qualification.md"
    quick = False
    local_only = "ranks are slowed down by signals, twenty times a second, and these are sent on this machine only"
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
        ranks = scene.cluster.world_size
        if ranks < 2:
            raise NotSeen("the benchmark has one rank, and none to compare it with")
        pids = scene.until("its ranks", lambda: pids if len(pids := rank_pids(folder)) == ranks else None)
        self.rank = ranks - 1
        scene.mark("injected", f"rank {self.rank} gets half a core")
        throttle(pids[-1])
        self.answer = command.answer()

    def expect(self, scene: Scene) -> Iterator[Check]:
        yield exits(self.answer, 3)
        checks = (self.answer.fields.get("error") or {}).get("checks", [])
        named = [one["name"] for one in checks if f"rank {self.rank}" in one["name"]]
        yield check("checks that name the rank", ", ".join(named) or "none", "one at least", bool(named))


class GpuFails(Fault):
    name = "gpu-fails"
    what = "A GPU falls off the bus while a training runs: the kernel's log has an Xid 79 (a planted `dmesg` on the job's PATH)."
    promise = "The health check ends the attempt and names machine and Xid; the job is submitted again, with the same numbers."
    page = "hardware.md"
    local_only = "the log is planted by a program on the PATH of this machine's jobs"
    xid = "NVRM: Xid (PCI:0002:00:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."

    def inject(self, scene: Scene) -> None:
        folder = scene.home.parent / self.name
        folder.mkdir()
        log, program = folder / "kernel.log", folder / "dmesg"
        log.write_text("[    1.000000] Linux\n")
        program.write_text(f"#!/bin/sh\nexec cat {shlex.quote(str(log))}\n")
        program.chmod(0o700)
        scene.environment["PATH"] = f"{folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        asks = ("--set", "cluster.watch.probe_seconds=0.5")
        command, self.folder, _ = scene.training(self.name, after=scene.interval, more=asks)
        ends = f"{JOBS}/*/*/end.json"
        known = scene.known(ends)
        with open(log, "a") as file:
            file.write(f"[{time.monotonic():.6f}] {self.xid}\n")
        scene.mark("injected", f"Xid 79 at step {newest_step(self.folder)}")
        self.end = scene.appears(ends, known)
        scene.mark("noticed", "the submission is closed as failed")
        self.answer = command.answer()
        scene.mark("recovered", "the run has ended")

    def expect(self, scene: Scene) -> Iterator[Check]:
        words = json.dumps(read_json(self.end))
        yield check("why the submission ended", words[:300], "it names Xid 79", "Xid 79" in words)
        yield exits(self.answer, 0)
        job = self.answer.stage("train").get("job") or {}
        yield check("submissions", job.get("submissions", 0), "2", job.get("submissions") == 2)
        yield equal_losses(scene, self.folder)

    def undo(self, scene: Scene) -> None:
        scene.environment.pop("PATH", None)


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


class RandomFaults(Fault):
    """Two to five faults in one training, at random steps; the same seed makes the same choices."""

    promise = "The same command comes to the end, with the numbers of an undisturbed training, and no job runs twice."
    quick = False
    most_runs = 4
    """Runs of the command after the last fault: failures in a row without a new checkpoint end a job, and a person asks again."""

    def __init__(self, seed: int) -> None:
        self.name = f"random-{seed}"  # type: ignore[misc]
        self.what = f"Several faults in one training, one after the other, drawn by seed {seed}."  # type: ignore[misc]
        self.random = random.Random(seed)

    def inject(self, scene: Scene) -> None:
        words = scene.training_words(self.name)
        known = scene.known("jobs/train-*")
        command = scene.start(*words)
        self.folder = scene.appears("jobs/train-*", known)
        length = len(losses(Path(scene.undisturbed("train")["job"]["folder"])))
        for _ in range(self.random.randrange(2, 6)):
            command = scene.start(*words) if command.has_ended() else command
            self.wait(scene, command, newest_step(self.folder) + self.random.randrange(1, max(2, length // 4)))
            if (self.folder / "result.json").exists():
                break
            hurt = self.random.choice(
                (self.rank, self.launcher, self.machine, self.orchestrator, self.asked_to_stop, self.second_run)
            )
            try:
                scene.mark("injected", f"{hurt(scene, command)} at step {newest_step(self.folder)}")
            except (Missing, NotSeen) as error:  # the fault before it has ended what this one would
                scene.mark("seen", error.message)
        for _ in range(self.most_runs):
            self.answer = command.answer() if not command.has_ended() else scene.run(*words)
            if not self.answer.code:
                break
        scene.mark("recovered", f"the last run has ended with exit code {self.answer.code}")

    def wait(self, scene: Scene, command: Command, step: int) -> None:
        scene.until(f"step {step}", lambda: newest_step(self.folder) >= step or command.has_ended())

    def rank(self, scene: Scene, command: Command) -> str:
        return f"{scene.signal_rank(self.folder, self.random)} is killed"

    def launcher(self, scene: Scene, command: Command) -> str:
        return f"{scene.signal_rank(self.folder, self.random, launcher=True)} is killed"

    def machine(self, scene: Scene, command: Command) -> str:
        """Everything of the job; and now and then its newest checkpoint is damaged before anything reads it again."""
        scene.kill_machine(self.folder, self.random)
        committed = checkpoints_of(self.folder)
        if len(committed) < 2 or self.random.random() < 0.5:
            return "all processes of the job are killed"
        shard = sorted(committed[0].parent.glob("shard-*"))[0]
        flip(shard, self.random)
        return f"all processes of the job are killed, and a bit of {committed[0].parts[-3]} flips"

    def orchestrator(self, scene: Scene, command: Command) -> str:
        command.kill()
        return "`headway retrain` is killed"

    def asked_to_stop(self, scene: Scene, command: Command) -> str:
        command.process.terminate()
        command.answer()
        return "`headway retrain` is ended with SIGTERM"

    def second_run(self, scene: Scene, command: Command) -> str:
        scene.start(*scene.training_words(self.name))
        return "the same command is started once more"

    def expect(self, scene: Scene) -> Iterator[Check]:
        yield exits(self.answer, 0)
        yield equal_losses(scene, self.folder)
        twice = list(scene.two_at_work())
        yield check("jobs with two open submissions", ", ".join(twice) or "none", "none", not twice)
