"""Of a qualification's page: the training probe, as a scaling curve with its efficiency and the shares of a step."""

from __future__ import annotations

from collections.abc import Sequence

from tasks.qualification.measured import TrainingPoint
from tasks.report.data import number, percent
from tasks.report.markup import Html, figure, grid, join, tag
from tasks.report.qualification.charts import Line, chart
from tasks.report.qualification.data import Found, finite, four

SHARES = {"compute": "compute_share", "communication": "communication_share", "data": "data_share"}
HEADS = ("Machines", "Ranks", "Step, s", "TFLOP/s a rank", "Tokens a second", "Efficiency", "Share of a step")


def training(found: Found) -> Html:
    """A curve where there are several sizes, a row a size."""
    points = sorted(
        (point for point in found.measured.training if finite(point.tflops_per_rank)), key=lambda point: point.ranks
    )
    if not points:
        return Html()
    first = points[0]
    said = (
        f"FLOPs as {first.convention or 'nobody said'} counts them; {first.engine}. Efficiency is against the smallest."
    )
    table = grid(HEADS, [_row(point, first) for point in points], class_="training")
    return join(tag("div", _curve(points), class_="figures"), tag("p", said, class_="note"), _legend(), table)


def efficiency(point: TrainingPoint, first: TrainingPoint) -> float:
    """Rate a rank by that of the smallest size."""
    return (point.tflops_per_rank or 0.0) / (first.tflops_per_rank or 1.0)


def _curve(points: Sequence[TrainingPoint]) -> Html:
    if len(points) < 2:
        return Html()
    first, last = points[0], points[-1]
    total = [(len(point.nodes), (point.tflops_per_rank or 0.0) * point.ranks) for point in points]
    ideal = [(len(point.nodes), (first.tflops_per_rank or 0.0) * point.ranks) for point in points]
    lines = [
        Line("ideal", tuple((float(nodes), rate) for nodes, rate in ideal)),
        Line("out", tuple((float(nodes), rate) for nodes, rate in total), dots=True),
    ]
    kept = f"{percent(efficiency(last, first))} at {len(last.nodes):,}"
    said = f"TFLOP/s of all ranks by machines; dashed: as many times the first. {kept}"
    drawn = chart("scaling", f"Training rate on up to {len(last.nodes):,} machines", lines, bytes_=False)
    return figure(drawn, "Scaling", said)


def _row(point: TrainingPoint, first: TrainingPoint) -> tuple[str, ...]:
    step = finite(point.step_seconds)
    return (
        number(len(point.nodes)),
        number(point.ranks),
        number(four(step)) if step else "N/A",
        number(four(point.tflops_per_rank or 0.0)),
        number(round(point.tokens_per_step / step)) if step else "N/A",
        percent(efficiency(point, first)),
        _shares(point),
    )


def _shares(point: TrainingPoint) -> Html:
    """A bar of the three parts; nothing where they were not measured."""
    told = {name: finite(getattr(point, field)) for name, field in SHARES.items()}
    known = {name: value for name, value in told.items() if value is not None}
    if not known:
        return Html()
    left, shapes = 0.0, []
    for name, value in known.items():
        wide = 100 * min(max(value, 0.0), 1.0)
        shapes.append(f'<rect x="{left:.2f}%" width="{wide:.2f}%" height="14" class="{name}"/>')
        left += wide
    bar = Html(f'<svg class="shares" width="100%" height="14" aria-hidden="true">{"".join(shapes)}</svg>')
    return join(bar, tag("small", ", ".join(f"{name} {percent(value)}" for name, value in known.items())))


def _legend() -> Html:
    head = '<svg class="shares key" width="26" height="14" aria-hidden="true"><rect width="26" height="14"'
    items = (f'<li>{head} class="{name}"/></svg>{name}</li>' for name in SHARES)
    return Html(f'<ul class="legend">{"".join(items)}</ul>')
