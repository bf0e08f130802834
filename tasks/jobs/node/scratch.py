"""A fast disk of each machine for a job's inputs: copied there before ranks start, deleted when the job is over.

A folder there belongs to the parent of the machine's agent, through all attempts; its name says which process that is, so
that what a killed job left is deleted by the next one (`python -m tasks.jobs.node.scratch FOLDER RANK` at the parent's end, and
every `stage`). Ranks see the copies as their inputs (HEADWAY_INPUTS, runtime.py). With BeeOND, which Slurm's script mounts,
the leader copies once for all. See docs/machines.md.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.common.process import boot_id, process_started, read_json

GIB = 1024**3
COPIES = 8
"""Files that are copied at a time."""
SAY_SECONDS = 10.0
POLL_SECONDS = 0.2
COPIED = ".copied"
OWNED = re.compile(r"headway-.+\.(?P<pid>\d+)\.(?P<started>[^.]+)\.(?P<boot>[^.]+)\.(?P<namespace>\d+)")


class Refused(Exception):
    """The inputs cannot be copied; `report` is what the job's errors say."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message)
        self.report = {"type": "ScratchError", "message": message, "remedy": remedy, "class": "missing"}


@dataclass(frozen=True)
class Copy:
    """One file."""

    source: Path
    target: Path
    size: int


def stage(job: dict[str, Any], folder: Path, *, rank: int, meanwhile: Callable[[], bool]) -> dict[str, str]:
    """Copy the job's inputs to the machine's disk; what ranks get in their environment.

    `meanwhile` is called again and again; when it is False, the copying ends. Raises Refused when there is too little room. Where
    `scratch.required` is false, nothing is copied then.
    """
    if not job["scratch"]:
        return {}
    try:
        return _staged(job, rank=rank, meanwhile=meanwhile)
    except Refused as refused:
        if job["scratch"].get("required", True) or not meanwhile():
            raise
        print(f"{refused}; the job reads its inputs where they are", flush=True)
        shutil.rmtree(place_of(job, rank), ignore_errors=True)
        return {}


def _staged(job: dict[str, Any], *, rank: int, meanwhile: Callable[[], bool]) -> dict[str, str]:
    place = place_of(job, rank)
    if not shared(job):
        sweep(Path(job["scratch"]["path"]))
    if not (place / COPIED).exists():
        if shared(job) and rank != 0:
            mark = place / COPIED
            while not mark.exists():
                if not meanwhile():
                    raise Refused("scratch: it was stopped while the leader copied the inputs", "")
                time.sleep(POLL_SECONDS)
        else:
            _copy_all(job, place, meanwhile)
    return {
        "HEADWAY_INPUTS": json.dumps({name: str(place / name) for name in job["inputs"]}),
        "HEADWAY_SCRATCH": str(place),
    }


def shared(job: dict[str, Any]) -> bool:
    """Whether the machines' disks are one file system (BeeOND)."""
    return bool(job["scratch"]["beeond"])


def place_of(job: dict[str, Any], rank: int) -> Path:
    """The job's folder on the disk. Its name has its owner: process id, start, boot, and the namespace of the ids."""
    root = Path(job["scratch"]["path"])
    if shared(job):
        return root / "beeond" / f"headway-{job['name']}-{job['token'][:12]}"
    parent = os.getppid()
    owner = f"{parent}.{process_started(parent)}.{boot_id()}.{_pid_namespace()}"
    return root / f"headway-{job['name']}-{job['token'][:12]}-{rank}.{owner}"


def sweep(root: Path) -> list[Path]:
    """Delete the folders of jobs that are gone; returns them. Owners that this process cannot see are left alone."""
    gone = [path for path in root.glob("headway-*") if _is_dead(path.name)]
    for path in gone:
        print(f"scratch: {path} of a job that is gone is deleted", flush=True)
        shutil.rmtree(path, ignore_errors=True)
    return gone


def _is_dead(name: str) -> bool:
    owner = OWNED.fullmatch(name)
    if owner is None:
        return False
    if owner["boot"] != boot_id():
        return True
    return owner["namespace"] == _pid_namespace() and process_started(int(owner["pid"])) != owner["started"]


def _pid_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").stat().st_ino)
    except OSError:
        return "0"


def _copy_all(job: dict[str, Any], place: Path, meanwhile: Callable[[], bool]) -> None:
    copies = [copy for name, source in job["inputs"].items() for copy in _files(Path(source), place / name)]
    total = sum(copy.size for copy in copies)
    _check_room(job, total)
    began = time.monotonic()
    try:
        place.mkdir(parents=True, exist_ok=True)
        now = time.monotonic()
        with ThreadPoolExecutor(COPIES) as pool:
            under_way: set[Future[None]] = {pool.submit(_copy, copy) for copy in copies}
            while under_way:
                ended, under_way = wait_for(under_way, timeout=POLL_SECONDS)
                failed = next((future for future in ended if future.exception()), None)
                if failed or not meanwhile():
                    pool.shutdown(cancel_futures=True)
                    if failed:
                        failed.result()
                    raise OSError("it was stopped")
                if time.monotonic() - now > SAY_SECONDS:
                    now = time.monotonic()
                    done = sum(copy.target.stat().st_size for copy in copies if copy.target.exists())
                    print(f"scratch: {done / GIB:.2f} of {total / GIB:.2f} GiB are in {place}", flush=True)
    except OSError as error:
        shutil.rmtree(place, ignore_errors=True)
        free = shutil.disk_usage(job["scratch"]["path"]).free
        needed = f"{total / GIB:.2f} GiB were needed in {job['scratch']['path']}, {free / GIB:.2f} GiB are free"
        raise Refused(f"scratch: {error.strerror or error}; {needed}", _remedy(job)) from error
    for copy in copies:
        if copy.target.stat().st_size != copy.size:
            raise Refused(
                f"scratch: {copy.target} has not the size of {copy.source}", "Check the disk, and start again."
            )
    (place / COPIED).write_text(str(total))
    seconds = time.monotonic() - began
    print(f"scratch: {len(copies)} files, {total / GIB:.2f} GiB, are in {place} after {seconds:.1f} s", flush=True)


def _copy(copy: Copy) -> None:
    copy.target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(copy.source, copy.target)


def _files(source: Path, target: Path) -> Iterator[Copy]:
    for base, _, names in os.walk(source):
        for name in sorted(names):
            file = Path(base) / name
            yield Copy(file, target / file.relative_to(source), file.stat().st_size)


def _check_room(job: dict[str, Any], total: int) -> None:
    root, wanted = Path(job["scratch"]["path"]), float(job["scratch"]["size_gib"])
    where = root / "beeond" if shared(job) else root
    if not where.is_dir():
        raise Refused(
            f"scratch: there is no folder {where} on this machine",
            "Set cluster.scratch.path to the machine's own disk.",
        )
    if total > wanted * GIB:
        asked = f"the inputs have {total / GIB:.2f} GiB, scratch.size_gib is {wanted:g}"
        raise Refused(f"scratch: {asked}", f"Set cluster.scratch.size_gib to {total / GIB * 1.1:.1f} or more.")
    free = shutil.disk_usage(where).free
    if free < wanted * GIB:
        raise Refused(f"scratch: {where} has {free / GIB:.2f} GiB free, the job needs {wanted:g} GiB", _remedy(job))


def _remedy(job: dict[str, Any]) -> str:
    return f"Free space in {job['scratch']['path']}, or set cluster.scratch to another disk."


def main(folder: Path, rank: int) -> None:
    """What the parent runs when the job is over on this machine: its folder, and those of jobs that are gone, are deleted."""
    job = read_json(folder / "job.json")
    if job and job["scratch"] and not shared(job):
        shutil.rmtree(place_of(job, rank), ignore_errors=True)
        sweep(Path(job["scratch"]["path"]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
