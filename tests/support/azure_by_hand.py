"""What somebody who knows Azure ML types into Python: the SDK's own client, on jobs or on an endpoint. The first word says which.

python azure_by_hand.py jobs IMAGE
python azure_by_hand.py endpoint IMAGE REQUEST.json
"""

import json
import sys
import time
from pathlib import Path

from azure.ai.ml import MLClient, command
from azure.ai.ml.entities import (
    AzureBlobDatastore,
    Environment,
    IdentityConfiguration,
    ManagedIdentityConfiguration,
    ManagedOnlineDeployment,
    ManagedOnlineEndpoint,
    Model,
)
from azure.identity import AzureCliCredential


def jobs(client: MLClient, image: str) -> None:
    """One job is made and its log followed, one is cancelled, and both are listed."""
    named = {"environment": Environment(image=image), "compute": "cpu"}
    made = client.jobs.create_or_update(command(command="echo user $(id -u); sleep 10", name="by-hand-1", **named))
    while client.jobs.get(made.name).status != "Running":
        time.sleep(0.2)
    client.jobs.stream(made.name)
    print("ended", client.jobs.get(made.name).status)
    made = client.jobs.create_or_update(command(command="sleep 600", name="by-hand-2", **named))
    while client.jobs.get(made.name).status != "Running":
        time.sleep(0.5)
    client.jobs.begin_cancel(made.name).wait()
    while client.jobs.get(made.name).status not in ("Canceled", "Failed", "Completed"):
        time.sleep(0.5)
    print("cancelled", client.jobs.get(made.name).status)
    print("listed", sorted(str(job.name) for job in client.jobs.list()))


def endpoint(client: MLClient, image: str, file: str) -> None:
    """An endpoint is made, a model of a datastore deployed, asked, and all of it deleted."""
    wanted = json.loads(Path(file).read_text())
    client.datastores.create_or_update(
        AzureBlobDatastore(name="store", account_name="devstoreaccount1", container_name="headway")
    )
    own = ManagedIdentityConfiguration(
        resource_id="/subscriptions/s/resourceGroups/g/providers/Microsoft.ManagedIdentity/userAssignedIdentities/e"
    )
    identity = IdentityConfiguration(type="user_assigned", user_assigned_identities=[own])
    made = ManagedOnlineEndpoint(name="by-hand", auth_mode="key", identity=identity)
    client.online_endpoints.begin_create_or_update(made).result()
    routes = {"liveness": "/livez", "readiness": "/readyz", "scoring": "/score"}
    asked = {f"{name}_route": {"port": 8080, "path": path} for name, path in routes.items()}
    place = f"azureml://datastores/store/paths/{wanted['model']}"
    client.online_deployments.begin_create_or_update(
        ManagedOnlineDeployment(
            name="blue",
            endpoint_name="by-hand",
            model=Model(name="m", version="1", path=place, type="custom_model"),
            environment=Environment(name="own", version="1", image=image, inference_config=asked),
            instance_type="Standard_DS3_v2",
            instance_count=1,
            environment_variables=wanted["variables"],
        )
    ).result()
    there = client.online_endpoints.get("by-hand")
    there.traffic = {"blue": 100}
    client.online_endpoints.begin_create_or_update(there).result()
    print("answer", client.online_endpoints.invoke("by-hand", request_file=wanted["request"]))
    client.online_endpoints.begin_delete("by-hand").result()
    print("left", [one.name for one in client.online_endpoints.list()])


if __name__ == "__main__":
    workspace = MLClient(AzureCliCredential(process_timeout=60), "s", "g", "w")
    {"jobs": jobs, "endpoint": endpoint}[sys.argv[1]](workspace, *sys.argv[2:])
