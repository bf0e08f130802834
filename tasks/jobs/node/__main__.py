"""One attempt of a job on one machine: start its ranks, watch over them, and say how it ended.

Every backend runs `python -m tasks.jobs.node FOLDER` once a machine, under the small parent of tasks/common/process.py, which
starts the next attempt. The machine of node rank 0 leads: it opens an attempt and says where ranks meet; the others follow it.
What starts the ranks is launching.py; health checks while they run are probes.py;
inputs on a fast local disk are scratch.py; what a rank may use is launching.py too; whether a machine may join an elastic job is
admission.py.

Environment, set by the backend: HEADWAY_NODE_RANK (0 leads), HEADWAY_NODE_NAME (as the scheduler calls the machine),
HEADWAY_LEADER (the address under which the others reach node rank 0), HEADWAY_SUBMISSION (whose machine this is). Of an elastic
job no machine leads: all meet where rendezvous.json says (rendezvous.py). See docs/machines.md.

What one machine of a job tells the others, and what it sees of them, in the job folder that all share.

`attempt.json` is the leader's word of the attempt and where ranks meet; `nodes/K/node.json` says where a machine is;
`nodes/K/beat` changes while it lives; `errors/node-NAME.json` says what went wrong with it.

The folder may lie on NFS. A reader there may see an old entry of a directory for as long as a minute, so a beat is written in
place, which a client checks at every open, and silence is longer than a cache. Clocks are never compared between machines:
silence is by this machine's own clock, since the last change that it saw.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tasks.common.process import GIVEN_UP, die_with_parent, read_json, write_json
from tasks.jobs.node import admission, launching, scratch
from tasks.jobs.node.launching import (
    Place,
    adopt_orphans,
    compile_cache,
    end_all_below,
    end_leftovers,
    environment,
    free_port,
    launcher,
)
from tasks.jobs.node.probes import Probes

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


POLL_SECONDS = 0.1
LOOK_SECONDS = 0.5
"""Between two looks at the shared folder: a hundred machines must not be a load for it."""
AGAIN = 75
"""Exit code: this machine's part ended well, but the leader opened another attempt."""


class Node:
    """This machine's part of an attempt. State: the attempt, what was seen, and whether somebody asked to stop."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.job: dict[str, Any] = read_json(folder / "job.json")
        self.rank = int(os.environ.get("HEADWAY_NODE_RANK", "0"))
        self.name = os.environ.get("HEADWAY_NODE_NAME") or socket.gethostname()
        self.elastic = bool(self.job["elastic"])
        submission = int(os.environ.get("HEADWAY_SUBMISSION") or self.job["submission"])
        self.marks = Marks(folder, self.job, rank=self.rank, name=self.name, submission=submission)
        self.probes = Probes(self.marks.place, self.job, name=self.name, submission=submission)
        self.grace = float(self.job["watch"]["grace_seconds"])
        self.stopping = False
        self.refused = False
        self.gone = False
        self.looked = 0.0
        self.attempt = 0

    def run(self) -> int:
        """One attempt; the launcher's exit code, or GIVEN_UP or AGAIN for the parent."""
        signal.signal(signal.SIGTERM, self._ask_to_stop)
        adopt_orphans()
        if self.marks.fenced():
            return self._give_up("another submission has the job folder")
        end_leftovers(self.folder, self.rank)
        for line in launching.forget_missing_topology(self.job):
            print(f"{self.name}: {line}", flush=True)
        meeting = self._join() if self.elastic else self._lead() if self.rank == 0 else self._follow()
        if meeting is None:
            return self._without_leader()
        self.attempt = int(meeting["attempt"])
        self.marks.mark(self.attempt, code=None)
        place = Place(self.rank, str(meeting["address"]), int(meeting["port"]), self.attempt, meeting.get("opening", 0))
        code = self._part_of(place)
        if code == 0 and not self.job["module"] and (self.rank == 0 or self.elastic):
            code = self._result_of_the_users_own()
        self.marks.mark(self.attempt, code=code)
        return self._until_all_ended() if code == 0 and self._others() == [0] else code

    def _part_of(self, place: Place) -> int:
        """This machine's ranks from start to end; mpirun on the leader starts those of all machines."""
        if self.rank != 0 and self.job["launcher"] == "mpi":
            self.probes.start()
            return 0
        try:
            ours = {**launching.granted(self.job), **compile_cache(self.job), **self._stage_inputs()}
        except (launching.Refused, scratch.Refused) as refused:
            self._report(refused.report)
            return 1
        child = self._start(place, ours)
        self.probes.start()
        code = self._attend(child)
        end_all_below(os.getpid())
        # mpirun's ranks on a machine that is broken are killed by nobody there: it says that it failed.
        elsewhere = self.job["launcher"] == "mpi" and self.marks.failed(self._others(), self.attempt)
        if (self.probes.found or elsewhere) and code != GIVEN_UP:
            # It may have been written a moment before they were killed.
            (self.folder / "result.json").unlink(missing_ok=True)
            code = code or 1
        if code not in (0, GIVEN_UP) and not self.stopping:
            self.probes.look_once_more(self.marks.beat)
            fault = self.probes.found or launching.out_of_memory(self.folder, self.probes.killed)
            if fault:
                self._report(fault)
        return code

    def _result_of_the_users_own(self) -> int:
        """A program that knows nothing of results has one when the ranks of all machines ended well, sooner or later."""
        why = ""
        while not self.stopping and not (why := self._doom()):
            marks = [self.marks.of(rank) or {} for rank in self._others()]
            if all(mark.get("attempt") == self.attempt and mark.get("code") == 0 for mark in marks):
                if not (self.folder / "result.json").exists():
                    write_json(self.folder / "result.json", {"exit_code": 0})
                return 0
            self.marks.beat()
            time.sleep(LOOK_SECONDS)
        print(f"{self.name}: ended well, the job did not: {why or 'it was stopped'}", flush=True)
        return 1

    def _lead(self) -> dict[str, Any]:
        """Open an attempt: its number, and where ranks meet."""
        attempt = int(os.environ.get("HEADWAY_ATTEMPT", "1"))
        alone = int(self.job["nodes"]) == 1
        address = "127.0.0.1" if alone else os.environ.get("HEADWAY_LEADER") or "127.0.0.1"
        port = free_port()
        self.marks.open_attempt(attempt, address=address, port=port)
        return {"attempt": attempt, "address": address, "port": port}

    def _join(self) -> dict[str, Any] | None:
        """Where the machines of an elastic job meet; None where this one may not join them, or they do not meet any more."""
        try:
            sound = admission.admitted(self.job, self.folder, name=self.name, meanwhile=self._is_wanted)
        except admission.Refused as refused:
            self._report(refused.report)
            self.refused = True
            return None
        return self._meet() if sound else None

    def _is_wanted(self) -> bool:
        """Whether the job still waits for this machine, which says that it lives."""
        self.marks.beat()
        if time.monotonic() - self.looked > LOOK_SECONDS:
            self.looked = time.monotonic()
            self.gone = self.marks.leader_ended() or self.marks.fenced()
        return not (self.stopping or self.gone)

    def _meet(self) -> dict[str, Any] | None:
        """Where the machines of an elastic job meet; None when the job ended or nobody holds the store."""
        deadline = time.monotonic() + self.marks.join_seconds
        while not self.stopping and not self.marks.leader_ended() and time.monotonic() < deadline:
            self.marks.beat()
            if where := self.marks.rendezvous():
                attempt = int(os.environ.get("HEADWAY_ATTEMPT", "1"))
                return {
                    "attempt": attempt,
                    "address": where["host"],
                    "port": where["port"],
                    "opening": where["opening"],
                }
            time.sleep(LOOK_SECONDS)
        return None

    def _follow(self) -> dict[str, Any] | None:
        """The leader's next attempt; None when it ended or is silent, or when this machine was asked to stop."""
        mine = self.marks.of(self.rank)
        last = int(mine["attempt"]) if mine else 0
        if mine and mine["code"] is None:  # its agent died in the middle: the leader must not wait for these ranks
            self.marks.mark(last, code=1)
        return self._await_attempt_after(last)

    def _await_attempt_after(self, last: int) -> dict[str, Any] | None:
        while not self.stopping:
            self.marks.beat()
            output = self.marks.attempt()
            if output and int(output["attempt"]) > last:
                return output
            if self.marks.leader_ended() or self.marks.fenced() or self.marks.silent([0]) or self.probes.found:
                return None
            time.sleep(LOOK_SECONDS)
        return None

    def _until_all_ended(self) -> int:
        """Wait, alive and watched, until the leader ended too; it may need this machine again."""
        if self._await_attempt_after(self.attempt):
            return AGAIN
        if self.probes.found and not self.stopping:
            self._report(self.probes.found)
            self.marks.mark(self.attempt, code=1)
            return 1
        return self._without_leader()

    def _without_leader(self) -> int:
        if self.marks.leader_ended():
            return 0
        if self.stopping:
            return 1
        if self.marks.fenced():
            return self._give_up("another submission has the job folder")
        if self.refused:
            return self._give_up("it did not qualify")
        if self.elastic:
            return self._give_up("nobody holds the rendezvous store")
        return self._give_up(self.marks.report_lost(0, self.attempt))

    def _start(self, place: Place, ours: dict[str, str]) -> subprocess.Popen[bytes]:
        alone = int(self.job["nodes"]) == 1 and not self.elastic

        def confined() -> None:
            die_with_parent()
            launching.confine(self.job)

        with open((self.folder if alone else self.marks.place) / "launcher.log", "ab") as log:
            return subprocess.Popen(
                launcher(self.job, place),
                env={**os.environ, **environment(self.job, self.folder, place), **ours},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=confined,
            )

    def _attend(self, child: subprocess.Popen[bytes]) -> int:
        """Wait for the launcher's end, or end it: when asked to stop, when another machine failed or is silent, and at once
        when this one is broken."""
        doomed: float | None = None
        while child.poll() is None:
            time.sleep(POLL_SECONDS)
            self.marks.beat()
            if self.probes.found:
                # What a broken machine computes may be wrong, and so may the checkpoint that SIGTERM asks for.
                child.kill()
                child.wait()
                return 1
            if self.stopping or (doomed is not None and time.monotonic() > doomed):
                return self._end(child) or 1
            if time.monotonic() - self.looked < LOOK_SECONDS:
                continue
            self.looked = time.monotonic()
            if self.marks.fenced():
                self._end(child)
                return self._give_up("another submission has the job folder")
            if doomed is None and (why := self._doom()):
                print(f"attempt {self.attempt} ends on {self.name}: {why}", flush=True)
                doomed = time.monotonic() + self.grace
        return 1 if child.returncode == GIVEN_UP else child.returncode  # that code is between agent and parent

    def _doom(self) -> str:
        """Why these ranks cannot go on; empty when they can."""
        if self.probes.found:
            return str(self.probes.found["message"])
        others = self._others()
        if silent := self.marks.silent(others):
            return "; ".join(self.marks.report_lost(rank, self.attempt) for rank in silent)
        if failed := self.marks.failed(others, self.attempt):
            return f"the ranks of node rank {failed[0]} failed"
        if self.elastic and self.marks.leader_ended():
            return "the job ended"
        if others == [0] and (
            self.marks.leader_ended() or int((self.marks.attempt() or {"attempt": 0})["attempt"]) > self.attempt
        ):
            return "the leader ended this attempt"
        return ""

    def _end(self, child: subprocess.Popen[bytes]) -> int:
        child.terminate()
        try:
            child.wait(self.grace)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        return child.returncode

    def _others(self) -> list[int]:
        """Node ranks that this machine watches: the leader all others, the others the leader."""
        if self.elastic or int(self.job["nodes"]) == 1:
            return []
        return list(range(1, int(self.job["nodes"]))) if self.rank == 0 else [0]

    def _stage_inputs(self) -> dict[str, str]:
        """Copy inputs to the machine's own disk where the job asks for it; it lives, and can be stopped, meanwhile."""

        def meanwhile() -> bool:
            self.marks.beat()
            return not self.stopping

        return scratch.stage(self.job, self.folder, rank=self.rank, meanwhile=meanwhile)

    def _report(self, report: dict[str, Any]) -> None:
        print(f"{self.name}: {report['message']}", flush=True)
        self.marks.report(self.name, {**report, "attempt": self.attempt}, known=report.get("class", "node") == "node")

    def _give_up(self, why: str) -> int:
        print(f"{self.name} gives up: {why}", flush=True)
        return GIVEN_UP

    def _ask_to_stop(self, *_: object) -> None:
        self.stopping = True


def main(folder: Path) -> int:
    """Run one attempt; the ranks die with this process. A launcher that signal N ended gives 128 + N, as in a shell."""
    die_with_parent()
    code = Node(folder).run()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
