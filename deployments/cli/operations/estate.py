"""`headway estate`: Azure's side as templates, and what came of them as settings. Asks nobody. See docs/estate.md."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Annotated

import typer

from deployments.cli.options import Json
from deployments.cli.output import say
from tasks.common.home import home


def render(
    config: Annotated[Path, typer.Option("--config", "-c", help="Settings of the estate: a YAML file.")],
    to: Annotated[Path, typer.Option(help="Folder that the files are written to.")],
    as_json: Json = False,
) -> None:
    """Write the ARM templates of an estate, with a README that says how to deploy them and what they cost."""
    from deployments.azure.readme import readme, write
    from deployments.azure.render import files, grants
    from deployments.azure.settings import load_estate
    from tasks.planning.prices.book import open_book

    estate = load_estate(config)
    texts = files(estate)
    names = [name for name in texts if name.startswith("modules/")]
    templates = {Path(name).stem: json.loads(texts[name]) for name in names}
    today = datetime.datetime.now(datetime.UTC).date()
    texts["README.md"] = readme(estate, templates, book=open_book(home()), today=today)
    written = write(to, texts)
    resources = sum(len(template["resources"]) for template in templates.values())
    fields = {
        "folder": str(to),
        "files": [str(path) for path in written],
        "modules": sorted(templates),
        "resources": resources,
        "role_assignments": len(grants(estate)),
    }
    words = [
        f"{to}: {len(templates)} modules, {resources} resources, {len(grants(estate))} role assignments",
        f"{to / 'README.md'} says how to deploy them. Nothing was sent to Azure.",
    ]
    say(fields, words, as_json=as_json)


def connect(
    outputs: Annotated[Path, typer.Argument(help="What `az stack sub show --output json` printed.")],
    to: Annotated[Path, typer.Option(help="Folder that the settings are written to.")],
    as_json: Json = False,
) -> None:
    """Write the settings of a home out of the outputs of an estate's deployment."""
    from deployments.azure.connect import check, read_outputs, settings
    from deployments.azure.readme import write

    result = read_outputs(outputs)
    written = write(to, settings(result))
    check(to, result)
    clusters = [cluster.name for cluster in result.clusters]
    fields = {"folder": str(to), "files": [str(path) for path in written], "clusters": clusters}
    first = to / f"{clusters[0]}.yaml"
    words = [
        *(f"wrote {path}" for path in written),
        f"stores.yaml belongs into {home()}. Then `headway doctor -c {first}` looks at all of it.",
    ]
    say(fields, words, as_json=as_json)
