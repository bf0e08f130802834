"""What a run goes on from: the newest good checkpoint of two tiers, agreed on by all ranks, as a new attempt.

    JOB/checkpoints/...                                        the store: rank 0 chooses, all read what they need of all shards
    DISK/headway-checkpoints-JOB/RANKS/rank-K/checkpoints      the machine's own disk: rank K's own shard, a checkpoint by itself

One of the second tier counts when every rank has it, of the same step and attempt, whole. What is verified, and how:
tasks/jobs/checkpoint/choice.py. See docs/training.md, "Checkpoints".
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tasks.common.process import own_folder
from tasks.config.training import ExecutionConfig
from tasks.jobs.checkpoint.choice import choose, good_ones
from tasks.jobs.checkpoint.failed import give_up_what_starts_die_of
from tasks.jobs.checkpoint.files import Manifest, claim_attempt, create_only, place_of, read_manifest
from tasks.jobs.checkpoint.origins import take_over
from tasks.jobs.checkpoint.pieces import read_into, shards_of
from tasks.jobs.checkpoint.retention import clean
from tasks.jobs.checkpoint.snapshot import Pieces, set_generators
from tasks.jobs.checkpoint.writer import LOCAL_KEEP
from tasks.jobs.node.runtime import Rank
from tasks.jobs.training.records import mend

Place = tuple[int, int]
"""Step and attempt of a checkpoint."""
NONE: Place = (-1, -1)


@dataclass(frozen=True)
class Found:
    """What the ranks agreed on."""

    attempt: int
    """As claimed: it rises over machines and submissions."""
    manifest: Manifest | None
    """None: from the start."""
    local: bool = False
    """Whether it is of the machines' own disks."""


def local_root(rank: Rank, execution: ExecutionConfig) -> Path | None:
    """This rank's folder on its machine's own disk; its name has how many ranks there are and how they divide the network."""
    if execution.local_every_steps is None:
        return None
    disk = Path(os.environ.get("HEADWAY_SCRATCH") or tempfile.gettempdir())
    job = hashlib.sha256(str(rank.folder.absolute()).encode()).hexdigest()[:16]
    ranks = f"{rank.world_size}-{execution.parallel}-{execution.tensor_parallel}"
    folder = own_folder(disk / f"headway-checkpoints-{job}", remedy="leave execution.local_every_steps empty")
    return folder / ranks / f"rank-{rank.rank}" / "checkpoints"


def agree(rank: Rank, root: Path, local: Path | None, wanted: Mapping[str, Any], group: Any) -> Found:
    """Rank 0 claims an attempt and chooses of the store; then all look whether their own disks have a newer one."""
    word, manifest = torch.tensor([0, *NONE]), None
    if rank.rank == 0:
        mend(rank.folder / "metrics.jsonl")
        attempt = claim_attempt(root, rank.attempt)
        clean(root, attempt)
        give_up_what_starts_die_of(rank.folder, root)
        manifest = choose(root, wanted, attempt=attempt) or take_over(rank.settings, root, wanted, attempt=attempt)
        word = torch.tensor([attempt, *((manifest.step, manifest.attempt) if manifest else NONE)])
    dist.broadcast(word, src=0, group=group)
    attempt, step, of_attempt = (int(number) for number in word)
    if local is not None and (own := _newer(local, root, attempt, wanted, than=(step, of_attempt), group=group)):
        return Found(attempt, own, local=True)
    if step >= 0 and not manifest:
        manifest = read_manifest(place_of(root, step, of_attempt) / "manifest.json")
    return Found(attempt, manifest)


def forget(local: Path | None) -> None:
    """Delete what this rank has on its machine's disk: the run is over, and the store has its last checkpoint."""
    if local is None:
        return
    shutil.rmtree(local.parent, ignore_errors=True)
    for folder in local.parents[1:3]:
        with suppress(OSError):  # another rank's is still there
            folder.rmdir()


def _own_good(local: Path, root: Path, attempt: int, wanted: Mapping[str, Any]) -> dict[Place, Manifest]:
    """The good ones of this machine's disk, of attempts that the store knows: without them somebody began anew."""
    try:
        create_only(local / "attempts" / str(attempt), {})
        clean(local, attempt)
        good = good_ones(local, wanted)
    except OSError as error:
        print(f"checkpoints on this machine's own disk cannot be used: {error}", file=sys.stderr, flush=True)
        return {}
    return {place: one for place, one in good.items() if (root / "attempts" / str(place[1])).exists()}


def _newer(
    local: Path, root: Path, attempt: int, wanted: Mapping[str, Any], *, than: Place, group: Any
) -> Manifest | None:
    """The newest that is good on every rank's disk, when it is newer than the store's and not of an attempt before that."""
    good = _own_good(local, root, attempt, wanted)
    every = [set(places) for places in _told_by_all(sorted(good, reverse=True), group)]
    common = [place for place in set.intersection(*every) if place[0] > than[0] and place[1] >= than[1]]
    return good[max(common)] if common else None


def _told_by_all(places: list[Place], group: Any) -> list[list[Place]]:
    """Every rank's newest places."""
    kept = LOCAL_KEEP + 1  # one more than is kept: it is deleted after the next one is committed
    mine = torch.tensor([*places, *[NONE] * kept][:kept])
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    return [[(int(step), int(attempt)) for step, attempt in each if step >= 0] for each in every]


def restore_own(root: Path, result: Manifest, pieces: Pieces, *, group: Any) -> None:
    """Take over this rank's own checkpoint of its machine's disk; what all ranks have whole, only rank 0's has."""
    shard = next(shards_of(root, result))
    first = dist.get_rank() == 0
    own = {name: piece for name, piece in pieces.items() if (first or piece.divided) and piece.tensor.numel()}
    where = str(place_of(root, result.step, result.attempt))
    read_into(own, [[saved for saved in shard if not saved.name.startswith("rng.")]], where=where)
    for name in sorted(pieces):
        if not pieces[name].divided:
            dist.broadcast(pieces[name].tensor, src=0, group=group)
    set_generators(shard)
