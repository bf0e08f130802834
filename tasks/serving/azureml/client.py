"""Managed online endpoints of a workspace: look, put, delete, and wait until it is done.

What is put is render.py; in which order, rollout.py. How it is sent and what an error means is tasks/azure/arm_client.py.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from tasks.azure.arm_client import Arm, Where, explain, workspace_id
from tasks.azure.datastore import Datastore
from tasks.common.errors import JobFailed, Missing

SCALING_VERSION = "2022-10-01"
"""Of Microsoft.Insights/autoscalesettings: https://learn.microsoft.com/rest/api/monitor/autoscale-settings/create-or-update."""
MOVING = ("Creating", "Updating", "Deleting", "Scaling")
LOOK_SECONDS = 1.0
"""Between two looks at whether somebody wants a wait to end."""
log = logging.getLogger("headway.azureml")


class Online:
    """The endpoints of one workspace. Nothing is asked before a method is called; each raises Missing and ValueError."""

    def __init__(self, where: Where, token: Callable[[], Any], *, seconds: float, poll: float) -> None:
        """`seconds` is the longest time of one change, `poll` between two looks where the service names none."""
        self.where, self._token, self._seconds, self._poll = where, token, seconds, poll

    def location(self) -> str:
        """Region of the workspace."""
        with self._in_words("endpoint"):
            return str(self._arm.ask(workspace_id(self.where))["location"])

    def endpoint(self, name: str) -> dict[str, Any] | None:
        """An endpoint as it is; None when there is none."""
        with self._in_words("endpoint"):
            return self._arm.look(self._path(name))

    def deployment(self, endpoint: str, name: str) -> dict[str, Any] | None:
        """A deployment of an endpoint as it is; None when there is none."""
        with self._in_words("endpoint"):
            return self._arm.look(self._path(endpoint, name))

    def put_asset(self, kind: str, name: str, version: str, body: Mapping[str, Any]) -> None:
        """Register one of `models` or `environments`; one that is there stays as it is."""
        with self._in_words(f"{kind[:-1]} {name}"):
            self._arm.put_once(f"{workspace_id(self.where)}/{kind}/{name}/versions/{version}", body)

    def put_datastore(self, datastore: Datastore) -> None:
        """Have the workspace know where the store lies."""
        with self._in_words(f"datastore {datastore.name}"):
            datastore.register(self._arm)

    def put_endpoint(self, name: str, body: Mapping[str, Any]) -> None:
        """Create or change an endpoint; its whole body is replaced. Returns once it is done."""
        self.settled(lambda: self.endpoint(name))
        self._change("PUT", self._path(name), f"endpoint {name}", body)

    def put_deployment(
        self, endpoint: str, name: str, body: Mapping[str, Any], *, asked_back: Callable[[], str] = str
    ) -> None:
        """Create a deployment. Raises JobFailed when it does not come up, or when `asked_back` says why somebody minds."""
        what = f"deployment {name} of {endpoint}"
        self._change("PUT", self._path(endpoint, name), what, body, asked_back=asked_back)

    def delete_deployment(self, endpoint: str, name: str) -> None:
        """Delete a deployment, which has no traffic; one that is not there needs nothing."""
        if self.settled(lambda: self.deployment(endpoint, name)):
            self._change("DELETE", self._path(endpoint, name), f"deletion of the deployment {name} of {endpoint}")

    def put_scaling(self, name: str, body: Mapping[str, Any]) -> None:
        """Have Azure Monitor scale a deployment, by a setting of this name."""
        from azure.core.exceptions import HttpResponseError

        with self._in_words(f"autoscale setting {name}"):
            try:
                self._arm.ask(self._scaling(name), {"api-version": SCALING_VERSION}, method="PUT", body=body)
            except HttpResponseError as error:
                if error.status_code != 403:
                    raise
                raise Missing(
                    f"Azure Monitor does not let us scale the deployment ({name}): {error.message}",
                    remedy="Give this identity the role Monitoring Contributor on the resource group, or lower "
                    "deployment.azureml.most_instances to `instances`.",
                ) from error

    def delete_scaling(self, name: str) -> None:
        """Delete such a setting. One that is not there, or that we have no right to, needs nothing: we did not make it."""
        from azure.core.exceptions import HttpResponseError

        with self._in_words(f"autoscale setting {name}"):
            try:
                self._arm.ask(self._scaling(name), {"api-version": SCALING_VERSION}, method="DELETE")
            except HttpResponseError as error:
                if error.status_code not in (403, 404):
                    raise

    def delete_endpoint(self, name: str) -> None:
        """Delete an endpoint with its deployments; one that is not there needs nothing."""
        if self.settled(lambda: self.endpoint(name)):
            self._change("DELETE", self._path(name), f"deletion of the endpoint {name}")

    def secret(self, name: str, *, auth: str) -> str:
        """What requests to an endpoint are sent with. It is never written down."""
        action, key = ("listKeys", "primaryKey") if auth == "key" else ("token", "accessToken")
        with self._in_words(f"keys of {name}"):
            return str(self._arm.ask(f"{self._path(name)}/{action}", method="POST")[key])

    def get(self, path: str, params: Mapping[str, str]) -> dict[str, Any]:
        """Something else of Azure Resource Manager, such as metrics, by its path."""
        with self._in_words(path.rpartition("/")[2]):
            return self._arm.ask(path, params)

    def settled(self, look: Callable[[], dict[str, Any] | None]) -> dict[str, Any] | None:
        """What is there once nothing changes it any more: a deployer that died may have left a change under way."""
        deadline = time.monotonic() + self._seconds
        while (result := look()) and result["properties"].get("provisioningState") in MOVING:
            if time.monotonic() > deadline:
                raise self._too_slow(f"{result['properties']['provisioningState']} of {result.get('name')}")
            time.sleep(self._poll)
        return result

    def _change(
        self,
        method: str,
        path: str,
        what: str,
        body: Mapping[str, Any] | None = None,
        *,
        asked_back: Callable[[], str] = str,
    ) -> None:
        """Have something changed, and wait until it is done."""
        deadline = time.monotonic() + self._seconds
        with self._in_words(what):
            poller = self._arm.begin(method, path, body, poll=self._poll)
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

    def _scaling(self, name: str) -> str:
        group = f"/subscriptions/{self.where.subscription_id}/resourceGroups/{self.where.resource_group}"
        return f"{group}/providers/Microsoft.Insights/autoscalesettings/{name}"

    def _path(self, endpoint: str, deployment: str = "") -> str:
        path = f"{workspace_id(self.where)}/onlineEndpoints/{endpoint}"
        return f"{path}/deployments/{deployment}" if deployment else path

    @cached_property
    def _arm(self) -> Arm:
        return Arm(self.where.endpoint, self._token())

    @contextmanager
    def _in_words(self, what: str) -> Iterator[None]:
        """Raise what a person can act on, in place of the SDK's errors."""
        from azure.core.exceptions import AzureError

        try:
            yield
        except AzureError as error:
            raise explain(error, self.where, what=what) from error
