"""What a machine of a certain kind must show, as data: one YAML file a size in this folder, each number with its source and date.

Pure. A home's own files, and those of `headway qualify --record`, stand in `hardware/` of the home and come first; files.py reads
them. What is made of the numbers is tasks/qualification. A file is never written by the run that it judges. See docs/hardware.md.

Among the numbers stands the environment that NCCL, and RCCL on AMD, should have; who sets it is the backend.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tasks.config.qualification import Collective


class Data(BaseModel):
    """Base of a file's sections: a misspelt key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Source(Data):
    """Where numbers come from."""

    what: str = Field(min_length=1)
    """A page, or a repository and its commit; or the rule by which one number was made of others."""
    date: datetime.date
    """When it was read or measured."""


class Number(Data):
    """A property of the hardware."""

    value: float | str
    unit: str = ""
    source: str
    """Key of `sources`."""
    note: str = ""


class Level(Data):
    """What must be shown. `norm` is what sound hardware reaches; short of `warn` is degraded, short of `fail` failed."""

    source: str
    """Key of `sources`, of `fail` and of what has no source of its own."""
    norm_source: str = ""
    warn_source: str = ""
    note: str = ""

    @property
    def sources(self) -> set[str]:
        """The keys that it names."""
        return {self.source, self.norm_source or self.source, self.warn_source or self.source}


class Limit(Level):
    """What a check must show."""

    unit: str = ""
    better: Literal["higher", "lower", "equal"] = "higher"
    norm: float | str | None = None
    warn: float | None = None
    fail: float | str | None = None
    """With `equal`: the value that it must have."""

    @model_validator(mode="after")
    def _in_order(self) -> Limit:
        if self.better == "equal" and self.fail is None:
            raise ValueError("better: equal needs fail, the value that it must have")
        if self.better != "equal":
            _require_order(self.better, self.norm, self.warn, self.fail)
        return self


class BusBandwidth(Level):
    """What a collective must reach, in GB/s of bus bandwidth as nccl-tests define it."""

    collective: Collective = "all_reduce"
    scope: Literal["node", "all", "pair"]
    nodes: int | None = None
    """Machines that it holds for; empty: any number of the scope."""
    bytes: int = Field(gt=0)
    """Message from which on it holds."""
    norm: float | None = None
    warn: float | None = None
    fail: float | None = None

    @model_validator(mode="after")
    def _in_order(self) -> BusBandwidth:
        _require_order("higher", self.norm, self.warn, self.fail)
        return self


class Image(Data):
    """An image whose versions are known, such as one of Azure's HPC images by its URN."""

    urn: str
    release: str = ""
    """The release that the versions are of, where the URN says `latest`."""
    versions: dict[str, str]
    """Of driver, cuda, nccl, mpi, ofed; on AMD of rocm, nccl, mpi, ofed."""
    source: str


class Sku(Data):
    """A kind of machine."""

    name: str
    aliases: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()
    """Azure's sizes that it holds for beside its names, such as those that it was recorded on. It is not found by them."""
    vendor: Literal["nvidia", "amd", "cpu"]
    based_on: str = ""
    """The file on top of which this one was read."""
    family: str = ""
    """Azure's quota family, counted in vCPUs. Spelling differs between Azure's interfaces: compare without case and spaces."""
    sources: dict[str, Source]
    section_sources: dict[Literal["family", "topology", "environment", "transports"], str] = {}
    """Keys of `sources`, of the sections that are no numbers."""
    specs: dict[str, Number] = {}
    """By a name of files.py: gpus, gpu_memory_gb, peak_bf16_tflops, achievable_bf16_tflops, vcpus, nvme_disks, ..."""
    limits: dict[str, Limit] = {}
    """By the name of the check."""
    collectives: tuple[BusBandwidth, ...] = ()
    transports: dict[Literal["node", "all", "pair"], tuple[str, ...]] = {}
    """What NCCL must really use: one of these, by scope; none: any."""
    topology: str = ""
    """NCCL's topology file in the machines' image."""
    environment: dict[str, str] = {}
    """NCCL's, or RCCL's."""
    azureml: dict[str, Number] = {}
    """Limits of Azure ML: jobs' days, nodes, cores."""
    images: tuple[Image, ...] = ()

    @model_validator(mode="after")
    def _sources_are_there(self) -> Sku:
        missing = sorted(self.named_sources - set(self.sources))
        if missing:
            raise ValueError(f"sources {', '.join(missing)} are named and not there")
        return self

    @property
    def named_sources(self) -> set[str]:
        """Keys of the sources that something is from."""
        levels = (*self.limits.values(), *self.collectives)
        return {
            *(number.source for number in (*self.specs.values(), *self.azureml.values())),
            *(image.source for image in self.images),
            *(key for level in levels for key in level.sources),
            *self.section_sources.values(),
        }

    def cite(self, source: str) -> str:
        """A source in words, for a verdict's sentence; what is no key of `sources` stays as it is."""
        result = self.sources.get(source)
        return f"{result.what}, {result.date}" if result else source


def _require_order(better: str, *levels: float | str | None) -> None:
    numbers = [level for level in levels if isinstance(level, float)]
    if numbers != sorted(numbers, reverse=better == "higher"):
        norm, warn, fail = levels
        least = "least" if better == "higher" else "most"
        raise ValueError(
            f"norm {norm}, warn {warn}, fail {fail}: {better} is better, so norm is at {least} warn, and warn fail"
        )


def plain_name(name: str) -> str:
    """A size's name as files have it: Standard_ND96isr_H100_v5 and `nd96isr H100 v5` are nd96isr_h100_v5."""
    return "_".join(name.lower().split()).removeprefix("standard_")


def load_sku(name: str, *folders: Path) -> Sku:
    """A kind of machine by its name, one of its other names, or the path of a YAML file. Raises ValueError when there is none."""
    from tasks.hardware.files import find_sku, read_sku

    return read_sku(find_sku(name, *folders), *folders)


def gpus_of(name: str, *folders: Path) -> int | None:
    """GPUs of a machine of this kind; None where nothing is known of it, or of them."""
    try:
        number = load_sku(name, *folders).specs.get("gpus")
    except ValueError:
        return None
    return int(float(number.value)) if number else None


def nccl_environment(name: str, *folders: Path) -> dict[str, str]:
    """Variables for the ranks on a VM size, the topology file among them; size names as Azure writes them, in any case.

    Raises ValueError for a size of which nothing is known.
    """
    sku = load_sku(name, *folders)
    return {**sku.environment, **({"NCCL_TOPO_FILE": sku.topology} if sku.topology else {})}


def topology_file(name: str, *folders: Path) -> str:
    """Where the machines' image has NCCL's topology file, which a container must see too; empty where there is none.

    Raises ValueError for a size of which nothing is known.
    """
    return load_sku(name, *folders).topology
