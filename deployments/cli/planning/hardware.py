"""`headway hardware`: kinds of machines, what each has and must show, and where every number is from. See docs/hardware.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from deployments.cli.options import Json
from deployments.cli.output import aligned, say

if TYPE_CHECKING:
    from pathlib import Path

    from tasks.hardware.sku import Level, Number, Sku

COLUMNS = ("name", "gpus", "GB each", "bf16 peak", "achievable", "InfiniBand", "all_reduce in a machine", "file")


def hardware(
    name: Annotated[
        str,
        typer.Argument(
            metavar="[SIZE]", help="A size of Azure, as Standard_ND96isr_H100_v5, or a file; without it, all."
        ),
    ] = "",
    as_json: Json = False,
) -> None:
    """List the kinds of machines that clusters are judged as; or one in full, each number with its source.

    Files in `hardware/` of the home come before ours: those that `headway qualify --record` wrote, and your own.
    """
    from tasks.common.home import home
    from tasks.config.base import digest
    from tasks.hardware.files import find_sku, known_skus, read_sku

    own = home() / "hardware"
    if not name:
        rows = [_row(path, own) for path in known_skus(own).values()]
        return say({"hardware": rows}, "\n".join(aligned([COLUMNS, *map(_cells, rows)])), as_json=as_json)
    path = find_sku(name, own)
    sku = read_sku(path, own)
    output = sku.model_dump(mode="json")
    fields = {**output, "file": str(path), "digest": digest(output)}
    return say({"hardware": fields}, "\n".join(_page(sku, path)), as_json=as_json)


def _row(path: Path, own: Path) -> dict[str, Any]:
    """What is most asked for; of a file that cannot be read, why."""
    from tasks.hardware.files import read_sku

    row: dict[str, Any] = {"name": path.stem, "file": str(path), "own": path.parent == own, "problem": ""}
    try:
        sku = read_sku(path, own)
    except ValueError as error:
        return {**row, "problem": str(error)}
    names: tuple[str, ...] = ("gpu", "gpus", "gpu_memory_gb", "peak_bf16_tflops", "achievable_bf16_tflops")
    names += ("infiniband_ports", "infiniband_gbit_s")
    specs = {name: sku.specs[name].value if name in sku.specs else None for name in names}
    limits = [limit for limit in sku.collectives if (limit.collective, limit.scope) == ("all_reduce", "node")]
    largest = max((limit for limit in limits if limit.fail), key=lambda limit: limit.bytes, default=None)
    return {
        **row,
        "name": sku.name,
        "vendor": sku.vendor,
        **specs,
        "all_reduce_gb_s": largest.fail if largest else None,
        "all_reduce_bytes": largest.bytes if largest else None,
    }


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    if row["problem"]:
        return (row["name"], "cannot be read:", *("" for _ in COLUMNS[3:]), row["problem"])
    ports = row["infiniband_ports"]
    infiniband = f"{ports:g} x {row['infiniband_gbit_s']:g} Gbit/s" if ports else "none" if ports == 0 else "-"
    busbw = (
        f">= {row['all_reduce_gb_s']:g} GB/s at {_bytes(row['all_reduce_bytes'])}" if row["all_reduce_gb_s"] else "-"
    )
    gpus = f"{row['gpus']:g} {row['gpu']}" if row["gpus"] else "-"
    figures = (_plain(row[key]) for key in ("gpu_memory_gb", "peak_bf16_tflops", "achievable_bf16_tflops"))
    return (row["name"], gpus, *figures, infiniband, busbw, row["file"] if row["own"] else "shipped")


def _page(sku: Sku, path: Path) -> Iterator[str]:
    """All of it, for people."""
    yield sku.name + (f", also {', '.join(sku.aliases)}" if sku.aliases else "")
    yield f"{path}" + (f", on top of {sku.based_on}" if sku.based_on else "")
    if sku.family:
        yield f"quota family {sku.family}, counted in vCPUs{_of(sku, 'family')}"
    yield from _section("It has", [_number(name, number) for name, number in sku.specs.items()])
    levels = [(check, limit.better, *_levels(limit), limit.unit, _cited(limit)) for check, limit in sku.limits.items()]
    yield from _section("It must show", [("", "better", "norm", "warn", "fail", "", ""), *levels] if levels else [])
    yield from _section("Bus bandwidth in GB/s, from a message on", list(_collectives(sku)))
    yield from _section(
        f"NCCL must use{_of(sku, 'transports')}", [(scope, *names) for scope, names in sku.transports.items()]
    )
    topology = [("NCCL_TOPO_FILE", sku.topology)] if sku.topology else []
    yield from _section(f"Environment{_of(sku, 'environment')}", [*sku.environment.items(), *topology])
    yield from _section("Azure ML", [_number(name, number) for name, number in sku.azureml.items()])
    images = [(i.urn, *(f"{k} {v}" for k, v in i.versions.items()), f"[{i.source}]") for i in sku.images]
    yield from _section("Images", images)
    sources = [(f"[{key}]", sku.cite(key)) for key in sku.sources if key in sku.named_sources]
    yield from _section("Sources", sources)


def _of(sku: Sku, section: Literal["family", "transports", "environment"]) -> str:
    key = sku.section_sources.get(section, "")
    return f" [{key}]" if key else ""


def _collectives(sku: Sku) -> Iterator[tuple[str, ...]]:
    if sku.collectives:
        yield ("", "", "", "norm", "warn", "fail", "")
    for limit in sku.collectives:
        where = f"{limit.scope} {limit.nodes or ''}".strip()
        yield (limit.collective, where, _bytes(limit.bytes), *_levels(limit), _cited(limit))


def _levels(limit: Any) -> tuple[str, str, str]:
    return _plain(limit.norm), _plain(limit.warn), _plain(limit.fail)


def _cited(level: Level) -> str:
    others = (
        f"norm {level.norm_source}" * bool(level.norm_source),
        f"warn {level.warn_source}" * bool(level.warn_source),
    )
    cited = ", ".join(part for part in (level.source, *others) if part)
    return f"[{cited}]" + (f" {level.note}" if level.note else "")


def _number(name: str, number: Number) -> tuple[str, ...]:
    return name, _plain(number.value), number.unit, f"[{number.source}]" + (f" {number.note}" if number.note else "")


def _section(title: str, rows: Sequence[Sequence[str]]) -> Iterator[str]:
    if rows:
        yield from ("", title, *(f"  {line}" for line in aligned(rows)))


def _plain(value: float | str | None) -> str:
    return "-" if value is None else value if isinstance(value, str) else f"{value:.12g}"


def _bytes(size: int) -> str:
    for power, unit in ((30, "GiB"), (20, "MiB")):
        if size % 2**power == 0:
            return f"{size >> power} {unit}"
    return f"{size:,} B".replace(",", " ")
