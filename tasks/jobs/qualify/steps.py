"""One step of a plan, for real: this machine's group measures, all agree on what was found, and one rank of each group writes it.

A group that hangs or dies ends as a sweep that says so, at the latest after config.collective_seconds a collective; who does not
answer then is left out of what follows. On GPUs all ranks of a machine take part. On CPUs only local rank 0 does between two
machines: its ranks share the cores and the network interface, so more of them would measure each other.

`measure` is the group of collectives: within every machine, over all machines and over pairs. What is measured in which order is
plans.py.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast, get_args

import torch
from torch.distributed import DistStoreError

from tasks.config.qualification import Collective
from tasks.formats.nccl_run import transports
from tasks.formats.nccl_tests import read_nccl_tests
from tasks.jobs.qualify.bench import Bench
from tasks.jobs.qualify.plans import (
    PAIRS,
    Answer,
    Found,
    Group,
    Outcome,
    Plan,
    Standard,
    Step,
    better,
    collectives_plan,
    pairs_plan,
)
from tasks.jobs.qualify.sweeps import (
    DIVIDED,
    ELEMENT_BYTES,
    REDUCED,
    Communicator,
    Sweeping,
    Transports,
    backend,
    communicator,
    sweep,
    sweeping,
)
from tasks.qualification.measured import Probe, Row, Status, Sweep
from tasks.qualification.nccl_findings import rows_of

# The programs of nccl-tests or rccl-tests measure within a machine, in one process with all its GPUs: local rank 0
# runs them while the others leave their GPUs alone. torchrun started the ranks, so no launcher could start these
# programs on several machines; torch.distributed measures between machines.


PLACES = (
    "/opt/nccl-tests/build",
    "/opt/rccl-tests/build",
    "/usr/local/bin",
    "/opt/rocm/bin",
    "/usr/local/nccl-tests/build",
)
"""Where images have them beside PATH: Azure's HPC images build nccl-tests in /opt/nccl-tests."""
LAST_SECONDS = 5.0
"""For the last output of a program that was killed."""
OF_A_LAUNCHER = ("OMPI_", "PMI", "PMIX_", "SLURM_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_")
"""A program that was built with MPI takes these for its place in a job of several processes, and waits for the others."""


@dataclass(frozen=True)
class Ran:
    """What a program came to."""

    tool: str = ""
    """With its version, as far as it says so."""
    rows: tuple[Row, ...] = ()
    transport: tuple[str, ...] = ()
    failed: str = ""
    """Why its rows are not to be trusted, or not all there."""


def binary(collective: Collective, search: str | None = None) -> Path | None:
    """The program of a collective; None where there is none."""
    path = search if search is not None else os.pathsep.join((os.environ.get("PATH", ""), *PLACES))
    program = shutil.which(f"{collective}_perf", path=path)
    return Path(program) if program else None


def run_binary(program: Path, sizes: Sequence[int], *, gpus: int, seconds: float) -> Ran:
    """Run it on all GPUs of this machine: from the smallest to the largest size by factor 2, every element checked."""
    command = [str(program), "-b", str(sizes[0]), "-e", str(sizes[-1]), "-f", "2", "-g", str(gpus), "-c", "1"]
    # What a command printed, and why it did not end well.
    process = subprocess.Popen(
        command, env=alone(os.environ), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    try:
        text, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        try:
            text, _ = process.communicate(timeout=LAST_SECONDS)
        except subprocess.TimeoutExpired:  # it hangs in the driver, or a child holds the pipe
            text = ""
        output, why = text, f"timed out: {command[0]} took longer than {seconds:.0f} s"
    else:
        output, why = text, "" if process.returncode == 0 else f"{command[0]} ended with exit code {process.returncode}"
    print(output, flush=True)
    runs = read_nccl_tests(output, program.name)
    if not runs:
        return Ran(failed=why or "it printed no table")
    run = runs[-1]
    rows = rows_of(run)
    failed = why or "; ".join(run.failures) or ("" if rows else "it printed no rows")
    return Ran(f"{run.tool} {run.version}".strip(), rows, transports(output), failed)


def alone(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment without a place in a job; NCCL tells its transports on the standard output, and uses no log of the rank."""
    kept = {name: value for name, value in environment.items() if not name.startswith(OF_A_LAUNCHER)}
    kept.pop("NCCL_DEBUG_FILE", None)
    return {**kept, "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}


# Machines agree on their findings at the launcher's store, so that all take the same decisions, also when one is
# missing. Only local rank 0 of a machine writes; all its ranks read. The last to come publishes everything, so nobody
# polls the store; after a time-out whoever waited publishes what is there. The first publication holds.


LISTEN_SECONDS = 15.0
"""Longer that those who only listen wait, for others publish after their whole time."""


class LeftOut(Exception):
    """The others went on without this machine, or it hears nobody."""


def agree(bench: Bench, name: str, value: Any, *, among: Collection[int], seconds: float) -> dict[int, Any]:
    """What the machines `among`, by node rank, say under a name that is used once; without those that said nothing in time.

    The same on every rank. Raises LeftOut where this machine is not in it, and where nobody publishes.
    """
    if bench.node_rank not in among:
        raise LeftOut(f"{name}: {bench.node} is not among those that meet")
    deadline = time.monotonic() + seconds
    if bench.local_rank == 0:
        _say(bench, name, value, among, deadline)
    output = _agreed(bench, name, deadline - time.monotonic() + LISTEN_SECONDS)
    if bench.node_rank not in output:
        raise LeftOut(f"{name}: the others continued without {bench.node}, which did not answer within {seconds:.0f} s")
    return output


def recall(bench: Bench, name: str) -> dict[int, Any] | None:
    """What was agreed under a name; None where nothing was."""
    return _agreed(bench, name, 1.0) if bench.store.check([f"{name}/agreed"]) else None


def _say(bench: Bench, name: str, value: Any, among: Collection[int], deadline: float) -> None:
    store = bench.store
    store.set(f"{name}/{bench.node_rank}", json.dumps(value))
    if store.add(f"{name}/count", 1) < len(among):
        try:
            store.wait([f"{name}/agreed"], timedelta(seconds=max(0.1, deadline - time.monotonic())))
            return
        except DistStoreError:
            print(f"{name}: not all of {len(among)} machines answered in time", flush=True)
    output = {
        node: json.loads(store.get(f"{name}/{node}")) for node in sorted(among) if store.check([f"{name}/{node}"])
    }
    store.compare_set(f"{name}/agreed", "", json.dumps(output))


def _agreed(bench: Bench, name: str, seconds: float) -> dict[int, Any]:
    try:
        bench.store.wait([f"{name}/agreed"], timedelta(seconds=max(0.1, seconds)))
    except DistStoreError as error:
        raise LeftOut(f"{name}: nobody answered within {seconds:.0f} s: {error}") from error
    return {int(node): value for node, value in json.loads(bench.store.get(f"{name}/agreed")).items()}


# Results are printed as nccl-tests' output table, which people in the field know.


COLUMNS = "#{:>12}  {:>12}  {:>8}  {:>6}  {:>6}  {:>8}  {:>6}  {:>6}  {:>6}  {:>8}  {:>6}  {:>6}  {:>6}"


def begun(collective: Collective, *, tool: str, nodes: Sequence[str], ranks: int) -> str:
    """What stands above the rows."""
    places = "#{:>72}  {:>32}".format("out-of-place", "in-place")
    names = ("size", "count", "type", "redop", "root", *("time", "algbw", "busbw", "#wrong") * 2)
    units = ("(B)", "(elements)", "", "", "", *("(us)", "(GB/s)", "(GB/s)", "") * 2)
    return "\n".join(
        (
            f"# Collective test starting: {collective}_perf",
            f"# {tool}, {ranks} ranks on {', '.join(nodes)}",
            "#",
            places,
            COLUMNS.format(*names),
            COLUMNS.format(*units),
        )
    )


def line(collective: Collective, row: Row, ranks: int) -> str:
    """One size."""
    count = row.bytes // ELEMENT_BYTES // (ranks if collective in DIVIDED else 1)
    redop, root = "sum" if collective in REDUCED else "none", "0" if collective == "broadcast" else "-1"
    out = _cells(row.microseconds, row.algbw, row.busbw, row.wrong)
    local = _cells(row.microseconds_in_place, row.algbw_in_place, row.busbw_in_place, row.wrong_in_place)
    return COLUMNS.replace("#{:>12}", "{:>13}").format(row.bytes, count, "float", redop, root, *out, *local)


def ended(collective: Collective, rows: Sequence[Row]) -> str:
    """What stands below them."""
    wrong = sum(number for row in rows for number in (row.wrong, row.wrong_in_place) if number)
    rates = [rate for row in rows for rate in (row.busbw, row.busbw_in_place) if rate is not None]
    average = sum(rates) / len(rates) if rates else 0.0
    return "\n".join(
        (
            f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}",
            f"# Avg bus bandwidth    : {average:g}",
            "#",
            f"# Collective test concluded: {collective}_perf",
        )
    )


def _cells(microseconds: float | None, algbw: float | None, busbw: float | None, wrong: int | None) -> Iterator[str]:
    yield from ("N/A" if value is None else f"{value:.2f}" for value in (microseconds, algbw, busbw))
    yield "N/A" if wrong is None else str(wrong)


GRACE_SECONDS = 10.0
"""That a machine may be slower than another one between two steps."""
WORST: tuple[Status, ...] = ("timed out", "failed", "missing", "skipped", "measured")


def run(bench: Bench, group: str, plan: Plan[None], names: dict[int, str]) -> None:
    """Follow a plan to its end, among the machines `names`, by node rank."""
    living = tuple(names)
    try:
        step = next(plan)
        while True:
            mine = next((nodes for nodes in step.groups if bench.node_rank in nodes), None)
            sweeps: dict[Collective, Sweep] = {}
            if mine is not None and bench.rank.rank in participants(bench, step, mine):
                sweeps = _measure(bench, f"{group}/{step.name}", step, mine, names)
            seconds = bench.config.collective_seconds * len(step.collectives) + GRACE_SECONDS
            # What the others need of it: status, bus bandwidth by size, and what this machine's part went over.
            payload = {
                collective: [
                    item.status,
                    {row.bytes: row.busbw for row in item.rows if row.busbw is not None},
                    item.transport,
                ]
                for collective, item in sweeps.items()
            }
            output = agree(bench, f"{group}/{step.name}", payload, among=living, seconds=seconds)
            outcomes: dict[Collective, Found] = {
                collective: {
                    nodes: _together([output.get(node, {}).get(collective) for node in nodes]) for nodes in step.groups
                }
                for collective in step.collectives
            }
            if bench.local_rank == 0:
                _write(bench, step, outcomes, sweeps, output, names)
            answer = Answer(outcomes, tuple(output))
            living = answer.living
            step = plan.send(answer)
    except StopIteration:
        return
    except LeftOut as left:
        note_left_out(bench, group, left)


def names_of_all(bench: Bench, group: str) -> dict[int, str]:
    """The machines that are there, by node rank; only one where this one hears nobody."""
    try:
        everyone = range(bench.nodes)
        return agree(bench, f"{group}/start", bench.node, among=everyone, seconds=bench.config.check_seconds)
    except LeftOut as left:
        note_left_out(bench, group, left)
        return {}


def remembered(bench: Bench, group: str, name: str, nodes: Group, collective: Collective) -> Outcome | None:
    """The best that an earlier group of checks found over some machines in its steps `name`/N; None where it did not look."""
    best: Outcome | None = None
    for number in range(bench.config.rounds):
        output = recall(bench, f"{group}/{name}/{number}")
        if output is None or not set(nodes) <= set(output):
            break
        best = better(best, _together([output[node].get(collective) for node in nodes]))
    return best


def note_left_out(bench: Bench, group: str, left: LeftOut) -> None:
    """Write down that this machine met nobody, as a probe of the group."""
    print(left, flush=True)
    if bench.local_rank == 0:
        bench.note(Probe(check=group, status="timed out", said=str(left)))


def participants(bench: Bench, step: Step, nodes: Group) -> list[int]:
    """Ranks that measure."""
    each = bench.ranks_per_node if bench.cuda or step.scope in ("node", "all") else 1
    return [node * bench.ranks_per_node + local for node in nodes for local in range(each)]


def _measure(bench: Bench, name: str, step: Step, nodes: Group, names: dict[int, str]) -> dict[Collective, Sweep]:
    """All sweeps of a step over one group of machines; what comes after a failure is not tried in this group."""
    how = sweeping(bench.config, bench.sku, gpu=bench.cuda, every_size=step.scope != "pair")
    ranks, result = participants(bench, step, nodes), {}
    for collective in step.collectives:
        result[collective] = _blank(bench, step, collective, nodes, names, ranks=len(ranks))
    left = _by_binaries(bench, name, step, result, how) if bench.cuda and step.scope == "node" else step.collectives
    if left:
        _by_torch(bench, name, left, result, how, ranks)
    return result


def _by_torch(
    bench: Bench,
    name: str,
    collectives: Sequence[Collective],
    result: dict[Collective, Sweep],
    how: Sweeping,
    ranks: Sequence[int],
) -> None:
    done: list[Collective] = []
    try:
        heard = Transports(bench)
        with communicator(bench, f"{name}/{ranks[0]}", ranks, seconds=how.limit) as comm:
            for collective in collectives:
                rows: list[Row] = []
                try:
                    rows.extend(_printed(collective, how, comm, bench, result[collective]))
                finally:
                    status: dict[str, Any] = {"rows": tuple(rows), "transport": heard.used()}
                    result[collective] = result[collective].model_copy(update=status)
                done.append(collective)
    except RuntimeError as error:
        print(error, flush=True)
        text = str(error)
        late = "timed out" in text.lower() or "timeout" in text.lower()
        first = next(collective for collective in collectives if collective not in done)
        for collective in collectives:
            if collective not in done:
                output = text if collective == first else f"not tried: {first} before it: {text}"
                failed = {"status": "timed out" if late else "failed", "said": output[:1000]}
                result[collective] = result[collective].model_copy(update=failed)
    for collective in done:
        result[collective] = result[collective].model_copy(update={"status": "measured"})


def _printed(collective: Collective, how: Sweeping, comm: Communicator, bench: Bench, about: Sweep) -> Iterator[Row]:
    """The rows; the group's first rank prints the table of nccl-tests with them."""
    rows = []
    if comm.rank == 0:
        print(begun(collective, tool=about.tool, nodes=about.nodes, ranks=comm.size), flush=True)
    for row in sweep(collective, how, comm, bench):
        rows.append(row)
        if comm.rank == 0:
            print(line(collective, row, comm.size), flush=True)
        yield row
    if comm.rank == 0:
        print(ended(collective, rows), flush=True)


def _by_binaries(
    bench: Bench, name: str, step: Step, results: dict[Collective, Sweep], how: Sweeping
) -> tuple[Collective, ...]:
    """What nccl-tests' programs measure; the rest is left, also where a program printed nothing of use."""
    programs = {collective: binary(collective) for collective in step.collectives}
    torch.cuda.empty_cache()
    left: list[Collective] = []
    for collective, program in programs.items():
        ran = _ran(bench, f"{name}/{bench.node_rank}/{collective}", program, how) if program else Ran()
        if not ran.rows:
            left.append(collective)
            results[collective] = results[collective].model_copy(update={"said": ran.failed})
            continue
        status = "timed out" if ran.failed.startswith("timed out") else "failed" if ran.failed else "measured"
        result = {"tool": ran.tool, "rows": ran.rows, "transport": ran.transport, "status": status, "said": ran.failed}
        results[collective] = results[collective].model_copy(update=result)
    return tuple(left)


def _ran(bench: Bench, name: str, program: Any, how: Sweeping) -> Ran:
    """Local rank 0 runs the program; the others hear from it whether it measured."""
    if bench.local_rank == 0:
        ran = run_binary(program, how.sizes, gpus=bench.ranks_per_node, seconds=how.limit)
        bench.store.set(name, "rows" if ran.rows else "nothing")
        return ran
    output = bench.store.get(name)  # waits; the store's own limit is config.check_seconds
    return Ran(rows=(Row(bytes=0),)) if output == b"rows" else Ran()


def _blank(
    bench: Bench, step: Step, collective: Collective, nodes: Group, names: dict[int, str], *, ranks: int
) -> Sweep:
    return Sweep(
        collective=collective,
        scope=step.scope,
        nodes=tuple(names[node] for node in nodes),
        ranks=ranks,
        backend=backend(bench),
        tool=f"torch {torch.__version__}",
        status="timed out",
        said="",
        round=step.round,
    )


def _together(entries: Sequence[Any]) -> Outcome:
    """Of a group: the worst status of its machines, and a member's rates; all of them have the same. Silence is a time-out."""
    statuses: list[Status] = [cast(Status, one[0]) if one else "timed out" for one in entries]
    rates: dict[str, float] = next((one[1] for one in entries if one), {})
    assert set(statuses) <= set(get_args(Status)), statuses
    return Outcome(min(statuses, key=WORST.index), {int(size): rate for size, rate in rates.items()})


def _write(
    bench: Bench,
    step: Step,
    outcomes: dict[Collective, Found],
    sweeps: dict[Collective, Sweep],
    output: dict[int, Any],
    names: dict[int, str],
) -> None:
    """The first machine of each group that still answers; of a group of which none does, the first of all."""
    for collective, item in outcomes.items():
        for nodes, outcome in item.items():
            answered = [node for node in nodes if node in output]
            if bench.node_rank != min(answered or output):
                continue
            blank = _blank(bench, step, collective, nodes, names, ranks=len(participants(bench, step, nodes)))
            mine = sweeps[collective] if answered else blank
            silent = ", ".join(names[node] for node in nodes if node not in answered)
            used = {one for node in answered if collective in output[node] for one in output[node][collective][2]}
            about = {
                "status": outcome.status,
                "said": f"{silent} did not answer; {mine.said}" if silent else mine.said,
                "transport": tuple(sorted(used)),
            }
            # Where there is only one machine, what it measured within itself is also what all machines measured
            # together.
            result = mine.model_copy(update=about)
            bench.sweep(result)
            if result.scope == "node" and bench.nodes == 1:
                bench.sweep(result.model_copy(update={"scope": "all"}))


GROUP = "collectives"


def measure(bench: Bench) -> None:
    """Write the sweeps, where there are several ranks."""
    if bench.world_size == 1:
        return
    names = names_of_all(bench, GROUP)
    if not names:
        return
    standard = Standard(bench.config, bench.sku)
    run(bench, GROUP, collectives_plan(tuple(names), standard, ranks_per_node=bench.ranks_per_node), names)


PAIRS_GROUP = "pairs"


def measure_pairs(bench: Bench) -> None:
    """Write the sweeps, where there are several machines."""
    if bench.nodes == 1:
        return
    names = names_of_all(bench, PAIRS_GROUP)
    if not names:
        return
    # Machines of one switch come one after another, so that neighbours are near; as they are numbered where none is known.
    seconds = bench.config.check_seconds
    try:
        switches = agree(bench, f"{PAIRS_GROUP}/switches", bench.switch, among=tuple(names), seconds=seconds)
    except LeftOut as left:
        note_left_out(bench, PAIRS_GROUP, left)
        return
    nodes = tuple(sorted(switches, key=lambda node: (switches[node], node)))
    together = remembered(bench, GROUP, "all", nodes, PAIRS[0])
    run(bench, PAIRS_GROUP, pairs_plan(nodes, Standard(bench.config, bench.sku), together=together), names)
