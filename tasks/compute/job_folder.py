"""The folder of a job whose machines share none, in a Blob store, so that nothing needs a route back: the supervisor's side.

Always so on Azure ML, elsewhere with `cluster.mirror`. It is sent whole before a job is submitted, and brought when its state is
asked for; output comes when the job has ended. The machines' side is tasks/jobs/node/mirror.py. How files move is the store's:
it is handed in as `Files`, because compute knows no store.

Headway's own code goes along for machines that have none, where the job's environment is a curated one: the package `tasks` as a
zip file, named by its content. An image of one's own has Headway installed.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import logging
import shlex
import shutil
import zipfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from tasks.common.errors import IntegrityError, Missing
from tasks.common.process import read_json
from tasks.compute.job import WRITTEN_HERE, Job, JobState
from tasks.compute.nodes import python, write_nodes
from tasks.config.cluster import MirrorConfig
from tasks.signing.keys import ensure_secret

log = logging.getLogger("headway.compute")
SEEN = Path("{folder}")
"""Stands in what is written for the folder as a machine has it; tasks/jobs/node/mirror.py puts that in its place."""
NO_STORE = 120
"""Exit code of a mirror with a folder of its own: its machine cannot use the store; as in tasks/jobs/node/mirror.py."""
FOLDER_KEY = "HEADWAY_FOLDER_KEY"
"""Variable that hands the folder's key to a mirror; as in tasks/jobs/node/mirror.py."""
CHECKPOINTS = "checkpoints/"
OUTPUT = "out/"
PARTS = "parts/"
GROWING = (".log", ".jsonl")
"""What the machines add to; it is never sent from here."""
MARKS = ("result.json", "exit.json", "handle.json", "attempt.json", "progress.json")
MARKED = ("errors/", "ranks/", "nodes/", OUTPUT)
"""How a submission stands and ended: of the one before, it means nothing to the next."""
Wanted = Callable[[str], bool]
PACKAGE = Path(__file__).resolve().parents[1]
KINDS = (".py", ".json", ".css", ".html")
EPOCH = (1980, 1, 1, 0, 0, 0)
"""Of every entry, so that equal code is an equal file; zip knows no earlier time."""


class Synced(Protocol):
    """A folder here and a prefix there, as tasks/storage/blob/folder.py keeps them in step."""

    def pull(self, wanted: Wanted) -> None: ...

    def push(self, wanted: Wanted, *, settled: bool = False) -> None: ...

    def clear(self, wanted: Wanted) -> None: ...

    def has(self, name: str) -> bool: ...


class Files(Protocol):
    """The container that jobs and their launcher share. What it raises for a network or a right is Missing."""

    @property
    def uri(self) -> str:
        """az://ACCOUNT/CONTAINER/PREFIX."""
        ...

    @property
    def jobs(self) -> Files:
        """Where folders of new jobs lie: another container, or this one."""
        ...

    @property
    def credential(self) -> str:
        """The kind of credential that stores.yaml names, and `secret` the name of its variable."""
        ...

    @property
    def secret(self) -> str: ...

    def folder(self, prefix: str, local: Path, key: bytes, *, but: str = "") -> Synced: ...

    def place(self, ref: str) -> str: ...

    def have(self, ref: str) -> None: ...

    def keeps_versions(self) -> bool: ...

    def put_once(self, name: str, write: Callable[[Path], None]) -> None: ...

    def token(self) -> Any: ...


def prefix_of(folder: Path) -> str:
    """Where a job's folder lies in the store."""
    return f"jobs/{folder.name}"


class Folders:
    """The folders of jobs, by their prefix. State: what is known of each, so that only what changed is brought."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._known: dict[tuple[str, str, bytes], Synced] = {}
        self._places: dict[str, Files] = {}

    def place(self, prefix: str) -> Files:
        """The container of a job's folder. One that lies beside the inputs, of a job before `jobs` was set, stays there."""
        if prefix not in self._places:
            beside = self._files.jobs is self._files or self._files.folder(prefix, Path(), b"").has("job.json")
            self._places[prefix] = self._files if beside else self._files.jobs
        return self._places[prefix]

    def known_place(self, prefix: str) -> Files:
        """The same without asking anybody: of a folder that was not looked for yet, that of new jobs."""
        return self._places.get(prefix, self._files.jobs)

    def push(self, job: Job, folder: Path) -> None:
        """Write the job folder and send it; how a submission before this one ended is forgotten there.

        Checkpoints, metrics and logs that lie there stay, unless the job ended well before: then this is another run of it,
        from nothing.
        """
        write_nodes(_with_its_program(job, folder), folder, seen=SEEN)
        existing = self._folder(prefix_of(folder), folder, key_of(folder), new=True)
        ended = existing.has("result.json")
        existing.clear(lambda name: ended or name in MARKS or name.startswith(MARKED))
        existing.push(
            lambda name: not name.startswith((CHECKPOINTS, OUTPUT)) and not name.endswith(GROWING), settled=True
        )

    def pull(self, prefix: str, folder: Path, *, ended: bool, key: bytes) -> None:
        """Bring what the job changed; of its checkpoints only which there are. With a key, only files with a code by it come."""
        existing = self._folder(prefix, folder, key)
        existing.pull(lambda name: _is_read_here(name) and (ended or not name.startswith(OUTPUT)))

    def drop_checkpoints(self, prefix: str, folder: Path) -> None:
        """After a job that ended well, whose output is here: nobody goes on from them."""
        self._folder(prefix, folder, b"").clear(lambda name: name.startswith(CHECKPOINTS))

    def _folder(self, prefix: str, folder: Path, secret: bytes, *, new: bool = False) -> Synced:
        key = (prefix, str(folder), secret)
        if new or key not in self._known:
            self._known[key] = self.place(prefix).folder(prefix, folder, secret, but=PARTS)
        return self._known[key]

    def fence(self, folder: Path) -> None:
        """Send `job.json` alone, which says which submission the folder belongs to."""
        self._folder(prefix_of(folder), folder, key_of(folder)).push(lambda name: name == "job.json", settled=True)


class MirroredFolders:
    """The folders of a backend whose machines could share one, and do not: in the store that `cluster.mirror` names."""

    def __init__(self, config: MirrorConfig, files: Files) -> None:
        self._config, self._files, self._folders = config, files, Folders(files)

    def send(self, job: Job, folder: Path) -> None:
        """Send the folder, and see to it that the inputs are there. Raises Missing, IntegrityError before anything is started."""
        for ref in job.artifacts.values():
            self._files.have(ref)
        if lost := set(job.inputs) - set(job.artifacts):
            raise ValueError(
                f"machines of {job.name} would read {', '.join(sorted(lost))} from this machine's disk: publish it"
            )
        self._folders.push(job, folder)
        if self._folders.place(prefix_of(folder)).keeps_versions():
            log.warning(
                "%s keeps versions of each blob: every checkpoint and mark of %s is kept, and paid for, until they expire. "
                "Use an account without versioning (`jobs` of stores.yaml), or a lifecycle rule for versions below jobs/",
                self._folders.place(prefix_of(folder)).uri,
                job.id,
            )

    def command(self, job: Job, folder: Path, *, base: str, check: bool = False, runs: Sequence[str] = ()) -> str:
        """What a machine's shell executes: the mirror, and below it the node agent. `base` is its folder there, in shell's words.

        `check`: the mirror only looks whether it may read and write the store. `runs` is executed in place of the agent, without
        inputs.
        """
        config, files = self._config, self._files
        words = ["--store", files.uri, "--prefix", prefix_of(folder), "--credential", config.credential, "--codes"]
        jobs = self._folders.known_place(prefix_of(folder)).uri
        words += ["--jobs", jobs] if jobs != files.uri else []
        words += ["--secret", files.secret] if config.credential == "connection_string" else []
        words += ["--client", config.client] if config.client else []
        words += ["--max-lag-seconds", f"{config.max_lag_minutes * 60:g}", *(["--check"] if check else [])]
        agent = [python(job), "-m", "tasks.common.process", "{node}"]
        below = [] if check else ["--without-inputs", "--", *runs] if runs else ["--", *agent]
        mirror = [python(job), "-m", "tasks.jobs.node.mirror"]
        return f"{shlex.join(mirror)} --base {base} {shlex.join([*words, *below])}"

    def own_base(self, job: Job, name: str) -> str:
        """What `command` gets as `base` where jobs share machines: a folder for this job alone; `name` is in shell's words."""
        return f"{shlex.quote(job.scratch.path if job.scratch else '/var/tmp')} --own {name}"

    def bring(self, folder: Path) -> None:
        """What changed there, without the output. Raises Missing, IntegrityError."""
        self._folders.pull(prefix_of(folder), folder, ended=False, key=key_of(folder))

    def settle(self, folder: Path, *, nodes: int, well: bool) -> None:
        """Bring all of a job that ended; one that ended well needs no checkpoints any more. Raises Missing, IntegrityError."""
        prefix = prefix_of(folder)
        self._folders.pull(prefix, folder, ended=True, key=key_of(folder))
        if not well:
            return
        if missing := missing_output(folder, nodes):
            raise IntegrityError(
                f"of what the job sent, {self._folders.place(prefix).uri}/{prefix} has no {', '.join(missing[:3])}",
                remedy="See who may write to this container, and run the same command again.",
            )
        if (folder / "result.json").exists():
            self._folders.drop_checkpoints(prefix, folder)

    def state(self, folder: Path, look: Callable[[], JobState]) -> JobState:
        """What `look` makes of the folder once it is up to date; all of it is, when the job is over.

        A store that does not answer is `unknown`; what is not from the job ends it.
        """
        over = False
        try:
            self.bring(folder)
            state = look()
            if over := state.over:
                self.settle(folder, nodes=int(read_json(folder / "job.json")["nodes"]), well=state.code == 0)
            return state
        except IntegrityError as error:
            if over:
                return JobState(state="ended", code=error.exit_code, reason=str(error), failure="integrity")
            return JobState(state="unknown", reason=f"{error} {error.remedy}".strip())
        except Missing as error:
            return JobState(state="unknown", reason=f"{error} {error.remedy}".strip())

    def fence(self, folder: Path) -> None:
        """Have what still runs of a job end by itself, wherever it cannot be reached."""
        self._folders.fence(folder)


def missing_output(folder: Path, nodes: int) -> list[str]:
    """What machines of a job that ended well sent of its output and is not here; tasks/jobs/node/mirror.py writes the lists."""
    missing = []
    for rank in range(nodes):
        listed = read_json(_output_list(folder, rank))
        names = [f"nodes/{rank}/output.json"] if listed is None else listed["files"]
        missing += [name for name in names if not (folder / name).is_file()]
    return missing


def has_listed_output(folder: Path, rank: int) -> bool:
    """Whether a machine's list of its output is here, which it sends after all that the list names."""
    return _output_list(folder, rank).exists()


def _output_list(folder: Path, rank: int) -> Path:
    return folder / "nodes" / str(rank) / "output.json"


def key_of(folder: Path) -> bytes:
    """The key of the folder HOME/jobs/ID of a job, derived from a secret of the home; it is never in the store."""
    home = folder.parents[1]
    secret = ensure_secret(
        home / "keys" / "jobs.key",
        lock=home / "locks" / "jobs-key",
        lost="files of jobs cannot be distinguished from those that others wrote",
        remedy="Find out who changed it, and remove it. Then delete jobs/ID/ of unfinished jobs in the store, which is refused.",
    )
    return hmac.new(secret, prefix_of(folder).encode(), "sha256").hexdigest().encode()


def _with_its_program(job: Job, folder: Path) -> Job:
    """A program that is a file of the user's own goes along with the folder."""
    if job.module:
        return job
    source, target = Path(job.program), folder / "program" / Path(job.program).name
    if not source.is_file():
        raise ValueError(f"{source} is no file: name the program to run")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    return job.model_copy(update={"program": str(SEEN / "program" / source.name)})


def _is_read_here(name: str) -> bool:
    """The bytes of checkpoints and parts are not: they are many, and only the machines read them. Nor is what says what runs."""
    if name.partition("/")[0] in WRITTEN_HERE or name.startswith(PARTS):
        return False
    return not name.startswith(CHECKPOINTS) or name.count("/") == 1


def code_name() -> str:
    """The name under which this code lies in the store: the sha256 of the zip file."""
    return f"code/headway-{hashlib.sha256(_code()).hexdigest()}.zip"


def write_code(target: Path) -> None:
    """Write the zip file."""
    target.write_bytes(_code())


@cache
def _code() -> bytes:
    """The zip file, made once: what is sent is what `code_name` tells, whatever becomes of the files meanwhile."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix in KINDS):
            entry = zipfile.ZipInfo(path.relative_to(PACKAGE.parent).as_posix(), EPOCH)
            archive.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)
    return made.getvalue()
