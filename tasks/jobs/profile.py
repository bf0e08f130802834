"""Dataset -> its profile, as a program: every rank measures units, rank 0 puts them together into `out/profile`.

The ranks share the job folder, where each unit's part lies with a receipt (`parts/`): after a restart only units without one
are read. What is measured: tasks/corpus/profile.py. See docs/data.md.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from typing import Any

from tasks.corpus.inputs import Unit, find_shards
from tasks.corpus.parts import Work, divide, measure_unit, receipt
from tasks.corpus.profile import merge
from tasks.data_config import ValidationConfig
from tasks.jobs.runtime import Rank, main

POLL_SECONDS = 0.2


def run(rank: Rank) -> dict[str, Any] | None:
    """Measure this rank's units; rank 0 waits for all others and merges."""
    began = time.perf_counter()
    out, folder = rank.output / "profile", rank.folder / "parts"
    if not out.exists():
        work = open_work(rank)
        units = divide(work.shards)
        measure(rank, units, work)
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


def measure(rank: Rank, units: list[Unit], work: Work) -> None:
    """Measure every n-th unit; rank 0 comes back when all ranks have measured theirs."""
    left = units
    for unit in units[rank.rank :: rank.world_size]:
        measure_unit(unit, work, rank.folder / "parts")
        left = _left(rank, units, left, work)
    while rank.rank == 0 and left:
        time.sleep(POLL_SECONDS)
        left = _left(rank, units, left, work)


def _left(rank: Rank, units: list[Unit], left: list[Unit], work: Work) -> list[Unit]:
    """The units that have no receipt yet; rank 0 tells how far all ranks are."""
    if rank.rank:
        return []
    left = [unit for unit in left if not receipt(rank.folder / "parts", unit, work)]
    total = sum(unit.bytes for unit in units)
    done = total - sum(unit.bytes for unit in left)
    rank.progress(done, total, f"{done / 1e6:.0f} of {total / 1e6:.0f} MB read")
    return left


if __name__ == "__main__":
    os.environ["RAYON_NUM_THREADS"] = "1"
    sys.exit(main(run))
