"""Dataset -> what stays of it and what is set aside, as a program: ranks, one a machine, share the files of the corpus.

Writes `out/left` (unless nothing is to stay) and, last, `out/aside`. What a killed rank finished is not done again. Which
lines go stands in the folder of marks that the stage wrote; the work itself is tasks/data/corpus/dividing.py.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tasks.data.corpus.dividing import Division
from tasks.data.corpus.pool import on_processes
from tasks.jobs.node.runtime import Rank, main

POLL_SECONDS = 0.2


def run(rank: Rank) -> dict[str, Any] | None:
    """Divide every n-th file; rank 0 waits for the others and puts the quarantine together."""
    aside, parts = rank.output / "aside", rank.folder / "parts"
    if not aside.exists():
        left = rank.output / "left" if rank.settings["left"] else None
        work = Division(rank.inputs["dataset"], Path(rank.settings["marks"]), parts, left)
        mine, gone_through = work.files[rank.rank :: rank.world_size], 0
        total = sum(map(work.size, mine))

        def told(more: int) -> None:
            nonlocal gone_through
            gone_through += more
            rank.progress(gone_through, total, f"{gone_through / 1e6:.1f} of {total / 1e6:.1f} MB divided")

        def do(name: str, report: Callable[[int], None]) -> None:
            if not aside.exists():  # a restart finds all done, and rank 0 may clear up before this rank has looked
                work.do(name)
            report(work.size(name))

        on_processes(mine, do, workers=int(rank.settings["threads"]), report=told)
        if rank.rank:
            return None
        for name in work.files:
            while not work.done(name):  # when another rank dies, the launcher ends this one too
                time.sleep(POLL_SECONDS)
        work.finish(aside)
    if rank.rank:
        return None
    shutil.rmtree(parts, ignore_errors=True)
    return {"metrics": {"documents": float(json.loads((aside / "quarantine.json").read_text())["documents"])}}


if __name__ == "__main__":
    sys.exit(main(run))
