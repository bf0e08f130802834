"""Managed online endpoints of a workspace, by the SDK's own REST operations: look, put, delete, and wait until it is done.

What is put is render.py; in which order, rollout.py. How it is sent and what an error means is
tasks/azure/arm_client.py.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tasks.azure.arm_client import OF_THE_WORKSPACE, Where, code_of, explain, transport
from tasks.common.errors import JobFailed, Missing

API_VERSION = "2025-01-01-preview"
"""The one that azure-ai-ml 1.35 itself knows these models by."""
MOVING = ("Creating", "Updating", "Deleting", "Scaling")
LOOK_SECONDS = 1.0
"""Between two looks at whether somebody wants a wait to end."""
log = logging.getLogger("headway.azureml")


class Online:
    """The endpoints of one workspace. Nothing is asked before a method is called; each raises Missing and ValueError."""

    def __init__(self, where: Where, token: Callable[[], Any], *, seconds: float, poll: float) -> None:
        """`seconds` is the longest time of one change, `poll` between two looks where the service names none."""
        self.where, self._token, self._seconds, self._poll = where, token, seconds, poll
        self._connected: Any = None

    def location(self) -> str:
        """Region of the workspace."""
        with self._told("endpoint"):
            return str(self._client.workspaces.get(*self._names).location)

    def endpoint(self, name: str) -> dict[str, Any] | None:
        """An endpoint as it is; None when there is none."""
        return self._found(lambda: self._client.online_endpoints.get(*self._names, endpoint_name=name))

    def deployment(self, endpoint: str, name: str) -> dict[str, Any] | None:
        """A deployment of an endpoint as it is; None when there is none."""
        return self._found(
            lambda: self._client.online_deployments.get(*self._names, endpoint_name=endpoint, deployment_name=name)
        )

    def put_asset(self, kind: str, name: str, version: str, body: Mapping[str, Any]) -> None:
        """Register a model or an environment; one that is there stays as it is."""
        from azure.core.exceptions import ResourceExistsError

        operations = {"models": self._client.model_versions, "environments": self._client.environment_versions}[kind]
        with self._told(f"{kind[:-1]} {name}"):
            try:
                operations.create_or_update(*self._names, name=name, version=version, body=body)
            except ResourceExistsError:
                return

    def put_endpoint(self, name: str, body: Mapping[str, Any]) -> None:
        """Create or change an endpoint; its whole body is replaced. Returns once it is done."""
        self.settled(lambda: self.endpoint(name))
        with self._told(f"endpoint {name}"):
            self._done(
                self._client.online_endpoints.begin_create_or_update(
                    *self._names, endpoint_name=name, body=dict(body), polling_interval=self._poll
                )
            )

    def put_deployment(
        self, endpoint: str, name: str, body: Mapping[str, Any], *, asked_back: Callable[[], str] = str
    ) -> None:
        """Create a deployment. Raises JobFailed when it does not come up, or when `asked_back` says why somebody minds."""
        with self._told(f"deployment {name} of {endpoint}"):
            self._done(
                self._client.online_deployments.begin_create_or_update(
                    *self._names,
                    endpoint_name=endpoint,
                    deployment_name=name,
                    body=dict(body),
                    polling_interval=self._poll,
                ),
                asked_back=asked_back,
            )

    def delete_deployment(self, endpoint: str, name: str) -> None:
        """Delete a deployment, which has no traffic; one that is not there needs nothing."""
        if self.settled(lambda: self.deployment(endpoint, name)) is None:
            return
        with self._told(f"deletion of the deployment {name} of {endpoint}"):
            self._done(
                self._client.online_deployments.begin_delete(
                    *self._names, endpoint_name=endpoint, deployment_name=name, polling_interval=self._poll
                )
            )

    def delete_endpoint(self, name: str) -> None:
        """Delete an endpoint with its deployments; one that is not there needs nothing."""
        if self.settled(lambda: self.endpoint(name)) is None:
            return
        with self._told(f"deletion of the endpoint {name}"):
            self._done(
                self._client.online_endpoints.begin_delete(
                    *self._names, endpoint_name=name, polling_interval=self._poll
                )
            )

    def secret(self, name: str, *, auth: str) -> str:
        """What requests to an endpoint are sent with. It is never written down."""
        with self._told(f"keys of {name}"):
            if auth == "key":
                return str(self._client.online_endpoints.list_keys(*self._names, endpoint_name=name).primary_key)
            return str(self._client.online_endpoints.get_token(*self._names, endpoint_name=name).access_token)

    def get(self, path: str, params: Mapping[str, str]) -> dict[str, Any]:
        """Something else of Azure Resource Manager, such as metrics, by its path."""
        from azure.core.rest import HttpRequest

        with self._told(path.rpartition("/")[2]):
            reply = self._client._client.send_request(
                HttpRequest("GET", self.where.endpoint + path, params=dict(params))
            )
            reply.raise_for_status()
            result: dict[str, Any] = reply.json()
            return result

    def settled(self, look: Callable[[], dict[str, Any] | None]) -> dict[str, Any] | None:
        """What is there once nothing changes it any more: a deployer that died may have left a change under way."""
        deadline = time.monotonic() + self._seconds
        while (result := look()) and result["properties"].get("provisioningState") in MOVING:
            if time.monotonic() > deadline:
                raise self._too_slow(f"{result['properties']['provisioningState']} of {result.get('name')}")
            time.sleep(self._poll)
        return result

    def _done(self, poller: Any, *, asked_back: Callable[[], str] = str) -> None:
        deadline = time.monotonic() + self._seconds
        while not poller.done():
            if why := asked_back():
                raise JobFailed(f"nobody waits for it any more: {why}", failure="cancelled", folder="")
            if time.monotonic() > deadline:
                raise self._too_slow("the change")
            poller.wait(min(LOOK_SECONDS, self._poll))
        poller.result()

    def _too_slow(self, what: str) -> Missing:
        return Missing(
            f"{what} was not done in {self._seconds:g} s in the workspace {self.where.workspace}",
            remedy="Look at the endpoint in the studio, or raise deployment.azureml.create_minutes.",
        )

    @property
    def _names(self) -> tuple[str, str]:
        return self.where.resource_group, self.where.workspace

    @property
    def _client(self) -> Any:
        from azure.ai.ml._restclient.arm_ml_service import MachineLearningServicesMgmtClient

        if self._connected is None:
            token = self._token()
            self._connected = MachineLearningServicesMgmtClient(
                token,
                self.where.subscription_id,
                base_url=self.where.endpoint,
                api_version=API_VERSION,
                **transport(self.where.endpoint, token),
            )
        return self._connected

    def _found(self, ask: Callable[[], Any]) -> dict[str, Any] | None:
        from azure.core.exceptions import ResourceNotFoundError

        with self._told("endpoint"):
            try:
                return dict(ask().as_dict())
            except ResourceNotFoundError as error:
                if code_of(error) in OF_THE_WORKSPACE:
                    raise
                return None

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Raise what a person can act on, in place of the SDK's errors."""
        from azure.core.exceptions import AzureError

        try:
            yield
        except AzureError as error:
            raise explain(error, self.where, what=what) from error
