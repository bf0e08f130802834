"""A container of the Blob store as a datastore of a workspace: by it jobs, data assets and models name what lies there.

Azure ML takes an https address for a public server and signs nothing; private storage is named by a datastore. This one holds no
credential, so whoever reads through it does so as itself: the identity of the cluster, of the endpoint, or of who submitted.
See https://learn.microsoft.com/azure/machine-learning/how-to-datastore and .../how-to-identity-based-service-authentication.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tasks.azure.arm_client import Arm, Where, rest, workspace_id

if TYPE_CHECKING:
    from azure.ai.ml.entities import AzureBlobDatastore

DIGITS = 12


@dataclass(frozen=True)
class Datastore:
    """The datastore of a store on Azure Blob, whose `uri` is az://ACCOUNT/CONTAINER[/PREFIX]."""

    where: Where
    uri: str

    @property
    def name(self) -> str:
        """The same for the same container; Azure ML takes letters, digits and underscores."""
        return f"headway_{hashlib.sha256('/'.join(self._parts[:2]).encode()).hexdigest()[:DIGITS]}"

    def address(self, name: str, *, by_id: bool) -> str:
        """What lies under a name of the store; the service takes the whole address, the Azure CLI the short one."""
        path = "/".join(part for part in (self._parts[2], name) if part)
        w = self.where
        workspace = f"subscriptions/{w.subscription_id}/resourcegroups/{w.resource_group}/workspaces/{w.workspace}/"
        return f"azureml://{workspace if by_id else ''}datastores/{self.name}/paths/{path}"

    def entity(self) -> AzureBlobDatastore:
        from azure.ai.ml.entities import AzureBlobDatastore

        account, container, _ = self._parts
        return AzureBlobDatastore(
            name=self.name,
            account_name=account,
            container_name=container,
            description="The store of Headway's artifacts and jobs",
        )

    def register(self, arm: Arm) -> None:
        """Have the workspace know it. Raises azure-core's errors, and ValueError for one of its name and another container."""
        path = f"{workspace_id(self.where)}/datastores/{self.name}"
        existing = arm.look(path)
        if existing is None:
            arm.ask(path, method="PUT", body=rest(self.entity()._to_rest_object()))
            return
        account, container, _ = self._parts
        known = existing["properties"]
        if (known.get("accountName"), known.get("containerName")) != (account, container):
            raise ValueError(
                f"the datastore {self.name} of the workspace {self.where.workspace} is of "
                f"{known.get('accountName')}/{known.get('containerName')}, and the store is {self.uri}: somebody changed it. "
                f"Delete it (az ml datastore delete --name {self.name}), and run the same command again"
            )

    @property
    def _parts(self) -> tuple[str, str, str]:
        """Account, container, and the prefix within it."""
        account, _, rest_of = self.uri.removeprefix("az://").partition("/")
        container, _, prefix = rest_of.partition("/")
        return account, container, prefix.strip("/")
