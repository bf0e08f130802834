"""Machines reached through SSH: run a command there, with a synchronous face over one background event loop.

Files go over the same connection. What is run, and what its answer means, belongs to a backend. Host keys
are always verified, everything has a time limit, and no password is ever asked for (docs/ssh.md).
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import threading
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from tasks.common.errors import Missing
from tasks.config.backends.ssh import SshConfig
from tasks.storage.manifest import require_inside

try:
    import asyncssh
except ModuleNotFoundError as error:
    raise Missing(
        f"SSH needs {error.name}", remedy="Install it: pip install -c constraints.txt -e '.[orchestrator]'."
    ) from None

# Files on machines reached through SSH: write, and bring a folder there or here by what changed.
#
# A folder's file is moved when size or time of change (in nanoseconds) differ; one of APPENDED grows at its end, and
# only the new end is moved to here. Nothing is deleted on either side, no reader sees half a file, and names that begin
# with a dot stay where they are. A name of theirs that would lead out of our folder is refused.


APPENDED = (".jsonl", ".log")
"""Files that are only ever written at their end."""
FILE_SECONDS, SLOWEST = 60.0, 100_000
"""Time limit of one file: seconds, and bytes a second of the slowest link that counts as one."""
PART = ".headway-part"


@dataclass(frozen=True)
class _Listed:
    size: int
    changed: int
    """Nanoseconds since 1970."""


def write(connection: Connection, path: str, data: bytes) -> None:
    """Write a remote file whole, with the folders above it; readable by its owner only."""

    async def work() -> None:
        async with (await connection.opened()).start_sftp_client() as sftp:
            await sftp.makedirs(PurePosixPath(path).parent, exist_ok=True)
            async with sftp.open(path + PART, "wb", asyncssh.SFTPAttrs(permissions=0o600)) as file:
                await file.write(data)
            await sftp.posix_rename(path + PART, path)

    connection.wait(connection.limited(work(), seconds=_limit(len(data)), what=f"writing {path}"))


def push(connection: Connection, folder: Path, remote: str, *, skip: Sequence[str] = ()) -> list[str]:
    """Bring a local folder's changed files to a remote folder; returns their names. `skip` are names at its top."""
    existing = _remote_files(connection, remote)
    moved = [name for name, stat in _local_files(folder).items() if existing.get(name) != stat and not _in(name, skip)]
    for name in moved:
        connection.wait(_put(connection, folder / name, f"{remote}/{name}"))
    return moved


def pull(connection: Connection, remote: str, folder: Path, *, skip: Sequence[str] = ()) -> list[str]:
    """Bring a remote folder's changed files to a local folder; returns their names. `skip` are names at its top.

    Raises IntegrityError for a name that leads out of the folder; then nothing was brought.
    """
    local, theirs = _local_files(folder), _remote_files(connection, remote)
    moved = [name for name, stat in theirs.items() if local.get(name) != stat and not _in(name, skip)]
    require_inside(moved, where=f"{remote} on {connection.address}")
    for name in moved:
        connection.wait(_get(connection, f"{remote}/{name}", folder / name, theirs[name]))
    return moved


def _local_files(folder: Path) -> dict[str, _Listed]:
    result = {}
    for path in sorted(p for p in folder.rglob("*") if not _passing(p.name)):
        try:
            if path.is_file() and not path.is_symlink():
                mine = path.stat()
                result[path.relative_to(folder).as_posix()] = _Listed(mine.st_size, mine.st_mtime_ns)
        except FileNotFoundError:  # it went away between the two looks
            continue
    return result


def _remote_files(connection: Connection, remote: str) -> dict[str, _Listed]:
    """One command lists them all; SFTP as OpenSSH speaks it knows times of change in whole seconds only.

    Between the fields stands what no name can hold: a name with a line break in it would be read as several.
    """
    where = shlex.quote(remote)
    output = connection.run(f"test ! -d {where} || find {where} -type f -printf '%P\\0%s\\0%T@\\0'")
    if output.code and not output.stdout:
        raise _refused(connection, f"listing {remote}", output)
    fields = output.stdout.split("\0")[:-1]
    stats = zip(fields[0::3], fields[1::3], fields[2::3], strict=True)
    return {name: _Listed(int(size), _nanoseconds(time)) for name, size, time in stats if not _passing(name)}


def _nanoseconds(text: str) -> int:
    seconds, _, fraction = text.partition(".")
    return int(seconds) * 1_000_000_000 + int(fraction[:9].ljust(9, "0"))


async def _put(connection: Connection, path: Path, remote: str) -> None:
    mine = path.stat()

    async def work() -> None:
        async with (await connection.opened()).start_sftp_client() as sftp:
            await sftp.makedirs(PurePosixPath(remote).parent, exist_ok=True)
            await sftp.put(str(path), remote + PART, preserve=True)

    await connection.limited(work(), seconds=_limit(mine.st_size), what=f"writing {remote}")
    seconds, nanoseconds = divmod(mine.st_mtime_ns, 1_000_000_000)
    part, to = shlex.quote(remote + PART), shlex.quote(remote)
    output = await connection.ran(f"touch -d @{seconds}.{nanoseconds:09d} -- {part} && mv -f -- {part} {to}")
    if output.code:
        raise _refused(connection, f"writing {remote}", output)


async def _get(connection: Connection, remote: str, path: Path, stat: _Listed) -> None:
    """The whole file under a temporary name, or the new end of one that grew, up to the size that was listed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    grown = path.suffix in APPENDED and path.is_file() and path.stat().st_size < stat.size
    offset = path.stat().st_size if grown else 0
    target = path if grown else path.with_name(path.name + PART)

    async def work() -> bytes | None:
        async with (await connection.opened()).start_sftp_client() as sftp:
            try:
                if grown:
                    async with sftp.open(remote, "rb") as source:
                        data = await source.read(stat.size - offset, offset)
                        return data if isinstance(data, bytes) else data.encode()
                await sftp.get(remote, str(target))
            except asyncssh.SFTPNoSuchFile:  # replaced or deleted since it was listed: the next look has it
                return None
        return b""

    data = await connection.limited(work(), seconds=_limit(stat.size - offset), what=f"reading {remote}")
    if data is None:
        return
    if grown:
        with open(target, "ab") as file:
            file.write(data)
    os.utime(target, ns=(stat.changed, stat.changed))
    os.replace(target, path)


def _passing(name: str) -> bool:
    """Whether a file is on its way to its real name: ours, or one of tasks/common/process.py's."""
    return name.endswith(PART) or name.rpartition("/")[2].startswith(".")


def _limit(size: int) -> float:
    return FILE_SECONDS + size / SLOWEST


def _in(name: str, tops: Sequence[str]) -> bool:
    return name.split("/", 1)[0] in tops


def _refused(connection: Connection, what: str, output: Ran) -> Missing:
    return Missing(f"{what} on {connection.address} failed: {output.stderr.strip() or output.code}", remedy=ROOM)


T = TypeVar("T")
KEEP_ALIVE_SECONDS, KEEP_ALIVE_MISSES = 5, 3
"""A machine that is gone without a word is noticed after their product."""
COMMAND_SECONDS = 60.0
ROOM = "Check the folder's owner and the room on its disk there."


class Unreachable(Missing):
    """A machine gives no answer now; it may a moment later. A login that is refused, or an unknown host key, is Missing."""


@dataclass(frozen=True)
class Address:
    """A machine as it is written in a configuration: NAME, USER@NAME or USER@NAME:PORT."""

    name: str
    user: str = ""
    port: int | None = None

    def __str__(self) -> str:
        return (f"{self.user}@" if self.user else "") + self.name + (f":{self.port}" if self.port else "")


@dataclass(frozen=True)
class Ran:
    """A command that ended."""

    code: int
    stdout: str
    stderr: str


def parse_address(text: str) -> Address:
    """Read USER@NAME:PORT; an IPv6 address with a port is written [ADDRESS]:PORT. Raises ValueError."""
    user, _, rest = text.strip().rpartition("@")
    name, colon, port = rest.rpartition(":")
    if not colon or (":" in name and not name.endswith("]")):
        name, port = rest, ""
    name = name.strip("[]")
    if not re.fullmatch(r"[\w.:%-]+", name) or not re.fullmatch(r"[\w.@\\-]*", user) or (port and not port.isdigit()):
        raise ValueError(f"{text!r} is no machine: write NAME, USER@NAME or USER@NAME:PORT")
    return Address(name, user, int(port) if port else None)


class Connection:
    """One machine. It connects at the first call, keeps the connection, and connects again after it broke.

    Every call raises Unreachable when the machine gives no answer, Missing when it refuses the login or its host key is not
    known, ValueError when the settings cannot be used. A connection may be used by several threads.
    """

    def __init__(self, address: str, settings: SshConfig) -> None:
        self.address = parse_address(address)
        self.settings = settings
        self._open: asyncssh.SSHClientConnection | None = None
        self._lock: asyncio.Lock | None = None

    def run(self, command: str, *, stdin: str = "", seconds: float = COMMAND_SECONDS) -> Ran:
        """Run a line of the machine's login shell; an exit code that is not zero is no error here."""
        return self.wait(self.ran(command, stdin=stdin, seconds=seconds))

    def close(self) -> None:
        if self._open is not None:
            _loop().call_soon_threadsafe(self._open.close)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine of this connection, run on the background loop."""
        return wait(work)

    async def ran(self, command: str, *, stdin: str = "", seconds: float = COMMAND_SECONDS) -> Ran:
        """`run` as a coroutine of the background loop."""

        async def run() -> Ran:
            existing = await self.opened()
            done = await existing.run(command, input=stdin, encoding="utf-8", errors="replace")
            if done.returncode is None:
                raise asyncssh.ConnectionLost("the connection broke")
            return Ran(done.returncode, str(done.stdout or ""), str(done.stderr or ""))

        return await self.limited(run(), seconds=seconds, what=f"running {command.split(maxsplit=1)[0]}")

    async def limited(self, work: Coroutine[Any, Any, T], *, seconds: float, what: str) -> T:
        """Await work on the connection, with a time limit; a connection that fails is given up, and the next call opens one."""
        try:
            return await asyncio.wait_for(work, seconds + self.settings.connect_seconds)
        except TimeoutError:
            self._drop()
            raise Unreachable(
                f"{self.address} gave no answer within {seconds:g} s ({what})", remedy=self._remedy
            ) from None
        except (
            asyncssh.DisconnectError,
            asyncssh.ChannelOpenError,
            asyncssh.SFTPConnectionLost,
            ConnectionError,
        ) as error:
            self._drop()
            raise Unreachable(f"{self.address} does not answer: {error}", remedy=self._remedy) from None
        except asyncssh.SFTPError as error:
            raise Missing(f"{what} on {self.address} failed: {error.reason}", remedy=ROOM) from None

    async def opened(self) -> asyncssh.SSHClientConnection:
        """The open connection; connects when there is none."""
        self._lock = self._lock or asyncio.Lock()
        async with self._lock:
            if self._open is None or self._open.is_closed():
                self._open = await self._connected()
            return self._open

    async def _connected(self) -> asyncssh.SSHClientConnection:
        try:
            return await asyncio.wait_for(_connect(self.address, self.settings), self.settings.connect_seconds)
        except asyncssh.HostKeyNotVerifiable as error:
            raise Missing(f"the host key of {self.address} is not known: {error}", remedy=self._known) from None
        except asyncssh.PermissionDenied:
            raise Missing(
                f"{self.address} refused the login: the key is not one of its, or the login expired", remedy=self._login
            ) from None
        except (asyncssh.KeyImportError, asyncssh.ConfigParseError) as error:
            raise ValueError(f"the SSH settings for {self.address} cannot be used: {error}. {_PASSPHRASE}") from None
        except TimeoutError:
            seconds = f"{self.settings.connect_seconds:g} s"
            raise Unreachable(
                f"{self.address} did not answer within {seconds} (ssh.connect_seconds)", remedy=self._remedy
            ) from None
        except (OSError, asyncssh.Error) as error:
            raise Unreachable(f"{self.address} cannot be reached: {error}", remedy=self._remedy) from None

    def _drop(self) -> None:
        if self._open is not None:
            self._open.abort()
        self._open = None

    @property
    def _remedy(self) -> str:
        return f"Check that the machine runs and that `ssh {_as_ssh(self.address)}` works from here (a jump host may be needed)."

    @property
    def _known(self) -> str:
        file = self.settings.known_hosts or "~/.ssh/known_hosts"
        port = f"-p {self.address.port} " if self.address.port else ""
        return (
            f"Compare its fingerprint with the one that the machine's owner says, then add the key: ssh-keyscan {port}"
            f"{self.address.name} >> {file}. A key that changed without a reason may be somebody in between."
        )

    @property
    def _login(self) -> str:
        key = self.settings.key or "your key or agent"
        return (
            f"Check that `ssh {_as_ssh(self.address)}` works with {key}; renew an expired certificate or sign in again, or "
            "put the public key into the machine's ~/.ssh/authorized_keys."
        )


_PASSPHRASE = "A key with a passphrase belongs into an agent: run ssh-add and leave ssh.key empty."


def wait(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the background loop and wait for its result; an interrupt here ends it there."""
    future = asyncio.run_coroutine_threadsafe(work, _loop())
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def run_all(
    commands: Mapping[Connection, str], *, stdin: str = "", seconds: float = COMMAND_SECONDS
) -> dict[Connection, Ran | Missing]:
    """Run a command on each of several machines at once; the answer of one that gives none is its error."""

    async def all_of_them() -> Sequence[Ran | Missing]:
        return await asyncio.gather(
            *(_or_error(c.ran(text, stdin=stdin, seconds=seconds)) for c, text in commands.items())
        )

    return dict(zip(commands, wait(all_of_them()), strict=True))


async def _or_error(work: Coroutine[Any, Any, Ran]) -> Ran | Missing:
    try:
        return await work
    except Missing as error:
        return error


async def _connect(
    address: Address, settings: SshConfig, tunnel: asyncssh.SSHClientConnection | None = None, *, hop: bool = False
) -> asyncssh.SSHClientConnection:
    """Connect, through the jump hosts that the configuration file names; those are verified in the same way."""
    chosen = {
        "username": address.user or settings.user,
        "port": address.port,
        "client_keys": _file(settings.key, "ssh.key"),
        "known_hosts": _file(settings.known_hosts, "ssh.known_hosts"),
        "config": _file(settings.config, "ssh.config"),
    }
    options = await asyncssh.SSHClientConnectionOptions.construct(
        host=address.name,
        connect_timeout=settings.connect_seconds,
        login_timeout=settings.connect_seconds,
        keepalive_interval=KEEP_ALIVE_SECONDS,
        keepalive_count_max=KEEP_ALIVE_MISSES,
        password_auth=False,
        kbdint_auth=False,
        **({"agent_path": None} if settings.key else {}),
        **({"tunnel": None} if hop else {}),
        **{name: value for name, value in chosen.items() if value},
    )
    if options.known_hosts is None:
        raise ValueError(
            f"the SSH configuration trusts any host key of {address} (UserKnownHostsFile none): name a file there"
        )
    if isinstance(options.tunnel, str):
        for jump in options.tunnel.split(","):
            tunnel = await _connect(parse_address(jump), settings, tunnel, hop=True)
    return await asyncssh.connect(address.name, options=options, tunnel=tunnel)


def _file(path: str, setting: str) -> str:
    if path and not Path(path).expanduser().is_file():
        raise ValueError(f"{setting} is {path}, and there is no such file")
    return str(Path(path).expanduser()) if path else ""


def _as_ssh(address: Address) -> str:
    port = f"-p {address.port} " if address.port else ""
    return port + (f"{address.user}@" if address.user else "") + address.name


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """The one event loop of this process's connections, on a thread of its own."""
    loop = asyncio.new_event_loop()

    def run() -> None:
        with suppress(RuntimeError):
            loop.run_forever()

    threading.Thread(target=run, name="headway-ssh", daemon=True).start()
    return loop
