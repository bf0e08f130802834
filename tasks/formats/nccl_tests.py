"""Runs of nccl-tests and rccl-tests in a log: old and new forms, under any launcher, with NCCL's own lines in between. Pure.

Reads what NVIDIA/nccl-tests @a0b82b2 (src/util.cu) and ROCm/rccl-tests @ae3e635 print, and versions back to 2.0. Nothing is
raised: lines that could not be read are named. NCCL's own lines are nccl_run.py's.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace

from tasks.formats.log_text import Line, lines
from tasks.formats.nccl_run import (
    MESSAGE,
    VERSION,
    Figures,
    NcclRun,
    Rank,
    TestRow,
    collective_by_figures,
    collective_of,
    finite,
)

# Rows of nccl-tests and rccl-tests: columns of all versions, with time stamps, with figures of iterations, cut, in
# place only.
#
# Pure.


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
    match = ROW.search(text)
    if not match:
        return None
    rest = _STAMP.sub("", match[4])
    tokens = rest.split()
    if columns is None:
        # Columns by the number of tokens after the type: 8 or 16, with an operator, with a root.
        count = len(tokens)
        named = int(bool(tokens) and _is_name(tokens[0]))
        width = 8 if count - named >= 16 else 4
        columns = Columns(root=count - named != 2 * width, width=width)
    lead = int(bool(tokens) and _is_name(tokens[0])) + int(columns.root is True)
    figures = tokens[lead:]
    if len(figures) == columns.width and _BLANK.search(rest):
        figures = ["N/A"] * columns.width + figures
    if len(figures) < 2 * columns.width:
        return Cut(match[0])
    if len(figures) > 2 * columns.width:
        return Unread(match[0])
    return _row(match, tokens[:lead], figures, columns)


def _row(result: re.Match[str], lead: list[str], figures: list[str], columns: Columns) -> TestRow | Unread:
    names = [name for name in lead if _is_name(name)]
    roots = [int(name) for name in lead if re.fullmatch(r"-?\d+", name)]
    try:
        return TestRow(
            bytes=int(result[1]),
            type=result[3],
            redop=names[0] if names else "",
            root=roots[0] if roots else None,
            out=_figures(figures[:4], columns),
            in_place=_figures(figures[columns.width : columns.width + 4], columns),
        )
    except ValueError:
        return Unread(result[0])


def _figures(messages: list[str], columns: Columns) -> Figures:
    """Raises ValueError for what is neither a number nor N/A."""
    time, algbw, busbw, wrong = messages
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


_RANK = re.compile(
    r"#\s+Rank\s+(\d{1,9})(?:\s+Group\s+(\d{1,9}))?\s+Pid\s+\d+\s+on\s+(\S+)\s+device\s+(\d{1,9})\s*(?:\[[^\]]*\])?[ \t]*(.*)"
)
_STARTS = {
    "tool": re.compile(r"#?\s*(nccl|rccl)-tests:?\s+[Vv]ersion\s+(\S+)"),
    "test": re.compile(r"#\s*Collective test starting:\s*(\S+)"),
    "config": re.compile(r"#\s*nThread\s+\d+.*"),
}
"""Lines that a run begins with: one after all else begins another."""
_BOUNDS = re.compile(r"\bOut of bounds values\s*:\s*(\d{1,18})")
_AVERAGE = re.compile(r"\bAvg bus bandwidth\s*:\s*(\S+)\s*(OK|FAILED)?")
_REDUCED = re.compile(r"#\s*Reducing maxBytes to (\d{1,18})")
_VALIDATION = re.compile(r"validation:\s*(\d+)")
_ERROR = re.compile(r"#\s*error:\s*(\S.*)")
_TRACE = re.compile(r"nThread \d|bus bandwidth|algbw|_perf\b|Test (?:NCCL|CUDA|HIP) failure|ccl-tests", re.IGNORECASE)
"""What every log of such a run has in it."""
_COMMAND = re.compile(r"\b(\w+?_perf)\b")
_FAILURE = re.compile(
    r"Test (?:NCCL|CUDA|HIP|RCCL) failure|: Test failure |Test timeout \(|Invalid number of GPUs|exited on signal"
    r"|srun: error:|slurmstepd: error:|DUE TO TIME LIMIT|Segmentation fault|terminated with signal|non-zero exit code"
)
_NUMBERS = re.compile(r"^[\s\d.eE+%-]*(?:N/A[\s\d.eE+%-]*)*$")
_MOST_SAID = 50
"""Lines of one kind that are kept of a run."""


def read_nccl_tests(text: str, name: str = "") -> list[NcclRun]:
    """Every run in a log, in order; none when nothing of it is nccl-tests'. A run that names no collective has the file's."""
    if not _TRACE.search(text) and not ROW.search(text):
        return []
    reader = _Reader()
    for line in lines(text):
        reader.take(line)
    joined: list[NcclRun] = []
    for run in sorted(reader.runs(), key=lambda run: run.lines):
        # Processes that do not know each other write into each other's lines: theirs is one run.
        if joined and _alone(joined[-1]) and _alone(run) and joined[-1].collective == run.collective:
            first = joined[-1]
            joined[-1] = replace(
                run,
                ranks=first.ranks + run.ranks,
                rows=first.rows + run.rows,
                processes=max(len(first.ranks + run.ranks), 1),
                unread=first.unread + run.unread,
                lines=(first.lines[0], run.lines[1]),
            )
        else:
            joined.append(run)
    return [
        replace(run, collective=run.collective or collective_of(name) or collective_by_figures(run)) for run in joined
    ]


def _alone(run: NcclRun) -> bool:
    """Whether a run is one of several side by side: rank 0 only, twice or without a row or without an end of its own."""
    whole = bool(run.rows) and run.average_printed is not None and run.processes == 1
    return (
        {rank.rank for rank in run.ranks} <= {0}
        and bool(run.ranks or not run.header)
        and not whole
        and not run.failures
    )


@dataclass
class _Run:
    """A run while it is read."""

    tag: str
    first: int
    last: int = 0
    seen: set[str] = field(default_factory=set)
    columns: Columns | None = None
    cut: tuple[int, str] | None = None
    ranks: list[Rank] = field(default_factory=list)
    rows: list[TestRow] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    said: dict[str, object] = field(default_factory=dict)

    @property
    def begun(self) -> bool:
        """Whether more than the first lines were seen; processes that do not know each other each write those."""
        return bool(self.columns or self.ranks or self.rows or "average_printed" in self.said)

    def say(self, name: str, value: object) -> None:
        self.said.setdefault(name, value)

    def close_row(self) -> None:
        """What began as a row and went on with something else."""
        if self.cut:
            self.unread.append(f"line {self.cut[0]}: {self.cut[1].strip()[:160]}")
            self.cut = None

    def value(self) -> NcclRun:
        self.close_row()
        run = NcclRun(
            tool="nccl-tests",
            ranks=tuple(self.ranks),
            rows=tuple(self.rows),
            header=self.columns is not None,
            failures=tuple(self.failures[:_MOST_SAID]),
            unread=tuple(self.unread[:_MOST_SAID]),
            lines=(self.first, self.last),
            processes=max(1, sum(rank.rank == 0 for rank in self.ranks)),
        )
        return replace(run, **self.said)  # type: ignore[arg-type]


class _Reader:
    """All runs, those of each tag apart; what no tag of a run says belongs to the run that was last heard of."""

    def __init__(self) -> None:
        self.done: list[_Run] = []
        self.open: dict[str, _Run] = {}
        self.last: _Run | None = None
        self.command = ""
        self.library = ""
        self.hosts: set[str] = set()
        self.early: list[str] = []

    def runs(self) -> list[NcclRun]:
        values = [run.value() for run in (*self.done, *self.open.values())]
        if not values and (self.command or any("Test " in line for line in self.early)) and self.early:
            values = [NcclRun("nccl-tests", collective=self.command, failures=tuple(self.early[:_MOST_SAID]))]
        return values

    def take(self, line: Line) -> None:
        text = self._without_messages(line.text)
        if ("#" in text or " : " in text or "ccl-tests" in text) and self._comment(line, text):
            return
        if text.strip() and not self._row(line, text):
            if command := _COMMAND.search(text):
                self.command = collective_of(command[1]) or self.command
                if self.last and not (self.last.columns or self.last.failures):
                    self.last.say("collective", self.command)
            if _FAILURE.search(text):
                output = self.last.failures if self.last else self.early
                output.append(f"line {line.number}: {text.strip()[:300]}")

    def _without_messages(self, text: str) -> str:
        """A line without NCCL's own words, which come in the middle of rows too."""
        if version := VERSION.search(text) if "CCL version" in text else None:
            self.library = version[2]
            if self.last:
                self.last.say("library", version[2])
        message = MESSAGE.search(text) if "INFO " in text or "WARN " in text or "TRACE " in text else None
        if not message:
            return text
        return text[: self._start(text, message)]

    def _start(self, text: str, message: re.Match[str]) -> int:
        """Where a message begins: what of the row stands before it may touch the machine's name, as in -1vm-3:81:92."""
        host = message["host"]
        if text[: message.start()].strip(" \t") == "":
            self.hosts.add(host)
            return message.start()
        known = max((name for name in self.hosts if host.endswith(name)), key=len, default="")
        glued = re.match(r"\d+(?=[A-Za-z_])", host)
        if known:
            return message.start() if known == host else message.end("host") - len(known)
        return message.start() + (glued.end() if glued else 0)

    def _comment(self, line: Line, text: str) -> bool:
        """A line of the run's frame."""
        for kind, pattern in _STARTS.items():
            if match := pattern.search(text):
                self._start_line(line, kind, match)
                return True
        if rank := _RANK.search(text):
            self.hosts.add(rank[3])
            run = self._run(line)
            run.ranks.append(Rank(int(rank[1]), rank[3], int(rank[2] or 0), int(rank[4]), rank[5].strip()))
            return True
        if header := HEADER.search(text):
            self._run(line).columns = columns_of(header[0])
            return True
        if bounds := _BOUNDS.search(text):
            self._run(line).say("out_of_bounds", int(bounds[1]))
        elif average := _AVERAGE.search(text):
            self._average(self._run(line), average)
        elif reduced := _REDUCED.search(text):
            self._run(line).say("reduced_to", int(reduced[1]))
        elif error := _ERROR.search(text):
            self._run(line).failures.append(f"line {line.number}: {error[0].strip()[:300]}")
        else:
            return text.lstrip().startswith("#")
        return True

    def _start_line(self, line: Line, kind: str, result: re.Match[str]) -> None:
        run = self.open.get(line.tag)
        if run and (run.begun or (run.failures and kind in run.seen)):
            self.done.append(self.open.pop(line.tag))
        run = self._run(line)
        run.seen.add(kind)
        if kind == "tool":
            run.say("tool", f"{result[1].lower()}-tests")
            run.say("version", result[2])
        elif kind == "test":
            run.said["collective"] = collective_of(result[1])
        elif validation := _VALIDATION.search(result[0]):
            run.say("validated", validation[1] != "0")

    def _average(self, run: _Run, output: re.Match[str]) -> None:
        run.close_row()
        average = finite(output[1])
        if average is None:
            run.unread.append(f"average {output[1]!r}")
        else:
            run.say("average_printed", average)
        if output[2]:
            run.say("average_accepted", output[2] == "OK")

    def _row(self, line: Line, text: str) -> bool:
        run = self.open.get(line.tag)
        if run and run.cut and _NUMBERS.match(text):
            number, begun = run.cut
            # A row of two lines; the cut may go through a number
            apart = row_of(f"{begun} {text.strip()}", run.columns)
            whole = apart if isinstance(apart, TestRow | Cut) else row_of(begun + text.strip(), run.columns)
            return self._keep(run, number, whole)
        row = row_of(text, run.columns if run else None)
        if row is None or (run is None and not isinstance(row, TestRow)):
            return False
        run = self._run(line)
        run.close_row()
        return self._keep(run, line.number, row)

    def _keep(self, run: _Run, number: int, row: TestRow | Cut | Unread | None) -> bool:
        run.cut = (number, row.text) if isinstance(row, Cut) else None
        if isinstance(row, TestRow):
            run.rows.append(row)
        elif isinstance(row, Unread):
            run.unread.append(f"line {number}: {row.text.strip()[:160]}")
        return True

    def _run(self, line: Line) -> _Run:
        """The run that a line belongs to; a new one where there is none."""
        run = self.open.get(line.tag)
        if run is None:
            run = self.open[line.tag] = _Run(line.tag, line.number)
            run.failures += self.early
            self.early = []
            if self.library:
                run.said["library"] = self.library
        if self.command:
            run.said.setdefault("collective", self.command)
        run.last, self.last = line.number, run
        return run


def words_during(text: str, runs: list[NcclRun]) -> list[str]:
    """The part of a log in which NCCL spoke of each run: from its first line to the next run's, and all before the first."""
    if len(runs) < 2:
        return [text] * len(runs)
    lines_ = text.split("\n")
    starts = sorted({run.lines[0] - 1 for run in runs})
    ends = dict(zip(starts, [*starts[1:], len(lines_)], strict=True))
    begins = [run.lines[0] - 1 for run in runs]
    return ["\n".join(lines_[0 if begin == starts[0] else begin : ends[begin]]) for begin in begins]
