"""Units on several processes of one machine. Forked, so that the tokenizer is opened once and shared.

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
from pathlib import Path
from typing import Any

from tasks.corpus.inputs import Unit
from tasks.errors import Missing
from tasks.tokenizing.engine import Engine
from tasks.tokenizing.units import Receipt, Work, encode_unit, read_receipt

PR_SET_PDEATHSIG = 1
_FORK = multiprocessing.get_context("fork")


def encode_parallel(
    units: Sequence[Unit],
    work: Work,
    parts: Path,
    *,
    engine: Engine,
    workers: int,
    told: Callable[[int], None] = lambda read: None,
) -> int:
    """Encode what has no receipt yet on `workers` processes; returns how many units were there already.

    `told` hears the bytes that were read, in this process. Raises what a worker raised, after all of them are gone.
    """
    parts.mkdir(parents=True, exist_ok=True)
    receipts = [read_receipt(unit, work, parts) for unit in units]
    left = [unit for unit, receipt in zip(units, receipts, strict=True) if not receipt]
    if left:
        with _started(left, work, parts, engine=engine, workers=min(workers, len(left))) as pipes:
            told(sum(receipt.bytes_read for receipt in receipts if receipt))  # after the fork: what draws has threads
            _listen(pipes, told)
    return len(units) - len(left)


@contextmanager
def _started(
    units: Sequence[Unit], work: Work, parts: Path, *, engine: Engine, workers: int
) -> Iterator[dict[Connection, BaseProcess]]:
    """Worker processes by the pipe that they speak through; none of them is left afterwards."""
    taken = _FORK.Value("q", 0)
    pipes: dict[Connection, BaseProcess] = {}
    try:
        for _ in range(workers):
            ours, theirs = _FORK.Pipe(duplex=False)
            process: BaseProcess = _FORK.Process(
                target=_work, args=(theirs, taken, units, work, parts, engine, os.getpid()), daemon=True
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


def _listen(pipes: dict[Connection, BaseProcess], told: Callable[[int], None]) -> None:
    """Hear the workers out. Raises the first error, and Missing when one was killed."""
    open_pipes = dict(pipes)
    while open_pipes:
        for pipe in wait(list(open_pipes)):
            assert isinstance(pipe, Connection)
            try:
                said = pipe.recv()
            except EOFError:
                said = _killed(open_pipes[pipe])
            if isinstance(said, BaseException):
                raise said
            if said is None:
                del open_pipes[pipe]
            else:
                told(said)


def _killed(process: BaseProcess) -> Missing:
    process.join(5)
    code = process.exitcode
    how = f"by signal {-code}" if code and code < 0 else f"with exit code {code}"
    return Missing(
        f"a worker process ended {how} in the middle of its work",
        remedy="Was memory short? Take fewer --workers; the same command goes on with what is left.",
    )


def _work(
    pipe: Connection, taken: Any, units: Sequence[Unit], work: Work, parts: Path, engine: Engine, parent: int
) -> None:
    """A worker's life: units until none is left, or its parent is gone. Says bytes, then None; or the error that ended it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _die_with(parent)
    try:
        while (index := _next(taken)) < len(units):
            _unit(units[index], work, parts, engine=engine, pipe=pipe)
        pipe.send(None)
    except Exception as error:  # noqa: BLE001 - the process's end: the parent raises it
        pipe.send(error)


def _unit(unit: Unit, work: Work, parts: Path, *, engine: Engine, pipe: Connection) -> Receipt:
    return encode_unit(unit, work, parts, engine=engine, told=pipe.send)


def _next(taken: Any) -> int:
    with taken.get_lock():
        taken.value += 1
        return int(taken.value) - 1


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies (Linux; elsewhere it ends when its pipe breaks)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
