"""`headway run`: have the platform's worker run a deployment, as the button in Prefect's page does."""

from __future__ import annotations

from typing import Annotated
from uuid import uuid4

import typer

from deployments.cli.output import say
from deployments.cli.users import As, asked


def run(
    deployment: Annotated[str, typer.Argument(help="FLOW/NAME, for example retrain/tiny.")],
    dataset: Annotated[str, typer.Option(help="NAME or dataset/NAME@VERSION; without it, the deployment's.")] = "",
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=VALUE", help="Change one setting; may be given often.")
    ] = None,
    key: Annotated[
        str, typer.Option(help="Idempotency key: the same key starts one flow run, however often it is sent.")
    ] = "",
    as_: As = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Start a flow run of a deployment on the platform, and return. `headway status` shows how it goes."""
    from deployments.catalogue.flows import catalogue, parameters
    from deployments.configuration.platform import load_settings
    from deployments.services import prefect_server
    from tasks.common.errors import Missing, Unknown
    from tasks.common.home import home
    from tasks.common.redaction import require_no_secrets
    from tasks.security.audit import audited
    from tasks.storage import open_store

    known = {one.full_name: one for one in catalogue(load_settings(home()))}
    if deployment not in known:
        raise Unknown(f"there is no deployment {deployment!r}", remedy=f"There are {', '.join(known)}.")
    chosen = known[deployment]
    payload = parameters(chosen.flow, chosen.name, dataset, tuple(set_ or ()))
    require_no_secrets(payload)
    if not prefect_server.reachable(home()):
        raise Missing("the platform is not up", remedy="Start it: `headway up --detach`.")
    from deployments.services.registration import submit

    key = key or str(uuid4())
    what = f"{deployment} on the platform, under the key {key}"
    with asked("run", as_, what=what), audited(open_store(home()), "start run", right="run", what=what):
        flow_run, new = submit(deployment, payload, key)
    words = f"{'Started' if new else 'Already started under this key'}: {flow_run['url']}"
    say({"deployment": deployment, "flow_run": flow_run, "new": new}, words, as_json=as_json)
