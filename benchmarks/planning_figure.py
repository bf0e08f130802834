"""The seed's figure 3, predicted and published: ZeRO 3 with offload on Azure's ND A100 v4, 175 billion to 2 trillion parameters.

    python -m benchmarks.planning_figure [FILE.png]

(a) TFLOP/s a GPU by size of the model on 1,024 GPUs, 8 samples of 1,024 tokens a GPU. (b) PFLOP/s of all GPUs by their number,
for 175 billion parameters and 16 samples a GPU. Published are the rows of benchmarks/planning_cases.yaml from the same page,
predicted is tasks/planning/steps.py; both count operations as Narayanan et al. 2021 do (96). Writes docs/images/plan-figure3.png.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.planning import Run, read
from tasks.planning import counts
from tasks.report.pictures import ACCENT, MUTED, STYLE, WARN

PICTURE = Path("docs/images/plan-figure3.png")
SOURCE = "DeepSpeed on Azure 2022"
SIZES = {96: "175 B", 105: "530 B", 128: "1 T", 160: "2 T"}
"""By layers."""
SERIES = (("published", WARN, "s"), ("predicted", ACCENT, "o"))


def by_size(runs: Sequence[Run]) -> list[Run]:
    found = [run for run in runs if (run.division.gpus, run.division.micro, run.sequence) == (1024, 8, 1024)]
    return sorted(found, key=lambda run: run.network.layers)


def by_gpus(runs: Sequence[Run]) -> list[Run]:
    found = [run for run in runs if (run.network.layers, run.division.micro, run.sequence) == (96, 16, 1024)]
    return sorted(found, key=lambda run: run.division.gpus)


def teraflops(run: Run) -> dict[str, float]:
    """Of one GPU, published and predicted."""
    operations = counts.flops_96(run.network, run.sequence, run.global_batch) / run.division.gpus / 1e12
    return {"published": operations / run.seconds, "predicted": operations / run.predicted().total}


def draw_sizes(axes: Any, runs: Sequence[Run]) -> None:
    for label, colour, mark in SERIES:
        values = [teraflops(run)[label] for run in runs]
        axes.plot(range(len(runs)), values, color=colour, marker=mark, label=label)
        for place, (run, value) in enumerate(zip(runs, values, strict=True)):
            above = value == max(teraflops(run).values())
            axes.annotate(
                f"{value:.0f}",
                (place, value),
                (0, 8 if above else -16),
                textcoords="offset points",
                ha="center",
                color=colour,
            )
    axes.set_xticks(range(len(runs)), [SIZES[run.network.layers] for run in runs])
    axes.set(ylim=(0, 230), xlabel="parameters", ylabel="TFLOP/s a GPU", title="(a) 1,024 GPUs, 8 samples a GPU")


def draw_gpus(axes: Any, runs: Sequence[Run]) -> None:
    gpus = [run.division.gpus for run in runs]
    first = teraflops(runs[0])["published"] / 1e3
    axes.plot([0, gpus[-1]], [0, first * gpus[-1]], "--", color=MUTED, label="straight, from the published 128")
    for label, colour, mark in SERIES:
        values = [teraflops(run)[label] * run.division.gpus / 1e3 for run in runs]
        axes.plot(gpus, values, color=colour, marker=mark, label=label)
    axes.set(xticks=gpus, ylim=(0, None), xlim=(0, 1100), xlabel="GPUs", ylabel="PFLOP/s of all GPUs")
    axes.set_title("(b) 175 B, 16 samples a GPU")


def draw(path: Path, runs: Sequence[Run]) -> None:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 4.2), layout="constrained")
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2)
        draw_sizes(left, by_size(runs))
        draw_gpus(right, by_gpus(runs))
        for axes in (left, right):
            axes.legend(frameon=False, loc="lower right")
        figure.savefig(path, dpi=120, format="png", metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("picture", nargs="?", type=Path, default=PICTURE)
    path = parser.parse_args().picture
    runs = [run for run in read() if run.source == SOURCE]
    draw(path, runs)
    for part, drawn in (("a", by_size(runs)), ("b", by_gpus(runs))):
        for run in drawn:
            rates = teraflops(run)
            said = f"published {rates['published']:5.0f}  predicted {rates['predicted']:5.0f} TFLOP/s a GPU"
            print(f"{part}  {run.name:24s} {said}  {run.ratio():.2f}")


if __name__ == "__main__":
    main()
