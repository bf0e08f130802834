"""A lineage as a page, and as a layered drawing: raw data on the left, the endpoint on the right.

Layers of the drawing are longest paths; an edge over several layers gets a lane in each, so that no arrow runs through a box;
order in a layer follows the mean position of the neighbours (Sugiyama, Tagawa and Toda, 1981, with the barycentre heuristic).
Where the lineage comes from does not live here (tasks/registry/ancestry.py). Markup of the page: templates/lineage.html.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from markupsafe import Markup

from tasks.common.redaction import redact
from tasks.report.charts import fit
from tasks.report.data import Edge, Lineage, Node, short
from tasks.report.pages import render, write_page

BOX_WIDTH, BOX_HEIGHT, LANE_HEIGHT = 138, 66, 14
GAP_X, GAP_Y, MARGIN = 32, 20, 2
SWEEPS = 6
BOXES = 40
"""More than these are not readable, nor quickly laid out: versions of one name then share a box, or all of a kind do."""
SMALLEST = 0.55
"""Share of its size that the drawing shrinks to before it scrolls: a whole lifecycle then fits the width of a page."""
NAME_CHARACTERS, KIND_CHARACTERS = 14, 16
FAMILIES = {
    "data": ("dataset", "quarantine", "index", "validation", "tokenizer", "tokens"),
    "cluster": ("qualification", "plan", "audit"),
    "model": ("checkpoint", "evaluation", "model"),
    "endpoint": ("endpoint", "drift", "revalidation"),
}
"""The colour of each kind of artifact: those of a stage's inputs and outputs, and of what serves."""

Layers = list[list[str]]
Links = list[tuple[str, str]]
"""Pairs of what is read and what was made from it."""


@dataclass(frozen=True)
class Place:
    """Left edge, middle and height of a box or lane, in units of the drawing."""

    x: float
    y: float
    height: float


def write_lineage_page(path: Path, result: Mapping[str, Any]) -> Path:
    """Write the page of what tasks/registry/ancestry.py walked, whole or not at all."""
    return write_page(path, redact(lineage_page(result)))


def lineage_page(result: Mapping[str, Any]) -> str:
    """The page as one HTML document, UTF-8; equal values give equal text."""
    lineage = Lineage.model_validate(drawn(result))
    serving = {edge["output"]: edge["input"] for edge in result["edges"] if edge["how"] == "serves"}
    nodes = result["nodes"]
    by_kind: dict[str, list[Mapping[str, Any]]] = {}
    for node in sorted(nodes, key=lambda node: node["created"] or "", reverse=True):
        by_kind.setdefault(node["kind"], []).append(node)
    known = {node["config_digest"][:12]: node["config"] for node in nodes if node["config_digest"] and node["config"]}
    return render(
        "lineage",
        title=f"Lineage of {short(result['root'])}",
        result=result,
        stand=[] if result["direction"] == "down" else [*result["endpoints"], *result["models"]],
        serving=serving,
        graph=lineage_graph(lineage),
        crowded=len(lineage.nodes) > BOXES,
        kinds={kind: by_kind[kind] for kind in dict.fromkeys(node["kind"] for node in nodes)},
        configurations=list(known.items()),
    )


def drawn(result: Mapping[str, Any]) -> dict[str, Any]:
    """What is drawn of a lineage as tasks/registry/ancestry.py walks it."""
    shown = ("ref", "kind", "name", "version", "stage", "created", "uri", "commit", "config_digest")
    return {"nodes": [{key: node[key] for key in shown} for node in result["nodes"]], "edges": result["edges"]}


def lineage_graph(lineage: Lineage) -> Markup:
    """Draw a lineage; empty where it has no node. An edge whose ends are not both nodes is left out."""
    count, lineage = len(lineage.nodes), condensed(lineage)
    nodes = {node.ref: node for node in lineage.nodes}
    if not nodes:
        return Markup()
    known = ((edge.input, edge.output) for edge in lineage.edges if edge.input in nodes and edge.output in nodes)
    links = [link for link in dict.fromkeys(known) if link[0] != link[1]]
    context = {(edge.input, edge.output) for edge in lineage.edges if edge.how == "context"}
    # Nodes and lanes by layer, and for every link its stops from left to right.
    refs = list(nodes)
    depth = _depths(refs, links)
    layers: Layers = [[] for _ in range(max(depth.values()) + 1)]
    for ref in refs:
        layers[depth[ref]].append(ref)
    routes = []
    for index, (source, target) in enumerate(links):
        lanes = [(layer, f"lane {index}.{layer}") for layer in range(depth[source] + 1, depth[target])]
        for layer, lane in lanes:
            layers[layer].append(lane)
        routes.append([source, *(lane for _, lane in lanes), target])
    places = _places(_ordered(layers, routes), set(nodes))
    width = max(place.x for place in places.values()) + BOX_WIDTH + MARGIN
    height = max(place.y + place.height / 2 for place in places.values()) + MARGIN
    arrows = "".join(_arrow([places[stop] for stop in route], (route[0], route[-1]) in context) for route in routes)
    boxes = "".join(_box(node, places[ref]) for ref, node in nodes.items())
    label = (
        f"Lineage: {count} nodes in {len(nodes)} boxes, {len(links)} arrows from what was read to what was made from it"
    )
    return Markup(
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{label}" class="lineage" '
        f'style="max-width:{width:g}px;min-width:{SMALLEST * width:g}px">{_ARROWHEAD}{arrows}{boxes}</svg>'
    )


def condensed(lineage: Lineage) -> Lineage:
    """A lineage of at most BOXES nodes or so: with more, one for all versions of a name, or if need be for all names of a kind.

    The first node, which the lineage is about, stays by itself.
    """
    if len(lineage.nodes) <= BOXES:
        return lineage
    by_name = {node.ref: f"{node.kind}/{node.name}" for node in lineage.nodes}
    by_kind = {node.ref: node.kind for node in lineage.nodes}
    group = by_name if len(set(by_name.values())) < BOXES else by_kind
    group[lineage.nodes[0].ref] = lineage.nodes[0].ref
    members: dict[str, list[Node]] = {}
    for node in lineage.nodes:
        members.setdefault(group[node.ref], []).append(node)
    known = ((group.get(edge.input), group.get(edge.output), edge.how) for edge in lineage.edges)
    edges = tuple(Edge(input=a, output=b, how=how) for a, b, how in dict.fromkeys(known) if a and b)
    return Lineage(nodes=tuple(_together(ref, nodes) for ref, nodes in members.items()), edges=edges)


def _together(ref: str, nodes: Sequence[Node]) -> Node:
    if len(nodes) == 1:
        return nodes[0].model_copy(update={"ref": ref})
    names = {node.name for node in nodes}
    name = nodes[0].name if len(names) == 1 else f"{len(names):,} names"
    times = sorted(node.created for node in nodes if node.created)
    created = f"{times[0]} to {times[-1]}" if times else None
    return Node(ref=ref, kind=nodes[0].kind, name=name, created=created, count=len(nodes))


def _depths(refs: list[str], links: Links) -> dict[str, int]:
    """Longest path from a node without inputs; such a node itself moves next to its first reader."""
    depth = dict.fromkeys(refs, 0)
    for _ in refs:
        for source, target in links:
            depth[target] = max(depth[target], min(depth[source] + 1, len(refs) - 1))
    made = {target for _, target in links}
    for ref in refs:
        readers = [depth[target] for source, target in links if source == ref]
        if ref not in made and readers:
            depth[ref] = max(0, min(readers) - 1)
    return depth


def _ordered(layers: Layers, routes: list[list[str]]) -> Layers:
    """Sort each layer by the mean position of its neighbours, left to right and back."""
    before: dict[str, list[str]] = {}
    after: dict[str, list[str]] = {}
    for route in routes:
        for left, right in pairwise(route):
            before.setdefault(right, []).append(left)
            after.setdefault(left, []).append(right)
    for sweep in range(SWEEPS):
        near, walk = (before, layers[1:]) if sweep % 2 == 0 else (after, layers[-2::-1])
        for layer in walk:
            at = {item: (place + 0.5) / len(one) for one in layers for place, item in enumerate(one)}
            layer.sort(key=lambda item: _mean([at[other] for other in near.get(item, [item])]))
    return layers


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _places(layers: Layers, boxes: set[str]) -> dict[str, Place]:
    """Columns of equal width, each centred on the tallest one."""
    heights = {item: BOX_HEIGHT if item in boxes else LANE_HEIGHT for layer in layers for item in layer}
    totals = [sum(heights[item] + GAP_Y for item in layer) - GAP_Y for layer in layers]
    places = {}
    for column, (layer, total) in enumerate(zip(layers, totals, strict=True)):
        y = MARGIN + (max(totals) - total) / 2
        for item in layer:
            x = MARGIN + column * (BOX_WIDTH + GAP_X)
            places[item] = Place(x=x, y=y + heights[item] / 2, height=heights[item])
            y += heights[item] + GAP_Y
    return places


def _arrow(stops: list[Place], dashed: bool) -> str:
    path = f"M{stops[0].x + BOX_WIDTH:g} {stops[0].y:g}"
    for left, right in pairwise(stops):
        start, end = left.x + BOX_WIDTH, right.x
        middle = (start + end) / 2
        path += f"C{middle:g} {left.y:g} {middle:g} {right.y:g} {end:g} {right.y:g}"
        path += f"H{end + BOX_WIDTH:g}" if right is not stops[-1] else ""
    style = "arrow context" if dashed else "arrow"
    return f'<path d="{path}" class="{style}" marker-end="url(#lineage-arrow)"/>'


def _box(node: Node, place: Place) -> str:
    family = next((name for name, kinds in FAMILIES.items() if node.kind in kinds), "endpoint")
    top = place.y - place.height / 2
    version = node.version[:8] if node.version else f"{node.count:,} versions" if node.count > 1 else ""
    rows = (
        ("kind", 19, fit(node.kind, KIND_CHARACTERS)),
        ("name", 37, fit(node.name, NAME_CHARACTERS)),
        ("version", 55, version),
    )
    commit = node.commit and f"commit {node.commit[:12]}"
    config = node.config_digest and f"configuration {node.config_digest[:12]}"
    hints = (node.ref, node.stage and f"by {node.stage}", node.created, commit, config, node.uri)
    message = "\n".join(part for part in hints if part)
    texts = "".join(
        f'<text class="{style}" x="{place.x + 14:g}" y="{top + y:g}">{escape(text)}</text>' for style, y, text in rows
    )
    return (
        f'<g class="{family}"><title>{escape(message)}</title>'
        f'<rect class="box" x="{place.x:g}" y="{top:g}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6"/>'
        f'<rect class="edge" x="{place.x:g}" y="{top + 6:g}" width="4" height="{BOX_HEIGHT - 12}" rx="2"/>{texts}</g>'
    )


_ARROWHEAD = (
    '<defs><marker id="lineage-arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" '
    'orient="auto"><path d="M0 0L8 4L0 8z" class="head"/></marker></defs>'
)
