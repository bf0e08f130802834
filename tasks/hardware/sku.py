"""What a machine of a certain kind must show, as data: one YAML file a size in this folder, each number with its source and date.

Pure. A home's own files, and those of `headway qualify --record`, stand in `hardware/` of the home and come first. What is
made of the numbers is tasks/qualification. A file is never written by the run that it judges.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tasks.qualification_names import Collective

FOLDER = Path(__file__).parent


class Data(BaseModel):
    """Base of a file's sections: a misspelt key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Source(Data):
    """Where numbers come from."""

    what: str
    """A page, or a repository and its commit."""
    date: datetime.date
    """When it was read or measured."""


class Number(Data):
    """A property of the hardware."""

    value: float | str
    unit: str = ""
    source: str
    """Key of `sources`."""


class Limit(Data):
    """What a check must show. `norm` is what sound hardware reaches; below (or above) `warn` is degraded, `fail` failed."""

    unit: str = ""
    better: Literal["higher", "lower", "equal"] = "higher"
    norm: float | str | None = None
    warn: float | None = None
    fail: float | str | None = None
    """With `equal`: the value that it must have."""
    source: str
    """Key of `sources`."""


class BusBandwidth(Data):
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
    source: str


class Image(Data):
    """An image whose versions are known, such as one of Azure's HPC images by its URN."""

    urn: str
    versions: dict[str, str]
    """Of driver, cuda, nccl, mpi, ofed."""
    source: str


class Sku(Data):
    """A kind of machine."""

    name: str
    aliases: tuple[str, ...] = ()
    vendor: Literal["nvidia", "amd", "cpu"]
    family: str = ""
    """Azure's quota family."""
    sources: dict[str, Source]
    specs: dict[str, Number] = {}
    """gpus, gpu, gpu_memory_gb, peak_bf16_tflops, achievable_bf16_tflops, vcpus, memory_gib, nvme_disks, infiniband_ports, ..."""
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
        named = [
            *(number.source for number in (*self.specs.values(), *self.azureml.values())),
            *(limit.source for limit in self.limits.values()),
            *(limit.source for limit in self.collectives),
            *(image.source for image in self.images),
        ]
        missing = sorted(set(named) - set(self.sources))
        if missing:
            raise ValueError(f"sources {', '.join(missing)} are named and not there")
        return self


def plain_name(name: str) -> str:
    """A size's name as files have it: Standard_ND96isr_H100_v5 is nd96isr_h100_v5."""
    return name.strip().lower().removeprefix("standard_")


def known_skus(*folders: Path) -> dict[str, Path]:
    """Files by name; those of earlier folders come first, ours last."""
    found: dict[str, Path] = {}
    for folder in (*folders, FOLDER):
        for path in sorted(folder.glob("*.yaml")):
            found.setdefault(path.stem, path)
    return found


def load_sku(name: str, *folders: Path) -> Sku:
    """A kind of machine by its name, one of its other names, or the path of a YAML file. Raises ValueError when there is none."""
    if name.endswith((".yaml", ".yml")):
        return _read(Path(name))
    known = known_skus(*folders)
    if plain_name(name) in known:
        return _read(known[plain_name(name)])
    for path in known.values():
        sku = _read(path)
        if plain_name(name) in map(plain_name, (sku.name, *sku.aliases)):
            return sku
    raise ValueError(
        f"benchmark.sku {name!r}: no such hardware is known; known are {', '.join(sorted(known))}, or the path of a .yaml file "
        "of the same form (`headway hardware local-cpu` shows one; `headway qualify --record` measures one)"
    )


def _read(path: Path) -> Sku:
    try:
        return Sku.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ValueError(f"benchmark.sku {str(path)!r}: {error.strerror or error}") from error
    except (ValidationError, yaml.YAMLError) as error:
        raise ValueError(f"{path} is no description of hardware: {error}") from error
