"""Who may ask a server of Headway's, as settings: tokens of Microsoft Entra, API keys, and on which address it listens.

What checks a token is tasks/azure/entra.py; what stands before a model, tasks/jobs/serving/api_middleware.py; keys,
tasks/serving/keys.py.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field, field_validator

from tasks.config.base import Settings

TENANT = r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$"
LOOPBACK = ("127.0.0.1", "::1", "localhost")


class EntraConfig(Settings):
    """Tokens of Microsoft Entra that are believed: as Event Grid sends them to the bridge, or applications to an endpoint."""

    tenant: Annotated[str, Field(pattern=TENANT, validate_default=True)] = ""
    """Directory (tenant) id, in lower case. Not `common`, and no domain: it is compared with what a token says."""
    audience: Annotated[str, Field(min_length=1, validate_default=True)] = ""
    """Application id or URI that tokens are made out to: `aud` of the token."""
    applications: Annotated[tuple[str, ...], Field(min_length=1, validate_default=True)] = ()
    """Client ids (`azp`, or `appid` in version 1.0) that may come in."""
    authority: str = "https://login.microsoftonline.com"
    """Where its keys are fetched from, and nowhere else: https, or loopback."""

    @field_validator("authority")
    @classmethod
    def _safe(cls, value: str) -> str:
        if not re.fullmatch(r"https://[a-z0-9.-]+(:\d{1,5})?|http://(127\.0\.0\.1|\[::1\]|localhost):\d{1,5}", value):
            raise ValueError(
                "keys are fetched over https: https://HOST without a path, for example https://login.microsoftonline.us"
            )
        return value


class AccessConfig(Settings):
    """On which address an endpoint listens, and who may ask it."""

    host: str = "127.0.0.1"
    """Address that it listens on. Any but loopback needs keys, `entra` or `open`."""
    ask_for_keys: bool = False
    """Whether callers must show an API key before there is one. Once `headway endpoint key add` made one, they always must."""
    entra: EntraConfig | None = None
    """Applications of Microsoft Entra that may ask, beside the callers with keys."""
    open: bool = False
    """Whether everybody may ask who reaches an address that is not loopback: something before it must then keep others out."""


def require_asked(access: AccessConfig, asked: bool) -> None:
    """Raise ValueError for an address that others reach, and where nothing is asked of them; `asked`: there are keys, say."""
    if access.host in LOOPBACK or access.open or access.ask_for_keys or access.entra is not None or asked:
        return
    raise ValueError(
        f"host {access.host} is not loopback, and nobody would be asked who they are: make a key (`headway endpoint key add`), "
        "set `deployment.access.entra` or `ask_for_keys`, or set `deployment.access.open: true` when something before it keeps "
        "others out"
    )
