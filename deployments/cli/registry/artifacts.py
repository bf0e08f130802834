"""`headway artifacts`, `verify`: what is there, what became of a name's versions, and whether they are intact."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deployments.cli.operations.users import As, Reason, asked
from deployments.cli.options import Json
from deployments.cli.output import CommandError, say, short_ref, visible

if TYPE_CHECKING:
    from tasks.registry.versions import Difference

# `headway copy`: an artifact with its lineage and signatures into another store, or a model into an Azure ML registry.


def copy(
    ref: Annotated[str, typer.Argument(help="KIND/NAME or KIND/NAME@VERSION: a model, a dataset, any artifact.")],
    to: Annotated[str, typer.Option("--to", help="Store, or Azure ML registry: a name of stores.yaml, or a folder.")],
    from_: Annotated[str, typer.Option("--from", help="Store that it is in; without it, this home's own.")] = "",
    reason: Reason = "",
    as_: As = "",
    as_json: Json = False,
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
    from tasks.registry.transfer import require_model, share_model
    from tasks.storage.azureml_registry import SCHEME, open_registry
    from tasks.storage.blob.credentials import token_credential

    require_model(ref)
    name = config.uri.removeprefix(SCHEME)
    client = open_registry(name, token_credential(config, of=config.uri))
    shared = share_model(source, client, ref, name=name, home=home(), reason=reason)
    return shared, {"to": config.uri, "uri": shared.uri, "noted_in_source": True}


def artifacts(
    what: Annotated[
        str,
        typer.Argument(
            metavar="[KIND|NAME]",
            help="dataset, tokens, model, ...; without it, all. With --history: KIND/NAME, or a NAME that only one kind has.",
        ),
    ] = "",
    history: Annotated[
        bool, typer.Option("--history", help="What became of the versions of one name, newest first.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List artifacts with their versions, newest first within a name; or the history of one name."""
    from tasks.artifacts import KINDS
    from tasks.common.home import home
    from tasks.storage import open_store

    if history:
        return _history(what, as_json)
    if what and what not in KINDS:
        raise ValueError(
            f"{what!r} is not a kind of artifact; the kinds are {', '.join(KINDS)}. For the versions of one name add --history"
        )
    store = open_store(home())
    results = list(store.manifests(what))
    rows = [
        {
            "ref": m.ref,
            "uri": store.uri_of(m),
            "files": [{**file.model_dump(), "location": store.location(m, file)} for file in m.content.files],
        }
        for m in results
    ]
    words = [f"{short_ref(m.ref):<58}{m.provenance.created}  {m.bytes / 1e6:9.2f} MB" for m in results]
    return say({"artifacts": rows}, words or "No artifact yet.", as_json=as_json)


def verify(
    ref: Annotated[
        str,
        typer.Argument(metavar="[REF]", help="KIND/NAME or KIND/NAME@VERSION. Without it, everything in the store."),
    ] = "",
    as_json: Json = False,
) -> None:
    """Check every byte of an artifact against its manifest, and a checkpoint or model against its signature.

    Without a reference: all artifacts, all records, refs and histories, the audit log, and the files of endpoints.
    """
    from tasks.common.home import home
    from tasks.registry.verification import problems_of, refusal
    from tasks.security.access import note_access
    from tasks.serving.known import served_model
    from tasks.storage import open_store

    if ref.startswith("endpoint/"):
        model = short_ref(served_model(home(), ref))
        raise ValueError(f"{ref} has no files of its own; verify what it serves: headway verify {model}")
    store = open_store(home())
    if not ref:
        _verify_everything(store, home() / "keys", as_json)
        return
    manifest, problems = problems_of(store, ref, keys=home() / "keys")
    note_access(home(), manifest.ref, bytes=manifest.bytes, what="verify")
    fields: dict[str, Any] = {
        "ref": manifest.ref,
        "ok": not problems,
        "files": len(manifest.content.files),
        "bytes": manifest.bytes,
        "problems": [problem.model_dump() for problem in problems],
    }
    if problems:
        raise CommandError(refusal(manifest, problems), fields)
    words = f"{manifest.ref}: {fields['files']} file(s), {fields['bytes']} bytes, all as published"
    say(fields, words, as_json=as_json)


def _verify_everything(store: Any, keys: Path, as_json: bool) -> None:
    from tasks.common.errors import IntegrityError
    from tasks.registry.verification import everything

    looked, damaged = 0, {}
    for name, problems in everything(store, keys=keys):
        looked += 1
        if "@" in name and not as_json:
            print(visible(f"{name}: {'damaged' if problems else 'sound'}"), file=sys.stderr, flush=True)
        if problems:
            damaged[name] = [problem.model_dump() for problem in problems]
    fields = {"ok": not damaged, "looked_at": looked, "problems": damaged}
    if damaged:
        text = "; ".join(f"{name}: {item[0]['path']} ({item[0]['problem']})" for name, item in damaged.items())
        error = IntegrityError(
            f"{len(damaged)} of {looked} are not as they were written: {text}",
            remedy="`headway verify REF` says how to get an artifact back; documents come back with `headway restore`.",
        )
        raise CommandError(error, fields)
    say(fields, f"{looked} artifacts and documents, all as they were written", as_json=as_json)


def _history(what: str, as_json: bool) -> None:
    """The changes of a name, newest first; the first row of the version that is current is marked."""
    from tasks.artifacts import parse_ref
    from tasks.common.home import home
    from tasks.registry.versions import kind_of, past
    from tasks.storage import open_store

    if not what:
        raise ValueError("name what to look at, for example: headway artifacts dataset/tiny --history")
    store = open_store(home())
    kind, name, version = parse_ref(what if "/" in what else f"{kind_of(store, what)}/{what}")
    if version or kind == "endpoint":
        raise ValueError(f"{what} has no history of versions: write KIND/NAME, for example dataset/tiny")
    result = past(store, kind, name)
    now = next(reversed(result.stack()), None)
    rows = [_row(result, change) for change in reversed(result.changes)]
    for row in (row for row in rows if row["version"] == now and row["action"] != "delete"):
        row["current"] = True
        break
    fields = {"name": f"{kind}/{name}", "current": now, "history": rows}
    say(fields, [f"{kind}/{name}", *map(_history_line, rows)], as_json=as_json)


def _row(result: Any, change: Any) -> dict[str, Any]:
    manifest, changed = result.there.get(change.version), result.difference(change)
    return {
        "number": change.number,
        "action": change.action,
        "version": change.version,
        "current": False,
        "there": manifest is not None,
        "time": datetime.fromtimestamp(change.time, UTC).isoformat(timespec="seconds"),
        "who": change.who,
        "host": change.host,
        "flow_run": change.flow_run,
        "reason": change.reason,
        "bytes": manifest.bytes if manifest else None,
        "files": len(manifest.content.files) if manifest else None,
        "before": change.before,
        "changed": _changed(changed) if changed else None,
    }


def _changed(result: Difference) -> dict[str, Any]:
    """What a change changed, in short: `headway diff` has it in full."""
    files = result.files
    return {
        "files": {"added": len(files.added), "removed": len(files.removed), "changed": len(files.changed)},
        "configuration": [one.key for one in result.configuration],
        "metrics": [one.model_dump() for one in result.metrics],
        "inputs": [one.name for one in result.inputs],
    }


def _history_line(row: dict[str, Any]) -> str:
    size = f"{row['bytes'] / 1e6:.2f} MB in {row['files']} file(s)" if row["there"] else "gone"
    by = f"{row['who']} by run {row['flow_run'][:8]}" if row["flow_run"] else row["who"]
    mark = "*" if row["current"] else " "
    line = f"{mark} {row['version'][:12]}  {row['time'][:19].replace('T', ' ')}  {row['action']:<9}{by:<24}{size}"
    parts = (line, _changed_in_words(row["changed"]), f"({row['reason']})" if row["reason"] else "")
    return "  ".join(part for part in parts if part)


def _changed_in_words(changed: dict[str, Any] | None) -> str:
    if changed is None:
        return ""
    files = {sign: changed["files"][key] for sign, key in (("+", "added"), ("-", "removed"), ("~", "changed"))}
    messages = [f"{sign}{count}" for sign, count in files.items() if count]
    parts = ["files " + " ".join(messages)] if messages else []
    for title, names in (
        ("configuration", changed["configuration"]),
        (
            "metrics",
            [f"{one['name']} {_number(one['before'])} -> {_number(one['after'])}" for one in changed["metrics"]],
        ),
        ("made from", changed["inputs"]),
    ):
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        parts += [f"{title} {', '.join(names[:3])}{more}"] if names else []
    return "; ".join(parts)


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.6g}"
