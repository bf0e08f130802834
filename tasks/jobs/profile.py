"""Dataset -> its profile, as a program: every rank measures units, rank 0 puts them together into `out/profile`.

The ranks share the job folder, where each unit's part lies with a receipt (`parts/`): after a restart only units without one
are read. What is measured: tasks/data/corpus/profile.py. See docs/data.md.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from typing import Any

from tasks.config.data import ValidationConfig
from tasks.data.corpus.inputs import Unit, find_shards
from tasks.data.corpus.parts import Work, divide, receipt
from tasks.data.corpus.profile import measure, merge
from tasks.jobs.node.runtime import Rank, main

POLL_SECONDS = 0.2


def run(rank: Rank) -> dict[str, Any] | None:
    """Measure this rank's units; rank 0 waits for all others and merges."""
    began = time.perf_counter()
    out, folder = rank.output / "profile", rank.folder / "parts"
    if not out.exists():
        work = open_work(rank)
        units = divide(work.shards)
        measure_share(rank, units, work)
        if rank.rank == 0:
            merge(units, work, folder, out, began=began)
            shutil.rmtree(folder)
    if rank.rank:
        return None
    columns = json.loads((out / "columns.json").read_text(encoding="utf-8"))
    return {"metrics": {name: float(columns[name]) for name in ("documents", "unreadable", "bytes", "exact", "near")}}


def open_work(rank: Rank) -> Work:
    """What the job's settings and inputs ask for."""
    config = ValidationConfig.model_validate(rank.settings["validation"])
    benchmarks = {name: rank.inputs[f"benchmark-{name}"] for name in rank.settings["benchmarks"]}
    shards = tuple(find_shards([rank.inputs["dataset"]]))
    return Work(shards, config, float(rank.settings["heldout_fraction"]), benchmarks)


def measure_share(rank: Rank, units: list[Unit], work: Work) -> None:
    """Measure every n-th unit; rank 0 comes back when all ranks have measured theirs."""
    mine, folder, read = units[rank.rank :: rank.world_size], rank.folder / "parts", 0
    total = sum(unit.bytes for unit in mine)

    def told(more: int) -> None:
        nonlocal read
        read += more
        rank.progress(read, total, f"{read / 1e6:.0f} of {total / 1e6:.0f} MB read")

    measure(mine, work, folder, workers=int(rank.settings["threads"]), report=told)
    while rank.rank == 0 and not all(receipt(folder, unit, work) for unit in units):
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    sys.exit(main(run))
