"""`headway deployments`: what the platform can run, and the same as a file for `prefect deploy`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from deployments.cli.output import say


def deployments(
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="Settings of the platform; without it, those that `up` kept.")
    ] = None,
    prefect_yaml: Annotated[
        bool, typer.Option("--prefect-yaml", help="Print the file that `prefect deploy --all` takes.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """List all deployments with their schedules. Nothing is asked of a server, and nothing is changed."""
    from deployments.catalogue.flows import as_prefect_yaml, catalogue
    from deployments.configuration.files import load_file
    from deployments.configuration.platform import PlatformConfig, load_settings
    from tasks.common.home import home

    chosen = load_file(PlatformConfig, config) if config else load_settings(home())
    result = catalogue(chosen)
    fields = {"deployments": [{"full_name": one.full_name, **asdict(one)} for one in result]}
    if prefect_yaml:
        words = as_prefect_yaml(chosen).rstrip("\n")
    else:
        crons = {one.full_name: "; ".join(f"{s.cron} {s.timezone}" for s in one.schedules) for one in result}
        words = "\n".join(f"{one.full_name:<20}{one.description}  {crons[one.full_name]}".rstrip() for one in result)
    say(fields, words, as_json=as_json)
