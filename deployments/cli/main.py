"""The `headway` command: its groups, and the one place where errors become exit codes."""

from __future__ import annotations

import signal
import sys
from itertools import takewhile
from typing import Annotated

import typer

from deployments.cli import retrain, revalidate
from deployments.cli.cluster import job, qualify, submit
from deployments.cli.data import checkpoint, dataset, drift, preprocess, tokenizer, validate
from deployments.cli.operations import approve, doctor, events, notify, platform, users
from deployments.cli.output import Terminated, say_error
from deployments.cli.planning import cost, hardware, plan, prices, simulate, trainings
from deployments.cli.registry import artifacts, audit, backup, history, lineage, models, trust
from deployments.cli.serving import endpoint, watch
from tasks.common.redaction import clean_logs, redacted

app = typer.Typer(
    name="headway",
    help=(
        "Headway takes a large language model through its whole life: validate, preprocess, benchmark, plan, train, evaluate, "
        "export, deploy.\n\nStart with:  headway dataset publish NAME PATH...   then   headway retrain --dataset NAME\n\n"
        "State lives under .headway/ in the working directory, or in HEADWAY_HOME. Every command takes --json."
    ),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _say_version(wanted: bool) -> None:
    """What is installed, without a look at the home: it may be a newer version's."""
    if wanted:
        from importlib.metadata import version

        typer.echo(f"headway {version('headway')}")
        raise typer.Exit


@app.callback()
def _look_at_home(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_say_version, is_eager=True, help="Say which version this is, and end."),
    ] = False,
) -> None:
    from contextlib import nullcontext, suppress
    from functools import partial

    from deployments.services.checks import no_file, not_newer
    from deployments.services.library_settings import take_no_files
    from tasks.azure.arm_client import use_files
    from tasks.common.home import home
    from tasks.config.base import policy_file, trust_file
    from tasks.storage import open_files
    from tasks.storage.settings import stores_file

    doctor = context.invoked_subcommand == "doctor"  # it says what is wrong with the home with all else that it finds
    if not doctor:
        no_file(home())
        for file_of in (policy_file, trust_file, stores_file):
            file_of(home())  # refuses a variable that names another file than what binds this home
    take_no_files()
    with suppress(PermissionError) if doctor else nullcontext():
        not_newer(home())
    use_files(partial(open_files, home()))


app.command("validate")(validate.validate)
app.command("retrain")(retrain.retrain)
app.command("revalidate")(revalidate.revalidate)
app.command("drift")(drift.drift)
app.command("qualify")(qualify.qualify)
app.command("hardware")(hardware.hardware)
app.command("plan")(plan.plan)
app.command("simulate")(simulate.simulate)
app.command("prices")(prices.prices)
app.command("quota")(prices.quota)
app.command("cost")(cost.cost)
app.command("rightsize")(cost.rightsize)
app.command("scaling")(trainings.scaling)
app.command("seeds")(trainings.seeds)
app.command("train-log")(trainings.train_log)
app.command("approve")(approve.approve)
app.add_typer(dataset.app, name="dataset")
app.add_typer(tokenizer.app, name="tokenizer")
app.add_typer(checkpoint.app, name="checkpoint")
app.command("preprocess")(preprocess.preprocess)
app.command("tokens")(preprocess.tokens)
app.command("mixture")(preprocess.mixture)
app.command("lineage")(lineage.lineage)
app.command("artifacts")(artifacts.artifacts)
app.command("verify")(artifacts.verify)
app.command("sign")(trust.sign)
app.add_typer(trust.app, name="trust")
app.command("diff")(history.diff)
app.command("rollback")(history.rollback)
app.command("models")(models.models)
app.command("promote")(models.promote)
app.command("prune")(history.prune)
app.command("copy")(artifacts.copy)
app.command("backup")(backup.backup)
app.command("restore")(backup.restore)
app.add_typer(endpoint.app, name="endpoint")
app.command("complete")(endpoint.complete)
app.command("watch")(watch.watch)
app.add_typer(notify.app, name="notify")
app.command("submit")(submit.submit)
app.command("jobs")(job.jobs)
app.add_typer(job.app, name="job")
app.command("reconcile")(job.reconcile)
app.command("doctor")(doctor.doctor)
app.command("up")(platform.up)
app.command("run")(platform.run)
app.command("deployments")(platform.deployments)
app.command("status")(platform.status)
app.add_typer(events.app, name="events")
app.command("down")(platform.down)
app.add_typer(users.app, name="person")
app.command("audit-log")(audit.audit_log)


def run() -> None:
    """The console script."""
    as_json = "--json" in takewhile(lambda word: word != "--", sys.argv[1:])
    signal.signal(signal.SIGTERM, _as_interrupt)
    clean_logs()
    try:
        code = app(standalone_mode=False)
    except typer.TyperException as error:  # a mistake in the command line
        sys.exit(say_error(redacted(ValueError(_usage(error))), as_json=as_json))
    except BaseException as error:
        if isinstance(error, SystemExit):
            raise
        sys.exit(say_error(redacted(error), as_json=as_json))
    sys.exit(code if isinstance(code, int) else 0)


def _as_interrupt(*_: object) -> None:
    """SIGTERM is a request to stop, as Ctrl-C is, but nobody is there to be asked: the run ends, and its job with it."""
    raise Terminated


def _usage(error: typer.TyperException) -> str:
    output = error.format_message() if hasattr(error, "format_message") else str(error)
    return f"{output} See `headway --help`, or --help after the command."
