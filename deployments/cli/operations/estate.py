"""`headway estate`: Azure's side as templates, what came of them as settings, and an audit of it. See docs/estate.md."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deployments.cli.options import Json
from deployments.cli.output import CommandError, aligned, say, visible
from tasks.common.errors import GateFailed
from tasks.common.home import home

if TYPE_CHECKING:
    from tasks.estate.audit import Finding, Row


def render(
    config: Annotated[Path, typer.Option("--config", "-c", help="Settings of the estate: a YAML file.")],
    to: Annotated[Path, typer.Option(help="Folder that the files are written to.")],
    as_json: Json = False,
) -> None:
    """Write the ARM templates of an estate, with a README that says how to deploy them and what they cost."""
    from deployments.azure.readme import readme, write
    from deployments.azure.render import files, grants
    from deployments.azure.settings import load_estate
    from tasks.planning.prices.book import open_book

    estate = load_estate(config)
    texts = files(estate)
    names = [name for name in texts if name.startswith("modules/")]
    templates = {Path(name).stem: json.loads(texts[name]) for name in names}
    today = datetime.datetime.now(datetime.UTC).date()
    texts["README.md"] = readme(estate, templates, book=open_book(home()), today=today)
    written = write(to, texts)
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
    html: Annotated[Path | None, typer.Option(help="Write a page to this file.")] = None,
    with_home: Annotated[
        bool, typer.Option("--home/--no-home", help="Judge Headway's half from the records of this home, too.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Judge what is there by Microsoft's recommendations: exports of Azure, and this home. Azure itself is not asked."""
    from deployments.azure.settings import load_estate
    from tasks.estate.audit import LEVELS, failed, load_waivers
    from tasks.estate.audit import audit as judge
    from tasks.estate.exports import read_exports, script
    from tasks.estate.records import records

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
    rows = judge(export, records(home()) if with_home else {}, load_waivers(waivers) if waivers else (), now=now)
    named = ", ".join(sorted(export.subscriptions)) or "not named by the export"
    if html:
        from tasks.report.pages import render, write_page

        write_page(
            html,
            render("estate", title="Audit of the estate", rows=rows, notes=export.notes, subscription=named, now=now),
        )
    fields = {"subscription": named, "level": level, "counts": _counts(rows), "notes": export.notes} | {
        "rows": [_fields(row) for row in rows]
    }
    words = [*_table(rows), *(f"note: {one}" for one in export.notes), *([f"wrote {html}"] if html else [])]
    bad = failed(rows, LEVELS[LEVELS.index(level)], strict=strict)
    if not bad:
        say(fields, words, as_json=as_json)
        return
    if not as_json:
        say({}, words, as_json=False)
    checks = [
        {"name": f"{row.recommendation.id}/{one.check}", "measured": one.text, "limit": "met", "remedy": one.remedy}
        for row in bad
        for one in row.findings
        if one.verdict in ("not met", "not in this export")
    ]
    names = ", ".join(row.recommendation.id for row in bad)
    text = f"{'not met, or not known,' if strict else 'not met'} of level {level}: {names}"
    remedy = "Run the remedy of each row, and collect again; or waive it with --waivers (docs/estate.md)."
    raise CommandError(GateFailed(text, stage="audit", checks=checks, remedy=remedy), fields)


def _counts(rows: list[Row]) -> dict[str, int]:
    from tasks.estate.audit import WORST

    return {verdict: sum(row.verdict == verdict for row in rows) for verdict in WORST}


def _fields(row: Row) -> dict[str, Any]:
    """A row for machines."""
    recommendation = row.recommendation
    named = {key: getattr(recommendation, key) for key in ("id", "text", "source", "impact", "link")}
    return {**named, "verdict": row.verdict, "why": row.why, "findings": [_finding(one) for one in row.findings]}


def _finding(one: Finding) -> dict[str, Any]:
    waiver = one.waiver.model_dump(mode="json") if one.waiver else None
    return {**{key: getattr(one, key) for key in ("check", "verdict", "text", "resource", "remedy")}, "waiver": waiver}


def _table(rows: list[Row]) -> list[str]:
    """The rows, the worst first; of those that are not met, what to do."""
    from tasks.estate.audit import LEVELS, SHOWN, WORST

    ordered = sorted(rows, key=lambda row: (WORST.index(row.verdict), LEVELS.index(row.recommendation.impact)))
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
            result += [visible(f"    {one.text}") for one in row.findings if one.verdict == row.verdict][:1]
        result += [f"    and {len(wrong) - SHOWN:,} more, with --json or --html"] if len(wrong) > SHOWN else []
    counts = ", ".join(f"{number} {verdict}" for verdict, number in _counts(rows).items())
    return [*result, f"{len(rows)} rows: {counts}"]
