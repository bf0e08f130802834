"""Slurm through a login node: a real sshd on this machine, whose shared folder is not Headway's home."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from slurm_jobs import over, running, small, until
from slurm_stand import slurm
from ssh_stand import make_key
from waiting import limit

from tasks.common.errors import Missing
from tasks.common.process import read_json
from tasks.compute.slurm.backend import SlurmBackend
from tasks.compute.slurm.commands import NoAnswer, There
from tasks.compute.slurm.machines import slurm_findings
from tasks.config.cluster import ClusterConfig

SSHD = """
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host
AuthorizedKeysFile {folder}/key.pub
PidFile none
Subsystem sftp internal-sftp
AuthenticationMethods publickey
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
SetEnv SLURM_CONF={conf}
"""


@pytest.fixture(scope="module")
def login(tmp_path_factory):
    """The cluster's configuration, the stand, the process of sshd."""
    program = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if not program or os.geteuid() != 0:
        pytest.skip("needs the Debian package openssh-server, and root")
    folder = tmp_path_factory.mktemp("login")
    make_key(folder / "key")
    make_key(folder / "host")
    with slurm(2) as stand:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        conf = stand.environment["SLURM_CONF"]
        (folder / "sshd.conf").write_text(SSHD.format(port=port, folder=folder, conf=conf))
        kind, key, *_ = (folder / "host.pub").read_text().split()
        (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {kind} {key}\n")
        Path("/run/sshd").mkdir(exist_ok=True)
        words = [program, "-D", "-e", "-f", str(folder / "sshd.conf")]
        with open(folder / "sshd.log", "wb") as log:
            # with the stand's variable in its environment: its keeper ends the daemon too when this process is killed
            environment = {**os.environ, **stand.environment}
            daemon = subprocess.Popen(words, stderr=log, env=environment, start_new_session=True)
        until_it_listens(daemon, port)
        ssh = {"key": str(folder / "key"), "known_hosts": str(folder / "known_hosts"), "connect_seconds": 10.0}
        section = {"login": f"root@127.0.0.1:{port}", "shared": str(folder / "shared"), "ssh": ssh}
        yield {"backend": "slurm", "python": sys.executable, "slurm": section}, stand, daemon
        daemon.kill()
        daemon.wait()


def until_it_listens(daemon, port):
    deadline = time.monotonic() + limit(60)
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=limit(1)).close()
        except OSError:
            assert daemon.poll() is None and time.monotonic() < deadline, "sshd does not listen"
            time.sleep(0.05)


@pytest.fixture
def backend(login):
    return SlurmBackend(ClusterConfig.model_validate(login[0]))


def test_folder_and_inputs_go_there_and_what_the_job_writes_comes_back(tmp_path, login, backend):
    tokens = tmp_path / "tokens"
    tokens.mkdir()
    (tokens / "file").write_text("content")
    job = small(tmp_path, steps=20, inputs={"tokens": str(tokens)}, artifacts={"tokens": "tokens/x@1"})
    job = job.model_copy(update={"python": sys.executable})
    folder = tmp_path / "home" / job.id
    handle = backend.submit(job, folder)
    shared = login[0]["slurm"]["shared"]
    seen = json.loads((folder / "config.json").read_text())
    assert seen["inputs"]["tokens"].startswith(f"{shared}/inputs/")
    assert seen["program"].startswith(f"{shared}/jobs/")
    assert str(folder) not in (folder / "job.sbatch").read_text()
    assert backend.find(job, folder) == handle
    until(backend, handle, folder, running)
    deadline = time.monotonic() + limit(30)
    while not (folder / "metrics.jsonl").exists():
        assert time.monotonic() < deadline
        backend.states([(handle, folder)])
    assert until(backend, handle, folder, over)[-1].code == 0
    assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == list(range(20))
    assert read_json(folder / "result.json")["node"] == "n1"
    assert not Path(f"{shared}/jobs/{job.id}").exists(), "what has a result is not kept there"
    assert backend.states([(handle, folder)])[0].code == 0


def test_next_submission_does_not_read_the_end_of_the_last_one(tmp_path, login, backend):
    job = small(tmp_path, restarts=0).model_copy(update={"python": sys.executable})
    (tmp_path / "program.py").write_text("import sys; sys.exit(3)")
    folder = tmp_path / "home" / job.id
    assert until(backend, backend.submit(job, folder), folder, over)[-1].code == 3
    shutil.rmtree(folder / "nodes")
    (tmp_path / "program.py").write_text("import time; time.sleep(1000)")
    again = job.model_copy(update={"submission": 2})
    handle = backend.submit(again, folder)
    assert not until(backend, handle, folder, running)[-1].over
    assert not (folder / "nodes" / "0" / "exit.json").exists()
    backend.cancel(handle, folder)
    assert until(backend, handle, folder, over)[-1].failure == "cancelled"


def test_job_that_needs_what_is_only_here_is_refused(tmp_path, login, backend):
    with pytest.raises(ValueError, match=r"set cluster\.python to a Python there"):
        backend.submit(small(tmp_path), tmp_path / "home" / "job")
    config = {**login[0], "slurm": {**login[0]["slurm"], "shared": "/proc/nowhere"}}
    job = small(tmp_path).model_copy(update={"python": sys.executable})
    with pytest.raises(Missing, match="/proc/nowhere/jobs/job on the login node .* cannot be written"):
        SlurmBackend(ClusterConfig.model_validate(config)).submit(job, tmp_path / "home" / "job")


def test_a_mirrored_jobs_key_is_in_the_environment_of_sbatch_there_and_in_no_command_line(login):
    section = {name: value for name, value in login[0]["slurm"].items() if name != "shared"}
    mirrored = ClusterConfig.model_validate({**login[0], "slurm": section, "mirror": {"store": "blob"}})
    words = ("sh", "-c", 'echo "$HEADWAY_FOLDER_KEY"; cat; tr "\\0" " " < /proc/$PPID/cmdline')
    answer = There(mirrored).run(words, stdin="#!/bin/bash\n", key="0f0f")
    assert answer.out.startswith("0f0f\n#!/bin/bash\n") and answer.out.count("0f0f") == 1
    with pytest.raises(Missing, match="has no headway-nothing"):
        There(mirrored).run(("headway-nothing",), key="0f0f")


def test_login_node_that_gives_no_answer_is_unknown(tmp_path, login, backend):
    _, _, daemon = login
    findings = {name: fine for name, fine, _, _ in slurm_findings(ClusterConfig.model_validate(login[0]))}
    assert findings["slurm scheduler"]
    handle = {"job": "1", "name": "headway-x-1", "submission": 1}
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        fresh = SlurmBackend(ClusterConfig.model_validate(login[0]))
        assert fresh.states([(handle, tmp_path)])[0].state == "unknown"
        with pytest.raises(NoAnswer):
            fresh.find(small(tmp_path), tmp_path)
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
