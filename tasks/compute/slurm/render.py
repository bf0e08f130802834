"""A job as the batch script that Slurm gets, as a value; nothing is asked and nothing is started here.

The script starts each machine's part (tasks/compute/nodes.py) by one `srun`, and guards three things that only it can: that the
node sees the job folder, that a submission runs once although its answer was lost, and that a requeued job does not read its old
end. Nodes that share no folder (`cluster.mirror`) have a script of their own, whose tasks start the mirror of the job's folder.
See docs/slurm.md.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator
from importlib import resources
from pathlib import Path

from tasks.common.home import home
from tasks.compute.job import Job
from tasks.compute.job_folder import NO_STORE, MirroredFolders
from tasks.compute.nodes import node_command, node_environment
from tasks.config.backends.slurm import SlurmConfig
from tasks.config.cluster import ScratchConfig
from tasks.hardware.sku import topology_file

# BeeOND: the local disks of a Slurm job's machines joined into one BeeGFS for as long as the job runs, as lines of its
# script.
#
# Runs on the first machine, before ranks start; `beeond` reaches the others through SSH, or pdsh where Azure's image
# has it, and needs the rights of the CycleCloud or HPC image's set-up (a root prolog does it elsewhere: docs/slurm.md).
# What lies there is the business of tasks/jobs/node/scratch.py. See `beeond --help` of BeeGFS 7: start -n NODES -d DATA
# -c MOUNT; stop -n NODES -L -d.


def beeond_lines(scratch: ScratchConfig) -> list[str]:
    """Lines of bash that mount it at PATH/beeond, and take it away however the script ends; data lies in PATH/beeond-data.

    The script must not use `trap ... EXIT` itself after them.
    """
    data, mount = (shlex.quote(f"{scratch.path.rstrip('/')}/{name}") for name in ("beeond-data", "beeond"))
    return [
        'beeond_nodes="$(mktemp)"',
        'scontrol show hostnames "$SLURM_JOB_NODELIST" > "$beeond_nodes"',
        "command -v beeond > /dev/null || { echo 'headway: beeond is not installed on these machines' >&2; exit 127; }",
        'beeond_stop() { beeond stop -n "$beeond_nodes" -L -d; rm -f "$beeond_nodes"; }',
        "trap beeond_stop EXIT",
        f"srun --ntasks-per-node=1 mkdir -p {data} {mount}",
        f'beeond start -n "$beeond_nodes" -d {data} -c {mount}',
    ]


SCRIPT = "job.sbatch"
NO_FOLDER, SECOND, STOPPED, WARNED = 121, 122, 123, 124
"""Exit codes of the script: a node does not see the job folder; another job runs this submission; Slurm, or somebody through it,
told the job to end; the time limit came."""
SETTLE_SECONDS = 60
"""Time that other machines get after the leader has ended, and Slurm to say why it told a job to end."""
LAST_FILES_SECONDS = 600
"""How long mirrors may send what is left after the first of them has ended."""
LOG = "/var/tmp/headway-{}.log"
"""Of a job whose nodes share no folder: what its script prints, on the first node's disk; it stays there unless all went well."""


def script(job: Job, config: SlurmConfig, folder: Path) -> str:
    """The whole batch script; `folder` is the job folder as the nodes see it."""
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in options(job, config, folder)),
        "",
        *setting(job, config, folder),
    ]
    beeond = "".join(f"{line}\n" for line in beeond_lines(job.scratch)) if job.scratch and job.scratch.beeond else ""
    step = " \\\n    ".join(srun(job, config, folder))
    return "\n".join([*lines, "", _part("body").replace("@BEEOND@\n", beeond).replace("@SRUN@", step)])


def mirrored_script(job: Job, config: SlurmConfig, folder: Path, mirrored: MirroredFolders) -> str:
    """The same for nodes that share no folder: each has the job's on its own disk, in step with the store by a mirror.

    The key of the folder is not in it: sbatch hands it on in its environment. Raises ValueError for an array.
    """
    if job.array:
        raise ValueError(
            f"the elements of an array need a folder that nodes share: leave cluster.mirror empty for {job.id}"
        )
    own = {"--output": f"--output={LOG.format('%j')}"}
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {own.get(each.partition('=')[0], each)}" for each in options(job, config, folder)),
        "",
        f"log={LOG.format('$SLURM_JOB_ID')} NO_STORE={NO_STORE}",
        *setting(job, config, folder)[1:],
    ]
    base = mirrored.own_base(job, f'"slurm-$SLURM_JOB_ID" --claim slurm-{job.submission}.json "$claim"')
    who = 'HEADWAY_NODE_NAME="$SLURMD_NODENAME" HEADWAY_NODE_RANK="$SLURM_NODEID"'
    task = f"{who} exec {mirrored.command(job, folder, base=base)}"
    disks = ("/var/tmp", *([job.scratch.path] if job.scratch else []))
    step = [
        *_step(job, wait=LAST_FILES_SECONDS),
        *_container(job, config, disks),
        f"bash -c {shlex.quote(task)} &",
    ]
    return "\n".join([*lines, "", _part("mirrored_body").replace("@SRUN@", " \\\n    ".join(step))])


def _part(name: str) -> str:
    """A text of bash beside this file."""
    texts = resources.files("tasks.compute.slurm")
    text = texts.joinpath(f"{name}.sh").read_text(encoding="utf-8")
    return text.replace("@LEADER@", texts.joinpath("leader.sh").read_text(encoding="utf-8"))


def options(job: Job, config: SlurmConfig, folder: Path) -> Iterator[str]:
    """The options of sbatch, in the order in which they are written; the user's own come last and have the last word."""
    yield f"--job-name={job.submission_id}"
    yield f"--comment={job.token}"
    for name in ("partition", "account", "qos", "constraint", "reservation"):
        if value := getattr(config, name):
            yield _quoted(name, value)
    if job.excluded_nodes:
        yield _quoted("exclude", ",".join(job.excluded_nodes))
    yield f"--nodes={job.nodes}"
    yield "--ntasks-per-node=1"
    yield f"--cpus-per-task={job.ranks_per_node * job.threads_per_rank}"
    if job.gpus_per_node:
        yield f"--gpus-per-node={job.gpus_per_node}"
    if job.memory_gib:
        yield f"--mem={math.ceil(job.memory_gib * 1024)}M"
    if job.exclusive:
        yield "--exclusive"
    if job.time_limit:
        yield f"--time={math.ceil(job.time_limit / 60)}"
    if job.array:
        yield f"--array=0-{job.array - 1}"
    # Before the limit; of a short job at most half of its time.
    warning = min(config.signal_seconds, int(job.time_limit / 2)) if job.time_limit else config.signal_seconds
    yield f"--signal=B:USR1@{warning}"
    yield "--requeue" if config.requeue else "--no-requeue"
    element = "elements/%a/" if job.array else ""
    yield _quoted("output", f"{str(folder).replace('%', '%%')}/{element}launcher.log")
    yield "--open-mode=append"
    yield "--chdir=/"
    yield from config.options


def srun(job: Job, config: SlurmConfig, folder: Path, *, rank: str = "$SLURM_NODEID") -> list[str]:
    """The step that starts each machine's part: one task a node; `rank` is the node rank, as the shell there reads it."""
    command = shlex.join(node_command(job, Path("@"), "@")).replace("@/nodes/@", f'"$folder/nodes/{rank}"')
    task = "; ".join(
        [
            f'test -f "$folder/job.json" || {{ echo "$lost" >&2; exit {NO_FOLDER}; }}',
            'HEADWAY_NODE_NAME="$SLURMD_NODENAME" exec ' + command,
        ]
    )
    program = [] if job.module else [str(Path(job.program).parent)]
    paths = (str(folder), *sorted(job.inputs.values()), *program, *([job.scratch.path] if job.scratch else []))
    return [*_step(job, wait=0), *_container(job, config, paths), f"bash -c {shlex.quote(task)} &"]


def _step(job: Job, *, wait: int) -> Iterator[str]:
    """srun's options; `wait` is how many seconds the other tasks have when the first has ended, 0: as long as they need."""
    cpus = job.ranks_per_node * job.threads_per_rank
    yield f"srun --nodes={job.nodes} --ntasks={job.nodes} --ntasks-per-node=1 --cpus-per-task={cpus}"
    yield f"--kill-on-bad-exit=0 --wait={wait} --export=ALL"


def setting(job: Job, config: SlurmConfig, folder: Path) -> list[str]:
    """What the body of the script works with, the folder first, and what the machines get."""
    own = {name: value for name, value in node_environment(job).items() if name != "PYTHONPATH" or not config.login}
    environment = {**own, "HEADWAY_SUBMISSION": str(job.submission)}
    return [
        f"folder={shlex.quote(str(folder))}",
        f"submission={job.submission}",
        f"NO_FOLDER={NO_FOLDER} SECOND={SECOND} STOPPED={STOPPED} WARNED={WARNED} SETTLE={SETTLE_SECONDS}",
        *(f"export {name}={shlex.quote(value)}" for name, value in sorted(environment.items())),
    ]


def _container(job: Job, config: SlurmConfig, paths: Iterable[str]) -> Iterator[str]:
    """pyxis' options; enroot makes the container of a node once for all of its ranks."""
    if job.image:
        topology = topology_file(job.size, home() / "hardware") if job.size else ""
        mine = dict.fromkeys(f"{path}:{path}" for path in (*paths, *([topology] if topology else [])))
        yield shlex.join([f"--container-image={job.image}", f"--container-mounts={','.join([*mine, *config.mounts])}"])
        yield "--no-container-mount-home"


def _quoted(name: str, value: str) -> str:
    """Write an option as sbatch reads it. Raises ValueError for a value with a line break, which quotes do not hold back."""
    if not value.isprintable():
        raise ValueError(f"sbatch's --{name} would be {value!r}: a name has no line break and no control sign")
    return f"--{name}={shlex.quote(value)}"
