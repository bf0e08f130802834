"""BeeOND: the local disks of a Slurm job's machines joined into one BeeGFS for as long as the job runs, as lines of its script.

Runs on the first machine, before ranks start; `beeond` reaches the others through SSH, or pdsh where Azure's image has it, and
needs the rights of the CycleCloud or HPC image's set-up (a root prolog does it elsewhere: docs/slurm.md). What lies there is
the business of tasks/jobs/node/scratch.py. See `beeond --help` of BeeGFS 7: start -n NODES -d DATA -c MOUNT; stop -n NODES -L -d.
"""

from __future__ import annotations

import shlex

from tasks.config.cluster import ScratchConfig


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
