"""The ssh backend on real sshd in network namespaces: a job's whole way, what is refused, and what is taken away meanwhile.

Programs of most tests are the test's own; the shipped training runs in one test, whose orchestrator is killed on the way.
"""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import elastic_material
import pytest
from ssh_stand import PORT, command_line, make_key, ssh_stand
from two_machines import TORCHRUN
from waiting import limit, until

from tasks.common.errors import Missing
from tasks.compute import machines_of, open_backend
from tasks.compute.job import Job
from tasks.compute.polling import Watch
from tasks.compute.ssh.hosts import read_hosts
from tasks.compute.ssh.render import probe_command
from tasks.compute.supervisor import run
from tasks.config.cluster import ClusterConfig
from tasks.registry.records import StoreJournal
from tasks.storage import open_store

ROOT = Path(__file__).parents[4]
SILENT_SECONDS = limit(6.0)
"""More than a machine stands still where all want its processors."""
PROGRAM = """
import os, sys, time
from pathlib import Path
from tasks.jobs.node.runtime import main

def run(rank):
    for step in range(int(rank.settings["steps"])):
        rank.metrics(step=step, loss=1.0)
        rank.progress(step, 100)
        time.sleep(0.1)
        if (rank.folder.parent / "go").exists():
            break
    return {"machine": os.environ["HEADWAY_NODE_NAME"], "attempt": rank.attempt}

if __name__ == "__main__":
    sys.exit(main(run))
"""


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    with ssh_stand(tmp_path_factory.mktemp("ssh"), count=3) as made:
        yield made


@pytest.fixture
def stand(machines):
    """All of them free: a machine of the job before may take a moment more than its job."""
    until(lambda: not any(machine.running("tasks.common.process") for machine in machines.machines))
    return machines


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


@pytest.fixture(scope="module")
def no_torch(tmp_path_factory):
    """A PYTHONPATH on which `torch.distributed.run` is a launcher without torch (two_machines.py): it starts in no time."""
    shim = tmp_path_factory.mktemp("shim")
    (shim / "torch" / "distributed").mkdir(parents=True)
    for name, text in (("__init__.py", ""), ("distributed/__init__.py", ""), ("distributed/run.py", TORCHRUN)):
        (shim / "torch" / name).write_text(text)
    return {"PYTHONPATH": f"{shim}{os.pathsep}{ROOT}"}


def cluster(stand, *, nodes=2, hosts=None, **changes):
    ssh = {**stand.settings, "hosts": hosts or [machine.host for machine in stand.machines], **changes}
    watch = {"silent_node_seconds": SILENT_SECONDS, "join_node_seconds": 60.0}
    return ClusterConfig(backend="ssh", nodes=nodes, ranks_per_node=1, ssh=ssh, watch=watch)


def make_job(config, program, **changes):
    shape = {"nodes": config.nodes, "ranks_per_node": 1, "watch": config.watch, "settings": {"steps": 600}}
    given = {
        "name": "try",
        "token": secrets.token_hex(16),
        "program": str(program),
        "module": False,
        "inputs": {},
        "restarts": 0,
    }
    return Job(**{**given, **shape, **changes})


def left_of(stand, folder):
    return [command_line(pid) for machine in stand.machines for pid in machine.running(str(folder))]


def test_render_is_what_a_person_can_read(tmp_path):
    config = ClusterConfig(backend="ssh", nodes=2, ssh={"hosts": ["ops@gpu-1", "ops@gpu-2:2222", "gpu-3"]})
    job = make_job(
        config,
        "tasks.jobs.train",
        token="f" * 32,
        module=True,
        python="/opt/headway/bin/python",
        excluded_nodes=("gpu-1",),
    )
    rendered = open_backend(config).render(job, Path("/share/home/jobs/train-ffff"))
    text = rendered.files["nodes/0/start.sh"].replace(str(ROOT), "/opt/headway/code")
    golden = Path(__file__).with_name("ssh_start.golden.sh")
    assert text == golden.read_text(), f"the script changed; when that is wanted, write it to {golden}"
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    assert rendered.request == {
        "run": [
            {"machine": "ops@gpu-2:2222", "command": "bash /share/home/jobs/train-ffff/nodes/0/start.sh"},
            {"machine": "gpu-3", "command": "bash /share/home/jobs/train-ffff/nodes/1/start.sh"},
        ]
    }


def test_a_folder_of_leases_that_somebody_else_made_is_not_written_to(tmp_path):
    """There a lease may be a link to any file of Headway's account."""
    precious = tmp_path / "precious"
    precious.write_text("keys")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "gpu-1").symlink_to(precious)
    (tmp_path / f"headway-{os.getuid()}").symlink_to(tmp_path / "theirs")
    script = Path(__file__).with_name("ssh_start.golden.sh").read_text().replace("/var/tmp", str(tmp_path))
    ended = subprocess.run(
        ["bash"], input=script.replace("gpu-2", "gpu-1"), text=True, capture_output=True, check=False
    )
    assert (ended.returncode, precious.read_text()) == (77, "keys")
    assert "somebody else's: delete it" in ended.stderr
    nonce = tmp_path / "nonce"
    nonce.touch()
    config = ClusterConfig(backend="ssh", ssh={"hosts": ["gpu-1"]})
    probe = probe_command(make_job(config, "tasks.jobs.train"), read_hosts(config.ssh)[0], nonce)
    asked = probe.replace("/var/tmp", str(tmp_path))
    assert subprocess.run(asked, shell=True, text=True, capture_output=True, check=False).stdout == "leases\n"
    assert precious.read_text() == "keys"


@pytest.mark.parametrize(
    ("settings", "changes", "said"),
    [
        ({"hosts": ["a", "b"]}, {"nodes": 3}, "needs 3 machines, and ssh.hosts has 2"),
        ({"hosts": ["a", "b"]}, {"excluded_nodes": ("b",)}, "has 2, of which 1 excluded"),
        ({"hosts": ["a", "b", "c"]}, {"only_nodes": ("b",)}, "has 3, of which 2 excluded"),
        (
            {"hosts": ["a", "b"]},
            {"only_nodes": ("b", "x")},
            "names the machines x, which ssh.hosts does not have: it has a, b",
        ),
        ({"hosts": ["ops@a", "b:2222"]}, {"only_nodes": ("ops@a", "b")}, "names the machines ops@a, .* it has a, b$"),
        ({"hosts": ["a:22", "a:23"]}, {"only_nodes": ("a",)}, "names the machines a, .* it has a:22, a:23$"),
        ({"hosts": ["a", "a"]}, {}, "names a twice"),
        ({"hosts": ["a b", "c"]}, {}, "'a b' is no machine"),
        ({"hosts_file": "/nowhere/hosts"}, {}, "ssh.hosts_file is /nowhere/hosts"),
        ({"hosts": ["a", "b"]}, {"image": "img"}, "image is 'img'"),
        ({"hosts": ["a"]}, {"elastic": {"min_nodes": 2, "max_nodes": 3}}, "needs 2 machines, and ssh.hosts has 1"),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(settings, changes, said, tmp_path):
    config = ClusterConfig(backend="ssh", nodes=2, ssh=settings)
    with pytest.raises(ValueError, match=said):
        open_backend(config).submit(make_job(config, "p", **changes), tmp_path / "job")
    assert not (tmp_path / "job").exists()


def test_host_file(tmp_path):
    (tmp_path / "hosts").write_text("# the scale set\nops@10.0.0.4   # first\n\n10.0.0.5:2222\n")
    config = ClusterConfig(backend="ssh", nodes=2, ssh={"hosts_file": str(tmp_path / "hosts")})
    run = open_backend(config).render(make_job(config, "p"), tmp_path).request["run"]
    assert [step["machine"] for step in run] == ["ops@10.0.0.4", "10.0.0.5:2222"]


def test_what_a_machine_refuses(stand, program, tmp_path):
    """Each says what to do, and nothing runs afterwards."""
    strangers = tmp_path / "known_hosts"
    strangers.write_text("")
    first = stand.machines[0]
    off = make_key(tmp_path / "other")
    cases = [
        (cluster(stand, nodes=3, known_hosts=str(strangers)), "host key of .* is not known", "ssh-keyscan"),
        (cluster(stand, nodes=3, key=str(off)), "refused the login", "renew an expired certificate"),
        (cluster(stand, nodes=2, hosts=[first.host, f"root@{stand.here}:1"]), "cannot be reached", "jump host"),
        (cluster(stand, nodes=2, hosts=[first.host, "root@nosuch.invalid"]), "cannot be reached", "jump host"),
    ]
    for config, said, remedy in cases:
        with pytest.raises(Missing, match=said) as refused:
            open_backend(config).submit(make_job(config, program), tmp_path / "job")
        assert remedy in refused.value.remedy
    until(lambda: left_of(stand, tmp_path) == [])


def test_no_shared_folder_names_machine_and_folder(stand, program, tmp_path):
    """On one machine the job folder is hidden by an empty file system of its own."""
    folder, machine = tmp_path / "job", stand.machines[0]
    folder.mkdir()
    hide = (
        f"mount -t tmpfs none {folder} && exec ip netns exec {machine.name} /usr/sbin/sshd -D -f {_other_sshd(stand)}"
    )
    shadow = subprocess.Popen(["unshare", "--mount", "bash", "-c", hide])
    try:
        until(lambda: (stand.folder / "other.pid").exists())
        config = cluster(stand, hosts=[stand.machines[1].host, f"root@{machine.address}:{PORT + 1}"])
        with pytest.raises(Missing, match=f"machine {machine.address}: .*cannot read {folder}") as refused:
            open_backend(config).submit(make_job(config, program), folder)
        assert "HEADWAY_HOME" in refused.value.remedy
    finally:
        shadow.kill()
        shadow.wait()
    until(lambda: left_of(stand, folder) == [])


def _other_sshd(stand):
    """A second sshd of the first machine, one port further."""
    machine = stand.machines[0]
    text = (stand.folder / f"{machine.name}.conf").read_text()
    text = text.replace(f"Port {PORT}", f"Port {PORT + 1}").replace(f"{machine.name}.pid", "other.pid")
    (stand.folder / "other.conf").write_text(text)
    known = stand.known_hosts.read_text()
    stand.known_hosts.write_text(known + known.replace(f":{PORT} ", f":{PORT + 1} "))
    return stand.folder / "other.conf"


def test_machines_take_one_job_at_a_time_and_cancel_leaves_nothing(stand, program, no_torch, tmp_path):
    """Two machines are taken, the next job of one machine takes the third, one of two waits."""
    backend = open_backend(cluster(stand))
    jobs = [make_job(cluster(stand, nodes=count), program, environment=no_torch) for count in (2, 1, 2)]
    folders = [tmp_path / job.id / "job" for job in jobs]
    handles = [backend.submit(job, folder) for job, folder in zip(jobs, folders, strict=True)]
    first, second, third = backend.states(list(zip(handles, folders, strict=True)))
    assert (first.state, second.state, third.state) == ("running", "running", "queued")
    assert jobs[0].submission_id in third.reason
    until(lambda: left_of(stand, folders[2]) == [])
    until(lambda: (folders[0] / "metrics.jsonl").exists())
    where = [sorted({m.name for m in stand.machines if m.running(str(folder))}) for folder in folders[:2]]
    assert where == [[m.name for m in stand.machines[:2]], [stand.machines[2].name]]

    again = open_backend(cluster(stand))
    assert again.find(jobs[0], folders[0]) == handles[0]
    assert again.find(jobs[1].model_copy(update={"submission": 7}), folders[1]) is None

    began = time.monotonic()
    again.cancel(handles[0], folders[0])
    assert time.monotonic() - began < limit(15)
    until(lambda: left_of(stand, folders[0]) == [])
    assert backend.states([(handles[0], folders[0])])[0].reason == "cancelled"

    until(lambda: backend.states([(handles[2], folders[2])])[0].state == "running")
    for handle, folder in zip(handles[1:], folders[1:], strict=True):
        (folder.parent / "go").touch()
        until(lambda h=handle, f=folder: backend.states([(h, f)])[0].over)
        assert backend.states([(handle, folder)])[0].code == 0
    result = json.loads((folders[2] / "result.json").read_text())
    assert result == {"machine": stand.machines[0].address, "attempt": 1}
    assert json.loads((folders[2] / "attempt.json").read_text())["address"] == stand.machines[0].address


@pytest.mark.long
def test_machine_taken_away_is_named_and_left_out(stand, program, no_torch, tmp_path):
    """Its link goes and everything on it dies; the job goes on with the third machine."""
    config, folder = cluster(stand), tmp_path / "job"
    job, events, victims = make_job(config, program, retry={"back_off_seconds": 0}, environment=no_torch), [], []
    journal = StoreJournal(open_store(tmp_path / "home"))

    def running():
        return [machine for machine in stand.machines if machine.running(str(program))]

    def take_away():
        until(lambda: len(running()) == 2)
        victims.append(running()[1])  # which two it got is ssh's to say: the job before may still let one go
        victims[0].take_away()

    def hear(event):
        events.append(event)
        if event.kind == "excluded":
            (tmp_path / "go").touch()

    thread = threading.Thread(target=take_away)
    thread.start()
    try:
        done = run(job, backend=open_backend(config), folder=folder, journal=journal, watch=Watch(event=hear))
    finally:
        thread.join()
        (victim,) = victims
        victim.start()
    assert done.excluded_nodes == (victim.address,), events
    assert done.submissions == 2
    until(lambda: left_of(stand, folder) == [])
    end = journal.get(f"jobs/{job.token}/0001/end")
    assert end["failure"] == "node"
    assert victim.address in end["message"]


def test_no_answer_is_no_end(stand, program, tmp_path):
    """All machines silent: unknown. sshd dead and beats there: it runs. The parent killed: lost."""
    config, folder = cluster(stand, nodes=1, hosts=[stand.machines[0].host]), tmp_path / "job"
    backend, job, machine = open_backend(config), make_job(config, program), stand.machines[0]
    handle = backend.submit(job, folder)
    sshd = [pid for pid in machine.processes() if "sshd" in command_line(pid)]
    for pid in sshd:
        os.kill(pid, signal.SIGKILL)
    assert backend.states([(handle, folder)])[0].state == "unknown"
    more = open_backend(cluster(stand, nodes=1))
    assert more.states([(handle, folder)])[0].state == "running"
    machine.start()
    until(lambda: backend.states([(handle, folder)])[0].state == "running")
    os.kill(json.loads((folder / "nodes/0/handle.json").read_text())["pid"], signal.SIGKILL)
    until(lambda: backend.states([(handle, folder)])[0].over)
    lost = backend.states([(handle, folder)])[0]
    assert (lost.state, lost.failed_nodes) == ("lost", ())
    assert machine.address in lost.reason
    until(lambda: left_of(stand, folder) == [])


def test_cancel_names_a_machine_that_it_cannot_reach(stand, program, no_torch, tmp_path, caplog):
    """And what runs there ends by itself, because the shared folder says that it is not wanted."""
    folder, machine = tmp_path / "job", stand.machines[1]
    backend = open_backend(cluster(stand))
    handle = backend.submit(make_job(cluster(stand), program, environment=no_torch), folder)
    until(lambda: machine.running(str(program)))
    for pid in machine.processes():
        if "sshd" in command_line(pid):
            os.kill(pid, signal.SIGKILL)
    backend.cancel(handle, folder)
    assert f"was not stopped on machine {machine.address}" in caplog.text
    until(lambda: left_of(stand, folder) == [])
    assert backend.states([(handle, folder)])[0].reason == "cancelled"
    machine.start()


def test_mpirun_starts_ranks_on_both_machines(stand, tmp_path):
    """One mpirun, on the first machine; by ssh it starts the second one's ranks, in the second one's network."""
    if not shutil.which("mpirun"):
        pytest.skip("needs the Debian package openmpi-bin")
    path = tmp_path / "program.py"
    path.write_text(
        "import os, pathlib\n"
        "place = [os.environ[f'OMPI_COMM_WORLD_{name}'] for name in ('RANK', 'SIZE', 'LOCAL_RANK')]\n"
        "said = ' '.join([*place, os.environ['MASTER_ADDR'], os.environ['COLOUR'], os.readlink('/proc/self/ns/net')])\n"
        "pathlib.Path(os.environ['HEADWAY_JOB'], 'said-' + place[0]).write_text(said)\n"
    )
    agent = f"ssh -i {stand.key} -p {PORT} -l root -o UserKnownHostsFile={stand.known_hosts} -o BatchMode=yes"
    config, folder = cluster(stand), tmp_path / "job"
    environment = {"OMPI_MCA_plm_rsh_agent": agent, "COLOUR": "red"}
    job = make_job(config, path, launcher="mpi", ranks_per_node=2, environment=environment)
    backend = open_backend(config)
    handle = backend.submit(job, folder)
    until(lambda: backend.states([(handle, folder)])[0].over)
    logs = [log.read_text() for log in folder.rglob("*.log")]
    assert backend.states([(handle, folder)])[0].code == 0, logs
    said = [(folder / f"said-{rank}").read_text().split() for rank in range(4)]
    first = stand.machines[0].address
    assert [s[:5] for s in said] == [[str(r), "4", str(r % 2), first, "red"] for r in range(4)]
    assert said[0][5] == said[1][5] != said[2][5] == said[3][5]


ORCHESTRATOR = """
import sys, json
from pathlib import Path
from tasks.config.cluster import ClusterConfig
from tasks.compute import open_backend
from tasks.compute.job import Job
from tasks.compute.supervisor import run
from tasks.compute.polling import Watch
from tasks.registry.records import StoreJournal
from tasks.storage import open_store

config = ClusterConfig.model_validate_json(sys.argv[1])
job = Job.model_validate_json(sys.argv[2])
home = Path(sys.argv[3])
folder, journal = home / "jobs" / job.id, StoreJournal(open_store(home))
done = run(job, backend=open_backend(config), folder=folder, journal=journal, watch=Watch())
print(done.model_dump_json())
"""


def test_training_on_two_machines_outlives_its_orchestrator(stand, tmp_path, tmp_path_factory):
    training, tokens = elastic_material.training(40), elastic_material.write_tokens(tmp_path_factory.mktemp("tokens"))
    config, home = cluster(stand), tmp_path / "home"
    settings = {"training": training.model_dump(mode="json"), "checkpoint_every_steps": 8, "keep_checkpoints": 2}
    job = make_job(
        config,
        "tasks.jobs.train",
        module=True,
        name="train",
        settings=settings,
        inputs={"tokens": str(tokens)},
        progress="metrics.jsonl",
    )
    argv = [sys.executable, "-c", ORCHESTRATOR, config.model_dump_json(), job.model_dump_json(), str(home)]
    folder = home / "jobs" / job.id
    first = subprocess.Popen(argv, cwd=ROOT, start_new_session=True)
    until(lambda: (folder / "metrics.jsonl").exists(), 120)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    second = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=limit(200))
    assert second.returncode == 0, second.stderr
    done = json.loads(second.stdout)
    assert (done["adopted"], done["submissions"], done["attempts"]) == (True, 1, 1)
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, training.steps + 1))
    ranks = [json.loads(path.read_text()) for path in sorted((folder / "ranks").glob("*.json"))]
    assert len(ranks) == 2


def test_a_script_runs_on_the_machine_it_is_for(stand, tmp_path):
    machines, second = machines_of(cluster(stand)), stand.machines[1]
    machines.execute(second.address, f"ip -4 -o address > '{tmp_path}/a file'", handle={})
    assert f" {second.address}/" in (tmp_path / "a file").read_text()
    with pytest.raises(Missing, match="ended with exit code 3: no such rank"):
        machines.execute(second.address, "echo no such rank >&2; exit 3", handle={})
    with pytest.raises(Missing, match="names no machine nowhere"):
        machines.execute("nowhere", "true", handle={})
