"""How trainings scale, from those that are stored: rate a GPU by GPUs and by size of the network, beside plan and straight line.

A training counts by what its checkpoint's manifest says. Groups hold what may be compared; drawing is scaling_picture.py, and the
plan's own numbers tasks/planning. What a qualification measured is shown by tasks/report/qualification/report.py.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tasks.config.cluster import machine_size
from tasks.config.engines.registry import ENGINES
from tasks.storage.manifest import Manifest
from tasks.storage.store import Store

FELL_BY = 0.05
"""A run whose rate is lower than the median of those before it by more than this share is flagged."""
TAKEN = ("tflops_per_rank", "tokens_per_second", "tokens_per_second_per_rank", "parameters", "steps")


class Trained(NamedTuple):
    """One training, as it was. A rank is a GPU, or a share of a CPU."""

    checkpoint: str
    created: str
    model: str
    parameters: int
    hardware: str
    ranks: int
    engine: str
    precision: str
    sequence_length: int
    divided: str
    """By what: `ddp`, `fsdp`, or tensor x pipeline x context parallel and ZeRO's stage."""
    tflops: float
    """Of one rank, by Megatron-LM's convention."""
    tokens_per_second: float
    mfu: float | None
    planned_tflops: float | None
    """What the plan expected; None: it had none."""


class Point(NamedTuple):
    """All trainings of a network on so many ranks."""

    trained: tuple[Trained, ...]
    """Oldest first."""
    efficiency: float | None
    """Of the newest, against a straight line from the fewest ranks of its curve; None for that one itself."""
    fell: float | None
    """Share by which the newest is below the median of those before it, where that is a regression; else None."""

    @property
    def newest(self) -> Trained:
        return self.trained[-1]


class Curve(NamedTuple):
    """One network on one kind of hardware by one engine: points by ranks, fewest first."""

    parameters: int
    hardware: str
    engine: str
    precision: str
    sequence_length: int
    points: tuple[Point, ...]


def trainings(store: Store, model: str = "") -> list[Trained]:
    """Trainings that are stored, oldest first; those of older releases that did not measure their rate are left out."""
    result = (trained(manifest) for manifest in store.manifests("checkpoint", model))
    return sorted((one for one in result if one), key=lambda one: one.created)


def trained(manifest: Manifest) -> Trained | None:
    """What a checkpoint's manifest says of its training; None for one that was not trained here, or not measured."""
    provenance = manifest.provenance
    config = provenance.config
    if provenance.stage != "train" or not config or any(not provenance.metrics.get(name) for name in TAKEN):
        return None
    training, metrics = config["training"], provenance.metrics
    error = metrics.get("plan_error")
    return Trained(
        checkpoint=manifest.ref,
        created=provenance.created,
        model=provenance.name,
        parameters=round(metrics["parameters"]),
        hardware=_hardware(config),
        ranks=round(metrics["tokens_per_second"] / metrics["tokens_per_second_per_rank"]),
        engine=training["engine"],
        precision=training["precision"],
        sequence_length=training["sequence_length"],
        divided=_divided(config),
        tflops=metrics["tflops_per_rank"],
        tokens_per_second=metrics["tokens_per_second"],
        mfu=metrics.get("mfu"),
        planned_tflops=None if error is None else metrics["tflops_per_rank"] * (1 + error),
    )


def curves(results: Iterable[Trained]) -> list[Curve]:
    """Curves of what may be compared, the largest network first; `results` are oldest first."""
    groups: dict[Curve, list[Trained]] = defaultdict(list)
    for one in results:
        groups[Curve(one.parameters, one.hardware, one.engine, one.precision, one.sequence_length, ())].append(one)
    made = [empty._replace(points=_points(runs)) for empty, runs in groups.items()]
    return sorted(made, key=lambda curve: (-curve.parameters, curve.hardware, curve.engine))


def _points(runs: Sequence[Trained]) -> tuple[Point, ...]:
    by_ranks: dict[int, list[Trained]] = defaultdict(list)
    for one in runs:
        by_ranks[one.ranks].append(one)
    first = by_ranks[min(by_ranks)][-1].tflops
    made = []
    for place, ranks in enumerate(sorted(by_ranks)):
        local = by_ranks[ranks]
        made.append(Point(tuple(local), local[-1].tflops / first if place else None, _fell(local)))
    return tuple(made)


def _fell(runs: Sequence[Trained]) -> float | None:
    """Only what was divided in the same way is compared: another division is another choice, and no regression."""
    *before, newest = runs
    alike = [one.tflops for one in before if one.divided == newest.divided]
    if not alike:
        return None
    share = 1 - newest.tflops / statistics.median(alike)
    return share if share > FELL_BY else None


def _hardware(config: Mapping[str, Any]) -> str:
    """As the settings name it; of machines without a name, the cluster's."""
    cluster = config["cluster"]
    named = (config["benchmark"]["sku"], machine_size(cluster), cluster["name"])
    return str(next(name for name in named if name))


def _divided(config: Mapping[str, Any]) -> str:
    how, engine = config["execution"], config["training"]["engine"]
    parts = [ENGINES[engine].divided(how)]
    for name in ("tensor", "pipeline", "context"):
        size = how.get(f"{name}_parallel", 1)
        parts.append(f"{name} {size}" if size > 1 else "")
    return ", ".join(part for part in parts if part) or "whole"
