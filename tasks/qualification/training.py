"""The training probe: what a rank reaches, and how much of it is left when more machines train together."""

from __future__ import annotations

import math
from collections.abc import Iterator

from tasks.config.qualification import BenchmarkConfig
from tasks.hardware.sku import Sku
from tasks.qualification.limits import by_limit, cited_by, tolerances
from tasks.qualification.measured import Measurement, TrainingPoint
from tasks.qualification.peers import Rate
from tasks.qualification.verdicts import Reason

SLOW = "See the probe's shares of data, communication and compute; compare with the plan (`headway retrain --to plan`)."


def of_training(measurement: Measurement, sku: Sku, config: BenchmarkConfig) -> Iterator[Reason]:
    """Probes that gave nothing, are slow by the hardware's file, or scale badly by it."""
    points = sorted(measurement.training, key=lambda p: (p.ranks, p.engine, p.nodes, p.model_dump_json()))
    points = [point for point in points if point.status != "skipped"]
    if not points and "training" in config.groups and measurement.expected_nodes:
        yield _reason(
            None, measured=None, check="training", unit="", limit="a measurement", text="no training probe ran"
        )
    for point in points:
        if point.status != "measured" or throughput(point) is None:
            status = point.status if point.status != "measured" else "no throughput"
            text = f"{status}: {point.said}" if point.said else status
            yield _reason(
                point, measured=None, check="training_tflops", unit="TFLOP/s", limit="a measurement", text=text
            )
            continue
        if point.tflops_per_rank is not None:
            yield from _by_file(point, "training_tflops", point.tflops_per_rank, "TFLOP/s", sku)
        share = efficiency(point, points)
        if share is not None:
            yield from _by_file(point, "scaling_efficiency", share, "", sku)


def throughput(point: TrainingPoint) -> float | None:
    """Of a rank: TFLOP/s, else tokens a second."""
    if point.status != "measured":
        return None
    if point.tflops_per_rank is not None:
        return point.tflops_per_rank if math.isfinite(point.tflops_per_rank) else None
    return (
        point.tokens_per_step / point.step_seconds / point.ranks
        if point.step_seconds and point.tokens_per_step
        else None
    )


def efficiency(point: TrainingPoint, points: list[TrainingPoint]) -> float | None:
    """A rank's throughput as a share of the best one on the fewest ranks, same engine; None for those themselves."""
    alike = [p for p in points if p.engine == point.engine and throughput(p) is not None]
    fewest = min((p.ranks for p in alike), default=point.ranks)
    base = max((throughput(p) or 0.0 for p in alike if p.ranks == fewest), default=0.0)
    mine = throughput(point)
    return mine / base if base and mine is not None and point.ranks > fewest else None


def rates_of_training(measurement: Measurement, sku: Sku) -> tuple[Rate, ...]:
    """Probes on single machines, to be compared with each other."""
    if not tolerances(sku).peers_by_measured:
        return ()
    return tuple(
        Rate(p.nodes[0], "", f"training on {p.ranks} ranks", p.tflops_per_rank, "TFLOP/s")
        for p in measurement.training
        if len(p.nodes) == 1 and p.tflops_per_rank is not None and throughput(p) is not None
    )


def _by_file(point: TrainingPoint, check: str, measured: float, unit: str, sku: Sku) -> Iterator[Reason]:
    limit = sku.limits.get(check)
    if limit is None:
        return
    judged = by_limit(measured, limit)
    if judged.verdict != "healthy":
        result = _reason(point, measured=measured, check=check, unit=unit, limit=judged.limit, text=point.said)
        yield result.model_copy(
            update={"verdict": judged.verdict, "source": cited_by(sku, limit, judged.verdict), "remedy": SLOW}
        )


def _reason(
    point: TrainingPoint | None, *, measured: float | None, check: str, unit: str, limit: str, text: str
) -> Reason:
    """Of the machine where it ran on one, else of the cluster; unknown unless the file says otherwise."""
    nodes = tuple(sorted(point.nodes)) if point else ()
    return Reason(
        node=nodes[0] if len(nodes) == 1 else "",
        check=check,
        where=f"{point.engine} on {point.ranks} ranks" if point else "",
        measured=measured,
        unit=unit,
        limit=limit,
        source="Headway: what was not measured is unknown",
        verdict="unknown",
        said=text,
        remedy="See the job's logs; give it more time with benchmark.check_seconds where it ran out of it.",
        nodes=nodes if len(nodes) > 1 else (),
    )
