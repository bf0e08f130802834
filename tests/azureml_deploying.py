"""A deploy to Azure ML's managed endpoints as tests make it: settings, a model's files, and the same again in a process of its own.

Apart from the tests themselves, for a process that is to be killed need not load the fake of the service, with all of Azure's SDK.
"""

import hashlib
import json
from pathlib import Path

from tasks.endpoints import open_endpoint
from tasks.serving_config import DeploymentConfig

GOLDEN = {"prompts": [{"prompt": "def ", "completion": "f(x):", "tokens": [1, 2, 3]}]}
ONE, TWO = f"model/tiny@{'1' * 64}", f"model/tiny@{'2' * 64}"
DEPLOYER = """
import sys
sys.path[:0] = [{root!r}, {root!r} + "/tests"]
from functools import partial
from pathlib import Path
from azureml_deploying import deploy
from tasks.azureml_door import use_files
from tasks.storage import open_files
use_files(partial(open_files, Path({home!r})))
deploy(Path({base!r}), {ref!r}, {url!r}, rollout={{'keep_warm_seconds': 0.0, 'step_requests': 0, 'step_seconds': 0}})
"""


def config(url: str, *, rollout=None, **azureml) -> DeploymentConfig:
    where = {"subscription_id": "s", "resource_group": "g", "workspace": "w", "endpoint": url}
    said = {
        **where,
        "image": "x.azurecr.io/headway/endpoint:0.1.0",
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


def deploy(base: Path, ref: str, url: str, told=None, **changed):
    """As tasks/deploy.py does it."""
    folder = base / "models" / ref[-4:]
    files, wanted = model_files(folder), config(url, **changed)
    endpoint = open_endpoint(base / "endpoints", "chat", "azureml")
    candidate = endpoint.start(folder, ref, files=files, golden=GOLDEN, timeout=5, config=wanted, journal=told)
    return endpoint.switch(candidate, journal=told)
