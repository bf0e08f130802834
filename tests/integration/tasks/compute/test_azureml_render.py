"""What would be submitted to Azure ML: the request and its YAML, against what is written down and the SDK's own schema."""

import hashlib
import io
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml
from azure.ai.ml import load_compute, load_data, load_datastore, load_job
from azure.ai.ml._restclient.arm_ml_service._utils.model_base import SdkJSONEncoder
from azure.ai.ml.entities._job.to_rest_functions import to_rest_job_object

from tasks.compute import open_backend
from tasks.compute.azureml.render import job_name
from tasks.compute.job import Job
from tasks.compute.job_folder import code_name, write_code
from tasks.config.cluster import ClusterConfig, ElasticConfig
from tasks.storage import open_files

GOLDEN = Path(__file__).with_name("azureml_job.golden.json")
ROOT = Path(__file__).parents[4]
WORKSPACE = {
    "subscription_id": "s",
    "resource_group": "g",
    "workspace": "w",
    "compute": "gpus",
    "environment": "azureml:own:1",
}
VERSION = "0123456789abcdef" * 4


@pytest.fixture
def render(tmp_path):
    """Renders a job of some fields, on a cluster of some settings, for a home whose store is on Azure Blob."""
    store = {"uri": "az://account/models/team", "credential": "managed_identity"}
    (tmp_path / "stores.yaml").write_text(yaml.safe_dump({"use": "team", "stores": {"team": store}}))

    def do(azureml=(), cluster=(), **fields):
        config = ClusterConfig(backend="azureml", azureml={**WORKSPACE, **dict(azureml)}, **dict(cluster))
        backend = open_backend(config, lambda name: open_files(tmp_path, name))
        return backend.render(job(**fields), tmp_path / "jobs" / "train-777777777777")

    return do


def job(**fields):
    plain = {"name": "train", "token": "7" * 32, "program": "tasks.jobs.train", "settings": {"steps": 3}}
    inputs = {"inputs": {"tokens": "/here"}, "artifacts": {"tokens": f"tokens/code@{VERSION}"}}
    shape = {"nodes": 2, "ranks_per_node": 8, "gpus_per_node": 8, "time_limit": 3600.0, "retry": None}
    return Job(**{**plain, **inputs, **shape, **fields})


def plain(rendered):
    """Without what changes with every change of Headway's code."""
    told = {"request": rendered.request, "files": rendered.files}
    text = re.sub(rf"\b{code_name()[len('code/headway-') : -len('.zip')]}\b", "CODE", json.dumps(told))
    return json.loads(re.sub(r'(headway\.spec(?:"|): "?)[0-9a-f]{64}', r"\1SPEC", text))


def test_the_job_is_the_one_that_is_written_down(render):
    made = plain(render(azureml={"size": "Standard_ND96isr_H100_v5", "tags": {"team": "my-team"}}))
    assert made == json.loads(GOLDEN.read_text())


def test_the_network_of_a_known_size_is_set_on_every_node(render):
    made = render(size="Standard_ND96isr_H100_v5").request["properties"]["environmentVariables"]
    assert made["NCCL_TOPO_FILE"] == "/opt/microsoft/ndv5-topo.xml" and made["NCCL_IB_QPS_PER_CONNECTION"] == "4"
    assert not [name for name in render().request["properties"]["environmentVariables"] if name.startswith("NCCL")]


@pytest.mark.parametrize(
    ("azureml", "fields"),
    [
        ({}, {}),
        ({"identity": "user"}, {"launcher": "mpi"}),
        ({}, {"image": "myregistry.azurecr.io/headway:1"}),
        (
            {"compute": "serverless", "size": "Standard_D4_v3"},
            {"preemptible": True, "artifacts": {}, "time_limit": None},
        ),
    ],
    ids=["plain", "mpi", "image", "serverless"],
)
def test_the_yaml_is_the_same_job_by_the_sdks_own_schema(render, azureml, fields):
    made = render(azureml=azureml, **fields)
    loaded = load_job(io.StringIO(made.files["job.yml"]))
    if "image" in fields:
        assert loaded.environment.image == fields["image"]
        loaded.environment = "the REST form has its id"
    again = json.loads(json.dumps(to_rest_job_object(loaded), cls=SdkJSONEncoder, exclude_readonly=True))["properties"]
    request = made.request["properties"]
    named = ("computeId", "environmentId", "inputs")
    assert {k: v for k, v in again.items() if k not in named} == {k: v for k, v in request.items() if k not in named}
    assert set(again.get("inputs") or {}) == set(request.get("inputs") or {})
    for name, text in made.files.items():
        if name.startswith("data-"):
            data = load_data(io.StringIO(text))
            known = load_datastore(io.StringIO(made.files["datastore.yml"]))
            assert (known.account_name, known.container_name) == ("account", "models")
            path = f"team/artifacts/tokens/code/versions/{VERSION}/"
            assert data.path == f"azureml://datastores/{known.name}/paths/{path}"
            assert request["inputs"]["tokens"]["uri"].endswith(f"/data/{data.name}/versions/{data.version}")


def test_the_cluster_scales_down_to_nothing(render):
    made = render(azureml={"size": "Standard_ND96isr_H100_v5", "idle_minutes": 20}, preemptible=True)
    cluster = load_compute(io.StringIO(made.files["compute.yml"]))
    assert (cluster.name, cluster.size, cluster.tier) == ("gpus", "Standard_ND96isr_H100_v5", "low_priority")
    assert (cluster.min_instances, cluster.max_instances, cluster.idle_time_before_scale_down) == (0, 2, 1200)
    assert "compute.yml" not in render().files
    assert cluster.identity is None


def test_the_cluster_has_the_identity_that_is_configured(render):
    identity = "/subscriptions/s/resourceGroups/g/providers/Microsoft.ManagedIdentity/userAssignedIdentities/nodes"
    made = render(azureml={"size": "Standard_ND96isr_H100_v5", "cluster_identity": identity})
    cluster = load_compute(io.StringIO(made.files["compute.yml"]))
    assert cluster.identity.type == "user_assigned"
    assert [one.resource_id for one in cluster.identity.user_assigned_identities] == [identity]


def test_tier_launcher_identity_and_image_are_the_jobs(render):
    serverless = {"compute": "serverless", "size": "Standard_D4_v3"}
    spot = render(azureml=serverless, preemptible=True).request["properties"]
    assert spot["queueSettings"] == {"jobTier": "Spot"} and "computeId" not in spot
    assert spot["resources"]["instanceType"] == "Standard_D4_v3"
    assert render(azureml=serverless).request["properties"]["queueSettings"] == {"jobTier": "Standard"}
    other = render(azureml={"identity": "user"}, launcher="mpi", image="a/b:1").request["properties"]
    assert other["distribution"] == {"distributionType": "Mpi", "processCountPerInstance": 1}
    assert other["identity"] == {"identityType": "UserIdentity"}
    assert "--credential azureml_user" in other["command"] and "headway" not in other["inputs"]
    assert "/environments/headway-image/versions/" in other["environmentId"]


def test_a_ray_job_starts_ray_on_its_nodes(render):
    made = render(azureml={"ray": True})
    assert made.request["properties"]["command"].endswith("-- python3 -m tasks.jobs.ray.cluster '{folder}'")
    assert "/work" not in made.files["ray.json"] and "PYTHONPATH" not in made.files["ray.json"]


def test_names_are_azure_mls_and_the_same_each_time():
    assert job_name(job(submission=4)) == "headway-train-777777777777-4"
    assert job_name(job(name="my.stage")) == "headway-my-stage-777777777777-1"
    long, other = job(name="x" * 300), job(name="x" * 301)
    assert len(job_name(long)) == 255 and job_name(long) != job_name(other)


@pytest.mark.parametrize(
    ("azureml", "fields", "said"),
    [
        ({}, {"elastic": ElasticConfig(min_nodes=1, max_nodes=2)}, "leave cluster.elastic empty"),
        ({}, {"excluded_nodes": ("bad",)}, "leave cluster.exclude empty"),
        ({"compute": "serverless"}, {}, "azureml.size"),
        ({}, {"artifacts": {"headway": f"tokens/code@{VERSION}"}}, "must not be called headway"),
    ],
)
def test_what_azure_ml_cannot_do_is_refused(render, azureml, fields, said):
    with pytest.raises(ValueError, match=said):
        render(azureml=azureml, **fields)


def test_a_store_that_is_no_blob_store_is_refused(tmp_path):
    config = ClusterConfig(backend="azureml", azureml=WORKSPACE)
    with pytest.raises(ValueError, match="a folder of this machine.*azureml.store"):
        open_backend(config, lambda name: open_files(tmp_path, name))
    with pytest.raises(ValueError, match="'team' is not in stores.yaml"):
        open_files(tmp_path, "team")


def test_the_code_that_goes_along_is_whole_and_named_by_its_content(tmp_path):
    write_code(tmp_path / "one.zip")
    sha256 = hashlib.sha256((tmp_path / "one.zip").read_bytes()).hexdigest()
    assert code_name() == f"code/headway-{sha256}.zip"
    say = [sys.executable, "-c", "from tasks.compute.job_folder import code_name; print(code_name())"]
    assert subprocess.run(say, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip() == code_name()
    names = zipfile.ZipFile(tmp_path / "one.zip").namelist()
    assert {"tasks/jobs/node/mirror.py", "tasks/jobs/train.py", "tasks/compute/failures.json"} <= set(names)
    assert {name.partition("/")[0] for name in names} == {"tasks"}, "the package, and nothing of the checkout around it"


def test_an_environment_with_an_old_python_says_so_at_once(render, tmp_path):
    """The curated ones of Azure ML have Python 3.10."""
    old = tmp_path / "python3.10"
    told = "import sys; sys.version_info, sys.version = (3, 10, 14), '3.10.14 (main)'; exec(sys.argv.pop(1))"
    old.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exec {sys.executable} -c "{told}" "$2" "$3" "$4"\nexit 3\n')
    old.chmod(0o755)
    code, said = started(render(python=str(old)), tmp_path / "code.zip")
    assert (code, said) == (
        1,
        "Headway needs Python 3.11 or later, this environment has 3.10.14: name another one in azureml.environment, "
        "or an image in cluster.image\n",
    )


def test_code_that_was_changed_in_the_store_is_not_run(render, tmp_path):
    write_code(tmp_path / "code.zip")
    made = render(python=sys.executable)
    assert started(made, tmp_path / "code.zip") == (0, "")
    with zipfile.ZipFile(tmp_path / "code.zip", "a") as archive:
        archive.writestr("tasks/jobs/node/mirror.py", f"open({str(tmp_path / 'run')!r}, 'w')")
    code, said = started(made, tmp_path / "code.zip")
    assert code == 1 and said.startswith("The code in the store is not the code that was sent there"), said
    assert not (tmp_path / "run").exists()


def started(rendered, code):
    """Exit code and words of a node's command as far as the mirror; the code lies there as Azure ML downloads it."""
    command = rendered.request["properties"]["command"].partition(' && PYTHONPATH="$code" exec')[0]
    ran = subprocess.run(
        ["bash", "-c", command.replace("${{inputs.headway}}", str(code))],
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"], "TMPDIR": str(code.parent)},
    )
    return ran.returncode, ran.stderr
