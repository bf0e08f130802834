"""How Azure knows us: the one kind of credential that stores.yaml names, and no other when that one fails.

Which kind is used is logged; a token, a key or a connection string never is. Clients are made in client.py.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from tasks.storage.settings import Identity, StoreConfig

if TYPE_CHECKING:
    from azure.core.credentials import AzureNamedKeyCredential, AzureSasCredential, TokenCredential

    Known = TokenCredential | AzureNamedKeyCredential | AzureSasCredential

log = logging.getLogger("headway.storage")


class Access(NamedTuple):
    """Where a storage account answers, and what it knows us by."""

    url: str
    credential: Known
    emulator: bool
    """An emulator such as Azurite: its connection string names an address with the account in the path, as no account has."""


def access(config: StoreConfig) -> Access:
    """What a store in Azure is opened with. Raises ValueError for what does not fit together, Missing for what is not there."""
    account = config.uri.removeprefix("az://").partition("/")[0]
    log.info("%s is opened as %s", config.uri, config.credential)
    if config.credential == "connection_string":
        return _of_connection_string(config, account)
    return Access(f"https://{account}.blob.core.windows.net", token_credential(config, of=config.uri), emulator=False)


def token_credential(config: Identity, *, of: str) -> TokenCredential:
    """The credential of Microsoft Entra that a store or a key names; `of` is which one. Raises ValueError, Missing."""
    from azure import identity

    from tasks.common.errors import Missing

    try:
        match config.credential:
            case "managed_identity":
                return identity.ManagedIdentityCredential(client_id=config.client or None)
            case "workload_identity":
                return identity.WorkloadIdentityCredential(
                    tenant_id=config.tenant or None, client_id=config.client or None
                )
            case "service_principal":
                return identity.ClientSecretCredential(config.tenant, config.client, config.secret_value())
            case "cli":
                return identity.AzureCliCredential(tenant_id=config.tenant)
            case "azureml_user":
                from azure.ai.ml.identity import AzureMLOnBehalfOfCredential

                return AzureMLOnBehalfOfCredential()
    except ValueError as error:  # workload identity reads its variables at once
        raise Missing(
            f"{of}: {config.credential} cannot be used here: {error}",
            remedy="Run where that identity is, or name another credential: none is tried by itself.",
        ) from error
    raise ValueError(f"{of}: a connection string is no credential of Microsoft Entra")


def _of_connection_string(config: StoreConfig, account: str) -> Access:
    from azure.core.credentials import AzureNamedKeyCredential, AzureSasCredential

    text = config.secret_value()
    parts = dict(part.split("=", 1) for part in text.split(";") if "=" in part)
    name = parts.get("AccountName", "")
    suffix = parts.get("EndpointSuffix", "core.windows.net")
    url = parts.get("BlobEndpoint", f"{parts.get('DefaultEndpointsProtocol', 'https')}://{name}.blob.{suffix}")
    address = urlsplit(url.rstrip("/"))
    named = name or address.path.strip("/") or (address.hostname or "").partition(".")[0]
    if named != account:
        raise ValueError(
            f"{config.uri} names the account {account}, and the connection string in {config.secret} is of "
            f"{named or 'none'}: correct one of them"
        )
    if "AccountKey" in parts:
        known: Known = AzureNamedKeyCredential(account, parts["AccountKey"])
    elif "SharedAccessSignature" in parts:
        known = AzureSasCredential(parts["SharedAccessSignature"])
    else:
        raise ValueError(f"the connection string in {config.secret} has neither AccountKey nor SharedAccessSignature")
    return Access(url.rstrip("/"), known, emulator=bool(address.path.strip("/")))
