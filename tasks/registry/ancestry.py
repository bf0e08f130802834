"""What an artifact was made from, and what was made from it, by an index in SQLite that makes large questions quick.

The store is the truth: before each question the index is brought up to its listing (names only), and just what is new is read.
It may be deleted at any time; one that is damaged, or of another store, is made anew. MLflow is not asked. Endpoints are refs, so
the caller says what they serve. See docs/lineage.md.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from tasks.artifacts import parse_ref
from tasks.common.errors import HeadwayError, Unknown
from tasks.config.base import canonical_json, digest
from tasks.registry import foreign
from tasks.storage.manifest import Manifest
from tasks.storage.store import Listed, Store, find

A = TypeVar("A")
Direction = Literal["down", "up"]
SCHEMA = 1
PLACE = "index/lineage.db"
"""Below the home."""
READERS = 8
"""Threads that read manifests: of a store over the network, one alone would wait most of the time."""
AT_ONCE = 2000
"""Manifests a transaction: who is killed in the middle of the first build goes on there."""
PATIENCE_SECONDS = 30.0
ELSEWHERE = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_FULL)
"""The file cannot be used now, and is not damaged: the question is answered from memory."""
_TOLD = (
    "stage",
    "commit",
    "dirty",
    "config_digest",
    "created",
    "who",
    "host",
    "flow",
    "flow_run",
    "key",
    "environment",
    "sku",
)
_COLUMNS = ("uri", *_TOLD, "files", "bytes")
_TABLES = f"""
CREATE TABLE about (store TEXT NOT NULL);
CREATE TABLE ref (id INTEGER PRIMARY KEY, ref TEXT NOT NULL UNIQUE, version TEXT NOT NULL);
CREATE INDEX ref_version ON ref (version);
CREATE TABLE artifact (id INTEGER PRIMARY KEY, stamp TEXT NOT NULL, {", ".join(f'"{c}"' for c in _COLUMNS)}, config INTEGER);
CREATE TABLE config (id INTEGER PRIMARY KEY, digest TEXT NOT NULL UNIQUE, value TEXT NOT NULL);
CREATE TABLE edge (output INTEGER NOT NULL, input INTEGER NOT NULL, how TEXT NOT NULL);
CREATE INDEX edge_output ON edge (output, input, how);
CREATE INDEX edge_input ON edge (input, output, how);
"""
_DOWN = """
INSERT INTO temp.reached WITH RECURSIVE reach (id) AS (
  SELECT id FROM ref WHERE ref = ?
  UNION SELECT edge.input FROM reach JOIN edge ON edge.output = reach.id)
SELECT id FROM reach
"""
_UP = """
INSERT INTO temp.reached WITH RECURSIVE reach (id) AS (
  SELECT id FROM ref WHERE ref = ?
  UNION SELECT edge.output FROM reach JOIN edge ON edge.input = reach.id
  UNION SELECT twin.id FROM reach JOIN ref me ON me.id = reach.id JOIN ref twin ON twin.version = me.version)
SELECT id FROM reach
"""
_NODES = f"""
SELECT id, ref.ref, ref.version, {", ".join(f'artifact."{c}"' for c in _COLUMNS)}, config
FROM temp.reached JOIN ref USING (id) LEFT JOIN artifact USING (id) ORDER BY reached.rowid
"""


class Reached(NamedTuple):
    """What a walk came to: nodes with the nearest first, and edges.

    An edge says of an `output` how it came from an `input`: made from it (`input`), made under it (`context`), or it has the
    `same` content under another name.
    """

    nodes: list[dict[str, Any]]
    edges: list[dict[str, str]]


class LineageIndex:
    """The tables. State: one connection."""

    def __init__(self, connection: sqlite3.Connection, store: Store) -> None:
        self.connection, self.store = connection, store
        if self._fits():
            return
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            if self._fits():  # another process made the tables since
                return
            tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
            drops = [f"DROP TABLE {name}" for (name,) in tables]
            for statement in (*drops, *_TABLES.strip().split(";"), f"PRAGMA user_version = {SCHEMA}"):
                connection.execute(statement)
            connection.execute("INSERT INTO about VALUES (?)", (store.uri,))

    def _fits(self) -> bool:
        """Whether the tables are this release's, and of this store."""
        (version,) = self.connection.execute("PRAGMA user_version").fetchone()
        return bool(
            version == SCHEMA and self.connection.execute("SELECT store FROM about").fetchall() == [(self.store.uri,)]
        )

    def refresh(self) -> int:
        """Come up to the store; returns how many manifests were read."""
        known = dict(self.connection.execute("SELECT ref.ref, stamp FROM artifact JOIN ref USING (id)"))
        existing = {
            f"{each.kind}/{each.name}@{each.version}": each
            for each in (*foreign.listed(self.store), *self.store.versions())
        }
        changed = [(ref, each) for ref, each in existing.items() if known.pop(ref, None) != each.stamp]
        # The reference stays: others may have been made from it.
        with self.connection:
            for (number,) in [self._number(ref) for ref in known]:
                self.connection.execute("DELETE FROM artifact WHERE id = ?", (number,))
                self.connection.execute("DELETE FROM edge WHERE output = ?", (number,))
        with ThreadPoolExecutor(READERS) as pool:
            for start in range(0, len(changed), AT_ONCE):
                batch = changed[start : start + AT_ONCE]
                self._note(zip(batch, pool.map(self._read, batch), strict=True))
        return len(changed)

    def reach(self, ref: str, direction: Direction) -> Reached:
        """Everything below or above a reference; empty where no artifact and no lineage has it."""
        self.connection.execute("CREATE TEMP TABLE IF NOT EXISTS reached (id INTEGER NOT NULL)")
        self.connection.execute("DELETE FROM temp.reached")
        self.connection.execute(_DOWN if direction == "down" else _UP, (ref,))
        rows = self.connection.execute(_NODES).fetchall()
        names = {row[0]: row[1] for row in rows}
        at = "output" if direction == "down" else "input"
        result = self.connection.execute(
            f"SELECT output, input, how FROM temp.reached JOIN edge ON edge.{at} = reached.id"
        )
        edges = [{"output": names[made], "input": names[read], "how": how} for made, read, how in result]
        same = _twins((row[1], row[2]) for row in rows) if direction == "up" else ()
        return Reached(self._nodes(rows), [*same, *edges])

    def fitting(self, ref: str) -> list[str]:
        """References that begin so, of artifacts that are there or that something was made from."""
        result = self.connection.execute("SELECT ref FROM ref WHERE ref >= ? AND ref < ?", (ref, f"{ref}\x7f"))
        return [row[0] for row in result]

    def damaged(self) -> list[str]:
        """Artifacts whose manifest could not be read: what they were made from is not known."""
        result = self.connection.execute("SELECT ref FROM artifact JOIN ref USING (id) WHERE uri IS NULL ORDER BY ref")
        return [row[0] for row in result]

    def _read(self, listed: tuple[str, Listed]) -> Manifest | None:
        _, (kind, name, version, _) = listed
        try:
            return foreign.manifest_of(self.store, f"{kind}/{name}@{version}")
        except (HeadwayError, ValueError):
            return None

    def _note(self, read: Iterable[tuple[tuple[str, Listed], Manifest | None]]) -> None:
        with self.connection:
            for (ref, listed), manifest in read:
                (number,) = self._number(ref)
                self.connection.execute("DELETE FROM edge WHERE output = ?", (number,))
                row = (number, listed.stamp, *self._plain(manifest, held=listed.stamp != foreign.FOLDER))
                self.connection.execute(
                    f"INSERT OR REPLACE INTO artifact VALUES (?, ?{', ?' * (len(_COLUMNS) + 1)})", row
                )
                edges = ((number, *self._number(other), how) for other, how in made_from(manifest))
                self.connection.executemany("INSERT INTO edge VALUES (?, ?, ?)", edges)

    def _plain(self, manifest: Manifest | None, *, held: bool) -> list[Any]:
        """The columns of an artifact; nothing in them where nobody can read its manifest."""
        if manifest is None:
            return [None] * (len(_COLUMNS) + 1)
        node = node_of(self.store, manifest, held=held)
        config = None
        if node["config"] is not None:  # many artifacts were made with one configuration: it is kept once
            known, text = digest(node["config"]), canonical_json(node["config"])
            self.connection.execute("INSERT OR IGNORE INTO config VALUES (NULL, ?, ?)", (known, text))
            config = int(self.connection.execute("SELECT id FROM config WHERE digest = ?", (known,)).fetchone()[0])
        return [*(node[column] for column in _COLUMNS), config]

    def _number(self, ref: str) -> tuple[int]:
        version = ref.rpartition("@")[2]
        self.connection.execute("INSERT OR IGNORE INTO ref VALUES (NULL, ?, ?)", (ref, version))
        results: tuple[int] = self.connection.execute("SELECT id FROM ref WHERE ref = ?", (ref,)).fetchone()
        return results

    def _nodes(self, rows: list[Any]) -> list[dict[str, Any]]:
        """Rows as nodes; equal configurations are one value in memory too."""
        wanted = {row[-1] for row in rows} - {None}
        texts = self.connection.execute("SELECT id, value FROM config")
        configs = {number: json.loads(text) for number, text in texts if number in wanted}
        nodes = []
        for _, ref, version, *columns, config in rows:
            kind, _, rest = ref.partition("/")
            node = {"ref": ref, "kind": kind, "name": rest.partition("@")[0], "version": version}
            node |= zip(_COLUMNS, columns, strict=True)
            node["dirty"] = None if node["dirty"] is None else bool(node["dirty"])
            node["config"] = configs.get(config)
            nodes.append(node)
        return nodes


def ask(path: Path | None, store: Store, question: Callable[[LineageIndex], A]) -> A:
    """Answer from the index in a file, brought up to the store first; without a path, from one in memory.

    A damaged file is made anew; one that cannot be used now (a full disk, a home that is not ours to write) is left alone.
    """
    if path is None:
        return _answer(":memory:", store, question)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return _answer(str(path), store, question)
    except (sqlite3.DatabaseError, OSError, ValueError) as error:
        if isinstance(error, ValueError) and not isinstance(error, json.JSONDecodeError):
            raise
        if isinstance(error, OSError) or getattr(error, "sqlite_errorcode", None) in ELSEWHERE:
            return _answer(":memory:", store, question)
    for each in (path, *(path.with_name(path.name + ending) for ending in ("-wal", "-shm", "-journal"))):
        each.unlink(missing_ok=True)
    return _answer(str(path), store, question)


def node_of(store: Store, manifest: Manifest, *, held: bool = True) -> dict[str, Any]:
    """What is told of an artifact; see empty_node. One whose bytes are not held here (foreign.py) has no place."""
    made, ref = manifest.provenance, manifest.ref
    payload = made.model_dump(mode="json", include={*_TOLD, "config"})
    size = {"files": len(manifest.content.files), "bytes": manifest.bytes}
    return {**gone_node(ref), "uri": store.uri_of(manifest) if held else "", **payload, **size}


def gone_node(ref: str) -> dict[str, Any]:
    """A node whose artifact is gone keeps its name and version."""
    kind, _, rest = ref.partition("/")
    name, _, version = rest.partition("@")
    return {**empty_node(ref), "kind": kind, "name": name, "version": version}


def empty_node(ref: str) -> dict[str, Any]:
    """A node that nothing is known of yet."""
    names = ("kind", "name", "version", *_COLUMNS, "config")
    return {"ref": ref, **dict.fromkeys(names)}


def made_from(manifest: Manifest | None) -> Iterator[tuple[str, str]]:
    """References that an artifact was made from, or under, and which of the two."""
    if manifest:
        yield from ((ref, "input") for ref in manifest.provenance.inputs)
        yield from ((ref, "context") for ref in manifest.provenance.context)


def _answer(database: str, store: Store, question: Callable[[LineageIndex], A]) -> A:
    with closing(sqlite3.connect(database, timeout=PATIENCE_SECONDS)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        index = LineageIndex(connection, store)
        index.refresh()
        return question(index)


def _twins(reached: Iterable[tuple[str, str]]) -> Iterator[dict[str, str]]:
    """Equal content under several names: all but the first are the same as the first."""
    first: dict[str, str] = {}
    for ref, version in reached:
        if first.setdefault(version, ref) != ref:
            yield {"output": ref, "input": first[version], "how": "same"}


# What an artifact was made from, and what was made from it.
#
# Endpoints are refs, so the caller says what they serve. See docs/lineage.md.


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
        # The reference that is meant. On the way up it may be of an artifact that is gone: others were made from it
        # all the same.
        kind, name, version = parse_ref(root)
        fitting = known.fitting(root) if version else []
        if len(fitting) == 1 and (direction == "up" or store.manifest(*parse_ref(fitting[0]))):
            start = fitting[0]
        else:
            start = find(store, kind, name, version).ref
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
