"""What an artifact was made from, and what was made from it.

MLflow is not asked: the store is where truth is, and lineage_index.py makes large ones quick. Endpoints are refs, so the caller
says what they serve. See docs/lineage.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tasks.artifacts import parse_ref
from tasks.common.errors import HeadwayError, Unknown
from tasks.registry import foreign
from tasks.registry.lineage_index import (
    Direction,
    LineageIndex,
    Reached,
    ask,
    empty_node,
    gone_node,
    made_from,
    node_of,
)
from tasks.storage.store import Store, find


def walk(
    store: Store,
    root: str,
    *,
    direction: Direction = "down",
    serves: str | None = None,
    serving: Mapping[str, str] = {},
    index: Path | None = None,
) -> dict[str, Any]:
    """Nodes and edges around a reference.

    `down` follows inputs to the raw data, `up` what was made of it, to the endpoints. `serves` is the model that the endpoint
    `root` serves, `serving` the model of each endpoint by its name, `index` the file of the index; without one, the way down
    reads manifest by manifest, and the way up reads all. `damaged` names artifacts whose manifest nobody can read, on the way
    down those that were met, on the way up all, for each of them may have been made from anything. Raises
    Unknown when the root is not there.
    """
    if root.startswith("endpoint/"):
        return _walk_endpoint(store, root, direction=direction, serves=serves, index=index)
    if direction == "down" and index is None:
        return _walk_manifests(store, find(store, *parse_ref(root)).ref)

    def question(known: LineageIndex) -> dict[str, Any]:
        start = _start(store, known, root, direction)
        result, damaged = known.reach(start, direction), known.damaged()
        on_the_way = {node["ref"] for node in result.nodes} if direction == "down" else set(damaged)
        return _told(start, direction, result, [ref for ref in damaged if ref in on_the_way])

    result = ask(index, store, question)
    return _with_endpoints(result, serving) if direction == "up" else result


def told(store: Store, ref: str) -> dict[str, Any]:
    """What MLflow is told of an artifact: name, version, where it lies, how large it is, and the Blob versions of its files.

    Of one that is gone or damaged, its name and version: a run is not stopped by what is only told of it.
    """
    kind, name, version = parse_ref(ref)
    known = {"ref": ref, "kind": kind, "name": name, "digest": version}
    try:
        manifest = store.manifest(kind, name, version)
    except (HeadwayError, ValueError):
        manifest = None
    if manifest is None:
        return {**known, "uri": "", "files": None, "bytes": None, "blob_versions": {}}
    size = {"files": len(manifest.content.files), "bytes": manifest.bytes}
    return {**known, "uri": store.uri_of(manifest), **size, "blob_versions": dict(manifest.provenance.blob_versions)}


def _walk_endpoint(
    store: Store, root: str, *, direction: Direction, serves: str | None, index: Path | None
) -> dict[str, Any]:
    if serves is None:
        raise Unknown(f"{root} serves nothing", remedy="`headway endpoint list` shows what is served.")
    if direction == "up":
        return _with_endpoints(_told(root, direction, Reached([_endpoint_node(root)], []), []), {})
    result = walk(store, serves, index=index)
    edge = {"output": root, "input": result["root"], "how": "serves"}
    return {
        **result,
        "root": root,
        "nodes": [_endpoint_node(root), *result["nodes"]],
        "edges": [edge, *result["edges"]],
    }


def _start(store: Store, known: LineageIndex, root: str, direction: Direction) -> str:
    """The reference that is meant. On the way up it may be of an artifact that is gone: others were made from it all the same."""
    kind, name, version = parse_ref(root)
    fitting = known.fitting(root) if version else []
    if len(fitting) == 1 and (direction == "up" or store.manifest(*parse_ref(fitting[0]))):
        return fitting[0]
    return find(store, kind, name, version).ref


def _walk_manifests(store: Store, start: str) -> dict[str, Any]:
    """The way down without an index: some tens of manifests, each asked for by its version."""
    nodes: list[dict[str, Any]] = []
    edges: list[dict[str, str]] = []
    damaged: list[str] = []
    queue, seen = [start], {start}
    while queue:
        ref = queue.pop(0)
        try:
            manifest = local = store.manifest(*parse_ref(ref))
            manifest = manifest or foreign.manifest_of(store, ref)
        except (HeadwayError, ValueError):
            manifest = local = None
            damaged.append(ref)
        nodes.append(node_of(store, manifest, held=local is not None) if manifest else gone_node(ref))
        edges += [{"output": ref, "input": read, "how": how} for read, how in made_from(manifest)]
        for read, _ in made_from(manifest):
            if read not in seen:
                seen.add(read)
                queue.append(read)
    return _told(start, "down", Reached(nodes, edges), damaged)


def _told(root: str, direction: Direction, result: Reached, damaged: list[str]) -> dict[str, Any]:
    nodes = result.nodes or [gone_node(root)]
    return {"root": root, "direction": direction, "nodes": nodes, "edges": result.edges, "damaged": damaged}


def _with_endpoints(result: dict[str, Any], serving: Mapping[str, str]) -> dict[str, Any]:
    """Endpoints on top of the models that they serve; then the answer: which models and endpoints stand on the root, and how."""
    by_version = {ref.rpartition("@")[2]: ref for ref in (node["ref"] for node in reversed(result["nodes"]))}
    edges = [
        {"output": f"endpoint/{name}", "input": by_version[model.rpartition("@")[2]], "how": "serves"}
        for name, model in sorted(serving.items())
        if model.rpartition("@")[2] in by_version
    ]
    nodes = [*result["nodes"], *(_endpoint_node(edge["output"]) for edge in edges)]
    edges = [*result["edges"], *edges]
    by_data = _reached(result["root"], (edge for edge in edges if edge["how"] != "context"))
    stand = [
        {"ref": node["ref"], "created": node["created"], "through": "data" if node["ref"] in by_data else "verdict"}
        for node in nodes
        if node["ref"] != result["root"] and node["kind"] in ("model", "endpoint")
    ]
    stand.sort(key=lambda each: each["created"] or "", reverse=True)
    models = [each for each in stand if each["ref"].startswith("model/")]
    endpoints = [each for each in stand if each["ref"].startswith("endpoint/")]
    return {**result, "nodes": nodes, "edges": edges, "models": models, "endpoints": endpoints}


def _reached(start: str, edges: Iterable[Mapping[str, str]]) -> set[str]:
    ahead: dict[str, list[str]] = {}
    for edge in edges:
        ahead.setdefault(edge["input"], []).append(edge["output"])
    seen, queue = {start}, [start]
    while queue:
        for each in ahead.get(queue.pop(), []):
            if each not in seen:
                seen.add(each)
                queue.append(each)
    return seen


def _endpoint_node(ref: str) -> dict[str, Any]:
    return {**empty_node(ref), "kind": "endpoint", "name": ref.partition("/")[2]}
