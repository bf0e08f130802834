"""The best division of a case: all that are possible are predicted, those that fit are ranked by the goal. Pure, seconds at most.

Memory comes first: of two divisions that differ only in what is computed again, the one that computes less is faster, so it is
computed again only where the rest does not fit. Predicting is predict.py. See docs/planning.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from tasks.config.engines.registry import ENGINES
from tasks.planning import counts, memory
from tasks.planning.case import Case, Goal, Offload, Parallel, Recompute
from tasks.planning.predict import predict, require_possible
from tasks.planning.prediction import GIB, Divided, Division, Prediction

if TYPE_CHECKING:
    from tasks.hardware.machines import Machine

LONG_SEQUENCE, LONGER_SEQUENCE = 8_192, 16_384
"""Tokens from which context parallel is tried: below, it only makes matmuls smaller. Under the second over two ranks, no more."""
MOST_CP, MOST_MICRO = 16, 32
MOST_PIPELINES = 16
"""Pipeline lengths that are tried, the shortest first and the longest among them; divisors of large numbers are many."""
MOST_UNEVEN = 1.15
"""Share by which the fullest pipeline stage may be over the mean where layers do not divide: all others wait for it."""
OFFLOADS: tuple[Offload, ...] = ("none",)


class Layout(NamedTuple):
    """A division but for what is computed again, and the micro batch."""

    tp: int
    pp: int
    cp: int
    dp: int


def divisions(case: Case, machine: Machine, gpus: int, *, offloads: Sequence[Offload] = OFFLOADS) -> Iterator[Division]:
    """Divisions of a case over `gpus` GPUs; `recompute` is the case's, or `none`: search.py raises it where memory asks."""
    given, recompute = case.parallel, case.recompute or "none"
    counted = ENGINES[case.engine].planned
    for layout in layouts(case, machine, gpus):
        eps, micros, virtuals = _experts(case, layout), _micros(case, layout), _virtuals(case, layout)
        # Megatron-LM's optimizer is divided wherever it can be: that takes less memory, and hides its traffic
        # (steps.py).
        stages = (
            (given.zero,)
            if given.zero is not None
            else ((0,) if counted.zero_only_divided and layout.dp * layout.cp == 1 else counted.zero_stages)
        )
        places = (given.offload,) if given.offload is not None else tuple(offloads)
        for ep, micro, virtual, zero, offload in product(eps, micros, virtuals, stages, places):
            if layout.pp > 1 and zero > counted.most_zero_in_pipeline:
                continue
            if virtual > 1 and case.parallel.virtual is None and case.batch.global_ // layout.dp // micro % layout.pp:
                continue  # Megatron-LM refuses it
            split = layout.tp > 1 and counted.splits_norms and not case.sequence // layout.cp % layout.tp
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
    given, network, layers = case.parallel, case.network, case.network.layers
    tps = (given.tp,) if given.tp else [n for n in divisors(machine.joined) if not network.heads % n]
    even = [n for n in divisors(gpus) if n <= layers and -(-layers // n) * n <= MOST_UNEVEN * layers]
    few = even if len(even) <= MOST_PIPELINES else [*even[: MOST_PIPELINES - 1], even[-1]]
    pps = (given.pp,) if given.pp else few
    most = MOST_CP if case.sequence >= LONGER_SEQUENCE else 2 if case.sequence >= LONG_SEQUENCE else 1
    cps = (given.cp,) if given.cp else [n for n in (1, 2, 4, 8, 16) if n <= most and not case.sequence % n]
    counted = ENGINES[case.engine].planned
    if not counted.searches_layers:  # the others have these when they are told
        pps, cps = (given.pp or 1,), (given.cp or 1,)
    if not counted.searches_matrices:
        tps = (given.tp or 1,)
    for tp, pp, cp in product(tps, pps, cps):
        if cp > 1 and not given.cp and case.sequence < LONGER_SEQUENCE and tp < max(tps):
            continue  # tensor parallelism divides the same, and the weights too
        dp, rest = divmod(gpus, tp * pp * cp)
        if not rest and dp and not case.batch.global_ % dp and given.dp in (None, dp):
            yield Layout(tp, pp, cp, dp)


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


DEEPER: tuple[Recompute, ...] = ("none", "selective", "full")
MOST_PREDICTED = 6_000
"""Of one count of GPUs; a case that leaves everything open has some hundreds."""
BEST = 5
MOST_GPUS = 1 << 18
LEAST_STATE_BYTES = 12
"""Of a parameter that is trained, with all state divided: Adam's two moments and a weight in float32."""
GROWTH = 6
"""Doublings of the machines that are tried for the nearest plan that fits."""
NOTHING: tuple[Prediction, ...] = ()


@dataclass(frozen=True)
class Found:
    """Plans in the order of the goal, the best first; none where nothing fits."""

    plans: tuple[Prediction, ...]
    goal: Goal
    predicted: int
    """Divisions that were looked at."""
    reason: str
    nearest: str = ""
    """Where nothing fits: what would."""
    closest: Prediction | None = None
    """Where nothing fits: the division that needs the least memory; where nothing keeps to the limits, the fastest."""


def search(case: Case, machine: Machine, *, gpus: int | None = None, per_gpu_hour: float | None = None) -> Found:
    """The best few divisions. `gpus` is how many there are; the goals cheapest and smallest may take fewer.

    A division that the case gives is answered as given: offloading is only tried where all of `parallel` is open, and said.

    `per_gpu_hour` is a GPU's price, for max_cost. Raises ValueError for a case that cannot be divided, by value and remedy.
    """
    if gpus is not None and gpus > MOST_GPUS:
        raise ValueError(f"gpus {gpus}: more than {MOST_GPUS} are not planned; one job does not have them")
    if gpus is None and case.goal == "fastest":
        raise ValueError(
            "the goal fastest needs cluster.nodes or cluster.gpus; the goals cheapest and smallest choose them"
        )
    offloads: tuple[Offload, ...] = ("none", "cpu") if case.goal == "smallest" and _may_offload(case) else OFFLOADS
    made = _searched(case, machine, gpus, per_gpu_hour=per_gpu_hour, offloads=offloads)
    if not made.plans and made.closest is not None and _may_offload(case) and offloads == OFFLOADS:
        offloaded = _searched(case, machine, gpus, per_gpu_hour=per_gpu_hour, offloads=("cpu",))
        made = offloaded if offloaded.plans else made
    if case.parallel.offload is not None:
        return made
    return replace(made, plans=tuple(map(_with_offload_said, made.plans)))


def _may_offload(case: Case) -> bool:
    return case.parallel.offload is None and ENGINES[case.engine].planned.offloads and not _divided(case)


def _divided(case: Case) -> bool:
    """Whether the case says anything of how it is divided, offloading apart."""
    return any(value is not None for name, value in case.parallel if name != "offload")


def _with_offload_said(plan: Prediction) -> Prediction:
    if plan.division.offload == "none":
        return plan
    text = (
        f"the optimizer is in the machines' memory (offload {plan.division.offload}), which nobody asked for: it takes "
        f"{plan.time.offload / plan.time.total:.0%} of a step; give offload: none to plan without"
    )
    return replace(plan, warnings=(text, *plan.warnings))


def _searched(
    case: Case, machine: Machine, gpus: int | None, *, per_gpu_hour: float | None, offloads: Sequence[Offload]
) -> Found:
    """With these ways to offload, over all counts of GPUs that the goal allows."""
    sizes = [gpus] if gpus is not None and case.goal == "fastest" else _counts(case, machine, gpus)
    predicted, plans = 0, []
    closest: list[Prediction] = []
    beyond: list[Prediction] = []
    for count in sizes:
        if len(sizes) > 1 and "cpu" not in offloads and not _may_fit(case, machine, count):
            continue
        try:
            looked, fit, tightest = _of_count(case, machine, count, offloads)
        except ValueError:
            if len(sizes) == 1:
                raise
            continue  # another count may divide
        predicted += looked
        closest += tightest
        beyond += [plan for plan in fit if not _allowed(case, plan, machine, per_gpu_hour)]
        plans += [plan for plan in fit if _allowed(case, plan, machine, per_gpu_hour)]
        if case.goal == "smallest" and any(not plan.needs for plan in plans):
            break
    if not plans:
        if beyond:
            reason = "it fits, and nothing keeps to max_days and max_cost: give more of either, or more GPUs"
            nearest = min(beyond, key=lambda plan: plan.step_seconds)
            return Found(NOTHING, case.goal, predicted, reason, closest=nearest)
        fits_not = min(closest, key=lambda plan: plan.memory.total, default=None)
        held = "weights and optimizer alone are more than these GPUs hold"
        if fits_not is not None:
            needed, usable = fits_not.memory.total / GIB, machine.usable_memory_bytes / GIB
            held = f"the least that a GPU needs is {needed:.1f} of {usable:.1f} GiB"
        what = "the division that was given does not fit" if _divided(case) else "nothing fits"
        return Found(NOTHING, case.goal, predicted, f"{what}: {held}", _nearest(case, machine, gpus), fits_not)
    ranked = sorted(plans, key=lambda plan: _rank(case.goal, plan, machine))
    best = _distinct(ranked)
    return Found(tuple(best), case.goal, predicted, _reason(case.goal, best, machine))


def _of_count(
    case: Case, machine: Machine, gpus: int, offloads: Sequence[Offload] = OFFLOADS
) -> tuple[int, list[Prediction], list[Prediction]]:
    """How many were looked at, those that fit, and, where none does, the one that needs least memory."""
    fit: list[Prediction] = []
    least: tuple[float, Division] | None = None
    looked = 0
    for division in divisions(case, machine, gpus, offloads=offloads):
        try:
            require_possible(case, division, machine, gpus=gpus)
        except ValueError:
            continue
        if looked >= MOST_PREDICTED:
            break
        looked += 1
        chosen, needed = _shallowest(case, division, machine)
        if chosen is None:
            least = min(least or (math.inf, division), needed, key=lambda pair: pair[0])
            continue
        fit.append(predict(case, chosen, machine, gpus=gpus))
    if not looked:
        _say_why(case, machine, gpus)
    tightest = [predict(case, least[1], machine, gpus=gpus)] if least and not fit else []
    return looked, fit, tightest


def _shallowest(case: Case, division: Division, machine: Machine) -> tuple[Division | None, tuple[float, Division]]:
    """The division with the least recomputation that fits, or None; and the bytes that the deepest one takes.

    One that fits as it is comes before one that needs an option of the engine, however much less that computes again.
    """
    deeper = (division.recompute,) if case.recompute is not None else DEEPER
    taken, with_options = math.inf, None
    for recompute in deeper:
        one = replace(division, recompute=recompute)
        room = memory.memory(Divided.of_case(case, one), machine)
        if memory.judged(room, machine) != "does not fit":
            if not memory.needs(room, machine):
                return one, (room.total, one)
            with_options = with_options or one
        taken = room.total
    return with_options, (taken, one)


def _counts(case: Case, machine: Machine, most: int | None) -> list[int]:
    """Counts of GPUs that are tried: machines by doubling, of the smallest with three quarters between, up to what there is."""
    top = most or min(MOST_GPUS, max(case.batch.global_, machine.gpus) * machine.gpus)
    shares = (0.75, 1.0) if case.goal == "smallest" else (1.0,)
    machines = {math.ceil(share * 2**power) for power in range(20) for share in shares}
    results = {count * machine.gpus for count in machines if count * machine.gpus <= top}
    smaller = {n for n in (1, 2, 4) if n < machine.gpus and n <= top}
    return sorted(results | smaller | ({most} if most else set()))


def _may_fit(case: Case, machine: Machine, gpus: int) -> bool:
    """Whether weights and optimizer alone, wholly divided, fit: most small counts fail that at once."""
    if case.parallel.offload not in (None, "none"):
        return True
    state = LEAST_STATE_BYTES * counts.parameters(case.network, case.sequence).total
    return state / gpus < machine.usable_memory_bytes


def paid_gpus(plan: Prediction, machine: Machine) -> int:
    """Those of all its machines: a part of a machine cannot be rented."""
    return -(-plan.division.gpus // machine.gpus) * machine.gpus


def _allowed(case: Case, plan: Prediction, machine: Machine, per_gpu_hour: float | None) -> bool:
    if plan.days is None:
        return True
    if case.max_days is not None and plan.days > case.max_days:
        return False
    if case.max_cost is None or per_gpu_hour is None:
        return True
    return plan.days * 24 * paid_gpus(plan, machine) * per_gpu_hour <= case.max_cost


def _rank(goal: Goal, plan: Prediction, machine: Machine) -> tuple[float, ...]:
    room = (bool(plan.needs), plan.fit != "fits")
    if goal == "cheapest":
        return (*room, plan.step_seconds * paid_gpus(plan, machine), plan.step_seconds)
    if goal == "smallest":
        return (room[0], plan.division.gpus, room[1], plan.step_seconds)
    return (*room, plan.step_seconds, plan.memory.total)


def _distinct(ranked: Iterable[Prediction]) -> list[Prediction]:
    """The best of each way to divide: five micro batches of one are not five choices."""
    seen: dict[tuple[int, ...], Prediction] = {}
    for plan in ranked:
        way = plan.division
        seen.setdefault((way.gpus, way.tp, way.pp, way.cp, way.ep, way.zero), plan)
        if len(seen) == BEST:
            break
    return list(seen.values())


def _reason(goal: Goal, best: Sequence[Prediction], machine: Machine) -> str:
    first, *_ = best
    gpu_seconds = [plan.step_seconds * paid_gpus(plan, machine) for plan in best]
    what = {
        "fastest": f"a step takes {first.step_seconds:.3g} s",
        "cheapest": f"a step takes {gpu_seconds[0] / 3600:.3g} GPU-hours of whole machines",
        "smallest": f"{first.division.gpus} GPUs are the fewest that do",
    }[goal]
    binds = f"; what takes longest is {first.binds[0]}" if first.binds else ""
    if len(best) == 1:
        return f"{what}{binds}; no other division fits"
    second, tight = best[1], best[1].fit == "tight" and first.fit == "fits"
    more = gpu_seconds[1] / gpu_seconds[0] - 1
    loses = f"needs {more:.1%} more GPU time" + (", and only just fits" if tight else "")
    if more < 0:
        loses = (
            f"needs {-more:.1%} less GPU time, but {'only just fits' if tight else 'not what the goal asks for first'}"
        )
    return f"{what}{binds}; the next best, {words(second.division)}, {loses}"


def words(way: Division) -> str:
    """A division in a few words: `tp 8, pp 4, dp 16, zero 1, micro 2`."""
    parts = [("tp", way.tp), ("pp", way.pp), ("virtual", way.virtual), ("cp", way.cp), ("ep", way.ep)]
    messages = [f"{name} {size}" for name, size in parts if size > 1]
    messages += [f"dp {way.dp}", f"zero {way.zero}", f"micro {way.micro}", f"recompute {way.recompute}"]
    return ", ".join([*messages, *([f"offload {way.offload}"] if way.offload != "none" else [])])


def _nearest(case: Case, machine: Machine, gpus: int | None) -> str:
    """What would fit: with less that is given, with offloading, or on more machines; with what a step takes then."""
    if gpus is None:
        return "a smaller network, sequence or micro batch; no count of these GPUs does"
    result = next((output for what, open_ in _loosened(case) if (output := _fitting(open_, machine, gpus, what))), "")
    offloading = ""
    if case.parallel.offload is None and ENGINES[case.engine].planned.offloads:
        offloading = _fitting(case, machine, gpus, "offload cpu", offloads=("cpu",))
    if result or offloading:
        return "; or ".join(filter(None, (result, offloading)))
    for power in range(1, GROWTH + 1):
        count = gpus * 2**power
        if count > MOST_GPUS:
            break
        open_ = case.model_copy(update={"parallel": case.parallel.model_copy(update={"dp": None})})
        if _may_fit(open_, machine, count) and (output := _fitting(open_, machine, count, f"{count} GPUs")):
            return output
    return "a smaller network, sequence or micro batch, GPUs with more memory, or less that is given in `parallel`"


def _loosened(case: Case) -> Iterator[tuple[str, Case]]:
    """The case with one thing open that it gives, what changes least first; in the end with the whole division open."""
    if case.recompute not in (None, "full"):
        yield "more recomputation", case.model_copy(update={"recompute": None})
    if case.batch.micro not in (None, 1):
        yield "a smaller batch.micro", case.model_copy(update={"batch": case.batch.model_copy(update={"micro": None})})
    if case.parallel.zero not in (None, 3):
        yield "another zero", case.model_copy(update={"parallel": case.parallel.model_copy(update={"zero": None})})
    if _divided(case):
        free = Parallel(offload=case.parallel.offload)
        batch = case.batch.model_copy(update={"micro": None})
        yield "another division", case.model_copy(update={"parallel": free, "recompute": None, "batch": batch})


def _fitting(case: Case, machine: Machine, gpus: int, what: str, offloads: Sequence[Offload] = OFFLOADS) -> str:
    """The quickest that fits, in words; empty: none does."""
    try:
        _, fit, _ = _of_count(case, machine, gpus, offloads)
    except ValueError:
        return ""
    if not fit:
        return ""
    best = min(fit, key=lambda plan: (bool(plan.needs), plan.step_seconds))
    return f"{what}: {words(best.division)}, {best.step_seconds:.3g} s a step"


def _say_why(case: Case, machine: Machine, gpus: int) -> None:
    """ValueError with what forbids the division that was asked for."""
    given = case.parallel
    tp, pp, cp = given.tp or 1, given.pp or 1, given.cp or 1
    rest, over = divmod(gpus, tp * pp * cp)
    if over or not rest:
        raise ValueError(f"tp {tp} x pp {pp} x cp {cp} do not divide {gpus} GPUs: change one of them")
    dp = given.dp or rest
    wanted = Division(
        tp=tp, pp=pp, cp=cp, dp=dp, virtual=given.virtual or 1, ep=given.ep or 1, zero=given.zero or 0,
        offload=given.offload or "none", micro=case.batch.micro or 1, precision=case.precision, engine=case.engine,
    )  # fmt: skip
    require_possible(case, wanted, machine, gpus=gpus)
    raise ValueError(
        f"batch.global {case.batch.global_} on {gpus} GPUs: no tp x pp x cp leaves a dp that divides it; "
        f"give a batch that divides by a power of two, or fewer GPUs"
    )
