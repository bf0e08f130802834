"""How far the clocks of machines are apart, asked through the launcher's store, as NTP asks: half of a round trip is the bound.

The first machine asks the others, one after another, a few times; the shortest round trip counts. What is noted is how far a
clock is from the median of the others for sure: less than the bound says nothing.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

from torch import distributed

from tasks.jobs.qualify.bench import Bench
from tasks.qualification.measured import Probe

TIMES = 5
ANSWER_SECONDS = 5.0
"""A machine that said that it is there answers at once."""


class Offset(NamedTuple):
    """Of a machine's clock from the first one's, in seconds."""

    seconds: float
    bound: float
    """Half of the round trip in which it was read."""


def note(bench: Bench, clock: Callable[[], float] = time.time) -> None:
    """Note `time_skew` of this machine. With one machine there is nothing to compare."""
    if bench.nodes < 2:
        bench.note(Probe(check="time_skew", status="skipped", said="one machine has no other to be compared with"))
        return
    store, mine = bench.store, bench.node_rank
    try:
        result = (
            ask_all(store, bench.nodes, clock, seconds=bench.config.check_seconds)
            if mine == 0
            else answer(store, mine, clock, seconds=bench.config.check_seconds)
        )
    except RuntimeError as error:  # the store's own, of a key that did not come in time
        bench.note(Probe(check="time_skew", status="timed out", said=str(error).splitlines()[0][:200]))
        return
    bench.note(_probe(result, mine))


def ask_all(store: distributed.Store, nodes: int, clock: Callable[[], float], *, seconds: float) -> dict[int, Offset]:
    """What the first machine does: offsets of all machines that answer, its own included; all can read them."""
    existing = _come(store, nodes, seconds)
    asked = {node: _ask(store, node, clock) for node in existing}
    result = {0: Offset(0.0, 0.0)} | {node: offset for node, offset in asked.items() if offset}
    store.set("skew/offsets", json.dumps(result))
    return result


def answer(store: distributed.Store, node: int, clock: Callable[[], float], *, seconds: float) -> dict[int, Offset]:
    """What the other machines do. Raises RuntimeError when the first machine does not ask, or ends."""
    store.set(f"skew/{node}/here", "")
    for number in range(
        TIMES
    ):  # the first machine waits so long for those that are away, and then asks one after another
        _await(store, f"skew/{node}/{number}/ask", 2 * seconds)
        store.set(f"skew/{node}/{number}/say", repr(clock()))
    _await(store, "skew/offsets", 2 * seconds)
    return {int(at): Offset(*offset) for at, offset in json.loads(store.get("skew/offsets")).items()}


def apart(offsets: dict[int, Offset], node: int) -> Offset:
    """A machine's offset from the others' median, and the widest bound of what it rests on."""
    others = [offset.seconds for at, offset in offsets.items() if at != node]
    bound = max(offset.bound for offset in offsets.values())
    return Offset(offsets[node].seconds - statistics.median(others), bound)


def _come(store: distributed.Store, nodes: int, seconds: float) -> list[int]:
    """Machines that are there; waited for together, so that one that is away costs the time once."""
    deadline, missing = time.monotonic() + seconds, set(range(1, nodes))
    while missing and time.monotonic() < deadline:
        missing -= {node for node in missing if store.check([f"skew/{node}/here"])}
        time.sleep(0.005 if missing else 0)
    return sorted(set(range(1, nodes)) - missing)


def _ask(store: distributed.Store, node: int, clock: Callable[[], float]) -> Offset | None:
    """A machine's offset; None when it came, and then said nothing."""
    offsets = []
    for number in range(TIMES):
        before, began = clock(), time.monotonic()
        store.set(f"skew/{node}/{number}/ask", "")
        try:
            _await(store, f"skew/{node}/{number}/say", ANSWER_SECONDS)
        except RuntimeError:
            return None
        theirs, trip = float(store.get(f"skew/{node}/{number}/say")), time.monotonic() - began
        offsets.append(Offset(theirs - (before + trip / 2), trip / 2))
    return min(offsets, key=lambda offset: offset.bound)


def _await(store: distributed.Store, key: str, seconds: float) -> None:
    store.wait([key], timedelta(seconds=seconds))


def _probe(offsets: dict[int, Offset], node: int) -> Probe:
    if node not in offsets or len(offsets) < 2:
        return Probe(check="time_skew", status="timed out", said="no other machine answered in time")
    off = apart(offsets, node)
    surely = max(0.0, abs(off.seconds) - off.bound)
    text = f"{off.seconds * 1000:+.1f} ms from the median of the others, known to {off.bound * 1000:.1f} ms"
    return Probe(check="time_skew", measured=surely, unit="s", said=text)
