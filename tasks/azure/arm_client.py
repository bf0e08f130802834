"""The door to Azure Resource Manager for what has to do with Azure ML: the transport, its waits, and its errors in words.

Who submits jobs is tasks/compute/azureml/client.py, who serves models tasks/serving/azureml/client.py; both take their requests
from the SDK. Asking again is the SDK's: it waits as long as the service says (Retry-After), and gives up after a minute.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from tasks.common.errors import HeadwayError, JobFailed, Missing

if TYPE_CHECKING:
    from azure.core.exceptions import AzureError

SCOPE = "https://management.azure.com/.default"
PATIENCE = {"retry_total": 3, "retry_backoff_factor": 0.4, "retry_backoff_max": 15, "timeout": 60}
CONNECT_SECONDS, READ_SECONDS = 5.0, 20.0
OF_THE_WORKSPACE = ("ResourceNotFound", "ResourceGroupNotFound", "SubscriptionNotFound", "WorkspaceNotFound")
LOGIN = "Log in again: az login (or look at the credential of the store in stores.yaml, which is used here too)."
QUOTA = re.compile(
    r"quota|CoreLimit|NotEnoughCores|SkuNotAvailable|not available in .*(region|location)|capacity", re.I
)
MISTAKES = (
    (re.compile(r"compute", re.I), "Look at azureml.compute."),
    (re.compile(r"image|environment|docker", re.I), "Look at cluster.image and azureml.environment."),
    (re.compile(r"identity", re.I), "Look at azureml.identity, and at the identity of the compute cluster."),
    (re.compile(r"distribution|instanceCount|node", re.I), "Look at cluster.nodes."),
)
OpenFiles = Callable[[str], Any]
"""Opens the container of a store by its name, as what tasks/compute/azureml/folder.py calls Files. Raises ValueError, Missing."""


class Where(Protocol):
    """A workspace by its names, and the address of Azure Resource Manager."""

    @property
    def subscription_id(self) -> str: ...

    @property
    def resource_group(self) -> str: ...

    @property
    def workspace(self) -> str: ...

    @property
    def endpoint(self) -> str: ...


def _no_files(store: str) -> Any:
    raise ValueError("Azure ML takes files from a store on Azure Blob, and none was handed in")


_files: OpenFiles = _no_files


def use_files(files: OpenFiles) -> None:
    """Hand in the stores of this process's home, once, where it is composed: ports know no store."""
    global _files
    _files = files


def open_files(store: str) -> Any:
    """The container of a store by its name, the home's own by an empty one. Raises ValueError, Missing."""
    return _files(store)


def workspace_id(where: Where) -> str:
    """A workspace's id in Azure Resource Manager."""
    group = f"/subscriptions/{where.subscription_id}/resourceGroups/{where.resource_group}"
    return f"{group}/providers/Microsoft.MachineLearningServices/workspaces/{where.workspace}"


def rest(value: Any) -> dict[str, Any]:
    """One of the SDK's REST objects as it is sent."""
    from azure.ai.ml._restclient.arm_ml_service._utils.model_base import SdkJSONEncoder

    body: dict[str, Any] = json.loads(json.dumps(value, cls=SdkJSONEncoder, exclude_readonly=True))
    return body


def transport(address: str, token: Any) -> dict[str, Any]:
    """How the SDK's clients of an address send: with a token, also to this machine itself, and with our waits."""
    from azure.core.pipeline.policies import BearerTokenCredentialPolicy

    class OnLoopback(BearerTokenCredentialPolicy):  # type: ignore[type-arg]
        """Lets a token go to this machine itself without TLS: to an emulator."""

        def on_request(self, request: Any) -> None:
            request.context.options["enforce_https"] = False
            super().on_request(request)

    on_loopback = urlsplit(address).hostname in ("127.0.0.1", "localhost")
    policy = OnLoopback if on_loopback else BearerTokenCredentialPolicy
    waits = {"connection_timeout": CONNECT_SECONDS, "read_timeout": READ_SECONDS}
    return {"authentication_policy": policy(token, SCOPE), **PATIENCE, **waits}


def code_of(error: AzureError) -> str:
    """The service's own word for an error; empty without one."""
    return str(getattr(getattr(error, "error", None), "code", "") or "")


def explain(error: AzureError, config: Where, *, what: str = "job") -> HeadwayError | ValueError:
    """What an error of the service means to a person."""
    from azure.core.exceptions import ClientAuthenticationError

    where = f"the Azure ML workspace {config.workspace}"
    status, output = getattr(error, "status_code", None), _first_lines(error)
    if isinstance(error, ClientAuthenticationError) or status == 401:
        return Missing(f"{where} does not know who we are, or no longer: {output}", remedy=LOGIN)
    if status == 403:
        return Missing(
            f"{where} does not let us do this: {output}",
            remedy="Give this identity the role AzureML Data Scientist on the workspace, or log in as another: az login.",
        )
    if status == 404:
        return ValueError(
            f"{where} is not there ({output}): look at azureml.subscription_id ({config.subscription_id}), "
            f"azureml.resource_group ({config.resource_group}) and azureml.workspace"
        )
    if status in (400, 409, 422):
        return _refused(f"{where} refused the {what}", f"{code_of(error)} {output}".strip())
    if status is None:
        return Missing(f"{where} does not answer: {output}", remedy=f"Look at the network and at {config.endpoint}.")
    return Missing(f"{where} answers {status}: {output}", remedy="Run the same command later: nothing is done twice.")


def _refused(refused: str, text: str) -> HeadwayError | ValueError:
    """400 and its like: quota, a mistake in the settings, or something that nobody foresaw."""
    if QUOTA.search(text):
        return Missing(
            f"{refused}, there is no quota for it: {text}", remedy="Ask for quota in the studio, or take another size."
        )
    for pattern, remedy in MISTAKES:
        if pattern.search(text):
            return ValueError(f"{refused}: {text}. {remedy}")
    return JobFailed(f"{refused}: {text}", failure="user", folder="", remedy="Change what it names.")


def _first_lines(error: AzureError) -> str:
    text = getattr(getattr(error, "error", None), "message", None) or error.message or error
    lines = [line.strip() for line in str(text).splitlines() if line.strip()]
    return " ".join(lines[:3])[:400] or type(error).__name__
