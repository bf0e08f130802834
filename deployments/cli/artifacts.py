"""`headway artifacts`, `verify`, `lineage`: what is there, whether it is intact, and where it comes from."""

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


def lineage(
    ref: Annotated[str, typer.Argument(help="KIND/NAME[@VERSION] of an artifact, or endpoint/NAME.")] = "",
    sync: Annotated[bool, typer.Option("--sync", help="Tell MLflow what it missed while it was away.")] = False,
    as_json: Json = False,
) -> None:
    """Show what an artifact, model or endpoint was made from, down to the raw data, code commit and configuration."""
    if sync:
        return _sync(as_json)
    if not ref:
        raise ValueError("name what to look at, for example: headway lineage endpoint/local; or --sync")
    from tasks.endpoints.known import served_model
    from tasks.registry.ancestry import walk
    from tasks.settings import home
    from tasks.storage import open_store

    serves = served_model(home(), ref.partition("/")[2]) if ref.startswith("endpoint/") else None
    found = walk(open_store(home()), ref, serves=serves)
    say(found, "\n".join(_tree(found, found["root"], "")), as_json=as_json)
    return None


def _files(store: Any, manifest: Any) -> list[dict[str, Any]]:
    return [{**file.model_dump(), "location": store.location(manifest, file)} for file in manifest.content.files]


def _tree(found: dict[str, Any], ref: str, indent: str) -> list[str]:
    """The lineage as an indented list; what was shown before is not unfolded again."""
    nodes = {node["ref"]: node for node in found["nodes"]}
    shown: set[str] = set()

    def unfold(at: str, depth: str) -> list[str]:
        node = nodes[at]
        commit = f"  commit {node['commit'][:10]}{' (changed)' if node['dirty'] else ''}" if node["commit"] else ""
        config = f"  config {node['config_digest'][:10]}" if node["config_digest"] else ""
        line = f"{depth}{at.partition('@')[0]}@{(node['version'] or '')[:12]}".rstrip("@")
        if at in shown:
            return [f"{line}  (above)"]
        shown.add(at)
        below = [edge["input"] for edge in found["edges"] if edge["output"] == at]
        return [f"{line}{commit}{config}  {node['created'] or ''}".rstrip()] + [
            text for ref in below for text in unfold(ref, depth + "  ")
        ]

    return unfold(ref, indent)


def _sync(as_json: bool) -> None:
    """Publish every spool that MLflow does not know whole, and wait for it."""
    from tasks.lineage.spool import refused, sync
    from tasks.settings import home

    behind, aside = sync(home()), refused(home())
    words = ["MLflow knows everything." if not behind else f"{len(behind)} run(s) could not be told; is the server up?"]
    words += [
        f"MLflow refused {count} event(s) for good; {path} holds them and says why." for path, count in aside.items()
    ]
    fields = {"synced": not behind, "behind": [str(folder) for folder in behind]}
    say({**fields, "refused": {str(path): count for path, count in aside.items()}}, "\n".join(words), as_json=as_json)
