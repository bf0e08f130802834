"""What an attempt leaves behind on a machine: processes that outlive what started them, and how they are ended.

Programs that open a rank (runtime.py) die with their launcher. A user's own program need not, so the agent of the machine
adopts what is orphaned, and looks for what an agent that was killed could not end. Linux; elsewhere this does nothing.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from tasks.common.process import descendants

PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Have the kernel give this process the orphans of its descendants (prctl(2), PR_SET_CHILD_SUBREAPER)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_all_below(pid: int) -> None:
    """Kill every process below one."""
    for below in descendants(pid):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(below, signal.SIGKILL)


def end_leftovers(folder: Path, node_rank: int) -> list[int]:
    """Kill the processes of earlier attempts of a job on this machine; returns their ids.

    A process belongs to a job by the environment that its launcher gave it.
    """
    marks = {f"HEADWAY_JOB={folder}".encode(), f"HEADWAY_NODE_RANK={node_rank}".encode()}
    results = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment = set((process / "environ").read_bytes().split(b"\0"))
        except OSError:
            continue
        if marks <= environment and int(process.name) != os.getpid():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(int(process.name), signal.SIGKILL)
                results.append(int(process.name))
    return results
