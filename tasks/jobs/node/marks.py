"""What one machine of a job tells the others, and what it sees of them, in the job folder that all share.

`attempt.json` is the leader's word of the attempt and where ranks meet; `nodes/K/node.json` says where a machine is;
`nodes/K/beat` changes while it lives; `errors/node-NAME.json` says what went wrong with it. Who acts on them is __main__.py.

The folder may lie on NFS. A reader there may see an old entry of a directory for as long as a minute, so a beat is written in
place, which a client checks at every open, and silence is longer than a cache. Clocks are never compared between machines:
silence is by this machine's own clock, since the last change that it saw.
"""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from tasks.common.process import read_json, write_json

BEAT_SECONDS = 5.0


class Marks:
    """The folder as one machine of one submission uses it. State: when it gave its last beat, and the others' last ones."""

    def __init__(self, folder: Path, job: dict[str, Any], *, rank: int, name: str, submission: int) -> None:
        self.folder = folder
        self.rank = rank
        self.name = name
        self.submission = submission
        self.place = folder / "nodes" / str(rank)
        self.elastic = bool(job["elastic"])
        self.silent_seconds = float(job["watch"]["silent_node_seconds"])
        self.join_seconds = float(job["watch"]["join_node_seconds"])
        self._beaten = float("-inf")
        self._judged = float("-inf")
        self._seen: dict[int, tuple[dict[str, Any] | None, float]] = {}

    def beat(self) -> None:
        """Say that this machine lives; costs nothing when that was said just now."""
        now = time.monotonic()
        if now - self._beaten < min(BEAT_SECONDS, self.silent_seconds / 6):
            return
        self.place.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.place / "beat", os.O_WRONLY | os.O_CREAT, 0o600)
        os.pwrite(
            descriptor, json.dumps({"submission": f"{self.submission:04d}", "time": f"{time.time():.6f}"}).encode(), 0
        )
        os.close(descriptor)
        self._beaten = now

    def mark(self, attempt: int, *, code: int | None) -> None:
        """Say where this machine is; `code` is of its launcher in the attempt, None while that runs."""
        me = {"rank": self.rank, "name": self.name, "host": socket.gethostname(), "pid": os.getpid()}
        state = {"attempt": attempt, "submission": self.submission, "code": code, "time": time.time()}
        write_json(self.place / "node.json", {**me, **state})

    def open_attempt(self, attempt: int, *, address: str, port: int) -> None:
        """The leader's word to the others."""
        meeting = {"attempt": attempt, "address": address, "port": port, "submission": self.submission}
        write_json(self.folder / "attempt.json", meeting)

    def attempt(self) -> dict[str, Any] | None:
        """The leader's newest attempt of this submission."""
        return self._of_this_submission(self.folder / "attempt.json")

    def of(self, rank: int) -> dict[str, Any] | None:
        """Where a machine says it is, in this submission."""
        return self._of_this_submission(self.folder / "nodes" / str(rank) / "node.json")

    def failed(self, ranks: list[int], attempt: int) -> list[int]:
        """Machines whose launcher failed in an attempt."""
        output = {rank: self.of(rank) for rank in ranks}
        return [
            rank
            for rank, mark in output.items()
            if mark and mark["attempt"] == attempt and mark["code"] not in (None, 0)
        ]

    def silent(self, ranks: list[int]) -> list[int]:
        """Machines that gave no new sign of life for too long; one that never gave any has longer."""
        now, result = time.monotonic(), []
        if now - self._judged > max(self.silent_seconds / 3, 3.0):  # this machine, or the folder, stood still itself
            self._seen.clear()
        self._judged = now
        for rank in ranks:
            beat = self._beat_of(rank)
            before, since = self._seen.get(rank, (None, now))
            if rank not in self._seen or beat != before:
                self._seen[rank] = (beat, now)
            elif now - since > (self.join_seconds if beat is None else self.silent_seconds):
                result.append(rank)
        return result

    def rendezvous(self) -> dict[str, Any] | None:
        """Where the machines of an elastic job meet."""
        return self._of_this_submission(self.folder / "rendezvous" / "rendezvous.json")

    def leader_ended(self) -> bool:
        """Whether the leader's parent, or of an elastic job that of the rendezvous store, said how the submission ended."""
        if self.elastic:
            return (self.folder / "rendezvous" / "exit.json").exists()
        output = read_json(self.folder / "nodes" / "0" / "exit.json") or {}
        return self.rank != 0 and str(output.get("owner", "")).endswith(f"-{self.submission}")

    def fenced(self) -> bool:
        """Whether the folder belongs to another submission by now, or is gone."""
        output = read_json(self.folder / "job.json")
        return output is None or int(output["submission"]) != self.submission

    def report(self, name: str, report: dict[str, Any], *, known: bool = True) -> None:
        """Say what went wrong with a machine; `known` is whether it is the scheduler's name, by which it can be excluded."""
        (self.folder / "errors").mkdir(exist_ok=True)
        path = self.folder / "errors" / f"node-{name.replace('/', '-')}.json"
        write_json(path, {"remedy": "", "class": "node", **report, "nodes": [name] if known else []})

    def report_lost(self, rank: int, attempt: int) -> str:
        """Say that a machine went silent, or never came; what was said."""
        mark = self.of(rank)
        came = mark is not None or self._beat_of(rank) is not None
        name = str(mark["name"]) if mark else f"rank-{rank}"
        silent = f"machine {name} gave no sign of life for {self.silent_seconds:g} s"
        never = f"the machine of node rank {rank} did not come within {self.join_seconds:g} s"
        message = silent if came else never
        lost = {"type": "NodeLost" if came else "NodeMissing", "message": message, "attempt": attempt}
        self.report(name, lost, known=mark is not None)
        return message

    def _beat_of(self, rank: int) -> dict[str, Any] | None:
        try:
            output: dict[str, Any] = json.loads((self.folder / "nodes" / str(rank) / "beat").read_bytes())
        except (OSError, ValueError):
            return None
        return output if int(output["submission"]) == self.submission else None

    def _of_this_submission(self, path: Path) -> dict[str, Any] | None:
        output: dict[str, Any] | None = read_json(path)
        return output if output and output.get("submission") == self.submission else None
