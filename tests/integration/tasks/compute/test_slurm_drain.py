"""Drain and resume on a real Slurm of three nodes, and jobs that run only on machines that proved themselves."""

import pytest
from slurm_jobs import slurm_backend, small, until
from slurm_stand import slurm

from tasks.compute import machines_of
from tasks.compute.job import require_enough, write_folder
from tasks.compute.slurm import machines as slurm_machines
from tasks.compute.slurm.commands import Here
from tasks.compute.slurm.states import restricted
from tasks.config.cluster import ClusterConfig

CLUSTER = ClusterConfig.model_validate({"backend": "slurm", "nodes": 1})


@pytest.fixture(scope="module")
def stand():
    with slurm(3, cpus=1) as made, pytest.MonkeyPatch.context() as environment:
        for name, value in made.environment.items():
            environment.setenv(name, value)
        yield made


@pytest.fixture
def clean(stand):
    yield stand
    stand.command("scontrol", "update", f"NodeName={','.join(stand.nodes)}", "State=UNDRAIN", check=False)
    stand.wait_idle()


def reason_of(stand, name):
    return stand.command("sinfo", "--noheader", "--Node", "--format=%E", f"--nodes={name}").splitlines()[0]


def test_a_drained_node_says_why_and_is_put_back(clean):
    why = "matmul_fp32 is failed: 3.2 TFLOP/s, limit >= 4 [a page | 2026]"
    (told,) = machines_of(CLUSTER).drain({"n2": why})
    assert told.done and clean.node_state("n2") == "drained"
    assert (
        reason_of(clean, "n2") == "headway: matmul_fp32 is failed: 3.2 TFLOP/s, limit >= 4 (a page | 2026)" in told.said
    )
    (again,) = machines_of(CLUSTER).drain({"n2": "another"})
    assert again.done and "by Headway before" in again.said and "another" not in reason_of(clean, "n2")
    assert [(one.node, one.done) for one in machines_of(CLUSTER).resume()] == [("n2", True)]
    assert clean.node_state("n2").startswith("idle")
    assert machines_of(CLUSTER).resume() == ()


def test_what_somebody_else_drained_is_left_as_it_is(clean):
    clean.command("scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=memory swap")
    (told,) = machines_of(CLUSTER).drain({"n1": "slow"})
    assert not told.done and "drained before by root" in told.said and "memory swap" in told.said
    machines_of(CLUSTER).drain({"n3": "slow"})
    assert [one.node for one in machines_of(CLUSTER).resume()] == ["n3"]
    (left,) = machines_of(CLUSTER).resume(["n1"])
    assert not left.done and "not drained by Headway" in left.said
    assert (clean.node_state("n1"), reason_of(clean, "n1")) == ("drained", "memory swap")
    (healthy,) = machines_of(CLUSTER).resume(["n2"])
    assert not healthy.done and "IDLE" in healthy.said


def test_a_node_whose_reason_somebody_changed_is_theirs(clean):
    machines_of(CLUSTER).drain({"n1": "slow"})
    clean.command("scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=being repaired")
    assert machines_of(CLUSTER).resume() == () and clean.node_state("n1") == "drained"


def test_an_unknown_node_is_said_and_the_others_are_drained(clean):
    told = {one.node: one for one in machines_of(CLUSTER).drain({"nx": "slow", "n1": "slow"})}
    assert not told["nx"].done and "does not know" in told["nx"].said
    assert told["n1"].done


class Nobody(Here):
    """The same login node for an account that is no operator."""

    def run(self, words, *, seconds=30.0):
        return super().run(("setpriv", "--reuid=65534", "--clear-groups", *words), seconds=seconds)


def test_without_rights_nothing_changes_and_nothing_breaks(clean):
    for path in (clean.folder, clean.folder / "run"):
        path.chmod(0o755)
    (clean.folder / "run" / "munge.sock").chmod(0o777)
    (told,) = slurm_machines.drain(Nobody(), {"n1": "slow"})
    assert not told.done and "operator" in told.said, told
    assert clean.node_state("n1").startswith("idle")


def test_a_scheduler_that_is_away_is_said(clean):
    clean.stop_controller()
    try:
        (told,) = slurm_machines.drain(Impatient(), {"n1": "slow"})
    finally:
        clean.continue_controller()
    assert not told.done and "does not answer" in told.said


class Impatient(Here):
    def run(self, words, *, seconds=30.0):
        return super().run(words, seconds=1.0)


def test_a_job_runs_only_on_machines_that_proved_themselves(clean, tmp_path):
    backend, job = slurm_backend(), small(tmp_path, steps=1, only_nodes=("n2", "n3"), excluded_nodes=("n2",))
    folder = tmp_path / "job"
    write_folder(job, folder)
    handle = backend.submit(job, folder)
    until(backend, handle, folder, lambda state: state.over)
    script = (folder / "job.sbatch").read_text()
    assert "#SBATCH --exclude=n2,n1" in script
    assert '"name": "n3"' in (folder / "nodes" / "0" / "node.json").read_text()


def test_machines_that_slurm_does_not_have_are_refused_before_anything_waits(clean, tmp_path):
    job = small(tmp_path, only_nodes=("n7", "n8"))
    with pytest.raises(
        ValueError, match="names the machines n7, n8, which this cluster of Slurm does not have: it has n1, n2, n3"
    ):
        restricted(job, CLUSTER.slurm, Here())
    spare = small(tmp_path, only_nodes=("n7", "n2"))  # one that is gone does not matter while enough are there
    assert restricted(spare, CLUSTER.slurm, Here()).excluded_nodes == ("n1", "n3")
    assert restricted(small(tmp_path), CLUSTER.slurm, Here()).excluded_nodes == ()


def test_when_too_few_of_them_are_left_the_error_says_what_to_do(tmp_path):
    job = small(tmp_path, nodes=2, only_nodes=("n1", "n2", "n3"), excluded_nodes=("n2",))
    require_enough(job)
    with pytest.raises(ValueError, match="of those that qualified 1 are left without n2, n3: n1. .*`headway qualify`"):
        require_enough(job.model_copy(update={"excluded_nodes": ("n2", "n3")}))
