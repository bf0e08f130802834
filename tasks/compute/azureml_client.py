"""The door to a workspace of Azure ML: the SDK's own REST operations, with our waits, and its errors in words.

What is sent is made in azureml_render.py; what a state means is azureml_states.py. Asking again is the SDK's: it waits as long as
the service says (Retry-After), and gives up after a minute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from tasks.cluster_config import AzureMlConfig
from tasks.compute.azureml_states import MISTAKES, QUOTA
from tasks.errors import HeadwayError, JobFailed, Missing

if TYPE_CHECKING:
    from azure.core.exceptions import AzureError

T = TypeVar("T")
API_VERSION = "2025-01-01-preview"
"""The one that azure-ai-ml 1.35 itself puts command jobs with."""
SCOPE = "https://management.azure.com/.default"
JOB_SCOPE = "https://ml.azure.com/.default"
"""Of the token with which Azure ML acts as whoever submits."""
PATIENCE = {"retry_total": 3, "retry_backoff_factor": 0.4, "retry_backoff_max": 15, "timeout": 60}
CONNECT_SECONDS, READ_SECONDS = 5.0, 20.0
LISTED = 500
"""Most jobs of a listing that are looked at; what is older is asked for by its name."""
OF_THE_WORKSPACE = ("ResourceNotFound", "ResourceGroupNotFound", "SubscriptionNotFound", "WorkspaceNotFound")
LOGIN = "Log in again: az login (or look at the credential of the store in stores.yaml, which is used here too)."


class Workspace:
    """One workspace. Nothing is asked before a method is called."""

    def __init__(self, config: AzureMlConfig, token: Callable[[], Any]) -> None:
        self.config, self._token = config, token
        self._connected: Any = None
        self._histories: Any = None

    def job(self, name: str) -> dict[str, Any] | None:
        """A job; None when the workspace has none of that name. Raises Missing."""
        return self._found(lambda: self._jobs.get(*self._where, id=name))

    def jobs(self, names: set[str], tag: str) -> dict[str, dict[str, Any] | None]:
        """Several jobs by one listing; those that it does not show are asked for one by one. Raises Missing."""
        found: dict[str, dict[str, Any] | None] = {}
        with self._told():
            listed = self._jobs.list(*self._where, tag=tag, list_view_type="All") if len(names) > 1 else ()
            for job in islice(listed, LISTED):
                if job["name"] in names:
                    found[str(job["name"])] = job.as_dict()
                if len(found) == len(names):
                    break
        return found | {name: self.job(name) for name in names - found.keys()}

    def put_job(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """Submit. The same name again is the same job. Raises ValueError, Missing, JobFailed."""
        headers = {"x-azureml-token": self._user_token()} if self.config.identity == "user" else {}
        with self._told():
            return dict(self._jobs.create_or_update(*self._where, id=name, body=body, headers=headers).as_dict())

    def put_asset(self, kind: str, name: str, version: str, body: dict[str, Any]) -> None:
        """Register a data asset or an environment; one that is there stays as it is. Raises Missing, ValueError."""
        from azure.core.exceptions import ResourceExistsError

        operations = {"data": self._client.data_versions, "environments": self._client.environment_versions}[kind]
        with self._told():
            try:
                operations.create_or_update(*self._where, name=name, version=version, body=body)
            except ResourceExistsError:
                return

    def cancel(self, name: str) -> None:
        """Have the service end a job: it answers 202 and goes on by itself. One that is over or gone needs nothing."""
        from azure.core.exceptions import HttpResponseError, ResourceNotFoundError

        with self._told():
            try:
                self._jobs.begin_cancel(*self._where, id=name, polling=False)
            except ResourceNotFoundError:
                return
            except HttpResponseError as error:
                if error.status_code not in (400, 409):
                    raise

    def cluster(self, name: str) -> dict[str, Any] | None:
        """A compute cluster; None when the workspace has none of that name. Raises Missing."""
        return self._found(lambda: self._client.compute.get(*self._where, compute_name=name))

    def why(self, name: str) -> dict[str, Any]:
        """The error that the run history has of a job: `code`, `message`, and so on inwards; empty without one."""
        with self._told():
            details = self._history.runs.get_details(self._client._config.subscription_id, *self._where, name)
        return dict((details.as_dict().get("error") or {}).get("error") or {})

    @property
    def _where(self) -> tuple[str, str]:
        return self.config.resource_group, self.config.workspace

    @property
    def _jobs(self) -> Any:
        return self._client.jobs

    @property
    def _client(self) -> Any:
        from azure.ai.ml._restclient.arm_ml_service import MachineLearningServicesMgmtClient

        if self._connected is None:
            self._connected = MachineLearningServicesMgmtClient(
                self._token(),
                self.config.subscription_id,
                base_url=self.config.endpoint,
                api_version=API_VERSION,
                **self._transport(self.config.endpoint),
            )
        return self._connected

    @property
    def _history(self) -> Any:
        """The run history of the workspace's region, whose address the workspace's discovery page tells."""
        from azure.ai.ml._restclient.runhistory import RunHistoryClient
        from azure.core.rest import HttpRequest

        if self._histories is None:
            workspace = self._client.workspaces.get(*self._where)
            told = self._client._client.send_request(HttpRequest("GET", workspace.properties.discovery_url))
            told.raise_for_status()
            address = str(told.json()["api"])
            self._histories = RunHistoryClient(self._token(), base_url=address, **self._transport(address))
        return self._histories

    def _transport(self, address: str) -> dict[str, Any]:
        from azure.core.pipeline.policies import BearerTokenCredentialPolicy

        class OnLoopback(BearerTokenCredentialPolicy):  # type: ignore[type-arg]
            """Lets a token go to this machine itself without TLS: to an emulator."""

            def on_request(self, request: Any) -> None:
                request.context.options["enforce_https"] = False
                super().on_request(request)

        here = urlsplit(address).hostname in ("127.0.0.1", "localhost")
        policy = OnLoopback if here else BearerTokenCredentialPolicy
        waits = {"connection_timeout": CONNECT_SECONDS, "read_timeout": READ_SECONDS}
        return {"authentication_policy": policy(self._token(), SCOPE), **PATIENCE, **waits}

    def _user_token(self) -> str:
        with self._told():
            return str(self._token().get_token(JOB_SCOPE).token)

    def _found(self, ask: Callable[[], Any]) -> dict[str, Any] | None:
        """What is there; None when only that is not there, and the workspace is."""
        from azure.core.exceptions import ResourceNotFoundError

        with self._told():
            try:
                return dict(ask().as_dict())
            except ResourceNotFoundError as error:
                if code_of(error) in OF_THE_WORKSPACE:
                    raise
                return None

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Raise what a person can act on, in place of the SDK's errors."""
        from azure.core.exceptions import AzureError

        try:
            yield
        except AzureError as error:
            raise explain(error, self.config) from error


def code_of(error: AzureError) -> str:
    """The service's own word for an error; empty without one."""
    return str(getattr(getattr(error, "error", None), "code", "") or "")


def explain(error: AzureError, config: AzureMlConfig) -> HeadwayError | ValueError:
    """What an error of the service means to a person."""
    from azure.core.exceptions import ClientAuthenticationError

    where = f"the Azure ML workspace {config.workspace}"
    status, said = getattr(error, "status_code", None), _first_lines(error)
    if isinstance(error, ClientAuthenticationError) or status == 401:
        return Missing(f"{where} does not know who we are, or no longer: {said}", remedy=LOGIN)
    if status == 403:
        return Missing(
            f"{where} does not let us do this: {said}",
            remedy="Give this identity the role AzureML Data Scientist on the workspace, or log in as another: az login.",
        )
    if status == 404:
        return ValueError(
            f"{where} is not there ({said}): look at azureml.subscription_id ({config.subscription_id}), "
            f"azureml.resource_group ({config.resource_group}) and azureml.workspace"
        )
    if status in (400, 409, 422):
        return _refused(where, f"{code_of(error)} {said}".strip())
    if status is None:
        return Missing(f"{where} does not answer: {said}", remedy=f"Look at the network and at {config.endpoint}.")
    return Missing(
        f"{where} answers {status}: {said}", remedy="Run the same command later: nothing is submitted twice."
    )


def _refused(where: str, said: str) -> HeadwayError | ValueError:
    """400 and its like: quota, a mistake in the settings, or something that nobody foresaw."""
    if QUOTA.search(said):
        return Missing(
            f"{where} has no quota for this: {said}", remedy="Ask for quota in the studio, or take another size."
        )
    for pattern, remedy in MISTAKES:
        if pattern.search(said):
            return ValueError(f"{where} refused the job: {said}. {remedy}")
    return JobFailed(f"{where} refused the job: {said}", failure="user", folder="", remedy="Change what it names.")


def _first_lines(error: AzureError) -> str:
    text = getattr(getattr(error, "error", None), "message", None) or error.message or error
    lines = [line.strip() for line in str(text).splitlines() if line.strip()]
    return " ".join(lines[:3])[:400] or type(error).__name__
