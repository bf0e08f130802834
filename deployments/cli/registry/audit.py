"""`headway audit-log`: who did what, and who was refused; whether the log is whole; who read what. See docs/audit.md."""

from __future__ import annotations

import re
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import typer

from deployments.cli.options import Json
from deployments.cli.output import CommandError, in_home, say
from tasks.common.errors import IntegrityError, Missing
from tasks.common.home import home
from tasks.security.access import accesses
from tasks.security.audit import copy_of, entries, newest_copied
from tasks.security.audit_chain import check
from tasks.storage import open_store

UNITS = {"m": "minutes", "h": "hours", "d": "days"}
HASH = r"[0-9a-fA-F]{12,64}"


def audit_log(
    person: Annotated[str, typer.Option(help="Only entries of this name, proven or claimed.")] = "",
    what: Annotated[str, typer.Option(help="Only entries with this text in the action or its object.")] = "",
    since: Annotated[
        str, typer.Option(help="Only entries since then: 90m, 12h, 7d, or a date such as 2026-01-31.")
    ] = "",
    verify: Annotated[
        bool, typer.Option("--verify", help="Check that no entry was changed, inserted or removed.")
    ] = False,
    head: Annotated[
        str, typer.Option(help="With --verify: the hash of an entry, noted earlier, that must be in the log.")
    ] = "",
    access: Annotated[
        bool, typer.Option("--access", help="Show who read which artifact, instead of who did what.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List the audit log, newest first: who did what, when and why, and who was refused."""
    if head and not verify:
        raise ValueError("--head is for --verify: headway audit-log --verify --head HASH")
    if verify and (access or person or what or since):
        raise ValueError("--verify looks at the whole audit log: it goes with --head only")
    if verify:
        _verify(home(), head, as_json)
        return
    start = _start(since)
    if access:
        reads = [
            one
            for one in accesses(home())
            if one.time >= start and person in ("", one.who) and what in f"{one.what} {one.ref}"
        ]
        rows = [{**one.model_dump(), "time": _utc(one.time)} for one in reads]
        lines = [f"{r['time']}  {r['who']:<16}  {r['what']:<10}  {r['bytes'] / 1e6:9.2f} MB  {r['ref']}" for r in rows]
        say({"access": rows}, lines or in_home("No read yet"), as_json=as_json)
        return
    results = [
        entry
        for entry in entries(open_store(home()))
        if entry.time >= start
        and person in ("", entry.who, entry.claimed)
        and what in f"{entry.action} {entry.right} {entry.what} {entry.after}"
    ]
    rows = [{**entry.model_dump(), "time": _utc(entry.time)} for entry in results]
    say({"entries": rows}, list(map(_line, rows)) or in_home("No entry yet"), as_json=as_json)


def _verify(home: Path, head: str, as_json: bool) -> None:
    """Walk the chain; against the copy too, where there is one that answers. Raises IntegrityError in a CommandError."""
    if head and not re.fullmatch(HASH, head):
        raise ValueError(f"--head {head!r} is no hash: --verify prints it, and twelve digits or more of it will do")
    copy = None  # what the copy elsewhere has, where there is one
    try:
        if lines := copy_of(home):
            copy = newest_copied(lines)
    except Missing as error:
        print(f"The copy was not compared: {error.message}", file=sys.stderr)
    result = check(open_store(home), contains=[head] if head else [], shipped=copy)
    broken = result.broken
    fields: dict[str, Any] = {
        "ok": broken is None,
        "checked": result.entries,
        "head": result.head.hash or None,
        "copied": copy.number if copy else None,
        "broken": {"number": broken.number, "problem": broken.problem} if broken else None,
    }
    if broken:
        problem = IntegrityError(
            f"the audit log does not hold: {broken.words}",
            remedy="Entries before it stand. Compare with the copy or a backup, and see who may write there: docs/audit.md.",
        )
        raise CommandError(problem, fields)
    words = f"entries: {result.entries}, each as it was written\nhead {result.head.hash or '(none yet)'}"
    say(fields, words + (f"\nthe copy has {copy.number} of them" if copy else ""), as_json=as_json)


def _start(since: str) -> float:
    """Seconds since 1970 of 12h, 7d or a date in UTC. Raises ValueError."""
    if not since:
        return 0.0
    ago = re.fullmatch(r"(\d+)([mhd])", since)
    if ago:
        return (datetime.now(UTC) - timedelta(**{UNITS[ago[2]]: int(ago[1])})).timestamp()
    try:
        given = datetime.fromisoformat(since)
    except ValueError as error:
        raise ValueError(f"--since {since!r} is neither 90m, 12h, 7d nor a date like 2026-01-31") from error
    return (given if given.tzinfo else given.replace(tzinfo=UTC)).timestamp()


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _line(row: dict[str, Any]) -> str:
    who = f"{row['who']} as {row['claimed']}" if row["claimed"] else row["who"]
    moved = f"{row['before'] or 'nothing'} -> {row['after']}" if row["after"] else ""
    why = "; ".join(part for part in (row["reason"], row["why"]) if part)
    parts = (
        row["time"],
        f"{who:<16}",
        f"{row['outcome']:<8}",
        row["action"],
        row["what"],
        moved,
        f"({why})" if why else "",
    )
    return "  ".join(part for part in parts if part)
