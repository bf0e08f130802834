"""What an account may have, as a file: `limits.yaml` of the home. What a plan makes of it is tasks/planning/quota.py.

Azure ML's own limits, which are the same for everybody, come from the size's file (tasks/hardware). An account is not asked: what
its portal says is written into the file by a person.
"""

from __future__ import annotations

import datetime
from pathlib import Path

import yaml
from pydantic import Field, ValidationError

from tasks.hardware.sku import Sku
from tasks.planning.quota import Limits
from tasks.prices.book import LOADER, Data

FILE = "limits.yaml"
"""Below the home."""


class Quota(Data):
    """vCPUs of one region."""

    dedicated: dict[str, int] = Field(default={})
    """By family, as any of Azure's interfaces spells it; a family that is missing has none."""
    low_priority: int | None = Field(None, ge=0)
    used: dict[str, int] = Field(default={})
    """By family, or `low_priority`: what is taken."""


class LimitsFile(Data):
    """Quota by service and region. The two services count apart."""

    azureml: dict[str, Quota] = Field(default={})
    vm: dict[str, Quota] = Field(default={})
    date: datetime.date | None = None
    """When it was read."""


def read_limits(home: Path, *, region: str, service: str = "azureml", sku: Sku | None = None) -> Limits:
    """The limits of an account in a region, on top of those of the size. Raises ValueError for a file that cannot be read."""
    of_size = {name: number.value for name, number in (sku.azureml if sku else {}).items()}
    everyone = {
        "job_days": float(of_size.get("job_days", 21.0)),
        "low_priority_job_days": float(of_size.get("low_priority_job_days", 7.0)),
        "rdma_nodes": int(of_size.get("mpi_nodes", 100)),
        "default_vcpus": int(of_size.get("default_cores", 0)),
    }
    path = home / FILE
    found = _read(path) if path.exists() else LimitsFile()
    quota = getattr(found, service).get(region)
    if quota is None:
        return Limits(region=region, **everyone)
    return Limits(
        dedicated=quota.dedicated,
        low_priority=quota.low_priority,
        used=quota.used,
        region=region,
        source=str(path),
        date=found.date.isoformat() if found.date else "",
        **everyone,
    )


def _read(path: Path) -> LimitsFile:
    try:
        said = yaml.load(path.read_text(encoding="utf-8"), LOADER)
        return LimitsFile.model_validate(said or {})
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"limits {str(path)!r}: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(
            f"{path} is no file of limits: {where}: {first['msg']} (it says {first['input']!r})"
        ) from error
