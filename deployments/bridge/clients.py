"""Clients of Azure for the bridge: each goes to the address in our configuration, with the one credential that stands beside it.

Addresses out of events never come here: objects.py. What its errors mean is tasks/storage/blob/faults.py.
"""

from __future__ import annotations

import hashlib
import os
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from azure.storage.blob import ContainerClient
from azure.storage.queue import QueueClient

from deployments.configuration.events import ContainerConfig, QueueConfig
from tasks.common.errors import Missing
from tasks.storage.blob.credentials import access
from tasks.storage.blob.retries import CONNECT_SECONDS, READ_SECONDS, Retries
from tasks.storage.settings import Identity, StoreConfig

if TYPE_CHECKING:
    from tasks.storage.blob.credentials import Known

WORKERS = 8
"""Requests at once; the SDK keeps ten connections."""


def container_of(config: ContainerConfig) -> ContainerClient:
    """The client of a container; one a process. Raises Missing."""
    return _container(config, _digest(config), os.getpid())


def queue_of(config: QueueConfig, name: str = "") -> QueueClient:
    """The client of a queue, or of another one beside it; one a process. Raises Missing."""
    account, _, own = config.url.rpartition("/")
    return _queue(config, f"{account}/{name or own}", _digest(config), os.getpid())


def credential_of(config: ContainerConfig | QueueConfig) -> Known:
    """What an account knows us by. Raises Missing without one, and for one of another account: no event is to blame for it."""
    address = urlsplit(config.url)
    first, *rest = address.path.strip("/").split("/")
    account = first if rest else (address.hostname or "").partition(".")[0]
    output = config.model_dump(include=set(Identity.model_fields))
    try:
        return access(StoreConfig(uri=f"az://{account}/{(first, *rest)[-1]}", **output)).credential
    except ValueError as error:
        raise Missing(f"{config.url}: {error}", remedy="Correct the settings of the platform.") from error


def _digest(config: Identity) -> str:
    return hashlib.sha256(config.secret_value().encode()).hexdigest() if config.secret else ""


@lru_cache(maxsize=64)
def _container(config: ContainerConfig, secret: str, process: int) -> ContainerClient:
    return ContainerClient.from_container_url(config.url, credential_of(config), **_manners())


@lru_cache(maxsize=64)
def _queue(config: QueueConfig, url: str, secret: str, process: int) -> QueueClient:
    return QueueClient.from_queue_url(url, credential_of(config), **_manners())


def _manners() -> dict[str, Any]:
    """Nobody sends us elsewhere; what does not answer is told soon."""
    return {
        "retry_policy": Retries(),
        "connection_timeout": CONNECT_SECONDS,
        "read_timeout": READ_SECONDS,
        "permit_redirects": False,
    }
