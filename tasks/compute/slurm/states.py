"""What Slurm says of jobs, as our states: pure, from the lines of squeue or sacct and the marks in the job folder.

Slurm's word decides while it knows the job: a job that it starts again has old marks. When it has forgotten a finished job
(MinJobAge, and no sacct), the leader's mark decides, and without one the job is lost. A node's word for success is enough.

What Slurm refuses, as our errors: before a submission from what the partitions allow, and from what sbatch says.

Slurm takes many jobs that it can never start (EnforcePartLimits=NO is its default), so the limits are looked at first. A user's
mistake is a ValueError that names the value, the remedy and what is known; anything else that was refused is a JobFailed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tasks.common.errors import JobFailed, Missing
from tasks.common.process import read_json
from tasks.compute.job import Failure, Job, JobState
from tasks.compute.job_folder import NO_STORE
from tasks.compute.nodes import ended_state
from tasks.compute.slurm.commands import Login, Said, silent
from tasks.compute.slurm.render import LOG, NO_FOLDER, SECOND, STOPPED, WARNED
from tasks.config.backends.slurm import SlurmConfig

PARTITIONS = ("scontrol", "show", "partition", "--oneliner")


@dataclass(frozen=True)
class Partition:
    """What a partition allows."""

    name: str
    default: bool
    nodes: int
    max_nodes: int | None
    max_minutes: float | None
    state: str


def parse_partitions(text: str) -> list[Partition]:
    """The lines of `scontrol show partition --oneliner`."""
    facts = [dict(word.partition("=")[::2] for word in line.split()) for line in text.splitlines()]
    return [
        Partition(
            name=fact["PartitionName"],
            default=fact.get("Default") == "YES",
            nodes=int(fact.get("TotalNodes", "0")),
            max_nodes=_number(fact.get("MaxNodes", "UNLIMITED")),
            max_minutes=minutes(fact.get("MaxTime", "UNLIMITED")),
            state=fact.get("State", "UP"),
        )
        for fact in facts
        if "PartitionName" in fact
    ]


def require_limits(job: Job, config: SlurmConfig, partitions: list[Partition]) -> None:
    """Raise ValueError for a job that its partition can never start."""
    names = ", ".join(partition.name for partition in partitions) or "none"
    chosen = next((p for p in partitions if (p.name == config.partition if config.partition else p.default)), None)
    if chosen is None and config.partition and "," not in config.partition:
        raise ValueError(f"slurm.partition is {config.partition}, which this cluster does not have: it has {names}")
    if chosen is None:
        return
    most = min(chosen.nodes, chosen.max_nodes or chosen.nodes)
    if job.nodes > most:
        allows = f"it has {chosen.nodes}" + (f" and allows {most} a job" if most < chosen.nodes else "")
        raise ValueError(
            f"the job wants {job.nodes} nodes of partition {chosen.name}: {allows}. Lower cluster.nodes, or set "
            f"slurm.partition to another one of: {names}"
        )
    wanted = (job.time_limit or 0) / 60
    if chosen.max_minutes is not None and wanted > chosen.max_minutes:
        raise ValueError(
            f"cluster.time_limit_minutes is {wanted:g}, partition {chosen.name} allows {chosen.max_minutes:g}: lower it (a job "
            f"continues in its next submission), or set slurm.partition to another one of: {names}"
        )


def require_image(job: Job, login: Login) -> None:
    """Raise Missing for a cluster that runs no containers, ValueError for an image file that is not there."""
    if not job.image:
        return
    if "--container-image" not in login.run(("srun", "--help")).out:
        raise Missing(
            f"cluster.image is {job.image}, and srun of this cluster has no --container-image: pyxis is not installed",
            remedy="Have pyxis and enroot installed, or empty cluster.image and install Headway on the nodes.",
        )
    if job.image.startswith("/") and login.run(("test", "-e", job.image)).code:
        raise ValueError(
            f"cluster.image is {job.image}, and there is no such file where the login node looks: import it with "
            f"`enroot import -o {job.image} docker://REGISTRY#NAME:TAG`, or name an image of a registry"
        )


def refusal(output: Said, job: Job, config: SlurmConfig, login: Login) -> Exception:
    """The error for a submission that sbatch refused."""
    text = output.err or output.out
    for pattern, setting, value in _mistakes(job, config):
        if re.search(pattern, text, re.IGNORECASE):
            return ValueError(f"Slurm refuses {setting} {value}: {_plain(text)}. {_known(setting, login)}".strip())
    return JobFailed(
        f"sbatch refused the job: {_plain(text) or f'exit code {output.code}'}",
        failure="infrastructure",
        folder="",
        remedy="`headway job render` prints what was submitted.",
    )


def minutes(text: str) -> float | None:
    """Slurm's DAYS-HOURS:MINUTES:SECONDS in minutes; None for no limit."""
    if not re.fullmatch(r"[\d:-]+", text):
        return None
    days, dash, clock = text.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    hours, mins, seconds = [*parts, 0, 0][:3] if dash else [0, 0, *parts][-3:]
    return int(days or 0) * 1440 + hours * 60 + mins + seconds / 60


def _mistakes(job: Job, config: SlurmConfig) -> list[tuple[str, str, str]]:
    """What sbatch says, the setting that it is about, and its value."""
    machines = f"{job.nodes} with {job.ranks_per_node} ranks x {job.threads_per_rank} threads"
    machines += f", {job.gpus_per_node} GPUs" if job.gpus_per_node else ""
    machines += f", {job.memory_gib:g} GiB" if job.memory_gib else ""
    machines += f", without {', '.join(job.excluded_nodes)}" if job.excluded_nodes else ""
    return [
        (r"/qos policy|policy limit", "slurm.qos", config.qos or "(the default)"),
        (r"invalid partition", "slurm.partition", config.partition),
        (r"group not permitted|not permitted to use this partition", "slurm.partition", config.partition),
        (
            r"invalid account",
            "slurm.account",
            f"{config.account or '(the default)'} on {config.partition or 'the default partition'}",
        ),
        (r"invalid qos", "slurm.qos", config.qos),
        (r"invalid feature", "slurm.constraint", config.constraint),
        (r"reservation", "slurm.reservation", config.reservation),
        (r"invalid node name", "cluster.exclude", ",".join(job.excluded_nodes)),
        (r"time limit", "cluster.time_limit_minutes", f"{(job.time_limit or 0) / 60:g}"),
        (r"generic resource|gres", "cluster.gpus_per_node", str(job.gpus_per_node)),
        (r"memory specification", "cluster.memory_gib", f"{job.memory_gib or 0:g}"),
        (r"node count|node configuration|cpu count|more processors", "cluster.nodes", machines),
        (r"unrecognized option|invalid option|invalid --", "slurm.options", " ".join(config.options) or "(none)"),
    ]


def _known(setting: str, login: Login) -> str:
    """The remedy: what the cluster has."""
    asked = {
        "slurm.partition": ("Partitions", ("sinfo", "--noheader", "--all", "--format=%R")),
        "slurm.constraint": ("Features of its nodes", ("sinfo", "--noheader", "--all", "--format=%f")),
        "cluster.exclude": ("Its nodes", ("sinfo", "--noheader", "--all", "--format=%N")),
        "cluster.gpus_per_node": ("What its nodes have", ("sinfo", "--noheader", "--all", "--format=%G")),
        "cluster.memory_gib": ("Memory of its nodes in MiB", ("sinfo", "--noheader", "--all", "--format=%m")),
        "cluster.nodes": (
            "Its nodes (CPUs, MiB, GPUs, number)",
            ("sinfo", "--noheader", "--all", "--format=%c %m %G %D"),
        ),
        "slurm.reservation": ("Reservations", ("scontrol", "show", "reservation", "--oneliner")),
    }
    if setting not in asked:
        return f"Change or empty {setting}; `sacctmgr show associations user=$USER` on the login node lists what you may use."
    title, command = asked[setting]
    lines = dict.fromkeys(line.strip() for line in login.run(command).out.splitlines())
    return f"{title}: {'; '.join(lines) or 'none'}"


def _plain(text: str) -> str:
    lines = [re.sub(r"^sbatch: (error: )?(Batch job submission failed: )?", "", line) for line in text.splitlines()]
    return "; ".join(line for line in lines if line and not line.startswith("Try "))


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def restricted(job: Job, config: SlurmConfig, login: Login) -> Job:
    """The job with everything but its machines excluded. Raises ValueError when Slurm has too few of them, NoAnswer.

    sbatch has no word for "any two of these five" (`--nodelist` means all of them), so all others of the partition are named.
    What Slurm has is asked when a job is submitted; the render itself asks nothing (render.py).
    """
    if not job.only_nodes:
        return job
    # All machines that Slurm could take.
    which = (f"--partition={config.partition}",) if config.partition else ()
    output = login.run(("sinfo", "--noheader", "--all", "--Node", "--format=%N", *which))
    if output.code:
        raise silent(f"sinfo: {output.text}")
    existing = list(dict.fromkeys(output.out.split()))
    known = [name for name in job.only_nodes if name in existing]
    if len(known) < job.fewest_nodes:
        unknown = [name for name in job.only_nodes if name not in existing]
        where = f"partition {config.partition}" if config.partition else "this cluster"
        raise ValueError(
            f"{job.name} names the machines {', '.join(unknown)}, which {where} of Slurm does not have: it has "
            f"{', '.join(existing)}"
        )
    others = [name for name in existing if name not in job.only_nodes]
    return job.model_copy(update={"excluded_nodes": tuple(dict.fromkeys([*job.excluded_nodes, *others]))})


SQUEUE = ("JobArrayID", "Name", "State", "Reason", "exit_code", "RestartCnt", "NodeList")
SACCT = ("JobID", "JobName", "State", "Reason", "ExitCode", "NodeList")
SINFO = ("sinfo", "--noheader", "--Node", "--format=%N|%T")
NO_NODES = ("(null)", "None assigned", "None")
QUEUED = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
RUNNING = ("RUNNING", "COMPLETING", "SIGNALING", "STAGE_OUT", "RESIZING")
ENDS: dict[str, tuple[Failure | None, str]] = {
    "COMPLETED": (None, "ended"),
    "FAILED": (None, "ended"),
    "CANCELLED": ("cancelled", "cancelled in Slurm"),
    "TIMEOUT": ("timeout", "timeout"),
    "DEADLINE": ("timeout", "its deadline in Slurm came"),
    "OUT_OF_MEMORY": ("out_of_memory", "a node's memory limit was passed"),
    "NODE_FAIL": ("node", "a node failed"),
    "BOOT_FAIL": ("node", "a node did not boot"),
    "PREEMPTED": ("preempted", "preempted by another job"),
    "REVOKED": ("cancelled", "taken over by another cluster"),
}
BAD_NODES = (r"down|fail|unk|no_respond|\*$", r"drain|reboot|maint")
"""Node states that can be the cause of a lost job; the second only where no node has one of the first."""


@dataclass(frozen=True)
class Row:
    """One job, or one element of an array, as Slurm knows it."""

    id: str
    name: str
    state: str
    reason: str
    code: int
    restarts: int
    nodes: str
    """Host list, as Slurm writes it; empty while it has none."""
    by: str = ""
    """Who cancelled it, where accounting says so."""

    @property
    def job(self) -> str:
        """The id of the job that an element belongs to."""
        return self.id.partition("_")[0]

    @property
    def element(self) -> str:
        """Its number in an array; empty for a job that is none."""
        return self.id.partition("_")[2]

    @property
    def refused(self) -> bool:
        """Whether it never was a job: sbatch said no, and Slurm keeps a record of it all the same."""
        return self.state == "FAILED" and self.reason == "BadConstraints" and not self.nodes


def parse_squeue(text: str) -> list[Row]:
    """The lines of `squeue --noheader` with the columns SQUEUE; the exit code is a wait status."""
    lines = (line.split("|") for line in text.splitlines())
    return [
        _row(id, name, state, reason, _wait_status(code), restarts, nodes)
        for id, name, state, reason, code, restarts, nodes, *_ in (line for line in lines if len(line) >= len(SQUEUE))
    ]


def parse_sacct(text: str) -> list[Row]:
    """The lines of `sacct --noheader --parsable2` with the columns SACCT; the exit code is CODE:SIGNAL."""
    lines = (line.split("|") for line in text.splitlines())
    return [
        _row(id, name, state, reason, _code_and_signal(code), "0", nodes)
        for id, name, state, reason, code, nodes in (line for line in lines if len(line) == len(SACCT))
    ]


def unanswered(id: str) -> Row:
    """A job that Slurm forgot while its accounting gives no answer."""
    return Row(id, "", "", "", 0, 0, "")


def state_of(rows: list[Row], folder: Path, *, array: int = 0) -> JobState:
    """The state of one job from its rows: one, or those of its elements; none when Slurm has forgotten it."""
    if array:
        return over_all([_element(rows, folder / "elements" / str(k), k) for k in range(array)])
    return _state(rows[0], folder) if rows else forgotten(folder)


def forgotten(folder: Path) -> JobState:
    """The state of a job that Slurm does not know any more: what the leader wrote, else nobody knows."""
    return ended_state(folder) or JobState(state="lost", reason="Slurm does not know the job any more")


def over_all(states: list[JobState]) -> JobState:
    """The state of an array: it ends when all elements have, and the first failure is its failure."""
    for alive in ("running", "starting", "queued", "unknown"):
        results = [state for state in states if state.state == alive]
        if results:
            over = sum(state.over for state in states)
            text = f"{over} of {len(states)} elements have ended" + (
                f"; {results[0].reason}" if results[0].reason else ""
            )
            return results[0].model_copy(update={"reason": text})
    failed = [(k, state) for k, state in enumerate(states) if state.code != 0]
    if not failed:
        return states[0]
    which = f"element(s) {', '.join(str(k) for k, _ in failed[:10])}"
    return failed[0][1].model_copy(update={"reason": f"{failed[0][1].reason}: {which}"})


def waits_because(reason: str) -> str:
    """Why a job waits, in words; that it will never start where that is so."""
    name, _, detail = reason.partition(",")
    known = _reasons().get(name.strip())
    if known is None:
        return f"waits: {reason}"
    sentence = f"{known['words']} ({reason})" if detail or known.get("never") else str(known["words"])
    return f"will never start: {sentence}" if known.get("never") else sentence


def bad_nodes(text: str) -> tuple[str, ...]:
    """Nodes that are not in order, from the lines `NAME|STATE` of sinfo."""
    pairs = [line.partition("|")[::2] for line in text.splitlines()]
    results = [tuple(dict.fromkeys(name for name, state in pairs if re.search(sign, state))) for sign in BAD_NODES]
    return results[0] or results[1]


def nodes_in_log(folder: Path) -> tuple[str, ...]:
    """Nodes whose failure srun told in the launcher's log."""
    return tuple(dict.fromkeys(re.findall(r"srun: error: Node failure on (\S+)", _log(folder))))


def _element(rows: list[Row], folder: Path, index: int) -> JobState:
    row = next((row for row in rows if row.element == str(index)), None)
    return _state(row, folder) if row else forgotten(folder)


def _state(row: Row, folder: Path) -> JobState:
    again = f"; started again by Slurm {row.restarts} time(s)" if row.restarts else ""
    if row.state in QUEUED:
        return JobState(state="queued", reason=waits_because(row.reason) + again)
    if row.state in ("SUSPENDED", "STOPPED"):
        return JobState(state="queued", reason="Slurm has suspended it" + again)
    if row.state in ("CONFIGURING", "POWER_UP_NODE"):
        return JobState(state="starting", reason=f"its nodes boot or are made ready: {row.nodes}{again}")
    if row.state in RUNNING:
        begun = (folder / "nodes" / "0" / "handle.json").exists() or row.state != "RUNNING"
        return JobState(state="running" if begun else "starting", reason="" if begun else f"on {row.nodes}{again}")
    if row.state in ENDS:
        return _ended(row, folder)
    if not row.state:
        return ended_state(folder) or JobState(state="unknown", reason="Slurm's accounting does not answer")
    return JobState(state="unknown", reason=f"Slurm says {row.state}, which Headway does not know")


def _ended(row: Row, folder: Path) -> JobState:
    mark = ended_state(folder)
    if mark and mark.code == 0:
        return mark
    failure, words = ENDS[row.state]
    attempts = mark.attempts if mark else 1
    if failure:
        who = f" by {row.by}" if row.by else ""
        return JobState(state="ended", code=row.code or 1, reason=words + who, attempts=attempts, failure=failure)
    if row.state == "COMPLETED":
        return mark or JobState(state="ended", code=row.code, reason="ended")
    own = _of_the_script(row)
    if own:
        return own.model_copy(update={"attempts": attempts})
    if not mark and (messages := re.findall(r"pyxis: (?!importing|imported)(.+)", _log(folder))):
        words = f"the image could not be started: {'; '.join(messages[-3:])}"
        return JobState(state="ended", code=row.code or 1, reason=words, failure="missing")
    return mark or JobState(state="ended", code=row.code or 1, reason="ended")


def _of_the_script(row: Row) -> JobState | None:
    """Ends that the batch script or slurmd tells, and no program."""
    known: dict[int, tuple[Failure, str]] = {
        NO_STORE: (
            "missing",
            f"a node cannot use the store of cluster.mirror, and {LOG.format(row.job)} on the first of {row.nodes} has its "
            "words: grant the nodes' identity Storage Blob Data Contributor on the container, or set cluster.mirror.credential",
        ),
        NO_FOLDER: ("missing", "a node does not see the job folder: it must lie on a file system that all nodes share"),
        SECOND: ("infrastructure", "another job of the same name runs this submission"),
        STOPPED: ("preempted", "told to end through Slurm, which did not say why"),
        WARNED: ("timeout", "timeout: told to save and end before the time limit"),
    }
    if row.reason == "JobLaunchFailure":
        words = f"node {row.nodes} could not start it: most often it does not see the job folder, or the disk is full"
        return JobState(state="ended", code=NO_FOLDER, reason=words, failure="missing")
    if row.refused:
        return JobState(state="ended", code=1, reason=waits_because(row.reason), failure="user")
    if row.code not in known:
        return None
    failure, words = known[row.code]
    return JobState(state="ended", code=row.code, reason=words, failure=failure)


def _row(id: str, name: str, state: str, reason: str, code: int, restarts: str, nodes: str) -> Row:
    state, _, by = state.strip().partition(" by ")
    counted = int(restarts) if restarts.strip().isdigit() else 0
    return Row(id.strip(), name, state, reason.strip(), code, counted, "" if nodes in NO_NODES else nodes, by)


def _log(folder: Path) -> str:
    log = folder / "launcher.log"
    return log.read_text(errors="replace") if log.is_file() else ""


def _wait_status(text: str) -> int:
    """As a shell says it: 128 + N for signal N. What Slurm itself writes there, such as 4021, is taken as it is."""
    status = int(text) if text.isdigit() else 0
    signal_number = status & 0x7F
    return 128 + signal_number if signal_number else status >> 8


def _code_and_signal(text: str) -> int:
    code, _, number = text.partition(":")
    return 128 + int(number) if number.isdigit() and int(number) else int(code) if code.isdigit() else 0


@cache
def _reasons() -> dict[str, dict[str, str | bool]]:
    result: dict[str, dict[str, str | bool]] = read_json(Path(__file__).parent / "reasons.json")
    return result
