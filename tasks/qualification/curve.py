"""A bandwidth curve over the sizes of messages, and not only its last row.

Rates of large messages rise and level off. A size far below what smaller and larger ones reach, rows of one size that disagree,
and a curve that steps back again and again are faults of a link or of settings, though average and last row may look fine.
"""

from __future__ import annotations

from collections.abc import Iterator

from tasks.common.names import Verdict
from tasks.qualification.merged import Merged, Point, size
from tasks.qualification.tolerances import Tolerances
from tasks.qualification.verdicts import Reason

SOURCE = "the other sizes of the same curve"
FABRIC = "Look for a link at reduced width, congestion or a wrong NCCL setting; run `headway qualify --full`."
MANY_APART = 3
"""So many rows that disagree, and at least half of them all, fail."""


def of_curve(sweep: Merged, allowed: Tolerances) -> Iterator[Reason]:
    """What is odd about it."""
    points = [point for point in sweep.points if point.bytes >= allowed.curve_bytes and point.rate is not None]
    yield from _collapse(sweep, points, allowed)
    yield from _apart(sweep, points, allowed)
    yield from _steps(sweep, points, allowed)


def _collapse(sweep: Merged, points: list[Point], allowed: Tolerances) -> Iterator[Reason]:
    """The worst size, against the best smaller and the best larger one, the lower of the two; the last against smaller ones."""
    rates = [point.rate or 0.0 for point in points]
    found: list[tuple[float, Point, float]] = []
    for number in range(1, len(points)):
        expected = min(max(rates[:number]), max(rates[number + 1 :], default=max(rates[:number])))
        if expected > 0 and rates[number] < allowed.hole_warn * expected:
            found.append((rates[number] / expected, points[number], expected))
    if found:
        share, point, expected = min(found)
        level = allowed.hole_fail if allowed.curve_fails and share < allowed.hole_fail else allowed.hole_warn
        yield _odd(
            sweep,
            f"busbw at {size(point.bytes)}",
            measured=point.rate,
            unit="GB/s",
            limit=f">= {level * expected:.4g}",
            verdict="failed" if level == allowed.hole_fail else "degraded",
            said=f"it collapses: smaller and larger messages reach {expected:.4g} GB/s",
        )


def _apart(sweep: Merged, points: list[Point], allowed: Tolerances) -> Iterator[Reason]:
    both = [(p, min(p.busbw, p.in_place) / max(p.busbw, p.in_place)) for p in points if p.busbw and p.in_place]
    far = [(share, point) for point, share in both if share < allowed.apart]
    if len(far) < allowed.apart_rows:
        return
    many = allowed.curve_fails and len(far) >= max(MANY_APART, len(both) / 2)
    share, point = min(far)
    yield _odd(
        sweep,
        f"in place against out of place at {size(point.bytes)}",
        measured=share,
        unit="",
        limit=f">= {allowed.apart}",
        verdict="failed" if many else "degraded",
        said=f"erratic: {len(far)} of {len(both)} sizes disagree",
    )


def _steps(sweep: Merged, points: list[Point], allowed: Tolerances) -> Iterator[Reason]:
    rates = [point.rate or 0.0 for point in points]
    back = [
        b.bytes
        for a, b, before, now in zip(points, points[1:], rates, rates[1:], strict=False)
        if a.bytes < b.bytes and now < allowed.step_back * before
    ]
    if len(back) >= allowed.steps_back:
        yield _odd(
            sweep,
            "busbw over sizes",
            measured=float(len(back)),
            unit="steps back",
            limit=f"<= {allowed.steps_back - 1}",
            verdict="degraded",
            said=f"it falls at {', '.join(map(size, back))}",
        )


def _odd(
    sweep: Merged, what: str, *, measured: float | None, unit: str, limit: str, verdict: Verdict, said: str
) -> Reason:
    return Reason(
        node="",
        check=f"{sweep.collective} {what}",
        measured=measured,
        unit=unit,
        limit=limit,
        source=SOURCE,
        verdict=verdict,
        said=said,
        remedy=FABRIC,
    )
