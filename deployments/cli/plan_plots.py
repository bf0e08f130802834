"""`headway plan --plots DIR`: the what-if of each case as pictures. The numbers are tasks/planning/what_if.py's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tasks.planning.planned_case import Planned
    from tasks.planning.what_if import Point, WhatIf

LEVELS = {"low": "fails most", "mid": "as expected", "high": "fails least"}


def draw(made: Sequence[Planned], folder: Path, *, home: Path, region: str) -> list[Path]:
    """Write the pictures of every case, in a folder of its own where there are several. Raises ValueError before writing."""
    from tasks.planning.what_if import what_if

    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--plots {str(folder)!r} is a file: give a folder")
    found = [what_if(one, home=home, region=region) for one in made]
    written = []
    for number, (one, curves) in enumerate(zip(made, found, strict=True), start=1):
        place = folder / str(number) if len(made) > 1 else folder
        place.mkdir(parents=True, exist_ok=True)
        written += _pictures(curves, place, one.cost.currency if one.cost else "USD")
    return written


def _pictures(curves: WhatIf, folder: Path, currency: str) -> list[Path]:
    from tasks.planning.what_if import cheapest_by_time
    from tasks.report import plan_pictures as picture

    written = []
    if curves.by_gpus:
        rates = [(point.gpus, point.tokens_per_second) for point in curves.by_gpus]
        written.append(picture.draw_by_gpus(folder / "gpus.png", rates, curves.chosen.gpus))
    kinds = {"on demand": _priced(curves.by_gpus), "Spot": _priced(curves.by_gpus_on_spot)}
    kinds = {name: points for name, points in kinds.items() if points}
    if kinds:
        front = cheapest_by_time((*curves.by_gpus, *curves.by_gpus_on_spot))
        line = [(days, cost) for days, cost, _ in _priced(front)]
        written.append(picture.draw_cost(folder / "cost.png", kinds, line, currency))
    if curves.by_depth:
        sizes = [(point.parameters, point.tflops) for point in curves.by_depth]
        written.append(picture.draw_by_depth(folder / "depth.png", sizes))
    shares = {LEVELS[level]: points for level, points in curves.by_interval.items()}
    written.append(picture.draw_by_interval(folder / "interval.png", shares, curves.interval_seconds))
    return written


def _priced(points: Sequence[Point]) -> list[tuple[float, float, int]]:
    return [(p.days, p.cost, p.gpus) for p in points if p.days is not None and p.cost is not None]
