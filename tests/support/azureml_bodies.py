"""Whether a body is one that Azure ML takes: by the SDK's own models, with no field that they do not have, and none missing."""

import re
from collections.abc import Mapping
from typing import Any, Union, get_args, get_origin

from azure.ai.ml._restclient.arm_ml_service import models
from azure.ai.ml._restclient.arm_ml_service._utils.model_base import Model

ROOTS = {
    "jobs": models.JobBase,
    "data": models.DataVersionBase,
    "environments": models.EnvironmentVersion,
    "datastores": models.Datastore,
}
DATASTORE = re.compile(r"azureml://subscriptions/s/resourcegroups/g/workspaces/w/datastores/(\w+)/paths/(.+)")
"""What lies in a datastore, as the service takes it: group 1 is the datastore, 2 the path in its container."""


def refusal(
    body: Any,
    *,
    where: str,
    kind: str = "jobs",
    assets: Mapping[str, Any] | None = None,
    clusters: Mapping[str, Any] | None = None,
    datastores: Mapping[str, Any] | None = None,
) -> tuple[str, str] | None:
    """Code and message of the error that a body gets; None for one that is taken."""
    wrong = _problem(ROOTS[kind]._deserialize(body, []), body, "")
    if wrong:
        return "ValidationError", wrong
    properties = body["properties"]
    if kind == "data":
        return unreadable(properties["dataUri"], datastores or {})
    if kind != "jobs":
        return None
    for name, entry in (properties.get("inputs") or {}).items():
        if not entry["uri"].startswith(where) and (refused := unreadable(entry["uri"], datastores or {})):
            return refused[0], f"input {name}: {refused[1]}"
    for name, entry in (properties.get("outputs") or {}).items():
        if entry.get("mode") not in (None, "ReadWriteMount", "Upload"):
            return "ValidationError", f"output {name}: mode {entry['mode']} is none of ReadWriteMount, Upload"
        if entry.get("uri") and (refused := unreadable(entry["uri"], datastores or {})):
            return refused[0], f"output {name}: {refused[1]}"
    return _unknown(properties, where, assets or {}, clusters or {})


def unreadable(uri: str, datastores: Mapping[str, Any]) -> tuple[str, str] | None:
    """Why what a uri names could not be read by a job or an endpoint; None for what lies in a datastore that there is.

    An https address is for public servers, and our containers are private.
    """
    found = DATASTORE.fullmatch(uri)
    if not found:
        return "InvalidUri", f"{uri} is no path in a datastore of this workspace, and private storage has no other name"
    if found[1] not in datastores:
        return "DatastoreNotFound", f"{uri} names the datastore {found[1]}, which the workspace does not have"
    return None


def problem(model: Model, sent: Any) -> str:
    """The first way in which what was sent is not what its model says; empty without one."""
    return _problem(model, sent, "")


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


def _problem(model: Model, sent: Any, path: str) -> str:
    """The first way in which what was sent is not what its model says; empty without one. The model itself takes "2" for 2."""
    fields = {field._rest_name: (name, field) for name, field in model._attr_to_rest_field.items()}
    for key in sent:
        if key not in fields:
            return f"{path}/{key} is no field of {type(model).__name__}"
    for key, (name, field) in fields.items():
        hints = _hints(type(model), name)
        if sent.get(key) is None:
            if type(None) not in hints and "create" in (field._visibility or ["create"]):
                return f"{path}/{key} is required"
            continue
        wrong = _value_problem(getattr(model, name), sent[key], hints, f"{path}/{key}")
        if wrong:
            return wrong
    return ""


def _hints(kind: type, name: str) -> tuple[Any, ...]:
    """What a field may be: the SDK writes its annotations down evaluated."""
    hint = next(each.__annotations__[name] for each in kind.__mro__ if name in vars(each).get("__annotations__", {}))
    return get_args(hint) if get_origin(hint) is Union else (hint,)


def _value_problem(value: Any, sent: Any, hints: tuple[Any, ...], path: str) -> str:
    if isinstance(value, Model):
        return _problem(value, sent, path)
    if isinstance(value, Mapping):
        if dict[str, str] in hints and any(not isinstance(each, str) for each in sent.values()):
            return f"{path} must have texts only"
        found = (_value_problem(each, sent[key], (), f"{path}/{key}") for key, each in value.items())
        return next(filter(None, found), "")
    if isinstance(value, list):
        inner = next((get_args(hint) for hint in hints if get_origin(hint) is list), ())
        found = (_value_problem(one, sent[k], inner, f"{path}/{k}") for k, one in enumerate(value))
        return next(filter(None, found), "")
    plain = [hint for hint in hints if hint in (str, int, bool)]
    known = len(plain) == len([hint for hint in hints if hint is not type(None)]) > 0
    if known and type(sent) not in plain:
        return f"{path} is {sent!r}, and must be {' or '.join(hint.__name__ for hint in plain)}"
    return ""
