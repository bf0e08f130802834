"""A managed online endpoint as files that `az` takes, each read back by the SDK's own schema before anybody sees it.

What is in them is render.py and around.py; Headway's own deploy sends the same values and no files.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.serving.azureml.around import autoscale, diagnostics, policy
from tasks.serving.azureml.render import Rendering, yaml_of


def files_of(
    made: Rendering, colour: str, ref: str, *, files: Sequence[Mapping[str, Any]], inputs: Sequence[str], address: str
) -> dict[str, str]:
    """Name and text of each file. `address` is the model's folder in the store. Raises ValueError for what cannot be."""
    texts = {
        "endpoint.yml": yaml_of(made.endpoint()),
        f"{colour}-deployment.yml": yaml_of(made.online(colour, ref, files=files, inputs=inputs, by_id=False)),
        "environment.yml": yaml_of(made.environment()),
        "model.yml": yaml_of(made.model(ref, address)),
        "policy.xml": policy(made),
    }
    require_loadable(texts)
    if made.config.most_instances > made.config.instances:
        texts["autoscale.json"] = json.dumps(autoscale(made, colour), indent=2) + "\n"
    if made.config.log_analytics:
        texts["diagnostics.json"] = json.dumps(diagnostics(made), indent=2) + "\n"
    return texts


def require_loadable(texts: Mapping[str, str]) -> None:
    """Raise ValueError, in the SDK's words, for YAML that the SDK would not take."""
    from azure.ai.ml import load_environment, load_model, load_online_deployment, load_online_endpoint
    from azure.ai.ml.exceptions import ValidationException
    from marshmallow.exceptions import ValidationError

    load = {"endpoint.yml": load_online_endpoint, "environment.yml": load_environment, "model.yml": load_model}
    with tempfile.TemporaryDirectory() as scratch:
        for name, text in texts.items():
            if not name.endswith(".yml"):
                continue
            path = Path(scratch) / name
            path.write_text(text)
            try:
                load.get(name, load_online_deployment)(str(path))
            except (ValidationError, ValidationException, ValueError) as error:
                raise ValueError(f"azure-ai-ml does not take {name}: {error}") from error
