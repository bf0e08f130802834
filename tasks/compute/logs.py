"""The logs of a job, as its folder has them: the failing rank first, and of a running job all ranks as they write.

Nothing leaves here unredacted. What a line means is failures.py.

What a job wrote into metrics.jsonl, read from outside while it writes: whole lines only.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from tasks.common.redaction import redact
from tasks.compute.nodes import read_mark

METRICS_TAIL_BYTES = 65_536
FIGURES = 3
"""Leading figures of the steps that are shown: of 12,345 every hundredth."""
POINT_SECONDS = 10.0


def since(path: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """The records of whole lines after an offset in bytes, and the new offset.

    A file that became shorter than the offset is read on from its new end: its records were there already.
    """
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return [], 0
    if size <= offset:
        return [], size
    with open(path, "rb") as file:
        file.seek(offset)
        data = file.read()
    whole = data[: data.rfind(b"\n") + 1]
    return list(_records(whole)), offset + len(whole)


def newest_step(folder: Path) -> int:
    """The highest step among the newest records of a job; -1 while it has written none."""
    return max((int(record["step"]) for record in newest_records(folder) if is_step(record)), default=-1)


def newest_records(folder: Path) -> list[dict[str, Any]]:
    """The records in the last 64 KiB of the file."""
    try:
        with open(folder / "metrics.jsonl", "rb") as file:
            begin = max(0, file.seek(0, os.SEEK_END) - METRICS_TAIL_BYTES)
            file.seek(begin)
            data = file.read()
    except FileNotFoundError:
        return []
    first = data.find(b"\n") + 1 if begin else 0
    return list(_records(data[first : data.rfind(b"\n") + 1]))


def is_step(record: dict[str, Any]) -> bool:
    """Whether a record tells of a step of training."""
    return isinstance(record.get("step"), int)


class Thinning:
    """Which records of a long job are worth a point in MLflow. State: when the last one was, and what the one before said.

    All of the first thousand steps, of the first ten thousand every tenth, and so on; one in ten seconds however many there are;
    and whatever says something that the record before did not, such as a measurement on held-out text.
    """

    def __init__(self) -> None:
        self._shown, self._before = 0.0, frozenset[str]()

    def of(self, records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Those that are, in their order."""
        return [record for record in records if not is_step(record) or self._take(record)]

    def _take(self, record: dict[str, Any]) -> bool:
        every = 10 ** max(0, len(str(record["step"])) - FIGURES)
        now, payload = float(record.get("time") or 0.0), frozenset(record)
        new, self._before = payload - self._before, payload
        if record["step"] % every and now - self._shown < POINT_SECONDS and not new:
            return False
        self._shown = now
        return True


def _records(data: bytes) -> Iterator[dict[str, Any]]:
    """What a machine's crash tore is left out."""
    for line in data.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record


TAIL_BYTES = 65_536
FOLLOW_SECONDS = 0.2
RANK = re.compile(r"rank-(\d+)")
_TRACEBACK = "Traceback (most recent call last):"
_ROOT_CAUSE = re.compile(r"Root Cause \(first observed failure\):.*?rank\s*:\s*(\d+)", re.DOTALL)
"""torchrun's summary of a failed attempt."""


def failing_rank(folder: Path, *, since_attempt: int = 0) -> int | None:
    """The rank whose failure the others followed: the first to report, else the one that torchrun names."""
    reports = [
        path
        for path in (folder / "errors").glob("rank-*.json")
        if int(read_mark(path).get("attempt", 0)) >= since_attempt
    ]
    first = min(reports, key=lambda path: path.stat().st_mtime, default=None)
    if first is not None:
        return int(RANK.fullmatch(first.stem)[1])  # type: ignore[index]
    named = [item for path in launcher_logs(folder) for item in _ROOT_CAUSE.findall(tail(path))]
    return int(named[-1]) if named else None


def tail_of_failure(folder: Path, lines: int = 20) -> str:
    """The lines that matter of the failing rank's log; where none is known, of the launchers' and the first rank's.

    A rank that a signal killed reports nothing.
    """
    rank = failing_rank(folder)
    if rank is not None and (output := relevant(tail(folder / "logs" / f"rank-{rank}.log"), lines)):
        return output
    places = [*launcher_logs(folder), *list(rank_logs(folder).values())[:1]]
    payload = {path: relevant(tail(path), lines // 2) for path in places}
    return "\n".join(f"{path.relative_to(folder)}:\n{output}" for path, output in payload.items() if output)


def relevant(text: str, lines: int = 20) -> str:
    """The end of a log; of a traceback that ended it, its first line too, with what is left out between counted."""
    every = redact(text).splitlines()
    begin = max((number for number, line in enumerate(every) if line.startswith(_TRACEBACK)), default=-1)
    if begin < 0 or len(every) - begin <= lines:
        return "\n".join(every[-lines:])
    left_out = len(every) - begin - lines
    return "\n".join([every[begin], f"  ... {left_out} lines ...", *every[-(lines - 2) :]])


def launcher_logs(folder: Path) -> list[Path]:
    """What is not of a rank: the launcher's log, each machine's, and the scheduler's own files (`*.out`, `*.err`)."""
    nodes = [path for name in ("node.log", "launcher.log") for path in sorted((folder / "nodes").glob(f"*/{name}"))]
    top = [folder / "launcher.log", *nodes, *sorted(folder.glob("part-*.log"))]
    return [path for path in (*top, *sorted(folder.glob("*.out")), *sorted(folder.glob("*.err"))) if path.is_file()]


def rank_logs(folder: Path, ranks: Collection[int] | None = None) -> dict[str, Path]:
    """The logs of ranks by their names (`rank-0`), in order."""
    result = {path.stem: path for path in (folder / "logs").glob("rank-*.log") if RANK.fullmatch(path.stem)}
    numbers = {name: int(RANK.fullmatch(name)[1]) for name in result}  # type: ignore[index]
    wanted = [name for name in result if ranks is None or numbers[name] in ranks]
    return {name: result[name] for name in sorted(wanted, key=numbers.__getitem__)}


def follow(
    folder: Path, ranks: Collection[int] | None = None, *, over: Callable[[], bool] = lambda: False, lines: int = 20
) -> Iterator[tuple[str, str]]:
    """Lines as they are written, each with the name of its log: `rank-3`, or `launcher` when `ranks` is None.

    Begins with the last `lines` of each log. Ends when `over` says so and nothing is left to read. A log that begins anew, for
    a further submission, is read from its start.
    """
    offsets: dict[str, int] = {}
    while True:
        last = over()
        launcher = folder / "launcher.log"
        named = {"launcher": launcher} if ranks is None and launcher.is_file() else {}
        for name, path in {**named, **rank_logs(folder, ranks)}.items():
            if name not in offsets:
                size = path.stat().st_size
                with open(path, "rb") as file:
                    begin = max(0, size - TAIL_BYTES)
                    file.seek(begin)
                    data = file.read(size - begin)
                kept = data.splitlines(keepends=True)[-lines:]
                offsets[name] = size - sum(len(line) for line in kept)
            result, offsets[name] = _whole_lines(path, offsets[name], all=last)
            yield from ((name, redact(line)) for line in result)
        if last:
            return
        time.sleep(FOLLOW_SECONDS)


def tail(path: Path, size: int = TAIL_BYTES) -> str:
    """The end of a file; empty when it is not there."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, 2) - size))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _whole_lines(path: Path, offset: int, *, all: bool) -> tuple[list[str], int]:
    try:
        size = path.stat().st_size
        if size == offset:
            return [], offset
        with open(path, "rb") as file:
            file.seek(offset if size > offset else 0)
            begin, data = file.tell(), file.read()
    except FileNotFoundError:  # set aside for a further submission
        return [], 0
    whole = data if all else data[: data.rfind(b"\n") + 1]
    return whole.decode(errors="replace").splitlines(), begin + len(whole)
