"""What an account may have, against what a plan needs: vCPUs by family, days of a job, machines of a job.

A quota is a limit of credit and no promise of capacity. Azure counts it in vCPUs, Azure ML apart from virtual machines, and each
of Azure's interfaces spells families in its own way. Limits of a size are in its file (tasks/hardware); those of an account are
files of the home: `limits.yaml`, which a person writes, and what the account itself said (tasks/compute/azureml/client.py asks).
See docs/money.md.
"""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError

from tasks.artifacts import Check
from tasks.common.process import locked, write_text
from tasks.common.validation import explain
from tasks.hardware.sku import Sku
from tasks.planning.prices.book import LOADER, Data

Service = Literal["azureml", "vm"]
WHERE = {
    "azureml": "Azure ML studio, Quota, or a support request of the type Machine Learning service: compute",
    "vm": "the portal, Quotas, Compute, or a support request of the type Compute-VM (cores-vCPUs)",
}
"""Where more is asked for."""
OF_FAMILY = re.compile(r"^(.* Family) Cluster Dedicated vCPUs$")
NAMES = {"totalclusterdedicatedregionalvcpus": "total", "totalclusterlowpriorityregionalvcpus": "low_priority"}
"""Of Azure ML's usages, as plain_family writes them."""


@dataclass(frozen=True)
class Limits:
    """What an account may have. None is not known."""

    dedicated: Mapping[str, int] | None = None
    """vCPUs by family, in use and free together. Known, a family that is not in it has `default_vcpus`."""
    total: int | None = None
    """Dedicated vCPUs of all families together."""
    low_priority: int | None = None
    """vCPUs of low-priority or Spot machines: one figure for all families."""
    used: Mapping[str, int] = field(default_factory=dict)
    """vCPUs by family that are taken already; also of `low_priority` and `total`."""
    default_vcpus: int = 0
    """Of a GPU family that nobody asked for: Azure ML gives none."""
    job_days: float | None = 21.0
    low_priority_job_days: float | None = 7.0
    rdma_nodes: int | None = 100
    """Machines of one job of a family with RDMA. These three are Azure ML's: MicrosoftDocs/azure-docs how-to-manage-quotas.md."""
    region: str = ""
    source: str = ""
    date: str = ""


@dataclass(frozen=True)
class Request:
    """What a plan needs."""

    sku: str
    family: str
    vcpus: int
    """Of one machine."""
    nodes: int
    days: float | None = None
    """Of the longest job; None: not known."""
    low_priority: bool = False
    rdma: bool = True
    service: Service = "azureml"
    why: str = "training a language model"

    @property
    def needs(self) -> int:
        return self.vcpus * self.nodes


def judge(request: Request, limits: Limits) -> tuple[Check, ...]:
    """One check for each limit. What is not known is a check that passes with a warning. Raises ValueError for what cannot be."""
    for name, value in (("vcpus", request.vcpus), ("nodes", request.nodes)):
        if value <= 0:
            raise ValueError(f"{name} {value}: give a whole number above 0")
    if request.days is not None and not (math.isfinite(request.days) and request.days >= 0):
        raise ValueError(f"days {request.days}: give a number that is not below 0")
    checks = [_vcpus(request, limits), *_total(request, limits)]
    if request.service == "azureml":
        checks += [*_days(request, limits), *_nodes(request, limits)]
    return tuple(checks)


def request_text(request: Request, limits: Limits) -> str:
    """What to file: family, region, vCPUs, why."""
    what = "low-priority vCPUs, all families" if request.low_priority else f"family {request.family or request.sku}"
    wanted = request.needs + _used(request, limits)
    return (
        f"File in {WHERE[request.service]}: region {limits.region or '(yours)'}, {what}, new limit {wanted} vCPUs "
        f"({request.nodes} x {request.sku} of {request.vcpus} vCPUs"
        + (f", and {_used(request, limits)} in use" if _used(request, limits) else "")
        + f"), for: {request.why}."
    )


def of_usages(usages: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """`dedicated`, `total`, `low_priority` and `used` of what Azure ML tells of an account in a region.

    Names as `az ml compute list-usage` shows them; those of single workspaces, and limits below 0, are no limits of the account.
    """
    result: dict[str, Any] = {"dedicated": {}, "total": None, "low_priority": None, "used": {}}
    for one in usages:
        name = str((one.get("name") or {}).get("localizedValue") or (one.get("name") or {}).get("value") or "")
        limit, family = one.get("limit"), OF_FAMILY.match(name)
        if "/workspaces/" in str(one.get("id")) or not isinstance(limit, int) or limit < 0:
            continue
        key = family[1] if family else NAMES.get(plain_family(name), "")
        if family:
            result["dedicated"][key] = limit
        elif key:
            result[key] = limit
        if key and one.get("currentValue"):
            result["used"][key] = int(one["currentValue"])
    return result


def plain_family(name: str) -> str:
    """Families as all interfaces have them: lower case, no spaces."""
    return "".join(name.lower().split())


def _vcpus(request: Request, limits: Limits) -> Check:
    kind = "low-priority" if request.low_priority else "dedicated"
    name = f"{kind} vCPUs" + (f" in {limits.region}" if limits.region else "")
    if request.low_priority:
        limit = limits.low_priority
    elif limits.dedicated is None:
        limit = None
    else:
        limit = _known(limits.dedicated).get(plain_family(request.family), limits.default_vcpus)
    if limit is None:
        return Check(
            name=name,
            measured=float(request.needs),
            limit="not known",
            passed=True,
            warned=True,
            remedy=f"Nobody knows this account's quota; of GPU families Azure ML gives 0 vCPUs until more is asked for. "
            f"Write it into limits.yaml of the home. {request_text(request, limits)}",
        )
    free = max(0, limit - _used(request, limits))
    fit = free // request.vcpus
    machines = f"{fit} machine{'s' * (fit != 1)}"
    smaller = f"Within the quota {machines} would do." if fit else "Within the quota not one machine fits."
    return Check(
        name=name,
        measured=float(request.needs),
        limit=f"<= {free} ({limit} of {'all families' if request.low_priority else request.family})",
        passed=request.needs <= free,
        remedy=f"{request_text(request, limits)} {smaller}",
    )


def _total(request: Request, limits: Limits) -> list[Check]:
    """The ceiling over all families; raising a family's quota alone is then not enough."""
    if request.low_priority or limits.total is None:
        return []
    free = max(0, limits.total - _known(limits.used).get("total", 0))
    return [
        Check(
            name="dedicated vCPUs of all families",
            measured=float(request.needs),
            limit=f"<= {free} (total of the region {limits.total})",
            passed=request.needs <= free,
            remedy=f"File in {WHERE[request.service]}: region {limits.region or '(yours)'}, Total Cluster Dedicated Regional "
            f"vCPUs, new limit {limits.total - free + request.needs}, for: {request.why}.",
        )
    ]


def _used(request: Request, limits: Limits) -> int:
    return _known(limits.used).get("low_priority" if request.low_priority else plain_family(request.family), 0)


def _known(by_family: Mapping[str, int]) -> dict[str, int]:
    return {plain_family(family): vcpus for family, vcpus in by_family.items()}


def _days(request: Request, limits: Limits) -> list[Check]:
    """Azure ML ends a job that runs longer."""
    limit = limits.low_priority_job_days if request.low_priority else limits.job_days
    if request.days is None or limit is None:
        return []
    jobs = math.ceil(request.days / limit)
    return [
        Check(
            name="days of one Azure ML job",
            measured=request.days,
            limit=f"<= {limit:g}" + (" on low-priority machines" if request.low_priority else ""),
            passed=request.days <= limit,
            remedy=f"Azure ML ends the job after {limit:g} days: train in {jobs} jobs, each from the checkpoint of the one "
            "before (`headway retrain --continue-from`), or use more machines"
            + (", or dedicated ones." if request.low_priority else "."),
        )
    ]


def _nodes(request: Request, limits: Limits) -> list[Check]:
    if not request.rdma or limits.rdma_nodes is None:
        return []
    return [
        Check(
            name="machines of one Azure ML job with RDMA",
            measured=float(request.nodes),
            limit=f"<= {limits.rdma_nodes}",
            passed=request.nodes <= limits.rdma_nodes,
            remedy=f"Use {limits.rdma_nodes} machines or fewer, or a Slurm cluster (CycleCloud), or ask for more: "
            f"{request_text(request, limits)}",
        )
    ]


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
        raise ValueError(f"{path} is no file of limits: {explain(error, LimitsFile)}") from error
