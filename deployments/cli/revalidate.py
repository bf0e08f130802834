"""`headway revalidate`: the model in service against new data."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deployments.cli.operations.users import As, asked
from deployments.cli.options import Config, Json, Set, parameters_of
from tasks.artifacts import parse_ref
from tasks.common.home import home
from tasks.security.audit import audit
from tasks.storage import open_store
from tasks.storage.store import find

if TYPE_CHECKING:
    from rich.console import RenderableType

COLOURS = {"passed": "green", "failed": "red", "insufficient": "yellow", "absent": "dim"}


def revalidate(
    model: Annotated[
        str, typer.Argument(help="Name of the model, measured with the settings that its champion was made with.")
    ] = "",
    data: Annotated[
        str,
        typer.Option(metavar="NAME[@VERSION]", help="The dataset; without it, the newest version of the model's own."),
    ] = "",
    config: Config = None,
    set_: Set = None,
    as_: As = "",
    as_json: Json = False,
) -> None:
    """Verify the champion of a model, every byte of it, hold new data against what it learnt, and measure it on that.

    The verdict is valid, degraded, invalid or unknown; only the first leaves with exit code 0. Nothing that is served changes,
    but what serves changed files is stopped. Without MODEL it is the one of the configuration, `local` when none is named.
    """
    from deployments.cli.champion_config import of_champion
    from tasks.config.flows import RevalidateConfig

    if model and not config:
        payload = of_champion(model, data, set_ or [])
    else:
        payload = parameters_of("revalidate", config, data, [*(set_ or []), *_named(model)])
    settings = RevalidateConfig.model_validate(payload["config"])
    what = f"revalidate {settings.model} on dataset {payload['dataset']}"
    arguments = {"dataset": payload["dataset"]}

    with asked("run", as_, what=what):
        from deployments.cli.running import run_and_tell

        audit(open_store(home()), "start run", right="run", what=what)
        look = partial(_preflight, arguments)
        run_and_tell("revalidate", settings, arguments, preflight=look, as_json=as_json, show=_parts)


def _named(model: str) -> list[str]:
    """A model that is named beside a configuration is whose champion is meant."""
    return [f"training.model={model}"] if model else []


def _parts(fields: dict[str, Any]) -> RenderableType:
    """The verdict for people: its parts, and where the evidence is."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    payload = fields["revalidation"]
    if not payload:
        return Text()
    table = Table("part", "status", "found", box=None, pad_edge=False)
    for part in payload["parts"]:
        table.add_row(part["name"], Text(part["status"], COLOURS[part["status"]]), Text(part["said"]))
    window = payload["window"]
    row = f", window {window['number']} of {window['of']}" if payload["verdict"] == "degraded" else ""
    return Group(table, Text(f"{payload['verdict']}{row}"), Text(f"Evidence: {payload['evidence']}", overflow="fold"))


def _preflight(arguments: dict[str, Any]) -> None:
    """What can be known to be wrong before anything is spent: the dataset."""
    find(open_store(home()), *parse_ref(arguments["dataset"], kind="dataset"))
