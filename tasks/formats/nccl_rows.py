"""Rows of nccl-tests and rccl-tests: columns of all versions, with time stamps, with figures of iterations, cut, in place only.

Pure. Which lines are rows, and which run they belong to, is nccl_tests.py.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from tasks.formats.nccl_run import Figures, TestRow

_TYPE = r"u?int(?:8|16|32|64)|u?char|half|float|double|bfloat16|b?float16|fp?8_?\w+|float8\w*"
ROW = re.compile(rf"(?:^|(?<=\s))(\d+)\s+(\d+)\s+({_TYPE})(?=\s|$)(.*)")
"""A row from its size on; what follows the type is taken apart by the columns."""
HEADER = re.compile(r"#\s*(size|bytes)\s+(?:count|N)\s+type\b.*")
_STAMP = re.compile(r"\s\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\s*$")
_BLANK = re.compile(r"\s{30,}")
"""What stands for the out-of-place figures where only in place was measured; a gap between columns is narrower."""


@dataclass(frozen=True)
class Columns:
    """Where the figures of a row are."""

    root: bool | None = True
    """None: nobody said."""
    width: int = 4
    """Figures of one way: time, algbw, busbw, #wrong; and four more of iterations with -I 1."""
    error: bool = False
    """Whether the fourth is the largest error, as before version 2.13, instead of a count of wrong elements."""


@dataclass(frozen=True)
class Cut:
    """A row whose end is not there yet."""

    text: str


@dataclass(frozen=True)
class Unread:
    """What looks like a row and is none."""

    text: str


def columns_of(header: str) -> Columns:
    """The columns that a header names."""
    names = header.split()
    return Columns("root" in names, 8 if "i_min" in names else 4, "error" in names or "res" in names)


def row_of(text: str, columns: Columns | None) -> TestRow | Cut | Unread | None:
    """The row that a line holds; None when it holds none. Without columns they are found by their number."""
    found = ROW.search(text)
    if not found:
        return None
    rest = _STAMP.sub("", found[4])
    tokens = rest.split()
    if columns is None:
        columns = _guessed(len(tokens), tokens)
    lead = int(bool(tokens) and _is_name(tokens[0])) + int(columns.root is True)
    figures = tokens[lead:]
    if len(figures) == columns.width and _BLANK.search(rest):
        figures = ["N/A"] * columns.width + figures
    if len(figures) < 2 * columns.width:
        return Cut(found[0])
    if len(figures) > 2 * columns.width:
        return Unread(found[0])
    return _row(found, tokens[:lead], figures, columns)


def _guessed(count: int, tokens: list[str]) -> Columns:
    """Columns by the number of tokens after the type: 8 or 16, with an operator, with a root."""
    named = int(bool(tokens) and _is_name(tokens[0]))
    width = 8 if count - named >= 16 else 4
    return Columns(root=count - named != 2 * width, width=width)


def _row(found: re.Match[str], lead: list[str], figures: list[str], columns: Columns) -> TestRow | Unread:
    names = [name for name in lead if _is_name(name)]
    roots = [int(name) for name in lead if re.fullmatch(r"-?\d+", name)]
    try:
        return TestRow(
            bytes=int(found[1]),
            type=found[3],
            redop=names[0] if names else "",
            root=roots[0] if roots else None,
            out=_figures(figures[:4], columns),
            in_place=_figures(figures[columns.width : columns.width + 4], columns),
        )
    except ValueError:
        return Unread(found[0])


def _figures(said: list[str], columns: Columns) -> Figures:
    """Raises ValueError for what is neither a number nor N/A."""
    time, algbw, busbw, wrong = said
    return Figures(_number(time), _number(algbw), _number(busbw), _error(wrong) if columns.error else _count(wrong))


def _number(text: str) -> float | None:
    value = math.nan if text == "N/A" else float(text)
    return value if math.isfinite(value) and value >= 0 else None


def _count(text: str) -> int | None:
    value = _number(text.rstrip("*"))
    if value is not None and "e-" in text:
        return None
    return None if value is None else int(value)


def _error(text: str) -> int | None:
    """Elements that are wrong, by the largest error: an asterisk says that it is over the tolerance."""
    value = _number(text.rstrip("*"))
    if text.endswith("*"):
        return 1
    return None if value is None else 0


def _is_name(token: str) -> bool:
    return token[:1].isalpha() and token not in ("N/A", "nan", "inf")
