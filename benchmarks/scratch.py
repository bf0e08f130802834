"""A temporary folder for a measurement. What the measurement left working there is ended before the folder goes."""

import ctypes
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

PR_SET_CHILD_SUBREAPER = 36


@contextmanager
def scratch(parent: Path | None = None) -> Iterator[Path]:
    """The folder; at the end of the block every process that it started is killed, also one whose own parent is gone."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans become children of this process: prctl(2)
    with tempfile.TemporaryDirectory(dir=parent) as name:
        before = set(_children())
        try:
            yield Path(name)
        finally:
            while left := set(_children()) - before:
                for process in left:
                    process.kill()
                psutil.wait_procs(left)
            libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)
