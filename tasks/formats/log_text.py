"""The text of a log file, whatever wrote it: gzip, UTF-16, CRLF, colours; and what stands before its lines. Pure.

Never raises: what cannot be read is said. What the lines mean is in the other files of this folder.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass

LARGEST = 1 << 28
"""Bytes of text that are read of one log; what comes after is left out, and that is said."""
_SAMPLE = 1 << 16
_BINARY = 0.1
"""Share of characters that are no text, from which on a file is no log."""
_BOMS = ((b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be"), (b"\xef\xbb\xbf", "utf-8"))
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[()][A-Z0-9]|[=>])")
_CONTROL = re.compile("[\x01-\x06\x0e-\x1a\x1c-\x1f\x7f\ufffd]")
_STAMP = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?"
_PREFIXES = re.compile(
    rf"(?P<stamp>\[?{_STAMP}\]?\s|[A-Z][a-z]{{2}} [A-Z][a-z]{{2}} [ \d]\d \d\d:\d\d:\d\d \d{{4}}(?=\[|<)[^\S\n]?)"
    r"|(?P<mpi>\[(?:[\w.@-]+@)?\d+,\d+\](?:<\w+>)?:\s?)"
    r"|(?P<stream><std(?:out|err)>:?\s?)"
    r"|(?P<pod>\[pod/[^\]\s]+\]\s)"
    r"|(?P<torchrun>\[(?:default|rank|Rank )?\d+\]:?\s?(?=\S|\s*\d))"
    r"|(?P<srun>[ ]*\d{1,6}:\s)"
    r"|(?P<host>[A-Za-z][\w.-]{0,252}(?::|\s+\|)\s(?=[ #\d\[]|iteration|nccl-tests|rccl-tests|WARNING|ERROR|SUCCESS))"
)
"""What srun --label, mpirun --tag-output and --timestamp-output, kubectl logs --prefix, torchrun and pdsh write first."""
_MOST = 4
"""Prefixes that are taken off one line."""


@dataclass(frozen=True)
class LogText:
    """A log as text with newlines only."""

    text: str
    problems: tuple[str, ...] = ()
    """Why it, or a part of it, could not be read; with text the rest was."""


@dataclass(frozen=True)
class Line:
    """A line without what launchers wrote before it."""

    number: int
    """From 1."""
    tag: str
    """Whose line it is, such as [1,0]<stdout>: or 0:, without times; empty: nobody says."""
    text: str


def text_of(raw: bytes) -> LogText:
    """The text of a file's bytes. No text at all when it is empty or binary, and the reason."""
    if not raw:
        return LogText("", ("the file is empty",))
    raw, problems = _unpacked(raw)
    if len(raw) > LARGEST:
        problems = (*problems, f"only its first {LARGEST >> 20} MiB were read")
        raw = raw[:LARGEST]
    text = _decoded(raw)
    sample = text[:_SAMPLE]
    if len(_CONTROL.findall(sample)) > _BINARY * max(len(sample), 1):
        return LogText("", (*problems, "it is a binary file, no text"))
    plain = _ANSI.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    if not plain.strip():
        return LogText("", (*problems, "nothing is written in it"))
    return LogText(plain, problems)


def lines(text: str) -> list[Line]:
    """Every line, with its prefixes apart."""
    return [_line(number, line) for number, line in enumerate(text.split("\n"), 1)]


def _unpacked(raw: bytes) -> tuple[bytes, tuple[str, ...]]:
    """The bytes in a gzip file, as far as they go: one that was cut off is read up to there."""
    if raw[:2] != b"\x1f\x8b":
        return raw, ()
    result = bytearray()
    while raw[:2] == b"\x1f\x8b" and len(result) <= LARGEST:
        unpacker = zlib.decompressobj(wbits=31)
        try:
            result += unpacker.decompress(raw, LARGEST + 1 - len(result))
        except zlib.error as error:
            return bytes(result), (f"its gzip data is broken: {error}",)
        if not unpacker.eof and len(result) <= LARGEST:
            return bytes(result), ("its gzip data is cut off",)
        raw = unpacker.unused_data
    return bytes(result), ()


def _decoded(raw: bytes) -> str:
    """NUL bytes, which a file system leaves where a machine died while it wrote, are left out."""
    for mark, encoding in _BOMS:
        if raw.startswith(mark):
            return raw[len(mark) :].decode(encoding, "replace").replace("\0", "")
    sample = raw[:_SAMPLE]
    for first, encoding in ((1, "utf-16-le"), (0, "utf-16-be")):
        if len(sample) > 3 and sample[first::2].count(0) > 0.4 * len(sample) / 2 > sample[1 - first :: 2].count(0) * 4:
            return raw.decode(encoding, "replace").replace("\0", "")
    return raw.decode("utf-8", "replace").replace("\0", "")


def _line(number: int, line: str) -> Line:
    tag, rest = "", line
    for _ in range(_MOST):
        match = _PREFIXES.match(rest)
        if not match or not match[0]:
            break
        if match.lastgroup not in ("stamp", "stream"):
            tag += match[0].strip()
        rest = rest[match.end() :]
    return Line(number, tag, rest)
