"""Pictures as PNG, for MLflow and for plans, drawn by matplotlib, which is loaded with the first of them and not before.

What is on a picture lies with its subject. The charts of pages are charts.py's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tasks.report.data import number

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
