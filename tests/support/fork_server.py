"""Runs the programs of the tests, and their workers, in forks of a process that has imported torch, Prefect or MLflow.

Started by tests/support/forks/sitecustomize.py when the tests have started enough programs of a kind: `fork_server.py SOCKET`,
where the socket's name is the kind. It ends with the run of pytest that owns the folder, and its forks with it.

A fork has the files, environment, folder, signals and limits of the process that it stands for, which stays and waits: its
process number, its process group and its parent are what others know. What a fork cannot have (namespaces, cgroups, other
versions of what is imported here, a user of its own) is refused, and the process runs the program by itself.
"""

from __future__ import annotations

import array
import asyncio
import atexit
import gc
import importlib
import io
import json
import os
import pkgutil
import resource
import runpy
import select
import shutil
import signal
import socket
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

SUPPORT = Path(__file__).resolve().parent
ROOT = SUPPORT.parents[1]
FOLDER = "TESTS_FORK_SERVER"
SUITE = "HEADWAY_SUITE_FOLDER"
"""Where benchmarks/suite.py wants to be told what forks used."""
IMPORTED_WITH = (
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "PYTHONHASHSEED",
    "PYTHONDEVMODE",
    "PYTHONOPTIMIZE",
)
"""Variables that libraries read when they are imported: a program that wants others is refused."""
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "GX_ANALYTICS_ENABLED": "false",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    # Periods that Prefect reads when it is imported. No test waits for these services, which run every five seconds by default
    # and are a third of what an idle server costs.
    "PREFECT_SERVER_EVENTS_PROACTIVE_GRANULARITY": "PT1M",
    "PREFECT_SERVER_SERVICES_CLEANUP_RECONCILER_LOOP_SECONDS": "60",
    "PREFECT_SERVER_SERVICES_LATE_RUNS_LOOP_SECONDS": "60",
}
ENTRIES = {
    "jobs": [
        f"tasks.jobs.{name}" for name in ("train", "evaluate", "export", "benchmark", "preprocess", "profile", "drift")
    ],
    "commands": ["tasks.lineage.publish"],
    "gateways": ["tasks.jobs.gateway"],
}
MORE = {
    "jobs": [
        "torch.distributed.run",
        "torch.distributed.launcher.api",
        "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
        "torch.distributed.fsdp",
        "tasks.jobs.training.torch_engine",
        "onnxruntime",
        "transformers.models.llama.modeling_llama",
        "sklearn.linear_model",
    ],
    "commands": [
        "uvicorn",
        "prefect.server.api.server",
        "mlflow.tracking",
        "mlflow.store.tracking.sqlalchemy_store",
        "great_expectations",
        "matplotlib.figure",
        "matplotlib.backends.backend_agg",
        "prefect.engine",
        "flask",
        "sqlalchemy.orm",
    ],
    "gateways": ["tasks.jobs.routing.gateway"],
    "workers": ["pytest", "xdist.remote", "hypothesis.stateful", "azure.ai.ml", "azure.monitor.query"],
}
ENTRIES["workers"] = [*ENTRIES["jobs"], *ENTRIES["gateways"]]  # it goes on from what the commands import
MORE["workers"] += [*MORE["jobs"], *MORE["gateways"]]


class Fork(Exception):
    """Raised in a fork, so that it leaves the server's frames before it becomes its program."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.request = request


class Server:
    """Answers requests for forks, one at a time. State: who waits for which fork."""

    def __init__(self, path: str, known: set[str]) -> None:
        self.path = path
        self.known = known
        self.poll = select.poll()
        self.waiting: dict[int, tuple[socket.socket, int]] = {}  # by the connection's file: it, and the fork's number
        self.forks: dict[int, tuple[int, socket.socket, dict[str, Any]]] = {}
        """By the fork's pidfd: its number, who waits, and what was asked for."""
        self.owner = os.pidfd_open(int((Path(path).parent / "owner").read_text()))
        self.listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listening.bind(path + ".new")
        self.listening.listen(200)
        os.rename(path + ".new", path)
        self.poll.register(self.owner, select.POLLIN)
        self.poll.register(self.listening, select.POLLIN)

    def run(self) -> None:
        while True:
            for number, _ in self.poll.poll():
                if number == self.owner:
                    return self.end()
                if number == self.listening.fileno():
                    self.accept()
                elif number in self.forks:
                    self.ended(number)
                elif number in self.waiting:
                    self.left(number)

    def accept(self) -> None:
        connection, _ = self.listening.accept()
        connection.settimeout(10)
        try:
            request, files = receive(connection)
        except (OSError, ValueError):
            connection.close()
            return
        reason = self.unfit(request)
        if reason:
            note(request, "refused", why=reason)
            say(connection, {"refused": reason})
            connection.close()
            for number in files:
                os.close(number)
            return
        number = os.fork()
        if number == 0:
            for _, other, _ in self.forks.values():
                other.close()
            for pidfd in (*self.forks, self.owner):
                os.close(pidfd)
            self.listening.close()
            connection.close()
            raise Fork({**request, "received": files})
        for received in files:
            os.close(received)
        pidfd = os.pidfd_open(number)
        self.forks[pidfd] = (number, connection, request)
        self.waiting[connection.fileno()] = (connection, number)
        self.poll.register(pidfd, select.POLLIN)
        with suppress(OSError):
            say(connection, {"pid": number})
        self.poll.register(connection, select.POLLIN)

    def unfit(self, request: dict[str, Any]) -> str:
        """Why a fork of this process could not be what is asked for; empty: it can."""
        import sitecustomize

        environment = request["environment"]
        if request["surroundings"] != sitecustomize.surroundings():
            return "other namespaces"
        for key in IMPORTED_WITH:
            if key in environment and environment[key] != os.environ.get(key):
                return key
        paths = [path or request["folder"] for path in request["path"]]
        if not request["safe"] and request["words"][request["position"]] == "-m":
            paths.insert(0, request["folder"])
        for path in paths:
            if path not in sys.path and Path(path).is_dir() and os.path.realpath(path) != str(ROOT):
                names = {name.removesuffix(".py") for name in os.listdir(path)}
                if names & self.known:
                    return f"{path} has other {min(names & self.known)}"
        return ""

    def ended(self, pidfd: int) -> None:
        number, connection, request = self.forks.pop(pidfd)
        self.poll.unregister(pidfd)
        os.close(pidfd)
        _, status, used = os.wait4(number, 0)
        code = os.waitstatus_to_exitcode(status)
        note(request, "forks", seconds=used.ru_utime + used.ru_stime)
        if self.waiting.pop(connection.fileno(), None):
            self.poll.unregister(connection)
            with suppress(OSError):
                say(connection, {"code": code})
            connection.close()

    def left(self, file: int) -> None:
        """Who waits is gone, most likely by kill -9: so is its fork."""
        connection, number = self.waiting.pop(file)
        self.poll.unregister(connection)
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
        connection.close()

    def end(self) -> None:
        for number, _, _ in self.forks.values():
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)


def say(connection: socket.socket, answer: dict[str, Any]) -> None:
    connection.sendall(json.dumps(answer).encode() + b"\n")


def note(request: dict[str, Any], name: str, **more: Any) -> None:
    """Tell benchmarks/suite.py of a fork, where it measures."""
    environment = request["environment"]
    if SUITE in environment:
        told = {"test": environment.get("PYTEST_CURRENT_TEST", ""), "argv": " ".join(request["words"])[:300], **more}
        with open(Path(environment[SUITE]) / f"{name}.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(told) + "\n")


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """A request, and the files that came with it."""
    files = array.array("i")
    head, ancillary, _, _ = connection.recvmsg(8, socket.CMSG_SPACE(250 * files.itemsize))
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            files.frombytes(data[: len(data) - len(data) % files.itemsize])
    length, text = int.from_bytes(head, "little"), b""
    while len(text) < length:
        part = connection.recv(length - len(text))
        if not part:
            raise ValueError("the request broke off")
        text += part
    return json.loads(text), list(files)


def become(request: dict[str, Any]) -> None:
    """Take over the files, environment, folder, signals and limits of the process that this one stands for."""
    moved = _out_of_the_way(request["received"], request["files"])
    for temporary, number in moved:
        os.dup2(temporary, number)
        os.close(temporary)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    os.umask(request["umask"])
    os.setsid()
    for number in signal.valid_signals():
        if signal.getsignal(number) == signal.SIG_IGN and number not in (signal.SIGPIPE, signal.SIGXFSZ):
            with suppress(OSError):
                signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in request["ignored"]:
        with suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_IGN)
    os.sched_setaffinity(0, request["cores"])
    if request["nice"] > os.nice(0):
        os.nice(request["nice"] - os.nice(0))
    for name, limits in request["limits"].items():
        with suppress(ValueError, OSError):
            resource.setrlimit(getattr(resource, name), limits)
    own, parent = os.getpid(), request["parent"]
    real = os.getppid
    os.getppid = lambda: parent if os.getpid() == own else real()  # type: ignore[assignment]
    sys.path[:] = request["path"]
    unbuffered = "PYTHONUNBUFFERED" in os.environ or "-u" in request["words"][: request["position"]]
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))
    sys.stdout = sys.__stdout__ = _text(1, "strict", unbuffered)
    sys.stderr = sys.__stderr__ = _text(2, "backslashreplace", unbuffered)
    sys.orig_argv = request["words"]
    if request["words"][-1] != sys.modules["sitecustomize"].WORKER:  # which has its settings as any test does
        _as_after_imports()
    if "COVERAGE_PROCESS_START" in os.environ:
        importlib.import_module("coverage").process_startup()


def _out_of_the_way(received: list[int], wanted: list[int]) -> list[tuple[int, int]]:
    """Copies of files whose numbers are none of those that are wanted."""
    import fcntl

    above = max([50, *wanted]) + 1
    moved = [
        (fcntl.fcntl(temporary, fcntl.F_DUPFD, above), number)
        for temporary, number in zip(received, wanted, strict=True)
    ]
    for temporary in received:
        os.close(temporary)
    return moved


def _text(number: int, errors: str, unbuffered: bool) -> io.TextIOWrapper:
    raw = io.FileIO(number, "w", closefd=False)
    lines = number == 2 or os.isatty(number)
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding="utf-8", errors=errors, line_buffering=lines, write_through=unbuffered
    )


def _as_after_imports() -> None:
    """What libraries would have read from this environment, had they been imported in it."""
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules and os.environ.get("OMP_NUM_THREADS", "").isdigit():
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if "prefect.context" in sys.modules:
        if any(name.startswith("PREFECT_") for name in os.environ):
            _refresh_prefect()
        platform = sys.modules["deployments.services.prefect_server"]
        platform.prepare = _followed_by(_refresh_prefect, platform.prepare)
    if "tasks.lineage.database" in sys.modules:
        tracking = sys.modules["tasks.lineage.database"]
        tracking.prepare = _copy_tracking(tracking.prepare)


def _refresh_prefect() -> None:
    sys.modules["prefect.context"].refresh_global_settings_context()
    sys.modules["prefect.logging.configuration"].setup_logging(incremental=False)


def _followed_by(then: Callable[[], object], first: Callable[..., Any]) -> Callable[..., Any]:
    """Prefect is imported after its settings are made; here it has to look at them again."""

    def both(*arguments: Any) -> Any:
        made = first(*arguments)
        then()
        return made

    return both


def run(request: dict[str, Any]) -> None:
    """The program, as `python` runs it."""
    words = request["words"][request["position"] :]
    if words[:2] == ["-m", "uvicorn"] and "PREFECT_HOME" in os.environ:
        _copy_database(Path(os.environ["PREFECT_HOME"]) / "prefect.db")
    if words[0] == "-m":
        sys.argv = words[1:]
        if not request["safe"]:
            sys.path.insert(0, str(Path.cwd()))
        if not hasattr(sys.modules.get(words[1]), "__path__"):  # a package stays, for its `__main__` is what runs
            sys.modules.pop(words[1], None)
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        if not request["safe"]:
            sys.path.insert(0, "")
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(words[1], main.__dict__)
    else:
        sys.argv = words
        if not request["safe"]:
            sys.path.insert(0, str(Path(words[0]).absolute().parent))
        runpy.run_path(words[0], run_name="__main__")


def make_databases() -> None:
    """In a fork: what each new home would make of its own, seconds of processor time each.

    `prefect.db` has Prefect's tables and its kinds of blocks, `mlflow.db` MLflow's tables.
    """
    if os.fork():
        return
    from tasks.lineage import database

    folder = Path(os.environ[FOLDER])
    os.environ["PREFECT_HOME"] = str(folder / "prefect")
    os.environ["PREFECT_API_DATABASE_CONNECTION_URL"] = f"sqlite+aiosqlite:///{folder}/prefect.db.new"
    sys.modules["prefect.context"].refresh_global_settings_context()
    asyncio.run(_make_prefects())
    _give_out(folder / "prefect.db")
    database.prepare(f"{database.SCHEME}{folder}/mlflow.db.new")
    _give_out(folder / "mlflow.db")
    os._exit(0)


def _give_out(made: Path) -> None:
    """Give a database its name, as one file that is whole."""
    with closing(sqlite3.connect(f"{made}.new")) as database:
        database.execute("VACUUM INTO ?", [f"{made}.whole"])
    Path(f"{made}.whole").rename(made)


async def _make_prefects() -> None:
    from prefect.server.database import provide_database_interface
    from prefect.server.models.block_registration import run_block_auto_registration

    database = provide_database_interface()
    await database.create_db()
    async with await database.session() as session:
        await run_block_auto_registration(session=session)


def _copy_database(wanted: Path) -> None:
    """Let a new server of Prefect begin with what was made once."""
    made = Path(os.environ[FOLDER]) / "prefect.db"
    if made.exists() and not wanted.exists():
        shutil.copy(made, f"{wanted}.new")
        Path(f"{wanted}.new").rename(wanted)
        os.environ["PREFECT_SERVER_REGISTER_BLOCKS_ON_START"] = "false"
        _refresh_prefect()


def _copy_tracking(prepare: Callable[[str, Path], None]) -> Callable[[str, Path], None]:
    """The same for MLflow's tables: `prepare` of tasks/lineage/database.py finds them made."""
    from tasks.lineage import database

    def copied(tracking_uri: str, home: Path) -> None:
        wanted = Path(tracking_uri.removeprefix(database.SCHEME))
        made = Path(os.environ[FOLDER]) / "mlflow.db"
        if tracking_uri.startswith(database.SCHEME) and made.exists():
            with database.locked(wanted.with_name(f".{wanted.name}.lock")):
                if not wanted.exists():
                    shutil.copy(made, f"{wanted}.new")
                    place = f"{database.artifact_root(tracking_uri, home)}/0"
                    with closing(sqlite3.connect(f"{wanted}.new")) as tables, tables:
                        tables.execute("UPDATE experiments SET artifact_location = ?", [place])
                    Path(f"{wanted}.new").rename(wanted)
        prepare(tracking_uri, home)

    return copied


def end(request: dict[str, Any]) -> NoReturn:
    """Become the program, run it, and end as Python does, but without taking thousands of modules apart."""
    code = 0
    try:
        become(request)
        run(request)
    except SystemExit as asked:
        code = asked.code if isinstance(asked.code, int) else 0 if asked.code is None else 1
        if not isinstance(asked.code, int | None):
            print(asked.code, file=sys.stderr)
    except BaseException as error:  # noqa: BLE001
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        sys.excepthook(type(error), error, error.__traceback__)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def of_the_product() -> Iterator[str]:
    """All modules but those of the jobs, for commands import theirs when they need them."""
    for top in ("flows", "tasks", "deployments"):
        for module in pkgutil.walk_packages([str(ROOT / top)], f"{top}."):
            if not module.name.startswith("tasks.jobs") and not module.name.endswith("__main__"):
                yield module.name


def main(path: str) -> Server:
    sys.path[:0] = [str(ROOT), str(SUPPORT / "forks")]
    os.environ.update(QUIET)
    if Path(path).name != "commands":
        return Server(path, load(Path(path).name, set(sys.modules)))
    workers = Path(path).with_name("workers")
    wanted = Path(f"{workers}.wanted")
    try:
        known = load("commands", set(sys.modules))
        if wanted.exists() and os.fork() == 0:
            return Server(str(workers), known | load("workers", set(sys.modules)))
    except BaseException:
        wanted.unlink(missing_ok=True)  # a worker that waits goes on by itself
        raise
    make_databases()
    return Server(path, known)


def load(kind: str, before: set[str]) -> set[str]:
    """Import what programs of a kind need, and return the names of the packages that this brought."""
    gc.disable()
    for name in (*MORE[kind], *ENTRIES[kind], *(of_the_product() if kind == "commands" else ())):
        with suppress(ImportError):
            importlib.import_module(name)
    known = {name.partition(".")[0] for name in set(sys.modules) - before}
    others = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if others:
        raise RuntimeError(f"imports started threads, which a fork has not: {', '.join(others)}")
    gc.freeze()
    gc.enable()
    return known


if __name__ == "__main__":
    try:
        main(sys.argv[1]).run()
    except Fork as fork:
        told = fork.request
    else:
        raise SystemExit
    end(told)
