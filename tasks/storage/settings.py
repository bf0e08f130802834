"""Which stores there are, and which one a home works in: `stores.yaml` of the home, or the file that HEADWAY_STORES names.

Without that file a home works in the folder `store` below it. How a credential is made is blob/'s.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import ConfigDict, Field, ValidationError, field_validator, model_validator

from tasks.common.errors import Missing
from tasks.common.validation import explain
from tasks.config.base import Name, Settings, own_or_named

Credential = Literal[
    "managed_identity", "workload_identity", "cli", "service_principal", "connection_string", "azureml_user"
]
LOCAL = "local"
"""Name of the folder below the home."""


class Identity(Settings):
    """How Azure knows us: a store's, and a key vault's (tasks/security/trust.py)."""

    model_config = ConfigDict(hide_input_in_errors=True)
    """Who writes a secret where its variable's name belongs must not find it in a log too."""

    credential: Credential = "cli"
    """This way and no other."""
    tenant: str = ""
    client: str = ""
    """Client id of a service principal, or of a managed identity that a user assigned."""
    secret: str = ""
    """env:NAME of the variable that holds a service principal's secret, or a connection string."""

    @field_validator("secret")
    @classmethod
    def _by_name(cls, value: str) -> str:
        if value and not re.fullmatch(r"env:[A-Za-z_]\w*", value):
            raise ValueError("a secret is never written here: name the variable that holds it, as env:NAME")
        return value

    def secret_value(self) -> str:
        """The secret itself. Raises Missing when its variable is not set."""
        name = self.secret.removeprefix("env:")
        if not name or not os.environ.get(name):
            raise Missing(
                f"{name or 'the secret of the credential ' + self.credential} is not set",
                remedy="Export it, and name it as env:NAME in the file that names the credential.",
            )
        return os.environ[name]


class StoreConfig(Identity):
    """One store."""

    uri: Annotated[
        str, Field(pattern=r"^(az://[a-z0-9]{3,24}/[a-z0-9-]{3,63}(/.*)?|azureml://registries/[\w-]+|file://.+|/.+)$")
    ]
    """az://ACCOUNT/CONTAINER/PREFIX, a folder, or azureml://registries/NAME (to copy models to)."""

    @field_validator("uri")
    @classmethod
    def _inside(cls, value: str) -> str:
        if any(part in (".", "..") for part in value.removeprefix("az://").split("/")) and value.startswith("az://"):
            raise ValueError(f"{value} leads out of itself: no . and no .. in a prefix")
        return value

    @model_validator(mode="after")
    def _whole(self) -> StoreConfig:
        """What a kind of credential cannot do without."""
        needed = {"service_principal": ("tenant", "client", "secret"), "connection_string": ("secret",)}
        missing = [name for name in needed.get(self.credential, ()) if not getattr(self, name)]
        if missing:
            raise ValueError(f"{self.uri}: the credential {self.credential} needs {' and '.join(missing)}")
        return self


class Stores(Settings):
    """The file."""

    model_config = ConfigDict(hide_input_in_errors=True)

    use: str = LOCAL
    """The store that this home works in."""
    audit_copy: str = ""
    """The store in Azure Blob that the audit log is copied to as well; empty: none. Its container can be made immutable."""
    jobs: str = ""
    """The store in Azure Blob that folders of jobs without a shared folder lie in, best in an account of its own that keeps no
    versions; empty: the one that their inputs lie in."""
    stores: dict[Name, StoreConfig] = Field(default={})

    @model_validator(mode="after")
    def _jobs_apart(self) -> Stores:
        config = self.stores.get(self.jobs)
        if self.jobs and (config is None or not config.uri.startswith("az://")):
            raise ValueError(
                f"jobs: {self.jobs!r} is no store in Azure Blob; name one of `stores` whose uri is az://..."
            )
        if self.jobs and self.jobs in (self.use, self.audit_copy):
            raise ValueError(
                f"jobs: {self.jobs!r} is also `use` or `audit_copy`, which need versions, and folders of jobs need none: leave "
                "jobs empty, or name another store"
            )
        return self


def stores_file(home: Path) -> tuple[Path, bool]:
    """Which stores there are, and whether somebody named the file: `HEADWAY_STORES`, else `stores.yaml` of the home.

    Raises Refused; see own_or_named.
    """
    return own_or_named(home, "stores.yaml", "HEADWAY_STORES")


def load_stores(home: Path) -> Stores:
    """The stores of a home: `HEADWAY_STORES`, else `stores.yaml` of the home.

    Raises ValueError for a file that is not one, Missing when HEADWAY_STORES names none, Refused where it may name none
    (own_or_named).
    """
    path, named = stores_file(home)
    if not path.is_file():
        if named:
            raise Missing(f"HEADWAY_STORES names {path}, and there is no such file", remedy="Correct or unset it.")
        return Stores()
    try:
        return Stores.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")) or {})
    except (ValidationError, yaml.YAMLError) as error:
        words = explain(error, Stores) if isinstance(error, ValidationError) else error
        raise ValueError(f"{path} does not say which stores there are: {words}") from error
