"""Faults of what runs the chain: the orchestrator, its answers, the Prefect server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from deployments.rehearsal.fault import RESTART_SECONDS, Fault, check, equal_losses, exits
from deployments.rehearsal.scene import (
    NotSeen,
    Scene,
    below,
    ended,
    kill_all,
    losses,
    parent_of,
    reported,
    stages_begun,
)
from tasks.artifacts import Check

JOBS = ("validate", "preprocess", "benchmark", "train", "evaluate", "export", "deploy")
"""Stages in each of which the orchestrator is killed once; `plan` takes no time in which it could be."""


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
