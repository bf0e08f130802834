"""Faults of data, artifacts and settings: flipped bits, poisoned and drifted data, secrets."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from pathlib import Path

from deployments.rehearsal.fault import Fault, check, exits, flip, rewrite
from deployments.rehearsal.scene import Scene
from tasks.artifacts import Check
from tasks.serving.client import ready_state


class ArtifactFlipped(Fault):
    name = "artifact-flipped"
    what = "A bit of the published tokens flips in the store."
    promise = "Whoever reads it refuses it by name, with exit code 5, and nothing is trained on it; what is served stays served."

    def inject(self, scene: Scene) -> None:
        (tokens,) = (ref for ref in scene.undisturbed("preprocess")["outputs"] if ref.startswith("tokens/"))
        self.path = max((scene.folder_of(tokens) / "files").rglob("train*.bin"), key=lambda path: path.stat().st_size)
        self.before = flip(self.path, scene.random)
        scene.mark("injected", f"a bit is flipped in {self.path.name}")
        self.answer = scene.run(*scene.training_words(self.name))
        scene.mark("noticed", f"the run ended with exit code {self.answer.code}")
        self.ready = ready_state(scene.url) or {}

    def expect(self, scene: Scene) -> Iterator[Check]:
        yield exits(self.answer, 5)
        message = (self.answer.fields.get("error") or {}).get("message", "")
        yield check("the error names the file", message[:200], self.path.name, self.path.name in message)
        status = self.answer.stage("train").get("status", "not_run")
        yield check("training", status, "not run", status != "ran")
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
        self.before = scene.served()
        scene.ok("dataset", "publish", "poisoned", folder / "shard.jsonl")
        scene.mark("injected", "poisoned is published")
        self.answer = scene.run("retrain", *scene.words, "--dataset", "poisoned")
        scene.mark("noticed", f"the run ended with exit code {self.answer.code}")

    def expect(self, scene: Scene) -> Iterator[Check]:
        yield exits(self.answer, 3)
        stopped = (self.answer.fields.get("error") or {}).get("stage")
        yield check("the gate", str(stopped), "validate", stopped == "validate")
        yield check("champion and endpoint", scene.served(), self.before, scene.served() == self.before)


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
            verdict = str(answer.fields.get("drift", {}).get("verdict", answer.summary()))
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
