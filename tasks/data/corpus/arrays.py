"""A JSON file as JSON lines: one array of objects, however long, or JSON lines under another name.

Public datasets are often one array in a `.json` file, which nothing here reads: it is rewritten once, an element at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from tasks.data.corpus.inputs import LINE_LIMIT

BLOCK = 1 << 20
_SPACE = " \t\r\n"


def to_lines(path: Path) -> Path:
    """Rename or rewrite a `.json` file so that it ends in `.jsonl`, in its folder; memory grows with its longest element.

    An array becomes one line an element; anything else is taken for JSON lines, and stays byte for byte. Raises ValueError for
    an array that is cut off or no JSON.
    """
    target = path.with_name(f"{path.name}l")
    if target.exists():
        target = path.with_name(f"{path.name}.jsonl")
    with open(path, encoding="utf-8-sig") as file:
        first = file.read(BLOCK).lstrip(_SPACE)[:1]
        if first != "[":
            path.rename(target)
            return target
        file.seek(0)
        with open(target, "w", encoding="utf-8", newline="\n") as lines:
            for element in elements(file, path):
                lines.write(json.dumps(element, ensure_ascii=False) + "\n")
    path.unlink()
    return target


def elements(file: IO[str], path: Path) -> Iterator[Any]:
    """Each element of a JSON array, in order. `path` is for messages."""
    decoder, held, number, wanted = json.JSONDecoder(), "", 0, BLOCK
    held = file.read(BLOCK).lstrip("\ufeff" + _SPACE).removeprefix("[").lstrip(_SPACE)
    while True:
        try:
            if held.startswith("]"):
                return
            value, end = decoder.raw_decode(held)
            after = held[end:].lstrip(_SPACE)
            if not after.startswith((",", "]")):  # a number may go on, and more may come
                raise json.JSONDecodeError("no comma", held, end)
        except json.JSONDecodeError as error:
            more = file.read(wanted)
            if not more or len(held) > LINE_LIMIT:
                raise ValueError(
                    f"{path.name}: element {number + 1} of the array is cut off, or is no JSON ({error.msg}). Nothing was "
                    "published"
                ) from None
            held, wanted = (held + more).lstrip(_SPACE), 2 * wanted
            continue
        yield value
        number, wanted = number + 1, BLOCK
        held = after.removeprefix(",").lstrip(_SPACE) if after.startswith(",") else after
