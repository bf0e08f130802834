"""What every configuration class is made of, how a configuration is digested, and what the environment says."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tasks.common.errors import Refused
from tasks.common.home import home
from tasks.config.database import mlflow_uri

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
Positive = Annotated[int, Field(gt=0)]
NodeName = Annotated[str, Field(pattern=r"^[A-Za-z0-9\[][A-Za-z0-9_.:@,\[\]-]{0,254}$")]
"""A machine as a scheduler or a host list calls it, or a Slurm list of them (`n[1-4],n7`). It is written into scripts and
commands, and
some come from the store: nothing in it may mean anything to a shell, or begin a line."""


class Settings(BaseModel):
    """Base of every configuration class: frozen, and a misspelt key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _nothing_is_empty_text(cls, values: Any) -> Any:
        """YAML reads nothing at all as null; where empty text is the default, that is what was meant."""
        if not isinstance(values, dict):
            return values
        empty = {name for name, field in cls.model_fields.items() if field.default == ""}
        return {key: value for key, value in values.items() if value is not None or key not in empty}


def canonical_json(value: Any) -> str:
    """One spelling of a JSON value, so that equal values have equal digests."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest(value: Any) -> str:
    """sha256, in hex, of the canonical JSON of a value."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def config_digest(config: Settings) -> str:
    """Digest of a configuration by value: defaults written out and defaults left out are the same."""
    return digest(config.model_dump(mode="json"))


def tracking_uri() -> str:
    """Where MLflow's view is published: `MLFLOW_TRACKING_URI`, else the PostgreSQL that `headway up` was given, else a file.

    A file is named by its absolute path: who publishes works in another directory.
    """
    named = (
        os.environ.get("MLFLOW_TRACKING_URI") or mlflow_uri(home()) or f"sqlite:///{home() / 'mlflow' / 'mlflow.db'}"
    )
    scheme, file, path = named.partition("sqlite:///")
    return f"{file}{Path(path).absolute()}" if file and not scheme else named


def experiment(name: str) -> str:
    """MLflow's experiment that runs are published in: `MLFLOW_EXPERIMENT_NAME`, else the given one."""
    return os.environ.get("MLFLOW_EXPERIMENT_NAME") or name


def copies_weights() -> bool:
    """Whether a model's weights are copied into MLflow: `HEADWAY_MLFLOW_WEIGHTS`, `copy` or, as without it, `store`.

    Raises ValueError for any other word.
    """
    word = os.environ.get("HEADWAY_MLFLOW_WEIGHTS") or "store"
    if word not in ("store", "copy"):
        raise ValueError(
            f"HEADWAY_MLFLOW_WEIGHTS is {word!r}: `copy` puts the weights of models into MLflow, `store` leaves them in the store"
        )
    return word == "copy"


def image_digest() -> str:
    """The image that this process runs in: `HEADWAY_IMAGE_DIGEST`, `sha256:...`; empty where nobody told it."""
    return os.environ.get("HEADWAY_IMAGE_DIGEST", "")


def openlineage_key() -> str:
    """What an OpenLineage server asks for as a bearer token: `OPENLINEAGE_API_KEY`, as in its own clients; empty without one."""
    return os.environ.get("OPENLINEAGE_API_KEY", "")


def told_sku() -> str:
    """The size of this virtual machine, for example Standard_ND96isr_H100_v5: `HEADWAY_SKU`; empty where nobody told it."""
    return os.environ.get("HEADWAY_SKU", "")


def policy_file(home: Path) -> tuple[Path, bool]:
    """The policy of who may do what, and whether somebody named it: `HEADWAY_POLICY`, else `policy.yaml` of the home.

    Raises Refused; see own_or_named.
    """
    return own_or_named(home, "policy.yaml", "HEADWAY_POLICY")


def trust_file(home: Path) -> tuple[Path, bool]:
    """Whose signatures count, and whether somebody named the file: `HEADWAY_TRUST`, else `trust.yaml` of the home.

    Raises Refused; see own_or_named.
    """
    return own_or_named(home, "trust.yaml", "HEADWAY_TRUST")


def has_policy(home: Path) -> bool:
    """Return whether a policy of rights, or of whose signatures count, applies to a home."""
    named = os.environ.get("HEADWAY_POLICY") or os.environ.get("HEADWAY_TRUST")
    return bool(named) or any(os.path.lexists(home / name) for name in ("policy.yaml", "trust.yaml"))


def own_or_named(home: Path, own: str, variable: str) -> tuple[Path, bool]:
    """A file of the home, or the one that a variable names instead, and whether it was named.

    Raises Refused for a variable that names another file than the home's own where the home has its own, or a policy: what binds
    everybody is not replaced by what one of them puts into the environment of a command.
    """
    path, named = home / own, os.environ.get(variable)
    if not named:
        return path, False
    chosen = Path(named).absolute()
    if chosen.resolve() == path.resolve():
        return path, True
    for binding in dict.fromkeys((path, home / "policy.yaml")):
        if os.path.lexists(binding):
            raise Refused(
                f"{variable} names {chosen}, and the home has its own {binding}: nothing is done by another file",
                remedy=f"Unset {variable}. The settings of this home belong in {path}.",
            )
    return chosen, True


def prices_url() -> str:
    """Where `headway prices update` asks: `HEADWAY_PRICES_URL`, else Azure's Retail Prices API."""
    return os.environ.get("HEADWAY_PRICES_URL") or "https://prices.azure.com/api/retail/prices"
