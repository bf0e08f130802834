"""What trainings tell: `headway scaling` and `headway seeds` of those that are stored, `headway train-log` of the log of any.

Nothing is run or kept. See docs/planning.md, docs/evaluation.md, "Seeds", and docs/megatron.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from deployments.cli.options import Json
from deployments.cli.output import aligned, say


def seeds(
    model: Annotated[str, typer.Argument(metavar="[MODEL]", help="The name of a model; by default all.")] = "",
    as_json: Json = False,
) -> None:
    """Show how much stored trainings with different seeds differ, and what comparison.seed_noise should be.

    Trains nothing. Train the same configuration with other seeds under another name, so that the champion is left alone:
    `headway retrain -c CONFIG --set training.model=NAME-seeds --set training.seed=1 --to evaluate`.
    """
    from tasks.common.errors import Missing
    from tasks.common.home import home
    from tasks.report.scaling import recipes
    from tasks.storage import open_store

    result = recipes(open_store(home()), model)
    if not result:
        what = f" of {model}" if model else ""
        raise Missing(
            f"no evaluation of a training{what} is stored in {home()}",
            remedy="`headway retrain --to evaluate` trains and measures; then again with another `--set training.seed=...`.",
        )
    words = []
    for recipe in result:
        lines = [f"{', '.join(recipe.models)}: {len(recipe.runs)} seed(s)"]
        lines += [
            f"  seed {run.seed:<6} {run.bits_per_byte:.4f} bits per byte  {run.evaluation}" for run in recipe.runs
        ]
        if recipe.deviation is None:
            lines.append("  Not enough to judge: a deviation needs at least two seeds, and three or more to be of use.")
        else:
            lines += [
                f"  mean {recipe.mean:.4f}, standard deviation {recipe.deviation:.2%}",
                f"  comparison.seed_noise: {recipe.seed_noise:.4f}   (larger than the deviation, for it is known from "
                f"{len(recipe.runs)} seeds only)",
            ]
        words.append("\n".join(lines))
    say(
        {"recipes": [{**recipe._asdict(), "runs": [run._asdict() for run in recipe.runs]} for recipe in result]},
        "\n\n".join(words),
        as_json=as_json,
    )


COLUMNS = ("parameters", "hardware", "engine", "ranks", "runs", "TFLOP/s a rank", "of linear", "planned", "MFU", "")


def scaling(
    model: Annotated[str, typer.Argument(metavar="[MODEL]", help="The name of a model; by default all.")] = "",
    picture: Annotated[str, typer.Option(metavar="FILE", help="Also write a picture as PNG.")] = "",
    as_json: Json = False,
) -> None:
    """Show how stored trainings scale: the rate of a GPU by GPUs and by parameters, and the plan's; regressions are flagged.

    Trainings of the same network, hardware, engine and precision form a curve; efficiency is relative to its fewest GPUs.
    """
    from tasks.common.errors import Missing
    from tasks.common.home import home
    from tasks.report.pictures import size
    from tasks.report.scaling import curves, draw_scaling, trainings
    from tasks.storage import open_store

    if picture and not picture.endswith(".png"):
        raise ValueError(f"--picture {picture!r}: give a file that ends in .png")
    result = trainings(open_store(home()), model)
    if not result:
        what = f" of {model}" if model else ""
        raise Missing(
            f"no training{what} with a measured rate is stored in {home()}",
            remedy="`headway retrain` trains and measures.",
        )
    made = curves(result)
    if picture:
        draw_scaling(made, Path(picture))
    fields = []
    rows: list[tuple[str, ...]] = [COLUMNS]
    for curve in made:
        about = (size(curve.parameters), curve.hardware, f"{curve.engine} {curve.precision}")
        points = []
        for point in curve.points:
            newest = point.newest
            points.append(
                {
                    "ranks": newest.ranks,
                    "efficiency": point.efficiency,
                    "fell": point.fell,
                    "runs": [one._asdict() for one in point.trained],
                }
            )
            cells = (
                str(newest.ranks),
                str(len(point.trained)),
                f"{newest.tflops:.4g}",
                "" if point.efficiency is None else f"{point.efficiency:.0%}",
                "" if newest.planned_tflops is None else f"{newest.planned_tflops:.4g}",
                "" if newest.mfu is None else f"{newest.mfu:.0%}",
                "" if point.fell is None else f"REGRESSION: {point.fell:.0%} below the median before",
            )
            rows.append((*about, *cells))
        fields.append({**curve._asdict(), "points": points})
    table = "\n".join([*aligned(rows), *([f"drawn: {picture}"] if picture else [])])
    say(
        {"curves": fields, "picture": picture or None},
        table,
        as_json=as_json,
    )


SHOWN = 10
"""Steps that people are shown: the last ones. With --json all are there."""


def train_log(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A log file; it may be compressed with gzip.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout, with every step.")] = False,
) -> None:
    """Show losses, learning rates, speed and the end of a training from its log, in the fields of our own `metrics.jsonl`."""
    from tasks.common.redaction import redact, redact_value
    from tasks.formats.log_text import text_of
    from tasks.formats.training_logs import read_deepspeed, read_megatron

    if not file.is_file():
        raise ValueError(f"there is no file {file}")
    log = text_of(file.read_bytes())
    if megatron := read_megatron(log.text):
        newest = megatron.iterations[-1]
        steps_of = []
        for iteration in megatron.iterations:
            output = {
                "step": iteration.number,
                "loss": iteration.loss,
                "learning_rate": iteration.learning_rate,
                "grad_norm": iteration.grad_norm,
                "step_seconds": iteration.seconds,
                "tflops_per_rank": iteration.tflops,
                "tokens_per_second_per_rank": iteration.tokens_per_second,
                "samples_per_second": iteration.samples_per_second
                or (iteration.batch / iteration.seconds if iteration.batch and iteration.seconds else None),
                "consumed": iteration.samples,
                "skipped": iteration.skipped,
            }
            # Under the names of `metrics.jsonl`; what the line does not say is left out.
            steps_of.append({name: value for name, value in output.items() if value is not None})
        fields = {
            "tool": megatron.tool,
            "world": megatron.world,
            "steps": steps_of,
            "summary": {
                "step": newest.number,
                "of": newest.total,
                "complete": megatron.complete,
                "loss": newest.loss,
                "step_seconds": megatron.seconds,
                "tflops_per_rank": megatron.tflops,
                "no_number": megatron.lost,
                "saved": megatron.saved,
                "unfinished_save": megatron.saving,
            },
            "ended_by": list(megatron.killed),
        }
    elif steps := read_deepspeed(log.text):
        names = ("step", "loss", "learning_rate", "seconds", "samples_per_second", "skipped")
        rows = [{name: getattr(one, name) for name in names if getattr(one, name) is not None} for one in steps]
        for row in rows:
            if "seconds" in row:
                row["step_seconds"] = row.pop("seconds")
        last = rows[-1]
        summary = {name: last.get(name) for name in ("step", "loss", "step_seconds", "samples_per_second", "skipped")}
        fields = {"tool": "deepspeed", "world": None, "steps": rows, "summary": summary, "ended_by": []}
    else:
        raise ValueError(
            f"{file} has no line of a training of Megatron-LM or DeepSpeed: is it the log of the last rank?"
        )
    fields = redact_value({**fields, "problems": list(log.problems)})
    say(fields, redact("\n".join(_page(fields))), as_json=as_json)


def _page(fields: dict[str, Any]) -> list[str]:
    """For people: what it comes to, the last steps, how it ended."""
    output = fields["summary"]
    words = [f"{name} {_figure(value)}" for name, value in output.items() if value is not None and value is not False]
    columns = list(dict.fromkeys(name for row in fields["steps"][-SHOWN:] for name in row))
    rows = [columns, *([_figure(row.get(name)) for name in columns] for row in fields["steps"][-SHOWN:])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(columns))]
    table = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return [f"{fields['tool']}: {', '.join(words)}", "", *table, *(f"ended by {why}" for why in fields["ended_by"])]


def _figure(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
