"""`headway retrain`: the whole lifecycle from one command."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deployments.cli.operations.users import As, asked
from deployments.cli.options import Config, Json, Set, look_at_gpus, require_dataset
from deployments.cli.output import CommandError, harmless, say, visible
from deployments.cli.planning.plan import before_start
from tasks.common.errors import Cancelled, GateFailed, Unknown
from tasks.common.home import home
from tasks.common.redaction import require_no_secrets
from tasks.config.base import config_digest
from tasks.config.continue_from import ContinueFrom
from tasks.security.audit import audit
from tasks.storage import open_store

if TYPE_CHECKING:
    from tasks.config.flows import RetrainConfig


def require_wanted(settings: RetrainConfig, stages: Callable[[], list[dict[str, Any]]]) -> None:
    """Show the plan and ask, where training would run and costs more than `planning.spending.ask_above`. Raises Cancelled.

    Only at a terminal: a machine that starts runs is not asked; the gate of the stage `plan` holds for it too. Prefect's own
    question is `approval.before_train` (flows/support/agreement.py). See docs/planning.md. `stages` is asked what a dry run
    says of each. What has no price is not asked about.
    """
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return
    try:
        result = before_start(settings)
    except ValueError as error:
        typer.echo(f"headway: no plan before the start: {error}", err=True)
        return
    if result is None:
        return  # machines without a size, or a base model: the stage `plan` reckons with what it measures
    cost = result[0]["cost"] or {}
    total = cost.get("total")
    if total is None or total <= settings.planning.spending.ask_above:
        return
    training = next((stage for stage in stages() if stage["name"] == "train" and stage["status"] == "pending"), None)
    if training is None or at_work(home(), training["key"]):
        return
    typer.echo(result[1], err=True)
    if not typer.confirm(f"Train for about {total:,.0f} {cost['currency']}?", err=True):
        raise Cancelled("training was planned, and somebody said no: nothing was started")


def at_work(home: Path, key: str | None) -> bool:
    """Whether a job of an earlier run has this training in hand: it is taken up, and was agreed to when it was started."""
    folders = home.glob(f"jobs/train-{key[:12]}") if key else ()
    return any((folder / "job.json").exists() and not (folder / "settled.json").exists() for folder in folders)


def retrain(
    config: Config = None,
    dataset: Annotated[
        str, typer.Option(help="NAME or dataset/NAME@VERSION; by default the configuration's dataset.")
    ] = "",
    set_: Set = None,
    from_stage: Annotated[
        str | None, typer.Option("--from", metavar="STAGE", help="Run this stage and all later ones again.")
    ] = None,
    to_stage: Annotated[str | None, typer.Option("--to", metavar="STAGE", help="Stop after this stage.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would run or be reused, and why; start nothing.")
    ] = False,
    continue_from: Annotated[
        str,
        typer.Option(
            metavar="JOB",
            help="Start from the newest good checkpoint of this training job, named as `headway jobs --all` shows it.",
        ),
    ] = "",
    force: Annotated[
        bool, typer.Option("--force", help="With --continue-from: continue even if settings or data changed; audited.")
    ] = False,
    reason: Annotated[
        str,
        typer.Option(
            help="With --continue-from: why, for the audit log; required with --force. Another reason chooses a checkpoint again."
        ),
    ] = "",
    yes: Annotated[
        bool,
        typer.Option("--yes", help="Do not ask before a training that costs more than planning.spending.ask_above."),
    ] = False,
    as_: As = "",
    as_json: Json = False,
) -> None:
    """Take a dataset to a served model: validate, preprocess, benchmark, plan, train, evaluate, export, deploy.

    Results of earlier runs with the same inputs and settings are reused. A run that was stopped continues where it stopped.
    """
    from tasks.config.files import load

    _require_stages(("--from", from_stage), ("--to", to_stage))
    settings = load(config or "local", set_ or [])
    name = dataset or settings.dataset
    require_no_secrets({**settings.model_dump(mode="json"), "dataset": name, "reason": reason})
    look_at_gpus(settings.cluster)
    origin = ContinueFrom(job=continue_from, force=force, reason=reason)
    if dry_run:
        _require_port(settings, to_stage)
        fields, closed = _preview(name, settings, from_stage, to_stage, origin)
        words = "\n".join(f"{s['name']:<11}{s['status'].replace('_', ' '):<12}{s['why']}" for s in fields["stages"])
        if plan := _plan_of_training(settings, fields["stages"]):
            fields["plan"], text = plan
            words += f"\n\n{text}"
        if closed:
            if not as_json:
                typer.echo(harmless(words))
            raise CommandError(closed, fields)
        say(fields, words, as_json=as_json)
        return
    if not yes and not as_json:
        require_wanted(settings, lambda: _possible(name, settings, from_stage, to_stage, origin))
    what = f"retrain {settings.training.model} on dataset {name}"
    print(visible(f"{what} ..."), file=sys.stderr, flush=True)  # before what takes seconds to import
    with asked("run", as_, what=what):
        from deployments.cli.running import run_and_tell

        audit(open_store(home()), "start run", right="run", what=what)
        arguments = {"dataset": name, "from_stage": from_stage, "to_stage": to_stage, "continue_from": origin}
        run_and_tell(
            "retrain",
            settings,
            arguments,
            preflight=lambda: _preflight(name, settings, to_stage, origin),
            as_json=as_json,
        )


def _plan_of_training(settings: RetrainConfig, stages: list[dict[str, Any]]) -> tuple[dict[str, Any], str] | None:
    """The plan with its price, for a dry run whose training would run on machines of a known VM size."""
    if not any(stage["name"] == "train" and stage["status"] == "pending" for stage in stages):
        return None
    try:
        return before_start(settings)
    except ValueError as error:
        typer.echo(f"headway: no plan before the start: {error}", err=True)
        return None


def _preview(
    name: str, settings: Any, from_stage: Any, to_stage: Any, origin: Any
) -> tuple[dict[str, Any], GateFailed | None]:
    from flows.retrain import preview

    try:
        dataset, stages, closed = preview(name, settings, from_stage, to_stage, origin)
    except Unknown:
        require_dataset(name, "--dataset")  # of a dataset that there is not, the remedy names the option
        raise
    status = "gate_closed" if closed else "completed"
    return {"status": status, "dataset": dataset, "config_digest": config_digest(settings), "stages": stages}, closed


def _possible(name: str, settings: Any, from_stage: Any, to_stage: Any, origin: Any) -> list[dict[str, Any]]:
    """The stages of a dry run. Raises what a start would be refused for: nobody is asked about a run that cannot begin."""
    _preflight(name, settings, to_stage, origin)
    fields, closed = _preview(name, settings, from_stage, to_stage, origin)
    if closed:
        raise closed
    stages: list[dict[str, Any]] = fields["stages"]
    return stages


def _preflight(name: str, settings: Any, to_stage: Any, origin: Any) -> None:
    """Refuse what is wrong before anything is spent: dataset, port, hardware and its proof, checkpoint to continue from."""
    from flows.support.continuing import require_possible
    from tasks.benchmark import hardware_of
    from tasks.orchestration.node_exclusion import require_proof

    require_dataset(name, "--dataset")
    settings.cluster.require_own()
    hardware_of(settings.cluster, settings.benchmark)
    require_proof(settings.cluster, settings.benchmark)
    require_possible(home(), open_store(home()), origin, settings)
    _require_port(settings, to_stage)


def _require_stages(*given: tuple[str, str | None]) -> None:
    """Refuse a name of no stage, before Prefect is started."""
    from difflib import get_close_matches

    from tasks.config.flows import STAGES

    for option, name in given:
        if name is not None and name not in STAGES:
            meant = get_close_matches(name, STAGES, n=1)
            question = f" Did you mean {meant[0]!r}?" if meant else ""
            raise ValueError(f"{option} {name!r}: there is no such stage.{question} The stages are {', '.join(STAGES)}")


def _require_port(settings: RetrainConfig, to_stage: str | None) -> None:
    """Refuse a port of the endpoint that another program listens on, where the run goes as far as deploying."""
    from tasks.serving.known import require_port

    if to_stage in (None, "deploy"):
        require_port(home(), settings.deployment.endpoint, settings.deployment.port)
