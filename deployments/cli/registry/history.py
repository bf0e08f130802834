"""`headway diff`, `rollback`, `prune`: what differs between versions, going back to one, deleting old ones. See docs/history.md.

`headway artifacts NAME --history`, which lists them, is artifacts.py.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deployments.cli.operations import endpoint
from deployments.cli.operations.users import As, HistoryReason, asked
from deployments.cli.options import Json
from deployments.cli.output import CommandError, say, short_ref
from deployments.cli.registry.models import tell
from tasks.artifacts import KINDS, parse_ref
from tasks.common.errors import Missing
from tasks.common.home import home
from tasks.data.suite import forget
from tasks.orchestration.run_log import runs_at_work
from tasks.registry.versions import Difference, difference
from tasks.storage import open_store
from tasks.storage.store import Store, find

if TYPE_CHECKING:
    from tasks.registry.retention import Verdict

SHOWN = 20
"""Lines of each part of a difference that people are shown; --json has all."""


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="KIND/NAME or KIND/NAME@VERSION.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another of the same kind.")],
    as_json: Json = False,
) -> None:
    """Show what differs from A to B: files, configuration, metrics, and what they were made from."""
    for ref in (a, b):
        if ref.startswith("endpoint/"):
            raise ValueError(
                f"{ref} is no artifact: compare the models that endpoints serve, see `headway endpoint list`"
            )
    store = open_store(home())
    result = difference(find(store, *parse_ref(a)), find(store, *parse_ref(b)))
    fields = {**result.model_dump(mode="json", exclude={"code"}), "same": result.same}
    fields["code"] = {"before": result.code[0], "after": result.code[1]}
    say(fields, _difference_in_words(result), as_json=as_json)


def rollback(
    ref: Annotated[str, typer.Argument(help="KIND/NAME, for example dataset/tiny.")],
    to: Annotated[
        str, typer.Option("--to", metavar="VERSION", help="The version to return to; by default the previous one.")
    ] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would happen, and do nothing.")] = False,
    reason: HistoryReason = "",
    as_: As = "",
    as_json: Json = False,
) -> None:
    """Make an earlier version of an artifact the current one again; for a model, also the champion. Needs --reason.

    For endpoint/NAME, traffic switches to the previous model at once; a deploy in progress is rolled back.
    """
    if ref.startswith("endpoint/"):
        endpoint.roll_back(ref, to=to, dry_run=dry_run, reason=reason, as_=as_, as_json=as_json)
        return
    from tasks.registry.promoting import require_sound, roll_back, way_back

    store = open_store(home())
    step = way_back(store, ref, to=to)
    if not dry_run and not reason.strip():
        raise ValueError(f"say why: --reason TEXT goes into the audit log and the history of {step.name}")
    if step.needed and dry_run:
        require_sound(store, step, keys=home() / "keys")
    elif step.needed:
        with asked(step.right, as_, what=f"roll back {step.name} to {step.after.version[:12]}", reason=reason):
            roll_back(
                store, step, keys=home() / "keys", reason=reason, when_champion=partial(tell, store, "rollback", reason)
            )
    fields = {
        "ref": step.after.ref,
        "before": step.before.ref,
        "changed": step.needed and not dry_run,
        "dry_run": dry_run,
        "moves_champion": step.moves_champion,
    }
    words: str | list[str]
    if not step.needed:
        words = f"{short_ref(step.after.ref)} is the current one already: nothing to do"
    else:
        would, did = ("would become", "would move") if dry_run else ("is", "moved")
        lines = [f"{short_ref(step.after.ref)} {would} the current one; before: {step.before.version[:12]}"]
        if step.moves_champion:
            lines.append(
                f"refs/{step.after.provenance.name}/champion {did} with it. What endpoints serve stays as it is."
            )
        words = [*lines, *_difference_in_words(difference(step.before, step.after))[1:]]
    say(fields, words, as_json=as_json)


def prune(
    what: Annotated[
        str,
        typer.Argument(metavar="[KIND/NAME|KIND]", help="KIND/NAME or KIND whose versions to delete; by default all."),
    ] = "",
    keep: Annotated[int, typer.Option(help="Keep the last K versions of each name, 2 or more.")] = 3,
    every: Annotated[
        int, typer.Option(min=0, help="Also keep every Nth version that was ever published; 0 for none.")
    ] = 0,
    apply: Annotated[
        bool, typer.Option("--apply", help="Delete; without it, only show what would be deleted.")
    ] = False,
    reason: HistoryReason = "",
    as_: As = "",
    as_json: Json = False,
) -> None:
    """Delete old versions that nothing needs. Shows what would be deleted, and why the rest stays; --apply deletes it."""
    from tasks.registry.retention import Rule, judge

    if apply and not reason.strip():
        raise ValueError("say why: --apply deletes for good, and --reason TEXT goes into the audit log")
    store = open_store(home())
    kind, name = _subject(what)
    from tasks.serving.known import known_endpoints, models_before, served_model

    result: dict[str, str] = {}
    for run in runs_at_work(home()):
        if run.status == "running" or not (run.here or run.last("closed")):
            ended = [event["outcome"] for event in run.events if event["event"] == "ended"]
            refs = [ref for outcome in ended for ref in (*outcome["inputs"], *outcome["outputs"])]
            result |= {ref: f"the run {run.identity[:8]} uses it" for ref in refs}
    result |= {ref: f"endpoint/{name} would go back to it" for ref, name in models_before(home()).items()}
    verdicts = judge(
        store,
        Rule(keep=keep, every=every),
        kind=kind,
        name=name,
        used=result | {served_model(home(), name): f"endpoint/{name} serves it" for name in known_endpoints(home())},
    )
    if not apply:
        fields = {**_verdicts(verdicts), "applied": False, "failed": []}
        return say(fields, _verdicts_in_words(verdicts), as_json=as_json)
    with asked("override", as_, what=f"prune {what or 'everything'}", reason=reason):
        return _apply(store, verdicts, reason, as_json)


def _apply(store: Store, verdicts: list[Verdict], reason: str, as_json: bool) -> None:
    from tasks.registry.retention import prune as delete

    done = list(delete(store, verdicts, reason=reason))
    gone, failed = [d.manifest for d in done if not d.error], [d for d in done if d.error]
    for key in (each.provenance.key for each in gone if each.content.kind == "validation" and each.provenance.key):
        forget(home(), key)
    fields = {**_verdicts(verdicts), "applied": True}
    fields["goes"] = [{"ref": manifest.ref, "bytes": manifest.bytes} for manifest in gone]
    fields["bytes"] = sum(manifest.bytes for manifest in gone)
    fields["failed"] = [{"ref": d.manifest.ref, "error": d.error} for d in failed]
    if failed:
        text = "; ".join(f"{short_ref(d.manifest.ref)}: {d.error}" for d in failed[:5])
        remedy = "The others are gone. Fix what the message names, and run the same command again."
        error = Missing(f"{len(failed)} of {len(done)} version(s) could not be deleted: {text}", remedy=remedy)
        raise CommandError(error, fields)
    say(fields, f"{len(gone)} version(s) deleted, {_megabytes(fields['bytes'])}", as_json=as_json)


def _subject(what: str) -> tuple[str, str]:
    """Kind and name, either may be missing. Raises ValueError."""
    if not what or what in KINDS:
        return what, ""
    if "/" not in what:
        raise ValueError(f"{what!r} is not a kind of artifact; write KIND/NAME or one of {', '.join(KINDS)}")
    kind, name, version = parse_ref(what)
    if version or kind == "endpoint":
        raise ValueError(f"{what} is no name of versions: write KIND/NAME, for example dataset/tiny")
    return kind, name


def _difference_in_words(result: Difference) -> list[str]:
    """First the two references, then what differs."""
    if result.same:
        return [f"{short_ref(result.before)} and {short_ref(result.after)} are the same version"]
    files = result.files
    lines = [f"{short_ref(result.before)} -> {short_ref(result.after)}"]
    counts = f"{len(files.added)} added, {len(files.removed)} removed, {len(files.changed)} changed"
    lines.append(f"files: {counts}, {files.unchanged} the same")
    lines += _some([f"  + {file.path}  {file.after} bytes" for file in files.added])
    lines += _some([f"  - {file.path}  {file.before} bytes" for file in files.removed])
    lines += _some([f"  ~ {file.path}  {file.before} -> {file.after} bytes" for file in files.changed])
    settings = [f"  {one.key}  {one.before} -> {one.after}" for one in result.configuration]
    metrics = []
    for one in result.metrics:
        by = "" if one.difference is None else f"  ({one.difference:+.6g})"
        metrics.append(f"  {one.name}  {_number(one.before)} -> {_number(one.after)}{by}")
    inputs = [f"  {one.name}  {_versions(one.before)} -> {_versions(one.after)}" for one in result.inputs]
    for title, part in (("configuration", settings), ("metrics", metrics), ("made from", inputs)):
        lines += [f"{title}:", *_some(part)] if part else []
    if result.code[0] != result.code[1]:
        lines.append(f"code: {(result.code[0] or 'unknown')[:12]} -> {(result.code[1] or 'unknown')[:12]}")
    return lines


def _some(lines: list[str]) -> list[str]:
    more = len(lines) - SHOWN
    return [*lines[:SHOWN], f"  and {more} more: see --json"] if more > 0 else lines


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.6g}"


def _versions(versions: tuple[str, ...]) -> str:
    return ", ".join(version[:12] for version in versions) or "none"


def _verdicts(verdicts: list[Verdict]) -> dict[str, Any]:
    goes = [verdict.manifest for verdict in verdicts if not verdict.why]
    kept = [verdict for verdict in verdicts if verdict.why]
    return {
        "goes": [{"ref": manifest.ref, "bytes": manifest.bytes} for manifest in goes],
        "bytes": sum(manifest.bytes for manifest in goes),
        "kept": [{"ref": v.manifest.ref, "bytes": v.manifest.bytes, "why": list(v.why)} for v in kept],
    }


def _verdicts_in_words(verdicts: list[Verdict]) -> list[str]:
    goes = [verdict for verdict in verdicts if not verdict.why]
    lines = []
    for verdict in verdicts:
        why, more = "; ".join(verdict.why[:3]), len(verdict.why) - 3
        why += f"; and {more} more" if more > 0 else ""
        size = _megabytes(verdict.manifest.bytes)
        line = f"{'stays' if why else 'goes':<7}{short_ref(verdict.manifest.ref):<54}{size:>14}  {why}"
        lines.append(line.rstrip())
    size = _megabytes(sum(verdict.manifest.bytes for verdict in goes))
    end = f"{len(goes)} of {len(verdicts)} version(s) would go, {size}."
    return [*lines, f"{end} Nothing was deleted: --apply --reason TEXT does it."]


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.2f} MB"
