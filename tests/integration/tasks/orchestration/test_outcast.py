"""Machines that did not qualify: what the gate says, which are left for the jobs to come, what may be asked of Azure; and how
long a qualification holds."""

import json
import os
import time
from datetime import UTC, datetime

import pytest
from azure.ai.ml._restclient.arm_ml_service.models import ClusterUpdateParameters
from made_versions import make

from tasks.artifacts import as_configured
from tasks.benchmark import (
    Proof,
    _hours_since_end,
    _still_to_measure,
    admitting,
    busbw_of,
    hardware_of,
    joined,
    sku_digest,
    too_old,
)
from tasks.compute import machines_of
from tasks.compute.azureml.support_requests import requests
from tasks.compute.nodes import Machines
from tasks.compute.submission import intend, newest, settle
from tasks.config.cluster import ClusterConfig
from tasks.config.flows import QualifyConfig, RetrainConfig
from tasks.config.qualification import ActConfig, BenchmarkConfig
from tasks.config.training import TrainingConfig
from tasks.evaluate import machines as on_machines
from tasks.orchestration.job_spec import Program, job_of
from tasks.orchestration.node_exclusion import (
    act_on,
    left_of,
    machines,
    needed_nodes,
    require_possible,
    require_proof,
    subject_of,
)
from tasks.orchestration.run import lifecycle
from tasks.orchestration.stage_context import Work, intended_nodes, run_again, working
from tasks.qualification.measured import Measurement, RankReport, Row, Sweep
from tasks.qualification.remaining import Remaining, as_told, gate_checks
from tasks.qualification.verdicts import ClusterVerdict, NodeVerdict, PairVerdict, Reason
from tasks.registry.records import Record

SLURM = {"backend": "slurm", "elastic": {"min_nodes": 2, "max_nodes": 4}}
SSH = {"backend": "ssh", "nodes": 3, "ssh": {"hosts": ["a", "b", "c", "d"]}}
AZURE = {
    "backend": "azureml", "nodes": 2, "image": "own:1",
    "azureml": {"subscription_id": "s", "resource_group": "g", "workspace": "w", "compute": "nd"},
}  # fmt: skip


def cluster(**changes):
    return ClusterConfig.model_validate({**SSH, **changes})


def node(name, verdict="healthy", check="matmul_fp32"):
    reason = Reason(
        node=name,
        check=check,
        measured=1.0,
        unit="TFLOP/s",
        limit=">= 2",
        source="a page, 2026",
        verdict=verdict,
        remedy="R.",
    )
    return NodeVerdict(name=name, verdict=verdict, reasons=() if verdict == "healthy" else (reason,))


def verdict_of(*nodes, verdict="failed", **more):
    return ClusterVerdict(verdict=verdict, sku="local-cpu", sku_digest="d", nodes=nodes, **more)


def rest(names, excluded=(), *, enough=True, verdict="healthy", reasons=()):
    out = dict.fromkeys(excluded, "why")
    return Remaining(nodes=names, excluded=out, enough=enough, verdict=verdict, reasons=reasons)


def outcomes(*arguments, needed=2):
    checks = gate_checks(*arguments, needed=needed)
    return all(check.passed for check in checks), {check.name: check.outcome for check in checks}


def test_healthy_passes_and_degraded_is_warned():
    passed, told = outcomes(verdict_of(node("a"), node("b", "degraded")), rest(("a", "b"), verdict="degraded"))
    assert passed
    assert told == {"machines that qualified": "passed", "a": "passed", "b matmul_fp32": "warned"}


@pytest.mark.parametrize("bad", ["failed", "unknown"])
def test_a_bad_machine_is_a_warning_when_it_is_left_out_and_enough_remain(bad):
    found = verdict_of(node("a"), node("b"), node("c", bad))
    passed, told = outcomes(found, rest(("a", "b"), ["c"]))
    assert passed and told["c matmul_fp32"] == told["machines that qualified"] == "warned"
    passed, told = outcomes(found, rest(("a", "b"), ["c"], enough=False, verdict=bad), needed=3)
    assert not passed and told["c matmul_fp32"] == told["machines that qualified"] == "failed"
    passed, told = outcomes(found, rest(("a", "b", "c"), verdict=bad))  # nobody may leave it out
    assert not passed and told["c matmul_fp32"] == "failed" and told["machines that qualified"] == "passed"
    passed, told = outcomes(found, rest(("a", "b", "c"), verdict=bad), needed=3)
    assert not passed and told["machines that qualified"] == "failed"


def test_what_the_machines_do_together_closes_the_gate():
    slow = node("", "failed", "all_reduce").reasons
    passed, told = outcomes(verdict_of(node("a"), node("b")), rest(("a", "b"), verdict="failed", reasons=slow))
    assert not passed and told["all_reduce"] == "failed"


@pytest.mark.parametrize("verdict", ["failed", "unknown"])
def test_a_verdict_without_a_reason_closes_the_gate_too(verdict):
    passed, told = outcomes(verdict_of(node("a"), node("b")), rest(("a", "b"), verdict=verdict))
    assert not passed and told["verdict"] == "failed"
    passed, _ = outcomes(verdict_of(NodeVerdict(name="a", verdict=verdict)), rest(("a",), verdict=verdict), needed=1)
    assert not passed


def test_silence_is_no_health():
    silent = Reason(
        node="a", check="ranks", measured=None, limit="all", source="Headway", verdict="unknown", said="no result"
    )
    found = verdict_of(NodeVerdict(name="a", verdict="unknown", reasons=(silent,)))
    (check,) = [c for c in gate_checks(found, rest(("a",), verdict="unknown"), needed=1) if c.name == "a ranks"]
    assert (check.measured, check.passed) == ("no result", False)


def test_jobs_go_on_with_the_machines_that_qualified():
    config = BenchmarkConfig(spare_nodes=1, act=ActConfig(min_nodes=2))
    assert machines(cluster(), config).nodes == 4
    left = left_of(verdict_of(node("a"), node("b"), node("c", "failed"), node("d", "failed")), cluster(), config)
    assert (left.enough, set(left.excluded)) == (True, {"c", "d"})
    subject = subject_of(cluster(exclude=["z"]), config, left)
    assert as_configured(subject, cluster(exclude=["z"])) == subject
    assert (subject.nodes, subject.world_size, subject.proven) == (2, 4, ("a", "b"))
    assert (subject.config.nodes, subject.config.exclude) == (2, ("z", "c", "d"))
    job = job_of("train", "0" * 64, Program("tasks.jobs.train", {}), on=subject, folders={})
    assert (job.nodes, job.only_nodes, job.excluded_nodes) == (2, ("a", "b"), ("z", "c", "d"))


def test_machines_that_no_job_could_get_are_not_waited_for():
    config = BenchmarkConfig(spare_nodes=1, act=ActConfig(min_nodes=2))
    counts = {there: machines(cluster(), config, existing=there).nodes for there in (None, 9, 4, 3, 2, 0)}
    assert counts == {None: 4, 9: 4, 4: 4, 3: 3, 2: 2, 0: 2}
    assert machines(cluster(), BenchmarkConfig(nodes=("a", "b")), existing=1).nodes == 2
    named = BenchmarkConfig(nodes=("a", "b", "c"), spare_nodes=1, act=ActConfig(min_nodes=2))
    counts = {there: machines(cluster(), named, existing=there).nodes for there in (None, 9, 2, 0)}
    assert counts == {None: 3, 9: 3, 2: 2, 0: 2}
    assert machines(cluster(), named, existing=2).proven == ("a", "b", "c")


def test_spares_are_used_when_one_fails_and_not_when_none_does():
    config = BenchmarkConfig(spare_nodes=1)
    left = left_of(verdict_of(*map(node, "abcd"), verdict="healthy"), cluster(), config)
    sound = subject_of(cluster(), config, left)
    assert (sound.nodes, sound.config.exclude, set(sound.proven)) == (3, (), set("abcd"))
    left = left_of(verdict_of(node("a", "failed"), *map(node, "bcd")), cluster(), config)
    assert subject_of(cluster(), config, left).nodes == 3
    left = left_of(verdict_of(node("a", "failed"), node("b", "unknown"), *map(node, "cd")), cluster(), config)
    assert not left.enough


def test_where_no_machine_can_be_chosen_none_is_left_out():
    azure = ClusterConfig.model_validate(AZURE)
    left = left_of(verdict_of(node("a"), node("b", "failed")), azure, BenchmarkConfig(act=ActConfig(min_nodes=1)))
    assert (left.excluded, left.verdict) == ({}, "failed")
    assert subject_of(azure, BenchmarkConfig(), left).proven == ()


def test_a_machine_that_never_came_is_no_name_that_a_scheduler_knows():
    left = rest(("a", "b"), ["machine 3 of 3"])
    assert subject_of(cluster(), BenchmarkConfig(act=ActConfig(min_nodes=2)), left).config.exclude == ()


def test_the_rest_is_judged_by_its_own_measurement_and_the_bad_machine_keeps_its_evidence():
    def proof(nodes, left, verdicts, busbw):
        ranks = tuple(RankReport(rank=number, local_rank=0, node=name, host=name) for number, name in enumerate(nodes))
        sweep = Sweep(
            collective="all_reduce", scope="all", nodes=nodes, ranks=len(nodes), backend="gloo", tool="torch",
            rows=(Row(bytes=1024, busbw=busbw),),
        )  # fmt: skip
        found = Measurement(nodes=nodes, expected_nodes=len(nodes), ranks_per_node=1, ranks=ranks, sweeps=(sweep,))
        return Proof(found, verdict_of(*verdicts), left)

    first = proof(("a", "b", "c"), rest(("a", "b"), ["c"]), (node("a"), node("b"), node("c", "failed")), 0.01)
    second = proof(("a", "b"), rest(("b", "a")), (node("a"), node("b")), 2.5)
    both = joined(first, second)
    assert [(n.name, n.verdict) for n in both.verdict.nodes] == [("a", "healthy"), ("b", "healthy"), ("c", "failed")]
    assert (both.left.nodes, set(both.left.excluded)) == (("b", "a"), {"c"})
    assert [report.node for report in both.measured.ranks] == ["a", "b", "c"]
    assert busbw_of(both.measured, both.left) == 2.5
    assert {sweep.nodes for sweep in both.measured.sweeps} == {("a", "b"), ("a", "b", "c")}


def test_a_machine_that_ended_the_job_for_all_leaves_the_others_to_prove_themselves():
    found = Measurement(nodes=("a", "b", "c"), expected_nodes=3, ranks_per_node=1, error="a node failed")
    left = rest((), "abc", enough=False, verdict="unknown")
    assert Proof(found, verdict_of(), left, ("b",)).unproven == ("a", "c")
    assert Proof(found, verdict_of(), left).unproven == ()  # the job failed, and nobody says by whose fault
    kept = rest(("a", "b", "c"), verdict="unknown")
    assert Proof(found, verdict_of(), kept, ("b",)).unproven == ()  # nobody may leave one out
    fresh = kept.model_copy(update={"needs_fresh_run": True})
    assert Proof(found, verdict_of(), fresh).unproven == ("a", "b", "c")
    second = Proof(found, verdict_of(), left, ("b",), ("c",))  # c went before the last measurement
    assert second.unproven == ("a",)


def test_an_elastic_job_needs_the_fewest_machines_and_grows_beyond_them():
    slurm = ClusterConfig.model_validate(SLURM)
    on = machines(slurm, BenchmarkConfig())
    assert (on.nodes, on.config.elastic, on.config.slurm.requeue) == (2, None, False)
    assert machines(slurm, BenchmarkConfig(spare_nodes=1)).nodes == 3
    assert needed_nodes(slurm, BenchmarkConfig()) == 2
    subject = subject_of(slurm, BenchmarkConfig(spare_nodes=1), rest(("n1", "n2"), ["n3"]))
    assert as_configured(subject, slurm) == subject
    assert (subject.nodes, subject.config.elastic, subject.config.exclude) == (2, slurm.elastic, ("n3",))
    on = admitting(subject, BenchmarkConfig(), TrainingConfig())
    job = job_of("train", "k" * 32, Program("tasks.jobs.train", {}), on=on, folders={})
    assert (job.only_nodes, job.admission.proven, job.excluded_nodes) == ((), ("n1", "n2"), ("n3",))
    assert job.admission.settings["sku"]["name"] == "local-cpu"
    assert on_machines(on).nodes == 1
    many = on.model_copy(update={"config": ClusterConfig.model_validate({**SLURM, "evaluation": {"nodes": 4}})})
    assert on_machines(many).nodes == 2


def test_an_elastic_job_of_named_machines_grows_no_further_than_what_qualified():
    slurm, names = ClusterConfig.model_validate(SLURM), BenchmarkConfig(nodes=("n1", "n2", "n3", "n4"))
    assert machines(slurm, names).nodes == 4
    subject = subject_of(slurm, names, rest(("n1", "n2", "n4"), ["n3"]))
    assert as_configured(subject, slurm) == subject
    assert (subject.config.elastic.min_nodes, subject.config.elastic.max_nodes) == (2, 3)
    on = admitting(subject, names, TrainingConfig())
    job = job_of("train", "k" * 32, Program("tasks.jobs.train", {}), on=on, folders={})
    assert (job.only_nodes, job.admission) == (("n1", "n2", "n4"), None)


def test_others_are_measured_in_the_place_of_a_bad_machine(monkeypatch):
    slurm = ClusterConfig.model_validate(SLURM)
    measured = Measurement(nodes=("n1", "n2"), expected_nodes=2, ranks_per_node=1)
    bad = rest(("n1",), ["n2"], enough=False, verdict="failed")
    proof = Proof(measured, verdict_of(node("n1"), node("n2", "failed")), bad)
    for count, nodes in ((3, 2), (1, None), (None, 2)):
        monkeypatch.setattr(Machines, "count", lambda self, only=(), count=count: count)
        monkeypatch.setattr("tasks.compute.slurm.machines.SlurmMachines.count", Machines.count)
        on = _still_to_measure(proof, slurm, BenchmarkConfig())
        assert (on and on.nodes) == nodes
        assert on is None or (on.config.exclude, on.proven) == (("n2",), ())
    enough = Proof(measured, verdict_of(node("n1"), node("n3"), node("n2", "failed")), rest(("n1", "n3"), ["n2"]))
    assert _still_to_measure(enough, slurm, BenchmarkConfig()) is None
    assert _still_to_measure(proof, slurm, BenchmarkConfig(nodes=("n1", "n2"))) is None


@pytest.mark.parametrize(
    "config, changes, said",
    [
        ({"backend": "local"}, {"spare_nodes": 1}, "backend local has one machine"),
        ({"backend": "local"}, {"nodes": ("x",)}, "benchmark.nodes is x: backend local has one machine"),
        (AZURE, {"spare_nodes": 1}, "lets nobody choose the nodes"),
    ],
)
def test_machines_that_cannot_be_chosen_are_refused(config, changes, said):
    with pytest.raises(ValueError, match=said):
        require_possible(ClusterConfig.model_validate(config), BenchmarkConfig(**changes))


def test_a_qualification_that_could_not_let_training_start_is_refused_before_it():
    with pytest.raises(ValueError, match="lacks collectives: the plan"):
        require_proof(ClusterConfig(), BenchmarkConfig(checks=("health", "compute")))
    with pytest.raises(ValueError, match="names 1 machines, and training needs 3"):
        require_proof(cluster(), BenchmarkConfig(nodes=("a",)))
    require_proof(cluster(), BenchmarkConfig(nodes=("a",), act=ActConfig(min_nodes=1)))


def test_every_number_of_machines_that_may_be_left_must_divide_the_batch():
    def config(least, batch):
        act = {"act": {"min_nodes": least}}
        return {
            "cluster": {**SSH, "nodes": 4},
            "benchmark": act,
            "training": {"global_batch_size": batch, "micro_batch_size": 1},
        }

    assert RetrainConfig.model_validate(config(3, 24)).world_sizes == (6, 8)
    with pytest.raises(ValueError, match="global_batch_size 8 must be a multiple of .* = 1 x 6 = 6"):
        RetrainConfig.model_validate(config(3, 8))
    with pytest.raises(ValueError, match="min_nodes 5 must not be above cluster.nodes 4"):
        QualifyConfig.model_validate({k: v for k, v in config(5, 8).items() if k != "training"})


def test_the_json_has_what_the_sentences_are_made_of():
    pair = PairVerdict(a="a", b="b", busbw_gb_s=None, verdict="unknown")
    told = json.loads(json.dumps(as_told(verdict_of(node("a", "failed"), pairs=(pair,)))))
    (first,) = told["nodes"]
    wanted = {"check": "matmul_fp32", "measured": 1.0, "unit": "TFLOP/s", "limit": ">= 2", "source": "a page, 2026"}
    assert (first["name"], first["verdict"]) == ("a", "failed")
    assert {key: first["reasons"][0][key] for key in wanted} == wanted
    assert told["pairs"][0]["busbw_gb_s"] is None


@pytest.mark.parametrize("config", [{}, SSH, {"backend": "ray"}, AZURE], ids=["local", "ssh", "ray", "azureml"])
def test_only_slurm_drains(config):
    cluster = ClusterConfig.model_validate(config)
    (told,) = machines_of(cluster).drain({"a": "slow"})
    assert (told.node, told.done, told.said) == ("a", False, cluster.capabilities.cannot_drain) and told.said
    with pytest.raises(ValueError, match="has no drained machines"):
        machines_of(cluster).resume()


def test_what_may_be_the_other_machines_fault_is_left_out_and_not_drained():
    """Of two machines with one bad link both are out; one that was seen to be bad and died of it is drained all the same."""
    pair = Reason(
        node="a",
        check="all_reduce busbw",
        where="pair with b",
        measured=1.0,
        limit=">= 9",
        source="a page",
        verdict="failed",
    )
    either = NodeVerdict(name="a", verdict="failed", reasons=(pair,))
    unfinished = Reason(
        node="b", check="pairs", measured="not finished", limit="finished", source="Headway", verdict="unknown"
    )
    ecc = unfinished.model_copy(update={"check": "ecc", "measured": 9.0, "verdict": "failed", "source": "NVIDIA"})
    died = NodeVerdict(name="b", verdict="unknown", reasons=(unfinished, ecc))
    ranks = tuple(
        RankReport(rank=n, local_rank=0, node=name, host=name, machine={"resource_id": VM, "physical_host": "H"})
        for n, name in enumerate("abc")
    )
    found = verdict_of(either, died, node("c"), verdict="unknown")
    config = BenchmarkConfig(act=ActConfig(min_nodes=1))
    left = left_of(found, cluster(), config)
    assert set(left.excluded) == {"a", "b"}
    told = act_on(Measurement(nodes=tuple("abc"), ranks=ranks), found, left, cluster(), config)
    assert {request.node for request in told.requests} == {"b"}
    category = told.requests[0].body["properties"]["impactCategory"]
    assert category == "Resource.Hpc.Unhealthy.DBEOverLimit"


@pytest.mark.parametrize(("failed", "share", "asks"), [(1, 0.1, False), (3, 0.1, True), (3, 0.3, False)])
def test_more_failed_machines_than_are_drained_unasked_are_left_to_a_person(run, failed, share, asks):
    """There is no Slurm here, so none is drained; the answer says whether it was tried."""
    slurm = ClusterConfig.model_validate({"backend": "slurm", "nodes": 10})
    found = verdict_of(*(node(f"n{n}", "failed" if n < failed else "healthy") for n in range(10)))
    config = BenchmarkConfig.model_validate({"act": {"drain": True, "drain_share": share, "min_nodes": 1}})
    left = left_of(found, slurm, config)
    with working(Work("benchmark", "0" * 64, run, "", handed=[], context=[])):
        told = act_on(Measurement(nodes=tuple(f"n{n}" for n in range(10))), found, left, slurm, config)
    assert [one.node for one in told.drained] == [f"n{n}" for n in range(failed)]
    assert all(
        one.said.startswith("left for you to decide: 3 of 10 machines failed at once") == asks for one in told.drained
    )
    assert not any(one.done for one in told.drained)
    assert all("headway qualify --drain n" in check.remedy for check in told.checks)


VM = "/subscriptions/s-1/resourceGroups/g/providers/Microsoft.Compute/virtualMachines/gpu-7"
FACTS = {"resource_id": VM, "vm_id": "0f1e", "physical_host": "GGBB90904476"}
FOUND = {
    "check": "nvlink_down",
    "text": "gpu-7: nvlink_down is failed: 2, limit 0",
    "when": "2026-11-22T10:00:00+00:00",
}


def test_a_guest_health_report_and_a_redeploy_are_rendered_for_a_vm():
    report, redeploy = requests("gpu-7", FACTS, cluster=cluster(), **FOUND)
    assert (report.what, report.method) == ("report", "PUT")
    assert report.url.startswith(
        "https://management.azure.com/subscriptions/s-1/providers/Microsoft.Impact/workloadImpacts/"
    )
    assert report.url.endswith("?api-version=2023-02-01-preview")
    assert report.body == {
        "properties": {
            "startDateTime": "2026-11-22T10:00:00+00:00",
            "impactCategory": "Resource.Hpc.Unhealthy.NvLink",
            "impactDescription": "gpu-7: nvlink_down is failed: 2, limit 0",
            "impactedResourceId": VM,
            "additionalProperties": {"PhysicalHostName": "GGBB90904476", "VmUniqueId": "0f1e"},
        }
    }
    assert (redeploy.method, redeploy.body) == ("POST", None)
    assert redeploy.url == f"https://management.azure.com{VM}/redeploy?api-version=2024-07-01"
    assert requests("gpu-7", FACTS, cluster=cluster(), **FOUND)[0] == report  # a name, so that it is not sent twice


@pytest.mark.parametrize(
    "check, category",
    [("NHC2009", "HpcMissingGpu"), ("ib_ports_active", "IBPortDown"), ("all_reduce of pair", "ManualInvestigation")],
)
def test_the_category_of_a_report(check, category):
    report, _ = requests("n", FACTS, cluster=cluster(), **{**FOUND, "check": check})
    assert report.body["properties"]["impactCategory"] == f"Resource.Hpc.Unhealthy.{category}"


def test_a_machine_that_did_not_say_who_it_is_is_not_reported():
    assert requests("n", {}, cluster=cluster(), **FOUND) == ()
    (only,) = requests("n", {"resource_id": VM}, cluster=cluster(), **FOUND)  # Azure takes no report without the host
    assert only.what == "redeploy"


def test_azure_ml_gets_a_change_of_the_cluster_that_its_own_model_takes():
    (request,) = requests("node-1", FACTS, cluster=ClusterConfig.model_validate(AZURE), **FOUND)
    assert (request.what, request.method) == ("replace", "PATCH")
    assert "/Microsoft.MachineLearningServices/workspaces/w/computes/nd?api-version=" in request.url
    model = ClusterUpdateParameters(request.body)
    scale = model.properties.properties.scale_settings
    assert (scale.min_node_count, scale.max_node_count, scale.node_idle_time_before_scale_down.total_seconds()) == (
        0,
        2,
        120,
    )


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A lifecycle with a real store, in which nothing is told to MLflow."""
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path / "home"))
    with lifecycle("qualify", QualifyConfig(), subject="c", stages=("benchmark",), dry=True) as run:
        yield run


def test_nodes_without_gpus_may_be_of_a_size_that_nothing_is_known_of(run):
    small = {"size": "Standard_DS3_v2", "subscription_id": "s", "resource_group": "g", "workspace": "w", "compute": "c"}
    where = {"backend": "azureml", "image": "x", "azureml": small}
    assert hardware_of(cluster(**where), BenchmarkConfig()).name == "local-cpu"
    with pytest.raises(ValueError, match="Standard_DS3_v2"):
        hardware_of(cluster(**where, gpus_per_node=1), BenchmarkConfig())
    known = {**where, "azureml": {**small, "size": "Standard_ND96asr_v4"}}
    assert hardware_of(cluster(**known), BenchmarkConfig()).name == "Standard_ND96asr_v4"


NOW = time.time()


def record_of(config, hours_ago=1.0):
    """Of a qualification of the machines a and b, c being out."""
    value = {
        "baseline": sku_digest(hardware_of(cluster(), config)),
        "hosts": [],
        "machines": {"a": "healthy", "b": "healthy", "c": "failed"},
        "subject": {"proven": ["a", "b"]},
    }
    return Record(
        stage="benchmark", key="k", arguments={}, inputs=(), context=(), outputs=(), metrics={}, seconds=1.0,
        value=value, created=NOW - 3600 * hours_ago,
    )  # fmt: skip


def qualified(run, folder, *nodes, hours_ago):
    """A qualification in the store."""
    page = json.dumps({"verdict": verdict_of(*nodes).model_dump(mode="json")})
    created = datetime.fromtimestamp(NOW - 3600 * hours_ago, UTC).isoformat(timespec="seconds")
    make(run.store, folder, "qualification/local", {"qualification.json": page}, created=created)


def test_a_qualification_holds_for_its_time(run):
    config = BenchmarkConfig(max_age_hours=24.0)
    assert not too_old(record_of(config), (cluster(), config))
    assert too_old(record_of(config, hours_ago=25.0), (cluster(), config))
    other = record_of(config)
    other.value["baseline"] = "of other hardware"
    assert too_old(other, (cluster(), config))


def test_a_qualification_ends_when_a_later_one_condemns_one_of_its_machines(run, tmp_path):
    """A nightly one with other settings, too; machines that were out already change nothing."""
    config = BenchmarkConfig(max_age_hours=24.0)
    record = record_of(config)
    qualified(run, tmp_path / "own", node("a"), node("b"), node("c", "failed"), hours_ago=1.1)
    qualified(run, tmp_path / "before", node("a", "failed"), node("b"), hours_ago=2.0)
    qualified(run, tmp_path / "later", node("a"), node("b", "degraded"), node("c", "failed"), hours_ago=0.6)
    assert not too_old(record, (cluster(), config))
    qualified(run, tmp_path / "bad", node("a"), node("b", "unknown"), hours_ago=0.5)
    assert too_old(record, (cluster(), config))
    qualified(run, tmp_path / "mended", node("a"), node("b"), hours_ago=0.4)
    assert too_old(record, (cluster(), config))
    assert not too_old(record_of(config, hours_ago=0.45), (cluster(), config))
    nobody = record_of(config)
    nobody.value["subject"]["proven"] = []  # where machines cannot be chosen
    assert too_old(nobody, (cluster(), config))


def test_the_age_of_a_job_that_ended_while_nobody_looked(tmp_path):
    now = time.time()  # not NOW, which is when the file was collected
    (tmp_path / "result.json").write_text("{}")
    os.utime(tmp_path / "result.json", (now - 7200, now - 7200))
    assert _hours_since_end(tmp_path) == pytest.approx(2.0, abs=0.2)
    (tmp_path / "nodes" / "0").mkdir(parents=True)
    (tmp_path / "nodes" / "0" / "exit.json").write_text(json.dumps({"code": 0, "ended": now - 36000}))
    assert _hours_since_end(tmp_path) == pytest.approx(10.0, abs=0.2)


def test_an_open_job_is_adopted_with_the_machines_that_it_was_meant_for(run, tmp_path):
    """Two machines came back while the orchestrator was away: the job that measures the others is not refused for it."""
    key = "0" * 64
    with working(Work("benchmark", key, run, "", handed=[], context=[])):
        assert intended_nodes() is None
        on = machines(cluster(), BenchmarkConfig(), existing=None).model_copy(update={"nodes": 2})
        job = job_of("benchmark", key, Program("tasks.jobs.benchmark", {}), on=on, folders={})
        (tmp_path / "jobs").mkdir()
        assert intend(job, tmp_path / "jobs" / job.id, run.journal, stuck=0, cluster=on.config)
        assert intended_nodes() == 2
        settle(job.token, run.journal, "done")
        assert intended_nodes() is None


def test_what_is_run_again_adopts_nothing(run, tmp_path):
    """Its last submission is over before anything new begins, which this run, as one that writes nothing, refuses."""
    key = "1" * 64
    work = Work("benchmark", key, run, "", handed=[], context=[])
    with working(work):
        program, on = Program("tasks.jobs.benchmark", {}), machines(cluster(), BenchmarkConfig())
        job = job_of("benchmark", key, program, on=on, folders={})
        (tmp_path / "jobs").mkdir()
        intend(job, tmp_path / "jobs" / job.id, run.journal, stuck=0, cluster=on.config)
        work.done[job.token] = tmp_path / "jobs" / job.id
        assert (newest(job.token, run.journal).outcome, intended_nodes()) == ("open", 3)
        with pytest.raises(AssertionError, match="a dry run does not write"):
            run_again(program, on=on)
        assert (newest(job.token, run.journal).outcome, intended_nodes()) == ("done", None)
