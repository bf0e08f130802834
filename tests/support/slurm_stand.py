"""A real Slurm of a few nodes on this machine, from Debian's packages slurm-wlm and munge.

Each node is a slurmd of its own, under a configuration, ports, keys and a munge that nobody else uses, so several stands run side
by side. There is no accounting, so no sacct. A keeper (`python -P tests/support/slurm_stand.py FOLDER`) ends everything when the
test that opened the stand is gone, also after a kill.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # a stand's keeper runs this file alone
    from networks import Namespace, Network

PROGRAMS = {"slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "sbatch": "slurm-wlm", "munged": "munge"}
SBIN = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
"""Daemons lie where users do not look."""


@dataclass
class SlurmStand:
    """A running Slurm. Commands find it by `environment`."""

    folder: Path
    nodes: tuple[str, ...]
    environment: dict[str, str]
    boots: bool
    machines: "dict[str, Namespace]" = field(default_factory=dict)
    """The network of each node, where they have one of their own."""
    hidden: tuple[Path, ...] = ()
    """Folders in whose place each node has an empty file system of its own, which ends with it."""
    controller: "subprocess.Popen[bytes] | None" = None
    daemons: "dict[str, subprocess.Popen[bytes]]" = field(default_factory=dict)

    def command(self, *words: str, timeout: float = 30.0, check: bool = True) -> str:
        """What one of Slurm's commands says."""
        from waiting import limit  # not above: the keeper of a stand runs this file, and sees no other

        environment = {**os.environ, **self.environment}
        said = subprocess.run(
            words, env=environment, capture_output=True, text=True, timeout=limit(timeout), check=False
        )
        assert not check or said.returncode == 0, f"{words}: {said.stdout}{said.stderr}"
        return said.stdout.strip()

    def start_controller(self) -> None:
        """Start slurmctld with the state that it left."""
        self.controller = self._daemon("slurmctld", "-D", "-i", "-f", str(self.folder / "slurm.conf"))

    def kill_controller(self) -> None:
        assert self.controller
        self.controller.kill()
        self.controller.wait()

    def stop_controller(self) -> None:
        """Let the scheduler hang: it takes connections, and never answers."""
        assert self.controller
        self.controller.send_signal(signal.SIGSTOP)

    def continue_controller(self) -> None:
        assert self.controller
        self.controller.send_signal(signal.SIGCONT)

    def start_node(self, name: str) -> None:
        """Start a node's slurmd, as a machine that booted just now."""
        self.daemons[name] = self._daemon(
            "slurmd", "-D", "-b", "-N", name, "-f", str(self.folder / "slurm.conf"), node=name
        )

    def kill_node(self, name: str) -> None:
        """Kill all of a node at once: slurmd, its step daemons, and what they run. Nothing of it says goodbye."""
        killed = [
            *_with_variable("HEADWAY_STAND_NODE", name, self.folder),
            *_with_variable("SLURMD_NODENAME", name, self.folder),
        ]
        while killed:
            for pid in killed:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if name in self.daemons:
                self.daemons.pop(name).wait()
            time.sleep(0.05)
            killed = [
                *_with_variable("HEADWAY_STAND_NODE", name, self.folder),
                *_with_variable("SLURMD_NODENAME", name, self.folder),
            ]

    def node_state(self, name: str) -> str:
        return self.command("sinfo", "--noheader", "--format=%T", f"--nodes={name}", check=False).split("\n")[0]

    def wait_idle(self, seconds: float = 60.0) -> None:
        """Wait until no job is left and every node is there (or powered down, where they boot).

        Slurm may go on saying `mixed` of a node for a job that ended in the same second as the last look.
        """
        from waiting import limit

        deadline = time.monotonic() + limit(seconds)
        while True:
            states = [self.node_state(name) for name in self.nodes]
            jobs = self.command("squeue", "--noheader", check=False)
            if not jobs and all(state.rstrip("~") in ("idle", "mixed", "allocated") for state in states):
                return
            assert time.monotonic() < deadline, f"not idle: {states}\n{jobs}\n{self.logs()}"
            time.sleep(0.3)

    def revive(self, name: str) -> None:
        """Start a killed node again, and wait until the scheduler takes it back."""
        self.start_node(name)
        self.wait_idle()

    def cancel_all(self) -> None:
        self.command("scancel", "--user=root", check=False)
        self.wait_idle()

    def logs(self) -> str:
        return "\n".join(
            f"{log.name}:\n{log.read_text(errors='replace')[-2000:]}" for log in (self.folder / "log").iterdir()
        )

    def _daemon(self, *words: str, node: str = "") -> "subprocess.Popen[bytes]":
        program = shutil.which(words[0], path=SBIN)
        assert program
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SLURMD_"))}
        extra = {"HEADWAY_STAND_NODE": node} if node else {}
        inside = [
            *(self.machines[node].entering if node in self.machines else ()),
            *(_apart(self.hidden) if node else ()),
        ]
        with open(self.folder / "log" / f"{node or words[0]}.out", "ab") as log:
            return subprocess.Popen(
                [*inside, program, *words[1:]],
                env={**environment, **self.environment, **extra, "PATH": SBIN},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


@contextlib.contextmanager
def slurm(
    nodes: int = 2,
    *,
    cpus: int = 4,
    slurmd_timeout: int = 6,
    min_job_age: int = 300,
    boot_seconds: float = 0.0,
    resume_timeout: int = 60,
    settings: str = "",
    network: "Network | None" = None,
    hidden: tuple[Path, ...] = (),
) -> Iterator[SlurmStand]:
    """A Slurm of nodes n1, n2, ... that is ready for jobs.

    Partitions: `main` (the default), `short` (one minute, one node), `urgent` (preempts jobs of main). With `boot_seconds` the
    nodes are cloud nodes that are powered down, and boot for so long when a job wants them. `settings` is further lines of
    slurm.conf. With `network` (networks.py) each node has a machine of it. In the place of `hidden` folders each node has a disk
    of its own. Skips where Slurm is not installed.
    """
    for program, package in PROGRAMS.items():
        if not shutil.which(program, path=SBIN):
            pytest.skip(f"{program} is not installed: Debian package {package}")
    folder = Path(tempfile.mkdtemp(prefix="hw-slurm-"))
    folder.chmod(0o755)
    environment = {"SLURM_CONF": str(folder / "slurm.conf")}
    names = tuple(f"n{k + 1}" for k in range(nodes))
    stand = SlurmStand(folder, names, environment, boots=boot_seconds > 0, hidden=hidden)
    if network:
        stand.machines.update(zip(stand.nodes, network.machines, strict=True))
    keeper = subprocess.Popen(
        [sys.executable, "-P", __file__, str(folder)], stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        _start_munge(folder)
        timeouts = {"SlurmdTimeout": slurmd_timeout, "MinJobAge": min_job_age, "ResumeTimeout": resume_timeout}
        (folder / "slurm.conf").write_text(
            _configuration(stand, cpus, timeouts, settings, network.here if network else "127.0.0.1")
        )
        if stand.boots:
            _write_power_programs(stand, boot_seconds)
        stand.start_controller()
        for name in () if stand.boots else stand.nodes:
            stand.start_node(name)
        stand.wait_idle()
        yield stand
    finally:
        assert keeper.stdin
        keeper.stdin.close()
        for process in (keeper, stand.controller, *stand.daemons.values()):
            if process:
                process.wait()


def _apart(hidden: tuple[Path, ...]) -> list[str]:
    """Words before a command that is to have disks of its own in the place of some folders."""
    if not hidden:
        return []
    mounts = " && ".join(f"mount -t tmpfs none {path}" for path in hidden)
    return ["unshare", "--mount", "sh", "-c", f'{mounts} && exec "$@"', "sh"]


def _start_munge(folder: Path) -> None:
    for name in ("state", "run", "log", *(f"spool/n{k}" for k in range(1, 9))):
        (folder / name).mkdir(parents=True)
    (folder / "run").chmod(0o700)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    program = shutil.which("munged", path=SBIN)
    assert program
    files = {"key-file": key, "socket": folder / "run/munge.sock", "pid-file": folder / "run/munged.pid"}
    files |= {"log-file": folder / "log/munged.log", "seed-file": folder / "run/munge.seed"}
    words = [program, "--force", *(f"--{name}={path}" for name, path in files.items())]
    subprocess.run(words, check=True, capture_output=True)


def _configuration(stand: SlurmStand, cpus: int, timeouts: dict[str, int], settings: str, here: str) -> str:
    folder, host = stand.folder, socket.gethostname().split(".")[0]
    ports = _free_ports(len(stand.nodes) + 1)
    state, facts = "CLOUD" if stand.boots else "UNKNOWN", f"CPUs={cpus} RealMemory=8000 Feature=cpu,stand"
    nodes = [
        f"NodeName={name} NodeHostname={host} NodeAddr={_address(stand, name)} Port={port} {facts} State={state}"
        for name, port in zip(stand.nodes, ports[1:], strict=True)
    ]
    power = [
        f"SuspendProgram={folder}/suspend",
        f"ResumeProgram={folder}/resume",
        "SuspendTime=3600",
        "SuspendTimeout=5",
        "ReconfigFlags=KeepPowerSaveSettings",
    ]
    return "\n".join(
        [
            f"ClusterName={folder.name}",
            f"SlurmctldHost={host}({here})",
            f"SlurmctldPort={ports[0]}",
            "SlurmUser=root",
            "SlurmdUser=root",
            "AuthType=auth/munge",
            f"AuthInfo=socket={folder}/run/munge.sock,cred_expire=5",
            "CryptoType=crypto/munge",
            f"StateSaveLocation={folder}/state",
            f"SlurmdSpoolDir={folder}/spool/%n",
            f"SlurmctldPidFile={folder}/run/slurmctld.pid",
            f"SlurmdPidFile={folder}/run/slurmd.%n.pid",
            f"SlurmctldLogFile={folder}/log/slurmctld.log",
            f"SlurmdLogFile={folder}/log/slurmd.%n.log",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "JobAcctGatherType=jobacct_gather/none",
            "AccountingStorageType=accounting_storage/none",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_Core_Memory",
            "DefMemPerNode=100",
            "SchedulerType=sched/backfill",
            "SchedulerParameters=bf_interval=2,sched_interval=2",
            "PreemptType=preempt/partition_prio",
            "PreemptMode=REQUEUE",
            "ReturnToService=2",
            "MpiDefault=none",
            "KillWait=5",
            "SlurmdParameters=config_overrides",
            *(f"{key}={value}" for key, value in timeouts.items()),
            *(power if stand.boots else ()),
            *nodes,
            "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1",
            "PartitionName=short Nodes=ALL MaxTime=1 MaxNodes=1 State=UP PriorityTier=1",
            "PartitionName=urgent Nodes=ALL MaxTime=60 State=UP PriorityTier=10",
            settings,
            "",
        ]
    )


def _address(stand: SlurmStand, node: str) -> str:
    return stand.machines[node].address if node in stand.machines else "127.0.0.1"


def _write_power_programs(stand: SlurmStand, boot_seconds: float) -> None:
    """What CycleCloud's programs do: start and stop the machines of a host list, some time later."""
    conf, program = stand.folder / "slurm.conf", shutil.which("slurmd", path=SBIN)
    scripts = {
        "resume": f"""#!/bin/sh
export SLURM_CONF={conf} PATH={SBIN}
for node in $(scontrol show hostnames "$1"); do
    (sleep {boot_seconds}; HEADWAY_STAND_NODE=$node exec setsid {program} -b -N "$node" -f {conf}) \\
        </dev/null >>{stand.folder}/log/resume.out 2>&1 &
done
""",
        "suspend": f"""#!/bin/sh
export SLURM_CONF={conf} PATH={SBIN}
for node in $(scontrol show hostnames "$1"); do
    kill "$(cat {stand.folder}/run/slurmd.$node.pid)"
done
""",
    }
    for name, text in scripts.items():
        (stand.folder / name).write_text(text)
        (stand.folder / name).chmod(0o755)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _with_variable(name: str, value: str, folder: Path) -> list[int]:
    """Processes of one stand whose environment has a variable."""
    wanted = {f"{name}={value}".encode(), f"SLURM_CONF={folder}/slurm.conf".encode()}
    return [pid for pid, environment in _environments() if wanted <= environment]


def _environments() -> Iterator[tuple[int, set[bytes]]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                yield int(entry.name), set((entry / "environ").read_bytes().split(b"\0"))


def _belongs(pid: int, environment: set[bytes], folder: Path) -> bool:
    if f"SLURM_CONF={folder}/slurm.conf".encode() in environment:
        return True
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
        return (
            words.startswith(shutil.which("munged", path=SBIN, mode=os.F_OK).encode()) and str(folder).encode() in words
        )
    return False


def keep(folder: Path) -> None:
    """Wait for the end of the test that holds our standard input, then end whatever belongs to the stand."""
    sys.stdin.buffer.read()
    while doomed := [pid for pid, environment in _environments() if _belongs(pid, environment, folder)]:
        for pid in doomed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    keep(Path(sys.argv[1]))
