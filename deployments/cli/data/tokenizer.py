"""`headway tokenizer`: make an artifact of a Hugging Face tokenizer, so that datasets can be encoded with it."""

from __future__ import annotations

import shutil
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from deployments.cli.operations.users import As, asked
from deployments.cli.options import Json
from deployments.cli.output import say

app = typer.Typer(help="Make artifacts of Hugging Face tokenizers.", no_args_is_help=True)
FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


@app.command()
def publish(
    name: Annotated[str, typer.Argument(help="Name of the tokenizer: lower case, digits, dot, dash.")],
    folder: Annotated[Path, typer.Argument(help="Folder with a tokenizer.json, as save_pretrained writes it.")],
    as_: As = "",
    as_json: Json = False,
) -> None:
    """Make a tokenizer version of a folder; `preprocessing.tokenizer.ref` then names it.

    Only the tokenizer's own files are taken: no code, no weights.
    """
    from tasks.artifacts import parse_ref
    from tasks.common.home import home
    from tasks.data.tokenizing.tokenizer import open_tokenizer
    from tasks.registry.versions import publish as publish_artifact
    from tasks.storage import open_store
    from tasks.storage.manifest import Provenance

    _, name, _ = parse_ref(name, kind="tokenizer")
    opened = open_tokenizer(folder)
    eod = opened.require_eod()
    store, work = open_store(home()), home() / "work"
    work.mkdir(parents=True, exist_ok=True)
    with asked("publish", as_, what=f"tokenizer/{name}"), tempfile.TemporaryDirectory(dir=work) as temporary:
        taken = [file for file in FILES if (folder / file).is_file()]
        for file in taken:
            shutil.copyfile(folder / file, Path(temporary) / file)
        provenance = Provenance(name=name, created=datetime.now(UTC).isoformat(timespec="seconds"), stage="publish")
        manifest = publish_artifact(store, Path(temporary), kind="tokenizer", inputs=(), provenance=provenance)
    fields = {"ref": manifest.ref, "vocab_size": opened.vocab_size, "eod_id": eod, "files": taken}
    say(fields, f"{manifest.ref}\n{opened.vocab_size} entries, end of document {eod}", as_json=as_json)
