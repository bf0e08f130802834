"""What stored trainings tell together: how they scale with GPUs and size of the network, and how far apart seeds put models.

A training counts by what its checkpoint's manifest says. Groups hold what may be compared; the plan's own numbers are
tasks/planning's. What a qualification measured is shown by tasks/report/qualification/report.py.

The gate to the champion takes the distance of seeds as `comparison.seed_noise`. See docs/evaluation.md, "Seeds".
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

from tasks.config.base import digest
from tasks.config.cluster import machine_size
from tasks.config.engines.registry import ENGINES
from tasks.report.pictures import ACCENT, INK, WARN, picture, plain_numbers, size
from tasks.storage.manifest import Manifest
from tasks.storage.store import Store

ROOM = 1.2
"""Above the highest bar of the picture, for the legend."""
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
    # As the settings name it; of machines without a name, the cluster's
    cluster = config["cluster"]
    named = (config["benchmark"]["sku"], machine_size(cluster), cluster["name"])
    hardware = str(next(name for name in named if name))
    how, engine = config["execution"], config["training"]["engine"]
    parts = [ENGINES[engine].divided(how)]
    for name in ("tensor", "pipeline", "context"):
        size = how.get(f"{name}_parallel", 1)
        parts.append(f"{name} {size}" if size > 1 else "")
    return Trained(
        checkpoint=manifest.ref,
        created=provenance.created,
        model=provenance.name,
        parameters=round(metrics["parameters"]),
        hardware=hardware,
        ranks=round(metrics["tokens_per_second"] / metrics["tokens_per_second_per_rank"]),
        engine=training["engine"],
        precision=training["precision"],
        sequence_length=training["sequence_length"],
        divided=", ".join(part for part in parts if part) or "whole",
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
        *before, newest = by_ranks[ranks]
        # Only what was divided in the same way is compared: another division is another choice, and no regression.
        alike = [one.tflops for one in before if one.divided == newest.divided]
        fell = 1 - newest.tflops / statistics.median(alike) if alike else 0.0
        speedup = newest.tflops / first if place else None
        made.append(Point((*before, newest), speedup, fell if fell > FELL_BY else None))
    return tuple(made)


def draw_scaling(curves: Sequence[Curve], path: Path) -> None:
    """Write the picture of at least one curve, in the form of Figure 3 of DeepSpeed on Azure, July 2022."""
    with picture(path, (11, 4.6), dots=110) as figure:
        sizes, ranks = figure.subplots(1, 2)
        # Of each curve, its most ranks
        shown = sorted((curve.points[-1] for curve in curves), key=lambda point: point.newest.parameters)
        places = range(len(shown))
        sizes.bar(places, [point.newest.tflops for point in shown], color=ACCENT, width=0.6, label="measured")
        _planned(sizes, list(places), shown, whole=False)
        sizes.set_xticks(places, [f"{size(p.newest.parameters)}\n{p.newest.ranks} ranks" for p in shown])
        sizes.set_xlabel(", ".join(dict.fromkeys(point.newest.hardware for point in shown)))
        sizes.set_title("TFLOP/s of one GPU or rank, by parameters")
        sizes.set_ylim(0, ROOM * max(max(p.newest.tflops, p.newest.planned_tflops or 0.0) for p in shown))
        sizes.legend(frameon=False, ncols=2, loc="upper left")
        # Of the curve with most points, by ranks
        curve = max(curves, key=lambda curve: (len(curve.points), curve.parameters))
        counts = [point.newest.ranks for point in curve.points]
        whole = [point.newest.tflops * point.newest.ranks for point in curve.points]
        straight = [curve.points[0].newest.tflops * count for count in counts]
        ranks.plot(counts, straight, color=INK, linestyle=":", label="straight line from the fewest")
        ranks.plot(counts, whole, color=ACCENT, marker="o", label="measured")
        _planned(ranks, counts, curve.points, whole=True)
        for point, total in zip(curve.points, whole, strict=True):
            if point.fell:
                place = (point.newest.ranks, total)
                fell = f"-{point.fell:.0%}"
                ranks.annotate(fell, place, (-6, -14), textcoords="offset points", ha="right", color=WARN)
        ranks.set_title(f"TFLOP/s of all, {size(curve.parameters)} on {curve.hardware}")
        ranks.set_xlabel("GPUs or ranks")
        ranks.set_ylim(bottom=0)
        ranks.legend(frameon=False)
        plain_numbers(ranks.xaxis, ranks.yaxis)


def _planned(axes: Any, places: Sequence[float], points: Sequence[Point], *, whole: bool) -> None:
    results = [
        (place, point.newest.planned_tflops * (point.newest.ranks if whole else 1))
        for place, point in zip(places, points, strict=True)
        if point.newest.planned_tflops
    ]
    if results:
        axes.plot(*zip(*results, strict=True), color=WARN, marker="x", linestyle="", markersize=8, label="planned")


NO_RECIPE = ("seed", "model")
"""Settings of training in which runs of one recipe may differ."""


class Run(NamedTuple):
    """One training and its measure."""

    seed: int
    bits_per_byte: float
    checkpoint: str
    evaluation: str
    created: str


class Recipe(NamedTuple):
    """Trainings that differ in their seed alone: same settings, data and base, measured on the same documents."""

    models: tuple[str, ...]
    """The names under which they were trained."""
    runs: tuple[Run, ...]
    """Lowest seed first; of a seed that was trained twice, the newest."""
    mean: float
    """Bits per byte."""
    deviation: float | None
    """Relative standard deviation of bits per byte, of the sample; None of fewer than two seeds."""
    seed_noise: float | None
    """What `comparison.seed_noise` should be: see `noise`."""


def recipes(store: Store, model: str = "") -> list[Recipe]:
    """The recipes of what is stored, the one with most seeds first; of one name, or of all."""
    trained = {manifest.ref: manifest for manifest in store.manifests("checkpoint", model)}
    groups: dict[str, list[tuple[str, Run, float]]] = defaultdict(list)
    for measured in store.manifests("evaluation", model):
        of = [ref for ref in measured.provenance.inputs if ref.startswith("checkpoint/")]
        training = trained.get(of[0]) if of else None
        if training is None or training.provenance.stage != "train":
            continue
        config, bits = training.provenance.config, measured.provenance.metrics.get("bits_per_byte")
        if config and bits is not None:
            run = Run(config["training"]["seed"], bits, training.ref, measured.ref, measured.provenance.created)
            groups[_recipe(training, measured)].append(
                (
                    training.provenance.name,
                    run,
                    float((measured.provenance.config or {}).get("evaluation", {}).get("confidence", 0.95)),
                )
            )
    results = [_summary(members) for members in groups.values()]
    return sorted(results, key=lambda recipe: (-len(recipe.runs), recipe.models))


def noise(values: Sequence[float], *, confidence: float) -> float:
    """The relative standard deviation of bits per byte over seeds, made larger for how badly few runs tell it.

    The difference of two models over sqrt(2) of the sample's deviation has Student's distribution with one degree of freedom
    fewer than runs, while `comparison.seed_noise` is taken as known, with a normal quantile: so the deviation is multiplied by
    the ratio of both quantiles (3 runs: 2.20, 5: 1.42, 10: 1.15 at 95 %). Raises ValueError for fewer than two values.
    """
    if len(values) < 2:
        raise ValueError(f"{len(values)} value(s): a deviation needs trainings with at least two seeds")
    from scipy import stats  # half a second, which only this command pays

    at = (1 + confidence) / 2
    wider = float(stats.t.ppf(at, len(values) - 1)) / NormalDist().inv_cdf(at)
    return statistics.stdev(values) / statistics.fmean(values) * wider


def _recipe(training: Manifest, measured: Manifest) -> str:
    config: dict[str, Any] = training.provenance.config or {}
    asked: dict[str, Any] = (measured.provenance.config or {}).get("evaluation", {})
    payload = {name: value for name, value in config["training"].items() if name not in NO_RECIPE}
    documents = sorted(set(measured.content.inputs) - {training.version})
    return digest({"training": payload, "from": training.content.inputs, "documents": documents, "evaluation": asked})


def _summary(members: list[tuple[str, Run, float]]) -> Recipe:
    newest = {run.seed: run for _, run, _ in sorted(members, key=lambda member: member[1].created)}
    runs = tuple(newest[seed] for seed in sorted(newest))
    values = [run.bits_per_byte for run in runs]
    mean, enough = statistics.fmean(values), len(values) > 1
    return Recipe(
        models=tuple(sorted({name for name, _, _ in members})),
        runs=runs,
        mean=mean,
        deviation=statistics.stdev(values) / mean if enough else None,
        seed_noise=noise(values, confidence=members[0][2]) if enough else None,
    )
