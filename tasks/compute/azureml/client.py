"""The door to a workspace of Azure ML: the SDK's own REST operations, for jobs and what they need.

What is sent is made in render.py; what a state means is backend.py; how it is sent, and what an error means to a
person, is tasks/azure/arm_client.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar

from tasks.azure.arm_client import OF_THE_WORKSPACE, code_of, explain, transport
from tasks.common.errors import Missing
from tasks.config.backends.azureml import AzureMlConfig
from tasks.config.cluster import ClusterConfig

T = TypeVar("T")
API_VERSION = "2025-01-01-preview"
"""The one that azure-ai-ml 1.35 itself puts command jobs with."""
JOB_SCOPE = "https://ml.azure.com/.default"
"""Of the token with which Azure ML acts as whoever submits."""
LISTED = 500
"""Most jobs of a listing that are looked at; what is older is asked for by its name."""


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
        result: dict[str, dict[str, Any] | None] = {}
        with self._told():
            listed = self._jobs.list(*self._where, tag=tag, list_view_type="All") if len(names) > 1 else ()
            for job in islice(listed, LISTED):
                if job["name"] in names:
                    result[str(job["name"])] = job.as_dict()
                if len(result) == len(names):
                    break
        return result | {name: self.job(name) for name in names - result.keys()}

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

    def usages(self) -> tuple[str, list[dict[str, Any]]]:
        """The workspace's region, and what the subscription may have of Azure ML there, and has. Raises Missing."""
        with self._told():
            region = str(self._client.workspaces.get(*self._where).location)
            return region, [one.as_dict() for one in self._client.usages.list(location=region)]

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
                **transport(self.config.endpoint, self._token()),
            )
        return self._connected

    @property
    def _history(self) -> Any:
        """The run history of the workspace's region, whose address the workspace's discovery page tells."""
        from azure.ai.ml._restclient.runhistory import RunHistoryClient
        from azure.core.rest import HttpRequest

        if self._histories is None:
            workspace = self._client.workspaces.get(*self._where)
            payload = self._client._client.send_request(HttpRequest("GET", workspace.properties.discovery_url))
            payload.raise_for_status()
            address = str(payload.json()["api"])
            self._histories = RunHistoryClient(self._token(), base_url=address, **transport(address, self._token()))
        return self._histories

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


def account_usages(config: ClusterConfig, files: Callable[[str], Any]) -> tuple[str, list[dict[str, Any]]]:
    """The region, and its usages as the service tells them. `files` opens a store by its name, whose login is used too.

    Raises ValueError where no workspace is configured, and Missing where it does not answer.
    """
    if not (config.azureml.subscription_id and config.azureml.resource_group and config.azureml.workspace):
        raise ValueError(
            "no workspace is configured: set cluster.azureml.subscription_id, resource_group and workspace"
        )
    try:
        return Workspace(config.azureml, files(config.azureml.store).token).usages()
    except ModuleNotFoundError as error:
        raise Missing(
            "Azure ML needs its SDK",
            remedy="pip install -c constraints.txt -e '.[azureml]', or write limits.yaml by hand",
        ) from error
