"""`headway checkpoint`: make an artifact of a model that others trained, so that training can start from it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deployments.cli.operations.users import As, asked
from deployments.cli.options import Json
from deployments.cli.output import say
from tasks.artifacts import parse_ref
from tasks.common.home import home
from tasks.storage import open_store


def publish(
    name: Annotated[str, typer.Argument(help="Name of the checkpoint: lower case, digits, dot, dash.")],
    path: Annotated[Path, typer.Argument(help="Hugging Face folder with safetensors weights, or a .gguf file.")],
    as_: As = "",
    as_json: Json = False,
) -> None:
    """Make a checkpoint version of a Hugging Face folder; `training.base` then names it.

    Weights, settings, tokenizer, card and license are taken; no code, and no pickle. Its tokenizer becomes a version of its own,
    and the checkpoint is signed with this home's key: you vouch for where it comes from. A .gguf file is made a folder first.
    """
    from deployments.publishing.base_models import make_base

    _, name, _ = parse_ref(name, kind="checkpoint")
    with asked("publish", as_, what=f"checkpoint/{name}"):
        made = make_base(open_store(home()), home(), name, path)
    fields = {
        "ref": made.checkpoint.ref,
        "tokenizer": made.tokenizer.ref,
        "architecture": made.architecture,
        "parameters": made.parameters,
        "bytes": made.checkpoint.bytes,
        "files": [file.path for file in made.checkpoint.content.files],
        "key": made.key,
    }
    words = f"{made.architecture}, {made.parameters / 1e6:,.1f} M parameters, signed by key {made.key[:16]}"
    say(fields, f"{made.checkpoint.ref}\n{words}\nits tokenizer: {made.tokenizer.ref}", as_json=as_json)
