"""A plan as people read it in a terminal: the verdict, the numbers, memory as a bar, what else would do, what to mind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tasks.planning.planned_case import Planned

BAR = 40
PARTS = {"weights": "w", "gradients": "g", "optimizer": "o", "activations": "a", "other": "."}


def page(made: Planned, told: dict[str, Any]) -> str:
    """All of it, one line a fact."""
    return "\n".join(_lines(made, told))


def _lines(made: Planned, told: dict[str, Any]) -> Iterator[str]:
    name = f"{told['name']}: " if told["name"] else ""
    verdict = {"fits": "it fits", "tight": "it fits, tightly", "does not fit": "it does not fit"}[told["fit"]]
    if told["fit"] != "does not fit" and not told["fits"]:
        verdict = "it fits in memory, and not within max_days and max_cost"
    yield f"{name}{told['parameters'] / 1e9:,.3g} B parameters on {told['gpus'] or '?'} x {told['machine']['gpu']}: {verdict}"
    if told["parallel"]:
        yield f"  divided     {_division(told['parallel'])}"
        yield f"              {told['reason']}"
    if told["nearest"]:
        yield f"  would fit   {told['nearest']}"
    if told["memory_gib"]:
        yield from _memory(told["memory_gib"])
    if told["fit"] == "does not fit":
        return
    rates = told["tflops_per_gpu"]
    yield (
        f"  a step      {told['step_seconds']:.4g} s, {told['tokens_per_second_per_gpu']:,.0f} tokens/s a GPU; TFLOP/s a GPU "
        f"{rates['hardware']:.1f} by the hardware, {rates['model']:.1f} of the model, MFU {told['mfu']:.1%}"
    )
    yield f"  it goes to  {_shares(told['step_parts_seconds'], told['step_seconds'])}"
    if told["days"]:
        failing = f", {told['days_with_failures']:.3g} with failures" if told["days_with_failures"] else ""
        yield f"  takes       {told['days']:.3g} days{failing}"
    checkpoint, goodput = told["checkpoint"], told["goodput"]
    if checkpoint:
        yield (
            f"  checkpoint  {checkpoint['gib']:,.4g} GiB every {checkpoint['interval_seconds'] / 60:.3g} min, written in "
            f"{checkpoint['write_seconds']:.3g} s to {checkpoint['storage']}"
        )
        yield f"  goodput     {goodput['mid']:.1%} ({goodput['low']:.1%} to {goodput['high']:.1%} by how often machines fail)"
    yield from (f"  stored      {choice['reason']}" for choice in told["storage"].values() if choice)
    yield from _money(told["cost"])
    yield from (f"  instead     {_instead(other)}" for other in told["others"][:3])
    yield from (f"  mind        {said}" for said in told["warnings"])


def _division(parallel: dict[str, Any]) -> str:
    shown = {
        name: size
        for name, size in parallel.items()
        if name in ("dp", "zero", "micro", "recompute") or size not in (1, "none")
    }
    return ", ".join(
        name.replace("_", " ") if size is True else f"{name} {size}"
        for name, size in shown.items()
        if size is not False
    )


def _memory(memory: dict[str, float]) -> Iterator[str]:
    scale = BAR / max(memory["usable"], memory["total"])
    bar = "".join(mark * round(memory[part] * scale) for part, mark in PARTS.items())
    said = ", ".join(f"{part} {memory[part]:.1f}" for part in PARTS)
    yield f"  memory      {memory['total']:.1f} of {memory['usable']:.1f} GiB a GPU: {said}"
    yield f"              |{bar.ljust(round(memory['usable'] * scale))}|"


def _shares(parts: dict[str, float], whole: float) -> str:
    large = sorted(
        ((seconds / whole, name) for name, seconds in parts.items() if seconds / whole >= 0.005), reverse=True
    )
    return ", ".join(f"{name.replace('_', ' ')} {share:.0%}" for share, name in large)


def _money(cost: dict[str, Any] | None) -> Iterator[str]:
    if cost is None:
        return
    total = "not known" if cost["total"] is None else f"{cost['total']:,.0f} {cost['currency']}"
    source = f" (prices of {cost['price_date']})" if cost["price_date"] else ""
    yield f"  costs       {total}{source}"


def _instead(other: dict[str, Any]) -> str:
    return f"{_division(other['parallel'])}: {other['step_seconds']:.4g} s a step, {other['memory_gib']:.1f} GiB, {other['fit']}"
