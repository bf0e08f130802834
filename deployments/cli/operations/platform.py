"""`headway up`, `down`, `status`, `run`, `deployments`, `notify test`: the platform on this machine."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any
from uuid import uuid4

import typer

from deployments.cli.operations.endpoint import stop_all
from deployments.cli.operations.users import As, Reason, asked, asks
from deployments.cli.options import Json, require_dataset
from deployments.cli.output import CommandError, aligned, note, say
from deployments.services import prefect_server
from tasks.common.errors import HeadwayError, Missing, Unknown
from tasks.common.home import home
from tasks.common.redaction import require_no_secrets
from tasks.config.base import config_digest
from tasks.lineage.messages import TRAINING
from tasks.security.audit import audit, audited
from tasks.storage import open_store


def deployments(
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="The platform's settings; by default those that `up` kept.")
    ] = None,
    prefect_yaml: Annotated[
        bool, typer.Option("--prefect-yaml", help="Print the file that `prefect deploy --all` takes.")
    ] = False,
    image: Annotated[
        str,
        typer.Option(
            help="With --prefect-yaml: run each flow run in a container of this image, in a work pool of type docker."
        ),
    ] = "",
    as_json: Json = False,
) -> None:
    """List all deployments with their schedules. Contacts no server and changes nothing."""
    from deployments.catalogue.flows import as_prefect_yaml, catalogue
    from deployments.configuration.platform import PlatformConfig, load_settings
    from tasks.config.files import load_file

    chosen = load_file(PlatformConfig, config) if config else load_settings(home())
    result = catalogue(chosen)
    fields = {"deployments": [{"full_name": one.full_name, **asdict(one)} for one in result]}
    if prefect_yaml:
        words = as_prefect_yaml(chosen, image=image).rstrip("\n")
    elif image:
        raise ValueError(f"--image {image} is for --prefect-yaml: give both, or leave it out")
    else:
        crons = {one.full_name: "; ".join(f"{s.cron} {s.timezone}" for s in one.schedules) for one in result}
        words = "\n".join(aligned((one.full_name, one.description, crons[one.full_name]) for one in result))
    say(fields, words, as_json=as_json)


def run(
    deployment: Annotated[str, typer.Argument(help="FLOW/NAME, for example retrain/tiny.")],
    dataset: Annotated[str, typer.Option(help="NAME or dataset/NAME@VERSION; by default the deployment's.")] = "",
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=VALUE", help="Change one setting; may be repeated.")
    ] = None,
    key: Annotated[
        str, typer.Option(help="Idempotency key: the same key starts one flow run, however often it is sent.")
    ] = "",
    as_: As = "",
    as_json: Json = False,
) -> None:
    """Start a flow run of a deployment on the platform, and return. `headway status` shows its progress."""
    from deployments.catalogue.flows import catalogue, changes
    from deployments.configuration.platform import load_settings

    known = {one.full_name: one for one in catalogue(load_settings(home()))}
    if deployment not in known:
        raise Unknown(f"there is no deployment {deployment!r}", remedy=f"There are {', '.join(known)}.")
    chosen = known[deployment]
    payload, whole = changes(chosen.flow, chosen.name, dataset, tuple(set_ or ()))
    require_no_secrets(whole)
    prefect_server.require(home(), note)
    if name := str(whole.get("dataset") or ""):
        require_dataset(name, "--dataset")
    from deployments.services.registration import submit

    key = key or str(uuid4())
    what = f"{deployment} on the platform, under the key {key}"
    with asked("run", as_, what=what), audited(open_store(home()), "start run", right="run", what=what):
        flow_run, new = submit(deployment, payload, key)
    started = "Queued; the platform's worker starts it" if new else "Queued before, under this key"
    words = f"{started}: {flow_run['url']}{prefect_server.login_of(home())}"
    say({"deployment": deployment, "flow_run": flow_run, "new": new}, words, as_json=as_json)


LOOK_EVERY_SECONDS = 2.0


def up(
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", help="A YAML file with the platform's settings; kept for later starts."),
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Return once everything answers, and leave it running.")
    ] = False,
    port: Annotated[int | None, typer.Option(help="Port of Prefect's page; by default a free one.")] = None,
    mlflow_port: Annotated[int | None, typer.Option(help="Port of MLflow's page; by default a free one.")] = None,
    as_: As = "",
    as_json: Json = False,
) -> None:
    """Start the whole platform: Prefect, MLflow, a worker, the watch, and all deployments.

    Parts that already run are adopted. Without --detach it stays in the foreground, and Ctrl-C stops what this command started.
    """
    from deployments.configuration.platform import load_settings
    from deployments.platform import start_stop as platform
    from deployments.platform.state import addresses
    from deployments.services.parts import restart_what_died

    if config is None:
        settings = load_settings(home())
    else:
        settings, text = platform.given(config)
        # What the platform does by itself is changed by who may change the policy. Addresses of notifications hold
        # passwords: there is not even a digest of them.
        if changed := platform.changed(home(), settings):
            what = f"settings of the platform: {', '.join(changed)}"
            public = config_digest(settings.model_copy(update={"notifications": ()}))
            with (
                asked("override", as_, what=what),
                audited(open_store(home()), "change settings", right="override", what=what, after=public),
            ):
                platform.keep(home(), text)
        else:
            platform.keep(home(), text)
    adopted = asks("roll_back") and bool(platform.running(home()))
    new = not (home() / "prefect" / "credentials").exists()
    began = time.monotonic()
    try:
        broken = platform.up(
            home(),
            settings,
            note,
            port=port,
            mlflow_port=mlflow_port,
        )
        fields = {"seconds": round(time.monotonic() - began, 1), **addresses(home()), "broken_sources": broken}
        say(fields, _welcome(fields, home(), new=new), as_json=as_json)
        if not detach:
            text = "Ctrl-C leaves it running, for it ran before" if adopted else "Ctrl-C stops the platform"
            print(f"{text}; `headway up --detach` would leave it running.", file=sys.stderr)
            while not platform.stopped(home()):
                restart_what_died(home())
                time.sleep(LOOK_EVERY_SECONDS)
            _stop(home())  # what was being restarted while somebody else stopped it
    except KeyboardInterrupt:
        if detach:
            raise
        if adopted:
            print("The platform ran before, so it stays up; `headway down` stops it.", file=sys.stderr)
            return
        _note_stop("Ctrl-C, where it was started")
        _stop(home())


def down(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before stopping flow runs.")] = False,
    endpoints: Annotated[bool, typer.Option("--endpoints", help="Stop all endpoints as well.")] = False,
    reason: Reason = "",
    as_: As = "",
    as_json: Json = False,
) -> None:
    """Stop the platform: no process of it is left. Endpoints keep serving, unless --endpoints is given.

    Running flows stop too; the next `headway up` resumes those that the platform started. Jobs on other machines keep running,
    and are listed: `headway job cancel` ends them.
    """
    from deployments.platform import start_stop as platform

    what = "stop the platform and all endpoints" if endpoints else "stop the platform"
    with asked("roll_back", as_, what=what, reason=reason):
        runs = platform.runs_at_work(home())
        if runs and not yes:
            names = ", ".join(f"{run.handle['flow']} of {run.handle['subject']}" for run in runs)
            text = f"{len(runs)} running flow run(s): {names}"
            if not sys.stdin.isatty():
                remedy = "`headway down --yes` stops them too; the next `headway up` resumes what it can"
                raise ValueError(f"{text}. {remedy}")
            answer = input(f"{text}. Stop them too? The next `headway up` resumes what it can. [y/N] ")
            if answer.strip().lower() not in ("y", "yes"):
                raise ValueError("nothing was stopped")
        _note_stop(reason)
        ended = stop_all(reason) if endpoints else []
        stopped = platform.down(home())
    everything = [*ended, *stopped]
    words = f"Stopped: {', '.join(everything)}." if everything else "Nothing of the platform ran."
    running = platform.going_on(home())
    words += "".join(f"\n  still running: {each}" for each in running)
    if serving := platform.serving_endpoints(home()):
        words += f"\n  still serving: {', '.join(serving)}; `headway down --endpoints` stops them too"
    say({"stopped": stopped, "going_on": running}, words, as_json=as_json)


def status(as_json: Json = False) -> None:
    """Show what runs, since when and in which version; the last runs, the next schedules, what waits, and what is wrong."""
    from deployments.platform.state import state, words

    fields = state(home())
    say(fields, words(fields), as_json=as_json)


def _welcome(fields: dict[str, Any], home: Path, *, new: bool) -> str:
    lines = [f"Headway is up, after {fields['seconds']} s.", ""]
    for name in ("prefect", "mlflow", "metrics"):
        page = f"/#/experiments?{TRAINING}" if name == "mlflow" else ""
        lines += [f"  {name:<9}{fields[name]}{page}"] if fields[name] else []
    lines += [f"  no events from {name}: {why}" for name, why in fields["broken_sources"].items()]
    kept = home / "prefect" / "credentials"
    if new and kept.exists():
        user, _, password = kept.read_text().partition(":")
        lines += ["", f"  user {user}   password {password}", f"  Shown this once; kept in {kept}."]
        lines += ["  Prefect's page asks for both as one line, user:password."]
    elif kept.exists():
        lines += ["", f"  The login is in {kept}, as user:password, which Prefect's page asks for as it is."]
    return "\n".join(lines)


def _note_stop(reason: str) -> None:
    """Write into the audit log that the platform is about to be stopped, if it runs.

    A store that is away, or a full disk, keeps nobody from stopping it where the policy does not ask who does.
    """
    from deployments.platform.start_stop import running

    parts = running(home())
    if not parts:
        return
    try:
        audit(
            open_store(home()), "stop platform", right="roll_back", what=f"platform: {', '.join(parts)}", reason=reason
        )
    except (HeadwayError, OSError) as error:
        if asks("roll_back"):
            raise
        print(f"headway: the audit log does not have it that the platform was stopped: {error}", file=sys.stderr)


def _stop(home: Path) -> None:
    from deployments.platform import start_stop as platform

    print("stopping ...", file=sys.stderr)
    platform.down(home)


def notify(
    channel: Annotated[str, typer.Argument(help="The name of a channel; by default all.")] = "",
    as_json: Json = False,
) -> None:
    """Send a test message through each channel of the platform's settings, and show the result.

    It is sent from here, with this command's environment; Prefect's server sends the real ones, from where it runs.
    """
    from deployments.configuration.platform import load_settings
    from deployments.platform.notifications import send

    channels = load_settings(home()).notifications
    names = [one.name for one in channels]
    if channel and channel not in names:
        raise Unknown(f"there is no channel {channel!r}; there are: {', '.join(names) or 'none'}")
    if not channels:
        raise Missing(
            "no notifications are sent: the platform's settings name no channel",
            remedy="Name one under `notifications` in a file, and give it to `headway up --config FILE`.",
        )
    tried = []
    for one in channels:
        if channel in ("", one.name):
            body = f"This is a test of the channel {one.name}. It is notified of: {', '.join(one.occasions)}."
            try:
                why = send(one, "Headway: a test", body)
            except ValueError as error:
                why = str(error)
            tried.append({"channel": one.name, "sent": not why, "why": why})
    words = "\n".join(f"{one['channel']:<24}{'sent' if one['sent'] else one['why']}" for one in tried)
    bad = [one for one in tried if not one["sent"]]
    if not bad:
        say({"channels": tried}, words, as_json=as_json)
        return
    if not as_json:
        print(words)
    text = "; ".join(f"{one['channel']}: {one['why']}" for one in bad)
    remedy = (
        "Correct the address in the platform's settings, or fix what listens there; docs/notifications.md has examples."
    )
    raise CommandError(Missing(text, remedy=remedy), {"channels": tried})
