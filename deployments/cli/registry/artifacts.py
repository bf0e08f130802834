"""`headway artifacts`, `verify`: what is there, what became of a name's versions, and whether they are intact."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from deployments.cli.operations.users import As, Reason, asked
from deployments.cli.options import Json
from deployments.cli.output import CommandError, in_home, say, short_ref, visible
from tasks.common.errors import IntegrityError
from tasks.common.home import home
from tasks.storage import open_named, open_store
from tasks.storage.settings import load_stores


def copy(
    ref: Annotated[str, typer.Argument(help="KIND/NAME or KIND/NAME@VERSION: a model, a dataset, any artifact.")],
    to: Annotated[str, typer.Option("--to", help="A store or Azure ML registry: a name in stores.yaml, or a folder.")],
    from_: Annotated[str, typer.Option("--from", help="The store that it is in; by default this home's own.")] = "",
    reason: Reason = "",
    as_: As = "",
    as_json: Json = False,
) -> None:
    """Copy an artifact to another store, with its lineage and signatures; verified on arrival."""
    from tasks.storage.azureml_registry import SCHEME

    source = open_named(home(), from_) if from_ else open_store(home())
    config = load_stores(home()).stores.get(to)
    with asked("publish", as_, what=f"copy {ref} to {to}", reason=reason):
        if config and config.uri.startswith(SCHEME):
            from tasks.registry.transfer import require_model, share_model
            from tasks.storage.azureml_registry import SCHEME, open_registry
            from tasks.storage.blob.credentials import token_credential

            require_model(ref)
            name = config.uri.removeprefix(SCHEME)
            client = open_registry(name, token_credential(config, of=config.uri))
            copied: Any = share_model(source, client, ref, name=name, home=home(), reason=reason)
            fields = {"to": config.uri, "uri": copied.uri, "noted_in_source": True}
        else:
            target = open_named(home(), to)
            from tasks.registry.transfer import copy_artifact

            copied = copy_artifact(source, target, ref, home=home(), reason=reason)
            fields = {"to": target.uri, "uri": target.uri_of(copied.manifest), "noted_in_source": copied.noted}
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


def artifacts(
    what: Annotated[
        str,
        typer.Argument(
            metavar="[KIND|NAME]",
            help="dataset, tokens, model, ...; by default all. With --history: KIND/NAME, or a NAME that only one kind has.",
        ),
    ] = "",
    history: Annotated[
        bool, typer.Option("--history", help="What became of the versions of one name, newest first.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List artifacts with their versions, newest first within a name; or the history of one name."""
    from tasks.artifacts import KINDS

    if history:
        from tasks.artifacts import parse_ref
        from tasks.registry.versions import kind_of, past

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
        return say(fields, [f"{kind}/{name}", *map(_row_in_words, rows)], as_json=as_json)
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
    return say({"artifacts": rows}, words or in_home(f"No {what or 'artifact'} yet"), as_json=as_json)


def verify(
    ref: Annotated[
        str,
        typer.Argument(metavar="[REF]", help="KIND/NAME or KIND/NAME@VERSION; by default everything in the store."),
    ] = "",
    as_json: Json = False,
) -> None:
    """Check every byte of an artifact against its manifest, and a checkpoint or model against its signature.

    Without a reference: all artifacts, all records, refs and histories, the audit log, and the files of endpoints.
    """
    from tasks.registry.verification import problems_of, refusal
    from tasks.security.access import note_access
    from tasks.security.signatures import KINDS, require_signed
    from tasks.serving.known import served_model

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
    if manifest.content.kind in KINDS:
        statement = require_signed(store, home(), manifest)
        fields["signature"] = {"key": statement.key, "time": statement.time}
        words += f"; signed by key {statement.key[:16]} at {statement.time}, which is trusted"
    say(fields, words, as_json=as_json)


def _verify_everything(store: Any, keys: Path, as_json: bool) -> None:
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


def _row(result: Any, change: Any) -> dict[str, Any]:
    manifest, difference = result.there.get(change.version), result.difference(change)
    changed = None
    if difference:  # in short: `headway diff` has it in full
        files = {name: len(getattr(difference.files, name)) for name in ("added", "removed", "changed")}
        changed = {
            "files": files,
            "configuration": [one.key for one in difference.configuration],
            "metrics": [one.model_dump() for one in difference.metrics],
            "inputs": [one.name for one in difference.inputs],
        }
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
        "changed": changed,
    }


def _row_in_words(row: dict[str, Any]) -> str:
    size = f"{row['bytes'] / 1e6:.2f} MB in {row['files']} file(s)" if row["there"] else "gone"
    by = f"{row['who']} by run {row['flow_run'][:8]}" if row["flow_run"] else row["who"]
    mark = "*" if row["current"] else " "
    line = f"{mark} {row['version'][:12]}  {row['time'][:19].replace('T', ' ')}  {row['action']:<9}{by:<24}{size}"
    changes = []
    if changed := row["changed"]:
        signs = (("+", "added"), ("-", "removed"), ("~", "changed"))
        counts = [f"{sign}{changed['files'][key]}" for sign, key in signs if changed["files"][key]]
        changes += ["files " + " ".join(counts)] if counts else []
        metrics = [f"{m['name']} {_number(m['before'])} -> {_number(m['after'])}" for m in changed["metrics"]]
        parts = {"configuration": changed["configuration"], "metrics": metrics, "made from": changed["inputs"]}
        for title, names in parts.items():
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            changes += [f"{title} {', '.join(names[:3])}{more}"] if names else []
    parts_of_line = (line, "; ".join(changes), f"({row['reason']})" if row["reason"] else "")
    return "  ".join(part for part in parts_of_line if part)


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.6g}"
