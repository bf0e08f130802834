"""How far apart seeds of training alone put the models of one recipe, estimated from trainings that are stored.

The gate to the champion takes it as `comparison.seed_noise`. See docs/evaluation.md, "Seeds".
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

from tasks.config.base import digest
from tasks.storage.manifest import Manifest
from tasks.storage.store import Store

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
        if training is not None and (run := _run(training, measured)):
            groups[_recipe(training, measured)].append((training.provenance.name, run, _confidence(measured)))
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


def _run(training: Manifest, measured: Manifest) -> Run | None:
    config, bits = training.provenance.config, measured.provenance.metrics.get("bits_per_byte")
    if training.provenance.stage != "train" or not config or bits is None:
        return None
    return Run(config["training"]["seed"], bits, training.ref, measured.ref, measured.provenance.created)


def _recipe(training: Manifest, measured: Manifest) -> str:
    config: dict[str, Any] = training.provenance.config or {}
    asked: dict[str, Any] = (measured.provenance.config or {}).get("evaluation", {})
    payload = {name: value for name, value in config["training"].items() if name not in NO_RECIPE}
    documents = sorted(set(measured.content.inputs) - {training.version})
    return digest({"training": payload, "from": training.content.inputs, "documents": documents, "evaluation": asked})


def _confidence(measured: Manifest) -> float:
    return float((measured.provenance.config or {}).get("evaluation", {}).get("confidence", 0.95))


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
