"""The configurations that people start from on Azure ML: each is planned and priced, and its job is what Azure ML takes."""

import io
import json
import os
import subprocess

import pytest
import yaml
from azure.ai.ml import load_compute, load_job
from azureml_service import cluster
from azureml_stand import standing
from support import HEADWAY
from waiting import limit

from tasks.hardware.sku import load_sku

OWN = {
    "image": "acme.azurecr.io/headway/cluster:0.2.0",
    "azureml": {"subscription_id": "s", "resource_group": "g", "workspace": "w", "compute": "mine", "store": "team"},
}
GPUS = {"azureml-nd-h100": 8, "azureml-nc-a100": 4, "azureml-spot": 4, "azureml-cpu": 0}
USD_AN_HOUR = {"azureml-nd-h100": 98.32, "azureml-nc-a100": 14.692, "azureml-spot": 1.777732, "azureml-cpu": 1.353}
TIERS = {"azureml-spot": "low_priority"}
MEMORY = {"azureml-nd-h100": "512g", "azureml-nc-a100": "256g", "azureml-spot": "256g", "azureml-cpu": "8g"}


@pytest.fixture
def headway(tmp_path):
    """Runs a command, in a home with a store on Azure Blob beside its own; nobody is logged in."""
    (tmp_path / "home").mkdir()
    team = {"uri": "az://account/models/team", "credential": "managed_identity"}
    (tmp_path / "home" / "stores.yaml").write_text(yaml.safe_dump({"stores": {"team": team}}))
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"cluster": OWN}))

    def run(*words, code=0, **how):
        environment = {**os.environ, "HEADWAY_HOME": str(tmp_path / "home"), "PATH": "/usr/bin:/bin"}
        ran = subprocess.run([HEADWAY, *words], capture_output=True, text=True, env=environment, cwd=tmp_path, **how)
        assert ran.returncode == code, ran.stderr
        return ran.stdout

    return run


@pytest.mark.parametrize("name", GPUS)
def test_it_is_planned_with_a_price_before_anybody_has_an_account(headway, name):
    plan = json.loads(headway("plan", "-c", name, "--json"))
    assert plan["fits"] and 0 < plan["days"] <= plan["days_with_failures"]
    assert plan["cost"]["machine_hour"] == USD_AN_HOUR[name]
    assert plan["cost"]["total"] >= plan["days_with_failures"] * 24 * USD_AN_HOUR[name] > 0
    assert ("assumed     690 GFLOP/s" in headway("plan", "-c", name)) == (not GPUS[name])


def test_a_plan_over_its_budget_or_its_time_does_not_fit(headway):
    for change, why in (("spending.max_cost=1e-9", "max_cost"), ("max_minutes=1e-6", "max_minutes")):
        plan = json.loads(headway("plan", "-c", "azureml-cpu", "--set", f"planning.{change}", "--json"))
        assert not plan["fits"] and plan["fit"] == "fits" and why in plan["reason"]


@pytest.mark.parametrize("name", GPUS)
def test_its_job_and_its_cluster_are_what_azure_ml_takes(headway, name, tmp_path):
    headway("job", "render", "-c", "codeparrot", "-c", name, "-c", "mine.yaml", "--to", "rendered")
    files = {path.name: path.read_text() for path in (tmp_path / "rendered").iterdir()}
    job, cluster = load_job(io.StringIO(files["job.yml"])), load_compute(io.StringIO(files["compute.yml"]))
    assert (job.resources.instance_count, job.resources.shm_size) == (1, MEMORY[name])
    assert job.distribution.process_count_per_instance == 1 and job.environment.image == OWN["image"]
    sku = load_sku(cluster.size)
    assert sku.environment.items() <= job.environment_variables.items()
    assert job.environment_variables.get("NCCL_TOPO_FILE", "") == sku.topology
    assert (cluster.tier, cluster.min_instances) == (TIERS.get(name, "dedicated"), 0)
    sent = json.loads(files["job.json"])
    assert (sent["gpus_per_node"], sent["preemptible"]) == (GPUS[name], name in TIERS)
    assert sent["ranks_per_node"] == (GPUS[name] or 2) and job.limits.timeout == sent["time_limit"] + 600
    limit = sku.azureml["low_priority_job_days" if sent["preemptible"] else "job_days"].value
    assert sent["time_limit"] < limit * 86400 and sent["retry"]["attempts"] >= 3
    assert sent["watch"]["start_minutes"] * 60 >= sent["watch"]["join_node_seconds"] > 600
    assert (sent["scratch"] or {"required": False})["required"] is False


@pytest.fixture(scope="module")
def stand(tmp_path_factory):
    with standing(tmp_path_factory.mktemp("azureml")) as stand:
        yield stand


@pytest.mark.parametrize(
    ("name", "tier"),
    [pytest.param("azureml-cpu", "Dedicated", marks=pytest.mark.long), ("azureml-spot", "LowPriority")],
)
def test_a_program_of_ones_own_runs_there_too(stand, tmp_path, name, tier):
    """In the fake workspace, whose nodes have no GPUs; the tier must be that of its cluster."""
    stand.service.clusters = {"mine": cluster(vmPriority=tier)}
    own = {**OWN["azureml"], "endpoint": stand.service.url, "store": "cloud", "shm_size": "1g"}
    (tmp_path / "mine.yaml").write_text(
        yaml.safe_dump({"cluster": {"image": OWN["image"], "gpus_per_node": 0, "azureml": own}})
    )
    (tmp_path / "mine.py").write_text('print("of my own")\n')
    words = [HEADWAY, "submit", "mine.py", "--ranks", "1", "-c", name, "-c", "mine.yaml", "--json"]
    environment = {**os.environ, "HEADWAY_HOME": str(stand.home)}
    ran = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=limit(120))
    assert ran.returncode == 0, ran.stderr + stand.said()
    folder = stand.home / "jobs" / json.loads(ran.stdout)["id"]
    assert "of my own" in (folder / "logs" / "rank-0.log").read_text()
    sent = stand.service.record(stand.service.submitted[-1]).body["properties"]
    assert sent["tags"]["team"] == "my-team" and "/environments/headway-image/versions/" in sent["environmentId"]


def test_a_dry_run_shows_the_plan_with_its_price_and_a_start_names_the_placeholders(headway, tmp_path):
    (tmp_path / "text.jsonl").write_text('{"text": "a text"}\n')
    headway("dataset", "publish", "codeparrot", "text.jsonl")
    dry = headway("retrain", "-c", "azureml-nd-h100", "--dry-run")
    assert [line.split()[1] for line in dry.splitlines()[:8]] == ["pending"] * 8
    assert "8 x NVIDIA H100" in dry and "costs       387 USD" in dry
    shown = json.loads(headway("retrain", "-c", "azureml-cpu", "--dataset", "codeparrot", "--dry-run", "--json"))
    assert shown["plan"]["cost"]["machine_hour"] == 1.353 and len(shown["stages"]) == 8
    assert "plan" not in json.loads(headway("retrain", "-c", "tiny", "--dataset", "codeparrot", "--dry-run", "--json"))
    refused = json.loads(headway("retrain", "-c", "azureml-nd-h100", "--json", code=2))["error"]["message"]
    assert "cluster.image (my-registry.azurecr.io/headway-cluster:0.2.0)" in refused and "my-cluster" in refused
