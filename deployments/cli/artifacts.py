"""`headway artifacts`, `verify`: what is there, and whether it is intact."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from deployments.cli.output import CommandError, say, short_ref

Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


def artifacts(
    kind: Annotated[str, typer.Argument(help="dataset, tokens, checkpoint, model, ...; without it, all.")] = "",
    as_json: Json = False,
) -> None:
    """List artifacts with their versions, newest first within a name."""
    from tasks.artifacts import KINDS
    from tasks.settings import home
    from tasks.storage import open_store

    if kind and kind not in KINDS:
        raise ValueError(f"{kind!r} is not a kind of artifact; the kinds are {', '.join(KINDS)}")
    store = open_store(home())
    found = list(store.manifests(kind))
    rows = [{"ref": m.ref, "uri": store.uri_of(m), "files": _files(store, m)} for m in found]
    words = [f"{short_ref(m.ref):<58}{m.provenance.created}  {m.bytes / 1e6:9.2f} MB" for m in found]
    say({"artifacts": rows}, "\n".join(words) or "No artifact yet.", as_json=as_json)


def verify(
    ref: Annotated[str, typer.Argument(help="KIND/NAME or KIND/NAME@VERSION.")],
    as_json: Json = False,
) -> None:
    """Check every byte of an artifact against its manifest, and a model against its signature."""
    from tasks.endpoints.known import served_model
    from tasks.errors import IntegrityError
    from tasks.registry.verification import problems_of
    from tasks.settings import home
    from tasks.storage import open_store
    from tasks.storage.manifest import remake

    if ref.startswith("endpoint/"):
        model = short_ref(served_model(home(), ref))
        raise ValueError(f"{ref} has no files of its own; verify what it serves: headway verify {model}")
    store = open_store(home())
    manifest, problems = problems_of(store, ref, keys=home() / "keys")
    fields: dict[str, Any] = {
        "ref": manifest.ref,
        "ok": not problems,
        "files": len(manifest.content.files),
        "bytes": manifest.bytes,
        "problems": [problem.model_dump() for problem in problems],
    }
    if problems:
        said = ", ".join(f"{p.path} ({p.problem})" for p in problems[:5])
        remedy = remake(manifest)
        raise CommandError(
            IntegrityError(f"{manifest.ref} is damaged: {said}", problems=fields["problems"], remedy=remedy), fields
        )
    words = f"{manifest.ref}: {fields['files']} file(s), {fields['bytes']} bytes, all as published"
    say(fields, words, as_json=as_json)


def _files(store: Any, manifest: Any) -> list[dict[str, Any]]:
    return [{**file.model_dump(), "location": store.location(manifest, file)} for file in manifest.content.files]
