"""How many machines a job could get, where the scheduler can say so: those that are not drained, down or excluded."""

from __future__ import annotations

import re
from collections.abc import Collection

from tasks.config.cluster import ClusterConfig

OUT = re.compile(r"down|drain|fail|unk|no_respond|maint|reboot|\*$")
"""Node states of sinfo in which no job starts there."""


def usable_nodes(config: ClusterConfig, only: Collection[str] = ()) -> int | None:
    """Machines that may take a job, of some only where they are named, busy ones among them; None where nobody can say.

    Raises Missing without an answer.
    """
    if config.backend == "slurm":
        from tasks.compute.slurm.commands import open_login, silent

        output = open_login(config).run(("sinfo", "--noheader", "--all", "--Node", "--format=%P|%N|%T"))
        if output.code:
            raise silent(f"sinfo: {output.text}")
        rows = [line.split("|") for line in output.out.split()]
        mine = [
            row
            for row in rows
            if row[0].rstrip("*") in config.slurm.partition.split(",") or (not config.slurm.partition and "*" in row[0])
        ]
        existing = {name for _, name, state in mine if name not in config.exclude and not OUT.search(state)}
        return _counted(existing, only)
    if config.backend == "ssh":
        from tasks.compute.ssh.hosts import read_hosts

        return _counted({host.name for host in read_hosts(config.ssh)} - set(config.exclude), only)
    return None


def _counted(existing: set[str], only: Collection[str]) -> int:
    return len(existing & set(only) if only else existing)
