"""The roles that a configuration needs in Azure, as a script that is run with an `az` that writes down what it is told."""

import dataclasses
import json
import re
import subprocess
from pathlib import Path

from tasks.azure.rights import Uses, rights, script
from tasks.config.backends.azureml import AzureMlConfig

WHERE = AzureMlConfig(subscription_id="sub", resource_group="group", workspace="space")
IDENTITY = "/subscriptions/sub/resourceGroups/group/providers/Microsoft.ManagedIdentity/userAssignedIdentities/endpoint"
WHOLE = Uses(
    where=WHERE,
    store="az://account/models/team",
    compute="gpus",
    image="acme.azurecr.io/headway/cluster:1",
    endpoint_identity=IDENTITY,
    endpoint_image="acme.azurecr.io/headway/endpoint:1",
)
AZ = """#!/bin/bash
printf '%s\\n' "$*" >> "$LOG"
case "$1 $2 $3" in
  "ad signed-in-user show") echo me ;;
  "storage account show")
    [ "$*" != "storage account show --name jobs --output none" ] || [ -e "$LOG.made" ] || exit 3
    case "$*" in *resourceGroup*) echo of-$5 ;; *"--name jobs "*) echo /jobs ;; *) echo /storage ;; esac ;;
  "storage account create") touch "$LOG.made" ;;
  "storage account management-policy") [ "$4" = create ] && [ -z "$NO_POLICY" ] || exit 3 ;;
  "storage container-rm show") [ -e "$LOG.container" ] || exit 3 ;;
  "storage container-rm create") touch "$LOG.container" ;;
  "acr show --name") echo /registries/$4 ;;
  "ml compute show") echo cluster-principal ;;
  "ml workspace show") echo workspace-principal ;;
  "identity show --ids") case "$4" in */cluster) echo cluster-principal ;; *) echo endpoint-principal ;; esac ;;
esac
"""


PLACES = (("storage", "models"), ("jobs", "folders"))


def given(uses, tmp_path, said_in_error="", **environment):
    """The role assignments that the script makes: role, object id, scope."""
    az = tmp_path / "az"
    az.write_text(AZ)
    az.chmod(0o755)
    (tmp_path / "rights.sh").write_text(script(uses))
    where = {"PATH": f"{tmp_path}:/usr/bin:/bin", "LOG": str(tmp_path / "log"), **environment}
    ran = subprocess.run(["bash", tmp_path / "rights.sh"], env=where, capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, said_in_error)
    said = (tmp_path / "log").read_text()
    made = re.findall(
        r"^role assignment create --role (.+) --assignee-object-id (\S+) --assignee-principal-type \S+ --scope (\S+)$",
        said,
        re.M,
    )
    assert len(made) == said.count("role assignment create")
    return made


def test_the_script_gives_every_role_to_whom_it_belongs(tmp_path):
    workspace = "/subscriptions/sub/resourceGroups/group/providers/Microsoft.MachineLearningServices/workspaces/space"
    container = "/storage/blobServices/default/containers/models"
    assert given(WHOLE, tmp_path) == [
        ("AzureML Data Scientist", "me", workspace),
        ("Storage Blob Data Contributor", "me", container),
        ("Storage Blob Data Contributor", "cluster-principal", container),
        ("AcrPull", "cluster-principal", "/registries/acme"),
        ("Managed Identity Operator", "me", IDENTITY),
        ("Monitoring Reader", "me", workspace),
        ("Storage Blob Data Reader", "endpoint-principal", container),
        ("AcrPull", "endpoint-principal", "/registries/acme"),
    ]


def test_the_folders_of_jobs_have_an_account_without_versions_and_an_end_date(tmp_path):
    made = given(dataclasses.replace(WHOLE, jobs="az://jobs/folders/team", endpoint_scales=True), tmp_path)
    container, folders = (f"/{one}/blobServices/default/containers/{one2}" for one, one2 in PLACES)
    assert [one for one in made if "blobServices" in one[2]] == [
        ("Storage Blob Data Contributor", "me", container),
        ("Storage Blob Data Reader", "cluster-principal", container),
        ("Storage Blob Data Reader", "endpoint-principal", container),
        ("Storage Blob Data Contributor", "me", folders),
        ("Storage Blob Data Contributor", "cluster-principal", folders),
    ]
    assert ("Monitoring Contributor", "me", "/subscriptions/sub/resourceGroups/group") in made
    log = (tmp_path / "log").read_text()
    assert "account create --name jobs --resource-group group" in log and "--enable-versioning false" in log
    assert "container-rm create --storage-account jobs --name folders" in log
    said = re.search(r"management-policy create --account-name jobs --resource-group of-jobs .*--policy (.*)", log)[1]
    [rule] = json.loads(said)["rules"]
    assert rule["definition"]["filters"] == {"blobTypes": ["blockBlob"], "prefixMatch": ["folders/team/jobs/"]}
    assert rule["definition"]["actions"] == {"baseBlob": {"delete": {"daysAfterModificationGreaterThan": 30}}}
    (tmp_path / "log").unlink()
    given(dataclasses.replace(WHOLE, jobs="az://jobs/folders/team"), tmp_path)
    log = (tmp_path / "log").read_text()
    assert "account create" not in log and "container-rm create" not in log  # they are there by now


def test_folders_beside_artifacts_end_too_and_no_account_is_made_or_changed(tmp_path):
    given(WHOLE, tmp_path)
    log = (tmp_path / "log").read_text()
    assert '"version": {"delete": {"daysAfterCreationGreaterThan": 1}}' in log
    assert '"prefixMatch": ["models/team/jobs/"]' in log and "account create" not in log and "versioning" not in log


def test_a_job_that_acts_as_its_submitter_gives_the_cluster_no_data(tmp_path):
    uses = Uses(where=WHERE, store="az://account/models", compute="gpus", image="ghcr.io/acme/it:1", as_submitter=True)
    made = given(uses, tmp_path, SUBMITTER="robot")
    assert [(role, who) for role, who, _ in made] == [
        ("AzureML Data Scientist", "robot"),
        ("Storage Blob Data Contributor", "robot"),
    ]
    assert "# ghcr.io/acme/it:1 is in no registry of Azure" in script(uses)


def test_who_may_give_roles_and_not_change_the_account_gives_every_role(tmp_path):
    warned = "lifecycle rule not set: needs Storage Account Contributor\n"
    made = given(WHOLE, tmp_path, warned, NO_POLICY="1")
    assert len(made) == len(list(rights(WHOLE)))
    assert "Storage Account Contributor" in script(WHOLE).partition("set -e")[0]


def test_the_identity_that_the_configuration_names_needs_no_cluster(tmp_path):
    uses = dataclasses.replace(WHOLE, cluster_identity=IDENTITY.replace("/endpoint", "/cluster"))
    assert ("AcrPull", "cluster-principal", "/registries/acme") in given(uses, tmp_path)
    assert "compute show" not in (tmp_path / "log").read_text()


def test_serverless_machines_act_as_the_workspace(tmp_path):
    made = given(dataclasses.replace(WHOLE, compute="serverless"), tmp_path, CREATOR="ops")
    assert ("AcrPull", "workspace-principal", "/registries/acme") in made and "ops" not in [who for _, who, _ in made]


def test_who_creates_the_cluster_and_who_pushes_images_get_roles_when_they_are_named(tmp_path):
    cluster = IDENTITY.replace("/endpoint", "/cluster")
    uses = dataclasses.replace(WHOLE, cluster_identity=cluster, subnet="nodes", vnet="net")
    made = given(uses, tmp_path, CREATOR="ops", PUSHER="build", TYPE="ServicePrincipal")
    group = "/subscriptions/sub/resourceGroups/group/providers"
    workspace = f"{group}/Microsoft.MachineLearningServices/workspaces/space"
    assert [one for one in made if one[1] in ("ops", "build")] == [
        ("AzureML Compute Operator", "ops", workspace),
        ("Reader", "ops", workspace),
        ("Managed Identity Operator", "ops", cluster),
        ("Network Contributor", "ops", f"{group}/Microsoft.Network/virtualNetworks/net/subnets/nodes"),
        ("AcrPush", "build", "/registries/acme"),
    ]
    assert "--assignee-principal-type User" not in (tmp_path / "log").read_text()


def test_the_pages_name_every_role():
    docs = Path(__file__).parents[4] / "docs"
    text = "".join((docs / page).read_text() for page in ("azureml.md", "azureml-endpoints.md"))
    assert [one.role for one in rights(WHOLE) if f"*{one.role}*" not in text.replace("\n", " ")] == []
