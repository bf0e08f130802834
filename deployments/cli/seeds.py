"""`headway seeds`: how far apart seeds of training alone put the models of a recipe. See docs/evaluation.md, "Seeds"."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from deployments.cli.output import say

if TYPE_CHECKING:
    from tasks.report.seeds import Recipe


def seeds(
    model: Annotated[str, typer.Argument(metavar="[MODEL]", help="Name of a line of models; without it, all.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
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
