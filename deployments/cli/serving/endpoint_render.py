"""`headway endpoint render`: what a deploy to Azure ML would put, as files for `az`. Nobody is asked. See docs/azureml.md."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deployments.cli.options import Config, Json, Set
from deployments.cli.output import say

if TYPE_CHECKING:
    from tasks.config.flows import RetrainConfig

PLACEHOLDER = f"model/placeholder@{'0' * 64}"
REGION = "REGION-OF-THE-WORKSPACE"


def render(
    name: Annotated[str, typer.Argument(help="Name of the endpoint, as in deployment.endpoint.")],
    config: Config = None,
    model: Annotated[str, typer.Option(help="model/NAME@VERSION; without it, the configuration's model.")] = "",
    to: Annotated[
        Path | None, typer.Option(help="Folder that the files are written to; else they are printed.")
    ] = None,
    set_: Set = None,
    as_json: Json = False,
) -> None:
    """Print or write the YAML of an endpoint and its deployment on Azure ML, and the rules around them. Nobody is asked."""
    from deployments.configuration.files import load
    from tasks.common.home import home
    from tasks.common.process import read_json
    from tasks.serving.azureml.render import Rendering, files_of, require_complete

    wanted = [*(set_ or []), "deployment.backend=azureml", f"deployment.endpoint={name.removeprefix('endpoint/')}"]
    settings = load(config or "azureml", wanted)
    deployment = settings.served
    require_complete(deployment.azureml)
    ref, content, pending = _model(settings, model)
    address, unknown = _address(deployment.azureml.store, ref)
    made = Rendering(deployment.endpoint, deployment, deployment.azureml.location or REGION)
    # Of the deployment that the next model would get.
    record = read_json(home() / "endpoints" / deployment.endpoint / "endpoint.json") or {}
    colour = "green" if record.get("colour") == "blue" else "blue"
    texts = files_of(made, colour, ref, files=content["files"], inputs=content["inputs"], address=address)
    fields = {"name": made.name, "colour": colour, "model": ref, "pending": [*pending, *unknown], "files": texts}
    for file, text in texts.items() if to else ():
        assert to is not None
        to.mkdir(parents=True, exist_ok=True)
        (to / file).write_text(text)
    say(fields, _words(fields, to), as_json=as_json)


def _model(settings: RetrainConfig, ref: str) -> tuple[str, dict[str, Any], list[str]]:
    """Reference and content of the model; a placeholder when there is none yet."""
    from tasks.artifacts import parse_ref
    from tasks.common.errors import Unknown
    from tasks.common.home import home
    from tasks.storage import open_store
    from tasks.storage.store import find

    kind, name, version = parse_ref(ref or settings.training.model, kind="model")
    try:
        manifest = find(open_store(home()), kind, name, version)
    except Unknown:
        if ref:
            raise
        return (
            PLACEHOLDER,
            {"files": [], "inputs": []},
            [f"there is no model/{name} yet: its reference is a placeholder"],
        )
    return manifest.ref, manifest.content.model_dump(mode="json"), []


def _address(store: str, ref: str) -> tuple[str, list[str]]:
    """Where the model would lie in the store."""
    from tasks.common.home import home
    from tasks.serving.azureml.render import model_prefix
    from tasks.storage import open_files

    try:
        return open_files(home(), store).address(model_prefix(ref)), []
    except ValueError as error:
        return f"https://ACCOUNT.blob.core.windows.net/CONTAINER/{model_prefix(ref)}", [str(error)]


def _words(fields: dict[str, Any], to: Path | None) -> str:
    lines = [f"# not known yet: {each}" for each in fields["pending"]]
    if to:
        return "\n".join([*lines, *(f"{to / name}" for name in fields["files"])])
    for name, text in fields["files"].items():
        lines += [f"# file {name}", text.rstrip("\n"), ""]
    return "\n".join(lines).rstrip()
