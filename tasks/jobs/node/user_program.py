"""What stands before a program of the user's own on each rank: `python -m tasks.jobs.node.user_program PROGRAM ARGUMENTS`.

It says which process the rank is, sends its output to the rank's own log, and becomes the program. Of the job folder the program
need know nothing.
"""

from __future__ import annotations

import os
import sys

from tasks.common.process import die_with_parent
from tasks.jobs.node.runtime import open_rank, redirect, register


def main(command: list[str]) -> None:
    """Become the program; the folder that it lies in is where its own modules are found, as Python does by itself."""
    die_with_parent()
    rank = open_rank()
    register(rank)
    redirect(rank.folder / "logs" / f"rank-{rank.rank}.log")
    os.environ.pop("PYTHONSAFEPATH", None)
    os.execv(sys.executable, [sys.executable, *command])


if __name__ == "__main__":
    main(sys.argv[1:])
