"""Where the tensors of an ONNX graph lie: the references to files beside it, read from its bytes without the package onnx.

ONNX is a protobuf (onnx/onnx.proto); here is as much of its wire format as leads to a tensor's `external_data`. onnxruntime
follows what it finds there, hard links too (CVE-2026-34446), so a path is judged before anything is loaded: after the export,
when a model is fetched, and in the server, whose image has no onnx. Standard library only. See docs/export.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tasks.common.errors import IntegrityError

MOST_DEPTH = 64
"""Messages within messages; graphs of ours have six."""
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
FIXED = {FIXED64: 8, FIXED32: 4}
ENTRY = 13
"""`external_data` of TensorProto: entries of key (1) and value (2)."""
_KINDS: dict[str, dict[int, str]] = {
    "tensor": {ENTRY: "entry"},
    "sparse": {1: "tensor", 2: "tensor"},
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 11: "attribute"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 10: "tensor", 6: "graph", 11: "graph", 22: "sparse", 23: "sparse"},
    "entry": {},
}
"""Fields by number that lead to a tensor, of ModelProto, TrainingInfoProto, FunctionProto, GraphProto and so on."""


@dataclass(frozen=True)
class Place:
    """Where one tensor lies. All that is said of it: of a key said twice each value is judged."""

    locations: tuple[str, ...]
    ends: tuple[int, ...]
    """Bytes that the file must have, by each offset and length that is said."""


def external_places(graph: bytes | bytearray) -> list[Place]:
    """Of each tensor with data outside of the graph. Raises ValueError for what is no ONNX model."""
    return list(_places(memoryview(graph), "model", 0))


def require_own_data(graph: bytes | bytearray, sizes: Mapping[str, int], *, named: str) -> None:
    """Raise IntegrityError unless all data of a graph lies in files of `sizes`, plain names with their bytes, within their ends.

    So neither `..`, nor an absolute path, nor a folder is followed, whatever is linked there.
    """
    try:
        places = external_places(graph)
    except ValueError as error:
        raise IntegrityError(f"{named} is no ONNX graph: {error}", remedy="Export it again.") from None
    outside = sorted({where for place in places for where in place.locations if where not in sizes or _is_path(where)})
    if outside:
        raise IntegrityError(
            f"{named} reads data from {outside}, not from {sorted(sizes)} alone", remedy="Export it again."
        )
    for place in places:
        for where in place.locations:
            if max(place.ends, default=0) > sizes[where]:
                raise IntegrityError(
                    f"{where} has {sizes[where]} bytes, the graph reads {max(place.ends)}: {named}",
                    remedy="Export it again.",
                )


def require_plain_folder(folder: Path) -> None:
    """Raise IntegrityError unless every graph of a folder has its data beside it, and no file is a link or has two names."""
    linked = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if _is_link(path))
    if linked:
        raise IntegrityError(f"the model {folder} holds links: {', '.join(linked)}", remedy="Export it again.")
    require_data_beside(folder)


def require_data_beside(folder: Path) -> None:
    """Raise IntegrityError unless every graph of a folder, variants included, has all its data in files beside it."""
    for graph in sorted(folder.rglob("*.onnx")):
        beside = {path.name: path.stat().st_size for path in graph.parent.iterdir() if not path.is_symlink()}
        del beside[graph.name]
        require_own_data(graph.read_bytes(), beside, named=str(graph))


def _is_path(where: str) -> bool:
    return where in ("", ".", "..") or "/" in where or "\\" in where or "\x00" in where


def _is_link(path: Path) -> bool:
    return path.is_symlink() or (path.is_file() and path.stat().st_nlink != 1)


def _places(data: memoryview, kind: str, depth: int) -> Iterator[Place]:
    if depth > MOST_DEPTH:
        raise ValueError(f"messages lie more than {MOST_DEPTH} deep")
    entries = []
    for number, value in _fields(data):
        below = _KINDS[kind].get(number)
        if below == "entry":
            entries.append(_entry(value))
        elif below:
            yield from _places(value, below, depth + 1)
    if entries:
        yield _place(entries)


def _place(entries: list[tuple[str, str]]) -> Place:
    locations = tuple(value for key, value in entries if key == "location")
    numbers = {key: [int(value) for name, value in entries if name == key] for key in ("offset", "length")}
    if min((number for text in numbers.values() for number in text), default=0) < 0:
        raise ValueError("a tensor lies at a negative place")
    ends = tuple(begin + size for begin in numbers["offset"] or [0] for size in numbers["length"] or [0])
    return Place(locations or ("",), ends)


def _entry(data: memoryview) -> tuple[str, str]:
    output = {number: bytes(value).decode() for number, value in _fields(data) if number in (1, 2)}
    return output.get(1, ""), output.get(2, "")


def _fields(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Number and bytes of each field that holds bytes; other fields are passed over."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        if wire == VARINT:
            _, at = _varint(data, at)
            continue
        if wire in FIXED:
            at += FIXED[wire]
        elif wire == BYTES:
            size, at = _varint(data, at)
            if at + size <= len(data):
                yield number, data[at : at + size]
            at += size
        else:
            raise ValueError(f"field {number} is of no known wire type ({wire})")
        if at > len(data):
            raise ValueError("it was cut off")


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ValueError("it was cut off")
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value, at
    raise ValueError("a number has more than ten bytes")
