"""Where the tensors of an ONNX graph lie: the references to files beside it, judged before anything of them is loaded.

onnxruntime follows what it finds there, hard links too (CVE-2026-34446), so a path is judged after the export, when a model is
fetched, and in the server. See docs/export.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.common.errors import IntegrityError


@dataclass(frozen=True)
class Place:
    """Where one tensor lies. All that is said of it: of a key said twice each value is judged."""

    locations: tuple[str, ...]
    ends: tuple[int, ...]
    """Bytes that the file must have, by each offset and length that is said."""


def external_places(graph: bytes | bytearray) -> list[Place]:
    """Of each tensor with data outside of the graph. Raises ValueError for what is no ONNX model."""
    # The import takes 0.4 s, and few of the commands that import this module look into a graph.
    import onnx
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    model = onnx.ModelProto()
    try:
        model.ParseFromString(graph)
    except DecodeError as error:
        raise ValueError(str(error)) from None
    return [_place(tensor) for tensor in _tensors(model, onnx.TensorProto) if tensor.external_data]


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
    linked = sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_symlink() or (path.is_file() and path.stat().st_nlink != 1)
    )
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


def _tensors(message: Any, kind: type) -> Iterator[Any]:
    """All tensors in a message, wherever they are; onnx's own walk leaves out functions, sparse tensors and training."""
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        for each in value if field.is_repeated else (value,):
            if isinstance(each, kind):
                yield each
            else:
                yield from _tensors(each, kind)


def _place(tensor: Any) -> Place:
    entries = [(entry.key, entry.value) for entry in tensor.external_data]
    locations = tuple(value for key, value in entries if key == "location")
    numbers = {key: [int(value) for name, value in entries if name == key] for key in ("offset", "length")}
    if min((number for text in numbers.values() for number in text), default=0) < 0:
        raise ValueError("a tensor lies at a negative place")
    ends = tuple(begin + size for begin in numbers["offset"] or [0] for size in numbers["length"] or [0])
    return Place(locations or ("",), ends)
