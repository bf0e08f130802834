"""Faults of what runs the chain: the orchestrator, its answers, the Prefect server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deployments.rehearsal.fault import RESTART_SECONDS, Fault, check, equal_losses, exits
from deployments.rehearsal.scene import (
    DATASET,
    JOBS,
    NotSeen,
    Scene,
    below,
    children,
    kill_all,
    lines_of,
    losses,
    newest_step,
    parent_of,
    reported,
    stages_begun,
)
from deployments.telemetry.runs import firing
from tasks.artifacts import Check
from tasks.config.files import presets
from tasks.config.flows import STAGES

KILLED_IN = tuple(stage for stage in STAGES if stage != "plan")
"""Stages in each of which the orchestrator is killed once; `plan` takes no time in which it could be."""


class OrchestratorKilled(Fault):
    name = "orchestrator-killed"
    what = "`headway retrain` is killed with SIGKILL in every stage of a whole lifecycle, and started again each time."
    promise = "Jobs continue and are adopted: each is submitted once, and the numbers are those of an undisturbed run."
    quick = False

    def inject(self, scene: Scene) -> None:
        self.twin = scene.twin("killed")
        self.killed = list[str]()
        for stage in KILLED_IN:
            self.kill_in(stage, scene)
        self.answer = self.twin.run("retrain", *self.twin.words)
        scene.mark("recovered", "the same command has ended")

    def kill_in(self, stage: str, scene: Scene) -> None:
        """Start the lifecycle, and kill it a moment after a stage has begun; one that ends before is left alone."""
        known = self.twin.known("runs/*/handle.json")
        command = self.twin.start("retrain", *self.twin.words)
        run = self.twin.appears("runs/*/handle.json", known).parent
        scene.until(f"the beginning of {stage}", lambda: stage in stages_begun(run) or command.has_ended())
        time.sleep(scene.random.uniform(0.0, 0.5))
        if not command.has_ended():
            command.kill()
            self.killed.append(stage)
            scene.mark("injected", f"killed in {stages_begun(run)[-1]}")

    def expect(self, scene: Scene) -> Iterator[Check]:
        killed = tuple(self.killed)
        yield check("stages in which it was killed", ", ".join(killed), ", ".join(KILLED_IN), killed == KILLED_IN)
        yield exits(self.answer, 0)
        most = max(self.twin.submissions().values(), default=0)
        yield check("submissions of a job", most, "1", most == 1)
        yield equal_losses(scene, next(self.twin.home.glob("jobs/train-*")))

    def undo(self, scene: Scene) -> None:
        self.twin.close()


class LostAnswer(Fault):
    name = "answer-lost"
    what = "The orchestrator is killed between noting that it submits a job and noting that it has."
    promise = "The next one finds the job in its folder, or finds that nothing was started: it never runs twice."
    page = "reliability.md#a-job-is-submitted-once"

    def inject(self, scene: Scene) -> None:
        words = scene.training_words(self.name)
        intents = f"{JOBS}/*/*/intent.json"
        known = scene.known(intents)
        command = scene.start(*words)
        intent = scene.appears(intents, known)
        command.kill()
        if (intent.parent / "handle.json").exists():
            raise NotSeen("the handle was noted before the kill came, so no answer was lost: try again")
        scene.mark("injected", "killed after the intent")
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
        most = max((stage.get("job") or {}).get("submissions", 0) for stage in stages)
        yield check("submissions of the job", most, "1", most == 1)
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


class PlatformKilled(Fault):
    name = "platform-killed"
    what = "The platform's worker, watch and MLflow server are killed with SIGKILL while one of its flow runs trains."
    promise = "The flow run is not touched and ends well, and each part is there again within a minute."
    page = "platform.md#whatever-happens-to-the-platform"
    quick = False
    parts = ("worker", "watch", "mlflow")

    def impossible(self, scene: Scene) -> str:
        one = scene.words[1] if scene.words[:1] == ("-c",) and scene.words[2:3] != ("-c",) else ""
        if one in presets():
            return ""
        return "flow runs of the platform are of shipped configurations, and -c names another one"

    def inject(self, scene: Scene) -> None:
        scene.ok("up", "--detach")
        known = scene.known("jobs/train-*")
        own = (f"training.model={scene.model}-{self.name}", f"deployment.endpoint={scene.endpoint}-{self.name}")
        settings = (*scene.words[2:], *(word for one in own for word in ("--set", one)))
        words = ("run", f"retrain/{scene.words[1]}", "--dataset", DATASET, *settings)
        log = scene.home / "runs" / scene.ok(*words).fields["flow_run"]["id"] / "events.jsonl"
        scene.until("training", lambda: scene.known("jobs/train-*") - known or end_of(log), 900.0)
        if end := end_of(log):
            raise NotSeen(f"the flow run ended before it trained: {end['error']}")
        (self.folder,) = scene.known("jobs/train-*") - known
        scene.until("the first step of training", lambda: newest_step(self.folder) > 0)
        self.before = {name: children(pid) for name, pid in self.pids(scene).items()}
        kill_all([pid for pids in self.before.values() for pid in pids])
        began = scene.mark("injected", f"{', '.join(self.parts)} are killed")
        scene.until("all parts of the platform", lambda: self.back(scene), 2 * RESTART_SECONDS)
        self.seconds = scene.mark("noticed", "each part has been started again") - began
        self.status = scene.until("the end of the flow run", lambda: end_of(log), 900.0)["status"]
        scene.mark("recovered", f"the flow run is {self.status}")
        self.alerts = tuple(alert["alert"] for alert in firing(scene.home))

    def pids(self, scene: Scene) -> dict[str, int]:
        """The small parents of the parts: what they have started is the part, and what that has started are flow runs."""
        return {part["name"]: part["pid"] for part in scene.ok("status").fields["parts"] if part["name"] in self.parts}

    def back(self, scene: Scene) -> bool:
        return all(set(children(pid)) - set(self.before[name]) for name, pid in self.pids(scene).items())

    def expect(self, scene: Scene) -> Iterator[Check]:
        quick = self.seconds <= RESTART_SECONDS
        yield check("seconds until all parts are there", round(self.seconds, 1), f"<= {RESTART_SECONDS:.0f}", quick)
        yield check("the flow run", self.status, "completed", self.status == "completed")
        yield equal_losses(scene, self.folder)

    def undo(self, scene: Scene) -> None:
        scene.run("endpoint", "stop", f"{scene.endpoint}-{self.name}", "--reason", "rehearsal")
        scene.ok("down", "--yes")


def end_of(log: Path) -> dict[str, Any] | None:
    """What a flow run says of its end; None while it runs."""
    return next((event for event in lines_of(log) if event["event"] == "closed"), None)
