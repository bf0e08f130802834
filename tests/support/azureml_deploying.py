"""A deploy to Azure ML's managed endpoints as tests make it: settings, a model's files; in this process or in one of its own.

Apart from the tests, for a process that is to be killed need not load the fake of the service.
"""

import hashlib
import json
from functools import partial
from pathlib import Path

from tasks.azure.arm_client import use_files
from tasks.config.serving import DeploymentConfig
from tasks.serving import open_endpoint
from tasks.storage import open_files

GOLDEN = {"prompts": [{"prompt": "def ", "completion": "f(x):", "tokens": [1, 2, 3]}]}
ONE, TWO = f"model/tiny@{'1' * 64}", f"model/tiny@{'2' * 64}"
PRELOADED = ["azureml_deploying", "azure.ai.ml.entities", "azure.storage.blob"]
"""What a deploy imports: a process for it is forked from one that has done so."""


IDENTITY = "/subscriptions/s/resourceGroups/g/providers/Microsoft.ManagedIdentity/userAssignedIdentities/serves"


def config(url: str, *, rollout=None, **azureml) -> DeploymentConfig:
    where = {"subscription_id": "s", "resource_group": "g", "workspace": "w", "endpoint": url}
    said = {
        **where,
        "image": "x.azurecr.io/headway/endpoint:0.2.0",
        "identity": IDENTITY,
        "poll_seconds": 0.02,
        "create_minutes": 0.5,
        **azureml,
    }
    return DeploymentConfig(
        backend="azureml",
        endpoint="chat",
        azureml=said,
        rollout={"step_requests": 0, "step_seconds": 0, **(rollout or {})},
    )


def model_files(folder: Path) -> list[dict]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "golden.json").write_text(json.dumps(GOLDEN))
    data = (folder / "golden.json").read_bytes()
    return [{"path": "golden.json", "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}]


def deploy(base: Path, ref: str, url: str, told=None, barred="", **changed):
    """As tasks/deploy.py does it."""
    folder = base / "models" / ref[-4:]
    files, wanted = model_files(folder), config(url, **changed)
    endpoint = open_endpoint(base / "endpoints", "chat", "azureml")
    candidate = endpoint.start(
        folder, ref, files=files, golden=GOLDEN, timeout=5, config=wanted, barred=barred, journal=told
    )
    return endpoint.switch(candidate, journal=told)


def deploy_apart(home: Path, base: Path, ref: str, url: str):
    """The same, as the whole work of a process of its own."""
    use_files(partial(open_files, home))
    deploy(base, ref, url, rollout={"keep_warm_seconds": 0.0, "step_requests": 0, "step_seconds": 0})
