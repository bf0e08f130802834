"""The door to Azure ML: plain requests of Azure Resource Manager, their waits, and their errors in words.

Who submits jobs is tasks/compute/azureml/client.py, who serves models tasks/serving/azureml/client.py. Both send through
azure-core's pipeline, which asks again after as long as the service says (Retry-After), and gives up after a minute.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from tasks.common.errors import HeadwayError, JobFailed, Missing

if TYPE_CHECKING:
    from azure.core.credentials import TokenCredential
    from azure.core.exceptions import AzureError
    from azure.core.pipeline import PipelineResponse
    from azure.core.polling import LROPoller

API_VERSION = "2025-01-01-preview"
"""The one that azure-ai-ml 1.35 itself puts command jobs with."""
SCOPE = "https://management.azure.com/.default"
USER_TOKEN = "x-azureml-token"
"""Header with the token by which a job acts as whoever submits it. A redirect to another host takes no token along."""
PATIENCE: dict[str, Any] = {"retry_total": 3, "retry_backoff_factor": 0.4, "retry_backoff_max": 15, "timeout": 60}
CONNECT_SECONDS, READ_SECONDS = 5.0, 20.0
OF_THE_WORKSPACE = ("ResourceNotFound", "ResourceGroupNotFound", "SubscriptionNotFound", "WorkspaceNotFound")
CLI = "Install the Azure CLI (https://learn.microsoft.com/cli/azure/install-azure-cli), then sign in: az login."
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
"""Opens the container of a store by its name, as what tasks/compute/job_folder.py calls Files. Raises ValueError, Missing."""


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
    raise ValueError("jobs without a shared folder take files from a store on Azure Blob, and none was handed in")


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


def rest(entity: Any) -> dict[str, Any]:
    """One of the SDK's REST objects as it is sent."""
    body: dict[str, Any] = json.loads(json.dumps(entity.as_dict(exclude_readonly=True)))
    return body


class Arm:
    """Plain requests of Azure Resource Manager: azure-core's pipeline and azure-mgmt-core's poller.

    Every method raises azure-core's errors. A path begins with a slash, and is asked for with API_VERSION; an address, as pages
    name the next one, is asked for as it is.
    """

    def __init__(self, address: str, token: TokenCredential) -> None:
        from azure.core.pipeline import Pipeline, policies
        from azure.core.pipeline.transport import RequestsTransport

        self._address = address
        self._pipeline: Pipeline[Any, Any] = Pipeline(
            RequestsTransport(connection_timeout=CONNECT_SECONDS, read_timeout=READ_SECONDS),
            [
                policies.RequestIdPolicy(),
                policies.UserAgentPolicy("headway"),
                policies.ContentDecodePolicy(),
                policies.RedirectPolicy(),
                policies.RetryPolicy(**PATIENCE),
                _authentication(address, token),
                policies.SensitiveHeaderCleanupPolicy(blocked_redirect_headers=["Authorization", USER_TOKEN]),
                policies.HttpLoggingPolicy(),
            ],
        )

    def ask(
        self,
        path: str,
        params: Mapping[str, str] | None = None,
        *,
        method: str = "GET",
        body: Mapping[str, Any] | None = None,
        headers: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        """What is there, or the answer to a change or an action such as `.../listKeys`, whose method is POST."""
        reply = self._send(method, path, params, body=body, headers=headers).http_response
        result: dict[str, Any] = reply.json() if reply.content else {}
        return result

    def look(self, path: str) -> dict[str, Any] | None:
        """What is there; None when only that is not there, and the workspace is."""
        from azure.core.exceptions import ResourceNotFoundError

        try:
            return self.ask(path)
        except ResourceNotFoundError as error:
            if code_of(error) in OF_THE_WORKSPACE:
                raise
            return None

    def pages(self, path: str, params: Mapping[str, str] | None = None) -> Iterator[dict[str, Any]]:
        """Every item of a listing, page after page."""
        while path:
            answer = self.ask(path, params)
            yield from answer["value"]
            path, params = answer.get("nextLink") or "", None

    def put_once(self, path: str, body: Mapping[str, Any]) -> None:
        """Make what never changes, such as a version of an asset; one that is there stays as it is."""
        from azure.core.exceptions import ResourceExistsError

        try:
            self.ask(path, method="PUT", body=body)
        except ResourceExistsError:
            return

    def begin(self, method: str, path: str, body: Mapping[str, Any] | None = None, *, poll: float) -> LROPoller[None]:
        """Begin a change. The poller looks every `poll` seconds, or when the service says."""
        from azure.core import PipelineClient
        from azure.core.polling import LROPoller
        from azure.mgmt.core.polling.arm_polling import ARMPolling

        client: PipelineClient[Any, Any] = PipelineClient(self._address, pipeline=self._pipeline)
        return LROPoller(client, self._send(method, path, body=body), lambda _: None, ARMPolling(poll))

    def _send(
        self,
        method: str,
        path: str,
        params: Mapping[str, str] | None = None,
        *,
        body: Mapping[str, Any] | None = None,
        headers: dict[str, str] | None = None,
    ) -> PipelineResponse[Any, Any]:
        from azure.core import exceptions
        from azure.core.rest import HttpRequest
        from azure.mgmt.core.exceptions import ARMErrorFormat

        if path.startswith("/"):
            path, params = self._address + path, {"api-version": API_VERSION, **(params or {})}
        response = self._pipeline.run(HttpRequest(method, path, params=params, json=body, headers=headers))
        reply = response.http_response
        if reply.status_code >= 300:
            kinds = {
                401: exceptions.ClientAuthenticationError,
                404: exceptions.ResourceNotFoundError,
                409: exceptions.ResourceExistsError,
            }
            exceptions.map_error(reply.status_code, reply, kinds)
            raise exceptions.HttpResponseError(response=reply, error_format=ARMErrorFormat)
        return response


def _authentication(address: str, token: TokenCredential) -> Any:
    """The policy that signs requests, also to this machine itself: to an emulator, without TLS."""
    from azure.core.pipeline.policies import BearerTokenCredentialPolicy

    class OnLoopback(BearerTokenCredentialPolicy):  # type: ignore[type-arg]
        def on_request(self, request: Any) -> None:
            request.context.options["enforce_https"] = False
            super().on_request(request)

    on_loopback = urlsplit(address).hostname in ("127.0.0.1", "localhost")
    return (OnLoopback if on_loopback else BearerTokenCredentialPolicy)(token, SCOPE)


def code_of(error: AzureError) -> str:
    """The service's own word for an error; empty without one."""
    return str(getattr(getattr(error, "error", None), "code", "") or "")


def no_cli(error: AzureError) -> bool:
    """Whether a credential gave no token because this machine has no Azure CLI, as azure-identity words it."""
    return "Azure CLI not found" in str(error.message)


def explain(error: AzureError, config: Where, *, what: str = "job") -> HeadwayError | ValueError:
    """What an error of the service means to a person."""
    from azure.core.exceptions import ClientAuthenticationError

    where = f"the Azure ML workspace {config.workspace}"
    text = getattr(getattr(error, "error", None), "message", None) or error.message or error
    lines = [line.strip() for line in str(text).splitlines() if line.strip()]
    status, output = getattr(error, "status_code", None), " ".join(lines[:3])[:400] or type(error).__name__
    if isinstance(error, ClientAuthenticationError) or status == 401:
        return Missing(
            f"{where} does not know who we are, or no longer: {output}", remedy=CLI if no_cli(error) else LOGIN
        )
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
        refused, why = f"{where} refused the {what}", f"{code_of(error)} {output}".strip()
        if QUOTA.search(why):
            return Missing(
                f"{refused}, there is no quota for it: {why}",
                remedy="Ask for quota in the studio, or take another size.",
            )
        for pattern, remedy in MISTAKES:
            if pattern.search(why):
                return ValueError(f"{refused}: {why}. {remedy}")
        return JobFailed(f"{refused}: {why}", failure="user", folder="", remedy="Change what it names.")
    if status is None:
        return Missing(f"{where} does not answer: {output}", remedy=f"Look at the network and at {config.endpoint}.")
    if status < 300:  # a change that was accepted ended as failed
        remedy = "Look at its log in the studio. If an identity lacks a role, `headway doctor --rights` lists what is needed."
        return JobFailed(f"the {what} in {where} failed: {output}", failure="infrastructure", folder="", remedy=remedy)
    return Missing(f"{where} answers {status}: {output}", remedy="Run the same command later: nothing is done twice.")
