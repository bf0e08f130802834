"""One supervisor of local processes: for jobs, endpoints and the platform's servers.

A supervised process lives in a folder, which is its working directory: whoever started it may have worked in a temporary one.
There `process.json` says what to run, `handle.json` who runs, `exit.json` how it ended.
Its small parent (`python -m tasks.common.process FOLDER`) survives whoever started it, restarts the program while it makes
progress, and takes the program with it when it dies. Standard library only: the parent must start fast and stay small.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import json
import os
import select
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from tasks.common.redaction import without_secrets
from tasks.common.seal import opened, sealed

POLL_SECONDS = 0.05
IDLE_POLL_SECONDS = 0.5
"""How often a parent looks at the ranks of a program that has run for a while; ends and signals wake it at once."""
START_ROUNDS = 20
AFTERWARDS_SECONDS = 120.0
PR_SET_PDEATHSIG = 1
PLACES = ("HEADWAY_HOME", "HEADWAY_POLICY", "HEADWAY_TRUST", "HEADWAY_STORES")
"""Variables that hold a path, which may be relative to where we are."""
GIVEN_UP = 76
"""Exit code by which a program says that starting it again here is of no use."""
NOT_RETRIED = ("user", "integrity", "missing", "diverged", "limit", "node", "preempted")
"""Classes of failure that come back however often a program is started on the same machines."""


@dataclass(frozen=True)
class ProcessSpec:
    """What to run. Paths in `progress` and `fatal` are relative to the process's folder."""

    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
    directory: str = ""
    """Its working directory, where that is another one than its folder."""
    secrets: tuple[str, ...] = ("*",)
    """Variables with a secret in them that it inherits from who starts it, as patterns; `env` is written to disk."""
    log: str = "process.log"
    restarts: int = 0
    """Restarts without progress before the process counts as failed."""
    pause: float = 0.4
    """Seconds before the first restart; doubled with each further one without progress, up to 5."""
    progress: str = ""
    """A file whose content changes when the work got further: then the count of restarts starts again."""
    steady: float | None = None
    """Seconds of running after which a server counts as having got further; None for work that ends."""
    fatal: str = ""
    """A folder; when a file in it says a `class` of NOT_RETRIED, there is no restart."""
    time_limit: float | None = None
    """Seconds, over all attempts."""
    grace: float = 10.0
    """Seconds between SIGTERM and SIGKILL when it is stopped."""
    owner: str = ""
    """For whom it runs. A parent whose folder was given to another owner ends, and says nothing there any more."""
    afterwards: list[str] = field(default_factory=list)
    """A command that is run once when all is over, for at most AFTERWARDS_SECONDS; empty: none."""


def start(folder: Path, spec: ProcessSpec) -> dict[str, Any]:
    """Start a supervised process that outlives the caller; returns its handle once the parent has written it.

    A folder has one parent at a time, held by a lock: starting what runs already returns the handle of what runs. Raises
    RuntimeError when the parent cannot run, or another one holds the folder and never says who it is.
    """
    for _ in range(START_ROUNDS):
        if handle := _started(folder, spec):
            return handle
    raise RuntimeError(f"another process holds {folder} and has no handle there")


def _started(folder: Path, spec: ProcessSpec) -> dict[str, Any] | None:
    """The handle of a parent that was started, or that runs already; None when another one held the folder and is over."""
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "process.json", asdict(spec), seal=True)
    places = {name: str(Path(os.environ[name]).absolute()) for name in PLACES if os.environ.get(name)}
    root, given = str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = os.pathsep.join([root, *(str(Path(one).absolute()) for one in given if one)])
    with open(folder / "parent.log", "ab") as log:
        parent = subprocess.Popen(
            [sys.executable, "-m", "tasks.common.process", str(folder)],
            env={**without_secrets(os.environ, spec.secrets), **places, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
            cwd=spec.directory or folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        while True:
            ended = parent.poll() is not None
            handle: dict[str, Any] = read_json(folder / "handle.json") or {}
            if handle.get("pid") == parent.pid or alive(handle):
                return handle
            if ended and parent.returncode:
                raise RuntimeError(f"the parent process in {folder} ended at once: see {folder / 'parent.log'}")
            if ended:  # another parent held the folder, and has no handle yet or is over by now
                return None
            time.sleep(0.01)
    except BaseException:  # interrupted before anybody knows its handle: nobody could stop it later
        parent.terminate()
        raise


def alive(handle: Mapping[str, Any] | None) -> bool:
    """Whether the very process of a handle runs: pid, start time and boot id must agree, for pids are reused."""
    if not handle or handle.get("boot_id") != boot_id():
        return False
    return process_started(int(handle["pid"])) == handle.get("started")


def stop(folder: Path, *, timeout: float = 30.0) -> None:
    """Ask the parent of a supervised process to stop it and wait until nothing of it is left."""
    handle = read_json(folder / "handle.json")
    if not handle or not alive(handle):
        return
    with suppress(ProcessLookupError):
        os.kill(int(handle["pid"]), signal.SIGTERM)
        deadline = time.monotonic() + timeout
        while alive(handle) and time.monotonic() < deadline:
            time.sleep(0.05)
        if alive(handle):
            os.kill(int(handle["pid"]), signal.SIGKILL)


def process_started(pid: int) -> str | None:
    """When a living process started, as the system counts it; None when there is none, or only a zombie."""
    stat = Path(f"/proc/{pid}/stat")
    if Path("/proc/self/stat").exists():
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return None if fields[0] in "ZX" else fields[19]
    completed = subprocess.run(
        ["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    state, _, started = completed.stdout.strip().partition(" ")
    return None if not state or state.startswith("Z") else started.strip()


def boot_id() -> str:
    """Changes with every start of the machine."""
    linux = Path("/proc/sys/kernel/random/boot_id")
    if linux.exists():
        return linux.read_text().strip()
    completed = subprocess.run(["sysctl", "-n", "kern.boottime"], capture_output=True, text=True, check=False)
    return completed.stdout.strip()


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when the one that started it dies (Linux; elsewhere this does nothing).

    A `parent` that said who it is may be dead already: then this process ends at once.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def own_folder(folder: Path, *, remedy: str) -> Path:
    """Make a folder that nobody else can read or write, in a place where others may make one of its name first.

    Raises ValueError, which says the remedy, for a link and for a folder of another user's.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    known = folder.lstat()
    if not stat.S_ISDIR(known.st_mode) or known.st_uid != os.geteuid():
        raise ValueError(f"{folder} is somebody else's: delete it, or {remedy}")
    folder.chmod(0o700)  # an earlier release made some for everybody to read
    return folder


def write_json(path: Path, value: Any, *, seal: bool = False) -> None:
    """Write a JSON file so that a reader sees the old one or the new one, never half.

    `seal` is for objects that are state of a home: `read_json` then refuses a file in which a bit has changed.
    """
    text = json.dumps(value, indent=1)
    write_text(path, sealed(text.encode()).decode() if seal else text)


def write_text(path: Path, text: str) -> None:
    """Write a text as `whole` does."""
    with whole(path) as file:
        file.write(text.encode())


@contextmanager
def whole(path: Path, *, replace: bool = True) -> Iterator[IO[bytes]]:
    """Write a file that only its owner may read, so that a reader sees the old one or the new one, never half.

    It has another name until the block ends and its bytes are on the disk; what the block raises leaves the old one as it was.
    Without `replace` the first of several writers wins, and the others get FileExistsError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        (os.replace if replace else os.link)(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def append(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Add to a file that only its owner may read, by one write: what several processes add does not mix.

    What is `durable` is on the disk when this returns.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, data)
        if durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def secret(path: Path, make: Callable[[], str]) -> str:
    """What a file holds that only its owner may read; made at first use, the same for all that ask at once."""
    if not path.exists():
        private_folder(path.parent)
        with suppress(FileExistsError), whole(path, replace=False) as file:
            file.write(make().encode())
    return path.read_text(encoding="utf-8")


def private_folder(folder: Path) -> Path:
    """Make a folder of the home that nobody else can look into; one that is there keeps the rights that somebody gave it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def read_json(path: Path) -> Any:
    """The value of a JSON file that `write_json` wrote; None when it is not there. Raises IntegrityError for a broken seal."""
    try:
        return json.loads(opened(path.read_bytes(), where=str(path)))
    except FileNotFoundError:
        return None


@contextmanager
def locked(path: Path, *, waiting: Callable[[], None] = lambda: None, folder: int | None = None) -> Iterator[None]:
    """Hold a file's lock against other processes; it is let go when this process dies. `folder` is the open one that it lies in.

    While somebody else holds it, `waiting` is called again and again; what it raises ends the wait. A link is not followed, and
    what the file holds stays: in a shared folder somebody else may have put it there. Raises OSError for a link, and for what is
    no plain file.
    """
    if folder is None:
        path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    lock = os.open(path, flags, 0o666, dir_fd=folder)
    try:
        if not stat.S_ISREG(os.fstat(lock).st_mode):
            raise OSError(
                errno.EINVAL, "a lock must be a plain file: find out who made this one, and remove it", str(path)
            )
        while not _lock(lock):
            waiting()
            time.sleep(POLL_SECONDS)
        yield
    finally:
        os.close(lock)


def _lock(file: IO[str] | int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def descendants(pid: int) -> list[int]:
    """All processes below one, each before those below it; empty when it has gone."""
    import psutil  # a third of what the small parent would import at its start, and needs at its end alone

    try:
        return [below.pid for below in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


class _Supervision:
    """The parent's loop. State: the attempt, the restarts without progress, and whether somebody asked to stop."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.spec = ProcessSpec(**read_json(folder / "process.json"))
        self.attempt = int((read_json(folder / "attempts.json") or {}).get("attempts", 0))
        self.stopping = False
        self.began = time.monotonic()

    def run(self) -> None:
        self._signals, woken = os.pipe()
        for end in (self._signals, woken):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask_to_stop)
        self._write_handle([])
        failures = 0
        while True:
            marker, began = self._marker(), time.monotonic()
            code, reason = self._one_attempt()
            if code in (0, GIVEN_UP) or reason in ("cancelled", "timeout") or self._fatal() or self._another_owner():
                break
            steady = self.spec.steady is not None and time.monotonic() - began >= self.spec.steady
            failures = 1 if steady or marker != self._marker() else failures + 1
            if failures > self.spec.restarts:
                break
            time.sleep(min(self.spec.pause * 2 ** (failures - 1), 5.0))
        if self.spec.afterwards:
            with open(self.folder / self.spec.log, "ab") as log, suppress(subprocess.TimeoutExpired):
                subprocess.run(
                    self.spec.afterwards,
                    env={**os.environ, **self.spec.env},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    timeout=AFTERWARDS_SECONDS,
                    check=False,
                )
        ended = {"code": code, "reason": reason, "attempts": self.attempt, "ended": time.time()}
        if self.spec.owner:
            ended["owner"] = self.spec.owner
        if not self._another_owner():
            write_json(self.folder / "exit.json", ended, seal=True)

    def _one_attempt(self) -> tuple[int, str]:
        self.attempt += 1
        write_json(self.folder / "attempts.json", {"attempts": self.attempt}, seal=True)
        environment = {**os.environ, **self.spec.env, "HEADWAY_ATTEMPT": str(self.attempt)}
        with open(self.folder / self.spec.log, "ab") as log:
            child = subprocess.Popen(
                self.spec.argv,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,
            )
        seen: list[dict[str, Any]] = []
        began = time.monotonic()
        while child.poll() is None:
            age = time.monotonic() - began
            self._wait(min(max(age / 20, POLL_SECONDS), IDLE_POLL_SECONDS))
            ranks = self._ranks()
            if ranks != seen:
                seen = ranks
                self._write_handle(ranks)
            late = self.spec.time_limit is not None and time.monotonic() - self.began > self.spec.time_limit
            if self.stopping or late:
                self._end(child)
                return child.returncode or 0, "cancelled" if self.stopping else "timeout"
        return child.returncode, "ended"

    def _wait(self, seconds: float) -> None:
        """Until a child ends, a signal comes, or the time is over."""
        if select.select([self._signals], [], [], seconds)[0]:
            with suppress(BlockingIOError):
                while os.read(self._signals, 512):
                    pass

    def _end(self, child: subprocess.Popen[bytes]) -> None:
        below = [(pid, process_started(pid)) for pid in descendants(child.pid)]
        child.terminate()
        try:
            child.wait(self.spec.grace)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        for pid, started in below:
            if started is not None and process_started(pid) == started:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)

    def _another_owner(self) -> bool:
        return bool(self.spec.owner) and (read_json(self.folder / "process.json") or {}).get("owner") != self.spec.owner

    def _marker(self) -> str:
        path = self.folder / self.spec.progress
        return hashlib.sha256(path.read_bytes()).hexdigest() if self.spec.progress and path.is_file() else ""

    def _fatal(self) -> bool:
        if not self.spec.fatal or not (self.folder / self.spec.fatal).is_dir():
            return False
        reports = [read_json(path) or {} for path in (self.folder / self.spec.fatal).glob("*.json")]
        fresh = [report for report in reports if report.get("attempt") == self.attempt]
        return any(report.get("class") in NOT_RETRIED for report in fresh)

    def _ranks(self) -> list[dict[str, Any]]:
        results = [read_json(path) or {} for path in sorted((self.folder / "ranks").glob("*.json"))]
        return [rank for rank in results if rank.get("attempt") == self.attempt]

    def _write_handle(self, ranks: list[dict[str, Any]]) -> None:
        me = {
            "pid": os.getpid(),
            "started": process_started(os.getpid()),
            "boot_id": boot_id(),
            "owner": self.spec.owner,
        }
        write_json(self.folder / "handle.json", {**me, "attempt": self.attempt, "ranks": ranks}, seal=True)

    def _ask_to_stop(self, *_: object) -> None:
        self.stopping = True


def main(folder: Path) -> None:
    """The parent's program: supervise, unless another parent holds the folder for the same owner.

    A parent that holds it for an earlier owner is on its way out: this one waits for it.
    """
    owner = read_json(folder / "process.json").get("owner", "")
    with open(folder / ".lock", "w") as lock:
        while not _lock(lock):
            if (read_json(folder / "handle.json") or {}).get("owner", "") == owner:
                return
            time.sleep(POLL_SECONDS)
        (folder / "exit.json").unlink(missing_ok=True)
        _Supervision(folder).run()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
