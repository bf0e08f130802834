"""What an artifact was made from, and what was made from it: walked over the manifests in the store.

MLflow is not asked: the store is where truth is. Endpoints are refs, so the caller says what they serve.
"""

from __future__ import annotations

from typing import Any, Literal

from tasks.artifacts import parse_ref
from tasks.errors import Unknown
from tasks.storage.manifest import Manifest
from tasks.storage.store import Store, find


def walk(
    store: Store, root: str, *, direction: Literal["down", "up"] = "down", serves: str | None = None
) -> dict[str, Any]:
    """Nodes and edges around a reference. `serves` is the model that an endpoint serves.

    `down` follows inputs to the raw data, `up` follows what was made of it. Raises Unknown when the root is not there.
    """
    if root.startswith("endpoint/"):
        if serves is None:
            raise Unknown(f"{root} serves nothing", remedy="`headway endpoint list` shows what is served.")
        found = walk(store, serves, direction=direction)
        endpoint = {**_empty_node(root), "kind": "endpoint", "name": root.partition("/")[2]}
        edge = {"output": root, "input": found["root"]}
        return {**found, "root": root, "nodes": [endpoint, *found["nodes"]], "edges": [edge, *found["edges"]]}
    start = find(store, *parse_ref(root))
    known = {manifest.ref: manifest for manifest in store.manifests()}
    edges = _edges(known, start.ref, direction)
    refs = [start.ref, *(ref for edge in edges for ref in edge.values())]
    nodes = [_node(store, ref, known.get(ref)) for ref in dict.fromkeys(refs)]
    return {"root": start.ref, "direction": direction, "nodes": nodes, "edges": edges}


def _edges(known: dict[str, Manifest], start: str, direction: str) -> list[dict[str, str]]:
    """All edges that are reached from the start, each once."""
    ahead: dict[str, list[tuple[str, str]]] = {}
    for ref, manifest in known.items():
        for read in (*manifest.provenance.inputs, *manifest.provenance.context):
            ahead.setdefault(ref if direction == "down" else read, []).append((ref, read))
    found: list[dict[str, str]] = []
    queue, seen = [start], {start}
    while queue:
        for output, read in ahead.get(queue.pop(0), []):
            found.append({"output": output, "input": read})
            following = read if direction == "down" else output
            if following not in seen:
                seen.add(following)
                queue.append(following)
    return found


def _node(store: Store, ref: str, manifest: Manifest | None) -> dict[str, Any]:
    """A node as the command line prints it; one whose artifact is gone keeps its name and version."""
    kind, name, version = parse_ref(ref)
    node = {**_empty_node(ref), "kind": kind, "name": name, "version": version}
    if manifest is None:
        return node
    made = manifest.provenance
    fields = {"stage", "commit", "dirty", "config_digest", "config", "created"}
    return {**node, "uri": store.uri_of(manifest), **made.model_dump(mode="json", include=fields)}


def _empty_node(ref: str) -> dict[str, Any]:
    names = ("kind", "name", "version", "uri", "stage", "commit", "dirty", "config_digest", "config", "created")
    return {"ref": ref, **dict.fromkeys(names)}
