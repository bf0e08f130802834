"""How long a question about lineage takes over 10,000 runs and 100,000 artifacts: `python -m benchmarks.lineage [RUNS]`.

The store is a folder whose manifests are written as LocalStore writes them, with files that are named and not there: only
manifests are read. Ten artifacts a run; one tokenizer under all, a hundred datasets, a model that is trained on from run to run.
Measured in one process: the first build of the index, bringing it up to ten new runs, and questions, each as often as REPEATS
with the listing of the store inside it; memory is the process's at its highest.
"""

import hashlib
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.scratch import scratch
from tasks.config.files import load
from tasks.registry.ancestry import PLACE, Direction, LineageIndex, ask, walk
from tasks.storage.local import LocalStore
from tasks.storage.manifest import Content, FileEntry, Manifest, Provenance

RUNS = 10_000
DATASETS = 100
CONFIGS = 500
SERIES = 1_000
"""Runs whose checkpoint goes on from the one before: the longest way down."""
NEW_RUNS = 10
REPEATS = 5
STEPS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "quarantine": (("dataset",), ()),
    "validation": (("dataset", "quarantine"), ()),
    "tokens": (("dataset", "tokenizer"), ("validation",)),
    "qualification": ((), ()),
    "plan": (("tokens",), ("qualification",)),
    "checkpoint": (("tokens",), ("plan", "qualification")),
    "evaluation": (("checkpoint", "tokens"), ("qualification",)),
    "model": (("checkpoint",), ("evaluation",)),
}
"""What a run makes, from what and under what; with a report's two datasets, ten artifacts."""


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else RUNS
    with scratch() as base:
        synthetic = Synthetic(base)
        rows: dict[str, Any] = {"artifacts": 0}
        rows["writing the store, s"] = timed(lambda: synthetic.run(0, runs))
        rows["artifacts"] = synthetic.count
        rows |= measure(base, synthetic, runs)
    rows["peak memory, MB"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    print(json.dumps(rows, indent=1))


def measure(base: Path, synthetic: "Synthetic", runs: int) -> dict[str, Any]:
    store, index = LocalStore(base / "store"), base / PLACE
    rows: dict[str, Any] = {"first build, s": timed(lambda: ask(index, store, LineageIndex.damaged))}
    rows["index, MB"] = round(index.stat().st_size / 1e6)
    rows["nothing new, s"] = median(lambda: ask(index, store, LineageIndex.damaged))
    synthetic.run(runs, runs + NEW_RUNS)
    rows[f"{NEW_RUNS} new runs, s"] = timed(lambda: ask(index, store, LineageIndex.damaged))
    for said, ref, direction in synthetic.questions():
        asked = partial(walk, store, ref, direction=direction, index=index)
        answer = asked()
        rows[f"{said}: nodes"], rows[f"{said}: edges"] = len(answer["nodes"]), len(answer["edges"])
        rows[f"{said}, s"] = median(asked)
    return rows


class Synthetic:
    """A store that is written quickly. State: what was made last, by kind."""

    def __init__(self, base: Path) -> None:
        self.root, self.count = base / "store" / "artifacts", 0
        config = load("tiny", []).model_dump(mode="json")
        self.configs = [{**config, "training": {**config["training"], "seed": n}} for n in range(CONFIGS)]
        self.tokenizer = self.make("tokenizer", "base", "base", (), ())
        self.datasets = [self.make("dataset", f"data-{n}", str(n), (), ()) for n in range(DATASETS)]
        self.last, self.end = "", ""

    def run(self, start: int, end: int) -> None:
        for number in range(start, end):
            self.one(number)

    def one(self, number: int) -> None:
        name = f"model-{number % 200}"
        made = {"tokenizer": self.tokenizer, "dataset": self.datasets[number % DATASETS]}
        for cleaning in ("raw", "clean"):
            made["dataset"] = self.make("dataset", name, f"{cleaning} {number}", (made["dataset"],), (), number)
        for kind, (inputs, context) in STEPS.items():
            read = [made[each] for each in inputs]
            if kind == "checkpoint" and 0 < number < SERIES:
                read.append(self.last)
            made[kind] = self.make(kind, name, str(number), tuple(read), tuple(made[c] for c in context), number)
        self.last = made["checkpoint"] if number < SERIES else self.last
        self.end = made["model"] if number < SERIES else self.end

    def make(
        self, kind: str, name: str, data: str, inputs: tuple[str, ...], context: tuple[str, ...], number: int = 0
    ) -> str:
        sha256 = hashlib.sha256(f"{kind} {name} {data}".encode()).hexdigest()
        files = tuple(FileEntry(path=f"part-{n}.bin", size=1000 + n, sha256=sha256) for n in range(3))
        versions = tuple(sorted(ref.rpartition("@")[2] for ref in inputs))
        provenance = Provenance(
            name=name,
            created="2026-11-21T12:00:00+00:00",
            inputs=inputs,
            context=context,
            stage=f"make-{kind}",
            commit="c" * 40,
            dirty=False,
            config_digest="d" * 64,
            config=self.configs[number % CONFIGS],
            host="node",
            who="nobody",
        )
        manifest = Manifest(content=Content(kind=kind, files=files, inputs=versions), provenance=provenance)
        place = self.root / kind / name / manifest.version
        place.mkdir(parents=True)
        parts = manifest.model_dump(mode="json", exclude={"schema_"})
        (place / "manifest.json").write_text(json.dumps({"schema": manifest.schema_, **parts}))
        self.count += 1
        return f"{kind}/{name}@{place.name}"

    def questions(self) -> Iterator[tuple[str, str, Direction]]:
        yield "down from a model", self.end, "down"
        yield "forward from one dataset of a hundred", self.datasets[DATASETS - 1], "up"
        yield "forward from the tokenizer under all", self.tokenizer, "up"


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return round(time.perf_counter() - began, 3)


def median(work: Callable[[], object]) -> float:
    return round(statistics.median(timed(work) for _ in range(REPEATS)), 3)


if __name__ == "__main__":
    main()
