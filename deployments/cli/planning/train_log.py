"""`headway train-log`: what a training log of Megatron-LM, Megatron-DeepSpeed, Primus or DeepSpeed says. Nothing is run or kept.

What is read: tasks/formats/megatron_log.py and deepspeed_log.py. See docs/megatron.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deployments.cli.output import say

if TYPE_CHECKING:
    from tasks.formats.megatron_log import Iteration, MegatronRun

SHOWN = 10
"""Steps that people are shown: the last ones. With --json all are there."""


def train_log(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A log, also compressed by gzip.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout, with every step.")] = False,
) -> None:
    """Show losses, learning rates, speed and the end of a training by its log, as `metrics.jsonl` of our own jobs has them."""
    from tasks.common.redaction import redact, redact_value
    from tasks.formats.deepspeed_log import read_deepspeed
    from tasks.formats.log_text import text_of
    from tasks.formats.megatron_log import read_megatron

    if not file.is_file():
        raise ValueError(f"there is no file {file}")
    log = text_of(file.read_bytes())
    if megatron := read_megatron(log.text):
        fields = _of_megatron(megatron)
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


def _of_megatron(run: MegatronRun) -> dict[str, Any]:
    last = run.iterations[-1]
    return {
        "tool": run.tool,
        "world": run.world,
        "steps": [_record(one) for one in run.iterations],
        "summary": {
            "step": last.number,
            "of": last.total,
            "complete": run.complete,
            "loss": last.loss,
            "step_seconds": run.seconds,
            "tflops_per_rank": run.tflops,
            "no_number": run.lost,
            "saved": run.saved,
            "unfinished_save": run.saving,
        },
        "ended_by": list(run.killed),
    }


def _record(one: Iteration) -> dict[str, Any]:
    """Under the names of `metrics.jsonl`; what the line does not say is left out."""
    output = {
        "step": one.number,
        "loss": one.loss,
        "learning_rate": one.learning_rate,
        "grad_norm": one.grad_norm,
        "step_seconds": one.seconds,
        "tflops_per_rank": one.tflops,
        "tokens_per_second_per_rank": one.tokens_per_second,
        "samples_per_second": one.samples_per_second or _samples_per_second(one),
        "consumed": one.samples,
        "skipped": one.skipped,
    }
    return {name: value for name, value in output.items() if value is not None}


def _samples_per_second(one: Iteration) -> float | None:
    return one.batch / one.seconds if one.batch and one.seconds else None


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
