"""What the Slurm backend makes without a cluster: the batch script, Slurm's answers as states and errors, and absent commands."""

import os
import re
import shlex
import subprocess
from functools import partial
from pathlib import Path

import pytest
from slurm_jobs import slurm_backend

from tasks.common.errors import Missing
from tasks.common.process import write_json
from tasks.compute import open_backend
from tasks.compute.job import Job
from tasks.compute.slurm.commands import NoAnswer, There
from tasks.compute.slurm.machines import slurm_findings
from tasks.compute.slurm.render import script
from tasks.compute.slurm.states import (
    bad_nodes,
    minutes,
    over_all,
    parse_partitions,
    parse_sacct,
    parse_squeue,
    require_limits,
    state_of,
    waits_because,
)
from tasks.config.backends.slurm import SlurmConfig
from tasks.config.cluster import ClusterConfig, ScratchConfig

pytestmark = pytest.mark.unit

JOB = Job(
    name="train",
    token="0123456789abcdef" * 4,
    program="tasks.jobs.train",
    settings={},
    inputs={"tokens": "/shared/tokens"},
    nodes=4,
    ranks_per_node=8,
    threads_per_rank=12,
    gpus_per_node=8,
    memory_gib=1750.5,
    time_limit=86_430.0,
    exclusive=True,
    excluded_nodes=("gpu-7", "gpu-9"),
    python="/opt/headway/bin/python",
    submission=3,
)
SECTION = SlurmConfig(
    partition="gpu",
    account="research",
    qos="high",
    constraint="h100&ib",
    reservation="monday",
    requeue=False,
    options=("--mail-type=FAIL",),
)
GOLDEN = Path(__file__).parent
PARTITIONS = """\
PartitionName=gpu Default=YES MaxNodes=8 MaxTime=2-00:00:00 State=UP TotalNodes=16
PartitionName=debug Default=NO MaxNodes=UNLIMITED MaxTime=00:30:00 State=UP TotalNodes=2
"""


def without_body(text):
    """The options, what is exported, and the step; the rest of the script is the same for every job."""
    body = text.index("\nsay()")
    return text[:body] + text[text.index("\nsrun ") : text.index("\nstep=$!")] + "\n"


@pytest.mark.parametrize(
    ("name", "job", "section"),
    [
        ("slurm_plain.golden", JOB, SECTION),
        (
            "slurm_container.golden",
            JOB.model_copy(
                update={
                    "image": "registry.example.com#team/headway:1",
                    "python": "",
                    "exclusive": False,
                    "size": "Standard_ND96isr_H100_v5",
                }
            ),
            SlurmConfig(partition="gpu", mounts=("/data:/data:ro",)),
        ),
        (
            "slurm_array.golden",
            JOB.model_copy(
                update={"array": 16, "nodes": 1, "gpus_per_node": 0, "memory_gib": None, "time_limit": 90.0}
            ),
            SlurmConfig(),
        ),
    ],
)
def test_rendered_script_is_as_it_was(name, job, section, monkeypatch):
    text = without_body(script(job, section, Path("/shared/jobs/100% train's")))
    text = re.sub(r"export PYTHONPATH=.*", "export PYTHONPATH=ROOT", text)
    golden = GOLDEN / name
    assert text == golden.read_text(), f"write it again if this is meant:\n{text}"


@pytest.mark.integration
@pytest.mark.parametrize("beeond", [False, True])
def test_whole_script_is_bash(tmp_path, beeond):
    scratch = ScratchConfig(path="/mnt/nvme", size_gib=100, beeond=beeond)
    path = tmp_path / "job.sbatch"
    path.write_text(script(JOB.model_copy(update={"scratch": scratch}), SECTION, tmp_path / "a job's"))
    said = subprocess.run(["bash", "-n", path], capture_output=True, text=True, check=False)
    assert (said.returncode, said.stderr) == (0, "")
    assert ("beeond start" in path.read_text()) == beeond
    assert "@" not in re.sub(r"B:USR1@\d+", "", path.read_text().partition("NO_FOLDER=")[0])


@pytest.mark.integration
def test_nodes_without_a_shared_folder_are_told_of_the_store_and_of_no_folder_here(tmp_path):
    from tasks.storage import open_files  # Azure's packages

    store = "stores: {blob: {uri: 'az://account/jobs/team', credential: managed_identity}}"
    (tmp_path / "stores.yaml").write_text(store)
    scratch = {"path": "/mnt/nvme", "size_gib": 100}
    cluster = ClusterConfig.model_validate({"backend": "slurm", "mirror": {"store": "blob", "max_lag_minutes": 5}})
    backend = open_backend(cluster, partial(open_files, tmp_path))
    job = JOB.model_copy(update={"image": "registry#headway:1", "scratch": ScratchConfig.model_validate(scratch)})
    rendered = backend.render(job, tmp_path / "jobs" / job.id)
    text = rendered.files["job.sbatch"]
    assert rendered.command == ("sbatch", "--parsable"), "sbatch reads the script from its standard input"
    assert "#SBATCH --output=/var/tmp/headway-%j.log\n" in text and str(tmp_path) not in text
    assert "--container-mounts=/var/tmp:/var/tmp,/mnt/nvme:/mnt/nvme" in text and "--wait=600" in text
    (step,) = [shlex.split(line)[2] for line in text.splitlines() if line.strip().startswith("bash -c ")]
    python = "/opt/headway/bin/python"
    assert step == (
        f'HEADWAY_NODE_NAME="$SLURMD_NODENAME" HEADWAY_NODE_RANK="$SLURM_NODEID" exec {python} -m tasks.jobs.node.mirror '
        f'--base /mnt/nvme --own "slurm-$SLURM_JOB_ID" --claim slurm-3.json "$claim" --store az://account/jobs/team '
        f"--prefix jobs/{job.id} --credential managed_identity --codes --max-lag-seconds 300 -- {python} -m tasks.common.process "
        "'{node}'"
    )
    (tmp_path / "job.sbatch").write_text(text)
    said = subprocess.run(["bash", "-n", tmp_path / "job.sbatch"], capture_output=True, text=True, check=False)
    assert (said.returncode, said.stderr) == (0, "")
    with pytest.raises(ValueError, match="the elements of an array need a folder that nodes share"):
        backend.render(job.model_copy(update={"array": 2}), tmp_path / "jobs" / job.id)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"launcher": "mpi"}, "launcher mpi needs a folder that machines share: use torchrun"),
        (
            {"nodes": "1:4"},
            "the machines of an elastic job meet in a folder that they share: leave elastic or mirror empty",
        ),
        ({"scratch": {"beeond": True}}, "scratch.beeond is true, and with mirror .*: set it to false"),
        ({"slurm": {"shared": "/shared"}}, "slurm.shared names a folder that nodes share, .*: leave one empty"),
    ],
)
def test_what_needs_a_shared_folder_is_refused_with_mirror(fields, says):
    with pytest.raises(ValueError, match=says):
        ClusterConfig.model_validate({"backend": "slurm", "mirror": {}, **fields})


def test_unknown_vm_size_is_an_error_that_names_the_known_ones():
    with pytest.raises(ValueError, match=r"Standard_X1.*known are .*ND96isr_H100_v5"):
        script(JOB.model_copy(update={"size": "Standard_X1"}), SlurmConfig(), Path("/shared/job"))


def squeue(state, reason="None", code=0, restarts=0, nodes="n1", id="7"):
    return parse_squeue(f"{id}|headway-x-1|{state}|{reason}|{code}|{restarts}|{nodes}|")


@pytest.mark.parametrize(
    ("rows", "state", "reason", "failure"),
    [
        (squeue("PENDING", "Resources"), "queued", "waits for free nodes", None),
        (squeue("PENDING", "PartitionTimeLimit"), "queued", "will never start: its time limit is above", None),
        (squeue("PENDING", "ReqNodeNotAvail, UnavailableNodes:n2"), "queued", "a node that it needs .*:n2", None),
        (squeue("PENDING", "SomethingNew"), "queued", "waits: SomethingNew", None),
        (squeue("PENDING", "BeginTime", restarts=2), "queued", "started again by Slurm 2 time", None),
        (squeue("CONFIGURING"), "starting", "its nodes boot or are made ready: n1", None),
        (squeue("RUNNING"), "starting", "on n1", None),
        (squeue("COMPLETING"), "running", "", None),
        (squeue("SUSPENDED"), "queued", "Slurm has suspended it", None),
        (squeue("NODE_FAIL", "NodeDown", 15), "ended", "a node failed", "node"),
        (squeue("BOOT_FAIL"), "ended", "a node did not boot", "node"),
        (squeue("PREEMPTED"), "ended", "preempted by another job", "preempted"),
        (squeue("TIMEOUT"), "ended", "timeout", "timeout"),
        (squeue("DEADLINE"), "ended", "deadline", "timeout"),
        (squeue("OUT_OF_MEMORY", code=125 << 8), "ended", "a node's memory limit was passed", "out_of_memory"),
        (squeue("CANCELLED"), "ended", "cancelled in Slurm$", "cancelled"),
        (
            parse_sacct("7|headway-x-1|CANCELLED by 1000|None|0:15|n1"),
            "ended",
            "cancelled in Slurm by 1000",
            "cancelled",
        ),
        (squeue("FAILED", "JobLaunchFailure", 4021), "ended", "does not see the job folder", "missing"),
        (
            squeue("FAILED", "NonZeroExitCode", 120 << 8),
            "ended",
            "store of .* /var/tmp/headway-7.log on the first of n1",
            "missing",
        ),
        (squeue("FAILED", "NonZeroExitCode", 121 << 8), "ended", "must lie on a file system", "missing"),
        (squeue("FAILED", "NonZeroExitCode", 123 << 8), "ended", "told to end through Slurm", "preempted"),
        (squeue("FAILED", "NonZeroExitCode", 9 << 8), "ended", "ended", None),
        (squeue("BRAND_NEW"), "unknown", "Slurm says BRAND_NEW", None),
        ([], "lost", "does not know the job", None),
    ],
)
def test_what_slurm_says_is_a_state(tmp_path, rows, state, reason, failure):
    found = state_of(rows, tmp_path)
    assert (found.state, found.failure) == (state, failure)
    assert re.search(reason, found.reason)
    assert found.state != "ended" or found.code


def test_marks_decide_only_for_success_and_when_slurm_has_forgotten(tmp_path):
    mark = {"code": 1, "reason": "cancelled", "attempts": 4, "ended": 0.0}
    write_json(tmp_path / "nodes" / "0" / "exit.json", mark)
    assert state_of(squeue("PENDING", "BeginTime", restarts=1), tmp_path).state == "queued"
    assert state_of(squeue("PREEMPTED"), tmp_path).failure == "preempted"
    assert (state_of([], tmp_path).code, state_of([], tmp_path).attempts) == (1, 4)
    assert state_of(squeue("FAILED", code=256), tmp_path).attempts == 4
    write_json(tmp_path / "nodes" / "0" / "exit.json", {**mark, "code": 0, "reason": "ended"})
    assert state_of(squeue("NODE_FAIL"), tmp_path).code == 0
    assert state_of(squeue("RUNNING"), tmp_path).state == "starting"


def test_array_is_over_when_all_elements_are(tmp_path):
    rows = squeue("COMPLETED", id="7_0") + squeue("PENDING", "Resources", id="7_1")
    assert state_of(rows, tmp_path, array=2).reason == "1 of 2 elements have ended; waits for free nodes"
    ended = [state_of(squeue(state, code=256), tmp_path) for state in ("FAILED", "TIMEOUT")]
    assert over_all(ended).reason == "ended: element(s) 0, 1"


def test_reasons_and_nodes_in_words():
    assert waits_because("BadConstraints").startswith("will never start: no nodes have")
    assert bad_nodes("n1|idle\nn2|down*\nn3|drained\nn4|mixed\nn2|down*\nn5|idle*") == ("n2", "n5")
    assert bad_nodes("n1|idle\nn3|draining") == ("n3",), "a drained node only where no other is worse"


@pytest.mark.parametrize(
    ("said", "is_minutes"),
    [("30:00", 30), ("02:30:00", 150), ("2-00:00:00", 2880), ("1-12", 2160), ("UNLIMITED", None)],
)
def test_time_limits_as_slurm_writes_them(said, is_minutes):
    assert minutes(said) == is_minutes


def test_limits_of_the_default_partition_hold_too():
    job = JOB.model_copy(update={"nodes": 9})
    with pytest.raises(ValueError, match=r"9 nodes of partition gpu: it has 16 and allows 8 a job\..*gpu, debug"):
        require_limits(job, SlurmConfig(), parse_partitions(PARTITIONS))
    require_limits(JOB, SlurmConfig(), parse_partitions(PARTITIONS))


@pytest.fixture
def executables(tmp_path, monkeypatch):
    """A PATH with nothing but a shell and the executables that the test writes."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def write(name, *lines):
        (folder / name).write_text("\n".join(["#!/bin/sh", *lines, ""]))
        (folder / name).chmod(0o755)

    monkeypatch.setenv("PATH", str(folder))
    return write


def test_machine_without_slurm_says_where_to_get_it(tmp_path, executables):
    with pytest.raises(Missing, match="this machine has no scontrol") as told:
        slurm_backend().submit(JOB, tmp_path / "job")
    assert "slurm-client" in told.value.remedy
    name, fine, said, remedy = next(slurm_findings(ClusterConfig(backend="slurm")))
    assert (name, fine) == ("slurm scheduler", False)
    assert "no sinfo" in said
    assert "login node" in remedy


@pytest.mark.integration
def test_who_cancelled_is_told_where_there_is_accounting(tmp_path, executables):
    executables("squeue", "echo '7|headway-x-1|CANCELLED|None|15|0|n1|'")
    executables("sacct", "echo '7|headway-x-1|CANCELLED by 1000|None|0:15|n1'")
    state = slurm_backend().states([({"job": "7", "name": "headway-x-1", "submission": 1}, tmp_path)])[0]
    assert (state.reason, state.failure) == ("cancelled in Slurm by 1000", "cancelled")


@pytest.mark.integration
def test_forgotten_job_is_unknown_while_accounting_gives_no_answer(tmp_path, executables):
    executables("squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2", "exit 1")
    executables("sacct", "echo 'sacct: error: slurm_persist_conn_open: Connection refused' >&2", "exit 1")
    backend, jobs = slurm_backend(), [({"job": "7", "name": "headway-x-1", "submission": 1}, tmp_path)]
    assert backend.states(jobs)[0].state == "unknown"
    with pytest.raises(NoAnswer):
        executables("squeue", "exit 0")
        backend.find(JOB, tmp_path)
    executables("sacct", "echo 'Slurm accounting storage is disabled' >&2", "exit 1")
    assert backend.states(jobs)[0].state == "lost"


@pytest.mark.integration
@pytest.mark.parametrize(
    ("said", "error", "match"),
    [
        ("Invalid account or account/partition combination specified", ValueError, "slurm.account research on gpu"),
        ("Invalid qos specification", ValueError, "slurm.qos high: Invalid qos"),
        (
            "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)",
            ValueError,
            "slurm.qos",
        ),
        ("Unable to contact slurm controller (connect failure)", NoAnswer, "does not answer"),
    ],
)
def test_what_only_a_cluster_with_accounts_refuses(tmp_path, executables, said, error, match):
    executables("scontrol", f"echo {shlex.quote(PARTITIONS)}")
    executables("squeue", "exit 0")
    executables("sbatch", f"echo 'sbatch: error: Batch job submission failed: '{shlex.quote(said)} >&2", "exit 1")
    backend = slurm_backend(**SECTION.model_dump())
    with pytest.raises(error, match=match):
        backend.submit(JOB, tmp_path / "job")


@pytest.mark.integration
def test_secrets_and_steering_variables_do_not_reach_slurm(tmp_path, executables, monkeypatch):
    for name, value in {"MY_API_KEY": "abcdefghijklmnop", "SBATCH_PARTITION": "x", "SLURM_JOB_ID": "1"}.items():
        monkeypatch.setenv(name, value)
    executables("scontrol", f"echo {shlex.quote(PARTITIONS)}")
    executables("sbatch", f"export >{tmp_path}/seen", "echo 5")
    slurm_backend().submit(JOB, tmp_path / "job")
    seen = (tmp_path / "seen").read_text()
    assert not re.search("MY_API_KEY|SBATCH_PARTITION|SLURM_JOB_ID", seen)
    assert (tmp_path / "job" / "job.sbatch").read_text().startswith("#!/bin/bash\n#SBATCH --job-name=headway-train-")


@pytest.mark.integration
def test_findings_of_a_cluster_with_and_without_containers(executables):
    executables("sinfo", "echo slurm 24.05.1")
    executables("scontrol", f"echo {shlex.quote(PARTITIONS)}")
    executables("srun", "echo '      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH'")
    executables("sh", f'PATH={os.environ["PATH"]}:/bin exec /bin/sh "$@"')
    config = ClusterConfig.model_validate({"backend": "slurm", "image": "x", "nodes": 17, "slurm": {"sku": "junk"}})
    found = {name: (fine, said) for name, fine, said, _ in slurm_findings(config)}
    assert found["slurm scheduler"] == (True, "slurm 24.05.1 answers")
    assert found["slurm partition"] == (False, "gpu: 16 node(s), UP")
    assert found["slurm pyxis"] == (True, "srun has --container-image")
    assert not found["slurm sku"][0]
    executables("srun", "true")
    found = {name: fine for name, fine, _, _ in slurm_findings(config)}
    assert (found["slurm pyxis"], found["slurm enroot"]) == (False, False)


def test_login_node_needs_a_shared_folder():
    with pytest.raises(ValueError, match=r"set slurm\.shared too"):
        There(ClusterConfig.model_validate({"backend": "slurm", "slurm": {"login": "me@login"}}))
