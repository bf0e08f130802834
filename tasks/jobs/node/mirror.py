"""Beside the node agent, on machines that share no folder: the job folder on this disk and its prefix in the store, in step.

    python -m tasks.jobs.node.mirror --store az://ACCOUNT/CONTAINER/PREFIX --prefix jobs/ID \\
        -- python -m tasks.common.process {node}

Brings the folder and the verified inputs, runs the command, and every two seconds sends what this machine changed and brings what
others did. `{node}` is this machine's part of the folder. What is sent last is what says that all is there: manifests, results,
exit marks. Shards of checkpoints, and parts of a corpus, move by themselves, and to who reads them alone: checkpoint_mirror.py,
checkpoint_mirror.py. How files move is tasks/storage/blob/folder.py, which machine this is at the top of this file. See
docs/training.md and docs/azureml.md.
"""

from __future__ import annotations

import argparse
import fcntl
import hmac
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import psutil

from tasks.artifacts import parse_ref
from tasks.common.errors import HeadwayError, IntegrityError, Missing
from tasks.common.process import die_with_parent, locked, own_folder, read_json, write_json
from tasks.jobs.checkpoint.files import age, manifests
from tasks.jobs.checkpoint.mirrored import PLACE, agree_to, is_written_by_ranks, say_durable
from tasks.jobs.node.checkpoint_mirror import PARTS, CheckpointMirror, PartsMirror
from tasks.storage.blob.client import open_container
from tasks.storage.blob.folder import GROWING, BlobFolder
from tasks.storage.blob.ranges import fetch_but
from tasks.storage.blob.store import BlobStore
from tasks.storage.manifest import Manifest
from tasks.storage.settings import StoreConfig
from tasks.storage.store import find

# Which machine of a job this is, from the environment that the backend, or Azure ML itself, gives each of them.
#
# With the PyTorch distribution: NODE_RANK and MASTER_ADDR. With MPI: the variables of Open MPI and of Azure Batch. See
# https://learn.microsoft.com/azure/machine-learning/how-to-train-distributed-gpu.


OF_THE_LAUNCH = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
"""Of the one process a machine that the service starts: our own launcher gives the ranks theirs."""
OF_MPI = ("OMPI_", "PMIX_", "PMI_")


@dataclass(frozen=True)
class Where:
    """This machine in its job."""

    rank: int
    """0 leads."""
    name: str
    leader: str
    """Address of the leader."""


def where_we_are(payload: Mapping[str, str] = os.environ) -> Where:
    """Read the service's variables. A job of one machine may have none of them."""
    batch = payload.get("AZ_BATCHAI_MPI_MASTER_NODE") or payload.get("AZ_BATCH_MASTER_NODE", "").partition(":")[0]
    rank = payload.get("HEADWAY_NODE_RANK") or payload.get("NODE_RANK") or payload.get("OMPI_COMM_WORLD_RANK")
    return Where(
        rank=int(rank or 0),
        name=payload.get("HEADWAY_NODE_NAME") or payload.get("AZ_BATCH_NODE_ID") or socket.gethostname(),
        leader=payload.get("HEADWAY_LEADER") or payload.get("MASTER_ADDR") or batch or "127.0.0.1",
    )


def environment(where: Where, payload: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What the node agent gets: the service's launch is over, ours has variables of its own."""
    kept = {key: value for key, value in payload.items() if key not in OF_THE_LAUNCH and not key.startswith(OF_MPI)}
    ours = {"HEADWAY_NODE_RANK": str(where.rank), "HEADWAY_NODE_NAME": where.name, "HEADWAY_LEADER": where.leader}
    hosts = {"HEADWAY_MPI_HOSTS": payload["AZ_BATCH_HOST_LIST"]} if payload.get("AZ_BATCH_HOST_LIST") else {}
    return {**kept, **ours, **hosts}


GIB = 1024**3
EVERY_SECONDS = 2.0
MAX_LAG_SECONDS = 1800.0
POLL_SECONDS = 0.1
LAST_TRIES = 8
"""Of the last push, with waits that double from one second: four minutes beside the store's own."""
FOLDER_KEY = "HEADWAY_FOLDER_KEY"
"""Variable with the key of the job's folder, by tasks/compute/azureml/render.py; the programs below do not have it in theirs."""
FENCED = 76
"""Exit code, as the node agent's: a newer submission has the folder."""
SECOND = 122
"""Exit code, as of Slurm's batch script: another job of the scheduler runs this submission."""
NO_STORE = 120
"""Exit code, as in tasks/compute/job_folder.py: this machine cannot use the store of the folder."""
DISK = Path("/var/tmp")
"""Where a folder of one's own lies on a machine that has not the disk of cluster.scratch."""
FOLDER = "{folder}"
"""Stands in the launcher's files for the folder as this machine has it."""
WITH_INPUTS = ("config.json", "job.json")
LAUNCHERS = (*WITH_INPUTS, "ray.json")
"""With each machine's process.json, what the launcher writes and no machine changes."""
OUTPUT = "out/"
LISTED = "output.json"
"""In a machine's part of the folder: what it sent of the output, so that a file that is deleted there is missed."""


class Claimed(HeadwayError):
    """Another job of the scheduler has this submission."""


class Mirror:
    """State: the folder and its prefix, which submission this is, and whether somebody asked to stop."""

    def __init__(
        self,
        store: StoreConfig,
        prefix: str,
        where: Where,
        base: Path,
        key: str = "",
        max_lag_seconds: float = MAX_LAG_SECONDS,
        jobs: StoreConfig | None = None,
    ) -> None:
        """`store` has the inputs; the folder lies there too, unless `jobs` names another store."""
        self.where, self.prefix, self.key, self.max_lag_seconds = where, prefix, key.encode(), max_lag_seconds
        self.inputs_from, self.container = open_container(store), open_container(jobs or store)
        self.inputs: dict[str, str] = {}
        self.submission = 0
        self.needs_inputs = True
        self.stopping = False
        self._lie_in(base)

    def _lie_in(self, base: Path) -> None:
        """Keep the folder and the inputs on this disk, from nothing; folders that earlier jobs left there go."""
        self.base, self.local = base, base / Path(self.prefix).name
        for left in (self.local, *(job.parent for job in base.glob("*/job.json"))):
            shutil.rmtree(left, ignore_errors=True)
        self.local.mkdir(parents=True)
        self.folder = BlobFolder(self.container, self.prefix, self.local, key=self.key, but=PARTS)
        self.folder.arriving = self._localized
        parts = BlobFolder(self.container, self.prefix, self.local, key=self.key, only=PARTS)
        self.parts = PartsMirror(parts, self.node, leads=self.where.rank == 0)
        large = BlobFolder(self.container, self.prefix, self.local, key=self.key)
        self.checkpoints = CheckpointMirror(large, self.node, leads=self.where.rank == 0, fenced=self.fenced)

    @property
    def node(self) -> Path:
        return self.local / "nodes" / str(self.where.rank)

    def claim(self, name: str, who: str) -> None:
        """Take the submission for a job of the scheduler, by a file that one alone can write. Raises Claimed, Missing."""
        first = self.folder.put_first(name, who.encode()).decode()
        if first != who:
            raise Claimed(f"another job runs this submission: {first}; {who} ends")

    def begin(self) -> None:
        """Bring the folder as it is there, and the inputs. Raises Missing, IntegrityError, ValueError."""
        text = self.folder.read("job.json")
        if text is None:
            raise ValueError(f"{self.container.uri}/{self.folder.prefix} has no job in it")
        job = json.loads(text)
        self.submission = int(job["submission"])
        if self.needs_inputs and (scratch := job.get("scratch")):
            try:
                disk = scratch_folder(Path(scratch["path"]), float(scratch["size_gib"]))
                if disk.parent not in self.base.parents:  # else the folder that is this job's alone lies there already
                    self._lie_in(disk)
            except Missing as error:
                if scratch.get("required", True):
                    raise
                print(f"mirror: {error.message}; the job lies in {self.base}", flush=True)
        store = BlobStore(self.inputs_from, self.base)
        for name, ref in (job["artifacts"] if self.needs_inputs else {}).items():
            manifest, patterns = find(store, *parse_ref(ref)), job.get("by_range", {}).get(name, ())
            stay = _staying(manifest, patterns)
            into = self.base / "by-range" / manifest.version
            self.inputs[name] = str(fetch_but(store, manifest, stay, into) if stay else store.fetch(manifest))
        if self.where.rank == 0:
            self.folder.clear(_is_end)
        self.folder.ignore_what_lies_there(_is_of_an_earlier_start)
        self.folder.pull(lambda name: not _is_of_an_earlier_start(name) and _is_shared(name))
        self.parts.begin()
        agree_to(self.local, max_lag_seconds=self.max_lag_seconds, ranks_per_node=int(job.get("ranks_per_node", 1)))
        self._say_durable()
        self.checkpoints.begin()

    def step(self) -> None:
        """Bring and send what changed; a store that does not answer is told, and asked again the next time."""
        try:
            self.folder.pull(self._comes)
            self.parts.bring()
            if not self.fenced():
                self.parts.send()
                self.folder.push(self._goes)
                self._say_durable()
        except HeadwayError as error:
            print(f"mirror: {error.message}", file=sys.stderr, flush=True)

    def finish(self) -> None:
        """Send all that is left, the output and its list too; results and exit marks last. Raises Missing."""
        made = (path for path in (self.local / OUTPUT).rglob("*") if path.is_file() and not path.name.startswith("."))
        write_json(self.node / LISTED, {"files": sorted(path.relative_to(self.local).as_posix() for path in made)})
        self.checkpoints.finish()
        for tries in range(LAST_TRIES):
            try:
                self.folder.pull(lambda name: name == "job.json")
                if not self.fenced():
                    self.checkpoints.send()
                    self.parts.send(settled=True)
                    self.folder.push(lambda name: self._goes(name) or name.startswith(OUTPUT), settled=True)
                return
            except HeadwayError as error:
                print(f"mirror: {error.message}", file=sys.stderr, flush=True)
                if tries == LAST_TRIES - 1:
                    raise
                time.sleep(2.0**tries)

    def fenced(self) -> bool:
        """Whether a newer submission has the folder."""
        return int((read_json(self.local / "job.json") or {}).get("submission", 0)) != self.submission

    def report(self, error: HeadwayError | ValueError) -> None:
        """Say in the folder why this machine could not begin, as a rank does of itself."""
        ranks = int((read_json(self.local / "job.json") or {}).get("ranks_per_node", 1))
        kinds = {5: "integrity", 6: "missing"}
        kind = kinds.get(error.exit_code, "infrastructure") if isinstance(error, HeadwayError) else "user"
        output = {"type": type(error).__name__, "message": str(error), "remedy": getattr(error, "remedy", "")}
        name = f"errors/rank-{self.where.rank * ranks}.json"
        write_json(self.local / name, {**output, "class": kind, "attempt": 1, "nodes": [self.where.name]})
        with suppress(HeadwayError):  # it was said on the machine's own log
            self.folder.push(lambda each: each == name, settled=True)

    def stop(self, *_: object) -> None:
        self.stopping = True

    def _comes(self, name: str) -> bool:
        """What others change while the job runs: to the leader all marks, to the others the leader's; not logs or output."""
        if self.parts.comes(name):
            return True
        if name.endswith(GROWING) or name.startswith(OUTPUT) or not _is_shared(name):
            return False
        if name.startswith("nodes/"):
            rank = name.split("/")[1]
            return rank != str(self.where.rank) and (self.where.rank == 0 or rank == "0")
        return True

    def _goes(self, name: str) -> bool:
        """What this machine's processes write, but for the output, which goes in the end; of checkpoints what is whole there."""
        if not _is_shared(name):
            return False
        if name.startswith("checkpoints/") and name.endswith(("/manifest.json", "/LATEST")):
            whole = name.endswith("/manifest.json") or all(map(self._is_sent, manifests(self.local / "checkpoints")))
            return whole and self.checkpoints.sent(name)
        return name not in LAUNCHERS and not name.endswith("/process.json") and not name.startswith(OUTPUT)

    def _is_sent(self, manifest: Path) -> bool:
        return self.checkpoints.sent(manifest.relative_to(self.local).as_posix())

    def _say_durable(self) -> None:
        """Tell the ranks which is the newest checkpoint that the store has whole: its manifest is there, which goes last."""
        for path in manifests(self.local / "checkpoints"):
            if self.folder.knows(path.relative_to(self.local).as_posix()):
                say_durable(self.local, *age(path))
                return

    def _localized(self, name: str, data: bytes) -> bytes:
        """The launcher's files as this machine needs them: where the folder and the inputs are."""
        if name not in LAUNCHERS and not name.endswith("/process.json"):
            return data
        value = json.loads(data.replace(FOLDER.encode(), json.dumps(str(self.local))[1:-1].encode()))
        if name in WITH_INPUTS:
            value["inputs"] = {**value["inputs"], **self.inputs}
        if name == "job.json":
            value["scratch"] = None  # the inputs lie there already
        return json.dumps(value, indent=1).encode()


def scratch_folder(path: Path, size_gib: float) -> Path:
    """Our folder on the disk that a job asks for. Raises Missing when it is not there, or has too little room."""
    if not path.is_dir():
        disks = sorted({disk.mountpoint for disk in psutil.disk_partitions() if Path(disk.mountpoint).is_dir()})
        room = "; ".join(f"{disk} has {shutil.disk_usage(disk).free / GIB:.0f} GiB free" for disk in disks)
        remedy = "Set cluster.scratch.path to a folder of a disk, or leave cluster.scratch empty."
        raise Missing(f"scratch: there is no folder {path} on this machine: {room}", remedy=remedy)
    free = shutil.disk_usage(path).free / GIB
    if free < size_gib:
        remedy = "Set cluster.scratch.size_gib to less, or cluster.scratch.path to another disk."
        raise Missing(f"scratch: {path} has {free:.2f} GiB free, the job needs {size_gib:g} GiB", remedy=remedy)
    return path / "headway"


def _staying(manifest: Manifest, patterns: Collection[str]) -> set[str]:
    """Files of an input that are read in parts where they lie: their blocks have digests (tasks/formats/mmididx.py)."""
    paths = {entry.path for entry in manifest.content.files}
    wanted = {path for path in paths if any(fnmatch(path, pattern) for pattern in patterns)}
    stay = {path for path in wanted if f"{path.rpartition('.')[0]}.blocks" in paths}
    if wanted - stay:
        print(
            f"mirror: {manifest.ref} is brought whole, for it has no digests of blocks: preprocess with preprocessing.shard_gib, "
            "and a machine reads its part",
            flush=True,
        )
    return stay


def _is_shared(name: str) -> bool:
    """Whether machines see it of each other by this side; the rest is the checkpoints' mirror's, or this machine's alone."""
    return not is_written_by_ranks(name) and not name.startswith(f"{PLACE}/")


def _is_end(name: str) -> bool:
    """Marks by which a submission ended: those of an earlier start of this one mean nothing to us."""
    return name == "result.json" or name.endswith("/exit.json")


def _is_of_an_earlier_start(name: str) -> bool:
    """What may be of an earlier start of this submission; a sign of life of one that still comes changes soon."""
    return _is_end(name) or name.endswith("/beat")


def run(mirror: Mirror, command: list[str]) -> int:
    """Run a command with the folder in step; its exit code, or that of the process that it supervised.

    It is told which store the folder comes from, to measure the way there (tasks/jobs/qualify/storage.py); no secret is.
    """
    words = [word.replace("{node}", str(mirror.node)).replace(FOLDER, str(mirror.local)) for word in command]
    payload = {**environment(mirror.where), "HEADWAY_STORE": mirror.container.config.model_dump_json()}
    ray = read_json(mirror.local / "ray.json")
    if mirror.key and ray is not None and not ray.get("mirrored"):  # else Ray runs already, by its owner's rules
        token = hmac.new(mirror.key, b"ray", "sha256").hexdigest()
        payload |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    mirror.checkpoints.start()
    child = subprocess.Popen(words, cwd=mirror.local, env=payload, preexec_fn=die_with_parent)
    while _attended(child, mirror):
        mirror.step()
        if mirror.fenced():
            child.terminate()
            child.wait()
            return FENCED
    mirror.finish()
    ended: dict[str, Any] = read_json(mirror.node / "exit.json") or {"code": child.returncode}
    code = int(ended["code"])
    return code if code >= 0 else 128 - code


def _attended(child: subprocess.Popen[bytes], mirror: Mirror) -> bool:
    """Wait until the next step is due; False when the command has ended."""
    due = time.monotonic() + EVERY_SECONDS
    while child.poll() is None and time.monotonic() < due:
        if mirror.stopping:
            child.terminate()
            mirror.stopping = False
        time.sleep(POLL_SECONDS)
    return child.poll() is None


@contextmanager
def own_base(disk: Path, name: str) -> Iterator[Path]:
    """An empty folder for one job alone, on a disk that jobs share; it goes with the job. Those of jobs that were killed go now.

    Raises ValueError where another user made the folder above it.
    """
    root = own_folder((disk if disk.is_dir() else DISK) / f"headway-{os.getuid()}", remedy="set cluster.scratch.path")
    with locked(root / f"{name}.lock"):
        for lock in root.glob("*.lock"):
            with suppress(OSError), open(lock) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ours too is held by another open file
                shutil.rmtree(root / lock.stem, ignore_errors=True)
                lock.unlink()
        base = root / name
        shutil.rmtree(base, ignore_errors=True)  # of an earlier start of this very job
        base.mkdir(mode=0o700)
        try:
            yield base
        finally:
            shutil.rmtree(base, ignore_errors=True)
            (root / f"{name}.lock").unlink(missing_ok=True)


def check(store: StoreConfig, prefix: str) -> int:
    """Whether this machine may read, write and delete in a job's folder; what it may not is said on standard error."""
    try:
        container = open_container(store)
        name = f"{prefix}/check-{uuid.uuid4().hex}"
        container.put(name, b"")
        container.get(name)
        container.remove(name)
    except (HeadwayError, ValueError) as error:
        print(f"{error} {getattr(error, 'remedy', '')}".strip(), file=sys.stderr)
        return 1
    return 0


def main(arguments: list[str]) -> int:
    """Read the command line, and be this machine's mirror until its command has ended; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tasks.jobs.node.mirror")
    parser.add_argument("--store", required=True)
    parser.add_argument("--jobs", default="", help="the store of the folder, where it is not that of the inputs")
    parser.add_argument("--prefix", required=True)
    parser.add_argument("--credential", default="managed_identity")
    parser.add_argument("--secret", default="")
    parser.add_argument("--codes", action="store_true")
    parser.add_argument("--max-lag-seconds", type=float, default=MAX_LAG_SECONDS)
    parser.add_argument("--client", default=os.environ.get("DEFAULT_IDENTITY_CLIENT_ID", ""))
    parser.add_argument("--base", type=Path, default=Path(tempfile.gettempdir()) / "headway")
    parser.add_argument("--own", default="", help="name of a folder for this job alone below --base, which jobs share")
    parser.add_argument("--without-inputs", action="store_true", help="the command reads none of the job's inputs")
    parser.add_argument("--check", action="store_true")
    parser.add_argument(
        "--claim", nargs=2, metavar=("NAME", "WHO"), help="take the submission, or end: one job alone runs it"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    client = options.client if options.credential == "managed_identity" else ""
    store = StoreConfig(uri=options.store, credential=options.credential, secret=options.secret, client=client)
    jobs = store.model_copy(update={"uri": options.jobs}) if options.jobs else None
    if options.check:
        return check(jobs or store, options.prefix)
    base, key = options.base, os.environ.pop(FOLDER_KEY, "")
    if options.codes and not key:
        parser.error(f"the variable {FOLDER_KEY} is not set")
    if options.own and check(jobs or store, options.prefix):
        return NO_STORE
    with own_base(base, options.own) if options.own else nullcontext(base) as place:
        mirror = Mirror(store, options.prefix, where_we_are(), place, key, options.max_lag_seconds, jobs)
        mirror.needs_inputs = not options.without_inputs
        return _mirrored(mirror, options.claim, [word for word in options.command if word != "--"])


def _mirrored(mirror: Mirror, claim: tuple[str, str] | None, command: list[str]) -> int:
    signal.signal(signal.SIGTERM, mirror.stop)
    try:
        if claim:
            mirror.claim(*claim)
        mirror.begin()
    except Claimed as error:
        print(f"mirror: {error}", file=sys.stderr, flush=True)
        return SECOND
    except (HeadwayError, ValueError) as error:
        mirror.report(error)
        print(f"mirror: {error}", file=sys.stderr, flush=True)
        return error.exit_code if isinstance(error, (IntegrityError, Missing)) else 1
    return run(mirror, command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
