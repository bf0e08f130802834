"""Model -> Endpoint: verified, started beside the one in service, proven by golden prompts, then given the traffic in steps.

How a model takes the traffic is tasks/serving/rollout.py; what a server runs is tasks/jobs/serve.py. The stage reconciles: it
is done when the endpoint serves the wanted model, and does nothing then. See docs/rollout.md.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

from tasks.artifacts import Endpoint, Model
from tasks.common.errors import Missing
from tasks.common.home import home
from tasks.common.process import locked
from tasks.config.base import config_digest
from tasks.config.serving import DeploymentConfig, ExportConfig
from tasks.formats.onnx_data import require_data_beside
from tasks.orchestration.promotion import (
    logged,
    make_champion,
    require_right,
    require_same_champion,
    require_signed,
    why_untrusted,
)
from tasks.orchestration.stage import stage
from tasks.orchestration.stage_context import fetch, home_folder, manifest_of, note
from tasks.registry.refs import read_ref
from tasks.serving.client import Sampling
from tasks.serving.known import ask, endpoint_of, known_endpoints, require_accepted, served_model
from tasks.serving.vllm import require_folder, require_servable
from tasks.storage.store import Store

log = logging.getLogger("headway.deploy")
GRAPH = "genai_config.json"
"""What ONNX Runtime loads first of a model."""
SAMPLES = 3
SAMPLING = Sampling(max_tokens=48, temperature=0.6, top_p=0.95, seed=1)
"""A greedy answer of a small model soon repeats itself; the seed gives the same sample for the same model."""


def serves(model: Model, config: DeploymentConfig) -> bool:
    """Whether the endpoint, as observed, serves the wanted model where it is wanted, and under these settings."""
    served = endpoint_of(home(), config.endpoint, config.backend).observe()
    same_port = served is not None and config.port in (None, served.port)
    return served is not None and served.ready and same_port and served.model_ref == model.ref and served.under(config)


def terms(config: DeploymentConfig) -> dict[str, str]:
    """What a person's word on a deploy is bound to, beside the model: see tasks/registry/approvals.py."""
    return {"endpoint": config.endpoint, "settings": config_digest(config)}


def stands(store: Store, model: str, config: DeploymentConfig) -> dict[str, str]:
    """What a deploy changes, by the audit log's names: the champion, and the model that the endpoint has served last."""
    known = config.endpoint in known_endpoints(home())
    return {
        f"refs/{model}/champion": read_ref(store, f"{model}/champion") or "none",
        f"endpoint/{config.endpoint}": served_model(home(), config.endpoint) if known else "none",
    }


@stage(version=1, reconciles=serves)
def deploy(model: Model, config: DeploymentConfig) -> Endpoint:
    """Serve a model, register it, and make it the champion. Raises IntegrityError before anything is started.

    Raises Refused unless a person approved exactly this, or who runs it may promote; GateFailed for a model that a person rolled
    back here, and when the new model lost its traffic again; Conflict when another model became the champion after this one was
    compared.
    """
    right = partial(require_right, "deploy", model, terms(config), what=f"{model.ref} to endpoint/{config.endpoint}")
    require_same_champion(model)
    right()
    require_accepted(home_folder(""), config.endpoint, model.ref)
    require_signed(model)  # before any byte is moved; fetch then holds every byte to the digests that were signed
    folder = fetch(model)
    require_data_beside(folder)
    require_servable(config)
    if config.runtime == "vllm":
        require_folder(folder, named=model.ref)
    elif not (folder / GRAPH).is_file():
        raise ValueError(
            f"{model.ref} was exported for vLLM, and deployment.runtime is {config.runtime}: set it to vllm, or export it again"
        )
    endpoint = endpoint_of(home_folder(""), config.endpoint, config.backend)
    golden = json.loads((folder / "golden.json").read_text())
    content = manifest_of(model).content

    def write_down(event: str, details: dict[str, Any]) -> None:
        note(f"endpoints/{config.endpoint}", {"event": event, **details})

    with locked(home_folder("endpoints") / f"{config.endpoint}.lock"):
        right()  # whoever held the lock may have decided otherwise, and whoever approved may have lost the right
        serving = endpoint.serves_from()
        barred = why_untrusted(serving.model_ref) if serving and serving.model_ref != model.ref else ""
        candidate = endpoint.start(
            folder,
            model.ref,
            files=[file.model_dump() for file in content.files],
            inputs=content.inputs,
            golden=golden,
            timeout=config.start_timeout_seconds,
            port=config.port,
            threads=os.cpu_count() or 1,
            config=config,
            barred=barred,
            journal=write_down,
        )
        require_same_champion(model)  # starting a large model takes a while
        approval = right()
        before = endpoint.observe()
        fields = {
            "what": f"endpoint/{config.endpoint}",
            "before": before.model_ref if before else None,
            "after": model.ref,
            **({"approval": approval} if approval else {}),
        }
        reason = "the stage deploy" + (f"; there is no way back: {barred}" if barred else "")
        with logged("deploy", right="promote", reason=reason, **fields):
            served = endpoint.switch(candidate, journal=write_down)
    make_champion(model, reason=f"deployed to endpoint/{config.endpoint}")
    return Endpoint(name=config.endpoint, url=served.url, model=model)


def samples(endpoint: Endpoint, config: ExportConfig, openings: Sequence[str]) -> list[dict[str, str]]:
    """What the endpoint goes on with after `openings`, drawn with a fixed seed, for people to see; without any, after the first
    golden prompts.

    None where it refuses them, as a server of an earlier release in the cloud does, which takes no seed: it serves all the same.
    """
    prompts = openings or config.golden_prompts[:SAMPLES]
    try:
        completions = [ask(home(), endpoint.name, each, SAMPLING)["completion"] for each in prompts]
    except (Missing, ValueError) as error:
        log.warning("no samples of %s: %s", endpoint.ref, error)
        return []
    return [{"prompt": prompt, "completion": each} for prompt, each in zip(prompts, completions, strict=True)]
