"""Whether a body is one that Azure ML takes: by the SDK's own models, with no field that they do not have, and none missing."""

import re
from collections.abc import Mapping
from typing import Any

from azure.ai.ml._restclient.arm_ml_service import models
from azure.ai.ml._restclient.arm_ml_service._utils.model_base import Model

ROOTS = {"jobs": models.JobBase, "data": models.DataVersionBase, "environments": models.EnvironmentVersion}
PLAIN: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "bool": (bool,), "float": (int, float)}


def refusal(
    body: Any,
    *,
    where: str,
    kind: str = "jobs",
    assets: Mapping[str, Any] | None = None,
    clusters: Mapping[str, Any] | None = None,
) -> tuple[str, str] | None:
    """Code and message of the error that a body gets; None for one that is taken."""
    wrong = _problem(ROOTS[kind]._deserialize(body, []), "")
    if wrong:
        return "ValidationError", wrong
    properties = body["properties"]
    if kind != "jobs":
        return None
    return _unknown(properties, where, assets or {}, clusters or {})


def _unknown(
    job: dict[str, Any], where: str, assets: Mapping[str, Any], clusters: Mapping[str, Any]
) -> tuple[str, str] | None:
    """What a job names and the workspace does not have."""
    compute = job.get("computeId") or ""
    if compute and compute.removeprefix(f"{where}/computes/") not in clusters:
        return "ComputeNotFound", f"compute {compute} not found"
    environment = job["environmentId"]
    if not environment.startswith("azureml://registries/") and environment not in assets:
        return "EnvironmentNotFound", f"environment {environment} not found"
    for name, entry in (job.get("inputs") or {}).items():
        if entry["uri"].startswith(where) and entry["uri"] not in assets:
            return "DataNotFound", f"input {name}: {entry['uri']} not found"
    for name in re.findall(r"\$\{\{inputs\.(\w+)\}\}", job["command"]):
        if name not in (job.get("inputs") or {}):
            return "InvalidCommand", f"the command names the input {name}"
    return None


def _problem(model: Model, path: str) -> str:
    """The first way in which a value is not what its model says; empty without one."""
    fields = {field._rest_name: (name, field) for name, field in model._attr_to_rest_field.items()}
    for key in model:
        if key not in fields:
            return f"{path}/{key} is no field of {type(model).__name__}"
    for key, (name, field) in fields.items():
        hint, value = _hint(type(model), name), model.get(key)
        if value is None:
            if not hint.startswith(("Optional", "Literal")) and "create" in (field._visibility or ["create"]):
                return f"{path}/{key} is required"
            continue
        wrong = _value_problem(getattr(model, name), hint, f"{path}/{key}")
        if wrong:
            return wrong
    return ""


def _hint(kind: type, name: str) -> str:
    for each in kind.__mro__:
        if name in getattr(each, "__annotations__", {}):
            return str(each.__annotations__[name])
    return "Any"


def _value_problem(value: Any, hint: str, path: str) -> str:
    if isinstance(value, Model):
        return _problem(value, path)
    if isinstance(value, Mapping):
        if "dict[str, str]" in hint and any(not isinstance(each, str) for each in value.values()):
            return f"{path} must have texts only"
        return next(filter(None, (_value_problem(each, "", f"{path}/{key}") for key, each in value.items())), "")
    plain = hint.removeprefix("Optional[").removesuffix("]")
    if plain in PLAIN and (not isinstance(value, PLAIN[plain]) or (plain == "int" and isinstance(value, bool))):
        return f"{path} is {value!r}, and must be {plain}"
    return ""
