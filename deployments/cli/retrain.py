"""`headway retrain`: the whole lifecycle from one command."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from deployments.cli.output import CommandError, say
from deployments.cli.person import As, asked


def retrain(
    config: Annotated[
        str, typer.Option("--config", "-c", help="A YAML file, or the name of a shipped configuration.")
    ] = "local",
    dataset: Annotated[
        str, typer.Option(help="NAME or dataset/NAME@VERSION; without it, the configuration's dataset.")
    ] = "",
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=VALUE", help="Change one setting; may be given often.")
    ] = None,
    from_stage: Annotated[
        str | None, typer.Option("--from", metavar="STAGE", help="Run this stage and all later ones again.")
    ] = None,
    to_stage: Annotated[str | None, typer.Option("--to", metavar="STAGE", help="Stop after this stage.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would run or be reused, and why; start nothing.")
    ] = False,
    as_: As = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Take a dataset to a served model: validate, preprocess, benchmark, plan, train, evaluate, export, deploy.

    What was done before with the same inputs and settings is reused. A run that was stopped goes on where it stopped.
    """
    from deployments.cli.configuration import load
    from tasks.redaction import require_no_secrets
    from tasks.registry.audit import audit
    from tasks.settings import home
    from tasks.storage import open_store

    settings = load(config, set_ or [])
    name = dataset or settings.dataset
    require_no_secrets({**settings.model_dump(mode="json"), "dataset": name})
    if dry_run:
        from deployments.cli.retraining import preview_fields

        fields = preview_fields(name, settings, from_stage, to_stage)
        lines = [f"{s['name']:<11}{s['status']:<9}{s['why']}" for s in fields["stages"]]
        say(fields, "\n".join(lines), as_json=as_json)
        return
    what = f"retrain {settings.training.model} on dataset {name}"
    with asked("run", as_, what=what):
        audit(open_store(home()), "start run", right="run", what=what)
        _run(name, settings, from_stage, to_stage, as_json)


def _run(name: str, settings: Any, from_stage: str | None, to_stage: str | None, as_json: bool) -> None:
    from deployments.cli.progress import console, summary
    from deployments.cli.retraining import Retraining

    out = console()
    run = Retraining(name, settings, from_stage, to_stage, out, ask=sys.stdin.isatty() and sys.stderr.isatty())
    error = run.start()
    fields = run.fields(error)
    outcomes = run.outcomes
    if outcomes:
        out.print()
        out.print(summary(outcomes))
    if error is not None:
        raise CommandError(error, fields, run.stopped_at) from error
    say(fields, run.words(), as_json=as_json)
