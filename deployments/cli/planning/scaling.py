"""`headway scaling`: how the trainings that are stored scale. See docs/planning.md."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deployments.cli.options import Json
from deployments.cli.output import say

if TYPE_CHECKING:
    from tasks.report.scaling import Curve, Point
    from tasks.report.seeds import Recipe

# `headway seeds`: how far apart seeds of training alone put the models of a recipe. See docs/evaluation.md, "Seeds".


def seeds(
    model: Annotated[str, typer.Argument(metavar="[MODEL]", help="Name of a line of models; without it, all.")] = "",
    as_json: Json = False,
) -> None:
    """Show by how much stored trainings differ that differ in their seed alone, and what comparison.seed_noise should be.

    Nothing is trained. Train a recipe with other seeds under another name, so that its champion is left alone:
    `headway retrain -c CONFIG --set training.model=NAME-seeds --set training.seed=1 --to evaluate`.
    """
    from tasks.common.errors import Missing
    from tasks.common.home import home
    from tasks.report.seeds import recipes
    from tasks.storage import open_store

    result = recipes(open_store(home()), model)
    if not result:
        what = f" of {model}" if model else ""
        raise Missing(
            f"no evaluation of a training{what} is stored",
            remedy="`headway retrain --to evaluate` trains and measures; then again with another `--set training.seed=...`.",
        )
    say(
        {"recipes": [{**recipe._asdict(), "runs": [run._asdict() for run in recipe.runs]} for recipe in result]},
        "\n\n".join(map(_words, result)),
        as_json=as_json,
    )


def _words(recipe: Recipe) -> str:
    lines = [f"{', '.join(recipe.models)}: {len(recipe.runs)} seed(s)"]
    lines += [f"  seed {run.seed:<6} {run.bits_per_byte:.4f} bits per byte  {run.evaluation}" for run in recipe.runs]
    if recipe.deviation is None:
        return "\n".join(
            [*lines, "  Not enough to judge: a deviation needs at least two seeds, and three or more to be of use."]
        )
    return "\n".join(
        [
            *lines,
            f"  mean {recipe.mean:.4f}, standard deviation {recipe.deviation:.2%}",
            f"  comparison.seed_noise: {recipe.seed_noise:.4f}   (larger than the deviation, for it is known from "
            f"{len(recipe.runs)} seeds only)",
        ]
    )


COLUMNS = ("parameters", "hardware", "engine", "ranks", "runs", "TFLOP/s a rank", "of linear", "planned", "MFU", "")


def scaling(
    model: Annotated[str, typer.Argument(metavar="[MODEL]", help="Name of a line of models; without it, all.")] = "",
    picture: Annotated[str, typer.Option(metavar="FILE", help="Draw it as PNG too.")] = "",
    as_json: Json = False,
) -> None:
    """Show how stored trainings scale: the rate of a GPU by GPUs and by parameters, beside the plan; regressions are flagged.

    Trainings of the same network, hardware, engine and precision make a curve; efficiency is against its fewest GPUs.
    """
    from tasks.common.errors import Missing
    from tasks.common.home import home
    from tasks.report.scaling import curves, draw_scaling, trainings
    from tasks.storage import open_store

    if picture and not picture.endswith(".png"):
        raise ValueError(f"--picture {picture!r}: give a file that ends in .png")
    result = trainings(open_store(home()), model)
    if not result:
        what = f" of {model}" if model else ""
        raise Missing(
            f"no training{what} with a measured rate is stored", remedy="`headway retrain` trains and measures."
        )
    made = curves(result)
    if picture:
        draw_scaling(made, Path(picture))
    say(
        {"curves": [_plain(curve) for curve in made], "picture": picture or None},
        _table(made, picture),
        as_json=as_json,
    )


def _plain(curve: Curve) -> dict[str, Any]:
    points = [
        {
            "ranks": point.newest.ranks,
            "efficiency": point.efficiency,
            "fell": point.fell,
            "runs": [one._asdict() for one in point.trained],
        }
        for point in curve.points
    ]
    return {**curve._asdict(), "points": points}


def _table(made: list[Curve], picture: str) -> str:
    from tasks.report.scaling import size

    rows: list[tuple[str, ...]] = [COLUMNS]
    for curve in made:
        about = (size(curve.parameters), curve.hardware, f"{curve.engine} {curve.precision}")
        rows += [(*about, *_cells(point)) for point in curve.points]
    widths = [max(len(row[place]) for row in rows) for place in range(len(COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, *([f"drawn: {picture}"] if picture else [])])


def _cells(point: Point) -> tuple[str, ...]:
    newest = point.newest
    return (
        str(newest.ranks),
        str(len(point.trained)),
        f"{newest.tflops:.4g}",
        "" if point.efficiency is None else f"{point.efficiency:.0%}",
        "" if newest.planned_tflops is None else f"{newest.planned_tflops:.4g}",
        "" if newest.mfu is None else f"{newest.mfu:.0%}",
        "" if point.fell is None else f"REGRESSION: {point.fell:.0%} below the median before",
    )
