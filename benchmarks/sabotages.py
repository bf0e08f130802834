"""Breaks ten promises in the product, one at a time: does `headway rehearse` see each of them, and nothing else?

    python -m benchmarks.sabotages [NAME ...] [--list] [--at-once N] [--to FILE]

Each goes into a copy of the tree, as the faults of benchmarks/mutants.py do, and the ten rehearsals that the promises belong to
run there, with the configuration `tiny`. Exactly the one of the broken promise must fail; in a copy without a sabotage none
may. Exit code 1 otherwise. About three minutes each on two idle cores; `--to` keeps what was seen as JSON.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.mutants import ROOT, Mutant, copy_tree, end_all, environment, say

SOUND = "none"
"""Name of the copy without a sabotage."""


@dataclass(frozen=True)
class Sabotage(Mutant):
    """A broken promise, and the name of the rehearsal that must fail."""

    fault: str


# fmt: off
SABOTAGES = (
    Sabotage("checkpoint-unverified", "tasks/jobs/checkpoint/files.py",
        'if hashlib.sha256(data).hexdigest() != entry["blocks"][number]:',
        "if False:",
        "Bytes of a checkpoint are not compared with its manifest: training goes on from whatever they are.",
        "checkpoint-flipped"),
    Sabotage("supervisors-unlocked", "tasks/compute/supervisor_lock.py",
        "process.locked(folder / LOCK, waiting=waiting),",
        "open(folder / LOCK, 'a'),",
        "Two runs may supervise one job at the same time.",
        "two-runs"),
    Sabotage("eviction-ignored", "tasks/jobs/training/stops.py",
        'ENDING = ("Preempt", "Terminate", "Reboot", "Redeploy")',
        'ENDING = ("Terminate", "Reboot", "Redeploy")',
        "A spot machine's notice is no reason to save and to end.",
        "eviction-notice"),
    Sabotage("xid-unread", "tasks/jobs/node/probes.py",
        "errors = gpu_health.xid_findings(gpu_health.xids(output, since=since), self.rules)",
        "errors = list[Finding]()",
        "Errors of GPUs in the kernel's log are not looked at while a job runs.",
        "gpu-fails"),
    Sabotage("artifact-unverified", "tasks/storage/manifest.py",
        "if actual != entry.sha256:",
        'if actual != entry.sha256 and not entry.path.endswith(".bin"):',
        "Tokens are read although their bytes are not those of the manifest.",
        "artifact-flipped"),
    Sabotage("gate-open", "tasks/artifacts.py",
        "    if checks and not failed:\n        return",
        '    if checks and (not failed or stage == "validate"):\n        return',
        "The gate of validation is open whatever the checks say.",
        "shard-poisoned"),
    Sabotage("signature-unchecked", "deployments/bridge/senders.py",
        "if not any([hmac.compare_digest(one, right) for one in given]):",
        "if not given:",
        "An event is taken with any signature.",
        "webhook-forged"),
    Sabotage("secret-taken", "tasks/common/redaction.py",
        "    result = secret_settings(settings)\n    if result:",
        "    result = secret_settings(settings)\n    if len(result) > 9:",
        "Settings may hold a secret.",
        "secret-given"),
    Sabotage("key-for-ever", "tasks/serving/keys.py",
        "{key.sha256: key for key in self.keys if key.revoked is None}",
        "{key.sha256: key for key in self.keys}",
        "A revoked key is answered.",
        "key-revoked"),
    Sabotage("queue-without-end", "tasks/jobs/serving/api_middleware.py",
        "if self.waiting >= self._limits.waiting:",
        "if self.waiting >= 100 * self._limits.waiting:",
        "The endpoint lets any number of requests wait.",
        "overload"),
)
# fmt: on


def rehearse(tree: Path) -> dict[str, Any]:
    """The report of the ten rehearsals in a tree. Nothing that they started is left."""
    home, log = tree.with_suffix(".home"), tree.with_suffix(".log")
    only = [word for one in SABOTAGES for word in ("--only", one.fault)]
    argv = [str(Path(sys.executable).with_name("headway")), "rehearse", "-c", "tiny", *only]
    with open(log, "wb") as out:
        process = subprocess.Popen(
            argv, cwd=home.parent, env={**environment(tree), "HEADWAY_HOME": str(home)}, stdout=out, stderr=out
        )
        try:
            process.wait()
        finally:
            process.kill()
            end_all(tree)
    written = sorted(home.glob("rehearsals/*/report.json"))
    if not written:
        said = " ".join(log.read_text(errors="replace").split())
        raise ValueError(f"headway rehearse ended with {process.returncode} and no report: {said[-500:]}")
    report: dict[str, Any] = json.loads(written[-1].read_text(encoding="utf-8"))
    return report


def judge(sabotage: Sabotage | None, folder: Path) -> dict[str, Any]:
    """What the rehearsals said of a copy with a sabotage, or without one."""
    name, began = sabotage.name if sabotage else SOUND, time.monotonic()
    tree = copy_tree(folder / name, sabotage)
    report = rehearse(tree)
    failed = [one["name"] for one in report["results"] if one["verdict"] == "failed"]
    failed += [one["name"] for one in report["invariants"] if not one["passed"]]
    untried = [one["name"] for one in report["results"] if one["verdict"] == "not tried"]
    wanted = [sabotage.fault] if sabotage else []
    right = failed == wanted and not untried
    seconds = round(time.monotonic() - began)
    also = f"; not tried: {', '.join(untried)}" if untried else ""
    say(
        f"{name:24}{'as it must be' if right else 'WRONG':15}failed: {', '.join(failed) or 'none'}{also}  ({seconds} s)"
    )
    why = {
        one["name"]: one["why"]
        or [f"{each['name']}: {each['measured']}" for each in one["checks"] if not each["passed"]]
        for one in report["results"]
        if one["verdict"] == "failed"
    }
    return {"name": name, "right": right, "failed": failed, "not tried": untried, "why": why, "seconds": seconds}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="of sabotages; without one, all, and a copy with none")
    parser.add_argument("--list", action="store_true", help="print them and the rehearsals that must fail; run nothing")
    parser.add_argument(
        "--at-once", type=int, default=1, metavar="N", help="copies that are rehearsed at the same time"
    )
    parser.add_argument("--to", type=Path, metavar="FILE", help="write what was seen as JSON")
    chosen = parser.parse_args()
    known: dict[str, Sabotage | None] = {SOUND: None} | {one.name: one for one in SABOTAGES}
    if unknown := sorted(set(chosen.names) - set(known)):
        parser.error(f"there is no sabotage {', '.join(unknown)}: --list prints the names")
    if chosen.list:
        print(*(f"{one.name:24}{one.fault:20}{one.why}" for one in SABOTAGES), sep="\n")
        return 0
    names: Sequence[str] = chosen.names or list(known)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = Path(tempfile.mkdtemp(prefix="sabotages-")).resolve()
    try:
        for one in SABOTAGES:
            one.around(ROOT)  # all fit, or none is judged
        say(f"{len(names)} copies, {chosen.at_once} at once: about {3 * len(names)} min on two idle cores")
        with ThreadPoolExecutor(chosen.at_once) as pool:
            seen = list(pool.map(lambda name: judge(known[name], folder), names))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted: what ran is ended")
        return 130
    finally:
        for tree in folder.iterdir():
            end_all(tree)
        shutil.rmtree(folder, ignore_errors=True)
    if chosen.to:
        chosen.to.write_text(json.dumps(seen, indent=1) + "\n", encoding="utf-8")
    wrong = [one["name"] for one in seen if not one["right"]]
    print(f"{len(seen) - len(wrong)} of {len(seen)} as they must be", *wrong, sep="; ")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
