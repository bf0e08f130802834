"""What an account may have, as files of the home: `limits.yaml`, which a person writes, and what the account itself said.

Azure ML's own limits, which are the same for everybody, come from the size's file (tasks/hardware). What a plan makes of it all
is tasks/planning/quota.py; the account is asked by tasks/compute/azureml/client.py.
"""

from __future__ import annotations

import datetime
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError

from tasks.common.process import locked, write_text
from tasks.hardware.sku import Sku
from tasks.planning.prices.book import LOADER, Data
from tasks.planning.quota import Limits, Service

FILE, FETCHED = "limits.yaml", "prices/limits.yaml"
"""Below the home; a region that a person wrote down counts before what was fetched."""


class Quota(Data):
    """vCPUs of one region."""

    dedicated: dict[str, int] = Field(default={})
    """By family, as any of Azure's interfaces spells it; a family that is missing has none."""
    total: int | None = Field(None, ge=0)
    """Dedicated ones of all families together."""
    low_priority: int | None = Field(None, ge=0)
    used: dict[str, int] = Field(default={})
    """By family, `total` or `low_priority`: what is taken."""
    date: datetime.date | None = None
    """When it was read."""


class LimitsFile(Data):
    """Quota by service and region. The two services count apart."""

    azureml: dict[str, Quota] = Field(default={})
    vm: dict[str, Quota] = Field(default={})


def read_limits(home: Path, *, region: str, service: Service = "azureml", sku: Sku | None = None) -> Limits:
    """The limits of an account in a region, on top of those of the size. Raises ValueError for a file that cannot be read."""
    of_size = {name: number.value for name, number in (sku.azureml if sku else {}).items()}
    everyone = Limits(
        job_days=float(of_size.get("job_days", 21.0)),
        low_priority_job_days=float(of_size.get("low_priority_job_days", 7.0)),
        rdma_nodes=int(of_size.get("mpi_nodes", 100)),
        default_vcpus=int(of_size.get("default_cores", 0)),
        region=region,
    )
    for path in (home / FILE, home / FETCHED):
        result = read_file(path)
        quota = (result.azureml if service == "azureml" else result.vm).get(region)
        if quota:
            return replace(
                everyone,
                dedicated=quota.dedicated,
                total=quota.total,
                low_priority=quota.low_priority,
                used=quota.used,
                source=str(path),
                date=quota.date.isoformat() if quota.date else "",
            )
    return everyone


def keep_limits(home: Path, region: str, payload: dict[str, Any], *, today: datetime.date) -> Path:
    """Write what the account said of a region, `payload` as `of_usages` makes it; other regions stay."""
    path = home / FETCHED
    with locked(path.with_suffix(".lock")):
        result = read_file(path)
        regions = {**result.azureml, region: Quota(**payload, date=today)}
        output = LimitsFile(azureml=regions, vm=result.vm).model_dump(mode="json", exclude_none=True)
        write_text(path, yaml.safe_dump(output, sort_keys=True))
    return path


def read_file(path: Path) -> LimitsFile:
    """A file of limits; without one, none. Raises ValueError that names the file and the key."""
    if not path.exists():
        return LimitsFile()
    try:
        output = yaml.load(path.read_text(encoding="utf-8"), LOADER)
        return LimitsFile.model_validate(output or {})
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"limits {str(path)!r}: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(
            f"{path} is no file of limits: {where}: {first['msg']} (it says {first['input']!r})"
        ) from error
