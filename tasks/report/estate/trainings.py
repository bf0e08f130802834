"""What the folders of trainings in a home show: with what they trained, on how many machines, and how well.

A folder that was deleted shows nothing. What else a home shows is records.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tasks.common.process import read_json
from tasks.config.engines.registry import ENGINES
from tasks.report.estate.record import Record

MOST_WAITING = 0.05
"""Share of a training's time that may go into waiting for data."""
LEAST_SCALING = 0.8
"""Share of a rank's tokens a second that more ranks may leave it, to be near linear."""
SMALL = 100_000_000
"""Parameters of a model that validates a workflow."""


@dataclass(frozen=True)
class Training:
    """One that ended."""

    name: str
    settings: dict[str, Any]
    execution: dict[str, Any]
    cluster: dict[str, Any]
    metrics: dict[str, Any]

    @property
    def nodes(self) -> int:
        return int(self.cluster.get("nodes") or 1)

    @property
    def ranks(self) -> int:
        return self.nodes * int(self.cluster.get("ranks_per_node") or 1)


def trainings(home: Path) -> list[Training]:
    """All that ended, and whose folder is there."""
    result = []
    for path in sorted(home.glob("jobs/train-*/result.json")):
        job = read_json(path.parent / "job.json") or {}
        settings = job.get("settings") or {}
        if not settings.get("training"):
            continue
        ended, cluster = read_json(path) or {}, read_json(path.parent / "cluster.json") or {}
        result.append(
            Training(
                path.parent.name,
                settings["training"],
                settings.get("execution") or {},
                cluster,
                ended.get("metrics") or {},
            )
        )
    return result


def _of_trainings(home: Path, which: Callable[[Training], Any], so: str, *, else_: str) -> Record:
    """Met when one training is such; else it is a choice that nobody took, and not applicable."""
    each = trainings(home)
    if not each:
        return Record(None, "no folder of a training is there")
    such = [one.name for one in each if which(one)]
    return (
        Record(True, f"{so}: {', '.join(such[:5])}") if such else Record(None, f"{else_}: {len(each)}", applies=False)
    )


def _engine(name: str, home: Path) -> Record:
    return _of_trainings(
        home,
        lambda one: one.settings.get("engine") == name,
        f"trained with {name}",
        else_="trainings, all with another engine",
    )


def lora(home: Path) -> Record:
    return _of_trainings(
        home,
        lambda one: (one.settings.get("lora") or {}).get("rank"),
        "trained with LoRA",
        else_="trainings, all of every weight",
    )


def offloading(home: Path) -> Record:
    """State that lies in the host's memory or on its disk, whatever engine put it there."""
    return _of_trainings(
        home,
        lambda one: any(
            isinstance(section, dict) and section.get("offload", "none") != "none" for section in one.execution.values()
        ),
        "offloaded",
        else_="trainings, all with their state on the GPU",
    )


def distributed(home: Path) -> Record:
    return _of_trainings(
        home,
        lambda one: one.ranks > 1,
        "on several ranks",
        else_="trainings, each on one rank, which was enough",
    )


def nodes(home: Path) -> Record:
    return _of_trainings(
        home, lambda one: one.nodes > 1, "on several machines", else_="trainings, each on one machine, which was enough"
    )


def model_parallel(home: Path) -> Record:
    return _of_trainings(
        home,
        lambda one: any(
            int(one.execution.get(f"{kind}_parallel") or 1) > 1 for kind in ("tensor", "pipeline", "context")
        ),
        "the network divided",
        else_="trainings, each with the whole network on a rank, which was enough",
    )


def scratch(home: Path) -> Record:
    """Machines with GPUs copy their data to their own disks."""
    of_gpus = [one for one in trainings(home) if one.cluster.get("gpus_per_node")]
    if not of_gpus:
        return Record(None, "no folder of a training on GPUs is there")
    without = [one.name for one in of_gpus if not (one.cluster.get("scratch") or one.cluster.get("mirror"))]
    return Record(not without, f"without: {', '.join(without)}" if without else f"all of {len(of_gpus)}")


def waiting_for_data(home: Path) -> Record:
    shares = {one.name: float(one.metrics["data_share"]) for one in trainings(home) if "data_share" in one.metrics}
    if not shares:
        return Record(None, "no training shows how long it waited")
    worst = max(shares, key=lambda name: shares[name])
    return Record(
        shares[worst] <= MOST_WAITING, f"{worst} waited {shares[worst]:.1%} of its time, the most of {len(shares)}"
    )


def scaling(home: Path) -> Record:
    """The same training on fewer and on more ranks of a cluster."""
    rates: dict[tuple[str, ...], dict[int, float]] = defaultdict(dict)
    for one in trainings(home):
        if rate := one.metrics.get("tokens_per_second_per_rank"):
            key = [
                one.settings.get(name)
                for name in ("network", "engine", "precision", "sequence_length", "micro_batch_size")
            ]
            rates[str(one.cluster.get("name")), *map(str, key)][one.ranks] = float(rate)
    left = [of[max(of)] / of[min(of)] for of in rates.values() if len(of) > 1]
    if not left:
        return Record(None, "no training ran on fewer and on more ranks of a cluster")
    return Record(min(left) >= LEAST_SCALING, f"a rank among more did {min(left):.0%} of its work among fewer")


def small_model(home: Path) -> Record:
    sizes = {one.name: int(one.metrics["parameters"]) for one in trainings(home) if one.metrics.get("parameters")}
    if not sizes:
        return Record(None, "no training shows its size")
    least = min(sizes, key=lambda name: sizes[name])
    return Record(sizes[least] < SMALL, f"the smallest is {least}, of {sizes[least]:,} parameters")


def beating(home: Path) -> Record:
    """The supervisor looked at each machine while it trained."""
    each = trainings(home)
    if not each:
        return Record(None, "no folder of a training is there")
    silent = [one.name for one in each if not _any(home.glob(f"jobs/{one.name}/nodes/*/beat"))]
    return Record(not silent, f"never looked at: {', '.join(silent)}" if silent else f"all of {len(each)}")


def _any(values: Iterable[Any]) -> bool:
    return any(True for _ in values)


TRAININGS: dict[str, Callable[[Path], Record]] = {
    **{
        each.__name__: each
        for each in (
            lora,
            offloading,
            distributed,
            nodes,
            model_parallel,
            scratch,
            waiting_for_data,
            scaling,
            small_model,
            beating,
        )
    },
    **{f"engine_{name}": partial(_engine, name) for name in ENGINES},
}
