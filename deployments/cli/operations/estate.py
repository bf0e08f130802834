"""`headway estate`: Azure's side as templates, what came of them as settings, and an audit of it. See docs/estate.md."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deployments.cli.operations.users import As, asked
from deployments.cli.options import Json
from deployments.cli.output import CommandError, aligned, say, visible
from tasks.common.errors import GateFailed
from tasks.common.home import home

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tasks.report.estate.audit import Row, Waiver
    from tasks.report.estate.what_if import WhatIf


def render(
    config: Annotated[Path, typer.Option("--config", "-c", help="Settings of the estate: a YAML file.")],
    to: Annotated[Path, typer.Option(help="Folder that the files are written to.")],
    as_json: Json = False,
) -> None:
    """Write the ARM templates of an estate, with a README that says how to deploy them and what they cost."""
    from deployments.azure.readme import notes, readme, write
    from deployments.azure.render import files, grants
    from deployments.azure.settings import load_estate
    from tasks.planning.prices.book import open_book

    estate = load_estate(config)
    texts = files(estate)
    names = [name for name in texts if name.startswith("modules/")]
    templates = {Path(name).stem: json.loads(texts[name]) for name in names}
    today = datetime.datetime.now(datetime.UTC).date()
    book = open_book(home())
    texts["README.md"] = readme(estate, templates, book=book, today=today)
    written = write(to, texts)
    for note in notes(estate, book=book, today=today):
        typer.echo(f"headway: note: {note}", err=True)
    resources = sum(len(template["resources"]) for template in templates.values())
    fields = {
        "folder": str(to),
        "files": [str(path) for path in written],
        "modules": sorted(templates),
        "resources": resources,
        "role_assignments": len(grants(estate)),
    }
    words = [
        f"{to}: {len(templates)} modules, {resources} resources, {len(grants(estate))} role assignments",
        f"{to / 'README.md'} says how to deploy them. Nothing was sent to Azure.",
    ]
    say(fields, words, as_json=as_json)


def connect(
    outputs: Annotated[Path, typer.Argument(help="What `az stack sub show --output json` printed.")],
    to: Annotated[Path, typer.Option(help="Folder that the settings are written to.")],
    as_json: Json = False,
) -> None:
    """Write the settings of a home out of the outputs of an estate's deployment."""
    from deployments.azure.connect import check, read_outputs, settings
    from deployments.azure.readme import write

    result = read_outputs(outputs)
    written = write(to, settings(result))
    check(to, result)
    clusters = [cluster.name for cluster in result.clusters]
    fields = {"folder": str(to), "files": [str(path) for path in written], "clusters": clusters}
    first = to / f"{clusters[0]}.yaml"
    words = [
        *(f"wrote {path}" for path in written),
        f"stores.yaml belongs into {home()}. Then `headway doctor -c {first}` looks at all of it.",
    ]
    say(fields, words, as_json=as_json)


def audit(
    exports: Annotated[
        list[Path] | None, typer.Argument(help="JSON files of the queries, or folders of them.", show_default=False)
    ] = None,
    collect: Annotated[
        bool, typer.Option("--collect", help="Print the queries as a Bash script, which only reads; judge nothing.")
    ] = False,
    settings: Annotated[
        Path | None, typer.Option(help="Settings of the estate: refuse exports of another subscription.")
    ] = None,
    waivers: Annotated[
        Path | None, typer.Option(help="A YAML list of what need not be met: row, resource, who, why, until.")
    ] = None,
    level: Annotated[
        str, typer.Option(help="Exit with 3 when a row of this impact or above is not met: high, medium, low.")
    ] = "high",
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 3 also when exports or records could show a row, and do not.")
    ] = False,
    what_if: Annotated[
        Path | None,
        typer.Option(
            help="What `az deployment sub what-if --no-pretty-print` printed: exit with 3 also when the estate drifted."
        ),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page to this file.")] = None,
    with_home: Annotated[
        bool, typer.Option("--home/--no-home", help="Judge Headway's half from the records of this home, too.")
    ] = True,
    as_: As = "",
    as_json: Json = False,
) -> None:
    """Judge what is there by Microsoft's recommendations: exports of Azure, and this home. Azure itself is not asked."""
    from deployments.azure.settings import load_estate
    from tasks.report.estate.audit import LEVELS, failed, load_waivers
    from tasks.report.estate.audit import audit as judge
    from tasks.report.estate.exports import read_exports, script
    from tasks.report.estate.records import records
    from tasks.report.estate.report import checks_of
    from tasks.report.estate.report import fields as for_machines
    from tasks.report.estate.what_if import read_what_if

    if collect:
        say({"script": script()}, script().rstrip(), as_json=as_json)
        return
    if level not in LEVELS:
        raise ValueError(f"--level {level!r} is none of {', '.join(LEVELS)}")
    if not exports:
        raise ValueError(
            "name the exports, or run `headway estate audit --collect > collect.sh` first, which makes them"
        )
    subscription = load_estate(settings).subscription_id if settings else ""
    export = read_exports(exports, subscription=subscription)
    now = datetime.datetime.now(datetime.UTC)
    waived = load_waivers(waivers) if waivers else ()
    if with_home:
        _note(waived, as_)
    rows = judge(export, records(home()) if with_home else {}, waived, now=now)
    drift = read_what_if(what_if) if what_if else None
    named = ", ".join(sorted(export.subscriptions)) or "not named by the export"
    if html:
        from tasks.report.pages import render, write_page

        write_page(
            html,
            render(
                "estate",
                title="Audit of the estate",
                rows=rows,
                notes=export.notes,
                subscription=named,
                now=now,
                drift=drift,
            ),
        )
    fields = {"level": level, **for_machines(rows, subscription=named, notes=export.notes, drift=drift)}
    words = [*_table(rows), *(f"note: {one}" for one in export.notes), *([f"wrote {html}"] if html else [])]
    words += _drift(drift) if drift else []
    bad = failed(rows, LEVELS[LEVELS.index(level)], strict=strict)
    drifted = drift is not None and (drift.verdict == "drifted" or (strict and drift.verdict == "unknown"))
    if not bad and not drifted:
        say(fields, words, as_json=as_json)
        return
    if not as_json:
        say({}, words, as_json=False)
    names = ", ".join(row.recommendation.id for row in bad)
    wrong = [f"{'not met, or not known,' if strict else 'not met'} of level {level}: {names}"] if bad else []
    wrong += [f"the estate is not as it was rendered: {drift.verdict}"] if drift and drifted else []
    remedy = "Run the remedy of each row, and collect again; or waive it with --waivers (docs/estate.md)."
    raise CommandError(GateFailed("; ".join(wrong), stage="audit", checks=checks_of(bad), remedy=remedy), fields)


def _note(waivers: Sequence[Waiver], as_: str) -> None:
    """Have new waivers in the audit log, by somebody who may override."""
    from tasks.report.estate.waivers import note, unnoted
    from tasks.storage import open_store

    if waivers and (new := unnoted(open_store(home()), waivers)):
        with asked("override", as_, what=f"waive {', '.join(one.row for one in new)} of the estate's audit"):
            note(open_store(home()), new)


def _drift(drift: WhatIf) -> list[str]:
    """What left the templates."""
    lines = [f"    {one.kind}: {one.resource}  {', '.join(one.what[:5])}".rstrip() for one in drift.changes]
    return [f"the estate against its templates: {drift.verdict}", *map(visible, lines)]


def _table(rows: list[Row]) -> list[str]:
    """The rows, the worst first; of those that are not met, what to do."""
    from tasks.report.estate.audit import LEVELS, NO_HOME, SHOWN, WORST
    from tasks.report.estate.report import counts

    at_home = [row for row in rows if row.findings and all(one.text.endswith(NO_HOME) for one in row.findings)]
    ordered = sorted(
        (row for row in rows if row not in at_home),
        key=lambda row: (WORST.index(row.verdict), LEVELS.index(row.recommendation.impact)),
    )
    lines = aligned(
        (row.verdict, row.recommendation.impact, row.recommendation.id, row.recommendation.text) for row in ordered
    )
    result = []
    for row, line in zip(ordered, lines, strict=True):
        result.append(line)
        wrong = [one for one in row.findings if one.verdict in ("not met", "waived")]
        for one in wrong[:SHOWN]:
            by = (
                f" (waived by {one.waiver.who} until {one.waiver.until}: {one.waiver.why})"
                if one.verdict == "waived" and one.waiver
                else ""
            )
            result.append(visible(f"    {one.text}{by}"))
            result += [visible(f"      -> {one.remedy}")] if one.verdict == "not met" else []
        if row.verdict == "not in this export":
            result += [f"    {row.why}"] if row.why else []
            result += [visible(f"    {one.text}") for one in row.findings if one.verdict == row.verdict][:1]
        result += [f"    and {len(wrong) - SHOWN:,} more, with --json or --html"] if len(wrong) > SHOWN else []
    if at_home:
        names = ", ".join(row.recommendation.id for row in at_home)
        result.append(f"not judged, because a home's records show them and --no-home was given: {names}")
    each = ", ".join(f"{number} {verdict}" for verdict, number in counts(rows).items())
    return [*result, f"{len(rows)} rows: {each}"]
