"""What training needs so that machines may come and go: a request to stop that saves first, a proof of the order, the standstill.

A rank that is asked to stop (SIGTERM: its machine goes, or another one joins) tells the others in the next step's collective; all
save after that step and end. Who starts them again is torchrun (launching.py); what they go on from is
tasks/jobs/checkpoint/snapshot.py. See docs/elastic.md.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
import zlib
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tasks.jobs.data.samples import Batch

SAVED_AND_STOPPED = 75
"""Exit code of a rank that saved because it, or another one, was asked to stop (EX_TEMPFAIL of sysexits.h)."""
START_TIMEOUT = timedelta(seconds=180)
"""Longest wait for the other ranks of a start: one whose machine went meanwhile never comes."""
STEP_TIMEOUT = timedelta(seconds=60)
"""Longest wait of one collective of a step: a machine that vanished without closing its connections is noticed after it."""
PATIENT_TIMEOUT = timedelta(minutes=30)
"""Longest wait while rank 0 verifies checkpoints."""
WATCHED = ("rendezvous_seconds", "start_seconds", "world_size")


class Asked:
    """Whether this process was asked to stop; while training runs, SIGTERM sets it and ends nothing."""

    def __init__(self) -> None:
        self.here = False

    def listen(self) -> None:
        signal.signal(signal.SIGTERM, self._note)

    def ignore(self) -> None:
        """Training is over: asking ends the process again."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _note(self, *_: object) -> None:
        self.here = True


class Groups:
    """Who waits how long for whom; all ranks are in each group. Of a job of fixed size both are the default group."""

    def __init__(self, *, elastic: bool) -> None:
        self.steps = dist.new_group(timeout=STEP_TIMEOUT) if elastic else None
        self.patient = dist.new_group(timeout=PATIENT_TIMEOUT) if elastic else None


def fingerprint(batches: Iterable[Batch]) -> float:
    """A sum over samples of the CRC-32 of their tokens, without padding: of a global batch the same however ranks divide it.

    Exact in float64 for up to 2^21 samples: each is below 2^32, and integers below 2^53 are exact.
    """
    rows = (row for batch in batches for row in zip(batch.inputs, batch.targets, strict=True))
    ends = ((inputs, int((targets >= 0).nonzero()[-1]) + 1) for inputs, targets in rows)
    return float(sum(zlib.crc32(inputs[:end].contiguous().numpy().tobytes()) for inputs, end in ends))


def newcomers_seed(seed: int, step: int, rank: int) -> int:
    """Seed of the generator of a rank that the checkpoint of a step does not have: the same whenever it is asked."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{step}/{rank}".encode()).digest()[:8])


def standstill(log: Path) -> dict[str, float]:
    """How long training stood still before this process, by the last step in `metrics.jsonl`; empty where there is none.

    `rendezvous_seconds`: from the last step until this process was started: the loss was noticed, ranks were stopped, and those
    that are there met. `start_seconds`: since then. Both by this machine's clock and that of the rank 0 before.
    """
    lines = log.read_bytes().splitlines() if log.exists() else []
    if not lines:
        return {}
    since_last, age = time.time() - float(json.loads(lines[-1])["time"]), process_age()
    return {"rendezvous_seconds": max(since_last - age, 0.0), "start_seconds": age}


def process_age() -> float:
    """Seconds since this process was started (Linux: field 22 of /proc/self/stat, in clock ticks since the boot)."""
    try:
        started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


def changes(log: Path) -> list[dict[str, Any]]:
    """The first step after each standstill, from `metrics.jsonl`: its step, the ranks since then, and how long it took."""
    records = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    return [{"step": r["step"], **{key: r[key] for key in WATCHED}} for r in records if "rendezvous_seconds" in r]
