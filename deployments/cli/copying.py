"""`headway copy`: an artifact with its lineage and signatures into another store, or a model into an Azure ML registry."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from deployments.cli.output import say, short_ref
from deployments.cli.users import As, Reason, asked


def copy(
    ref: Annotated[str, typer.Argument(help="KIND/NAME or KIND/NAME@VERSION: a model, a dataset, any artifact.")],
    to: Annotated[str, typer.Option("--to", help="Store, or Azure ML registry: a name of stores.yaml, or a folder.")],
    from_: Annotated[str, typer.Option("--from", help="Store that it is in; without it, this home's own.")] = "",
    reason: Reason = "",
    as_: As = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Copy an artifact into another store, with what tells its lineage and with its signatures; verified on arrival."""
    from tasks.common.home import home
    from tasks.storage import open_named, open_store
    from tasks.storage.azureml_registry import SCHEME
    from tasks.storage.settings import load_stores

    source = open_named(home(), from_) if from_ else open_store(home())
    config = load_stores(home()).stores.get(to)
    with asked("publish", as_, what=f"copy {ref} to {to}", reason=reason):
        if config and config.uri.startswith(SCHEME):
            copied, fields = _to_registry(source, ref, config, reason)
        else:
            copied, fields = _to_store(source, ref, open_named(home(), to), reason)
    manifest = copied.manifest
    payload = {
        "ref": manifest.ref,
        "from": source.uri,
        **fields,
        "moved": copied.moved,
        "files": len(manifest.content.files),
        "bytes": manifest.bytes,
        "ancestors": list(copied.ancestors),
        "signatures": list(copied.beside),
    }
    words = f"{short_ref(manifest.ref)}: " + (
        f"{len(manifest.content.files)} file(s), {manifest.bytes} bytes, verified in {fields['to']}"
        if copied.moved
        else f"was in {fields['to']} already; nothing was moved"
    )
    say(payload, words, as_json=as_json)


def _to_store(source: Any, ref: str, target: Any, reason: str) -> tuple[Any, dict[str, Any]]:
    from tasks.common.home import home
    from tasks.registry.transfer import copy_artifact

    copied = copy_artifact(source, target, ref, home=home(), reason=reason)
    fields = {"to": target.uri, "uri": target.uri_of(copied.manifest), "noted_in_source": copied.noted}
    return copied, fields


def _to_registry(source: Any, ref: str, config: Any, reason: str) -> tuple[Any, dict[str, Any]]:
    from tasks.common.home import home
    from tasks.registry.sharing import require_model, share_model
    from tasks.storage.azureml_registry import SCHEME, open_registry
    from tasks.storage.blob.credentials import token_credential

    require_model(ref)
    name = config.uri.removeprefix(SCHEME)
    client = open_registry(name, token_credential(config, of=config.uri))
    shared = share_model(source, client, ref, name=name, home=home(), reason=reason)
    return shared, {"to": config.uri, "uri": shared.uri, "noted_in_source": True}
