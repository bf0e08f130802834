"""Prefect blocks: where jobs run, which store a home works in, and as whom. People make them in Prefect's page; a run names
one in its field `cluster`.

`headway up` registers the three types; on a server of yours, `prefect block register -m flows.support.blocks` does. A home's own
stores.yaml is never changed by a block: see docs/blocks.md.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import yaml
from prefect.blocks.core import Block
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound
from pydantic import BeforeValidator, Field, SecretStr, ValidationError, model_validator

from tasks.common import process
from tasks.common.validation import explain
from tasks.config.base import has_policy
from tasks.config.cluster import ClusterConfig
from tasks.config.files import load_cluster, merged, places, validated
from tasks.storage.settings import Credential, StoreConfig, Stores, load_stores, stores_file

SECRET = "HEADWAY_STORE_SECRET"
"""Variable that holds the secret of a run's block, in the process of that run. The stores.yaml that a block made names it."""


Chosen = BeforeValidator(lambda block: None if block == {} else block)
"""Prefect's page sends an empty object where nobody added a block."""


class HeadwayCredentials(Block):  # type: ignore[misc]
    """How Azure knows Headway: one kind of credential, and no other is tried when that one fails."""

    _block_type_name = "Headway credentials"
    _block_type_slug = "headway-credentials"

    credential: Credential = Field("cli", description="The kind; docs/storage.md says what each needs.")
    tenant: str = Field("", description="Tenant of a service principal, or of `cli` where there are several.")
    client: str = Field(
        "", description="Client id of a service principal, or of a managed identity that a user assigned."
    )
    secret: SecretStr | None = Field(None, description="A service principal's secret, or a connection string.")


class HeadwayStore(Block):  # type: ignore[misc]
    """A store of artifacts."""

    _block_type_name = "Headway store"
    _block_type_slug = "headway-store"

    uri: str = Field(description="az://ACCOUNT/CONTAINER/PREFIX, or a folder that all workers share.")
    credentials: Annotated[HeadwayCredentials | None, Chosen] = Field(
        None, description="How Azure knows us; a folder needs none."
    )

    @model_validator(mode="after")
    def _holds(self) -> HeadwayStore:
        self.config()
        return self

    def config(self) -> StoreConfig:
        """The store as stores.yaml has it, which names a secret by its variable. Raises ValueError."""
        given = self.credentials or HeadwayCredentials()
        secret = f"env:{SECRET}" if given.secret else ""
        fields = {"credential": given.credential, "tenant": given.tenant, "client": given.client, "secret": secret}
        try:
            return StoreConfig.model_validate({"uri": self.uri, **fields})
        except ValidationError as error:
            raise ValueError(f"the store does not hold: {explain(error, StoreConfig)}") from None


class HeadwayCluster(Block):  # type: ignore[misc]
    """Where jobs run, and the store that the home of a worker works in."""

    _block_type_name = "Headway cluster"
    _block_type_slug = "headway-cluster"

    where: str = Field(
        "",
        description="The shipped configuration that says where; empty: the run's own.",
        json_schema_extra={"enum": ["", *places()]},
    )
    settings: dict[str, Any] = Field(
        default={},
        description='Settings of the section `cluster` on top of it: {"nodes": 4, "slurm": {"partition": "gpu"}}',
    )
    store: Annotated[HeadwayStore | None, Chosen] = Field(None, description="Empty: the store that the home has.")

    @model_validator(mode="after")
    def _holds(self) -> HeadwayCluster:
        if self.where not in ("", *places()):
            raise ValueError(f"where is {self.where!r}: it is one of {', '.join(places())}, or empty")
        below = load_cluster(self.where, []).model_dump(mode="json") if self.where else {}
        validated(ClusterConfig, merged(below, self.settings), "of the block, field settings,")
        return self


def cluster_block(name: str) -> HeadwayCluster:
    """A cluster block by its name. Raises ValueError for one that there is not, or that does not hold."""
    slug = HeadwayCluster.get_block_type_slug()
    try:
        with get_client(sync_client=True) as client:
            client.read_block_type_by_slug(slug)
            documents = client.read_block_documents_by_type(slug, include_secrets=False)
    except ObjectNotFound:  # nobody registered the type
        documents = []
    known = sorted(one.name for one in documents if one.name)
    if name not in known:
        raise ValueError(
            f"cluster is {name!r}, and Prefect has no block {slug}/{name}: there are {', '.join(known) or 'none'}. Make it in "
            "Prefect's page (Blocks, Headway cluster), or leave the field empty"
        )
    try:
        block: HeadwayCluster = HeadwayCluster.load(name, _sync=True)
        return block
    except RuntimeError as error:
        why = explain(error.__cause__, HeadwayCluster) if isinstance(error.__cause__, ValidationError) else error
        raise ValueError(f"the block {slug}/{name} does not hold: {why}. Correct it in Prefect's page") from None


def take_store(home: Path, name: str) -> None:
    """Have this process work in the store that a cluster block names: a home without one takes it, for good.

    An empty name is no block. Raises ValueError for a home that works in another store: what its commands and its watch look at
    must be what runs write.
    """
    store = cluster_block(name).store if name else None
    if store is None:
        return
    config, (path, named) = store.config(), stores_file(home)
    fresh = not (named or path.exists() or (home / "store").exists() or has_policy(home))
    if fresh:
        # Not by the block's name, which may be `local`: that is the folder of a home.
        made = Stores(use="block", stores={"block": config}).model_dump(mode="json", exclude_defaults=True)
        text = f"# The block headway-store of the Prefect block headway-cluster/{name}.\n{yaml.safe_dump(made)}"
        try:
            with process.whole(path, replace=False) as file:
                file.write(text.encode())
        except FileExistsError:
            pass  # another run of this home was faster: what it wrote is compared like any other
    stores = load_stores(home)
    used = stores.stores.get(stores.use)
    if used is None or used.uri.rstrip("/") != config.uri.rstrip("/"):
        raise ValueError(
            f"the block headway-cluster/{name} names the store {config.uri}, and the home {home} works in "
            f"{used.uri if used else home / 'store'}: a home has one store. Take the store out of the block, or start a worker "
            "with another HEADWAY_HOME for it"
        )
    secret = store.credentials.secret if store.credentials else None
    if secret and used.secret:
        os.environ[used.secret.removeprefix("env:")] = secret.get_secret_value()
