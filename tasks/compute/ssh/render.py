"""What the ssh backend runs on a machine, as texts: the script that starts a job there, and the commands that ask and stop.

When they are run, and what their answers mean, is backend.py and backend.py. Everything is for bash, coreutils, grep and flock.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from tasks.compute.connection import parse_address
from tasks.compute.job import Job
from tasks.compute.job_folder import MirroredFolders
from tasks.compute.nodes import node_command, node_environment, python
from tasks.compute.ssh.hosts import Host

BUSY = 75
"""Exit code of the start script on a machine that runs another job (EX_TEMPFAIL of sysexits.h)."""
FOREIGN = 77
"""Exit code of the start script where somebody else made the folder of leases (EX_NOPERM): a lease there may be a link."""
REFUSED = 78
"""Exit code of the start script on a machine that may not use the store, or cannot reach it (EX_CONFIG)."""
LEASES = '"/var/tmp/headway-$(id -u)"'
"""On the machine's own disk: a lock there is held by the parent of a job, and is free when that is gone."""
BASE = '"$base"'
"""Folder of mirrored jobs on the machine's own disk, as the start script has it."""
CHECK_SECONDS = 90
"""For a machine to find out whether it may use the store; one that gets no answer, behind a firewall, cannot use it either."""
STOP_SECONDS = 12.0
"""From SIGTERM to SIGKILL; a cancelled job is gone within 15 s."""

LEASE = """\
#!/usr/bin/env bash
# Headway, {id}: node rank {rank} of {nodes}, on machine {name}.
# Run through SSH, by `bash {script}`.
# What it starts keeps running when the connection, or who opened it, is gone.
set -euo pipefail

# One job a machine: the lock is held for as long as the parent below lives.
mkdir -p -m 700 {leases}
if [ -L {leases} ] || [ ! -O {leases} ]; then
  echo "machine {name}: "{leases}" is somebody else's: delete it" >&2
  exit {foreign}
fi
lease={leases}/{name}
exec 9>> "$lease"
if ! flock -w 2 9; then
  echo "machine {name} runs $(cat "$lease")" >&2
  exit {busy}
fi
echo {id} > "$lease"
"""
START = """\

cd {folder}
{exports}

nohup setsid {command} < /dev/null >> nodes/{rank}/parent.log 2>&1 &

# The parent writes its pid, its start time and the machine's boot id into handle.json.
parent=$!
for _ in $(seq 150); do
  if grep -qs "\\"pid\\": $parent," nodes/{rank}/handle.json; then exit 0; fi
  kill -0 "$parent" 2> /dev/null || break
  sleep 0.1
done
grep -qs "\\"pid\\": $parent," nodes/{rank}/handle.json || {{ tail -n 5 nodes/{rank}/parent.log >&2; exit 70; }}
"""
START_MIRRORED = """\

# The key of the job's folder comes on standard input: it is in no file and in no command line.
read -r HEADWAY_FOLDER_KEY
export HEADWAY_FOLDER_KEY
{exports}
base={leases}/jobs-{name}
mkdir -p -m 700 "$base"
timeout {check_seconds} {check} < /dev/null >&2 || {{
  [ $? -ne 124 ] || echo "no answer from it within {check_seconds} s" >&2
  exit {refused}
}}

nohup setsid {command} < /dev/null > "$base/mirror.log" 2>&1 &

# Who asks for the process later names it by pid, start time and boot id.
parent=$!
sleep 0.5
kill -0 "$parent" 2> /dev/null || {{ tail -n 5 "$base/mirror.log" >&2; exit 70; }}
echo "$parent $(sed 's/.*) //' "/proc/$parent/stat" | cut -d" " -f20) $(cat /proc/sys/kernel/random/boot_id)"
"""
SEES = """\
for _ in $(seq 10); do [ -r {nonce} ] && break; sleep 0.2; done
[ -r {nonce} ] || {{ echo folder; exit; }}
"""
PROBE = """\
{sees}command -v flock > /dev/null || {{ echo flock; exit; }}
{path}{python} -c 'import tasks.common.process' || {{ echo python; exit; }}
mkdir -p -m 700 {leases}
if [ -L {leases} ] || [ ! -O {leases} ]; then echo leases; exit; fi
lease={leases}/{name}
exec 9>> "$lease"
if flock -n 9; then echo free; else echo "busy $(cat "$lease")"; fi
"""
STOP = """\
mine() {{ grep -lzxF HEADWAY_TOKEN={id} /proc/[0-9]*/environ 2> /dev/null | cut -d/ -f3; }}
for pid in $(mine); do
  if tr '\\0' ' ' 2> /dev/null < "/proc/$pid/cmdline" | grep -q ' -m tasks.common.process '; then kill -TERM "$pid"; fi
done
for _ in $(seq {looks}); do [ -z "$(mine)" ] && exit 0; sleep 0.2; done
for _ in 1 2 3; do for pid in $(mine); do kill -KILL "$pid" 2> /dev/null; done; sleep 0.2; done
[ -z "$(mine)" ]
"""


def start_script(
    job: Job, folder: Path, hosts: Sequence[Host], rank: int, mirrored: MirroredFolders | None = None
) -> str:
    """The script of one machine of a job on these machines, in order of node rank."""
    mine = {"HEADWAY_NODE_NAME": hosts[rank].name, "HEADWAY_TOKEN": job.submission_id, "HEADWAY_LIMITS": "1"}
    values = {**mine, **node_environment(job)}
    lines = [f"export {name}={shlex.quote(value)}" for name, value in values.items()]
    if rank == 0:
        lines += ["# Where the others reach this machine: the address at which SSH reached it."]
        lines += ['export HEADWAY_LEADER="$(cut -d" " -f3 <<< "$SSH_CONNECTION")"']
    if rank == 0 and job.launcher == "mpi":
        # Open MPI reaches the other machines by its own ssh, from this one.
        addresses = [parse_address(host.address) for host in hosts]
        users, ports = {a.user for a in addresses}, {a.port for a in addresses}
        user = f" -l {users.pop()}" if len(users) == 1 and "" not in users else ""
        port = f" -p {ports.pop()}" if len(ports) == 1 and None not in ports else ""
        lines += [
            f"export HEADWAY_MPI_HOSTS={shlex.quote(','.join(a.name for a in addresses))}",
            f"export OMPI_MCA_plm_rsh_agent={shlex.quote(f'ssh -o BatchMode=yes{user}{port}')}",
        ]
    if mirrored:
        lines += [f"export HEADWAY_NODE_RANK={rank}"]
        commands = {
            "check": mirrored.command(job, folder, base=BASE, check=True),
            "command": mirrored.command(job, folder, base=BASE),
        }
    else:
        commands = {"check": "", "command": shlex.join(node_command(job, folder, rank))}
    return (LEASE + (START_MIRRORED if mirrored else START)).format(
        id=job.submission_id,
        rank=rank,
        nodes=len(hosts),
        name=hosts[rank].name,
        script=script_path(folder, rank),
        leases=LEASES,
        busy=BUSY,
        refused=REFUSED,
        check_seconds=CHECK_SECONDS,
        foreign=FOREIGN,
        folder=shlex.quote(str(folder)),
        exports="\n".join(lines),
        **commands,
    )


def script_path(folder: Path, rank: int) -> Path:
    return folder / "nodes" / str(rank) / "start.sh"


def start_command(folder: Path, rank: int, *, mirrored: bool = False) -> str:
    """What is run on the machine; where it does not see the folder, the script itself."""
    if mirrored:
        return _bash(script_path(folder, rank).read_text(encoding="utf-8"))
    return f"bash {shlex.quote(str(script_path(folder, rank)))}"


def probe_command(job: Job, host: Host, nonce: Path | None) -> str:
    """Says in one word whether the machine could take the job: free, busy JOB, folder, flock, python.

    Without a `nonce` it need not see the job's folder.
    """
    path = node_environment(job).get("PYTHONPATH", "")
    return _bash(
        PROBE.format(
            sees=SEES.format(nonce=shlex.quote(str(nonce))) if nonce else "",
            path=f"PYTHONPATH={shlex.quote(path)} " if path else "",
            python=shlex.quote(python(job)),
            leases=LEASES,
            name=host.name,
        )
    )


def look_command(pids: Sequence[int]) -> str:
    """The machine's boot id, and the line of /proc/PID/stat of each process that is there."""
    stats = " ".join(f"/proc/{pid}/stat" for pid in pids)
    return f"cat /proc/sys/kernel/random/boot_id {stats} 2> /dev/null; true"


def stop_command(submission_id: str) -> str:
    """End all processes of a submission on a machine; fails when something of it is left."""
    return _bash(STOP.format(id=submission_id, looks=round(STOP_SECONDS / 0.2)))


def find_command(submission_id: str) -> str:
    """Succeeds on a machine where a process of the submission runs."""
    return _bash(f"grep -qszxF HEADWAY_TOKEN={submission_id} /proc/[0-9]*/environ")


def _bash(script: str) -> str:
    """A script as one command, whatever shell the login has."""
    return f"bash -c {shlex.quote(script)}"
