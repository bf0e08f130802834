"""Measures where the test suite spends its time: `python -m benchmarks.suite [--coverage] [-- PYTEST ARGUMENTS]`.

Runs pytest once and prints, per file: wall time of its tests; processor time of the worker, of the processes that it waited for
and of forks (tests/support/fork_server.py); interpreters started, among them servers and ranks; and the time that tests spent
asleep. Interpreters announce themselves through a `.pth` file that lies in the environment's site-packages while this runs;
those started with an emptied environment, or with -S or -I, are not seen. What a process used that was killed, or that nobody
waited for, is only in the total, which is the processor time of this machine: measure on a machine that does nothing else.

With --coverage, branch coverage of flows/, tasks/ and deployments/ is measured in all those processes (needs the package
`coverage`) and printed per package.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDER = "HEADWAY_SUITE_FOLDER"
TOP = ("flows", "tasks", "deployments")
PTH = f"""import os, sys; os.environ.get("{FOLDER}") and exec("import benchmarks.suite as suite; suite.announce()")\n"""
COVERAGE = (
    "import os; os.environ.get('COVERAGE_PROCESS_START') and exec('import coverage; coverage.process_startup()')\n"
)
SERVER = re.compile(r"uvicorn|prefect.*server|mlflow.*server|azurite|tasks\.jobs\.serve\b|gunicorn|ray.*start")
RANK = re.compile(r"tasks\.jobs\.(?!node\b|serve\b)\w+|testjobs\.")
COLUMNS = ("tests", "wall", "own", "children", "forks", "interpreters", "servers", "ranks", "asleep", "sleeps")
ELSEWHERE = "(no test: collection, and servers that many share)"
COVERAGE_CONFIG = """[run]
branch = true
parallel = true
sigterm = true
concurrency = thread, multiprocessing
source = {source}
data_file = {data}
context = ${{PYTEST_CURRENT_TEST-}}
"""


def announce() -> None:
    """Note that this interpreter was started, and for which test. Called at its start by the `.pth` file."""
    argv = Path("/proc/self/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:300]
    _append("starts", {"pid": os.getpid(), "argv": argv, "test": os.environ.get("PYTEST_CURRENT_TEST", "")})


def pytest_configure(config: Any) -> None:
    """As a plugin of pytest: count what tests sleep, in every worker."""
    sleep = time.sleep

    def counted(seconds: float) -> None:
        pytest_runtest_protocol.slept += seconds  # type: ignore[attr-defined]
        pytest_runtest_protocol.sleeps += 1  # type: ignore[attr-defined]
        sleep(seconds)

    time.sleep = counted
    sys.addaudithook(_heed)


NEEDS = {
    "subprocess.Popen": "process",
    "os.fork": "process",
    "os.posix_spawn": "process",
    "socket.bind": "socket",
    "socket.connect": "socket",
}


def _heed(event: str, _arguments: object) -> None:
    if event in NEEDS:
        pytest_runtest_protocol.needs.add(NEEDS[event])  # type: ignore[attr-defined]


def pytest_runtest_protocol(item: Any, nextitem: Any) -> None:
    """Begin a test: what was used up to here belongs to those before it."""
    pytest_runtest_protocol.began = _now()  # type: ignore[attr-defined]
    pytest_runtest_protocol.needs = set()  # type: ignore[attr-defined]
    if "COVERAGE_PROCESS_START" in os.environ:
        import coverage

        coverage.Coverage.current().switch_context(item.nodeid)  # type: ignore[union-attr]


pytest_runtest_protocol.needs = set()  # type: ignore[attr-defined]
pytest_runtest_protocol.slept = 0.0  # type: ignore[attr-defined]
pytest_runtest_protocol.sleeps = 0  # type: ignore[attr-defined]


def pytest_runtest_logfinish(nodeid: str, location: Any) -> None:
    """End a test, fixtures included, and write down what it used."""
    began = getattr(pytest_runtest_protocol, "began", None)
    if began is None:  # the process that only shares the tests out
        return
    used = [after - before for before, after in zip(began, _now(), strict=True)]
    needs = sorted(pytest_runtest_protocol.needs)  # type: ignore[attr-defined]
    _append(
        "tests",
        {
            "test": nodeid,
            "needs": needs,
            **dict(zip(("wall", "own", "children", "asleep", "sleeps"), used, strict=True)),
        },
    )


def _now() -> tuple[float, ...]:
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    state = pytest_runtest_protocol
    return (
        time.monotonic(),
        own.ru_utime + own.ru_stime,
        children.ru_utime + children.ru_stime,
        state.slept,  # type: ignore[attr-defined]
        state.sleeps,  # type: ignore[attr-defined]
    )


def _append(name: str, line: dict[str, Any]) -> None:
    """One write of one line, so that lines of many processes do not mix."""
    path = Path(os.environ[FOLDER]) / f"{name}.jsonl"
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, (json.dumps(line) + "\n").encode())
    os.close(file)


def table(folder: Path) -> list[dict[str, Any]]:
    """The figures per file of tests, the longest first. Times in seconds."""
    rows: dict[str, dict[str, Any]] = defaultdict(lambda: dict.fromkeys(COLUMNS, 0))
    for line in _lines(folder / "tests.jsonl"):
        row = rows[line["test"].partition("::")[0]]
        row["tests"] += 1
        for key in ("wall", "own", "children", "asleep", "sleeps"):
            row[key] += line[key]
    for line in _lines(folder / "forks.jsonl"):
        rows[line["test"].partition("::")[0] or ELSEWHERE]["forks"] += line["seconds"]
    for line in _lines(folder / "starts.jsonl"):
        row = rows[line["test"].partition("::")[0] or ELSEWHERE]
        row["interpreters"] += 1
        row["servers"] += bool(SERVER.search(line["argv"]))
        row["ranks"] += bool(RANK.search(line["argv"]))
    return [{"file": name, **row} for name, row in sorted(rows.items(), key=lambda pair: -pair[1]["wall"])]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        yield from map(json.loads, path.read_text().splitlines())


def _busy() -> float:
    """Processor time that all cores of this machine have been busy, in seconds."""
    user, nice, system, _idle, _iowait, irq, softirq = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


class Programs(threading.Thread):
    """Looks every second at what each process of this machine has used: killed ones are counted too, up to the last look."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.used: dict[tuple[str, str], tuple[str, float]] = {}
        """By the process's number and start: its program, and seconds."""
        self.look()
        self.before = dict(self.used)

    def run(self) -> None:
        while True:
            self.look()
            time.sleep(1)

    def look(self) -> None:
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
                words = stat.with_name("cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:  # it ended
                continue
            seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            process = stat.parent.name, fields[19]
            known, _ = self.used.get(process, ("", 0.0))
            self.used[process] = (
                program(words) or known,
                seconds,
            )  # one that ended has no words until its parent looks

    def seconds(self) -> dict[str, float]:
        """Processor seconds by program, the most first."""
        total: dict[str, float] = defaultdict(float)
        for process, (name, used) in list(self.used.items()):
            total[name] += used - self.before.get(process, ("", 0.0))[1]
        return dict(sorted(total.items(), key=lambda pair: -pair[1]))


def program(words: list[str]) -> str:
    """What a command line runs: a module, a command of headway, a file, or the beginning of a text."""
    names = [word.rpartition("/")[2] for word in words[:3]]
    if "headway" in names[:2]:
        return f"headway {words[names.index('headway') + 1] if len(words) > 2 else ''}"
    if "-m" in words[:4]:
        return words[words.index("-m") + 1]
    if "fork_server.py" in names:
        return f"fork of {words[2].rpartition('/')[2]}"
    return " ".join(names)[:60]


def show(rows: list[dict[str, Any]], *, top: int) -> None:
    """Print the longest files, and the sum of all."""
    total = {"file": f"all {len(rows)} files", **{key: sum(row[key] for row in rows) for key in COLUMNS}}
    print(f"{'file':58}" + "".join(f"{name:>13}" for name in COLUMNS))
    for row in [*rows[:top], total]:
        print(
            f"{row['file'][-58:]:58}"
            + "".join(f"{row[key]:13.1f}" if isinstance(row[key], float) else f"{row[key]:13}" for key in COLUMNS)
        )


def packages(data: Path, config: Path) -> dict[str, tuple[int, int]]:
    """Branches and lines that ran and all there are, per package, as coverage counts them in percent."""
    coverage = [sys.executable, "-m", "coverage"]
    quiet = {"cwd": ROOT, "check": True, "stdout": subprocess.DEVNULL}
    subprocess.run([*coverage, "combine", f"--rcfile={config}", str(data.parent)], **quiet)  # type: ignore[call-overload]
    report = data.parent / "coverage.json"
    subprocess.run([*coverage, "json", f"--rcfile={config}", "-i", "-o", str(report)], **quiet)  # type: ignore[call-overload]
    found: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for name, file in json.loads(report.read_text())["files"].items():
        parts = Path(name).parts
        package = "/".join(parts[:2]) if len(parts) > 2 else parts[0]
        totals = file["summary"]
        found[package][0] += totals["covered_lines"] + totals["covered_branches"]
        found[package][1] += totals["num_statements"] + totals["num_branches"]
    return {name: (ran, of) for name, (ran, of) in sorted(found.items())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--coverage", action="store_true", help="measure branch coverage too (the times are then too long)"
    )
    parser.add_argument("--top", type=int, default=40, help="rows to print")
    parser.add_argument("--json", type=Path, help="write all rows to this file")
    parser.add_argument("arguments", nargs="*", help="for pytest, after --")
    told = parser.parse_args()
    arguments = told.arguments or ["-q", "-m", "not soak and not long", "-n", "4", "--dist", "loadfile"]
    site = Path(sysconfig.get_path("purelib"))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        environment = {**os.environ, FOLDER: str(folder), "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": ""}
        files = {site / "headway_suite.pth": PTH}
        config = folder / "coverage.cfg"
        data = folder / "data" / "coverage"
        if told.coverage:
            data.parent.mkdir()
            config.write_text(COVERAGE_CONFIG.format(data=data, source=", ".join(str(ROOT / top) for top in TOP)))
            files[site / "headway_coverage.pth"] = COVERAGE
            environment["COVERAGE_PROCESS_START"] = str(config)
        for path, text in files.items():
            path.write_text(text)
        programs = Programs()
        programs.start()
        began, busy = time.monotonic(), _busy()
        try:
            code = subprocess.run(
                [sys.executable, "-m", "pytest", "-p", "benchmarks.suite", *arguments], cwd=ROOT, env=environment
            ).returncode
        finally:
            for path in files:
                path.unlink()
        wall, cores = time.monotonic() - began, _busy() - busy
        rows = table(folder)
        show(rows, top=told.top)
        print(*(f"{seconds:9.1f} s  {name}" for name, seconds in list(programs.seconds().items())[:30]), sep="\n")
        print(f"wall {wall:.0f} s, processor time of the whole machine {cores:.0f} s, pytest ended with {code}")
        if told.json:
            told.json.write_text(
                json.dumps(
                    {
                        "wall": wall,
                        "processor": cores,
                        "rows": rows,
                        "tests": list(_lines(folder / "tests.jsonl")),
                        "starts": list(_lines(folder / "starts.jsonl")),
                        "programs": programs.seconds(),
                        "forks": list(_lines(folder / "forks.jsonl")),
                        "refused": list(_lines(folder / "refused.jsonl")),
                    }
                )
            )
        if told.coverage:
            for name, (ran, of) in packages(data, config).items():
                print(f"{name:40} {ran / max(of, 1):7.1%} of {of}")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
