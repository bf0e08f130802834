"""What is asked at a terminal before money is spent: the plan of a training, its cost, and yes or no.

Prefect's own question is `approval.before_train` (flows/support/agreement.py). See docs/planning.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tasks.common.errors import Cancelled, Missing

if TYPE_CHECKING:
    from tasks.config.flows import RetrainConfig


def require_wanted(settings: RetrainConfig, stages: Callable[[], list[dict[str, Any]]]) -> None:
    """Show the plan and ask, where training would run and costs more than `planning.spending.ask_above`. Raises Cancelled.

    Only at a terminal: a machine that starts runs is not asked; the gate of the stage `plan` holds for it too. `stages` is asked
    what a dry run says of each. What has no price is not asked about.
    """
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return
    from tasks.planning.case_of_config import case_of

    try:
        case = case_of(settings)
    except Missing:
        return  # machines without a size, or a base model: the stage `plan` reckons with what it measures
    except ValueError as error:
        typer.echo(f"headway: no plan before the start: {error}", err=True)
        return
    from deployments.cli.plan_page import page
    from tasks.common.home import home
    from tasks.planning.planned_case import plain, planned
    from tasks.planning.spending import paid_for

    try:
        paid = paid_for(settings.planning.spending, settings.cluster)
        hours = settings.planning.mean_hours_between_failures
        made = planned(case, home=home(), region=paid.region, paid=paid, hours_between_failures=hours)
    except ValueError as error:
        typer.echo(f"headway: no plan before the start: {error}", err=True)
        return
    total = made.cost.total if made.cost else None
    if total is None or total <= settings.planning.spending.ask_above:
        return
    training = next((stage for stage in stages() if stage["name"] == "train" and stage["status"] == "pending"), None)
    if training is None or _at_work(home(), training["key"]):
        return
    typer.echo(page(made, plain(made)), err=True)
    if not typer.confirm(f"Train for about {total:,.0f} {made.cost.currency if made.cost else ''}?", err=True):
        raise Cancelled("training was planned, and somebody said no: nothing was started")


def _at_work(home: Path, key: str | None) -> bool:
    """Whether a job of an earlier run has this training in hand: it is taken up, and was agreed to when it was started."""
    folders = home.glob(f"jobs/train-{key[:12]}") if key else ()
    return any((folder / "job.json").exists() and not (folder / "settled.json").exists() for folder in folders)
