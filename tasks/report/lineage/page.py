"""The page of a lineage: what tasks/registry/ancestry.py walked in, one self-contained HTML text out, light and dark, no script.

The drawing is graph.py's, the elements are tasks/report/markup.py's, the frame and the style are those of a run's report
(tasks/report/page.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import yaml

from tasks.common.redaction import redact
from tasks.report.data import Lineage, short
from tasks.report.gather import drawn
from tasks.report.lineage.graph import BOXES, lineage_graph
from tasks.report.markup import Html, folded, grid, join, tag

FOLDER = Path(__file__).parents[1]
ROWS_SHOWN, CONFIGS_SHOWN = 100, 10
"""Of a kind, and of all configurations: a page is for reading, `--json` for everything."""
ANSWERS_UNFOLDED = 15
UNFOLDED = 40
"""Artifacts in all up to which one open table holds them."""
HEADS = ("Artifact", "When", "By", "Commit", "Configuration", "Where")
THROUGH = {"data": "made from it", "verdict": "judged or measured under it"}
Found = Mapping[str, Any]
Node = Mapping[str, Any]


def write_lineage_page(path: Path, result: Found) -> Path:
    """Write the page, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(redact(lineage_page(result)), encoding="utf-8")
    return temporary.replace(path)


def lineage_page(result: Found) -> str:
    """The page as one HTML document, UTF-8; equal values give equal text."""
    sections = {
        "Answer": _answer(result),
        "Drawing": _drawing(result),
        "Artifacts": _artifacts(result["nodes"]),
        "Configurations": _configurations(result["nodes"]),
    }
    shown = {heading: body for heading, body in sections.items() if body}
    links = (tag("a", heading, href=f"#{heading.lower()}") for heading in shown)
    bodies = (tag("section", tag("h2", heading), body, id=heading.lower()) for heading, body in shown.items())
    return Template((FOLDER / "page.html").read_text(encoding="utf-8")).substitute(
        style=(FOLDER / "page.css").read_text(encoding="utf-8"),
        title=escape(f"Lineage of {short(result['root'])}"),
        status=tag("span", "what it was made from" if _down(result) else "what stands on it", class_="badge idle"),
        about=escape(f"{len(result['nodes']):,} nodes, {len(result['edges']):,} links · {result['root']}"),
        links=join(*links),
        main=join(_damaged(result), *bodies),
    )


def _down(result: Found) -> bool:
    return bool(result["direction"] == "down")


def _damaged(result: Found) -> Html:
    if not result["damaged"]:
        return Html()
    refs = ", ".join(short(ref) for ref in result["damaged"][:ROWS_SHOWN])
    lead = tag("p", f"What these were made from is not known, so this lineage may lack something: {refs}")
    heading = f"{len(result['damaged'])} manifest(s) of the store cannot be read"
    return tag("div", tag("h2", heading), lead, class_="error", role="alert")


def _answer(result: Found) -> Html:
    """On the way up: endpoints and models first, for that is what somebody asked after a poisoning."""
    if _down(result):
        return Html()
    serving = {edge["output"]: edge["input"] for edge in result["edges"] if edge["how"] == "serves"}
    stand = [*result["endpoints"], *result["models"]]
    if not stand:
        return tag("p", "No model and no endpoint stands on it.", class_="note")
    rows = [
        (
            tag("code", short(each["ref"])),
            THROUGH[each["through"]],
            _code(serving.get(each["ref"])),
            _when(each["created"]),
        )
        for each in stand[:ROWS_SHOWN]
    ]
    lead = tag("p", f"{len(result['endpoints']):,} endpoint(s) and {len(result['models']):,} model(s) stand on it.")
    heads = ("What", "How", "Serves", "When")
    rest = join(grid(heads, rows[ANSWERS_UNFOLDED:]), _more(len(stand)))
    more = f"{len(stand) - ANSWERS_UNFOLDED:,} more"
    return join(lead, grid(heads, rows[:ANSWERS_UNFOLDED]), folded(more, rest))


def _drawing(result: Found) -> Html:
    lineage = Lineage.model_validate(drawn(dict(result)))
    label = "Lineage graph; scrolls sideways"
    svg = tag("div", Html(lineage_graph(lineage)), class_="scroll", tabindex="0", role="region", aria_label=label)
    text = "Arrows lead from what was read to what was made from it; dashed ones from what it was made under."
    many = f" Versions share a box, for there are {len(lineage.nodes):,} nodes." if len(lineage.nodes) > BOXES else ""
    return join(svg, tag("p", text + many, class_="note"))


def _artifacts(nodes: Sequence[Node]) -> Html:
    """One table of few; of many one for each kind, folded, nearest kind first and newest artifact first."""
    if len(nodes) <= UNFOLDED:
        return grid(HEADS, [_row(node) for node in nodes])
    kinds: dict[str, list[Node]] = {}
    for node in nodes:
        kinds.setdefault(node["kind"], []).append(node)
    return join(*(_kind(kind, members) for kind, members in kinds.items()))


def _kind(kind: str, members: Sequence[Node]) -> Html:
    newest = sorted(members, key=lambda node: node["created"] or "", reverse=True)
    table = grid(HEADS, [_row(node) for node in newest[:ROWS_SHOWN]])
    return folded(f"{kind}: {len(members):,}", join(table, _more(len(members))))


def _row(node: Node) -> tuple[str, ...]:
    changed = " with changes" if node["dirty"] else ""
    config = node["config_digest"] or ""
    link = tag("a", tag("code", config[:12]), href=f"#config-{config[:12]}") if node["config"] is not None else Html()
    place = [part for part in (node["host"], node["sku"]) if part]
    return (
        tag("code", short(node["ref"])),
        _when(node["created"]),
        " by ".join(part for part in (node["stage"], node["who"]) if part),
        join(_code((node["commit"] or "")[:12]), tag("span", changed)),
        link or _code(config[:12]),
        ", ".join(place),
    )


def _configurations(nodes: Sequence[Node]) -> Html:
    known = {node["config_digest"][:12]: node["config"] for node in nodes if node["config_digest"] and node["config"]}
    shown = list(known.items())[:CONFIGS_SHOWN]
    return join(*(_configuration(*each) for each in shown), _more(len(known), CONFIGS_SHOWN))


def _configuration(digest: str, config: Any) -> Html:
    text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=100)
    return tag("div", folded(digest, tag("pre", text)), id=f"config-{digest}")


def _more(count: int, shown: int = ROWS_SHOWN) -> Html:
    if count <= shown:
        return Html()
    return tag("p", f"{count - shown:,} more are not shown here; headway lineage with --json lists all.", class_="note")


def _code(text: str | None) -> Html:
    return tag("code", short(text or ""))


def _when(created: str | None) -> str:
    return f"{created[:16].replace('T', ' ')} UTC" if created else ""
