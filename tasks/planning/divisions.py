"""Every way in which a training can be divided over so many GPUs: what the case gives is kept, the rest is enumerated. Pure.

What cannot be run at all is left out here (possible.py says why); how good the rest is, search.py asks. See docs/planning.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Literal, NamedTuple

from tasks.hardware.machine import Machine
from tasks.planning.case import Case, Engine, Offload
from tasks.planning.prediction import Division

LONG_SEQUENCE, LONGER_SEQUENCE = 8_192, 16_384
"""Tokens from which context parallel is tried: below, it only makes matmuls smaller. Under the second over two ranks, no more."""
MOST_CP, MOST_MICRO = 16, 32
MOST_PIPELINES = 16
"""Pipeline lengths that are tried, the shortest first and the longest among them; divisors of large numbers are many."""
MOST_UNEVEN = 1.15
"""Share by which the fullest pipeline stage may be over the mean where layers do not divide: all others wait for it."""
ZERO: dict[Engine, tuple[Literal[0, 1, 2, 3], ...]] = {"deepspeed": (1, 2, 3), "torch": (3, 0)}
"""Stages that an engine is tried with: DeepSpeed's ZeRO, FSDP2 or DDP."""
OFFLOADS: tuple[Offload, ...] = ("none",)
OFFLOADING: tuple[Engine, ...] = ("deepspeed", "torch")
"""Engines that are tried with offloading, where the case leaves it open and little else helps."""


class Layout(NamedTuple):
    """A division but for what is computed again, and the micro batch."""

    tp: int
    pp: int
    cp: int
    dp: int


def divisions(case: Case, machine: Machine, gpus: int, *, offloads: Sequence[Offload] = OFFLOADS) -> Iterator[Division]:
    """Divisions of a case over `gpus` GPUs; `recompute` is the case's, or `none`: search.py raises it where memory asks."""
    given, recompute = case.parallel, case.recompute or "none"
    for layout in layouts(case, machine, gpus):
        eps, micros, virtuals = _experts(case, layout), _micros(case, layout), _virtuals(case, layout)
        stages = (given.zero,) if given.zero is not None else _stages(case.engine, layout)
        places = (given.offload,) if given.offload is not None else tuple(offloads)
        for ep, micro, virtual, zero, offload in product(eps, micros, virtuals, stages, places):
            if case.engine == "deepspeed" and zero >= 2 and layout.pp > 1:
                continue
            if virtual > 1 and case.parallel.virtual is None and case.batch.global_ // layout.dp // micro % layout.pp:
                continue  # Megatron-LM refuses it
            split = layout.tp > 1 and case.engine != "deepspeed" and not case.sequence // layout.cp % layout.tp
            yield Division(
                **layout._asdict(),
                virtual=virtual,
                ep=ep,
                zero=zero,
                offload=offload,
                sequence_parallel=split if given.sequence_parallel is None else given.sequence_parallel,
                micro=micro,
                recompute=recompute,
                precision=case.precision,
                engine=case.engine,
            )


def layouts(case: Case, machine: Machine, gpus: int) -> Iterator[Layout]:
    """tp x pp x cp x dp = gpus, each a divisor of what it divides."""
    given, network = case.parallel, case.network
    tps = (given.tp,) if given.tp else [n for n in divisors(machine.joined) if not network.heads % n]
    pps = (given.pp,) if given.pp else _few([n for n in divisors(gpus) if _even(network.layers, n)])
    most = MOST_CP if case.sequence >= LONGER_SEQUENCE else 2 if case.sequence >= LONG_SEQUENCE else 1
    cps = (given.cp,) if given.cp else [n for n in (1, 2, 4, 8, 16) if n <= most and not case.sequence % n]
    if case.engine != "megatron":  # the others have these when they are told
        pps, cps = (given.pp or 1,), (given.cp or 1,)
    if case.engine == "deepspeed":
        tps = (given.tp or 1,)
    for tp, pp, cp in product(tps, pps, cps):
        if cp > 1 and not given.cp and case.sequence < LONGER_SEQUENCE and tp < max(tps):
            continue  # tensor parallelism divides the same, and the weights too
        dp, rest = divmod(gpus, tp * pp * cp)
        if not rest and dp and not case.batch.global_ % dp and given.dp in (None, dp):
            yield Layout(tp, pp, cp, dp)


def _even(layers: int, pp: int) -> bool:
    """Whether so many stages are not too uneven."""
    return pp <= layers and -(-layers // pp) * pp <= MOST_UNEVEN * layers


def _stages(engine: Engine, layout: Layout) -> Sequence[Literal[0, 1, 2, 3]]:
    """Megatron-LM's optimizer is divided wherever it can be: that takes less memory, and hides its traffic (steps.py)."""
    if engine == "megatron":
        return (1,) if layout.dp * layout.cp > 1 else (0,)
    return ZERO[engine]


def divisors(number: int) -> list[int]:
    """All of them, smallest first."""
    small = [n for n in range(1, int(number**0.5) + 1) if not number % n]
    return sorted({*small, *(number // n for n in small)})


def _experts(case: Case, layout: Layout) -> Sequence[int]:
    if case.parallel.ep or case.network.experts is None:
        return (case.parallel.ep or 1,)
    count = case.network.experts.count
    return [n for n in divisors(count) if not layout.dp * layout.cp % n] or (1,)


def _micros(case: Case, layout: Layout) -> Sequence[int]:
    if case.batch.micro:
        return (case.batch.micro,) if not case.batch.global_ // layout.dp % case.batch.micro else ()
    return [n for n in divisors(min(case.batch.global_ // layout.dp, 1 << 20)) if n <= MOST_MICRO]


def _virtuals(case: Case, layout: Layout) -> Sequence[int]:
    """None, the fewest and the most; of uneven stages, as if embedding and loss were layers (Megatron-LM's pipeline split)."""
    if case.parallel.virtual or layout.pp == 1:
        return (case.parallel.virtual or 1,)
    each, over = divmod(case.network.layers, layout.pp)
    if over and (case.network.layers + 2) % layout.pp:
        return (1,)
    pieces = [n for n in divisors(each + 1 if over else each) if n > 1]
    return (1, *pieces[:1], *pieces[-1:]) if len(pieces) > 1 else (1, *pieces)


def _few(found: Sequence[int]) -> list[int]:
    return list(found) if len(found) <= MOST_PIPELINES else [*found[: MOST_PIPELINES - 1], found[-1]]
