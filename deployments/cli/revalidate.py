"""`headway revalidate`: the model in service against new data, with the settings that its champion was made with.

Where its jobs run, by which programs and with which variables, is this home's own configuration: what lies in the store never
says what is executed.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deployments.catalogue.flows import parameters
from deployments.cli.operations.users import As, asked
from deployments.cli.options import Config, Json, Set, parameters_of, require_dataset
from tasks.artifacts import parse_ref
from tasks.common.errors import IntegrityError, Unknown
from tasks.common.home import home
from tasks.common.redaction import require_no_secrets
from tasks.config.cluster import on_this_machine
from tasks.config.files import validated, with_settings
from tasks.config.flows import RevalidateConfig
from tasks.registry.refs import read_ref
from tasks.registry.revalidations import champions, learnt_from
from tasks.security.audit import audit
from tasks.security.signatures import signed_config
from tasks.storage import open_store
from tasks.storage.store import find

if TYPE_CHECKING:
    from rich.console import RenderableType

DEFAULT = "local"
"""The configuration that says where jobs run when none is named."""
COLOURS = {"passed": "green", "failed": "red", "insufficient": "dark_orange3", "absent": "dim"}


def revalidate(
    model: Annotated[
        str,
        typer.Argument(help="The name of the model; it is measured with the settings that its champion was made with."),
    ] = "",
    data: Annotated[
        str,
        typer.Option(metavar="NAME[@VERSION]", help="The dataset; by default the newest version of the model's own."),
    ] = "",
    config: Config = None,
    set_: Set = None,
    as_: As = "",
    as_json: Json = False,
) -> None:
    """Check a model's champion byte by byte, compare new data with its training data, and evaluate it on the new data.

    The verdict is valid, degraded, invalid or unknown; only for valid the exit code is 0. What is served does not change,
    but an endpoint that serves changed files is stopped. MODEL is by default that of the configuration `local`, or of -c.
    """
    overrides = [
        *(set_ or []),
        *([f"training.model={model}"] if model else []),
    ]  # beside a configuration, whose champion is meant
    if model and not config:
        payload = of_champion(model, data, set_ or [])
    else:
        payload = parameters_of("revalidate", config, data, overrides)
    settings = RevalidateConfig.model_validate(payload["config"])
    what = f"revalidate {settings.model} on dataset {payload['dataset']}"
    arguments = {"dataset": payload["dataset"]}

    with asked("run", as_, what=what):
        from deployments.cli.running import run_and_tell

        audit(open_store(home()), "start run", right="run", what=what)

        def look() -> None:
            """What can be known to be wrong before anything is spent: the dataset."""
            require_dataset(payload["dataset"], "--data")

        run_and_tell("revalidate", settings, arguments, preflight=look, as_json=as_json, show=_parts)


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
    if same := row and window.get("shares_documents_with"):
        row += f": shares documents with {same}, which counted already"
    return Group(
        table,
        Text(f"{payload['verdict']}{row}"),
        Text(f"Evidence: {payload['evidence']}", overflow="ignore", no_wrap=True),
    )


def of_champion(model: str, data: str, overrides: list[str]) -> dict[str, Any]:
    """Dataset and configuration for the champion of a model. Raises Unknown, naming the models that have one, and ValueError.

    Of a champion that was made on another backend than this machine, the configuration or the backend must be named.

    Sections that the release that made it did not have yet start from their defaults.
    """
    store = open_store(home())
    ref = read_ref(store, f"{model}/champion")
    if ref is None:
        known = ", ".join(champions(store)) or "none yet: `headway retrain` makes one"
        raise Unknown(f"model/{model} has no champion", remedy=f"Models that have one: {known}.")
    try:
        made_with = signed_config(home(), store, find(store, *parse_ref(ref)))
    except (IntegrityError, Unknown, ValueError):  # its manifest is not what was signed: the flow then says so
        made_with = {}
    backend = (made_with.get("cluster") or {}).get("backend", "local")
    if not on_this_machine(backend) and not any(one.startswith("cluster.backend=") for one in overrides):
        raise ValueError(
            f"{ref[:-52]} was made on the backend {backend}; how that is reached and what runs there is not taken from a record: "
            f"name the configuration, `headway revalidate {model} -c CONFIG`, or measure it here with --set cluster.backend=local"
        )
    part = {key: value for key, value in made_with.items() if key in RevalidateConfig.model_fields}
    cluster = parameters("revalidate", DEFAULT)["config"]["cluster"]
    value = with_settings({**part, "cluster": cluster, "model": model}, overrides)
    config = validated(RevalidateConfig, value, f"that {ref[:-52]} was made with")
    if not data:
        learnt = None
        with suppress(IntegrityError, ValueError):
            learnt = learnt_from(store, ref)
        if learnt is None:
            raise Unknown(f"no record says which dataset {ref} was trained on", remedy="Name the dataset: --data NAME.")
        data = parse_ref(learnt)[1]  # a name means its newest version
    payload = {"dataset": data, "config": config.model_dump(mode="json")}
    require_no_secrets(payload)
    return payload
