"""`headway revalidate` and `headway qualify`: the model in service against new data, and the cluster by itself."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from deployments.cli.person import As, asked

Config = Annotated[str, typer.Option("--config", "-c", help="A YAML file, or the name of a shipped configuration.")]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=VALUE", help="Change one setting; may be given often.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


def revalidate(
    config: Config = "local",
    dataset: Annotated[
        str, typer.Option(help="NAME or dataset/NAME@VERSION; without it, the configuration's dataset.")
    ] = "",
    set_: Set = None,
    as_: As = "",
    as_json: Json = False,
) -> None:
    """Verify the champion of a model, every byte of it, and measure it on the newest data. Changes nothing that is served."""
    from tasks.config import RevalidateConfig

    told = parameters_of("revalidate", config, dataset, set_)
    settings = RevalidateConfig.model_validate(told["config"])
    what = f"revalidate {settings.model} on dataset {told['dataset']}"
    _run("revalidate", settings, {"dataset": told["dataset"]}, what, as_, as_json)


def qualify(config: Config = "local", set_: Set = None, as_: As = "", as_json: Json = False) -> None:
    """Measure the cluster anew, and judge it by its baseline."""
    from tasks.config import QualifyConfig

    settings = QualifyConfig.model_validate(parameters_of("qualify", config, "", set_)["config"])
    _run("qualify", settings, {}, f"qualify {settings.cluster.name}", as_, as_json)


def parameters_of(flow: str, config: str, dataset: str, set_: list[str] | None) -> dict[str, Any]:
    """What a flow is called with, by the options of a command. Raises ValueError, also for a secret among them."""
    from deployments.catalogue import parameters
    from tasks.redaction import require_no_secrets

    told = parameters(flow, config, dataset, tuple(set_ or ()))
    require_no_secrets(told)
    return told


def _run(flow: str, settings: Any, arguments: dict[str, Any], what: str, as_: str, as_json: bool) -> None:
    from tasks.registry.audit import audit
    from tasks.settings import home
    from tasks.storage import open_store

    with asked("run", as_, what=what):
        from deployments.cli.running import run_and_tell

        audit(open_store(home()), "start run", right="run", what=what)
        run_and_tell(flow, settings, arguments, preflight=lambda: _preflight(settings, arguments), as_json=as_json)


def _preflight(settings: Any, arguments: dict[str, Any]) -> None:
    """What can be known to be wrong before anything is spent: the dataset, the baseline."""
    from tasks.artifacts import parse_ref
    from tasks.benchmark import load_baseline
    from tasks.settings import home
    from tasks.storage import open_store
    from tasks.storage.store import find

    if "dataset" in arguments:
        find(open_store(home()), *parse_ref(arguments["dataset"], kind="dataset"))
    else:
        load_baseline(settings.benchmark.baseline)
