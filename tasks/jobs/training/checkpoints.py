"""When training is saved, to which tier, what is done when saving is slow or fails, and what a later run goes on from.

Who writes is the engine's saver (engine.Saving). A save that is due while one is being written is left out and counted: storage
that is slow costs checkpoints, not steps and not memory. One that fails is told and counted; so many in a row end the run.
The interval is the plan's; where the plan chose it, it is corrected by what saving takes here (tasks/planning/checkpointing.py).
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tasks.common.errors import IntegrityError
from tasks.common.process import own_folder, read_json
from tasks.config.training import ExecutionConfig
from tasks.jobs.checkpoint.choice import choose, good_ones
from tasks.jobs.checkpoint.files import (
    Manifest,
    claim_attempt,
    create_only,
    manifests,
    place_of,
    quarantine,
    quarantined,
    read_manifest,
    shard_name,
    verify_file,
)
from tasks.jobs.checkpoint.mirrored import bring, lag_limit, neighbours, terms, wait_until_durable
from tasks.jobs.checkpoint.origins import take_over
from tasks.jobs.checkpoint.pieces import read_into, saved_in, shards_of
from tasks.jobs.checkpoint.retention import PIN, clean
from tasks.jobs.checkpoint.snapshot import Pieces, set_generators
from tasks.jobs.checkpoint.writer import LOCAL_KEEP
from tasks.jobs.node.runtime import Rank
from tasks.jobs.training.engine import Engine, Saving
from tasks.jobs.training.records import all_records, mend
from tasks.jobs.training.watch import all_agree
from tasks.planning.checkpointing import corrected_every_steps

# A checkpoint that verifies, and that starts die of nevertheless: after the second one it is quarantined.
#
# A start died of it when it had chosen it, recorded no step, and a rank's error says that it broke by itself: not a
# user's mistake, no memory, nor a neighbour that was gone. Kills and evictions leave no error, so they never count. The
# last good one stays in any case: then the rule of starts without progress ends the job (tasks/common/process.py). Only
# rank 0 decides. Standard library only.


FAILED = "failed-"
STARTS = 2
"""Of which a checkpoint is given up."""
NEIGHBOURS = ("closed by peer", "connection reset", "connection refused", "timed out", "timeout")
"""What a rank says that another one has left alone; in lower case."""


def give_up_what_starts_die_of(job: Path, root: Path) -> None:
    """Look at the newest start before this one; quarantine what it went on from when it is the second to die of it."""
    result = _newest_pin(root)
    if not result:
        return
    folder, pin, attempt = result
    if any(record.get("attempt") == attempt for record in all_records(job / "metrics.jsonl")):
        return
    if output := _own_error(job, since=pin.stat().st_mtime):
        create_only(folder / f"{FAILED}{attempt}", {"message": output})
    failed = sorted(folder.glob(f"{FAILED}*"))
    others = [path for path in manifests(root) if path.parent != folder and not quarantined(path.parent)]
    if len(failed) >= STARTS and others:
        reason = f"{len(failed)} starts died of {folder} before their first step, the last one of: {output}"
        print(f"quarantined: {reason}", file=sys.stderr, flush=True)
        quarantine(folder, reason)


def _newest_pin(root: Path) -> tuple[Path, Path, int] | None:
    """The checkpoint that the newest start before this one went on from, its mark, and that start's attempt."""
    pins = [(int(path.name.removeprefix(PIN)), path) for path in root.glob(f"step-*/attempt-*/{PIN}*")]
    if not pins:
        return None
    attempt, pin = max(pins)
    return (pin.parent, pin, attempt) if (pin.parent / "manifest.json").exists() else None


def _own_error(job: Path, *, since: float) -> str:
    """What a rank broke of after a time; empty: of nothing of its own."""
    for path in sorted((job / "errors").glob("rank-*.json")):
        payload: dict[str, Any] = read_json(path) or {}
        message = f"{payload.get('type')}: {payload.get('message')}"
        alone = not any(words in message.lower() for words in NEIGHBOURS)
        if path.stat().st_mtime >= since and payload.get("class") == "infrastructure" and alone:
            return message
    return ""


FAILURES_AT_MOST = 3
"""Saves that may fail in a row: then there is no checkpoint to go on from worth the name."""
POLL_SECONDS = 0.02
STORE, LOCAL = "store", "local"


class Saves:
    """State: the saver of this attempt, and what saving took and came to in this process."""

    def __init__(
        self, settings: Mapping[str, Any], *, steps: int, local_every: int | None, group: Any, mirrored: bool = False
    ) -> None:
        """`mirrored`: a checkpoint is saved once it is in the store, and how far that is behind is told with each step."""
        self.every, self.local_every, self.steps, self.group = (
            int(settings["checkpoint_every_steps"]),
            local_every,
            steps,
            group,
        )
        self._wanted = self.every
        """By this rank's clocks. Rank 0's counts, from when ranks next speak to each other."""
        self._written, self.last = 0.0, ""
        """Seconds that the store's last save took to be written; the tier of the last save."""
        self._mean_seconds: float | None = settings.get("seconds_between_failures")
        """Mean time between failures, where the interval is to be corrected."""
        self._stalls: list[float] = []
        self._began, self._first = time.monotonic(), 0
        self._mirrored, self._begun, self._durable = mirrored, (0, 0.0), (0, time.monotonic())
        """Step and time of the last snapshot for the store, and of the newest one that is there."""
        self.farthest_behind = 0.0
        self.stalled = 0.0
        """Seconds that training stood still for checkpoints; the wait for the last one after training is not among them."""
        self.saved = self.saved_locally = self.skipped = self.failed = self.failed_in_a_row = 0

    def open(self, saver: Saving, step: int) -> None:
        """A new attempt goes on from a step."""
        self.saver, self._began, self._first = saver, time.monotonic(), step
        self._begun = self._durable = (step, time.monotonic())

    def look(self) -> None:
        """Raises OSError when a newer attempt has taken this job over."""
        if not self.saver.busy() and not self.saver.failure:
            self._durable = self._begun

    def behind(self, step: int) -> dict[str, float]:
        """By how much the store is behind a step: what would be lost with all machines. Rank 0's is right."""
        if not self._mirrored:
            return {}
        self.look()
        seconds = time.monotonic() - self._durable[1]
        self.farthest_behind = max(self.farthest_behind, seconds)
        return {"store_behind_steps": step - self._durable[0], "store_behind_seconds": seconds}

    def due(self, step: int) -> str:
        """The tier that a step is saved to; empty: none."""
        if step % self.every == 0:
            return STORE
        return LOCAL if self.local_every and step % self.local_every == 0 else ""

    def room(self, *, wait: bool = False) -> bool:
        """Whether a save may begin: none is in flight on any rank. When it may not, one is left out and counted."""
        began = time.monotonic()
        free = self._settle(wait=wait)
        self.skipped += not free
        self.stalled += time.monotonic() - began
        return free

    def save(self, tier: str, *, step: int, consumed_samples: int) -> None:
        """Begin a save; ranks have agreed that there is room."""
        began, self.last = time.monotonic(), tier
        if tier == LOCAL:
            self.saver.save(step=step, consumed_samples=consumed_samples, local=True)
            self.saved_locally += 1
        else:
            self.saver.save(step=step, consumed_samples=consumed_samples)
            self._begun = (step, began)
            self.saved += 1
        self._stalls.append(time.monotonic() - began)
        self.stalled += self._stalls[-1]
        # Rank 0's clocks decide; the last save that was written says how long that takes.
        if self._mean_seconds is None or not self._written or step == self._first:
            return
        wanted = corrected_every_steps(
            self.steps,
            (time.monotonic() - self._began) / (step - self._first),
            stall_seconds=max(self._stalls[-1], 1e-6),
            write_seconds=self._written,
            mean_seconds_between_failures=self._mean_seconds,
        )
        self._wanted = wanted

    def close(self) -> None:
        """Wait for the last save of an attempt, then end its writer."""
        self._settle(wait=True)
        self.saver.close()

    def say(self) -> None:
        """Of a run that ends early: its last save did not come to be."""
        if self.failed_in_a_row:
            print("the last save failed: the next start continues from the one before", file=sys.stderr, flush=True)

    def _settle(self, *, wait: bool) -> bool:
        """Learn from all ranks whether the last save is over, and whether it failed anywhere; whether nothing is in flight."""
        while True:
            busy, failed = self._all(int(self.saver.busy()), int(bool(self.saver.failure)))
            if failed:
                self.saver.abandon()  # ranks that wait for the one that failed wait for nothing
                self.saver.failure, why = "", self.saver.failure
                self.failed += 1
                self._begun = self._durable
                self.failed_in_a_row += self.last == STORE  # without the local tier training goes on
                if self.failed_in_a_row >= FAILURES_AT_MOST:
                    reasons = [""] * dist.get_world_size(self.group)
                    dist.all_gather_object(reasons, why, group=self.group)  # whichever rank reports first knows why
                    reason = next(filter(None, reasons), "no rank says why")
                    raise OSError(errno.EIO, f"{FAILURES_AT_MOST} checkpoints in a row failed: {reason}")
                return True
            if not busy:
                if self.last == STORE:
                    self.failed_in_a_row, self._written = 0, self.saver.seconds
                return True
            if not wait:
                return False
            time.sleep(POLL_SECONDS)

    def _all(self, *numbers: int) -> list[int]:
        """The largest of every rank's numbers; the interval is rank 0's."""
        own = self._wanted if dist.get_rank() == 0 else 0
        word = torch.tensor([own, *numbers])
        dist.all_reduce(word, op=dist.ReduceOp.MAX, group=self.group)
        self.every, *largest = (int(number) for number in word)
        return largest

    def told(self) -> dict[str, Any]:
        """What the result of the job says of it."""
        return {
            "checkpoint_stall_seconds": self.stalled,
            "checkpoints": self.saved,
            "checkpoints_local": self.saved_locally,
            "checkpoints_skipped": self.skipped,
            "checkpoints_failed": self.failed,
            "checkpoint_every_steps": self.every,
            **({"store_behind_seconds": self.farthest_behind} if self._mirrored else {}),
        }


# What a run goes on from: the newest good checkpoint of two tiers, agreed on by all ranks, as a new attempt.
#
#     JOB/checkpoints/...                                        the store: rank 0 chooses, all read what they need of
# all shards     DISK/headway-checkpoints-JOB/RANKS/rank-K/checkpoints      the machine's own disk: rank K's own shard,
# a checkpoint by itself
#
# One of the second tier counts when every rank has it, of the same step and attempt, whole. What is verified, and how:
# tasks/jobs/checkpoint/choice.py. See docs/training.md, "Checkpoints".


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
    own: Path | None = None
    """Where each rank takes its own shard from and no other, of which `manifest` alone tells; None: it reads what it needs."""


def local_root(rank: Rank, execution: ExecutionConfig) -> Path | None:
    """This rank's folder on its machine's own disk; its name has how many ranks there are and how they divide the network."""
    if execution.local_every_steps is None:
        return None
    disk = Path(os.environ.get("HEADWAY_SCRATCH") or tempfile.gettempdir())
    job = hashlib.sha256(str(rank.folder.absolute()).encode()).hexdigest()[:16]
    ranks = f"{rank.world_size}-{execution.parallel}-{execution.tensor_parallel}"
    folder = own_folder(disk / f"headway-checkpoints-{job}", remedy="leave execution.local_every_steps empty")
    return folder / ranks / f"rank-{rank.rank}" / "checkpoints"


def agree(
    rank: Rank, root: Path, local: Path | None, wanted: Mapping[str, Any], group: Any, *, engine: Engine
) -> Found:
    """Rank 0 claims an attempt and chooses of the store; then all look whether their own disks have a newer one."""
    attempt = 0
    if rank.rank == 0:
        mend(rank.folder / "metrics.jsonl")
        attempt = claim_attempt(root, rank.attempt)
        clean(root, attempt)
        give_up_what_starts_die_of(rank.folder, root)
    while True:
        word, manifest = torch.tensor([attempt, *NONE]), None
        if rank.rank == 0:
            manifest = choose(root, wanted, attempt=attempt) or take_over(rank.settings, root, wanted, attempt=attempt)
            word = torch.tensor([attempt, *((manifest.step, manifest.attempt) if manifest else NONE)])
        dist.broadcast(word, src=0, group=group)
        attempt, step, of_attempt = (int(number) for number in word)
        if local is not None and (own := _newer(local, root, attempt, wanted, than=(step, of_attempt), group=group)):
            return Found(attempt, own, own=local)
        if step < 0 or terms(root) is None:
            if step >= 0 and not manifest:
                manifest = read_manifest(place_of(root, step, of_attempt) / "manifest.json")
            return Found(attempt, manifest)
        whole = _from_rank_0(manifest, root, group)
        alone, bad = _brought(rank, root, whole, engine, group)
        if not bad:
            shard = [entry for entry in whole.files if entry["path"] == shard_name(rank.rank)]
            return Found(attempt, replace(whole, files=shard), own=root) if alone and shard else Found(attempt, whole)
        if rank.rank == 0:
            print(f"quarantined: {bad}", file=sys.stderr, flush=True)
            quarantine(place_of(root, step, of_attempt), bad)


# Where the job's folder is mirrored, a machine has the files of its own ranks; after a start elsewhere, none. Each rank has
# come from the store what it reads: its own files, and others' only where the network is divided in another way than before.
# One that is bad in the store is quarantined by rank 0, and the next one is tried.


def _from_rank_0(manifest: Manifest | None, root: Path, group: Any) -> Manifest:
    """What rank 0 chose, once the store has it whole: then the other machines can read of it."""
    if manifest and (limit := lag_limit(root)):
        wait_until_durable(root, manifest.step, manifest.attempt, limit)
    value = [asdict(manifest) if manifest else None]
    dist.broadcast_object_list(value, src=0, group=group)
    assert value[0]
    return manifest or Manifest(**value[0])


def _brought(rank: Rank, root: Path, result: Manifest, engine: Engine, group: Any) -> tuple[bool, str]:
    """Whether every rank's own files are all it needs, and why the checkpoint is bad, where it is. What it needs is here."""
    mine = engine.own_files(result) if result.world_size == rank.world_size else []
    shards = [entry for entry in mine if entry["path"] == shard_name(rank.rank)]
    divided_alike, why = False, ""
    if mine:
        why = _fetched(rank, root, result, mine, mine)
        divided_alike = not why and all(_is_all(engine, root, result, shard, first=rank.rank == 0) for shard in shards)
    if all_agree(divided_alike, group):
        return True, ""
    if not (bad := _any(why, group)):
        ranks = neighbours(root, rank.rank, rank.world_size)
        share = result.files[ranks.index(rank.rank) :: len(ranks)]
        bad = _any(_fetched(rank, root, result, result.files, share), group)
    return False, bad


def _fetched(
    rank: Rank, root: Path, result: Manifest, files: Sequence[dict[str, Any]], verified: Sequence[dict[str, Any]]
) -> str:
    """Have files of a checkpoint come and verify some of them; why one is bad, empty when none is."""
    folder = place_of(root, result.step, result.attempt)
    try:
        bring(root, rank.rank, [folder / entry["path"] for entry in files])
        for entry in verified:
            verify_file(folder / entry["path"], entry)
    except IntegrityError as error:
        return str(error)
    return ""


def _is_all(engine: Engine, root: Path, result: Manifest, entry: Mapping[str, Any], *, first: bool) -> bool:
    """Whether this rank's own shard has the parts of tensors that it has now, those of the whole ones at rank 0."""
    shard = saved_in(place_of(root, result.step, result.attempt) / entry["path"], entry)
    saved = {piece.name: piece.box for piece in shard if not piece.name.startswith("rng.")}
    pieces = {name: piece for name, piece in engine.pieces().items() if first or piece.divided}
    return saved == {
        name: (piece.offset, tuple(piece.tensor.shape)) for name, piece in pieces.items() if piece.tensor.numel()
    }


def _any(why: str, group: Any) -> str:
    """The first rank's reason that is one."""
    every: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, why, group=group)
    return next((reason for reason in every if reason), "")


def forget(local: Path | None) -> None:
    """Delete what this rank has on its machine's disk: the run is over, and the store has its last checkpoint."""
    if local is None:
        return
    shutil.rmtree(local.parent, ignore_errors=True)
    for folder in local.parents[1:3]:
        with suppress(OSError):  # another rank's is still there
            folder.rmdir()


def _newer(
    local: Path, root: Path, attempt: int, wanted: Mapping[str, Any], *, than: Place, group: Any
) -> Manifest | None:
    """The newest that is good on every rank's disk, when it is newer than the store's and not of an attempt before that."""
    # The good ones of this machine's disk, of attempts that the store knows: without them somebody began anew.
    try:
        create_only(local / "attempts" / str(attempt), {})
        clean(local, attempt)
        good = good_ones(local, wanted)
    except OSError as error:
        print(f"checkpoints on this machine's own disk cannot be used: {error}", file=sys.stderr, flush=True)
        good = {}
    else:
        good = {place: one for place, one in good.items() if (root / "attempts" / str(place[1])).exists()}
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
