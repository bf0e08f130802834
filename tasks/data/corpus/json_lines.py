"""JSON lines: a stream of bytes as blocks of whole lines, and a block as texts, with what is no document beside them.

A line is read by msgspec, and where that refuses by the standard library, which then names the mistake: the same line is
read the same way whatever its neighbours are.
"""

from __future__ import annotations

import json
from codecs import getincrementaldecoder
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter
from typing import Any

from tasks.data.corpus.inputs import LINE_LIMIT

BLOCK_BYTES = 8 << 20
KEPT = 4096
"""Bytes of a bad line that are kept."""
UNREADABLE = (EOFError, OSError)
_NAMES: dict[type, str] = {
    type(None): "null",
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}


@dataclass(frozen=True)
class Decoded:
    """The documents of a block."""

    columns: dict[str, list[str]]
    lines: list[int]
    bad: list[tuple[int, str, bytes]] = field(default_factory=list)
    """Line, what is wrong with it, its first KEPT bytes."""


def blocks(chunks: Iterable[bytes]) -> Iterator[bytearray]:
    """Whole lines, about BLOCK_BYTES at once; of a line over LINE_LIMIT only a beginning that is still over it.

    What came whole before a damage is given before the damage is raised. No block is held here while the caller has it, so
    that a line of 256 MiB is in memory once.
    """
    ready: list[bytearray] = []
    rest, searched, skipping = bytearray(), 0, False
    try:
        for data in chunks:
            if skipping:
                _, feed, data = data.partition(b"\n")
                skipping = not feed
            rest += data
            if len(rest) < BLOCK_BYTES:
                continue
            if end := rest.rfind(b"\n", searched) + 1:
                ready, rest = [rest], _taken_off(rest, end)
                yield ready.pop()
            searched = len(rest)
            if searched > LINE_LIMIT:
                ready, rest, searched, skipping = [rest], bytearray(), 0, True
                yield ready.pop()
    except UNREADABLE:
        if end := rest.rfind(b"\n") + 1:
            yield rest[:end]
        raise
    if rest:
        yield rest


def _taken_off(block: bytearray, end: int) -> bytearray:
    """Shorten a block to `end`; returns what stood behind."""
    rest = block[end:]
    del block[end:]
    return rest


def decode(block: bytearray, fields: tuple[str, ...], first: int) -> Decoded:
    """A block of lines, of which the first has number `first`: at once when all is well, else line by line."""
    import msgspec

    count = block.count(b"\n") + (not block.endswith(b"\n"))
    try:
        if len(block) <= LINE_LIMIT and _one_value_a_line(block, count):
            # Raise UnicodeDecodeError for what is not UTF-8: msgspec does not look into the fields that it leaves
            # out.
            if not block.isascii():
                decoder = getincrementaldecoder("utf-8")()
                for start in range(0, len(block), BLOCK_BYTES):
                    decoder.decode(block[start : start + BLOCK_BYTES], start + BLOCK_BYTES >= len(block))
            rows = _decoder(fields).decode_lines(block)
            if len(rows) == count:
                columns = {name: list(map(attrgetter(f"f{i}"), rows)) for i, name in enumerate(fields)}
                return Decoded(columns, list(range(first, first + count)))
    except (msgspec.DecodeError, ValueError, RecursionError):
        pass
    return _one_by_one(block, fields, first)


def _one_value_a_line(block: bytearray, count: int) -> bool:
    """Whether every line begins with `{` and ends with `}`: then no value spans two lines, and `count` values are one each.

    msgspec passes over blank lines and takes two values of one line, which would put documents on wrong lines.
    """
    return block.startswith(b"{") and block.endswith((b"}", b"}\n")) and block.count(b"}\n{") == count - 1


@lru_cache(maxsize=8)
def _decoder(fields: tuple[str, ...]) -> Any:
    import msgspec

    names = [f"f{index}" for index in range(len(fields))]
    row = msgspec.defstruct("Row", [(name, str) for name in names], rename=dict(zip(names, fields, strict=True)))
    return msgspec.json.Decoder(row)


def _one_by_one(block: bytearray, fields: tuple[str, ...], first: int) -> Decoded:
    result = Decoded({name: [] for name in fields}, [])
    for number, line in enumerate(_lines(block), first):
        try:
            texts = _texts(line, fields)
        except ValueError as error:
            result.bad.append((number, str(error), bytes(line[:KEPT])))
            continue
        result.lines.append(number)
        for name, text in zip(fields, texts, strict=True):
            result.columns[name].append(text)
    return result


def _lines(block: bytearray) -> Iterator[memoryview]:
    """The lines of a block without their line feeds; nothing is copied."""
    view, start = memoryview(block), 0
    while start < len(block):
        end = block.find(b"\n", start)
        end = len(block) if end < 0 else end
        yield view[start:end]
        start = end + 1


def _texts(line: memoryview, fields: tuple[str, ...]) -> list[str]:
    """The fields of one line; raises ValueError saying what is wrong with it."""
    import msgspec

    if len(line) > LINE_LIMIT:
        raise ValueError(f"a line of more than {LINE_LIMIT >> 20} MiB; split the document")
    try:
        text = str(line, "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start} of the line: {error.reason}; give it decoded") from error
    try:
        row = _decoder(fields).decode(text)
        return [getattr(row, f"f{index}") for index in range(len(fields))]
    except (msgspec.DecodeError, ValueError, RecursionError):
        value = _value(text)
        return [text_of(value, name) for name in fields]


def _value(line: str) -> Any:
    """A line as the standard library reads it: it takes NaN, which JSON has not, and says what is wrong."""
    if not line.strip():
        raise ValueError("not a JSON line: it is blank; leave it out")
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        text = f"{error.msg.removesuffix(' at')} at character {error.pos + 1} of {len(line)}"
    except (ValueError, RecursionError) as error:
        text = str(error)
    raise ValueError(f"not a JSON line: {text}; write one whole object a line")


def text_of(value: Any, name: str) -> str:
    """A field of an object as text; raises ValueError saying what is there instead."""
    text = value.get(name) if isinstance(value, dict) else None
    if isinstance(text, str):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"a lone surrogate at character {error.start} is no text; give it decoded") from error
        return text
    if not isinstance(value, dict):
        hint = f"there: no object but {_name_of(value)}"
    elif name in value:
        hint = f"it is {_name_of(text)}"
    else:
        names = ", ".join(sorted(value))
        hint = f"there: {names[:200]}{' ...' if len(names) > 200 else ''}" if names else "the object is empty"
    raise ValueError(f"no text in field {name!r} ({hint}); name the field that holds the text")


def _name_of(value: Any) -> str:
    return _NAMES.get(type(value), type(value).__name__)
