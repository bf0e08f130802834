"""A plan's what-if as PNG pictures: by GPUs, cost against time, by depth of the network, by interval between saves.

The numbers are tasks/planning/planned_case.py's, handed in as plain curves: name -> points of x and y.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.report.pictures import ACCENT, INK, MUTED, WARN, picture
from tasks.report.scaling import size

NEAR = 1.3
"""A tick that is not so many times the one before has no number: they would overlap."""
Curve = Sequence[tuple[float, float]]
COLOURS = (ACCENT, WARN, INK)


def draw_by_gpus(path: Path, rates: Curve, chosen: float) -> Path:
    """Tokens a second of all GPUs, beside a straight line from the fewest."""
    gpus, first = [x for x, _ in rates], rates[0]

    def fill(axes: Any) -> None:
        axes.plot(gpus, [first[1] * x / first[0] for x in gpus], ":", color=INK, label="straight line from the fewest")
        _line(axes, "planned", rates, ACCENT)
        _marked(axes, chosen, "this plan")
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter("")
        axes.yaxis.set_major_formatter(lambda y, _: size(y))
        _log(axes, gpus, lambda x: f"{x:,.0f}")
        axes.legend(fontsize=9)

    return _draw(path, "Tokens a second, by GPUs", "GPUs", fill)


def draw_cost(
    path: Path, curves: Mapping[str, Sequence[tuple[float, float, int]]], front: Curve, currency: str
) -> Path:
    """Cost against days, failures included; each point says how many GPUs. `front`: what nothing is quicker and cheaper than."""

    def fill(axes: Any) -> None:
        for (name, points), colour in zip(curves.items(), COLOURS, strict=False):
            axes.plot([p[0] for p in points], [p[1] for p in points], "o", color=colour, label=name, markersize=5)
            for days, cost, gpus in points:
                axes.annotate(f"{gpus:,}", (days, cost), (4, 5), textcoords="offset points", fontsize=8, color=colour)
        if len(front) > 1:
            axes.plot(
                *zip(*front, strict=True),
                "-",
                color=MUTED,
                linewidth=1,
                label="nothing is quicker and cheaper",
                zorder=0,
            )
        axes.set_ylim(bottom=0)
        axes.margins(x=0.1, y=0.15)
        axes.set_ylim(0, axes.get_ylim()[1])
        axes.yaxis.set_major_formatter(lambda y, _: size(y))
        _log(axes, sorted(p[0] for points in curves.values() for p in points), lambda x: f"{x:.3g}")
        axes.legend(fontsize=9)

    return _draw(path, f"{currency} against time; numbers are GPUs", "days, failures included", fill)


def draw_by_depth(path: Path, rates: Curve) -> Path:
    """TFLOP/s of a GPU by parameters: the same width, other numbers of layers."""

    def fill(axes: Any) -> None:
        _line(axes, "planned", rates, ACCENT)
        axes.set_ylim(0, 1.15 * max(y for _, y in rates))
        _log(axes, [x for x, _ in rates], size)

    return _draw(path, "Model TFLOP/s of a GPU, by depth of the network", "parameters", fill)


def draw_by_interval(path: Path, curves: Mapping[str, Curve], chosen: float) -> Path:
    """Goodput by seconds between saves, by how often machines fail."""

    def fill(axes: Any) -> None:
        for (name, points), colour in zip(curves.items(), COLOURS, strict=False):
            axes.plot([x / 60 for x, _ in points], [y for _, y in points], "-", color=colour, label=name)
        _marked(axes, chosen / 60, f"chosen: {chosen / 60:.3g} min")
        axes.yaxis.set_major_formatter(lambda y, _: f"{y:.0%}")
        ticks = [x / 60 for x, _ in next(iter(curves.values()))]
        _log(axes, ticks[::4], lambda x: f"{x:.3g}")
        axes.legend(fontsize=9, loc="lower center")

    return _draw(path, "Goodput, by time between saves", "minutes between two saves", fill)


def _draw(path: Path, title: str, across: str, fill: Callable[[Any], None]) -> Path:
    with picture(path, (6.4, 4.4), dots=130) as figure:
        axes = figure.subplots()
        fill(axes)
        axes.set_title(title, loc="left", fontsize=11, color=INK)
        axes.set_xlabel(across)
    return path


def _line(axes: Any, name: str, points: Curve, colour: str) -> None:
    axes.plot([x for x, _ in points], [y for _, y in points], "o-", color=colour, label=name, markersize=5)


def _marked(axes: Any, place: float, text: str) -> None:
    axes.axvline(place, color=MUTED, linewidth=1, linestyle=(0, (4, 3)), label=text)


def _log(axes: Any, ticks: Sequence[float], report: Callable[[float], str]) -> None:
    axes.set_xscale("log")
    apart: list[float] = []
    for tick in ticks:
        if not apart or tick > NEAR * apart[-1]:
            apart.append(tick)
    axes.xaxis.minorticks_off()
    axes.set_xticks(apart, [report(tick) for tick in apart])
