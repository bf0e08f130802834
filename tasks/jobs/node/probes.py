"""Light health checks of a machine while a job runs on it: GPUs, kernel log, InfiniBand links.

A thread of the agent (__main__.py) looks every `watch.probe_seconds`, and once more after an attempt that failed. It never delays
the agent: commands have a time limit, and one that hangs is a finding by itself. What the answers mean is
tasks/formats/gpu_health.py; a fault of the machine ends the attempt, a warning goes to `nodes/K/health.jsonl`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tasks.common.process import boot_id, read_json, write_json
from tasks.formats import gpu_health
from tasks.formats.gpu_health import GPU_FIELDS, ROW_FIELDS, Finding, Port, Rules


class Hangs(Exception):
    """A command did not end in time."""


def ask(*command: str, seconds: float) -> tuple[int, str]:
    """Run a command: its exit code and all that it said. Raises Hangs, and FileNotFoundError where there is no such command.

    What does not end, even when killed with all that it started (state D), is left alone.
    """
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            child.wait(seconds)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            raise Hangs(f"{command[0]} gave no answer within {seconds:g} s") from None
        output.seek(0)
        return child.returncode, output.read().decode(errors="replace")


def query_smi(
    table: str, asked: dict[str, str], asks: Callable[..., tuple[int, str]], unknown: Callable[[str], object]
) -> tuple[int, str]:
    """Ask nvidia-smi for the fields of a table (`--query-TABLE`); `asked` has their names on this driver, and is kept up to date.

    A field that this driver does not know is asked for by its old name, or no more: then `unknown` is told.
    """
    while True:
        code, output = asks(
            "nvidia-smi", f"--query-{table}={','.join(asked.values())}", "--format=csv,noheader,nounits"
        )
        refused = gpu_health.unknown_field(output) if code else None
        field = next((field for field, name in asked.items() if name == refused), None)
        if field is None:
            return code, output
        if refused == field and field in gpu_health.OLD_NAMES:
            asked[field] = gpu_health.OLD_NAMES[field]
        else:
            del asked[field]
            unknown(field)


RULES = Path(__file__).resolve().parents[2] / "hardware" / "health.json"
INFINIBAND = Path("/sys/class/infiniband")
POLL_SECONDS = 0.2
LAST_LOOK_SECONDS = 15.0
"""Longest wait for the look after a failed attempt."""
NOT_RUNNING = (9, 12)
"""Exit codes of nvidia-smi on a machine without a driver, such as a CPU machine with a GPU's image."""


class Probes:
    """The checks of one machine. State: what was seen first, what was told, and the fault that was found, if any."""

    def __init__(
        self, place: Path, job: dict[str, Any], *, name: str, submission: int, rules: Rules | None = None
    ) -> None:
        self.place = place
        self.name = name
        self.submission = submission
        self.every = float(job["watch"]["probe_seconds"])
        self.needs_gpus = int(job["gpus_per_node"]) > 0
        self.rules = rules or gpu_health.read_rules(RULES.read_text(encoding="utf-8"))
        self.found: dict[str, Any] | None = None
        self.killed: dict[int, str] = {}
        """Processes that the kernel killed for their memory: id and name."""
        self._asked = {
            "gpu": {field: field for field in GPU_FIELDS},
            "remapped-rows": {field: field for field in ROW_FIELDS},
        }
        self._told: set[str] = set()
        self._now = threading.Event()
        self._looked = threading.Event()
        self._first: dict[str, Any] = {}

    def start(self) -> None:
        """Begin to look, in a thread of its own."""
        threading.Thread(target=self._run, name="probes", daemon=True).start()

    def look_once_more(self, meanwhile: Callable[[], None]) -> None:
        """Look now, and wait for what is seen, within bounds: a failed attempt may have been the machine's fault."""
        self._looked.clear()
        self._now.set()
        deadline = time.monotonic() + LAST_LOOK_SECONDS
        while self.found is None and time.monotonic() < deadline and not self._looked.wait(POLL_SECONDS):
            meanwhile()

    def look(self) -> list[Finding]:
        """Everything that is wrong with the machine now."""
        of_gpus = self._gpus()  # before the kernel's log: asking may be what makes it write
        output, since = self._dmesg(), float(self._first["since"])
        self.killed = gpu_health.killed_for_memory(output, since=since)
        errors = gpu_health.xid_findings(gpu_health.xids(output, since=since), self.rules)
        return [
            *of_gpus,
            *errors,
            *gpu_health.flap_findings(output, self.rules, since=since),
            *gpu_health.port_findings(
                {name: Port(**port) for name, port in self._first["ports"].items()}, ports(), self.rules
            ),
        ]

    def _run(self) -> None:
        self._first = self._baseline()
        while self.found is None:
            asked = self._now.is_set()
            self._now.clear()
            findings = self.look()
            for finding in findings:
                if finding.level == "warn" and finding.message not in self._told:
                    self._told.add(finding.message)
                    self._write(finding)
            fault = next((finding for finding in findings if finding.level == "fail"), None)
            if fault:
                seen = "; ".join(finding.message for finding in findings if finding.level == "fail")
                message = f"machine {self.name}: {seen}"
                self._write(fault)
                self.found = {"type": "HealthCheckFailed", "message": message, "remedy": fault.remedy, "class": "node"}
            if asked:
                self._looked.set()
            self._now.wait(self.every)

    def _write(self, finding: Finding) -> None:
        self.place.mkdir(parents=True, exist_ok=True)
        with open(self.place / "health.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({"time": time.time(), **asdict(finding)}) + "\n")

    def _could_not(self, what: str) -> list[Finding]:
        """Say once, in the machine's log, what was not looked at."""
        if what not in self._told:
            self._told.add(what)
            print(f"{self.name}: health checks could not look at {what}", flush=True)
        return []

    def _gpus(self) -> list[Finding]:
        if shutil.which("nvidia-smi") is None:
            return self._could_not("GPUs: there is no nvidia-smi") if self.needs_gpus else []
        results: list[Finding] = []
        for table in ("gpu", "remapped-rows"):
            try:
                code, output = query_smi(
                    table,
                    self._asked[table],
                    self._ask,
                    lambda field: self._could_not(f"{field}: this nvidia-smi does not know it"),
                )
            except Hangs as hangs:
                return [Finding("smi", "fail", str(hangs), "Restart the machine.")]
            if code in NOT_RUNNING and not self.needs_gpus:
                return self._could_not(f"GPUs: nvidia-smi ended with {code}")
            if code in gpu_health.ENDED_BY_SOMEBODY:
                return []  # the agent ended it with what was left of an attempt; the next look asks again
            finding = gpu_health.smi_finding(code, output, self.rules)
            if finding:
                return [finding]
            answers = gpu_health.rows(output, tuple(self._asked[table]))
            for gpu in answers:
                results += gpu_health.gpu_findings(gpu, self.rules) if table == "gpu" else gpu_health.row_findings(gpu)
        return results

    def _dmesg(self) -> str:
        """The kernel log; empty where it may not be read."""
        try:
            code, output = self._ask("dmesg") if shutil.which("dmesg") else (127, "there is no dmesg")
        except Hangs as hangs:
            code, output = 124, str(hangs)
        if code != 0:
            self._could_not(f"the kernel log: {(output.strip().splitlines() or [str(code)])[-1]}")
        return output if code == 0 else ""

    def _ask(self, *command: str) -> tuple[int, str]:
        return ask(*command, seconds=self.rules.command_seconds)

    def _baseline(self) -> dict[str, Any]:
        """What was so when this submission began here: earlier errors of the machine are not this job's."""
        path = self.place / "baseline.json"
        output: dict[str, Any] = read_json(path) or {}
        if output.get("submission") == self.submission and output.get("boot_id") == boot_id():
            return output
        seen = {name: asdict(port) for name, port in ports().items()}
        since = gpu_health.newest(self._dmesg())
        first = {"submission": self.submission, "boot_id": boot_id(), "since": since, "ports": seen}
        write_json(path, first)
        return first


def ports(root: Path = INFINIBAND) -> dict[str, Port]:
    """InfiniBand ports of this machine, as DEVICE:PORT."""
    result = {}
    for place in sorted(root.glob("*/ports/*")):
        if _text(place / "link_layer") not in (
            "",
            "InfiniBand",
        ):  # accelerated networking is Ethernet, and comes and goes
            continue
        names = {"state": "state", "phys_state": "phys_state", "rate": "rate", "link_downed": "counters/link_downed"}
        files = {key: text for key, name in names.items() if (text := _text(place / name))}
        result[f"{place.parts[-3]}:{place.name}"] = gpu_health.port_of(files)
    return result


def _text(path: Path) -> str:
    """What a file says; empty where it is not there, or the driver refuses (a port that is down has no rate)."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
