"""Dataset -> its profile, as a program: ranks measure units and look for duplicates, rank 0 puts it together into `out/profile`.

The ranks share the job folder, where each unit's part lies with a receipt, and the links of each range of hashes (`parts/`):
after a restart only what is missing is done. Where machines share no folder, parts come to rank 0, which does all ranges.
What is measured: tasks/data/corpus/profile.py; duplicates: tasks/data/corpus/duplicates.py. See docs/data.md.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from tasks.config.data import ValidationConfig
from tasks.data.corpus.duplicates import STEPS, Step
from tasks.data.corpus.index import open_index
from tasks.data.corpus.inputs import Unit, find_shards
from tasks.data.corpus.parts import Work, divide, receipt
from tasks.data.corpus.profile import linking_of, measure, merge, pieces_of, write_pieces
from tasks.jobs.node.runtime import Rank, main

POLL_SECONDS = 0.1
U = TypeVar("U")


def run(rank: Rank) -> dict[str, Any] | None:
    """Measure this rank's units, and look for duplicates in its ranges; rank 0 waits for all others and merges."""
    began = time.perf_counter()
    out, folder = rank.output / "profile", rank.folder / "parts"
    if not out.exists():
        work = open_work(rank)
        units = divide(work.shards)
        measure_share(rank, units, work)
        if rank.rank == 0 or rank.settings.get("shared_folder", True):
            try:
                link_share(rank, units, work)
            except FileNotFoundError:
                if rank.rank == 0 or not out.exists():
                    raise
                return None  # rank 0 had the profile already, and cleared up
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
    against = tuple(open_index(name, rank.inputs[f"index-{name}"]) for name in rank.settings.get("against", ()))
    return Work(shards, config, float(rank.settings["heldout_fraction"]), benchmarks, against)


def measure_share(rank: Rank, units: list[Unit], work: Work) -> None:
    """Measure every n-th unit."""
    mine, read = units[rank.rank :: rank.world_size], 0
    total = sum(unit.bytes for unit in mine)

    def told(more: int) -> None:
        nonlocal read
        read += more
        rank.progress(read, total, f"{read / 1e6:.1f} of {total / 1e6:.1f} MB read")

    measure(mine, work, rank.folder / "parts", workers=int(rank.settings["threads"]), report=told)


def link_share(rank: Rank, units: list[Unit], work: Work) -> None:
    """Look for duplicates in every n-th range, once all units are measured; rank 0 comes back when all ranges are done.

    Raises FileNotFoundError when rank 0 clears up meanwhile: then this rank has nothing left to do.
    """
    folder = rank.folder / "parts"
    sharing = rank.world_size if rank.settings.get("shared_folder", True) else 1
    if not _all(units, lambda unit: receipt(folder, unit, work) is not None, rank):
        return
    pieces = pieces_of(work)
    write_pieces(pieces[rank.rank :: sharing], work, folder, workers=int(rank.settings["threads"]))
    if not _all(pieces, lambda piece: piece.part(folder).folder.exists(), rank):
        return
    linking = linking_of(units, work, folder)
    for step in STEPS:
        ranges, gone_through = linking.ranges(step), 0
        mine = ranges[rank.rank :: sharing]

        def told(more: int, step: Step = step, total: int = len(mine)) -> None:
            nonlocal gone_through
            gone_through += more
            rank.progress(gone_through, total, f"{step} duplicates: {gone_through} of {total} ranges of hashes")

        linking.do(step, mine, workers=int(rank.settings["threads"]), report=told)
        if not (rank.rank and step == STEPS[-1]) and not _all(ranges, partial(linking.done, step), rank):
            return


def _all(units: Sequence[U], done: Callable[[U], bool], rank: Rank) -> bool:
    """Wait until all ranks have done their units; False when rank 0 has the profile already, and clears up.

    When a rank dies, the launcher ends this one too.
    """
    for unit in units:
        while not done(unit):
            if rank.rank and (rank.output / "profile").exists():
                return False
            time.sleep(POLL_SECONDS)
    return True


if __name__ == "__main__":
    sys.exit(main(run))
