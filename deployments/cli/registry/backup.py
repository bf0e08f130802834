"""`headway backup`, `restore`: key assets into another store, and a home out of it; the drill proves it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated, Any

import typer

from deployments.cli.operations.users import As, Reason, asked
from deployments.cli.options import Json
from deployments.cli.output import CommandError, say
from tasks.common.errors import IntegrityError
from tasks.common.home import home
from tasks.storage import open_named, open_store


def backup(
    to: Annotated[str, typer.Option("--to", help="A store for backups alone: a name in stores.yaml, or a folder.")],
    keep: Annotated[
        int | None, typer.Option(min=1, help="Keep only this many of the newest backups; by default all.")
    ] = None,
    with_keys: Annotated[bool, typer.Option("--with-keys", help="Include private signing keys.")] = False,
    drill: Annotated[
        bool,
        typer.Option(
            "--drill", help="Make no backup; restore the newest one to a temporary folder and verify its hashes."
        ),
    ] = False,
    reason: Reason = "",
    as_: As = "",
    as_json: Json = False,
) -> None:
    """Back up datasets, tokenizers, checkpoints, models, and all records of them. Sends only what is new."""
    if drill:
        if keep or with_keys:
            raise ValueError("--drill makes no backup: leave out --keep and --with-keys")
        from tasks.registry.backup.restore import drill as prove

        source = open_named(home(), to)
        with _progress("drill") as tell:
            done = prove(home(), source, tell=tell)
        words = (
            f"Restored and compared: {done.artifacts} artifact(s), {done.bytes / 1e6:.1f} MB, {done.documents} document(s), an "
            f"audit log of {done.audit_entries} entries.\n"
            f"A restore takes {done.rto_seconds:.1f} s here (RTO); the backup of {done.at} is {done.rpo_seconds:.0f} s old (RPO)."
        )
        return say({"from": source.uri, **asdict(done)}, words, as_json=as_json)
    from tasks.registry.backup.backup import back_up

    store, target = open_store(home()), open_named(home(), to)
    with (
        asked("override" if with_keys else "publish", as_, what=f"backup to {target.uri}", reason=reason),
        _progress("backup") as tell,
    ):
        made = back_up(home(), store, target, keep=keep or 0, with_keys=with_keys, tell=tell)
    return _tell_made(made, target.uri, as_json)


def restore(
    from_: Annotated[
        str, typer.Option("--from", help="The store with the backups: a name in stores.yaml, or a folder.")
    ],
    at: Annotated[
        str, typer.Option(help="Use the newest backup that is not later than this time, in UTC; by default the newest.")
    ] = "",
    reason: Reason = "",
    as_: As = "",
    as_json: Json = False,
) -> None:
    """Rebuild an empty home from a backup; every byte is verified."""
    from tasks.registry.backup.restore import restore as restore_home

    source = open_named(home(), from_)
    with asked("override", as_, what=f"restore from {source.uri}", reason=reason), _progress("restore") as tell:
        restored = restore_home(home(), open_store(home()), source, at=at, tell=tell)
    contents = restored.contents
    fields = {
        "home": str(home()),
        "from": source.uri,
        "backup": restored.backup.version,
        "at": contents.at,
        "artifacts": len(contents.artifacts),
        "documents": len(contents.documents),
        "files": restored.files,
        "bytes": restored.bytes,
        "damaged": list(contents.damaged),
    }
    words = (
        f"Restored {home()} as it was at {contents.at}: {len(contents.artifacts)} artifact(s), {restored.bytes / 1e6:.1f} MB, "
        f"{len(contents.documents)} document(s), all as backed up"
    )
    say(fields, words, as_json=as_json)


def _tell_made(made: Any, to: str, as_json: bool) -> None:
    """What is damaged here is in no backup: the command reports it with exit code 5, after all the rest is safe."""
    output = made.contents
    fields = {
        "to": to,
        "backup": made.manifest.version,
        "at": output.at,
        "artifacts": len(output.artifacts),
        "sent": list(made.sent),
        "sent_bytes": made.sent_bytes,
        "documents": len(output.documents),
        "left_out": list(made.left_out),
        "damaged": list(output.damaged),
        "kept_out": list(made.kept_out),
        "pruned": list(made.pruned),
    }
    if output.damaged:
        raise CommandError(
            IntegrityError(
                f"backed up, but not what is damaged here and in no backup from before: {', '.join(output.damaged[:5])}",
                problems=[{"path": ref, "problem": "sha256"} for ref in output.damaged],
                remedy="`headway verify` names the files of each; make it again, and back up again.",
            ),
            fields,
        )
    words = (
        f"Backed up to {to} at {output.at}: {len(output.artifacts)} artifact(s), of which {len(made.sent)} were new "
        f"({made.sent_bytes / 1e6:.1f} MB), and {len(output.documents)} document(s)"
    )
    words += f"; {len(made.pruned)} old one(s) removed" if made.pruned else ""
    if made.kept_out:
        words += (
            f"\nNot in it, as secrets: {', '.join(made.kept_out)} of the platform's settings. Write env:NAME there, and keep "
            "the secret where you keep others"
        )
    say(fields, words, as_json=as_json)


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int, str], None]]:
    """How many bytes of how many are done, on stderr."""
    from deployments.cli.progress import Progress, console

    shown = Progress(console())
    shown.started(what, None)
    try:
        yield lambda done, total, text: shown.progress(what, done, total, text, None)
    finally:
        shown.quiet()
