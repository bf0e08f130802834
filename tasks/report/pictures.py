"""Pictures as PNG, for MLflow and for plans, drawn by matplotlib, which is loaded with the first of them and not before.

The charts of pages are charts.py's. Of a simulation, a picture shows where the time goes by failure rate, and the goodput by
interval with the formula beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.report.data import number

if TYPE_CHECKING:
    from tasks.planning.simulation import Band

INK, MUTED, LINE, ACCENT, SOFT = "#1b2430", "#5b6675", "#dde2e9", "#1f5fbf", "#a9bfdf"
WARN, BAD = "#8a5a00", "#b3261e"
COLOURS = {"muted": MUTED, "line": LINE, "accent": ACCENT, "soft": SOFT, "warn": WARN, "bad": BAD}
"""By the names that they have on pages."""
STYLE = {
    "text.parse_math": False,
    "font.size": 12,
    "font.sans-serif": ["DejaVu Sans"],
    "text.color": INK,
    "axes.edgecolor": LINE,
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "legend.frameon": False,
}


def drawable() -> bool:
    """Whether matplotlib is installed (the extra `report`): a run goes without its pictures rather than fail."""
    return find_spec("matplotlib") is not None


def size(parameters: float) -> str:
    """Parameters as people write them: 870K, 125M, 175B, 2T."""
    for least, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if parameters >= least:
            return f"{parameters / least:.3g}{letter}"
    return f"{parameters:.0f}"


@contextmanager
def picture(path: Path, inches: tuple[float, float], dots: int) -> Iterator[Any]:
    """A figure to draw on, in the style of the pages; written when the block ends. Equal drawings give equal bytes."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=inches, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        figure.savefig(path, dpi=dots, facecolor="white", format="png", metadata={"Software": None})


def plain_numbers(*axes: Any) -> None:
    """Write the numbers of these axes as pages do."""
    for axis in axes:
        axis.set_major_formatter(lambda value, _: number(value))


def rows_of(axes: Any, names: list[str]) -> None:
    """A row a name, the first on top."""
    axes.set_yticks(range(len(names)), names, color=INK)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", linewidth=0.8)


NEAR = 1.3
"""A tick that is not so many times the one before has no number: they would overlap."""
Curve = Sequence[tuple[float, float]]
CURVES = (ACCENT, WARN, INK)


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
        for (name, points), colour in zip(curves.items(), CURVES, strict=False):
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
        for (name, points), colour in zip(curves.items(), CURVES, strict=False):
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


CAUSES = {
    "useful": ("useful", ACCENT),
    "stalled": ("saving", SOFT),
    "lost": ("work lost", BAD),
    "detecting": ("not noticed yet", "#8a5a44"),
    "waiting": ("waiting for a machine", "#5b4b8a"),
    "restarting": ("restarting", WARN),
    "slowed": ("stragglers", MUTED),
    "shrunk": ("fewer machines", LINE),
}
"""Cause -> in words, colour; in the order in which they are drawn."""
LEVELS = {"low": "fails most", "mid": "as expected", "high": "fails least"}
SHOWN = 0.002
"""A cause with less of all time is not named."""
ROOM = 1.3
"""How much longer an interval is than the one before, to have a number of its own."""


def draw(path: Path, title: str, bands: Mapping[str, Band], sweep: Sequence[tuple[float, Band]]) -> Path:
    """Write the picture. `bands` as LEVELS; `sweep` by rising interval, empty where none was made."""
    with picture(path, (11, 4.6), dots=150) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(1, 1.15)) if sweep else (figure.subplots(), None)
        named = [cause for cause in CAUSES if any(item.shares[cause] >= SHOWN for item in bands.values())]
        # A bar of all time for each rate; from the least useful share on, so that small causes are seen.
        floor = max(0.0, min(item.shares["useful"] for item in bands.values()) - 0.12)
        for place, item in enumerate(bands.values()):
            bottom = 0.0
            for cause, (words, colour) in CAUSES.items():
                label = words if not place and cause in named else None
                left.bar(place, item.shares[cause], bottom=bottom, color=colour, width=0.62, linewidth=0, label=label)
                bottom += item.shares[cause]
            q = item.goodput
            left.plot([place] * 2, [q.p5, q.p95], color=INK, linewidth=1.6, marker="_", markersize=9)
            left.text(place, floor + (1 - floor) * 0.03, f"{q.p50:.1%}", ha="center", color="white", fontweight="bold")
        left.set_ylim(floor, 1)
        rates = [f"one in {b.mean_seconds / 3600:.3g} h" if b.mean_seconds < 1e8 else "none" for b in bands.values()]
        names = [f"{LEVELS[level]}\n{often}" for level, often in zip(bands, rates, strict=True)]
        left.set_xticks(range(len(bands)), names)
        left.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        left.set_title("all time, and goodput with p5 to p95", loc="left", fontsize=10, color=INK)
        left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3, fontsize=9)
        if right is not None:
            minutes = [interval / 60 for interval, _ in sweep]
            low, high = [f.goodput.p5 for _, f in sweep], [f.goodput.p95 for _, f in sweep]
            right.fill_between(minutes, low, high, color=SOFT, alpha=0.5, linewidth=0)
            median = [f.goodput.p50 for _, f in sweep]
            right.plot(minutes, median, "o-", color=ACCENT, label="simulated, median; p5 to p95")
            right.plot(minutes, [f.expected for _, f in sweep], "--", color=INK, linewidth=1.3, label="by formula")
            best = max(sweep, key=lambda row: row[1].goodput.p50)[0] / 60
            right.axvline(best, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
            right.set_xscale("log")
            wide = [local for before, local in zip([0.0, *minutes], minutes, strict=False) if local > ROOM * before]
            right.set_xticks(wide, [f"{value:.3g}" for value in wide])
            right.xaxis.set_minor_formatter("")
            right.yaxis.set_major_formatter(lambda value, _: f"{value:.1%}")
            right.set_xlabel("minutes of computing between two saves")
            words = f"goodput by interval, rate as expected; best {best:.3g} minutes"
            right.set_title(words, loc="left", fontsize=10, color=INK)
            right.legend(loc="lower center", fontsize=9)
        figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    return path
