"""The door to a workspace of Azure ML: plain requests of Azure Resource Manager, for jobs and what they need.

What is sent is made in render.py, by the SDK's entities; what a state means is backend.py; how it is sent, and what an error
means to a person, is tasks/azure/arm_client.py. Why not by the SDK's MLClient is in docs/decisions.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import islice
from typing import Any

from tasks.azure.arm_client import CONNECT_SECONDS, READ_SECONDS, USER_TOKEN, Arm, explain, workspace_id
from tasks.azure.datastore import Datastore
from tasks.common.errors import Missing
from tasks.config.backends.azureml import AzureMlConfig
from tasks.config.cluster import ClusterConfig

JOB_SCOPE = "https://ml.azure.com/.default"
"""Of the token with which Azure ML acts as whoever submits."""
LISTED = 500
"""Most jobs of a listing that are looked at; what is older is asked for by its name."""
HISTORY_VERSION = "v1.0"
LOGS_LOOKED_AT, LINE_CHARACTERS = 4, 300


class Workspace:
    """One workspace. Nothing is asked before a method is called."""

    def __init__(self, config: AzureMlConfig, token: Callable[[], Any]) -> None:
        self.config, self._token = config, token

    def job(self, name: str) -> dict[str, Any] | None:
        """A job; None when the workspace has none of that name. Raises Missing."""
        with self._in_words():
            return self._arm.look(self._path("jobs", name))

    def jobs(self, names: set[str], tag: str) -> dict[str, dict[str, Any] | None]:
        """Several jobs by one listing; those that it does not show are asked for one by one. Raises Missing."""
        result: dict[str, dict[str, Any] | None] = {}
        with self._in_words():
            listed = self._arm.pages(self._path("jobs"), {"tag": tag, "listViewType": "All"}) if len(names) > 1 else ()
            for job in islice(listed, LISTED):
                if job["name"] in names:
                    result[str(job["name"])] = job
                if len(result) == len(names):
                    break
        return result | {name: self.job(name) for name in names - result.keys()}

    def put_job(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """Submit. The same name again is the same job. Raises ValueError, Missing, JobFailed."""
        with self._in_words():
            user = self.config.identity == "user"
            headers = {USER_TOKEN: str(self._token().get_token(JOB_SCOPE).token)} if user else {}
            return self._arm.ask(self._path("jobs", name), method="PUT", body=body, headers=headers)

    def put_asset(self, kind: str, name: str, version: str, body: dict[str, Any]) -> None:
        """Register one of `data` or `environments`; one that is there stays as it is. Raises Missing, ValueError."""
        with self._in_words():
            self._arm.put_once(self._path(kind, name, "versions", version), body)

    def put_datastore(self, datastore: Datastore) -> None:
        """Have the workspace know where the store lies. Raises Missing, ValueError."""
        with self._in_words():
            datastore.register(self._arm)

    def cancel(self, name: str) -> None:
        """Have the service end a job: it answers 202 and goes on by itself. One that is over or gone needs nothing."""
        from azure.core.exceptions import HttpResponseError, ResourceNotFoundError

        with self._in_words():
            try:
                self._arm.ask(self._path("jobs", name, "cancel"), method="POST")
            except ResourceNotFoundError:
                return
            except HttpResponseError as error:
                if error.status_code not in (400, 409):
                    raise

    def cluster(self, name: str) -> dict[str, Any] | None:
        """A compute cluster; None when the workspace has none of that name. Raises Missing."""
        with self._in_words():
            return self._arm.look(self._path("computes", name))

    def usages(self) -> tuple[str, list[dict[str, Any]]]:
        """The workspace's region, and what the subscription may have of Azure ML there, and has. Raises Missing."""
        provider = f"/subscriptions/{self.config.subscription_id}/providers/Microsoft.MachineLearningServices"
        with self._in_words():
            region = str(self._arm.ask(workspace_id(self.config))["location"])
            return region, list(self._arm.pages(f"{provider}/locations/{region}/usages"))

    def details(self, name: str) -> dict[str, Any]:
        """What the run history has of a job: its `error`, and the addresses of its `logFiles`."""
        with self._in_words():
            path = f"/history/v1.0{workspace_id(self.config)}/runs/{name}/details"
            return self._history.ask(path, {"api-version": HISTORY_VERSION})

    def log_line(self, logs: Mapping[str, str]) -> str:
        """The last line that a node of a job wrote, of the `logFiles` in its details; empty without one."""
        import requests

        for key in sorted(key for key in logs if key.startswith("user_logs/std_log"))[:LOGS_LOOKED_AT]:
            with suppress(requests.RequestException):  # the workspace's storage may be closed to this network
                answer = requests.get(logs[key], timeout=(CONNECT_SECONDS, READ_SECONDS))
                lines = [line.strip() for line in answer.text.splitlines() if line.strip()] if answer.ok else []
                if lines:
                    return lines[-1][:LINE_CHARACTERS]
        return ""

    def _path(self, *parts: str) -> str:
        return "/".join((workspace_id(self.config), *parts))

    @cached_property
    def _arm(self) -> Arm:
        return Arm(self.config.endpoint, self._token())

    @cached_property
    def _history(self) -> Arm:
        """The run history of the workspace's region, whose address the workspace's discovery page tells."""
        workspace = self._arm.ask(workspace_id(self.config))
        return Arm(str(self._arm.ask(workspace["properties"]["discoveryUrl"])["api"]), self._token())

    @contextmanager
    def _in_words(self) -> Iterator[None]:
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
            remedy="pip install -c constraints.txt -e '.[azure]', or write limits.yaml by hand",
        ) from error
