"""A rank at the bench: what it reads, where it writes what it measured, how it meets the others, and how a rate is measured.

Ranks meet at the launcher's key-value store, not in a collective: a rank that does not come is missing after a time limit, and
the others go on. Each rank writes `out/ranks/R.json` anew with everything that it measured, each sweep is a file of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from torch import cuda, distributed

from tasks.common.process import write_json
from tasks.config.qualification import BenchmarkConfig
from tasks.config.training import TrainingConfig
from tasks.hardware.sku import Sku
from tasks.jobs.node.runtime import Rank
from tasks.planning.case import Network
from tasks.planning.counts import model_flops_per_token, parameter_count
from tasks.qualification.measured import Probe, RankReport, Status, Sweep, TrainingPoint

POLL_SECONDS = 0.05
RANKS_AT_FULL_POLL = 512
"""More ranks than this ask less often: the launcher's store is one thread."""

LEAVE_SECONDS = 30.0


def switch_of(environment: Mapping[str, str]) -> str:
    """The switches above this machine, from the top to its own, where Slurm knows them; else empty.

    SLURM_TOPOLOGY_ADDR has them with the machine's name behind, SLURM_TOPOLOGY_ADDR_PATTERN says what each part is (slurmd,
    in the environment of a step; slurm.schedmd.com/topology.html). Without a topology only the machine's name is there.
    """
    address = environment.get("SLURM_TOPOLOGY_ADDR", "").split(".")
    above = len(environment.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")) - 1
    return ".".join(address[:above])


class Bench:
    """State: what this rank found so far, and its connection to the store."""

    def __init__(self, rank: Rank) -> None:
        payload = rank.settings
        self.rank = rank
        self.config = BenchmarkConfig.model_validate(payload["benchmark"])
        self.sku = Sku.model_validate(payload["sku"])
        self.training = TrainingConfig.model_validate(payload["training"])
        self.threads = int(payload["threads"])
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.node_rank = rank.rank // self.ranks_per_node
        self.node = os.environ.get("HEADWAY_NODE_NAME") or socket.gethostname()
        self.switch = switch_of(os.environ)
        self.cuda = cuda.is_available()
        self._store: distributed.Store | None = None
        self._absent: set[int] = set()
        """Ranks that did not come the last time."""
        self._report = RankReport(
            rank=rank.rank,
            local_rank=self.local_rank,
            node=self.node,
            host=socket.gethostname(),
            machine={"switch": self.switch} if self.switch else {},
        )
        self._write()

    @property
    def world_size(self) -> int:
        return self.rank.world_size

    @property
    def nodes(self) -> int:
        """Machines of the job."""
        return self.world_size // self.ranks_per_node

    def note(
        self, *probes: Probe, versions: dict[str, str] | None = None, machine: dict[str, str] | None = None
    ) -> None:
        """Write down what was found, at once."""
        self._report = self._report.model_copy(
            update={
                "probes": (*self._report.probes, *probes),
                "versions": {**self._report.versions, **(versions or {})},
                "machine": {**self._report.machine, **(machine or {})},
            }
        )
        self._write()

    def sweep(self, sweep: Sweep) -> None:
        """Write down a sweep; one of its ranks does. A second one over the same machines has another round."""
        nodes = "+".join(sweep.nodes)
        who = f"{self.rank.rank}-{nodes[:80]}-{hashlib.sha256(nodes.encode()).hexdigest()[:8]}"
        self._piece("sweeps", f"{sweep.collective}-{sweep.scope}-{sweep.round}-{who}", sweep.model_dump(mode="json"))

    def trained(self, point: TrainingPoint) -> None:
        """Write down a training probe; its first rank does."""
        self._piece("training", f"{point.ranks}-{self.rank.rank}", point.model_dump(mode="json"))

    @contextmanager
    def group(self, name: str) -> Iterator[None]:
        """A group of checks: in the progress, and in `done` when it came to its end."""
        self.rank.progress(len(self._report.done), len(self.config.groups), name)
        yield
        self._report = self._report.model_copy(update={"done": (*self._report.done, name)})
        self._write()

    def share(self, name: str, value: Any, *, seconds: float) -> dict[int, Any]:
        """What every rank says under a name, by rank; without those that said nothing in time. `name` is used once.

        Who did not come once is not waited for again, only taken when it is there: a dead rank costs its time limit once.
        A counter is what ranks look at while they wait, for at thousands of ranks the store is busy enough.
        """
        if self.world_size == 1:
            return {0: value}
        store, deadline = self.store, time.monotonic() + seconds
        keys = {rank: f"{name}/{rank}" for rank in range(self.world_size)}
        awaited = [key for rank, key in keys.items() if rank not in self._absent or rank == self.rank.rank]
        store.set(keys[self.rank.rank], json.dumps(value))
        output = store.add(f"{name}/count", 1)
        while (output < len(awaited) or not store.check(awaited)) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS * max(1.0, self.world_size / RANKS_AT_FULL_POLL))
            output = store.add(f"{name}/count", 0)
        existing = keys if output == len(keys) else {rank: key for rank, key in keys.items() if store.check([key])}
        self._absent = set(keys) - set(existing)
        return {
            rank: json.loads(text)
            for rank, text in zip(existing, store.multi_get(list(existing.values())), strict=True)
        }

    def leave(self, *, seconds: float) -> None:
        """Meet for the last time. Rank 0 goes last: without torchrun the store ends with its process."""
        existing = self.share("end", True, seconds=seconds)
        if self.world_size == 1:
            return
        deadline, gone = time.monotonic() + LEAVE_SECONDS, self.store.add("gone", 1)
        while self.rank.rank == 0 and gone < len(existing) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            gone = self.store.add("gone", 0)

    @property
    def store(self) -> distributed.Store:
        """The launcher's store, under a prefix of its own; process groups are made on it too."""
        if self._store is None:
            result, _, _ = next(distributed.rendezvous("env://", timeout=timedelta(seconds=self.config.check_seconds)))
            self._store = distributed.PrefixStore("headway-qualify", result)
        return self._store

    def _piece(self, folder: str, name: str, value: dict[str, Any]) -> None:
        path = self.rank.output / folder / f"{''.join(c if c.isalnum() or c in '+-._' else '_' for c in name)}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, value)

    def _write(self) -> None:
        self._piece("ranks", str(self.rank.rank), self._report.model_dump(mode="json"))


# The training run to come: its network's size and FLOPs, by tasks/planning.


VOCABULARY = 32_000
"""Entries where nobody says: the tokenizer may not be trained yet. That of Llama 2."""


def vocabulary(bench: Bench) -> int:
    """Entries of the vocabulary, as the job's settings say (`vocab_size`)."""
    return int(bench.rank.settings.get("vocab_size", VOCABULARY))


def parameters(bench: Bench) -> int:
    """Of the configured network."""
    return parameter_count(_network(bench), bench.training.sequence_length)


def flops_per_token(bench: Bench) -> int:
    """By Megatron-LM's convention."""
    return model_flops_per_token(_network(bench), bench.training.sequence_length)


def _network(bench: Bench) -> Network:
    return Network.of_config(bench.training.network, vocabulary(bench))


# All ranks measure a rate at the same time, in windows, and measure again while a rank is slow against its peers.
# Each part's best round counts: other work comes and goes and spares some round; throttling and a defective part
# spare none.


WINDOW_SECONDS = 0.5
"""Longer than a scheduler's quota period (0.1 s), so that a throttled rank shows its average rate in every window."""
WARMUP_SECONDS = 0.2
LEAST_SHARE = 0.1
"""Of a window that must have been computed: with less, what the part itself does cannot be told from the rest."""
CPU_ROUNDS = 2
"""Times as many rounds where ranks compute on CPUs: other work comes and goes there more often than on a GPU."""
LAST_MEETING_SECONDS = 1.0
"""Time for the others when the group's own is over."""


class Rate(NamedTuple):
    """Amounts a second, of one part: a rank's core, a GPU."""

    rate: float
    """By the clock: what a training step gets."""
    on_core: float
    """Without the time that the rank was ready and other work had its core: what the part itself does. 0: not known."""


class Outcome(NamedTuple):
    """Of one check on one rank: a rate a part, or why there is none."""

    rates: tuple[Rate, ...] = ()
    status: Status = "measured"
    said: str = ""
    each: tuple[tuple[Rate, ...], ...] = ()
    """What every measurement came to, where each is made several times (config.repeats)."""


class Together:
    """State of one group on one rank: when its time is over."""

    def __init__(self, bench: Bench, group: str) -> None:
        self.bench, self.group = bench, group
        self.limit = bench.config.check_seconds
        self._ends = time.monotonic() + self.limit

    @property
    def left(self) -> float:
        """Seconds of the group's time."""
        return self._ends - time.monotonic()

    @property
    def late(self) -> str:
        """What a probe says that did not get its turn."""
        return f"the group's {self.limit:g} s (benchmark.check_seconds) were over"

    def meet(self, name: str, value: Any = True) -> dict[int, Any]:
        """What all ranks that come say, by rank. Half of the time is left to those that came when one does not."""
        return self.bench.share(f"{self.group}/{name}", value, seconds=max(self.left / 2, LAST_MEETING_SECONDS))

    def best(self, check: str, measure: Callable[[], Sequence[Rate]]) -> Outcome:
        """Each part's best round; all ranks measure at the same time, config.repeats times, and again while somebody is slow.
        A rank on which it fails comes to the meetings still."""
        best = Outcome(status="timed out", said=self.late)
        for number in range(self.bench.config.rounds * (1 if self.bench.cuda else CPU_ROUNDS)):
            if self.left <= 0:
                break
            self.meet(f"{check}/{number}/ready")
            best = self._with(best, tried(measure))
            everyone = self.meet(f"{check}/{number}/rates", [rate.on_core for rate in best.rates])
            if number + 1 < self.bench.config.repeats:
                continue
            if not any_behind([rate for rates in everyone.values() for rate in rates], self.bench.config.min_of_peers):
                break
        return best

    def repeated(self, measure: Callable[[], Sequence[Rate]]) -> Outcome:
        """The best of config.repeats measurements of this rank alone, as far as the time goes."""
        best = Outcome(status="timed out", said=self.late)
        for _ in range(self.bench.config.repeats):
            if self.left > 0:
                best = self._with(best, tried(measure))
        return best

    def _with(self, best: Outcome, new: Outcome) -> Outcome:
        each = (*best.each, new.rates) if new.rates and self.bench.config.repeats > 1 else best.each
        return _better(best, new)._replace(each=each)

    def note(
        self,
        check: str,
        unit: str,
        outcome: Outcome,
        *,
        where: Sequence[str],
        per: float,
        text: str = "",
        compared: bool = True,
    ) -> None:
        """Write a probe a part; `per` are the amounts of one unit. `compared`: with the same part of other machines."""
        if not outcome.rates:
            self.bench.note(Probe(check=check, status=outcome.status, unit=unit, said=outcome.said))
        for number, (part, (rate, on_core)) in enumerate(zip(where, outcome.rates, strict=False)):
            peers = on_core / per if on_core and compared else None
            each = tuple(rates[number].on_core / per for rates in outcome.each) if peers else ()
            self.bench.note(
                Probe(check=check, measured=rate / per, peers=peers, each=each, unit=unit, where=part, said=text)
            )


def tried(measure: Callable[[], Sequence[Rate]]) -> Outcome:
    """A measurement, or the first line of why it failed: torch's errors of a device are RuntimeErrors."""
    try:
        return Outcome(tuple(measure()))
    except RuntimeError as error:
        return Outcome(status="failed", said=(str(error).splitlines() or [type(error).__name__])[0])


def _better(one: Outcome, two: Outcome) -> Outcome:
    """Part by part; a failure does not count where there was a measurement."""
    if not one.rates or not two.rates:
        return two if two.rates or not one.rates else one
    return Outcome(tuple(max(pair, key=lambda rate: rate.on_core) for pair in zip(one.rates, two.rates, strict=True)))


def any_behind(rates: Sequence[float], share: float) -> bool:
    """Whether a part is slower than its share of the median of the others: if any is, the slowest is."""
    slowest, *others = sorted(rate for rate in rates if rate) or [0.0]
    return bool(others) and slowest < share * statistics.median(others)


def steady(windows: Sequence[Rate]) -> Rate:
    """The best of some windows: a moment's disturbance spares some window; throttling spares none."""
    return Rate(max(window.rate for window in windows), max(window.on_core for window in windows))


def measure_windows(once: Callable[[], object], amount: float, seconds: float) -> list[Rate]:
    """Repeat some work that amounts to so much; one average a window of about half a second, after a warm-up.

    A window that was stopped midway counts the time that it stood still, in both rates.
    """
    _repeat_for(WARMUP_SECONDS, once)
    count = max(1, round(seconds / WINDOW_SECONDS))
    windows = []
    for _ in range(count):
        waited = _waited_for_a_core()
        times, elapsed = _repeat_for(seconds / count, once)
        computed = elapsed - (_waited_for_a_core() - waited)
        on_core = amount * times / computed if computed >= LEAST_SHARE * elapsed else 0.0
        windows.append(Rate(rate=amount * times / elapsed, on_core=on_core))
    return windows


def _waited_for_a_core() -> float:
    """Seconds that the main thread was ready to run and other work had its core, since it began.

    Second field of Linux's /proc/self/schedstat, in ns (Documentation/scheduler/sched-stats.rst); 0 where there is none.
    A stopped process is not ready, so what a throttled rank loses is not in it.
    """
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def _repeat_for(seconds: float, once: Callable[[], object]) -> tuple[int, float]:
    began, times = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - began) < seconds or not times:
        once()
        times += 1
    return times, elapsed
