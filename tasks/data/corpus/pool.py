"""Units on several processes of one machine. Forked, so that what was opened before is opened once and shared.

Workers take the next unit from a common count; they die with the process that started them, however that dies.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from tasks.common.errors import Missing

PR_SET_PDEATHSIG = 1
_FORK = multiprocessing.get_context("fork")
Told = Callable[[int], None]
"""Hears how many bytes were read since it heard the last time."""
U = TypeVar("U")
"""What is shared out: a unit of a corpus, or a part of what was read from it."""
Do = Callable[[U, Told], object]


def on_processes(
    units: Sequence[U], do: Do[U], *, workers: int, already: int = 0, report: Told = lambda read: None
) -> None:
    """Do every unit on one of `workers` processes, and tell this one the bytes that were read, `already` first.

    Raises what a worker raised, after all of them are gone; Missing when one was killed.
    """
    if units:
        with _started(units, do, workers=min(workers, len(units))) as pipes:
            report(already)  # after the fork: what draws progress may have threads
            open_pipes = dict(pipes)
            while open_pipes:
                for pipe in wait(list(open_pipes)):
                    assert isinstance(pipe, Connection)
                    try:
                        error = pipe.recv()
                    except EOFError:
                        process = open_pipes[pipe]
                        process.join(5)
                        code = process.exitcode
                        how = f"by signal {-code}" if code and code < 0 else f"with exit code {code}"
                        error = Missing(
                            f"a worker process ended {how} in the middle of its work",
                            remedy="If memory was short, set fewer workers. Run the same command again to continue.",
                        )
                    if isinstance(error, BaseException):
                        raise error
                    if error is None:
                        del open_pipes[pipe]
                    else:
                        report(error)


@contextmanager
def _started(units: Sequence[U], do: Do[U], *, workers: int) -> Iterator[dict[Connection, BaseProcess]]:
    """Worker processes by the pipe that they speak through; none of them is left afterwards."""
    taken = _FORK.Value("q", 0)
    pipes: dict[Connection, BaseProcess] = {}
    try:
        for _ in range(workers):
            ours, theirs = _FORK.Pipe(duplex=False)
            process: BaseProcess = _FORK.Process(
                target=_work, args=(theirs, taken, units, do, os.getpid()), daemon=True
            )
            process.start()
            theirs.close()
            pipes[ours] = process
        yield pipes
    finally:
        for process in pipes.values():
            process.kill()
        for process in pipes.values():
            process.join()


def _work(pipe: Connection, taken: Any, units: Sequence[U], do: Do[U], parent: int) -> None:
    """A worker's life: units until none is left, or its parent is gone. Says bytes, then None; or the error that ended it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["RAYON_NUM_THREADS"] = "1"  # a worker is one thread
    # Have the kernel kill this process when its parent dies (Linux; elsewhere it ends when its pipe breaks).
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    try:
        while (index := _next(taken)) < len(units):
            do(units[index], pipe.send)
        pipe.send(None)
    except Exception as error:  # noqa: BLE001 - the process's end: the parent raises it
        pipe.send(error)


def _next(taken: Any) -> int:
    with taken.get_lock():
        taken.value += 1
        return int(taken.value) - 1
