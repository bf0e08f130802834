"""Writes docs/estate.json, docs/images/estate.svg and a table of docs/estate.md: `python docs/make_estate.py`.

A test compares them.

estate.json is what each preset renders: its resources by type and API version, and a digest of each file. A change of it is a
change of what gets deployed: run tests/integration/deployments/test_estate_types.py with a clone of Microsoft's types then.
The picture shows who may do what on which resource, in the preset `production`. The table has every recommendation that the audit
judges.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from html import escape
from pathlib import Path
from typing import Any

from deployments.azure.render import Grant, files, grants, groups
from deployments.azure.settings import PRESETS, EstateConfig, estate_of
from tasks.report.estate.audit import Recommendation, recommendations

DOCS = Path(__file__).parent
SETTINGS = {"subscription_id": "00000000-0000-0000-0000-000000000001", "region": "westeurope"}
COLOURS = ("#0b6e99", "#a3333d", "#3a7d44", "#7b4b94", "#b5651d", "#555555", "#007a7a")
HEAD = "| recommended | source | the estate | Headway | audited by |\n| --- | --- | --- | --- | --- |\n"
STEP, WIDTH, LEFT, RIGHT = 26, 960, 200, 620


def rendered() -> dict[str, str]:
    """The text of each file."""
    presets = {
        path.stem: estate_of({"based_on": path.stem, **SETTINGS}, path.stem) for path in sorted(PRESETS.glob("*.yaml"))
    }
    summary = {name: _summary(files(estate)) for name, estate in presets.items()}
    return {
        "estate.json": json.dumps(summary, indent=1) + "\n",
        "images/estate.svg": picture(presets["production"]),
        "estate.md": _with_table((DOCS / "estate.md").read_text(encoding="utf-8")),
    }


def _with_table(text: str) -> str:
    """The page with a table of every recommendation, in the place of the one that it has."""
    before, head, rest = text.partition(HEAD)
    _, end, after = rest.partition("\n\n")
    rows = [
        f"| {one.text} | {one.source} | {one.estate} | {_headway(one)} | {_judged_by(one)} |"
        for one in recommendations()
    ]
    return "".join([before, head, "\n".join(rows), end, after])


def _headway(one: Recommendation) -> str:
    return "; ".join(filter(None, [one.left_out and f"left out: {one.left_out}", one.headway]))


def _judged_by(row: Recommendation) -> str:
    """The queries and records that a row is judged from, or why there are none."""
    if not row.checks:
        return "not followed" if row.left_out else f"nothing: {row.unjudged}"
    checks = row.checks
    queries = {
        name
        for one in checks
        for name in (one.query, *(each.query for each in (one.related, *one.only, *one.unless) if each))
        if name
    }
    return ", ".join([*sorted(queries), *sorted({f"*{one.record}*" for one in checks if one.record})])


def _summary(texts: dict[str, str]) -> dict[str, Any]:
    resources: Counter[str] = Counter()
    for resource in _all(json.loads(texts["main.json"])):
        resources[f"{resource['type']}@{resource['apiVersion']}"] += 1
    digests = {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in sorted(texts.items())}
    return {"resources": dict(sorted(resources.items())), "files": digests}


def _all(template: dict[str, Any]) -> list[dict[str, Any]]:
    result = []
    for resource in template["resources"]:
        result.append(resource)
        if resource["type"] == "Microsoft.Resources/deployments":
            result += _all(resource["properties"]["template"])
    return result


def picture(estate: EstateConfig) -> str:
    """Who on the left, what on the right in its group, and a line with the role for each right."""
    rows = [one for one in grants(estate) if not one.person]
    who = list(dict.fromkeys(one.who for one in rows))
    places = {
        group: list(dict.fromkeys(one.place for one in rows if one.place.group == group)) for group in groups(estate)
    }
    top, at, shapes = 50, {}, []
    for group, members in places.items():
        height = STEP * len(members) + 34
        shapes.append(f'<rect x="{RIGHT}" y="{top}" width="{WIDTH - RIGHT - 10}" height="{height}" class="group"/>')
        shapes.append(f'<text x="{RIGHT + 10}" y="{top + 18}" class="head">{escape(group)}</text>')
        for number, place in enumerate(members):
            at[place] = top + 40 + STEP * number
            kind = place.type.rpartition("/")[2]
            shapes.append(f'<text x="{RIGHT + 12}" y="{at[place] + 4}">{escape(f"{kind} {place.names[-1]}")}</text>')
        top += height + 20
    gap = (top - 70) / max(len(who) - 1, 1)
    for number, name in enumerate(who):
        y, colour = 60 + gap * number, COLOURS[number % len(COLOURS)]
        shapes.append(
            f'<text x="{LEFT - 12}" y="{y + 4:.0f}" text-anchor="end" fill="{colour}" class="head">{name}</text>'
        )
        shapes += [_line(one, y, at[one.place], colour) for one in rows if one.who == name]
    style = "text{font:12px sans-serif}.head{font-weight:bold}.group{fill:#f4f6f8;stroke:#9aa5b1}path{fill:none;stroke-width:1.3}"
    title = "Who may do what in the estate of the preset production"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" role="img" aria-label="{title}">\n'
        f'<style>{style}</style>\n<rect width="{WIDTH}" height="{top}" fill="white"/>\n'
        f'<text x="20" y="26" class="head">{title}: point at a line for its role</text>\n'
        + "\n".join(shapes)
        + "\n</svg>\n"
    )


def _line(grant: Grant, y: float, target: float, colour: str) -> str:
    middle = (LEFT + RIGHT) / 2
    path = f"M{LEFT},{y:.0f} C{middle:.0f},{y:.0f} {middle:.0f},{target:.0f} {RIGHT + 8},{target:.0f}"
    return f'<path d="{path}" stroke="{colour}"><title>{grant.who}: {grant.role}</title></path>'


def main() -> None:
    for name, text in rendered().items():
        (DOCS / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
