"""What commands and pages cost as a platform fills: 10,000 flow runs and 1,000 jobs against 100 of each, in one run.

`python -m benchmarks.growth [--runs N] [--jobs N] [--times N]`. In a home one corpus is validated, which is one flow run and one
job. All others are copies of them in that home and in a copy of it: rows of Prefect's database (SQLite), folders of the home,
records of the journal; a few jobs are open. *Commands* are whole processes, with the start of Python. *Pages* are what Prefect's
page of runs asks its server for. Both homes are asked in turn, and figures are medians, so that other work on the machine
cancels. The limit of their ratio is 1.5. Not judged, because nobody waits for it: what the watch does about runs, every five
seconds. Run by `make bench`.
"""

import argparse
import json
import os
import shutil
import sqlite3
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

from benchmarks.scratch import scratch

FEW, LIMIT = 100, 1.5
OPEN_JOBS = 5
APART = timedelta(minutes=10)
"""Between two flow runs: a page of the last day has the same many of them in both homes."""
COMMANDS = ("", "status", "jobs", "reconcile --no-ask", "approve")
FAILED = {"state": {"type": {"any_": ["FAILED", "CRASHED"]}}}
PAGES = {
    "page: the newest runs": ("/flow_runs/paginate", {"sort": "START_TIME_DESC", "limit": 10, "page": 1}),
    "page: failed runs": ("/flow_runs/filter", {"flow_runs": FAILED, "sort": "START_TIME_DESC", "limit": 10}),
    "page: the last day": ("/flow_runs/history", {"history_interval_seconds": 3600}),
}
ASKS = 5
"""Requests of a page in a row: one takes milliseconds."""
DUTIES = ("dead flow runs", "waiting flow runs", "schedules", "telemetry", "alerts")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--jobs", type=int, default=1_000)
    parser.add_argument("--times", type=int, default=7)
    chosen = parser.parse_args()
    with scratch() as folder:
        few, many = Home(folder / "few"), Home(folder / "many")
        few.headway("dataset", "publish", "corpus", str(Path(__file__).parent), "--include", "*.py")
        few.headway("validate", "corpus", "-c", "tiny")
        few.headway("down", "--yes")
        shutil.copytree(few.path, many.path)
        for home, runs, jobs in ((few, FEW, FEW), (many, chosen.runs, chosen.jobs)):
            copy_runs(home.path, runs)
            home.ask("copy_jobs", jobs)
        with few.served(), many.served():
            rows = measure(few, many, chosen.times)
    print(json.dumps(rows, indent=1))
    for name, row in rows.items():
        print(f"{name:<28}{row['few']:8.3f} s{row['many']:8.3f} s{row['ratio']:7.2f}x", file=sys.stderr)
    sys.exit(max(row["ratio"] for row in rows.values() if row["judged"]) > LIMIT)


def measure(few: "Home", many: "Home", times: int) -> dict[str, dict[str, float]]:
    """Medians in seconds, and how many times the one is the other."""
    ways: dict[str, Callable[[Home], float]] = {
        f"headway {words}".rstrip(): lambda home, words=words: home.headway(*words.split()) for words in COMMANDS
    }
    ways |= {name: lambda home, name=name: home.ask("page", name) for name in PAGES}
    judged = set(ways)
    ways |= {f"the watch: {name}": lambda home, name=name: home.ask("duty", name) for name in DUTIES}
    rows = {}
    for name, way in ways.items():
        way(few), way(many)  # files and statements that are not cached yet, and a watch that begins
        seconds = [(way(few), way(many)) for _ in range(times)]
        one, other = (statistics.median(each) for each in zip(*seconds, strict=True))
        rows[name] = {"few": one, "many": other, "ratio": other / one, "judged": name in judged}
    return rows


class Home:
    """A home, and a process whose environment names it (`inside`)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.environment = {**os.environ, "HEADWAY_HOME": str(path)}
        self._inside: subprocess.Popen[str] | None = None

    def headway(self, *words: str) -> float:
        """Seconds of a command."""
        argv = [str(Path(sys.executable).parent / "headway"), *words]
        began = time.perf_counter()
        done = subprocess.run(argv, env=self.environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        seconds = time.perf_counter() - began
        assert done.returncode == 0, f"{words}: {done.stderr[-2000:]}"
        return seconds

    def ask(self, *question: object) -> float:
        """Have something done inside; returns its seconds there."""
        if self._inside is None:
            argv = [sys.executable, "-c", "from benchmarks.growth import inside; inside()", str(self.path)]
            pipe = subprocess.PIPE
            self._inside = subprocess.Popen(argv, env=self.environment, stdin=pipe, stdout=pipe, text=True)
        assert self._inside.stdin is not None and self._inside.stdout is not None
        self._inside.stdin.write(json.dumps(question) + "\n")
        self._inside.stdin.flush()
        return float(self._inside.stdout.readline())

    @contextmanager
    def served(self) -> Iterator[None]:
        """Its Prefect server runs."""
        self.ask("serve")
        try:
            yield
        finally:
            self.headway("down", "--yes")


def inside() -> None:
    """Do what is asked, a question a line, and answer with the seconds that it took."""
    from deployments.configuration.platform import PlatformConfig
    from deployments.services import prefect_server
    from deployments.watch.__main__ import duties
    from deployments.watch.hosts import Hosts

    home, answers = Path(sys.argv[1]), os.dup(1)
    os.dup2(2, 1)
    todo: dict[str, Callable[[float], object]] = {}
    for line in sys.stdin:
        began = time.perf_counter()
        match json.loads(line):
            case ["serve"]:
                prefect_server.wait(prefect_server.prepare(home))
                todo = duties(home, PlatformConfig(), Hosts(home))
            case ["copy_jobs", jobs]:
                copy_jobs(home, jobs)
            case ["page", name]:
                path, body = PAGES[name]
                now = datetime.now(UTC)
                day = {"history_start": str(now - timedelta(days=1)), "history_end": str(now)}
                for _ in range(ASKS):
                    prefect_server.post(path, body | (day if path.endswith("history") else {}))
            case ["duty", name]:
                todo[name](time.time())
        os.write(answers, f"{time.perf_counter() - began}\n".encode())


def copy_runs(home: Path, wanted: int) -> None:
    """Have so many flow runs, each a copy of the first but for its identity and when it was."""
    first = next((home / "runs").glob("*/handle.json")).parent
    now = datetime.now(UTC)
    runs = [(str(uuid.uuid4()), str(uuid.uuid4()), now - APART * number) for number in range(1, wanted)]
    for run, _, began in runs:
        shutil.copytree(first, home / "runs" / run)
        os.utime(home / "runs" / run / "handle.json", (began.timestamp(), began.timestamp()))
    whens = ("created", "updated", "expected_start_time", "start_time", "end_time")
    with closing(sqlite3.connect(home / "prefect" / "prefect.db")) as database, database:
        times = [str(began.replace(tzinfo=None)) for *_, began in runs]
        rows = [(run, state, run, *[at] * len(whens)) for (run, state, _), at in zip(runs, times, strict=True)]
        copy_rows(database, "flow_run", ("id", "state_id", "idempotency_key", *whens), rows, f"id = '{first.name}'")
        rows = [(state, run, at, at, at) for (run, state, _), at in zip(runs, times, strict=True)]
        columns = ("id", "flow_run_id", "timestamp", "created", "updated")
        which = f"id = (SELECT state_id FROM flow_run WHERE id = '{first.name}')"
        copy_rows(database, "flow_run_state", columns, rows, which)


def copy_rows(
    database: sqlite3.Connection, table: str, columns: tuple[str, ...], rows: list[tuple[str, ...]], which: str
) -> None:
    """Copy the one row that is meant, with other values in some columns."""
    known = [name for (name,) in database.execute("SELECT name FROM pragma_table_info(?)", (table,))]
    kept = ", ".join(f'"{name}"' for name in known if name not in columns)
    new, marks = ", ".join(f'"{name}"' for name in columns), ", ".join("?" * len(columns))
    database.executemany(f"INSERT INTO {table} ({new}, {kept}) SELECT {marks}, {kept} FROM {table} WHERE {which}", rows)


def copy_jobs(home: Path, wanted: int) -> None:
    """Have so many jobs, each a copy of the first but for its token; a few of them are open."""
    from tasks.registry.records import StoreJournal
    from tasks.storage import open_store

    first = next((home / "jobs").glob("*/job.json")).parent
    token = json.loads((first / "job.json").read_text())["token"]
    journal = StoreJournal(open_store(home))
    records = {key: journal.get(key) for key in journal.list(f"jobs/{token}/")}
    for number in range(wanted - 1):
        other = uuid.uuid4().hex
        folder = shutil.copytree(first, home / "jobs" / first.name.replace(token[:12], other[:12]))
        (folder / "job.json").write_text((folder / "job.json").read_text().replace(token, other))
        is_open = number < OPEN_JOBS
        for key, value in records.items():
            if value is not None and not (is_open and key.endswith("/end")):
                journal.put(key.replace(token, other), value)
        if is_open:
            (folder / "settled.json").unlink()


if __name__ == "__main__":
    main()
