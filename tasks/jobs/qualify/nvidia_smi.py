"""nvidia-smi, asked for everything that a qualification wants to know of each GPU. What it means is health_nvidia.py."""

from __future__ import annotations

from tasks.formats import gpu_health, smi
from tasks.jobs.node.vendor_commands import query_smi
from tasks.jobs.qualify.machine import Machine


def ask_gpus(machine: Machine, fields: tuple[str, ...] = smi.FIELDS) -> tuple[int, str, list[dict[str, str]]]:
    """How it ended, what it said, and a row a GPU, without fields that this driver does not know."""
    return _asked(machine, "gpu", fields)


def ask_rows(machine: Machine) -> tuple[int, str, list[dict[str, str]]]:
    """The same of remapped rows."""
    return _asked(machine, "remapped-rows", gpu_health.ROW_FIELDS)


def _asked(machine: Machine, table: str, fields: tuple[str, ...]) -> tuple[int, str, list[dict[str, str]]]:
    asked = {field: field for field in fields}
    code, said = query_smi(table, asked, machine.ask, lambda field: None)
    return code, said, gpu_health.rows(said, tuple(asked))


def failure(code: int, said: str, what: str = "nvidia-smi") -> ValueError:
    """Of a call whose answer cannot be read."""
    return ValueError(f"{what} ended with {code}: {' '.join(said.split())[:200]}")
